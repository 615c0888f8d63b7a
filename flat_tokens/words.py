"""Normalised words of texts, as arrays: no Python object a word.

Two texts that differ in case, accents, punctuation, spaces and line ends alone have the same words. ``_forms`` says of each
character what it is in a word.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

LAST_PLANE = 0xE0000
"""Characters from here on are marks without a form of their own."""
SEPARATOR, NOTHING = 0, 1
"""Forms of characters that end a word, and of those that are left out of it."""
ALONE = 1 << 31
"""Added to the form of a character that is a word by itself, as those of scripts without spaces between words are."""
SCRIPTS_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # radicals
    (0x3005, 0x3007),
    (0x3021, 0x303C),
    (0x3040, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
)
ACCENTS = frozenset((*range(0x300, 0x370), *range(0xFE00, 0xFE10), 0xAD))
"""Accents of Latin, Greek and Cyrillic letters, selectors of variants, and the soft hyphen."""
POINTED = range(0x590, 0x671)
"""Hebrew and Arabic: their vowel points are left out, as most texts have none."""
SYMBOLS = (range(0x2000, 0x2C00), range(0x2E00, 0x2E80), range(0x3000, 0x3040), range(0xFE10, 0xFE70), range(0x1F000, 0x20000))
"""Blocks of signs: characters that were added to them after Unicode 3.2 are not letters either."""
HASHED_BYTES = 64
"""Bytes of a word that its hash depends on, in addition to its length."""
LOADED = 8
MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
MASKS = np.array([(1 << 8 * count) - 1 for count in range(LOADED + 1)], np.uint64)
FIRST_BYTES = (0, 0, 0xC0, 0xE0, 0xF0)
_ASCII = np.array(
    [ord(chr(byte).lower()) if byte < 0x80 and chr(byte).isalnum() else byte * (byte >= 0x80) for byte in range(256)], np.uint8
)


class Words(NamedTuple):
    """The words of some texts, in order. ``data``: the bytes of words, those of word i at ``starts[i]:stops[i]``. ``bounds``:
    words ``bounds[k]:bounds[k + 1]`` are those of text k. ``hashes``: of each word. ``gone``: bytes of the texts that are not
    in ``data``, in order.
    """

    data: Bytes
    starts: Int64s
    stops: Int64s
    bounds: Int64s
    hashes: UInt64s
    gone: Int64s

    def text(self, first: int, stop: int) -> str:
        """Words ``first:stop``, one space between two."""
        words = (self.data[self.starts[i] : self.stops[i]].tobytes() for i in range(first, stop))
        return b" ".join(words).decode()

    def in_texts(self, places: Int64s) -> Int64s:
        """Places in the bytes of the texts, of places in ``data``: int64[n]."""
        before = self.gone - np.arange(len(self.gone))
        return places + np.searchsorted(before, places, "right")


def words_of(data: Bytes, offsets: Int64s) -> Words:
    """The words of texts in UTF-8, of which text k is ``data[offsets[k]:offsets[k + 1]]``. Places count from ``offsets[0]``."""
    raw, bounds = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    plain = np.zeros(len(raw) + LOADED, np.uint8)  # so that any word's bytes may be loaded eight at a time
    np.take(_ASCII, raw, out=plain[: len(raw)], mode="clip")
    gone = alone = np.empty(0, np.int64)
    if len(raw) and raw.max() >= 0x80:
        gone, alone = _other_characters(raw, plain)
        if len(gone):
            plain = np.delete(plain, gone)
            bounds, alone = (places - np.searchsorted(gone, places) for places in (bounds, alone))
    is_word = plain != 0
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1  # the last bytes are of no word
    if is_word[0]:
        edges = np.concatenate([[0], edges])
    starts, stops = edges[::2], edges[1::2]
    inner = np.concatenate([bounds[1:-1], alone])
    inner = inner[(inner > 0) & (inner < len(plain))]
    inner = np.unique(inner[is_word[inner] & is_word[inner - 1]])
    if len(inner):
        starts, stops = (np.sort(np.concatenate([places, inner]), kind="stable") for places in (starts, stops))
    return Words(plain, starts, stops, np.searchsorted(starts, bounds), _hashes(plain, starts, stops), gone)


def _hashes(plain: Bytes, starts: Int64s, stops: Int64s) -> UInt64s:
    """A hash of each word: equal words, equal hash. uint64[n]"""
    # A view of the eight bytes from each byte on.
    eights: UInt64s = np.ndarray(len(plain) - LOADED + 1, "<u8", buffer=plain.data, strides=(1,))
    lengths = stops - starts
    hashes = eights[starts]
    hashes &= MASKS[np.minimum(lengths, LOADED)]
    hashes += lengths.view(np.uint64) * MIXER
    _mix(hashes)
    longer = np.flatnonzero(lengths > LOADED)
    for at in range(LOADED, HASHED_BYTES, LOADED):
        if not len(longer):
            break
        more = eights[starts[longer] + at] & MASKS[np.minimum(lengths[longer] - at, LOADED)]
        more += hashes[longer] * MULTIPLIER
        _mix(more)
        hashes[longer] = more
        longer = longer[lengths[longer] > at + LOADED]
    return hashes


def _mix(hashes: UInt64s) -> None:
    hashes ^= hashes >> np.uint64(29)
    hashes *= MULTIPLIER
    hashes ^= hashes >> np.uint64(32)


def run_hashes(hashes: UInt64s, count: int) -> UInt64s:
    """The hash of each *count* consecutive words, of the hashes of n words: uint64[n - count + 1]. Its highest bits are the
    best ones.
    """
    found = np.empty(0, np.uint64)
    if len(hashes) < count:
        return found
    length, block, size, power = 0, hashes, 1, MULTIPLIER
    while True:
        if count & size:
            # (length words from i) (size words from i + length) -> length + size words from i
            found = block if not length else found[: len(block) - length] * power + block[length:]
            length += size
        if length == count:
            return found * MIXER
        block = block[:-size] * power + block[size:]
        size *= 2
        power = np.uint64(pow(int(power), 2, 1 << 64))


def _other_characters(raw: Bytes, plain: Bytes) -> tuple[Int64s, Int64s]:
    """Write the forms of characters outside ASCII to *plain*. Return the bytes that they leave over, and where characters that
    are words by themselves begin and end.
    """
    leads = np.flatnonzero(raw >= 0xC0)
    first = raw[leads]
    sizes = 2 + (first >= 0xE0).astype(np.int64) + (first >= 0xF0)
    points = (first & np.array([0, 0, 0x1F, 0x0F, 0x07], np.uint8)[sizes]).astype(np.int64)
    for at in range(1, 4):
        some = np.flatnonzero(sizes > at)
        points[some] = points[some] << 6 | raw[leads[some] + at] & 0x3F
    known = _forms()
    forms = known[np.minimum(points, len(known) - 1)]
    if (points >= len(known)).any():
        forms = np.where(points < len(known), forms, np.where(points < LAST_PLANE, points | ALONE, NOTHING))
    alone = np.flatnonzero(forms & ALONE)
    edges = np.concatenate([leads[alone], leads[alone] + sizes[alone]])
    forms = forms & ~np.int64(ALONE)
    ends = forms == SEPARATOR
    for k in range(4):
        plain[leads[ends & (sizes > k)] + k] = 0
    gone = list[Int64s]()
    changed = np.flatnonzero((forms != points) & ~ends)
    places, sizes, forms = leads[changed], sizes[changed], forms[changed]
    written = np.where(forms == NOTHING, 0, 1 + (forms >= 0x80) + (forms >= 0x800) + (forms >= 0x10000))
    for count in range(5):
        some = written == count
        for k in range(count):
            # UTF-8: the first byte says how many there are, the others begin with the bits 10.
            high = FIRST_BYTES[count] if k == 0 else 0x80
            bits = forms[some] >> 6 * (count - 1 - k)
            plain[places[some] + k] = high | (bits if k == 0 else bits & 0x3F)
        gone += [places[some & (sizes > k)] + k for k in range(count, 4)]
    return np.sort(np.concatenate(gone)), np.sort(edges)


@functools.cache
def _forms() -> Int64s:
    """The form of each character by its code point: int64[0x20000]. Characters after these are Han, words by themselves.

    The database is that of Unicode 3.2, which is in every Python: another release of Python would otherwise find other words.
    Characters that it does not know are letters.
    """
    known = unicodedata.ucd_3_2_0
    forms = np.arange(0x20000, dtype=np.int64)
    for point in range(0x80, len(forms)):
        kind = known.category(chr(point))
        if kind == "Cf" or point in ACCENTS or (kind == "Mn" and point in POINTED):
            forms[point] = NOTHING
        elif kind[0] in "PSZ" or kind in ("Cc", "Cs") or (kind == "Cn" and any(point in block for block in SYMBOLS)):
            forms[point] = SEPARATOR
        elif kind not in ("Cn", "Co", "Lo", "Mc", "Mn", "Me") or known.decomposition(chr(point)):
            forms[point] = _form(chr(point))
    for first, last in SCRIPTS_WITHOUT_SPACES:
        some = forms[first : last + 1]
        some[some > NOTHING] |= ALONE
    return forms


def _form(character: str) -> int:
    """A letter or a digit in lower case without accents and without the form of its width, where it is one character then."""
    known = unicodedata.ucd_3_2_0
    letters = [one for one in known.normalize("NFKD", character.lower()) if ord(one) not in ACCENTS]
    found = letters[0].lower()[:1] if len(letters) == 1 else character.lower()[:1]
    is_word = found.isalnum() if found < "\x80" else known.category(found)[0] not in "PSZC"
    fits = len(found.encode()) <= len(character.encode())
    return ord(found) if is_word and fits else ord(character)
