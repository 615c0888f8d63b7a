"""Tokenizers by name, each with a reference engine and, where one is known, a fast engine that must agree with it.

An engine takes an Arrow array of texts and gives flat token ids with offsets; a fast one never makes a Python object
per document. Text that looks like a special token is ordinary text in every engine.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.batch import MAX_TOKEN_ID
from tasks.models import TokenizerConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tokens(NamedTuple):
    """Token ids of many texts: uint32[n], writable; text i is ``ids[offsets[i]:offsets[i + 1]]``, int64[m + 1]."""

    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]


Encode = Callable[[pa.LargeStringArray], Tokens]

R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS = {"gpt2": R50K, "r50k_base": R50K, "cl100k_base": CL100K, "o200k_base": O200K}
"""Published split patterns, by the encoding that uses them: ``pattern`` may name one instead of spelling it out."""

FAST_SCHEMES = {R50K: "gpt2", CL100K: "gpt4", O200K: "o200k"}
"""The fast engine's name for a pattern. It has no other patterns: there the reference engine works alone."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. ``digest`` covers every byte that decides its tokens; ``make_fast`` makes one engine a thread."""

    name: str
    digest: str
    highest_id: int
    reference: Encode
    make_fast: Callable[[], Encode] | None
    decode: Callable[[list[int]], str]
    revision: str | None = None


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load a tokenizer, once a process. ValueError, with the next step, where the name means nothing or the vocabulary
    does not fit the format; nothing that a file says is ever run as code.
    """
    tokenizer = _load(config)
    if tokenizer.highest_id > MAX_TOKEN_ID:
        raise ValueError(
            f"tokenizer {config.name!r} has token ids up to {tokenizer.highest_id}, but the format holds 0 to {MAX_TOKEN_ID}"
        )
    if tokenizer.make_fast is not None:
        importlib.import_module("awkward")  # half a second, spent where the caller may have other work under way
    return tokenizer


@lru_cache(maxsize=8)
def _load(config: TokenizerConfig) -> Tokenizer:
    name, path = config.name, Path(config.name)
    if name == "bytes":
        return _bytes_tokenizer()
    if path.suffix == ".tiktoken":
        return _tiktoken_file(config, path)
    if path.suffix == ".json" or path.is_dir():
        return _tokenizer_json(name, _read_tokenizer_file(path / "tokenizer.json" if path.is_dir() else path))
    import tiktoken

    if name in tiktoken.list_encoding_names():
        return _tiktoken_encoding(name)
    if name.count("/") == 1 and not path.is_absolute() and ".." not in path.parts:
        return _hub_tokenizer(config)
    raise ValueError(
        f"there is no tokenizer {name!r}. Set tokenizer to one of {', '.join(tiktoken.list_encoding_names())}, bytes, "
        "a .tiktoken file, a tokenizer.json, or a hub repository such as openai-community/gpt2."
    )


def _read_tokenizer_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def _bytes_tokenizer() -> Tokenizer:
    """The reference's byte tokenizer: byte value + 1."""

    def encode(texts: pa.LargeStringArray) -> Tokens:
        data, offsets = text_buffers(texts)
        ids = data[offsets[0] : offsets[-1]].astype(np.uint32)
        ids += np.uint32(1)
        return Tokens(ids, offsets - offsets[0])

    def decode(ids: list[int]) -> str:
        return bytes(i - 1 for i in ids).decode("utf-8", "replace")

    return Tokenizer("bytes", hashlib.sha256(b"bytes: value + 1").hexdigest(), 256, encode, None, decode)


def _tiktoken_encoding(name: str) -> Tokenizer:
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raised: the name is right, the vocabulary cannot be had
        raise ValueError(
            f"the vocabulary of {name!r} cannot be loaded ({type(error).__name__}). Without a network, set "
            "TIKTOKEN_CACHE_DIR to a directory that has it, or name a .tiktoken file."
        ) from error
    return _from_encoding(name, encoding)


