"""Checks of options. A value that is not one of an option's own is refused, with the option's name and what it may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from flat_tokens.annotations import AnyArray, IntPair

ALIKE = 0.76
"""Names are alike from this ratio of difflib on: gpt5 is not gpt2."""


def whole_number(name: str, value: Any) -> int:
    """A whole number. TypeError for anything else."""
    try:
        return index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}, but it is a whole number") from error


def whole_numbers(what: str, values: AnyArray) -> AnyArray:
    """Whole numbers in one dimension, of any integer type. TypeError, which begins with *what*, for anything else."""
    values = values if values.size else values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        also = ": of a mask, take numpy.flatnonzero" if values.dtype == bool else ""
        raise TypeError(f"{what} int64[n], but these are {values.dtype}{list(values.shape)}{also}")
    return values


def digits(text: object) -> int | None:
    """The whole number that ASCII digits from elsewhere say, below 2**63; None if the text is something else."""
    said = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    found = int(said) if said.isascii() and said.isdigit() and len(said) < 20 else None
    return found if found is not None and found < 1 << 63 else None


def varint(data: bytes, at: int) -> IntPair:
    """The number that is written at a place in groups of seven bits, the lowest first, below 2**70; and the place after it.
    ValueError if it is longer, or the data ends before it does.
    """
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    for place in range(at, min(at + 10, len(data))):
        value |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            return value, place + 1
        shift += 7
    raise ValueError(f"byte {at} begins no number")


def at_least(minimum: int, name: str, value: Any) -> int:
    """A whole number from *minimum* up. ValueError for one below."""
    if (checked := whole_number(name, value)) < minimum:
        raise ValueError(f"{name} is {checked}, but it is {minimum} or more")
    return checked


def one_of(name: str, value: Any, known: Iterable[Any]) -> Any:
    """A value that is among the *known* ones, texts or numbers. ValueError, with all of them, for another."""
    known = tuple(known)
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in known:
        raise ValueError(f"{name} is {value!r}, but it is one of {', '.join(map(str, known))}")
    return value


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like *name*: a longer one, one with the same letters, or a similar one. None if there is none."""
    small = {one.lower(): one for one in known}
    longer = [one for one in small if len(name) > 2 and one.startswith(name.lower())]
    swapped = [one for one in small if sorted(one) == sorted(name.lower())]
    found = longer or swapped or difflib.get_close_matches(name.lower(), small, 1, ALIKE)
    return small[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or else all of them."""
    known = list(known)
    near = nearest(name, known)
    return f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}." if known else "There is none."


def true_or_false(name: str, value: Any) -> bool:
    """A truth value. ValueError for anything else: the text "false" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}, but it is True or False")
    return bool(value)
