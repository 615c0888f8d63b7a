"""Texts with certain characters: which they are, and an engine that leaves them to another one; and texts that NFC
changes, which an engine that does without NFC leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Bools, Int64s, IntPair, UInt8s
from flat_tokens.columns import as_arrow
from flat_tokens.rows.views import running_sums
from flat_tokens.text.rows import text_buffers
from tasks.tokenize.engines import Encode, Tokens

Choose = Callable[[pa.LargeStringArray], Bools]

UNICODE_17 = [
    *[(0x88F, 0x890), (0xC5C, 0xC5D), (0xCDC, 0xCDD), (0x1ACF, 0x1ADE), (0x1AE0, 0x1AEC), (0xA7CE, 0xA7D0), (0xA7D2, 0xA7D3)],
    *[(0xA7D4, 0xA7D5), (0xA7F1, 0xA7F2), (0x10940, 0x1095A), (0x10EC5, 0x10EC8), (0x10EFA, 0x10EFC), (0x11B60, 0x11B68)],
    *[(0x11DB0, 0x11DDC), (0x11DE0, 0x11DEA), (0x16EA0, 0x16EB9), (0x16EBB, 0x16ED4), (0x16FF2, 0x16FF7), (0x187F8, 0x18800)],
    *[(0x18D09, 0x18D1F), (0x18D80, 0x18DF3), (0x1E6C0, 0x1E6DF), (0x1E6E0, 0x1E6F6), (0x1E6FE, 0x1E700), (0x2B73A, 0x2B740)],
    *[(0x2CEA2, 0x2CEAE), (0x323B0, 0x3347A)],
]
"""Ranges ``[first, last)`` of the letters, marks and numbers that Unicode 17 added. Engines whose tables are of Unicode 16 split
text at them as at symbols.
"""
UNICODE_17_SYMBOLS = [
    *[(0x20C1, 0x20C2), (0x2B96, 0x2B97), (0xFBC3, 0xFBD3), (0xFD90, 0xFD92), (0xFDC8, 0xFDCF), (0x10ED0, 0x10ED9)],
    *[(0x1CCFA, 0x1CCFD), (0x1CEBA, 0x1CED1), (0x1CEE0, 0x1CEF1), (0x1F6D8, 0x1F6D9), (0x1F777, 0x1F77B), (0x1F8D0, 0x1F8D9)],
    *[(0x1FA54, 0x1FA58), (0x1FA8A, 0x1FA8B), (0x1FA8E, 0x1FA8F), (0x1FAC8, 0x1FAC9), (0x1FACD, 0x1FACE), (0x1FAEA, 0x1FAEB)],
    *[(0x1FAEF, 0x1FAF0), (0x1FBFA, 0x1FBFB)],
]
"""The symbols and punctuation marks that it added. They matter to patterns that tell these from unassigned characters."""

BLOCK_BYTES = 1 << 18
"""Bytes that are looked at together: they stay in the processor's second-level cache."""


class Characters:
    """Characters from U+0800 on, by their ranges ``[first, last)``. Texts without their leading bytes take hardly any time."""

    def __init__(self, ranges: list[IntPair]) -> None:
        self._bounds = np.array(sorted(ranges)).ravel()
        firsts = {chr(point).encode()[:2] for first, last in ranges for point in range(first, last)}
        leads = sorted({first[0] for first in firsts})
        starts = [lead for lead in leads if lead - 1 not in leads]
        self._leads = list(zip(starts, (lead for lead in leads if lead + 1 not in leads), strict=True))  # runs of them
        self._starts = np.zeros(1 << 16, bool)
        self._starts[[first[0] << 8 | first[1] for first in firsts]] = True

    def texts(self, texts: pa.LargeStringArray) -> Bools:
        """Which texts have one of the characters: bool[n]."""
        data, offsets = text_buffers(texts)
        data = data[offsets[0] : offsets[-1]]
        found = np.zeros(len(texts), bool)
        for start in range(0, len(data), BLOCK_BYTES):
            places = self._places(data[start : start + BLOCK_BYTES]) + start
            following = data[np.minimum(places + 1, len(data) - 1)]
            places = places[self._starts[data[places].astype(np.int64) << 8 | following]]
            if len(places):
                found[_with_one(data, offsets, places, self._bounds)] = True
        return found

    def _places(self, block: UInt8s) -> Int64s:
        """The places of leading bytes of the characters: int64[m]."""
        highest, here = block.max(), np.zeros(0, bool)
        for first, last in self._leads:
            if first <= highest:
                these = block == first if first == last else block - np.uint8(first) <= last - first  # differences wrap around
                here = np.logical_or(here, these, out=these) if len(here) else these
        return np.flatnonzero(here)


