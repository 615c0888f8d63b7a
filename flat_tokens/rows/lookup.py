"""Documents by their keys."""

from __future__ import annotations

import posixpath
import re
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from flat_tokens.array_types import Int64s, UInt64s
from flat_tokens.arrays.opening import open_array
from flat_tokens.manifest import dataset_of

if TYPE_CHECKING:
    from flat_tokens.arrays.stored import StoredArray
    from flat_tokens.reader import FlatTokens

KEYS_AT_A_TIME = 1 << 20
KEY = re.compile("[0-9a-f]{16}")


def stored_keys(tokens: FlatTokens) -> StoredArray:
    """The key of each document of the split as it is stored. FileNotFoundError for a dataset that does not record them."""
    return open_array(dataset_of(tokens.store) / f"documents/{posixpath.basename(tokens.store.root)}/key", "uint64")


def numbers_of(tokens: FlatTokens, keys: UInt64s) -> Int64s:
    """The numbers of the documents with these keys, the first of each: int64[n], -1 if there is none. One pass over all."""
    stored, asked, which = stored_keys(tokens), *np.unique(keys, return_inverse=True)
    found = np.full(len(asked), -1)
    if not len(asked):
        return found
    for first in range(0, tokens.seq_count, KEYS_AT_A_TIME):
        stop = min(first + KEYS_AT_A_TIME, tokens.seq_count)
        its = stored.read(first, stop) if tokens.numbers is None else stored.take(tokens.numbers[first:stop])
        at = np.minimum(np.searchsorted(asked, its), len(asked) - 1)
        there = np.flatnonzero(asked[at] == its)[::-1]  # of equal places the last assignment stays: the first document
        earlier = found[at[there]] >= 0
        found[at[there[~earlier]]] = there[~earlier] + first
    return found[which.reshape(-1)]


def key_of(given: Any) -> int:
    """A key as a number: given as one, or as 16 hexadecimal digits. ValueError for other texts."""
    if isinstance(given, str):
        if not KEY.fullmatch(given):
            raise ValueError(f"a key is {given!r}, but it is a number or 16 hexadecimal digits, such as '9f1c0a3b5d7e2468'")
        return int(given, 16)
    if not 0 <= (key := index(given)) < 1 << 64:
        raise ValueError(f"a key is {key}, but it is from 0 to 2**64 - 1")
    return key
