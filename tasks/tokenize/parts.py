"""Texts in parts to tokens with a loss mask: ordinary text, and special tokens between. A token counts if one of its characters
does.

The reference tokenizes each text as a whole, and knows the place of each token in it. An engine tokenizes the ordinary parts of
many texts together: the places of its tokens follow from the bytes that they stand for.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Bools, Int64s, IntPair, JsonFacts, UInt8s, UInt32s
from flat_tokens.rows.views import running_sums
from flat_tokens.text.rows import text_buffers
from flat_tokens.vocabulary import (
    LONE_SPACE,
    ByteValues,
    Definition,
    PieceKind,
    Ranks,
    SentencePieceModel,
    TokenizerJson,
    fields,
    known_of,
    resolve,
    steps_of,
)
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Encoder, Tokens, UnencodableError, is_visible, joined, with_timeout
from tasks.tokenize.rendering.processes import BadText, TextParts
from tasks.tokenize.rendering.request import ORDINARY

SPECIAL, NUMBERS = "\U0001ffff", 0xF0000
"""The reference's name of a special token: the first, which is in no text, and the character of its number."""
NO_WIDTH = 1 << 40
"""For a token that does not tell which bytes it stands for: more than a text has."""
PRINTABLE = re.compile(r"[!-~]+")
"""Text that a model spells as it is."""
MAY_COMBINE = 0xCC
"""The first byte of the first character that may change in NFC, which is U+0300. Lower ones do not."""


class EncodedText(NamedTuple):
    """The tokens of one text, and the place of each in it, in characters: uint32[n], int64[n, 2]."""

    ids: UInt32s
    places: Int64s


class OneText(NamedTuple):
    """A text in parts: each an ordinary text, or the number of a special token. ``spans``: the places of what counts, in
    characters, if a special token has two.
    """

    parts: list[str | int]
    spans: list[IntPair]


class MaskedTexts(NamedTuple):
    """Tokens of texts: none of those that are refused, whose ``faults`` are there by their numbers."""

    tokens: Tokens
    faults: dict[int, BadText]


Speak = Callable[[Sequence[OneText]], Iterable[EncodedText]]


