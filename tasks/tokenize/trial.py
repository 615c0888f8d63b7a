"""A tokenizer that a file defines is tried in a process of its own: its patterns may go on for ever, take all memory or end the
process, and it may leave out text.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from flat_tokens.stores.local import kind_of
from flat_tokens.vocabulary import LONE_SPACE, PATTERNS, Ranks, SentencePieceModel, TokenizerJson, is_file_name, resolve
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import is_visible
from tasks.tokenize.probes import awkward_texts

RARE = 32
"""Characters of all scripts that may have no tokens: libraries know different versions of Unicode."""

BATCH_BYTES = 16 << 20
"""More text than is tokenized at a time by a thread."""


NORMALIZED = (
    "tokenizer {!r}: its normalizer makes {:,} characters of {!r}, so that a batch of text may need more than "
    "tokenizer.max_memory = {:,} bytes. Use another one, or raise it."
)
PASSED_OVER = (
    "{}: pattern {!r} passes over a part of {!r}, so that text would be lost. Set tokenizer.pattern to one that takes all text, "
    "or to one of {}."
)
LOST = (
    "tokenizer {!r} has no tokens for {!r} in {!r}, so that text would be lost. Use one that has an unknown token or all "
    "bytes, or set tokenizer.lossy to true."
)


def try_out(config: TokenizerConfig) -> str | None:
    """The fault of a tokenizer from a file, with its setting, if it multiplies or leaves out text. ValueError if even loading
    it takes too much time or memory. Other errors of loading are left to the loader.
    """
    if not is_from_a_file(config.name):
        return None
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    command, settings = [sys.executable, "-m", __name__], config.model_dump_json().encode()
    try:
        done = subprocess.run(  # noqa: S603
            command, input=settings, env=variables, capture_output=True, timeout=config.max_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"tokenizer {config.name!r} takes more than {config.max_seconds} seconds for some kB of text. Its pattern may go "
            "back again and again: use another one, or raise tokenizer.max_seconds."
        ) from error
    if done.returncode != 0:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line and not line.startswith("note:")]
        raise ValueError(
            f"tokenizer {config.name!r} ends its process on a little text (status {done.returncode}: {''.join(said[-1:])[:200]})."
            f" Use another one; if it needs more memory than tokenizer.max_memory = {config.max_memory:,} bytes, raise that."
        )
    fault: str | None = json.loads(done.stdout.splitlines()[-1])
    return fault


def fault_of(config: TokenizerConfig) -> str | None:
    """The fault of a tokenizer as `try_out` returns it, found in this process, which its library may hold up or end."""
    with contextlib.suppress(ValueError, ImportError):  # whoever loads the tokenizer hears of it then
        match resolve(config.name, pattern=config.pattern, revision=config.revision, pin=True):
            case Ranks(pattern=str()) as ranks:
                encode, decode = ranks.encoding.encode_ordinary, ranks.encoding.decode
                lost = next((text for text, _ in _probes() if decode(encode(text)) != text), None)
                if lost is not None and not config.lossy:
                    return PASSED_OVER.format(config.name, ranks.pattern, lost[:20], ", ".join(PATTERNS))
            case TokenizerJson() as definition:
                return _fault_of_json(definition, config)
            case SentencePieceModel() as pieces:
                return _fault_of_pieces(pieces, config)
    return None


def is_from_a_file(name: str) -> bool:
    """Whether a tokenizer is defined by a file, and is not one of the published encodings."""
    return is_file_name(name) or "/" in name or kind_of(name) == "directory"


def _fault_of_json(definition: TokenizerJson, config: TokenizerConfig) -> str | None:
    """The fault of a tokenizer.json: its normalizer multiplies text, or visible text has no tokens. None if there is none."""
    tokenizer, rules = definition.tokenizer, json.dumps(definition.definition.get("normalizer"))
    strings = [text for found in re.findall(r'"String": ("(?:[^"\\]|\\.)+")', rules) if (text := json.loads(found))]
    for text in (*_visible_characters(), *strings) if tokenizer.normalizer else ():
        if (size := len(tokenizer.normalizer.normalize_str(text))) > config.max_memory // BATCH_BYTES * len(text):
            return NORMALIZED.format(config.name, size, text[:20], config.max_memory)
    rare: set[str] = set()
    for text, is_rare in (*_probes(), *((string, False) for string in strings)):
        with contextlib.suppress(Exception):  # a text that is not taken is a bad document, which the build reports
            taken = bytearray(len(text))
            for start, stop in tokenizer.encode(text, add_special_tokens=False).offsets:
                taken[start:stop] = b"\1" * (stop - start)
            lost = "".join(one for one, seen in zip(text, taken, strict=True) if not seen and is_visible(one))
            if tokenizer.normalizer and tokenizer.encode(lost, add_special_tokens=False).ids:
                continue  # it made something else of them
            rare.update(lost if is_rare else ())
            if lost and not config.lossy and (not is_rare or len(rare) > RARE):
                return LOST.format(config.name, lost[:20], text[:20])
    return None


def _fault_of_pieces(definition: SentencePieceModel, config: TokenizerConfig) -> str | None:
    """The fault of a model: its pieces show to what a text is normalized."""
    encode, characters = definition.processor.encode, _some_of_all_scripts()
    rare: set[str] = set()
    alone = zip(characters, encode(characters, out_type=str, num_threads=1), strict=True)
    texts = [text for text, is_rare in _probes() if not is_rare and any(map(is_visible, text))]
    others = zip(texts, encode(texts, out_type=str, num_threads=1), strict=True)
    for text, pieces in (*alone, *others):
        if (size := sum(map(len, pieces))) > config.max_memory // BATCH_BYTES * len(text):
            return NORMALIZED.format(config.name, size, text[:20], config.max_memory)
        if not "".join(pieces).strip(LONE_SPACE) and not config.lossy:
            rare.add(text)
            if len(text) > 1 or text.isascii() or len(rare) > RARE:
                return LOST.format(config.name, text[:20], text[:20])
    return None


def _probes() -> Iterator[tuple[str, bool]]:
    """Awkward texts, their words, long runs that make patterns go back; and, as rare ones, characters of all scripts."""
    for text in (*awkward_texts(), *(chr(unit) * 1000 + "\0" for unit in range(0x20, 0x7F))):
        yield from ((part, False) for part in (text, *text.split()))
    characters = _some_of_all_scripts()
    for start in range(0, len(characters), 64):
        yield from ((between.join(characters[start : start + 64]), True) for between in ("", " "))


@cache
def _visible_characters() -> list[str]:
    return [character for character in map(chr, range(0x32000)) if is_visible(character)]


@cache
def _some_of_all_scripts() -> list[str]:
    return [one for i, one in enumerate(_visible_characters()) if one < "\u3400" or i % 8 == 0]  # ideographs are many


if __name__ == "__main__":
    chosen = TokenizerConfig.model_validate_json(sys.stdin.read())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * chosen.max_seconds, 2 * chosen.max_seconds))  # if nobody waits any more
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler waits for the library
    with contextlib.suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_DATA, (chosen.max_memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    print(json.dumps(fault_of(chosen)))
