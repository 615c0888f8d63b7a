"""The tokenizer.json files that the fast engine is known to encode exactly as ``tokenizers`` does: an allow-list.

Options of normalizers and pre-tokenizers are read from the loaded tokenizer, so that every one which ``tokenizers`` knows, now or
later, is there with its value; names of all others are compared with the file. An option or value that is not listed here leaves
all text to the reference engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flat_tokens.annotations import JsonFacts, JsonObject
from flat_tokens.vocabulary import TokenizerJson, byte_level_alphabet, steps_of

MAX_ID = 1 << 24
"""The fast engine's tables have an entry for each id up to the highest."""

_WORD, _NO_WORD, _END = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+|{_NO_WORD}|{_END}"
LLAMA3 = rf"{_CASELESS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_NO_WORD}[\r\n]*|\s*[\r\n]+|{_END}"
QWEN2 = rf"{_CASELESS}|{_WORD}\p{{L}}+|\p{{N}}|{_NO_WORD}[\r\n]*|\s*[\r\n]+|{_END}"
QWEN35 = rf"{_CASELESS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_END}"
GPT4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CASELESS}?|{_WORD}{_UPPER}+{_LOWER}*{_CASELESS}?|\p{{N}}{{1,3}}|{_NO_WORD}[\r\n/]*|"
    rf"\s*[\r\n]+|{_END}"
)
NEMOTRON = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_NO_WORD}[\r\n/]*|\s*[\r\n]+|{_END}"
PATTERNS = (GPT2, LLAMA3, QWEN2, QWEN35, GPT4O, NEMOTRON)
"""Patterns that the fast engine has by heart. Each matches every character, so that no text is between its matches."""
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
"""Patterns that it has by heart where they split in order. They tell symbols from unassigned characters."""


def _split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX = {"type": "Prepend", "prepend": "▁"}
_METASPACES = [
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
    for scheme in ("first", "always", "never")
    for split in (False, True)
]
BYTE_LEVEL: list[list[JsonObject]] = [
    [{**_BYTES, "use_regex": True}],
    [{**_BYTES, "use_regex": True, "add_prefix_space": True}],
    *[[_split(pattern, *how), _BYTES] for pattern in PATTERNS for how in (("Isolated", False), ("Removed", True))],
    [*map(_split, DEEPSEEK), _BYTES],
]
"""Pre-tokenizers after which each character of a vocabulary is a byte."""
WITH_SPACES: list[tuple[list[JsonObject], list[JsonObject]]] = [
    ([_PREFIX, _SPACES], []),  # Llama 2
    ([_SPACES], []),
    ([_SPACES], [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]),  # Gemma
    *[([], [metaspace]) for metaspace in _METASPACES],  # Mistral
]
"""Normalizers and pre-tokenizers after which the vocabulary has characters, and a space is ``▁``."""
OPTIONS = {
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
}
"""Of a model of byte pairs. The unknown token is never used where every byte has a token."""
ADDED = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}
"""Of an added token."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that are in no UTF-8."""

LONGEST = 256
"""Characters of an added token, at most."""
POST_PROCESSORS = {"ByteLevel", "RobertaProcessing", "BertProcessing", "TemplateProcessing"}
"""Those that only add special tokens."""


class NotKnownError(ValueError):
    """The fast engine is not known to encode as a definition says; the message is the reason."""


class FastDefinition(NamedTuple):
    """A definition for the fast engine. ``is_nfc``: text is to be in NFC, which the fast engine does not see to.
    ``tells_letters``, ``tells_symbols``: its pattern distinguishes letters, and symbols, from unassigned characters.
    """

    json: str
    is_nfc: bool
    tells_letters: bool
    tells_symbols: bool


class _AddedToken(NamedTuple):
    """An added token. ``match``: the text that it is found by, normalized if the token is."""

    id: int
    token: Any
    match: str


