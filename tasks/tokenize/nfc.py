"""Texts that NFC changes. An engine that does without NFC takes the others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flat_tokens.array_types import Bools
from flat_tokens.text.rows import text_buffers
from tasks.tokenize.characters import code_points

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

        some = texts.filter(pa.array(changed))
        # Text that a later Unicode leaves as it is, an earlier one does, too: characters that it does not know combine with none.
        changed[changed] = compute.not_equal(compute.utf8_normalize(some, "NFC"), some).to_numpy(zero_copy_only=False)
    return changed


def may_change(texts: pa.LargeStringArray) -> Bools:
    """Which texts have a character of CHANGES: bool[n]."""
    data, offsets = text_buffers(texts)
    data = data[offsets[0] : offsets[-1]]
    found = np.zeros(len(texts), bool)
    places = np.flatnonzero(data >= chr(FIRST).encode()[0])
    if not len(places):
        return found
    places = places[np.searchsorted(_BOUNDS, code_points(data, places), side="right") % 2 == 1]
    found[np.searchsorted(offsets - offsets[0], places, side="right") - 1] = True
    return found
