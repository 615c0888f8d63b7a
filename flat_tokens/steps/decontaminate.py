"""The step ``decontaminate``: what is done with documents that have the words of a question of an evaluation set; the questions
of sets as one object, and where texts have the same words as one of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.annotations import Bools, Int64Pair, Int64s, JsonObject, UInt8s, UInt64s
from flat_tokens.columns import as_arrow, texts_as_arrow
from flat_tokens.extras import pa
from flat_tokens.rows.views import ranges, running_sums
from flat_tokens.steps.contract import Outcome, TextMatch
from flat_tokens.steps.words import Words, run_hashes, words_of
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.rows import text_buffers

WINDOW_BYTES = 1 << 19
"""Text that is looked through at a time: what is made of it fits in a processor's cache."""
COMPARED_AT_ONCE = 1 << 12
FEWEST_BITS, MOST_BITS, BITS_EACH = 1 << 16, 1 << 32, 64
"""Bits of a filter: BITS_EACH for each run of words that is looked for, so that 1 or 2 of 100 others pass."""


class Questions(NamedTuple):
    """The texts of an evaluation set in UTF-8: text k is ``data[offsets[k]:offsets[k + 1]]``. int64[n + 1]"""

    data: UInt8s
    offsets: Int64s

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def stored(self) -> bytes:
        """The set as an object: how many texts, where each ends, and their bytes. Its SHA-256 is the set's digest."""
        ends = (self.offsets - self.offsets[0])[1:].astype("<u8")
        text = self.data[self.offsets[0] : self.offsets[-1]]
        return b"".join((len(ends).to_bytes(8, "little"), ends.tobytes(), text.tobytes()))

    @classmethod
    def of_stored(cls, stored: bytes, digest: str) -> Questions:
        """The set of an object. ValueError if it is another one."""
        if hashlib.sha256(stored).hexdigest() != digest:
            raise ValueError("does not have its digest")
        count = int(np.frombuffer(stored, "<u8", 1)[0])
        ends = np.frombuffer(stored, "<u8", count, 8).astype(np.int64)
        return cls(np.frombuffer(stored, np.uint8, offset=8 * (count + 1)), np.concatenate([np.zeros(1, np.int64), ends]))


class Found(NamedTuple):
    """Places in n texts that have the words of a question, in the order of the texts and of the places. ``text``: of which text;
    ``start``, ``stop``: its bytes; ``set``, ``question``: whose words; ``word``, ``length``: the first of
    these words in the index, and how many. int64[m] each
    """

    text: Int64s
    start: Int64s
    stop: Int64s
    set: Int64s
    question: Int64s
    word: Int64s
    length: Int64s

    def those(self, which: Int64s | Bools) -> Found:
        return Found(*(values[which] for values in self))

    @classmethod
    def together(cls, several: Sequence[Found]) -> Found:
        return cls(*map(np.concatenate, zip(cls(*[_NONE] * len(cls._fields)), *several, strict=True)))


_NONE = np.empty(0, np.int64)


class _Runs(NamedTuple):
    """Runs of words that are looked for by their first *size* words: the hashes of these, uint64[n] in order; where each begins
    in the words of the sets, how many words are compared, the set and the question, int64[n]. ``filter``: a bit for
    each value of the highest bits of a hash, whether one may be there.
    """

    size: int
    hashes: UInt64s
    first: Int64s
    length: Int64s
    set: Int64s
    question: Int64s
    filter: UInt8s
    shift: np.uint64

    @classmethod
    def of(cls, size: int, words: Words, runs: Int64s) -> _Runs:
        """*runs*: where each begins, how many words, the set and the question: int64[4, n]."""
        hashes = run_hashes(words.hashes, size)[runs[0]]
        order = np.lexsort((runs[0], runs[2], hashes))
        hashes, runs = hashes[order], runs[:, order]
        # Of equal runs of a set, the first question's is enough.
        first, length, of_set, _ = runs
        again = np.flatnonzero((hashes[1:] == hashes[:-1]) & (of_set[1:] == of_set[:-1]) & (length[1:] == length[:-1])) + 1
        keep = np.ones(len(hashes), bool)
        keep[again[are_equal(words, first[again - 1], words, first[again], length[again])]] = False
        hashes, runs = hashes[keep], runs[:, keep]
        bits = min(max(1 << (BITS_EACH * len(hashes)).bit_length() - 1, FEWEST_BITS), MOST_BITS)
        shift = np.uint64(64 - (bits.bit_length() - 1))
        places, passing = hashes >> shift, np.zeros(bits >> 3, np.uint8)
        np.bitwise_or.at(passing, (places >> np.uint64(3)).astype(np.int64), _bit(places))
        first, length, of_set, question = runs
        return cls(size, hashes, first, length, of_set, question, passing, shift)

    def candidates(self, words: Words) -> Int64Pair:
        """Words of texts from which on a run may be there, and the run: equal hashes, within one text."""
        hashes = run_hashes(words.hashes, self.size)
        bits = hashes >> self.shift
        places = np.flatnonzero(self.filter[(bits >> np.uint64(3)).view(np.int64)] & _bit(bits))
        left = np.searchsorted(self.hashes, wanted := hashes[places])
        there = self.hashes[np.minimum(left, len(self.hashes) - 1)] == wanted
        places, left = places[there], left[there]
        many = np.searchsorted(self.hashes, wanted[there], "right") - left
        at = np.repeat(places, many)
        run = np.repeat(left - np.cumsum(many) + many, many) + np.arange(len(at))
        end = words.bounds[np.searchsorted(words.bounds, at, "right")]
        fits = at + self.length[run] <= end
        return at[fits], run[fits]