def _tiktoken_file(config: TokenizerConfig, path: Path) -> Tokenizer:
    import tiktoken

    if config.pattern is None:
        raise ValueError(
            f"{path} holds ranks, not the pattern that splits text before merging. Set tokenizer.pattern to the pattern, or to "
            f"the encoding whose it is: {', '.join(PATTERNS)}."
        )
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(_read_tokenizer_file(path).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: is not 'base64 rank' ({error})") from error
        if not 0 <= rank <= MAX_TOKEN_ID:
            raise ValueError(f"{path}, line {number}: token id {rank} is not one of 0 to {MAX_TOKEN_ID}, which the format holds")
        if token in ranks or rank in taken:
            raise ValueError(f"{path}, line {number}: token {token!r} or its id {rank} has been on a line before")
        ranks[token] = rank
        taken.add(rank)
    if missing := [value for value in range(256) if bytes([value]) not in ranks]:
        raise ValueError(f"{path}: has no token for the byte {missing[0]:#04x}; every byte needs one")
    try:
        encoding = tiktoken.Encoding(
            path.stem, pat_str=PATTERNS.get(config.pattern, config.pattern), mergeable_ranks=ranks, special_tokens={}
        )
        lost = next((text for text in awkward_texts() if encoding.decode(encoding.encode_ordinary(text)) != text), None)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be used with pattern {config.pattern!r}: {error}") from error
    if lost is not None:
        raise ValueError(
            f"{path}: pattern {config.pattern!r} passes over a part of {lost[:20]!r}, so that text would be lost. Set "
            f"tokenizer.pattern to one that takes all text, or to one of {', '.join(PATTERNS)}."
        )
    return _from_encoding(path.name, encoding)


def _from_encoding(name: str, encoding: Any) -> Tokenizer:
    ranks, pattern = encoding._mergeable_ranks, encoding._pat_str
    rank_file = b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in sorted(ranks.items(), key=lambda item: item[1]))

    def encode_one(text: str) -> npt.NDArray[np.uint32]:
        return encoding.encode_to_numpy(text, disallowed_special=())  # type: ignore[no-any-return]

    def encode(texts: pa.LargeStringArray) -> Tokens:
        return concatenate(map(encode_one, texts.to_pylist()))

    def make_fast() -> Encode:
        import gigatoken

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "ranks.tiktoken")
            path.write_bytes(rank_file)
            # No special tokens: text that looks like one is text.
            return gigatoken_encode(gigatoken.Tokenizer.from_tiktoken(path, FAST_SCHEMES[pattern], special_tokens={}))

    digest = hashlib.sha256(pattern.encode() + b"\0" + rank_file).hexdigest()
    fast = make_fast if pattern in FAST_SCHEMES and max(ranks.values()) == len(ranks) - 1 else None
    return Tokenizer(name, digest, max(ranks.values()), encode, fast, encoding.decode)


def _hub_tokenizer(config: TokenizerConfig) -> Tokenizer:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        # A branch or tag is pinned first: two processes of one build read the same commit.
        commit = HfApi(endpoint=endpoint).model_info(config.name, revision=config.revision).sha
        path = hf_hub_download(config.name, "tokenizer.json", revision=commit, endpoint=endpoint)
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the tokenizer {config.name!r} cannot be had from the hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or name a tokenizer.json."
        ) from error
    return _tokenizer_json(config.name, Path(path).read_bytes(), commit)


def _tokenizer_json(name: str, data: bytes, revision: str | None = None) -> Tokenizer:
    import tokenizers

    try:
        definition = json.loads(data)
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{name} is not a tokenizer.json that 'tokenizers' {tokenizers.__version__} loads: {error}") from error
    if (definition.get("model") or {}).get("dropout"):
        raise ValueError(f"{name}: the model has dropout {definition['model']['dropout']}, so its tokens are random")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)

    def encode(texts: pa.LargeStringArray) -> Tokens:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        return concatenate(np.array(encoding.ids, np.uint32) for encoding in encodings)

    # The fast engine would take a special token's text for the token: it does not get to know them.
    plain = {
        **definition,
        "added_tokens": [token for token in definition.get("added_tokens") or [] if not token.get("special")],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }

    def make_fast() -> Encode:
        import gigatoken

        return gigatoken_encode(gigatoken.Tokenizer.from_json(json.dumps(plain)))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Tokenizer(
        name, hashlib.sha256(data).hexdigest(), max(vocabulary.values(), default=0), encode, make_fast, decode, revision
    )


