"""Normalised words of texts, as arrays: no Python object a word.

Two texts that differ in case, accents, punctuation, spaces, line ends and compatible forms (NFKC) alone have the same words.
``_tables`` says of each character what it is in a word.
"""

from __future__ import annotations

import functools
import unicodedata
from itertools import chain
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, Int64Pair, Int64s, UInt8s, UInt64s
from flat_tokens.rows.views import ranges, running_sums

LAST = 0x2FA1E
"""Characters from here on are Han, words by themselves."""
LAST_PLANE = 0xE0000
"""Characters from here on are marks without a form of their own."""
SEPARATOR, NOTHING = 0, 1
"""Forms of characters that end a word, and of those that are left out of it."""
ALONE = 1 << 31
"""Added to the form of a character that is a word by itself, as those of scripts without spaces between words are."""
SECOND, SEVERAL = 1 << 30, 1 << 29
"""Added to the form of a character that may be one with the character before it, and of one that is first written as several."""
PARTS = 3
"""Characters that are one at most, but for the first one."""
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
ACCENTS = frozenset((*range(0x300, 0x345), *range(0x346, 0x370), *range(0xFE00, 0xFE10), 0xAD))
"""Accents of Latin, Greek and Cyrillic letters, but not the iota below, which is a letter in capitals; selectors of variants, and
the soft hyphen.
"""
POINTED = range(0x590, 0x671)
"""Hebrew and Arabic: their vowel points are left out, as most texts have none."""
SYMBOLS = (range(0x2000, 0x2C00), range(0x2E00, 0x2E80), range(0x3000, 0x3040), range(0xFE10, 0xFE70), range(0x1F000, 0x20000))
"""Blocks of signs: characters that were added to them after Unicode 3.2 are not letters either."""
YOUNGER = (range(0x1C89, 0x1C8B), range(0xA7CB, 0xA7DD), range(0x10D50, 0x10D86))
"""Letters with case that came after Unicode 14, which the oldest Python here has."""
HANGUL, HAN = range(0xAC00, 0xD7A4), range(0x2F800, 0x2FA1E)
"""Syllables, which have parts; and characters of Han that are other ones."""
HASHED_BYTES = 64
"""Bytes of a word that its hash depends on, in addition to its length."""
LOADED = 8
MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
MASKS = np.array([(1 << 8 * count) - 1 for count in range(LOADED + 1)], np.uint64)
_ASCII = np.array(
    [ord(chr(byte).lower()) if byte < 0x80 and chr(byte).isalnum() else byte * (byte >= 0x80) for byte in range(256)], np.uint8
)


class Words(NamedTuple):
    """The words of some texts, in order. ``data``: the bytes of words, those of word i at ``starts[i]:stops[i]``. ``bounds``:
    words ``bounds[k]:bounds[k + 1]`` are those of text k. ``hashes``: of each word. ``gone``: bytes of the texts that are not
    in ``data``, in order. ``origin``: the byte of the texts that each byte was, if characters were written as several.
    """

    data: UInt8s
    starts: Int64s
    stops: Int64s
    bounds: Int64s
    hashes: UInt64s
    gone: Int64s
    origin: Int64s | None

    def text(self, first: int, stop: int) -> str:
        """Words ``first:stop``, one space between two."""
        words = (self.data[self.starts[i] : self.stops[i]].tobytes() for i in range(first, stop))
        return b" ".join(words).decode()

    def in_texts(self, places: Int64s) -> Int64s:
        """Places in the bytes of the texts, of places in ``data``: int64[n]."""
        before = self.gone - np.arange(len(self.gone))
        places = places + np.searchsorted(before, places, "right")
        return places if self.origin is None else self.origin[places]