def _first_of_each(*columns: Int64s) -> Bools:
    """Which rows differ from the row before: bool[n]"""
    rows = np.stack(columns)
    differs = np.ones(rows.shape[1], bool)
    differs[1:] = (rows[:, 1:] != rows[:, :-1]).any(axis=0)
    return differs


def _bit(bits: UInt64s) -> UInt8s:
    """The bit of each of *bits* in its byte: uint8[n]"""
    return np.left_shift(np.uint8(1), (bits & np.uint64(7)).astype(np.uint8))


class QuestionIndex:
    """Where texts have a question of some evaluation *sets*, by words: *size* consecutive words of it, or all of them, if it has
    *least* words or more but not *size*. ``too_short``: questions of each set that have fewer words.
    """

    def __init__(self, sets: Sequence[Questions], size: int, least: int) -> None:
        joined = [questions.stored()[8 * (len(questions) + 1) :] for questions in sets]
        sizes = np.concatenate([_NONE, *(np.diff(questions.offsets) for questions in sets)])
        offsets = running_sums(sizes)
        self.words = words = words_of(np.frombuffer(b"".join(joined), np.uint8), offsets)
        of_set = np.repeat(np.arange(len(sets)), list(map(len, sets)))
        number = np.concatenate([_NONE, *(np.arange(len(questions)) for questions in sets)])
        counts = np.diff(words.bounds)
        self.too_short = np.bincount(of_set[counts < min(least, size)], minlength=len(sets))
        self.looked_for = np.bincount(of_set, minlength=len(sets)) - self.too_short
        self._longest, self._runs = size, list[_Runs]()
        many = np.maximum(counts - size + 1, 0)
        text = np.repeat(np.arange(len(counts)), many)
        short = np.flatnonzero((counts >= least) & (counts < size))
        for shortest, of, first, lengths in (
            (size, text, ranges(words.bounds[:-1], many), np.full(len(text), size)),
            (least, short, words.bounds[short], counts[short]),
        ):
            if len(first):
                self._runs.append(_Runs.of(shortest, words, np.stack([first, lengths, of_set[of], number[of]])))

    def find(self, data: UInt8s, offsets: Int64s) -> Found:
        """The places in texts, of which text k is ``data[offsets[k]:offsets[k + 1]]``."""
        found = Found.together([self._in_window(*window, data, offsets) for window in self._windows(data, offsets)])
        order = np.lexsort((found.question, found.set, found.stop, found.start, found.text))
        found = found.those(order)
        return found.those(_first_of_each(*found))  # windows of a long text overlap

    def _windows(self, data: UInt8s, offsets: Int64s) -> Iterator[tuple[int, Words, np.int64]]:
        """Words of texts, some at a time: the number of the first text, the words, and where their bytes begin. Those of a long
        text overlap by a run.
        """
        text, count = 0, len(offsets) - 1
        while text < count:
            stop = int(np.searchsorted(offsets, offsets[text] + WINDOW_BYTES, "right")) - 1
            if stop > text:
                yield text, words_of(data, offsets[text : stop + 1]), offsets[text]
                text = stop
                continue
            yield from ((text, *window) for window in self._windows_of(data, int(offsets[text]), int(offsets[text + 1])))
            text += 1

    def _windows_of(self, data: UInt8s, start: int, stop: int) -> Iterator[tuple[Words, np.int64]]:
        """Windows of one long text."""
        size = WINDOW_BYTES
        while True:
            end = min(start + size, stop)
            if end < stop:
                end = start + _last_end(data[start:end])
            words = words_of(data, np.array([start, end], np.int64))
            if end < stop and len(words.starts) <= self._longest + 1:
                size *= 2  # no spaces, or few and very long words
                continue
            yield words, np.int64(start)
            if end == stop:
                return
            start += int(words.in_texts(words.starts[-self._longest :])[0])
            size = WINDOW_BYTES

    def _in_window(self, first: int, words: Words, begin: np.int64, data: UInt8s, offsets: Int64s) -> Found:
        """The questions whose words occur in a window of texts, with their places in the texts."""
        found = list[Found]()
        for runs in self._runs:
            at, run = runs.candidates(words)
            same = are_equal(words, at, self.words, runs.first[run], runs.length[run])
            at, run = at[same], run[same]
            text = np.searchsorted(words.bounds, at, "right") - 1
            # (bytes of the window) -> bytes of the text
            origin = offsets[first + text]
            start, end = (
                words.in_texts(places) + begin for places in (words.starts[at], words.stops[at + runs.length[run] - 1] - 1)
            )
            end = end + 1
            for _ in range(3):  # up to the end of the last character
                end = end + ((end < len(data)) & (data[np.minimum(end, len(data) - 1)] & 0xC0 == 0x80))
            facts = (runs.set[run], runs.question[run], runs.first[run], runs.length[run])
            found.append(Found(first + text, start - origin, end - origin, *facts))
        return Found.together(found)