def text_buffers(texts: pa.LargeStringArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes and offsets of an Arrow array of texts without nulls: uint8[n], int64[m + 1]. No copy."""
    _, offsets, data = texts.buffers()
    window = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1] if offsets else np.zeros(1, np.int64)
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), window


def large_string_array(*texts: str) -> pa.LargeStringArray:
    """Texts as an array; ``pa.array`` would import pandas first, which takes longer than a small build."""
    parts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, parts)])
    return pa.LargeStringArray.from_buffers(len(parts), pa.py_buffer(offsets), pa.py_buffer(b"".join(parts)))


def concatenate(arrays: Iterable[npt.NDArray[np.uint32]]) -> Tokens:
    """Flat ids and offsets of one array a text."""
    parts = list(arrays)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Tokens(np.concatenate([*parts, np.empty(0, np.uint32)]).astype(np.uint32, copy=False), offsets)


def gigatoken_encode(tokenizer: Any) -> Encode:
    """The fast engine over Arrow's own buffers."""
    import awkward as ak

    def encode(texts: pa.LargeStringArray) -> Tokens:
        data, offsets = text_buffers(texts)
        if not len(texts):
            return Tokens(np.empty(0, np.uint32), np.zeros(1, np.int64))
        characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), characters, parameters={"__array__": "string"})
        # parallel=False: the task runner already has a thread for every core.
        layout = tokenizer.encode_batch(ak.Array(strings), parallel=False).layout
        ids, starts = np.asarray(layout.content.data), np.asarray(layout.offsets)
        return Tokens(ids[starts[0] : starts[-1]], starts - starts[0])

    return encode


