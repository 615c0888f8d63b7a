"""Permutations that are computed, not stored: they map positions of a shuffled order to rows.

The *keyed* permutation of ``range(n)`` is a Feistel network: number x is the pair ``(x // b, x % b)`` of ``range(a)``
and ``range(b)``, and rounds r = 0, 1, 2 ... add to one half, alternately, a hash of the other:

    left = (left + hash(right + key + r * A) * a) mod a,  then  right = (right + hash(left + key + (r + 1) * A) * b) mod b

where ``A`` and ``mix`` are those of ``flat_tokens.keys``, all sums are modulo 2**64, and hash is the topmost 39 bits of
``mix``, taken as a fraction. Numbers from n to a * b go through the network again until they fall into ``range(n)``:
``a`` and ``b`` are about the square root of n, chosen so that there are hardly any.

The *reference* permutation is the one of the reference loader: swaps in a row, drawn from Philox.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TypeAlias

import numpy as np

from flat_tokens.array_types import Int64s, UInt64s
from flat_tokens.keys import A, B, mix

MAX_LENGTH = 1 << 48
"""The longest keyed permutation: halves of 25 bits are multiplied by hashes of 39."""
ROUNDS = 8
SMALL_ROUNDS, SMALL_LENGTH = 24, 256
"""Functions of few values mix slowly: below 16 rounds a chi-square test distinguishes the orders of six numbers from random
ones.
"""

HASH_BITS = np.uint64(39)
DROPPED_BITS = np.uint64(64 - 39)
INDICES_AT_A_TIME = 1 << 13
"""The temporaries of this many numbers stay in the processor's second-level cache."""

Network: TypeAlias = Callable[[UInt64s, UInt64s], UInt64s]


def derive_keys(seed: int, *numbers: int | UInt64s) -> UInt64s:
    """Independent keys for a seed and any numbers after it: uint64[n], or uint64[1]."""
    return extended_keys(mix(np.array([seed], np.uint64) + A), *numbers)


def extended_keys(keys: UInt64s, *numbers: int | UInt64s) -> UInt64s:
    """The keys for the same seed and numbers, and these after them."""
    for number in numbers:
        keys = mix(keys + np.atleast_1d(np.asarray(number, np.uint64)) * B + A)
    return keys


@dataclass(frozen=True)
class KeyedPermutation:
    """Permutations of ``range(length)``, one for each key. They take no memory: the place of a number is computed.

    ValueError for a length that is not from 1 to 2**48.
    """

    length: int

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ValueError(f"there are permutations of 1 to {MAX_LENGTH} numbers, not of {self.length}")

    @cached_property
    def _sides(self) -> tuple[np.uint64, np.uint64]:
        root = isqrt(self.length - 1) + 1
        root += root % 2  # an even side: with two odd ones, every permutation would be an even one
        a = np.arange(root, root + min(root // 4, 1024) + 1, 2)
        best = int(a[np.argmin(-self.length % a)])
        return np.uint64(best), np.uint64(-(-self.length // best))

    @property
    def _rounds(self) -> UInt64s:
        """The constant that each round adds to the key: uint64[rounds, 1]."""
        return np.arange(SMALL_ROUNDS if self.length < SMALL_LENGTH else ROUNDS, dtype=np.uint64)[:, np.newaxis] * A

    def __call__(self, indices: UInt64s, keys: UInt64s) -> UInt64s:
        """The place of each of *indices* in the permutation: uint64[n]. *keys*: uint64[1] for all, or uint64[n]."""
        return self._walked(self._network, indices, keys)

    def inverse(self, places: UInt64s, keys: UInt64s) -> UInt64s:
        """The index of each of *places*: ``inverse(permutation(indices, keys), keys)`` is *indices*. It costs the same."""
        return self._walked(self._network_back, places, keys)

    def _walked(self, network: Network, numbers: UInt64s, keys: UInt64s) -> UInt64s:
        """The *numbers* through a network, once more while they fall outside ``range(length)``: uint64[n]."""
        permuted = np.empty(len(numbers), np.uint64)
        for start in range(0, len(numbers), INDICES_AT_A_TIME):
            part = slice(start, start + INDICES_AT_A_TIME)
            theirs = keys if len(keys) == 1 else keys[part]
            places = network(numbers[part], theirs)
            while (outside := np.flatnonzero(places >= np.uint64(self.length))).size:
                places[outside] = network(places[outside], theirs if len(theirs) == 1 else theirs[outside])
            permuted[part] = places
        return permuted

    def _network(self, x: UInt64s, keys: UInt64s) -> UInt64s:
        a, b = self._sides
        left = x // b
        right = x - left * b
        side, other = a, b
        for r in self._rounds:
            moved = mix(right + (keys + r))
            moved >>= DROPPED_BITS
            moved *= side
            moved >>= HASH_BITS
            moved += left
            # Below 2 * side: if side must not be subtracted, the difference wraps around to a huge number.
            left, right = right, np.minimum(moved, moved - side)
            side, other = other, side
        return left * b + right

    def _network_back(self, x: UInt64s, keys: UInt64s) -> UInt64s:
        a, b = self._sides
        left = x // b
        right = x - left * b
        side, other = b, a  # of the last round: their number is even
        for r in self._rounds[::-1]:
            added = mix(left + (keys + r))
            added >>= DROPPED_BITS
            added *= side
            added >>= HASH_BITS
            moved = right - added
            # Above 2**63 where it wrapped around: there side must be added.
            left, right = np.minimum(moved, moved + side), left
            side, other = other, side
        return left * b + right


def reference_permutation(seed: int, n: int) -> Int64s:
    """The reference loader's permutation of ``range(n)``: int64[n].

    With ``r = Philox(seed).random_raw(n) % (arange(n) + 1)`` and ``p = arange(n)``, swap ``p[i]`` and ``p[r[i]]`` for i
    from n - 1 down to 0. Not swap by swap, but with the same result: the last swap that wrote to a place decides
    its number. ValueError for n above 2**32.
    """
    if not 0 <= n <= 1 << 32:
        raise ValueError(f"the reference order permutes up to 2**32 numbers at a time, not {n}")
    times = np.arange(n, dtype=np.uint64)
    drawn = np.random.Philox(seed).random_raw(n) % (times + np.uint64(1))
    # Swap i, at time i, moves what place i holds to place r[i] <= i. Sorted by (place, time): the writes to each place.
    writes = drawn << np.uint64(32) | times
    writes.sort()
    place, time = (writes >> np.uint64(32)).astype(np.int64), (writes & np.uint64(0xFFFFFFFF)).astype(np.int64)
    place_of, again = drawn.astype(np.int64), np.empty(max(n - 1, 0), np.bool_)
    np.equal(place[1:], place[:-1], out=again)
    # Time runs down, so the write before time i to the same place is the next larger time.
    before = np.full(n, -1)
    before[time[:-1][again]] = time[1:][again]
    # source[x]: the swap whose number is in place x when swap x comes to it: the last one that wrote there, or none.
    source = np.arange(n)
    first = np.ones(n, np.bool_)
    first[1:] = ~again
    source[place[first]] = time[first]
    own = np.flatnonzero(place_of == np.arange(n))
    source[own] = np.where(before[own] >= 0, before[own], own)
    # Swap t wrote the number of place t: follow the sources up to a place without writes, which holds its own number.
    while not np.array_equal(held := source[source], source):
        source = held
    permuted = np.where(before >= 0, held[before], place_of)
    permuted[own] = held[own]
    return permuted