def words_of(data: UInt8s, offsets: Int64s) -> Words:
    """The words of texts in UTF-8, of which text k is ``data[offsets[k]:offsets[k + 1]]``. Places count from ``offsets[0]``."""
    raw, bounds = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    origin = characters = None
    gone = alone = np.empty(0, np.int64)
    if len(raw) and raw.max() >= 0x80:
        characters = _characters(raw)
        if len(several := np.flatnonzero(characters.forms & SEVERAL)):
            raw, origin, bounds = _written_out(raw, bounds, *(values[several] for values in characters[:3]))
            characters = _characters(raw)
    plain = np.zeros(len(raw) + LOADED, np.uint8)  # so that any word's bytes may be loaded eight at a time
    np.take(_ASCII, raw, out=plain[: len(raw)], mode="clip")
    if characters is not None:
        gone, alone = _other_characters(characters, plain, bounds)
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
    return Words(plain, starts, stops, np.searchsorted(starts, bounds), _hashes(plain, starts, stops), gone, origin)


def _hashes(plain: UInt8s, starts: Int64s, stops: Int64s) -> UInt64s:
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


class _WideCharacters(NamedTuple):
    """Characters outside ASCII: where each begins, its bytes, its code point, and its form."""

    leads: Int64s
    sizes: Int64s
    points: Int64s
    forms: Int64s


def _characters(raw: UInt8s) -> _WideCharacters:
    leads = np.flatnonzero(raw >= 0xC0)
    points = np.frombuffer(raw[raw >= 0x80].tobytes().decode().encode("utf-32-le"), "<u4").astype(np.int64)
    forms = _tables().forms[np.minimum(points, LAST)]
    if (points >= LAST).any():
        forms = np.where(points < LAST, forms, np.where(points < LAST_PLANE, points | ALONE, NOTHING))
    return _WideCharacters(leads, _sizes(points), points, forms)


def _sizes(points: Int64s) -> Int64s:
    """The bytes of each character in UTF-8."""
    return 1 + (points >= 0x80) + (points >= 0x800).astype(np.int64) + (points >= 0x10000)


def _written_out(
    raw: UInt8s, bounds: Int64s, leads: Int64s, sizes: Int64s, points: Int64s
) -> tuple[UInt8s, Int64s | None, Int64s]:
    """The texts with the given characters written as several, the byte that each byte was, and the bounds of the texts."""
    tables = _tables()
    lengths = tables.lengths[points]
    letters = tables.bytes[ranges(tables.starts[points], lengths)]
    if (lengths == sizes).all():  # ß and ss, for one
        written = raw.copy()
        written[ranges(leads, lengths)] = letters
        return written, None, bounds
    counts = np.ones(len(raw), np.int64)
    counts[ranges(leads, sizes)] = 0
    counts[leads] = lengths
    ends = running_sums(counts)
    origin = np.repeat(np.arange(len(raw)), counts)
    written = raw[origin]
    written[ranges(ends[leads], lengths)] = letters
    return written, origin, ends[bounds]


def _other_characters(characters: _WideCharacters, plain: UInt8s, bounds: Int64s) -> Int64Pair:
    """Write the forms of characters outside ASCII to *plain*. Return the bytes that they leave over, and where characters that
    are words by themselves begin and end. *bounds*: where texts begin.
    """
    leads, sizes, points, forms = characters
    alone = np.flatnonzero(forms & ALONE)
    edges = np.concatenate([leads[alone], leads[alone] + sizes[alone]])
    second = np.flatnonzero(forms & SECOND)
    forms = forms & ~np.int64(ALONE | SECOND)
    if len(second):
        follows = np.concatenate([[False], leads[1:] == leads[:-1] + sizes[:-1], [False]])
        follows[np.searchsorted(leads, bounds)] = False
        _compose(forms, second, follows)
    ends = forms == SEPARATOR
    plain[ranges(leads[ends], sizes[ends])] = 0
    changed = np.flatnonzero((forms != points) & ~ends)
    places, sizes, forms = leads[changed], sizes[changed], forms[changed]
    written = np.where(forms == NOTHING, 0, _sizes(forms))
    letters = forms[forms != NOTHING].astype("<u4").tobytes().decode("utf-32-le").encode()
    plain[ranges(places, written)] = np.frombuffer(letters, np.uint8)
    return ranges(places + written, sizes - written), np.sort(edges)