class PartEncoder:
    """Tokens and masks of texts in parts. *engine*: tokenizes the ordinary parts; None: the reference tokenizes everything.
    ``specials``: the special tokens, by their strings. ``by_reference``: texts that the reference had to tokenize.
    """

    def __init__(self, config: TokenizerConfig, engine: Encoder | None) -> None:
        definition = resolve(config.name, pattern=config.pattern, revision=config.revision, pin=True)
        self.specials = special_tokens(definition)
        self.by_reference = 0
        self._config, self._definition = config, definition
        self._ids = np.array([*self.specials.values()], np.uint32)
        self._engine = engine if has_independent_parts(definition) else None
        self._greedy = np.array(_with_own_space(definition, self.specials), np.int64)
        self._widths: Widths | None = None
        self._speak: Speak | None = None

    def __call__(self, texts: TextParts) -> MaskedTexts:
        """The tokens of texts. The reference tokenizes those that the engine does not take, or whose tokens do not tell their
        places.
        """
        tokens, others, faults = None, list(range(len(texts.counts))), dict(texts.faults)
        if self._engine is not None:
            with contextlib.suppress(UnencodableError):
                tokens, unknown = self._by_engine(texts, self._engine)
                unplaced = np.searchsorted(running_sums(texts.counts), np.flatnonzero(unknown), "right") - 1
                empty = np.flatnonzero((np.diff(tokens.offsets) == 0) & (texts.counts > 0))
                others = np.union1d(unplaced, empty).tolist()
        by_reference = self._by_reference(texts, [i for i in others if i not in faults])
        if tokens is not None and not by_reference and not faults:
            return MaskedTexts(tokens, faults)
        faults |= {i: found for i, found in by_reference.items() if isinstance(found, BadText)}
        none = no_tokens(1)
        parts: list[Tokens] = []
        for i in range(len(texts.counts)):
            own = by_reference.get(i)
            parts.append(none if i in faults else own if isinstance(own, Tokens) else one_of(tokens, i))
        return MaskedTexts(joined([no_tokens(0), *parts]), faults)

    def _by_engine(self, texts: TextParts, engine: Encoder) -> tuple[Tokens, Bools]:
        """The tokens of all texts, and which parts the reference has to tokenize, bool[p]."""
        is_text = texts.kinds == ORDINARY
        found = engine(texts.texts)
        # (text, part of it) -> part; (part, token of it) -> token: each follows all earlier ones
        lengths = np.ones(len(is_text), np.int64)
        lengths[is_text] = np.diff(found.offsets)
        ends = running_sums(lengths)
        is_special = np.zeros(int(ends[-1]), bool)
        is_special[ends[:-1][~is_text]] = True
        ids = np.empty(len(is_special), np.uint32)
        ids[is_special], ids[~is_special] = self._ids[texts.kinds[~is_text]], found.ids
        mask, unknown = self._mask(texts, ids, is_special, ends)
        if len(self._greedy):
            unknown |= np.isin(texts.kinds, self._greedy)
        return Tokens(ids, ends[running_sums(texts.counts)], mask), unknown

    def _mask(self, texts: TextParts, ids: UInt32s, is_special: Bools, ends: Int64s) -> tuple[UInt8s, Bools]:
        """Which tokens count, uint8[n], and for which parts that is unknown, bool[p]. *ends*: the ends of the parts in tokens."""
        widths = texts.widths
        places = running_sums(widths)
        unknown = np.zeros(len(widths), bool)
        spans = texts.spans[texts.spans[:, 0] < texts.spans[:, 1]]
        # place -> part, and how far within it
        part = np.searchsorted(places, spans, "right") - 1
        within = spans - places[part]
        first, last = ends[part].T.copy()  # of a part that begins at this place
        inner = within > 0
        if inner.any():
            self._widths = self._widths or Widths(self._definition)
            begin = running_sums(self._widths.of(ids, is_special))
            extra = begin[ends[1:]] - begin[ends[:-1]] - widths
            unknown[part[inner]] = ~self._widths.is_right(extra[part[inner]])
            unknown |= self._widths.changes(texts, unknown.copy(), part[inner])
            at = begin[ends[part]] + np.append(extra, 0)[part] + within
            # The first token that ends after the place, and the first that begins at it or after it.
            first = np.where(inner[:, 0], np.searchsorted(begin[1:], at[:, 0], "right"), first)
            last = np.where(inner[:, 1], np.searchsorted(begin[:-1], at[:, 1], "left"), last)
            known = ~(inner & np.append(unknown, False)[part]).any(axis=1)  # the others would be somewhere in other texts
            first, last = first[known], last[known]
        edges = np.concatenate([[0], first, last, [len(ids)]])
        opens = np.concatenate([[0], np.ones_like(first), np.full_like(last, -1), [0]])
        order = np.argsort(edges, kind="stable")
        depths = np.cumsum(opens[order])[:-1]  # spans may overlap
        return np.repeat((depths > 0).astype(np.uint8), np.diff(edges[order])), unknown

    def _by_reference(self, texts: TextParts, numbers: list[int]) -> dict[int, Tokens | BadText]:
        """The tokens of some texts, or why there are none."""
        if not numbers:
            return {}
        self.by_reference += len(numbers)
        found: dict[int, Tokens | BadText] = {}
        some = dict(zip(numbers, texts_of(texts, numbers), strict=True))
        for i in numbers:
            if any(SPECIAL in part for part in some[i].parts if isinstance(part, str)):
                found[i] = BadText("unencodable", "it holds U+1FFFF, which is not a character")
                del some[i]
        try:
            return found | self._spoken(some, texts.texts)
        except UnencodableError:
            for i, one in some.items():
                try:
                    found |= self._spoken({i: one}, texts.texts)
                except UnencodableError as error:
                    found[i] = BadText("unencodable", str(error))
        return found

    def _spoken(self, some: Mapping[int, OneText], texts: pa.LargeStringArray) -> dict[int, Tokens | BadText]:
        """The tokens of some of the *texts*, whose length says how long they may take."""
        spoken: list[EncodedText] = []

        def encode(_: pa.LargeStringArray) -> Tokens:
            self._speak = self._speak or _speaker(self._definition, self._ids)
            try:
                spoken[:] = self._speak([*some.values()])
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:  # libraries panic in Rust, which is no Exception
                raise UnencodableError(f"{type(error).__name__}: {error}") from error
            return Tokens(np.empty(0, np.uint32), np.zeros(len(texts) + 1, np.int64))

        with_timeout(encode, self._config.model_copy(update={"lossy": True}))(texts)
        found: dict[int, Tokens | BadText] = {}
        for (i, one), (ids, places) in zip(some.items(), spoken, strict=True):
            if not self._config.lossy and not len(ids) and any(map(is_visible, "".join(map(str, one.parts)))):
                found[i] = BadText("unencodable", "it has no tokens for any of it; tokenizer.lossy allows that")
            else:
                found[i] = Tokens(ids, np.array([0, len(ids)]), _mask(one.spans, places))
        return found