def fast_definition(of: TokenizerJson) -> FastDefinition:
    """The definition for the fast engine. NotKnownError if it is not known to give the tokens of ``tokenizers``."""
    normalizers, pre_tokenizers = _steps(of.tokenizer.normalizer), _steps(of.tokenizer.pre_tokenizer)
    model, added = _model(of), _added_tokens(of)
    _check_post_processor(of.tokenizer.post_processor)
    _check_added(added, model["vocab"])
    is_byte_level = bool(pre_tokenizers) and pre_tokenizers[-1]["type"] == "ByteLevel"
    if is_byte_level:
        if any(step != {"type": "NFC"} for step in normalizers):
            raise NotKnownError(f"its normalizer is {_shown(normalizers)}")
        if pre_tokenizers not in BYTE_LEVEL:
            raise NotKnownError(f"its pre-tokenizer is {_shown(pre_tokenizers)}")
        model = _model_of_bytes(model)
        _check_added_to_bytes(added, model["vocab"], adds_space=pre_tokenizers[0].get("add_prefix_space", False))
    elif (normalizers, pre_tokenizers) in WITH_SPACES:
        _check_characters(model)
    else:
        raise NotKnownError(f"its normalizer is {_shown(normalizers)}, its pre-tokenizer {_shown(pre_tokenizers)}")
    tokens = [
        {
            "id": i,
            "content": match if is_byte_level else token.content,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized and not is_byte_level,
            "special": False,
        }
        for i, token, match in added
        if not token.special
    ]
    steps = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    definition = {
        "added_tokens": tokens,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers and not is_byte_level else None,
        "pre_tokenizer": pre_tokenizers[0] if len(pre_tokenizers) == 1 else steps if pre_tokenizers else None,
        "model": model,
    }
    return FastDefinition(
        json=json.dumps(definition),
        is_nfc=is_byte_level and bool(normalizers),
        tells_letters=is_byte_level,
        tells_symbols=is_byte_level and len(pre_tokenizers) > len(DEEPSEEK),
    )


def _steps(part: Any) -> list[JsonObject]:
    """The steps of a loaded normalizer or pre-tokenizer, in order; ``trim_offsets``, which changes no token, is always true."""
    steps = () if part is None else steps_of(json.loads(part.__getstate__()))
    return [{**step, "trim_offsets": True} if "trim_offsets" in step else step for step in steps]