def _compose(forms: Int64s, second: Int64s, follows: Bools) -> None:
    """Compose pairs of characters, such as the parts of a syllable: the place of the first gets the composed form, that of the
    second NOTHING. *second*: places of characters that may be the second of a pair. *follows*: whether the character before
    each place is directly before it in the same text.
    """
    tables = _tables()
    second = second[follows[second]]
    first = second - 1
    for _ in range(PARTS):
        pairs = forms[first] << 21 | forms[second]
        found = np.minimum(np.searchsorted(tables.pairs, pairs), len(tables.pairs) - 1)
        fits = tables.pairs[found] == pairs
        forms[first[fits]] = tables.composed[found[fits]]
        forms[second[fits]] = NOTHING
        # A third part follows what became nothing.
        left = ~fits & (forms[first] == NOTHING) & follows[first]
        first, second = first[left] - 1, second[left]


class _Tables(NamedTuple):
    """Forms of characters in words. ``forms``: by code point; 0x20000 to LAST are Han, words by themselves. A character that is
    several is first written as ``bytes[starts[point]:][:lengths[point]]``. ``pairs``: first << 21 | second, sorted, each of which
    is one character of ``composed``.
    """

    forms: Int64s
    starts: Int64s
    lengths: Int64s
    bytes: UInt8s
    pairs: Int64s
    composed: Int64s


@functools.cache
def _tables() -> _Tables:
    """The database is that of Unicode 3.2, which is in every Python: another release of Python would otherwise find other words.
    Characters that it does not know are letters.
    """
    known = unicodedata.ucd_3_2_0
    forms = np.arange(LAST + 1, dtype=np.int64)
    lengths, starts, written = np.zeros_like(forms), np.zeros_like(forms), bytearray()
    pairs = dict[int, int]()
    kinds = {point: known.category(chr(point)) for point in (*range(0x80, 0x20000), *HAN)}
    symbols, younger = frozenset(chain(*SYMBOLS)), frozenset(chain(*YOUNGER))
    for point, kind in kinds.items():
        if kind == "Cf" or point in ACCENTS or (kind == "Mn" and point in POINTED):
            forms[point] = NOTHING
        elif kind[0] in "PSZ" or kind in ("Cc", "Cs") or (kind == "Cn" and point in symbols):
            forms[point] = SEPARATOR
    nothing = {chr(point) for point in np.flatnonzero(forms == NOTHING).tolist()}
    for point in kinds:
        character = chr(point)
        folded = character if point in younger else character.casefold()
        if (folded == character and not (point in HANGUL or known.decomposition(character))) or character in nothing:
            continue
        parts = known.normalize("NFD", character)
        if len(parts) > 1 and ord(parts[-1]) not in ACCENTS and known.normalize("NFC", parts) == character:
            pairs[ord(known.normalize("NFC", parts[:-1])) << 21 | ord(parts[-1])] = point
        if point in HANGUL:
            continue
        plain = known.normalize("NFKD", known.normalize("NFKD", folded).casefold())
        plain = known.normalize("NFC", "".join(one for one in plain if one not in nothing))
        if plain == character or all(known.category(one)[0] in "PSZ" for one in plain):
            continue
        if len(plain) == 1 and len(plain.encode()) <= len(character.encode()):
            forms[point] = ord(plain)
        else:
            starts[point], lengths[point] = len(written), len(plain.encode())
            forms[point] |= SEVERAL
            written += plain.encode()
    for begin, end in (*SCRIPTS_WITHOUT_SPACES, (0x20000, LAST)):
        some = forms[begin : end + 1]
        some[some > NOTHING] |= ALONE
    keys = np.array(sorted(pairs), np.int64)
    forms[np.isin(forms & (1 << 21) - 1, keys & (1 << 21) - 1)] |= SECOND
    return _Tables(forms, starts, lengths, np.frombuffer(bytes(written), np.uint8), keys, np.array([pairs[key] for key in keys]))