def no_tokens(count: int) -> Tokens:
    """The tokens of texts that have none."""
    return Tokens(np.empty(0, np.uint32), np.zeros(count + 1, np.int64), np.empty(0, np.uint8))


def one_of(tokens: Tokens | None, i: int) -> Tokens:
    """The tokens of text *i* alone."""
    assert tokens is not None
    assert tokens.mask is not None
    start, stop = int(tokens.offsets[i]), int(tokens.offsets[i + 1])
    return Tokens(tokens.ids[start:stop], np.array([0, stop - start]), tokens.mask[start:stop])


def texts_of(texts: TextParts, numbers: Iterable[int]) -> Iterator[OneText]:
    """Some of the texts, one by one, in characters."""
    parts, ordinary = running_sums(texts.counts), running_sums(texts.kinds == ORDINARY)
    places = running_sums(texts.widths)[parts]
    spans = np.searchsorted(texts.spans[:, 0], places)  # those of a text follow those of all earlier ones
    spans[-1] = len(texts.spans)
    for i in numbers:
        strings = iter(texts.texts[ordinary[parts[i]] : ordinary[parts[i + 1]]].to_pylist())
        in_bytes = texts.spans[spans[i] : spans[i + 1]] - places[i]
        own, characters = list[str | int](), dict[int, int]()  # byte -> character
        borders = np.unique(in_bytes).tolist()[::-1]  # the next one is the last
        at = length = 0
        for kind in texts.kinds[parts[i] : parts[i + 1]].tolist():
            part = kind if kind != ORDINARY else next(strings)
            data = part.encode() if isinstance(part, str) else b"  "
            while borders and borders[-1] < at + len(data):
                border = borders.pop()
                characters[border] = length + len(data[: border - at].decode())
            own.append(part)
            at, length = at + len(data), length + (len(part) if isinstance(part, str) else 2)
        characters |= dict.fromkeys(borders, length)
        yield OneText(own, [(characters[start], characters[stop]) for start, stop in in_bytes.tolist()])


class Widths:
    """The bytes of text of each token of an engine, as far as they are known."""

    def __init__(self, definition: Definition) -> None:
        self._adds_space = self._is_nfc = False
        self._table = _table({})
        if isinstance(definition, ByteValues | Ranks):
            self._table = _table({i: len(piece) for i, piece in known_of(definition).pieces.items()})
        elif isinstance(definition, TokenizerJson):
            self._load(definition)

    def _load(self, of: TokenizerJson) -> None:
        """Find the width of each token of a tokenizer.json, if its normalizer and pre-tokenizer are known to keep the text."""
        before, splits = (list(steps_of(of.definition.get(key))) for key in ("normalizer", "pre_tokenizer"))
        kinds = {one.get("type") for one in before}
        is_space = any(one.get("replacement") == LONE_SPACE for one in splits) or any(
            one.get("content") == LONE_SPACE for one in before
        )
        model = of.definition.get("model") or {}
        vocabulary: dict[str, int] = of.tokenizer.get_vocab(with_added_tokens=False)
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return  # a word's tokens have more characters than the word
        if any(one.get("type") == "ByteLevel" for one in splits) and kinds <= {"NFC"}:
            widths = {i: len(token) for token, i in vocabulary.items()}
            self._adds_space = any(one.get("add_prefix_space", True) for one in splits if one.get("type") == "ByteLevel")
        elif (
            is_space
            and all(_is_lone_space(one) for one in before)
            and {one.get("type") for one in splits} <= {"Metaspace", "Split"}
        ):
            widths = {i: len(token.replace(LONE_SPACE, " ").encode()) for token, i in vocabulary.items()}
            if model.get("byte_fallback"):
                bytes_of = {f"<0x{value:02X}>" for value in range(256)}
                widths |= {i: 1 for token, i in vocabulary.items() if token in bytes_of}
            self._adds_space = True
        else:
            return
        self._is_nfc = kinds == {"NFC"}
        for token in of.added_tokens:
            # A space may be added after each of them.
            is_unsure = self._adds_space or (bool(before) and token.get("normalized", True))
            is_unsure = is_unsure or token.get("lstrip") or token.get("rstrip")  # it has the space around it
            text = str(token["content"])
            # Other text may become a token of the model.
            is_unsure = is_unsure or (text in vocabulary and not PRINTABLE.fullmatch(text))
            widths[int(token["id"])] = NO_WIDTH if is_unsure else len(text.encode())
        if (unknown := model.get("unk_token")) in vocabulary:
            widths[vocabulary[unknown]] = NO_WIDTH
        self._table = _table(widths)

    def of(self, ids: UInt32s, is_special: Bools) -> Int64s:
        """The width of each token, int64[n]: 2 if it is special."""
        found = self._table.take(ids, mode="clip")
        found[is_special] = 2
        return found

    def is_right(self, extra: Int64s) -> Bools:
        """Whether parts have the tokens of all their bytes, and of *extra* ones: bool[k]. An engine may add a space before."""
        right: Bools = (extra == 0) | ((extra == 1) & self._adds_space)
        return right

    def changes(self, texts: TextParts, known: Bools, parts: Int64s) -> Bools:
        """Which of some *parts* are ordinary text that is changed before it is tokenized: bool[p]."""
        changed = np.zeros(len(texts.kinds), bool)
        if not self._is_nfc:
            return changed
        data, offsets = text_buffers(texts.texts)
        above = np.append(0, np.cumsum(data[offsets[0] : offsets[-1]] >= MAY_COMBINE))[offsets - offsets[0]]
        number = np.cumsum(texts.kinds == ORDINARY) - 1
        for part in np.unique(parts[~known[parts]]).tolist():
            i = int(number[part])
            if above[i + 1] > above[i]:
                changed[part] = not unicodedata.is_normalized("NFC", texts.texts[i].as_py())
        return changed


