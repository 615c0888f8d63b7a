"""Vocabularies: the bytes that the token ids of any tokenizer stand for, and text to ids again.

Every vocabulary is a flat table of bytes, so that whole batches of ids are decoded without a Python object per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flat_tokens.tokenizers import ByteValues, Ranks, TokenizerJson, resolve

UNKNOWN = "\ufffd".encode()
"""Text of an id that the vocabulary does not have."""

MAX_TABLE_IDS = 1 << 26

Encode = Callable[[str], npt.NDArray[np.uint32]]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token id: id i stands for ``data[offsets[i]:offsets[i + 1]]``, uint8[n], int64[size + 1].

    ``digest``: of every byte that decides its tokens, as builds write it into manifests. ``encode``: text to ids, with
    text that looks like a special token taken for text; None where the way is not known.
    """

    name: str
    digest: str | None
    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    encode: Encode | None

    @classmethod
    def of(cls, name: str, digest: str | None, pieces: Mapping[int, bytes], encode: Encode | None) -> Vocabulary:
        """From the bytes of each id; ids in between that have none stand for nothing."""
        size = max(pieces, default=-1) + 1
        if size > MAX_TABLE_IDS or min(pieces, default=0) < 0:
            raise ValueError(f"{name}: has token ids up to {size - 1}; up to {MAX_TABLE_IDS - 1} are decoded here")
        lengths = np.zeros(size, np.int64)
        ids = np.fromiter(pieces, np.int64, len(pieces))
        lengths[ids] = np.fromiter(map(len, pieces.values()), np.int64, len(pieces))
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(name, digest, np.frombuffer(b"".join(pieces[i] for i in sorted(pieces)), np.uint8), offsets, encode)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each id: int64[size]; 0 where it stands for nothing."""
        return np.diff(self.offsets)

    def piece(self, i: int) -> bytes:
        """The bytes of one id, or those of U+FFFD where it stands for nothing."""
        return self._table[0][self._table[1][min(i, self.size)] : self._table[1][min(i, self.size) + 1]].tobytes()

    def decode(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The bytes of ids, one behind the other, and where each id's bytes end: bytes, int64[len(ids)]."""
        data, offsets = self._table
        ids = np.minimum(ids, ids.dtype.type(min(self.size, np.iinfo(ids.dtype).max))).astype(np.int64)
        starts, lengths = offsets[ids], offsets[ids + 1] - offsets[ids]
        ends = np.cumsum(lengths)
        # byte k of the text -> byte k - (end - length) of its token's piece
        index = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        index += np.repeat(starts - (ends - lengths), lengths)
        return data[index].tobytes(), ends

    @cached_property
    def _table(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """``data`` and ``offsets`` with U+FFFD for each id that stands for nothing, and for one more behind the last."""
        lengths = np.append(self.lengths, 0)
        unknown = lengths == 0
        lengths[unknown] = len(UNKNOWN)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), np.uint8)
        is_unknown = np.repeat(unknown, lengths)
        data[~is_unknown] = self.data
        data[is_unknown] = np.tile(np.frombuffer(UNKNOWN, np.uint8), int(unknown.sum()))
        return data, offsets


def load_vocabulary(name_or_path: str, *, pattern: str | None = None, revision: str | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer, by a name that ``tokenizers.resolve`` knows. Without a *pattern* that of a ``.tiktoken``
    file decodes but does not encode. Raises as ``resolve`` does.
    """
    definition = resolve(os.path.expanduser(name_or_path), pattern=pattern, revision=revision)
    if isinstance(definition, ByteValues):
        parts: tuple[dict[int, bytes], Encode | None] = {value + 1: bytes([value]) for value in range(256)}, _encode_bytes
    elif isinstance(definition, Ranks):
        parts = _of_ranks(definition)
    else:
        parts = _of_tokenizer_json(definition)
    return Vocabulary.of(definition.name, definition.digest, *parts)


def _encode_bytes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + np.uint32(1)


def _of_ranks(definition: Ranks) -> tuple[dict[int, bytes], Encode | None]:
    def encode(text: str) -> npt.NDArray[np.uint32]:
        return np.array(definition.encoding.encode_ordinary(text), np.uint32)

    special = {i: text.encode() for text, i in definition.special.items()}
    return {i: token for token, i in definition.ranks.items()} | special, encode if definition.encoding else None


def _of_tokenizer_json(definition: TokenizerJson) -> tuple[dict[int, bytes], Encode]:
    tokenizer = definition.tokenizer
    added = {token["content"] for token in definition.definition.get("added_tokens") or []}
    bytes_of = _bytes_of_tokens(definition.definition)
    pieces = {
        int(i): token.encode() if token in added else bytes_of(token)
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items()
    }

    def encode(text: str) -> npt.NDArray[np.uint32]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    return pieces, encode


def _bytes_of_tokens(definition: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How a token as a tokenizer.json spells it becomes the bytes that it stands for."""
    decoders = list(_flat(definition.get("decoder")))
    kinds = {decoder.get("type") for decoder in decoders}
    if "ByteLevel" in kinds | {part.get("type") for part in _flat(definition.get("pre_tokenizer"))}:
        values = {character: value for value, character in enumerate(_byte_level_alphabet())}
        return lambda token: b"".join(
            bytes([values[character]]) if character in values else character.encode() for character in token
        )
    if "WordPiece" in kinds:
        prefix = next(str(decoder.get("prefix", "##")) for decoder in decoders if decoder.get("type") == "WordPiece")
        return lambda token: token.removeprefix(prefix).encode() if token.startswith(prefix) else f" {token}".encode()
    replacements = []
    for decoder in decoders:
        if decoder.get("type") == "Metaspace":
            replacements.append((str(decoder.get("replacement", "▁")), " "))
        elif decoder.get("type") == "Replace" and (text := (decoder.get("pattern") or {}).get("String")):
            replacements.append((str(text), str(decoder.get("content", ""))))
        elif decoder.get("type") == "BPEDecoder" and (suffix := decoder.get("suffix")):
            replacements.append((str(suffix), " "))

    def bytes_of(token: str) -> bytes:
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for text, replacement in replacements:
            token = token.replace(text, replacement)
        return token.encode()

    return bytes_of


def _flat(part: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """A decoder or pre-tokenizer, or those that a sequence is made of."""
    for inner in (part or {}).get("decoders") or (part or {}).get("pretokenizers") or ([part] if part else []):
        yield from _flat(inner) if inner.get("type") == "Sequence" and inner is not part else [inner]


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else one above U+00FF, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(value if value in seen else next(hidden)) for value in range(256)]
