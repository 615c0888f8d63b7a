"""SentencePiece's ``.model`` files: the pieces of a model and their kinds, read here from the bytes of the file.

The file is a message of Protocol Buffers. A reader of tokens needs its pieces alone, so it needs no package. SentencePiece's own
library, which takes the whole file for granted, is loaded by whoever encodes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from flat_tokens.batch import MAX_TOKEN_ID

LONE_SPACE = "▁".encode()
"""The character that pieces have in place of a space."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Kinds of fields of a message, by how their values are written."""
WIDTHS = {FIXED64: 8, FIXED32: 4}


class PieceKind(enum.IntEnum):
    """Kinds of pieces, by their numbers in a file. USER_DEFINED: always found in text. UNUSED: never. BYTE: ``<0x00>`` to
    ``<0xFF>``, for what no other piece has.
    """

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


KINDS: dict[int | bytes, PieceKind] = {kind.value: kind for kind in PieceKind}


class Pieces(NamedTuple):
    """The pieces of a model, by their ids: each as the file has it, in UTF-8, and its kind. ``has_lone_spaces``: whether spaces
    are written as the lone one in them.
    """

    pieces: tuple[bytes, ...]
    kinds: tuple[PieceKind, ...]
    has_lone_spaces: bool = True

    @classmethod
    def of_file(cls, data: bytes) -> Pieces:
        """The pieces of a ``.model`` file. ValueError, with the place, where it is not one."""
        pieces, kinds, has_lone_spaces = list[bytes](), list[PieceKind](), True
        for number, value in fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(fields(value))
                text, kind = piece.get(1, b""), KINDS.get(piece.get(3, 1))
                if not isinstance(text, bytes) or kind is None:
                    raise ValueError(f"piece {len(pieces)} has {text!r} for text and {piece.get(3)!r} for its kind")
                pieces.append(text)
                kinds.append(kind)
            elif number == 3 and isinstance(value, bytes):  # how text is normalized
                has_lone_spaces = bool(dict(fields(value)).get(5, 1))
        if not 0 < len(pieces) <= MAX_TOKEN_ID:
            raise ValueError(f"it has {len(pieces)} pieces")
        return cls(tuple(pieces), tuple(kinds), has_lone_spaces)

    def of_kind(self, kind: PieceKind) -> dict[str, int]:
        """The ids of the pieces of a kind, by their text."""
        return {piece.decode(errors="replace"): i for i, piece in enumerate(self.pieces) if self.kinds[i] is kind}

    def bytes_of(self, i: int) -> bytes:
        """The text that a piece stands for, in UTF-8; that of a control or unknown piece is its name."""
        piece, kind = self.pieces[i], self.kinds[i]
        if kind is PieceKind.BYTE and len(piece) == 6:
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece
        is_text = kind not in (PieceKind.CONTROL, PieceKind.UNKNOWN)
        return piece.replace(LONE_SPACE, b" ") if is_text and self.has_lone_spaces else piece


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order: the number of each, and its value as it is written. ValueError where it ends early, or
    is not a message.
    """
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in WIDTHS:
            length = WIDTHS[kind]
        else:
            raise ValueError(f"byte {at} begins no field")
        if length > size - at:
            raise ValueError(f"it ends {length - (size - at)} bytes before its field at byte {at} does")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    for k in range(at, min(at + 10, len(data))):
        value |= (data[k] & 0x7F) << shift
        if data[k] < 0x80:
            return value, k + 1
        shift += 7
    raise ValueError(f"byte {at} begins no number")