def awkward_texts() -> Iterator[str]:
    """Texts on which tokenizers have been seen to differ."""
    yield from (
        "",
        " ",
        "\ufeff",
        "\0",
        "a\0b",
        "\r\n",
        "a\r\nb\r\n\r\nc",
        "\t's",
        "'S 'LL 'Ve 'rE don't DON'T i'M",
        "  lead",
        "trail  ",
    )
    for unit in (" ", "\n", "\t", "\r\n", "a", "A", "7", "-", "😀", "中", "あ", "é", "e\u0301", "\u200d", "'s", " \n"):
        yield unit * (10_000 // len(unit))
    yield " ".join("1234567890123456789012"[:n] for n in range(1, 21))
    yield "x = 3.14159; y = 1e-10; z = 0xDEADBEEF; 1,000,000.00 ½ ² ٣ ७"
    yield "e\u0301a\u0308o\u0302\u0303 \u0939\u093f\u0928\u094d\u0926\u0940 n\u0303 Z\u0351\u036b\u0343a\u0328lgo"
    yield "שלום עולם، مرحبا بالعالم \u202bright to left\u202c \u2067isolate\u2069"
    yield "".join(chr(point) for point in range(0x20, 0x3000, 7))
    yield "".join(chr(plane << 16 | low) for plane in range(17) for low in (0, 1, 0x80, 0xFF, 0x1F600 & 0xFFFF, 0xFFFD))
    yield "<|endoftext|> <|endofprompt|><|fim_prefix|>x<|fim_suffix|>y<|im_start|>user<|im_end|></s><s>[INST]<pad><unk>[CLS][SEP]"
    yield base64.b64encode(hashlib.sha512(b"flat").digest() * 40).decode()
    yield "def f(x):\n\treturn {\n\t\t'a': x[0],\n    }  # ok\n\n\n\n\nclass  A :  pass\n" * 5
    yield "https://example.org/a?b=c&d=%20#e user@example.org CamelCase snake_case kebab-case SCREAMING_CASE 50% $100 #tag @me"


def first_difference(texts: Iterable[str], one: Encode, other: Encode) -> str | None:
    """The first text that two engines tokenize differently, given all at once, shortened for people; None where they agree."""
    compared = list(texts)
    array = large_string_array(*compared)
    (ids, offsets), (others, other_offsets) = one(array), other(array)
    for i, text in enumerate(compared):
        if not np.array_equal(ids[offsets[i] : offsets[i + 1]], others[other_offsets[i] : other_offsets[i + 1]]):
            return text if len(text) <= 60 else f"{text[:57]}..."
    return None


class UnencodableError(ValueError):
    """What an engine says of texts that it does not take."""


def sheltered(encode: Encode) -> Encode:
    """The same engine, whose every failure is an UnencodableError: libraries raise bare exceptions, and in Rust they panic,
    which is no Exception at all.
    """

    def encode_or_say_why(texts: pa.LargeStringArray) -> Tokens:
        try:
            return encode(texts)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            raise UnencodableError(f"{type(error).__name__}: {error}") from error

    return encode_or_say_why


class Engine:
    """The engine a build uses: the fast one, one instance a thread and bounded in memory, or the reference."""

    def __init__(self, tokenizer: Tokenizer, fast: bool) -> None:
        self.name = "fast" if fast else "reference"
        self._tokenizer = tokenizer
        self._threads = threading.local()

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        """Tokens of all texts together. UnencodableError where the engine does not take one of them."""
        if self.name == "reference" or self._tokenizer.make_fast is None:
            return sheltered(self._tokenizer.reference)(texts)
        state = self._threads.__dict__
        if "encode" not in state or (state["bytes"] > RENEW_AFTER_BYTES and resident_bytes() > RESIDENT_LIMIT):
            # An instance remembers every word that it has seen, without end: a thread whose share of the memory is
            # used up starts anew. Dropping the old one first keeps two from standing side by side.
            state.pop("encode", None)
            state.update(encode=sheltered(self._tokenizer.make_fast()), bytes=0)
        state["bytes"] += texts.nbytes
        return state["encode"](texts)  # type: ignore[no-any-return]

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        """Of each text alone its tokens, or why there are none. Where the fast engine fails the reference has its say."""
        for i in range(len(texts)):
            text = texts.slice(i, 1)
            try:
                try:
                    yield self(text)
                except UnencodableError:
                    self._threads.__dict__.clear()  # what a failure has left of an instance is not used again
                    yield sheltered(self._tokenizer.reference)(text)
            except UnencodableError as error:
                yield f"tokenizer {self._tokenizer.name!r} cannot encode the document ({error})"


RENEW_AFTER_BYTES = 32 << 20
RESIDENT_LIMIT = 1100 << 20


def resident_bytes() -> int:
    """Anonymous memory of this process; where the system does not tell, enough to renew after each stretch of text."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return RESIDENT_LIMIT + 1


_engines: dict[tuple[str, bool], Engine] = {}
_engines_lock = threading.Lock()


def engine_of(tokenizer: Tokenizer, fast: bool) -> Engine:
    """The process's engine for a tokenizer: what it has learned of a language is worth keeping between slices."""
    with _engines_lock:
        return _engines.setdefault((tokenizer.digest, fast), Engine(tokenizer, fast))


def may_use_fast_engine(tokenizer: Tokenizer, preference: str, samples: Iterable[str]) -> bool:
    """Whether there is a fast engine and it gives the reference's tokens on *samples* and on the awkward texts.

    A difference is a warning that shows the text: the build goes on, slower and right.
    """
    if preference != "auto" or tokenizer.make_fast is None:
        return False
    texts = [*samples, *awkward_texts()]
    try:
        difference = first_difference(texts, sheltered(tokenizer.make_fast()), sheltered(tokenizer.reference))
    except Exception as error:  # noqa: BLE001  # an engine that cannot load this, or stumbles over a text, is not used
        difference = f"({error})" if isinstance(error, UnencodableError) else f"({type(error).__name__}: {error})"
    if difference is not None:
        logger.warning(
            "The fast engine does not give the tokens of %s on %r: using the slower reference engine.", tokenizer.name, difference
        )
    return difference is None