def _last_end(text: UInt8s) -> int:
    """The last place of *text* at which no word goes on, as spaces of ASCII show it; 0 without any."""
    spaces = np.flatnonzero((text == ord(" ")) | (text == ord("\n")))
    return int(spaces[-1]) + 1 if len(spaces) else 0


_indexes: dict[tuple[Any, ...], QuestionIndex] = {}
"""The last indexes, by the digests of their sets and their settings."""
MOST_INDEXES = 8
_lock = threading.Lock()


def index_of(digests: Sequence[str], read: Callable[[], Sequence[Questions]], size: int, least: int) -> QuestionIndex:
    """The index of the sets that have these *digests*, which are read and indexed once a process."""
    key = (*digests, size, least)
    with _lock:
        if key not in _indexes:
            if len(_indexes) == MOST_INDEXES:
                _indexes.clear()
            _indexes[key] = QuestionIndex(read(), size, least)
        return _indexes[key]


def are_equal(words: Words, at: Int64s, others: Words, other_at: Int64s, counts: Int64s) -> Bools:
    """Whether words ``at[i]:at[i] + counts[i]`` are, byte for byte, those of *others* from ``other_at[i]`` on: bool[n]."""
    equal = np.ones(len(at), bool)
    for first in range(0, len(at), COMPARED_AT_ONCE):
        some = slice(first, first + COMPARED_AT_ONCE)
        one, other = (ranges(places[some], counts[some]) for places in (at, other_at))
        pair = np.repeat(np.arange(len(at))[some], counts[some])
        lengths, wanted = words.stops[one] - words.starts[one], others.stops[other] - others.starts[other]
        equal[pair[lengths != wanted]] = False
        left = equal[pair]
        one, other, pair, lengths = one[left], other[left], pair[left], lengths[left]
        here, there = (ranges(one_of.starts[which], lengths) for one_of, which in ((words, one), (others, other)))
        equal[np.repeat(pair, lengths)[words.data[here] != others.data[there]]] = False
    return equal


ACTIONS = ("drop", "mark", "span")
JOINED_BY = "\n"
"""Stands between the parts of a text that are left."""