def _table(widths: Mapping[int, int]) -> Int64s:
    """Widths by the ids, and one more for all that have none."""
    table = np.full(max(widths, default=0) + 2, NO_WIDTH, np.int64)
    table[np.fromiter(widths, np.int64, len(widths))] = np.fromiter(widths.values(), np.int64, len(widths))
    return table


def _is_lone_space(part: JsonFacts) -> bool:
    """Whether a normalizer only replaces each space by the lone one, or puts one before the text."""
    if part.get("type") == "Prepend":
        return part.get("prepend") == LONE_SPACE
    return part.get("type") == "Replace" and part.get("pattern") == {"String": " "} and part.get("content") == LONE_SPACE


def has_independent_parts(definition: Definition) -> bool:
    """Whether the parts of a text have the same tokens alone as between special tokens."""
    if isinstance(definition, SentencePieceModel):
        return False  # a space may be added before each, which its tokens do not tell
    if not isinstance(definition, TokenizerJson):
        return True
    added = definition.added_tokens
    special, others = ([token["content"] for token in added if bool(token.get("special")) is kind] for kind in (True, False))
    if any(other in text for other in others for text in special):
        return False  # the engine passes over a special token's text, and what is in it
    splits = steps_of(definition.definition.get("pre_tokenizer"))
    return not any(one.get("prepend_scheme") == "first" for one in splits)


def _with_own_space(definition: Definition, specials: Mapping[str, int]) -> list[int]:
    """The numbers of the special tokens that take the space around them, or are found as whole words alone."""
    if not isinstance(definition, TokenizerJson):
        return []
    numbers = {text: number for number, text in enumerate(specials)}
    added = definition.added_tokens
    takes = [token["content"] for token in added if any(token.get(option) for option in ("lstrip", "rstrip", "single_word"))]
    return [numbers[text] for text in takes if text in numbers]


def _mask(spans: list[IntPair], places: Int64s) -> UInt8s:
    """Which tokens have a character of a span: uint8[n]."""
    edges = np.zeros(int(max([0, *(stop for _, stop in spans), *places.max(axis=0, initial=0)])) + 2, np.int64)
    for start, stop in spans:
        edges[start] += 1
        edges[stop] -= 1
    counted = running_sums(np.cumsum(edges) > 0)
    begin, end = places.T
    mask: UInt8s = (counted[np.maximum(end, begin + 1)] > counted[begin]).astype(np.uint8)
    return mask


def special_tokens(definition: Definition) -> Mapping[str, int]:
    """The special tokens of a tokenizer, by their strings."""
    if isinstance(definition, ByteValues):
        return {}
    if isinstance(definition, Ranks):
        return definition.special
    if isinstance(definition, SentencePieceModel):
        return definition.pieces.of_kind(PieceKind.CONTROL)
    named = [token["content"] for token in definition.added_tokens if token.get("special")]
    return {text: definition.tokenizer.token_to_id(text) for text in named if text}


