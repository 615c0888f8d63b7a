"""The step ``decontaminate``: what is done with documents that have the words of a question of an evaluation set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flat_tokens.annotations import Int64s, IntPair
from flat_tokens.columns import as_arrow, texts_as_arrow
from flat_tokens.extras import pa
from flat_tokens.rows.views import running_sums
from flat_tokens.steps.contract import Outcome, TextMatch
from flat_tokens.steps.questions import Found, QuestionIndex, Questions, index_of
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.rows import text_buffers

ACTIONS = ("drop", "mark", "span")
JOINED_BY = "\n"
"""Stands between the parts of a text that are left."""


class Decontaminate:
    """Looks for questions of evaluation sets in documents. *against*: the sets, each with a ``name``, and once a build has read
    them with a ``digest``. *ngram*: so many consecutive words are a match; of questions with fewer words, but *min_words* or
    more, all of them are. *action*: ``drop`` leaves the document out; ``mark`` writes the names of the sets to *column*;
    ``span`` cuts the words out, with *context* characters on both sides. *sets_url*: where a build keeps the sets, by digest.
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
        described: dict[str, Any] = {"against": against, "ngram": ngram, "min_words": min_words, "action": action}
        particular: dict[str, dict[str, Any]] = {"mark": {"column": column}, "span": {"context": context}, "drop": {}}
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
            return Outcome(columns={self.gives_columns[0]: self._marks(found, len(texts))}, matches=matches)
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
        pairs = np.stack([found.text[order], found.set[order]])
        first = order[np.concatenate([np.ones(min(len(order), 1), bool), (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)])]
        return [
            TextMatch(text, self._sets[of]["name"], {"question": question})
            for text, of, question in zip(
                *(values[first].tolist() for values in (found.text, found.set, found.question)), strict=True
            )
        ]

    def _marks(self, found: Found, count: int) -> pa.Array:
        """The names of the sets that each of *count* documents matches, a comma between two; null for none."""
        names = dict[int, list[str]]()
        for match in self._matches(found):
            names.setdefault(match.document, []).append(match.name)
        marks: list[str | None] = [None] * count
        for document, of in names.items():
            marks[document] = ",".join(of)
        return texts_as_arrow(marks)

    def _without(self, text: str, starts: Int64s, stops: Int64s) -> str:
        """The text without the bytes ``starts[i]:stops[i]`` and their context."""
        is_first = np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80
        before = running_sums(is_first)  # bytes -> characters
        parts, end = list[str](), 0
        for start, stop in merged(before[starts] - self._context, before[stops] + self._context):
            parts.append(text[end : max(start, 0)])
            end = stop
        return JOINED_BY.join(part for part in (*parts, text[end:]) if part)


def merged(starts: Int64s, stops: Int64s) -> list[IntPair]:
    """Ranges in order, those that touch joined. *starts* are in order."""
    ends = np.maximum.accumulate(stops)
    is_new = np.concatenate([np.ones(min(len(starts), 1), bool), starts[1:] > ends[:-1]])
    last = np.flatnonzero(np.concatenate([is_new[1:], np.ones(min(len(starts), 1), bool)]))
    return list(zip(starts[is_new].tolist(), ends[last].tolist(), strict=True))