def _shown(steps: list[JsonObject]) -> str:
    """Steps for people to read, shortened."""
    texts = (f"{step['type']}({', '.join(f'{key}={value!r}' for key, value in step.items() if key != 'type')})" for step in steps)
    text = " + ".join(texts) or "none"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _model(of: TokenizerJson) -> JsonObject:
    """The model, with the options that may matter as they were loaded. NotKnownError if it has others."""
    model, listed = of.tokenizer.model, of.definition["model"]
    if type(model).__name__ != "BPE":
        raise NotKnownError(f"its model is {type(model).__name__}, not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if value := getattr(model, option):
            raise NotKnownError(f"its model has {option} {value!r}")
    if unknown := listed.keys() - OPTIONS - {"type", "vocab", "merges"}:
        raise NotKnownError(f"its model has the option {min(unknown)}")
    if "" in listed["vocab"]:
        raise NotKnownError("its vocabulary has a token without text")
    if len(set(listed["vocab"].values())) < len(listed["vocab"]):
        raise NotKnownError("its vocabulary has two tokens with the same id")
    merges = [
        tuple(pair.split(" ") if isinstance(pair, str) else pair)
        for pair in listed["merges"]
        if not (isinstance(pair, str) and pair.startswith("#version"))
    ]
    if len(set(merges)) < len(merges):
        raise NotKnownError("its model has the same merge twice")
    options = {"byte_fallback": model.byte_fallback, "ignore_merges": model.ignore_merges}
    return {"type": "BPE", "vocab": listed["vocab"], "merges": merges, **options}


def _check_post_processor(part: Any) -> None:
    """Refuse one that does more than to add special tokens, for which it is not asked."""
    state: JsonObject = {} if part is None else json.loads(part.__getstate__())
    for step in state.get("processors", [state] if state else []):
        of_text = [piece["Sequence"]["id"] for piece in step.get("single", ()) if "Sequence" in piece]
        if step["type"] not in POST_PROCESSORS or (step["type"] == "TemplateProcessing" and of_text != ["A"]):
            raise NotKnownError(f"its post-processor is {_shown([step])}")


def _added_tokens(of: TokenizerJson) -> list[_AddedToken]:
    """The added tokens as they were loaded. NotKnownError if the file lists an option that is not known, or a text twice."""
    listed = of.added_tokens
    if unknown := {option for token in listed for option in token} - ADDED:
        raise NotKnownError(f"its added tokens have the option {min(unknown)}")
    if len({token["content"] for token in listed}) < len(listed):
        raise NotKnownError("two of its added tokens have the same text")
    normalize = of.tokenizer.normalizer.normalize_str if of.tokenizer.normalizer else str
    return [
        _AddedToken(i, token, normalize(token.content) if token.normalized else token.content)
        for i, token in of.tokenizer.get_added_tokens_decoder().items()
    ]


def _check_added(added: list[_AddedToken], vocabulary: Mapping[str, int]) -> None:
    """NotKnownError if the fast engine would find added tokens at other places than ``tokenizers``."""
    highest = max((*vocabulary.values(), *(i for i, _, _ in added)), default=0)
    if highest >= MAX_ID:
        raise NotKnownError(f"it has token ids up to {highest}")
    for _, token, match in added:
        if len(match) > LONGEST:
            raise NotKnownError(f"its added token {match[:20]!r}... has {len(match)} characters")
        if token.single_word and not token.special:
            raise NotKnownError(f"its added token {match!r} has single_word")
    if len({(token.normalized, match) for _, token, match in added}) < len(added):
        raise NotKnownError("two of its added tokens are the same when they are normalized")
    used = [(token, match) for _, token, match in added if not token.special]
    if any(token.lstrip or token.rstrip for token, _ in used) and (spaces := [of for _, of in used if of.strip() != of]):
        raise NotKnownError(f"its added tokens have lstrip or rstrip, and {spaces[0]!r} is one that has spaces at an end")
    # ``tokenizers`` finds special tokens and leaves them to the model, with all that they cover. The fast engine has none.
    for normalized in (False, True):
        special, others = (
            [of for _, token, of in added if token.normalized == normalized and token.special == is_special]
            for is_special in (True, False)
        )
        if found := _cover(special, others):
            raise NotKnownError("its special token {!r} may cover a part of its added token {!r}".format(*found))


def _cover(firsts: list[str], seconds: list[str]) -> tuple[str, str] | None:
    """A pair: one of *firsts* that may overlap the begin of one of *seconds* in a text and so hide it, and that second one."""
    by_start = {second[:k]: second for second in seconds for k in range(1, len(second) + 1)}
    whole, lengths = set(seconds), sorted({*map(len, seconds)})
    for first in firsts if seconds else ():
        for k in range(len(first)):
            rest = first[k:]
            if k and rest in by_start:  # at the same place the longer one is found
                return first, by_start[rest]
            if hidden := next((rest[:length] for length in lengths if length <= len(rest) and rest[:length] in whole), None):
                return first, hidden
    return None


def _model_of_bytes(model: JsonFacts) -> JsonObject:
    """A model whose characters are bytes, without the tokens that no text gives: those of other characters."""
    alphabet = byte_level_alphabet()
    missing = [value for value, character in enumerate(alphabet) if character not in model["vocab"] and value not in NEVER]
    if missing:
        raise NotKnownError(f"its vocabulary has no token for the byte {missing[0]:#04x}")
    is_of_bytes = frozenset(alphabet).issuperset
    vocabulary = {token: i for token, i in model["vocab"].items() if is_of_bytes(token)}
    merges = [pair for pair in model["merges"] if pair[0] in vocabulary and pair[1] in vocabulary]
    if len({one + other for one, other in merges}) < len(merges):
        # Two merges make the same token, whose id does not say which is first. A merge that is repeated at the end has no effect,
        # but it makes the fast engine go by the order of merges.
        merges.append(merges[0])
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": model["ignore_merges"]}


def _check_added_to_bytes(added: list[_AddedToken], vocabulary: Mapping[str, int], *, adds_space: bool) -> None:
    """Refuse added tokens that a search for all of them at once, as the fast engine's, does not find as two searches do."""
    alphabet = byte_level_alphabet()
    raw, normalized = ([of for _, token, of in added if not token.special and token.normalized == is_] for is_ in (False, True))
    if found := _cover(raw, normalized) or _cover(normalized, raw):
        raise NotKnownError("its added tokens {!r} and {!r} may overlap, and one of them is normalized".format(*found))
    for i, token, of in added:
        if not token.special and adds_space and of.startswith(" "):
            raise NotKnownError(f"its pre-tokenizer adds a space, and its added token {of!r} begins with one")
        if not token.special and len(data := of.encode()) == 1 and i < vocabulary[alphabet[data[0]]]:
            raise NotKnownError(f"its added token {of!r} has a lower id than the byte")


def _check_characters(model: JsonFacts) -> None:
    """Refuse a model of characters that does not fall back to bytes, or has tokens of bytes which are more than that."""
    vocabulary = model["vocab"]
    if not model["byte_fallback"]:
        raise NotKnownError("its model has no byte_fallback, and its pre-tokenizer does not end with ByteLevel")
    if model["ignore_merges"]:
        raise NotKnownError("its model has ignore_merges with byte_fallback")
    expected = {f"<0x{value:02X}>": value for value in range(256)}
    for token in filter(BYTE_TOKEN.fullmatch, vocabulary):
        if token not in expected:
            raise NotKnownError(f"its vocabulary has the token {token!r}, which is not a byte's")
    for token, value in expected.items():
        if token not in vocabulary and value not in NEVER and (value > 0x7F or chr(value) not in vocabulary):
            raise NotKnownError(f"its vocabulary has no token for the byte {value:#04x}")
    if found := next((pair for pair in model["merges"] if not expected.keys().isdisjoint((*pair, "".join(pair)))), None):
        raise NotKnownError(f"its model merges {found[0]!r} and {found[1]!r}: one is the token of a byte, or both together are")