class Decontaminate:
    """Looks for questions of evaluation sets in documents. *against*: the sets, each with a ``name``, and with a ``digest``
    once a build has read them. *ngram*: the number of consecutive words that are a match. A question with fewer words, but
    *min_words* or more, matches with all of them. *action*: ``drop`` leaves the document out; ``mark`` writes the names of the
    sets to *column*; ``span`` cuts the words out, with *context* characters on both sides. *sets_url*: where a build keeps the
    sets, by digest.
    """

    version = "2"

    def __init__(
        self,
        *,
        against: Sequence[Any],
        ngram: int = 13,
        action: str = "drop",
        min_words: int = 8,
        context: int = 200,
        column: str = "contaminated",
        sets_url: str | None = None,
    ) -> None:
        if isinstance(against, str | Mapping) or not against:
            raise ValueError("against should be a list of evaluation sets, such as [/data/gsm8k.jsonl]")
        for name, value, least in (("ngram", ngram, 1), ("min_words", min_words, 1), ("context", context, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} should be a whole number, {least} or more")
        if action not in ACTIONS:
            raise ValueError(f"action is {action!r}; it should be {', '.join(ACTIONS)}")
        self._sets, self._url, self._action, self._context = against, sets_url, action, context
        self._ngram, self._min_words = ngram, min_words
        self.most_reasons = len(against)
        self.gives_columns: tuple[str, ...] = (column,) if action == "mark" else ()
        described: JsonObject = {"against": against, "ngram": ngram, "min_words": min_words, "action": action}
        particular: dict[str, JsonObject] = {"mark": {"column": column}, "span": {"context": context}, "drop": {}}
        self.described_as = {**described, **particular[action]}

    @property
    def index(self) -> QuestionIndex:
        """The sets, read once a process. OSError if they are not there, or others."""
        url = self._url
        if url is None or not all(isinstance(one, Mapping) and "digest" in one for one in self._sets):
            # No ValueError: it is no document's fault.
            raise OSError("the evaluation sets of the step decontaminate are not here: only a build reads them")
        digests = [str(one["digest"]) for one in self._sets]
        return index_of(digests, lambda: [self._read(Store.at(url), one) for one in self._sets], self._ngram, self._min_words)

    def _read(self, store: Store, one: Any) -> Questions:
        key = str(one["digest"])
        try:
            return Questions.of_stored(store.read(key), key)
        except (*NO_OBJECT, ValueError) as error:
            raise OSError(
                f"{store.path(key)}: is not the evaluation set {one['name']!r}. Run the build again ({error})"
            ) from error

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        texts = documents.column("text")
        data, offsets = text_buffers(texts)
        found = self.index.find(data, offsets)
        matches = self._matches(found)
        if self._action == "mark":
            by_document = dict[int, list[str]]()
            for match in matches:
                by_document.setdefault(match.document, []).append(match.name)
            marks = [",".join(by_document[i]) if i in by_document else None for i in range(len(texts))]
            return Outcome(columns={self.gives_columns[0]: texts_as_arrow(marks)}, matches=matches)
        if not matches:
            return Outcome()
        names: list[str | None] = [None] * len(texts)
        for match in reversed(matches):  # so that the first set stays
            names[match.document] = match.name
        reasons = texts_as_arrow(names)
        if self._action == "drop":
            return Outcome(np.array([name is None for name in names]), reasons, matches=matches)
        contaminated, first = np.unique(found.text, return_index=True)
        of_each = zip(contaminated.tolist(), first.tolist(), [*first[1:].tolist(), len(found.text)], strict=True)
        after = [self._without(texts[i].as_py(), found.start[start:stop], found.stop[start:stop]) for i, start, stop in of_each]
        keep, is_cut = np.ones(len(texts), bool), np.zeros(len(texts), bool)
        is_cut[contaminated] = True
        keep[contaminated] = [bool(text.strip()) for text in after]
        cut = pa.compute.replace_with_mask(texts, as_arrow(is_cut), texts_as_arrow(after))
        return Outcome(keep, reasons, cut, matches=matches)

    def _matches(self, found: Found) -> list[TextMatch]:
        """The first match of each document and set, by document and in the sets' order."""
        order = np.lexsort((found.start, found.set, found.text))
        first = order[_first_of_each(found.text[order], found.set[order])]
        return [
            TextMatch(text, self._sets[of]["name"], {"question": question})
            for text, of, question in zip(
                *(values[first].tolist() for values in (found.text, found.set, found.question)), strict=True
            )
        ]

    def _without(self, text: str, starts: Int64s, stops: Int64s) -> str:
        """The text without the bytes ``starts[i]:stops[i]`` and their context. *starts* are in order."""
        is_first = np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80
        before = running_sums(is_first)  # bytes -> characters
        parts, end = list[str](), 0
        for start, stop in zip(before[starts].tolist(), before[stops].tolist(), strict=True):
            parts.append(text[end : max(start - self._context, 0)])
            end = max(end, stop + self._context)
        return JOINED_BY.join(part for part in (*parts, text[end:]) if part)