LETTERS_OF_17 = Characters(UNICODE_17)
CHARACTERS_OF_17 = Characters(UNICODE_17 + UNICODE_17_SYMBOLS)


def divided(encode: Encode, others: Encode, *choices: Choose) -> Encode:
    """The engine *encode*, but *others* encodes the texts that one of the *choices* names."""

    def encode_each(texts: pa.LargeStringArray) -> Tokens:
        chosen = np.zeros(len(texts), bool)
        for choose in choices:
            chosen |= choose(texts)
        if not chosen.any():
            return encode(texts)
        parts = encode(texts.filter(as_arrow(~chosen))), others(texts.filter(as_arrow(chosen)))
        lengths = np.empty(len(texts), np.int64)
        lengths[~chosen], lengths[chosen] = (np.diff(part.offsets) for part in parts)
        ids, is_other = np.empty(lengths.sum(), np.uint32), np.repeat(chosen, lengths)
        ids[~is_other], ids[is_other] = (part.ids for part in parts)
        return Tokens(ids, running_sums(lengths))

    return encode_each


FIRST = 0x300
"""NFC leaves what is before this character as it is; so it does with the characters from here on that CHANGES does not name."""

CHANGES = [
    *[(0x300, 0x370), (0x374, 0x388), (0x483, 0x488), (0x591, 0x2002), (0x20D0, 0x2100), (0x2126, 0x212C), (0x2329, 0x232B)],
    *[(0x2ADC, 0x2ADD), (0x2CEF, 0x2E00), (0x302A, 0x3030), (0x3099, 0x309B), (0xA66F, 0xAC00), (0xD7A4, 0xE000)],
    *[(0xF900, 0xFE00), (0xFE10, 0xFE30), (0x10000, 0x1F000), (0x1FB00, 0x110000)],
]
"""Ranges ``[first, last)`` with all characters that NFC changes, combines with what is before them, or puts in order: so wide
that there are few of them. Quotes, dashes, emojis, Cyrillic, most of Greek and nearly all of Chinese and Japanese are in none.
"""
_BOUNDS = np.array(CHANGES).ravel()


def changed_by_nfc(texts: pa.LargeStringArray) -> Bools:
    """Which texts NFC changes: bool[n]."""
    changed = may_change(texts)
    if changed.any():
        from pyarrow import compute  # slow to import, and not of use to every build

        some = texts.filter(as_arrow(changed))
        # Text that a later Unicode leaves as it is, an earlier one does, too: characters that it does not know combine with none.
        changed[changed] = compute.not_equal(compute.utf8_normalize(some, "NFC"), some).to_numpy(zero_copy_only=False)
    return changed


def may_change(texts: pa.LargeStringArray) -> Bools:
    """Which texts have a character of CHANGES: bool[n]."""
    data, offsets = text_buffers(texts)
    data = data[offsets[0] : offsets[-1]]
    found = np.zeros(len(texts), bool)
    places = np.flatnonzero(data >= chr(FIRST).encode()[0])
    if len(places):
        found[_with_one(data, offsets, places, _BOUNDS)] = True
    return found


def _with_one(data: UInt8s, offsets: Int64s, places: Int64s, bounds: Int64s) -> Int64s:
    """The numbers of the texts that have a character of ranges with these *bounds* at one of the *places* in their *data*, where
    characters of two to four bytes of UTF-8 begin.
    """
    lead, second, third, fourth = (data[np.minimum(places + k, len(data) - 1)].astype(np.int32) for k in range(4))
    of_two, of_three = (lead & 31) << 6 | second & 63, (lead & 15) << 12 | (second & 63) << 6 | third & 63
    of_four = (lead & 7) << 18 | (second & 63) << 12 | (third & 63) << 6 | fourth & 63
    points = np.where(lead < 0xE0, of_two, np.where(lead < 0xF0, of_three, of_four))
    places = places[np.searchsorted(bounds, points, side="right") % 2 == 1]
    return np.searchsorted(offsets - offsets[0], places, side="right") - 1