def _speaker(definition: Definition, ids: UInt32s) -> Speak:
    """The function that tokenizes rendered text. *ids*: of the special tokens, by their numbers."""
    if isinstance(definition, TokenizerJson):
        return _json_speaker(definition, ids)

    def parts_of(part: str) -> tuple[list[int], Int64s]:
        """The tokens of a text, and the bytes of it at which each begins and ends: int64[n, 2]."""
        if isinstance(definition, SentencePieceModel):
            return _pieces_of(definition, part)
        if isinstance(definition, ByteValues):
            found, lengths = [byte + 1 for byte in part.encode()], [1] * len(part.encode())
        else:
            found = definition.encoding.encode_ordinary(part)
            lengths = list(map(len, definition.encoding.decode_tokens_bytes(found)))
        ends = np.cumsum(lengths, dtype=np.int64)
        return found, np.stack([np.append(0, ends[:-1])[: len(ends)], ends], axis=1)

    def speak(one: OneText) -> EncodedText:
        found, places, at = list[int](), [np.empty((0, 2), np.int64)], 0
        for part in one.parts:
            if isinstance(part, int):
                found.append(int(ids[part]))
                places.append(np.array([[at, at + 2]]))
                at += 2
                continue
            tokens, spans = parts_of(part)
            # byte -> character: the bytes of a character that are not its first have 10 as their first bits
            data = np.frombuffer(part.encode(), np.uint8)
            character = np.append(np.cumsum((data & 0xC0) != 0x80) - 1, len(part))
            starts, ends = spans.T
            found += tokens
            stops = np.where(ends > starts, character[ends - 1] + 1, character[starts])
            places.append(np.stack([character[starts], stops], axis=1) + at)
            at += len(part)
        return EncodedText(np.array(found, np.uint32), np.concatenate(places))

    return lambda rendered: map(speak, rendered)


def _pieces_of(definition: SentencePieceModel, text: str) -> tuple[list[int], Int64s]:
    """The tokens of a text, and the bytes of it at which each begins and ends. Those of a character that falls back to bytes are
    all of the character's.
    """
    ids, spans = list[int](), list[IntPair]()
    for number, value in fields(definition.processor.encode(text, out_type="serialized_proto")):
        if number == 2 and isinstance(value, bytes):
            piece = dict(fields(value))
            ids.append(int(piece.get(2, 0)))
            spans.append((int(piece.get(4, 0)), int(piece.get(5, 0))))
    kinds = [definition.pieces.kinds[i] for i in ids]
    for k in reversed(range(len(ids) - 1)):
        # Of several bytes of a character, the library says that the last one has it.
        if kinds[k] is kinds[k + 1] is PieceKind.BYTE and spans[k][0] == spans[k][1]:
            spans[k] = (spans[k][0], spans[k + 1][1])
    return ids, np.array(spans, np.int64).reshape(-1, 2)


def _json_speaker(definition: TokenizerJson, ids: UInt32s) -> Speak:
    """With the tokenizer itself, in which each special token has a name that is in no text. What surrounds one then is tokenized
    as it is around the token.
    """
    named, tokens = [SPECIAL + chr(NUMBERS + number) for number in range(len(ids))], []
    numbers = {text: number for number, text in enumerate(special_tokens(definition))}
    for token in definition.added_tokens:
        if token.get("special") and token["content"] in numbers:
            token = {**token, "content": named[numbers[token["content"]]], "normalized": False}
        tokens.append(token)
    plain = {**definition.definition, **dict.fromkeys(("truncation", "padding", "post_processor")), "added_tokens": tokens}
    tokenizer = type(definition.tokenizer).from_str(json.dumps(plain))
    there = {text: int(i) for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    to_id = np.arange(max(there.values(), default=0) + 1, dtype=np.uint32)
    for token in tokens:
        if token["content"] in there:
            number = ord(token["content"][1]) - NUMBERS if token["content"] in set(named) else None
            to_id[there[token["content"]]] = definition.tokenizer.token_to_id(token["content"]) if number is None else ids[number]

    def speak(rendered: Sequence[OneText]) -> Iterator[EncodedText]:
        texts = ["".join(named[part] if isinstance(part, int) else part for part in one.parts) for one in rendered]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield EncodedText(to_id[np.array(encoding.ids, np.int64)], np.array(encoding.offsets, np.int64).reshape(-1, 2))

    return speak
