"""Conversations of plain messages, without a look at each message: what a template writes around contents, by their roles.

A form is learned from one conversation. Another one with the same roles is still rendered. If it is the form with its own
contents, its parts and places follow from their lengths.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from tasks.tokenize.rendering.request import ORDINARY, IntPair

T = TypeVar("T", str, bytes)
Places = list[IntPair]
"""Bytes that a form has before a place, and how many contents are before it."""


class RenderedConversation(NamedTuple):
    """A conversation in parts. ``kinds``: of each part ORDINARY or the number of its special token. ``ends``: of the ordinary
    ones in ``text``, in bytes. ``spans``: starts and stops of what counts, in bytes of all parts; a special token has two.
    """

    kinds: Sequence[int]
    ends: list[int]
    text: bytes
    spans: list[int]

    @classmethod
    def of(cls, parts: Sequence[bytes | int], spans: Sequence[IntPair]) -> RenderedConversation:
        """A conversation made of ordinary texts in UTF-8 and numbers of special tokens."""
        texts = [part for part in parts if isinstance(part, bytes)]
        kinds = [part if isinstance(part, int) else ORDINARY for part in parts]
        return cls(
            array("q", kinds), [*accumulate(map(len, texts))], b"".join(texts), [place for span in spans for place in span]
        )

    @property
    def parts(self) -> list[bytes | int]:
        """Ordinary texts, and numbers of special tokens."""
        texts = iter(zip([0, *self.ends], self.ends, strict=False))
        return [self.text[slice(*next(texts))] if kind == ORDINARY else kind for kind in self.kinds]


class Form(NamedTuple):
    """The texts between contents, as the template writes them and without special tokens, and where parts end and spans are."""

    pieces: tuple[str, ...]
    literals: tuple[bytes, ...]
    kinds: array[int]
    ends: Places
    spans: Places

    @classmethod
    def of(
        cls,
        text: str,
        contents: list[IntPair],
        spans: list[IntPair],
        special: re.Pattern[str],
        numbers: dict[str, int],
    ) -> Form | None:
        """The form of a rendered conversation, whose *contents* and *spans* are at these places. None if a span begins or ends in
        a content.
        """
        pieces = tuple(
            text[i:k]
            for i, k in zip([0, *(stop for _, stop in contents)], [*(start for start, _ in contents), len(text)], strict=True)
        )
        kinds, ends, literals, edges = array("q"), Places(), list[bytes](), dict[int, IntPair]()
        plain = wide = at = 0
        is_open = False  # whether an ordinary part has begun
        for number, piece in enumerate(pieces):
            literal, behind = b"", 0
            for found in [*special.finditer(piece), None]:
                between = piece[behind : found.start() if found else len(piece)]
                for i in range(len(between) + 1):
                    edges.setdefault(at + behind + i, (wide + len(between[:i].encode()), number))
                plain, wide = plain + len(between.encode()), wide + len(between.encode())
                literal += between.encode()
                is_open |= bool(between)
                if found is None:
                    break
                if is_open:
                    kinds.append(ORDINARY)
                    ends.append((plain, number))
                kinds.append(numbers[found[0]])
                is_open, behind, wide = False, found.end(), wide + 2
            literals.append(literal)
            at += len(piece) + (contents[number][1] - contents[number][0] if number < len(contents) else 0)
            is_open |= number < len(contents)
        if is_open:
            kinds.append(ORDINARY)
            ends.append((plain, len(contents)))
        places = [edges.get(place) for span in spans for place in span]
        return None if None in places else cls(pieces, tuple(literals), kinds, ends, [place for place in places if place])

    def filled(self, text: str, contents: list[str]) -> RenderedConversation | None:
        """A rendered conversation with these contents. None if it is not of this form."""
        if "".join(_alternately(self.pieces, contents)) != text:
            contents = [content.strip() for content in contents]
            if "".join(_alternately(self.pieces, contents)) != text:
                return None
        data = [content.encode() for content in contents]
        before = [0, *accumulate(map(len, data))]
        return RenderedConversation(
            self.kinds,
            [size + before[i] for size, i in self.ends],
            b"".join(_alternately(self.literals, data)),
            [size + before[i] for size, i in self.spans],
        )


def _alternately(pieces: Sequence[T], others: list[T]) -> list[T]:
    """Each piece, and after each but the last one of the others."""
    found = [pieces[0]] * (2 * len(pieces) - 1)
    found[::2], found[1::2] = pieces, others
    return found
