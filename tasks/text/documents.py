"""Slices of source files, and their documents: Arrow batches of text with keys and rows, after the policy for bad documents and
the steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Bools, Int64s, IntPair, JsonObject, UInt64s
from flat_tokens.columns import BEYOND, FLOAT64_HAS_ALL, as_arrow, kind_of
from flat_tokens.forgotten import Forgotten
from flat_tokens.keys import document_keys, keys_of_bytes
from flat_tokens.steps import ReadySteps, TextMatch
from flat_tokens.text.formats import FORMATS
from flat_tokens.text.rows import Rows, as_unicode, ids_as_text, keys_of, text_buffers, too_long
from tasks.config import DocumentPolicy, Source
from tasks.models import FORGOTTEN, FileRange, Slice
from tasks.rows import KEY, REASON, ROW, SPLIT_KEY, JoinedKinds, as_rows, changed, fact, kept_of
from tasks.text.files import range_of, text_file
from tasks.text.runs import RunOfFiles, RunRows


class TextBatch(NamedTuple):
    """Texts without nulls, all of them Unicode, and their rows: those facts that do not follow from the texts, and the kept
    columns. A row counts within the slice.
    """

    texts: pa.LargeStringArray
    rows: pa.RecordBatch

    @property
    def keys(self) -> UInt64s:
        return fact(self.rows, KEY)

    def part(self, start: int, stop: int) -> TextBatch:
        """Documents ``start:stop``. No copy."""
        return TextBatch(self.texts.slice(start, stop - start), self.rows.slice(start, stop - start))

    def those(self, keep: Bools) -> TextBatch:
        """The documents *keep*, bool[n]."""
        if keep.all():
            return self
        mask = as_arrow(keep)
        return TextBatch(self.texts.filter(mask), self.rows.filter(mask))

    def with_split_keys(self, split_keys: UInt64s) -> TextBatch:
        return self._replace(rows=changed(self.rows, as_rows({SPLIT_KEY: split_keys})))


ONE_KIND = "Let the step that gives it give one type."
EXAMPLES = 3
"""Documents that are kept as examples of what a step found, of each slice and of each version."""


@dataclass
class Tally:
    """Counts of a slice's rows, by what became of them. ``file_rows``: rows of each range that was read to its end. ``seen``:
    about how many of its ``text_bytes`` have been read.
    ``file_bytes``: bytes of text of each file of a run; ``file_kinds``: the kinds of its kept columns, None if these, or counts
    of its documents, are known only together with those of other files; ``counted``: such counts of the last file.
    ``before_steps``: bytes of text that came to the steps, and ``step_seconds`` the time that they took for it. ``kinds``: of the
    kept columns, as far as they have been read.
    ``matches``: documents in which steps found something, by step and what it was; ``examples``: the first few of each.
    ``forgotten``: the list of documents that are counted alone; ``left_out``: rows of the others that are left out.
    """

    rows: int = 0
    seen: int = 0
    read: int = 0
    written: int = 0
    text_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    before_steps: int = 0
    step_seconds: float = 0
    kinds: JoinedKinds = field(default_factory=JoinedKinds)
    file_rows: list[int] = field(default_factory=list)
    matches: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[JsonObject]] = field(default_factory=dict)
    forgotten: Forgotten = field(default_factory=Forgotten)
    left_out: list[pa.RecordBatch] = field(default_factory=list)
    file_bytes: list[int] = field(default_factory=list)
    file_kinds: list[Mapping[str, str] | None] = field(default_factory=list)
    counted: int = 0

    def leave_out(self, rows: pa.RecordBatch, reasons: Mapping[str, Sequence[int] | Int64s]) -> None:
        """Leave documents out: their numbers among *rows*, by the reason. Of one that is forgotten no row is kept."""
        which = np.repeat(np.arange(len(reasons)), list(map(len, reasons.values())))
        if not len(which):
            return
        numbers = np.concatenate([np.asarray(some, np.int64) for some in reasons.values()])
        gone = self.forgotten.those(fact(rows, KEY)[numbers])
        counts = np.bincount(which[~gone], minlength=len(reasons)).tolist()
        self.skipped.update({**dict(zip(reasons, counts, strict=True)), FORGOTTEN: int(gone.sum())})
        names = keys_of_bytes([name.encode() for name in reasons])[which[~gone]]
        self.left_out.append(changed(rows.take(as_arrow(numbers[~gone])), as_rows({REASON: names})))

    def note(self, matches: Sequence[TextMatch], rows: pa.RecordBatch) -> None:
        """Count what steps found in documents that are at *rows*. Forgotten ones are not kept as examples."""
        gone = self.forgotten.those(fact(rows, KEY)) if matches else ()
        for match in matches:
            self.matches[match.name] += 1
            if not gone[match.document] and len(examples := self.examples.setdefault(match.name, [])) < EXAMPLES:
                # Text of a document would stay in records when it is forgotten.
                facts = {name: fact for name, fact in match.example.items() if not isinstance(fact, str)}
                examples.append({"row": int(fact(rows, ROW)[match.document]), **facts})

    def end_files(self, found: RunRows, documents: TextBatch, *, typed: bool) -> None:
        """Count the files that end with some rows of a run, of which *documents* are kept. *typed*: a kept column has a kind even
        in a file without values of it.
        """
        (rows, counts), begin = found, self.rows
        self.rows, self.seen, kinds = rows.end, rows.seen, kinds_of(rows.columns)
        counted = self.replaced.total() + self.matches.total() + self.skipped[FORGOTTEN]
        known = np.full(len(counts), counted == self.counted and BEYOND not in kinds.values())
        self.counted = counted
        # (slice, file) -> (slice, row): the first file may have begun before these rows
        starts = sum(self.file_rows) + np.cumsum([0, *counts])
        known[:1] &= starts[0] == begin
        for column in rows.columns or () if not typed else ():
            if not pa.types.is_null(column.type):
                known &= np.diff(np.searchsorted(rows.rows[np.asarray(column.is_valid())], starts)) > 0
        offsets = text_buffers(documents.texts)[1]
        ends = offsets[np.searchsorted(fact(documents.rows, ROW).astype(np.int64), starts[1:])] - offsets[-1] + self.text_bytes
        self.file_bytes += np.diff(ends, prepend=sum(self.file_bytes)).tolist()
        self.file_kinds += [kinds if is_known else None for is_known in known.tolist()]
        self.file_rows += counts

    def add(self, refused: Tally) -> None:
        """Add the counts of documents that were refused after they had been counted here."""
        self.written += refused.written
        self.text_bytes += refused.text_bytes
        self.skipped.update(refused.skipped)
        self.left_out += refused.left_out


def read_documents(
    slice_: Slice,
    source: Source,
    policy: DocumentPolicy,
    tally: Tally,
    batch_bytes: int | None = None,
    split_by: str | None = None,
) -> Iterator[TextBatch]:
    """The documents of a slice in batches of about 4 MB of text, or *batch_bytes*, in order, after the policy's steps, without
    those that are forgotten, whose text is counted. *tally* counts along. *split_by*: ``text``, or a kept column, whose hashes
    are the split keys. ValueError names file and row of a bad document if the policy says so, and a file that changes
    meanwhile.
    """

    def check(rows: Rows, part: FileRange) -> None:
        tally.kinds.add(kinds_of(rows.columns), part.file.name)

    steps = policy.opened()
    for found in RunOfFiles(slice_.ranges, source, policy, check, batch_bytes, slice_.rows_before).read():
        documents = _clean(found.rows, slice_, source, policy, tally)
        if split_by == "text":  # before all steps, as keys are
            documents = documents.with_split_keys(keys_of(documents.texts, None))
        if steps.described:
            documents = _take_steps(steps, documents, slice_, source, policy, tally)
        if split_by is not None and split_by != "text":
            kept = kept_of(documents.rows)
            assert kept is not None
            documents = documents.with_split_keys(value_keys(kept.column(split_by), documents.keys))
        _, offsets = text_buffers(documents.texts)
        tally.text_bytes += int(offsets[-1] - offsets[0])
        if (gone := tally.forgotten.those(documents.keys)).any():
            # After the steps: the counts of the others are then those of a version that had these documents.
            tally.skipped[FORGOTTEN] += int(gone.sum())
        tally.end_files(found, documents, typed=slice_.ranges[0].file.format != "jsonl")
        documents = documents.those(~gone)
        tally.written += len(documents.texts)
        yield documents
    if tally.read != tally.written + tally.skipped.total():
        raise AssertionError(f"{slice_.label}: read {tally.read}, written {tally.written}, skipped {tally.skipped}")


def by_reason(bad: Iterable[Any]) -> dict[str, list[int]]:
    """The numbers of bad documents by the reason, of their numbers, reasons and details."""
    found = dict[str, list[int]]()
    for number, reason, _ in bad:
        found.setdefault(reason, []).append(number)
    return found


def value_keys(values: pa.Array, keys: UInt64s) -> UInt64s:
    """Hashes of the values of a kept column, whose kind may differ from batch to batch: equal values, equal hash: uint64[n]. A
    document without a value has its own key.
    """
    there = np.asarray(values.is_valid())
    values, found = values.drop_null(), keys.copy()
    if pa.types.is_floating(values.type):
        numbers = values.to_numpy()
        whole = np.abs(numbers) < FLOAT64_HAS_ALL
        whole[whole] = numbers[whole] == np.floor(numbers[whole])
        hashes = np.empty(len(numbers), np.uint64)
        hashes[whole] = keys_of(ids_as_text(pa.array(numbers[whole].astype(np.int64))), None)
        bits = np.where(np.isnan(numbers[~whole]), np.nan, numbers[~whole]).astype("<f8")
        hashes[~whole] = document_keys(bits.view(np.uint8), np.arange(len(bits) + 1, dtype=np.int64) * 8)
    else:
        text = values.cast(pa.string()) if pa.types.is_boolean(values.type) else values
        hashes = keys_of(ids_as_text(text), None)
    found[there] = hashes
    return found


def _clean(found: Rows, slice_: Slice, source: Source, policy: DocumentPolicy, tally: Tally) -> TextBatch:
    """Apply the policy: what is left is text."""
    tally.read += len(found.texts) + len(found.faults)
    bad = list[tuple[int, str, str]]()
    keep = np.ones(len(found.texts), bool)
    for values, reason, detail in ((found.texts, "null", "the text is null"), (found.ids, "null_id", "the id is null")):
        if values is not None and values.null_count:
            nulls = np.asarray(values.is_null()) & keep
            bad += [(i, reason, detail) for i in np.flatnonzero(nulls).tolist()]
            keep &= ~nulls
    texts, wrong = as_unicode(found.texts)
    wrong = [i for i in wrong if keep[i]]
    if policy.on_bad == "replace":
        tally.replaced["invalid_unicode"] += len(wrong)
    else:
        bad += [(i, "invalid_unicode", "the text is not valid UTF-8") for i in wrong]
        keep[wrong] = False
    lengths = np.diff(text_buffers(texts)[1])
    long = np.flatnonzero((lengths > policy.max_bytes) & keep)
    bad += [(i, "too_long", too_long(int(lengths[i]), policy.max_bytes)) for i in long.tolist()]
    keep[long] = False
    _check_bad([*found.faults, *((int(found.rows[i]), *why) for i, *why in bad)], slice_, source, policy)
    empty = (lengths == 0) & keep & (policy.empty == "skip")
    keys, named = keys_of(texts, found.ids), texts if found.ids is None else found.ids
    if named.null_count:
        keys[np.asarray(named.is_null())] = 0  # as that of the empty text
    rows = as_rows({KEY: keys, ROW: found.rows.astype(np.uint64)}, found.columns)
    tally.leave_out(rows, {**by_reason(bad), "empty": np.flatnonzero(empty)})
    not_parsed = np.array([row for row, _, _ in found.faults], np.uint64)
    reasons = by_reason((i, *why) for i, (_, *why) in enumerate(found.faults))
    tally.leave_out(as_rows({KEY: 0 * not_parsed, ROW: not_parsed}), reasons)
    return TextBatch(texts, rows).those(keep & ~empty)


def kinds_of(columns: pa.RecordBatch | None) -> dict[str, str]:
    """The kinds of kept columns."""
    return {} if columns is None else {name: kind_of(columns.column(name)) for name in columns.schema.names}


def _take_steps(
    steps: ReadySteps,
    documents: TextBatch,
    slice_: Slice,
    source: Source,
    policy: DocumentPolicy,
    tally: Tally,
) -> TextBatch:
    """Take documents through the steps. A document is bad if a step fails on it or makes it too long. Keys stay those of the
    texts before the steps.
    """
    _, offsets = text_buffers(documents.texts)
    tally.before_steps += int(offsets[-1] - offsets[0])
    begun = time.perf_counter()
    rows = fact(documents.rows, ROW)
    found = steps(documents.texts, documents.keys, kept_of(documents.rows))
    tally.step_seconds += time.perf_counter() - begun
    if found.changed and source.masked:
        name = next(iter(found.changed)).removesuffix(".changed")
        why = f"but a text of {source.called} is several in one"
        raise ValueError(f"step {name!r} gives other texts, {why}. Leave it out.")
    at, texts = np.flatnonzero(found.keep), found.texts
    lengths = np.diff(text_buffers(texts)[1])
    long, empty = lengths > policy.max_bytes, (lengths == 0) & (policy.empty == "skip")
    messages = ((int(at[i]), too_long(int(lengths[i]), policy.max_bytes)) for i in np.flatnonzero(long))
    bad = [*found.failed, *((i, "too_long", f"{detail}, after its steps") for i, detail in messages)]
    _check_bad([(int(rows[i]), *why) for i, *why in bad], slice_, source, policy)
    tally.leave_out(documents.rows, {**by_reason(bad), **found.left_out, "empty": at[empty]})
    tally.replaced.update(+found.changed)
    tally.note(found.matches, documents.rows)
    stay = ~(long | empty)
    spans = None if found.spans is None else [of for of, stays in zip(found.spans, stay, strict=True) if stays]
    tally.kinds.add(found.kinds, slice_.label, ONE_KIND)
    stayed = documents.those(found.keep).rows
    taken = TextBatch(texts, changed(stayed, as_rows({}, found.columns))).those(stay)
    return taken if spans is None else taken._replace(texts=with_spans(taken.texts, spans))


def _check_bad(bad: Sequence[Any], slice_: Slice, source: Source, policy: DocumentPolicy) -> None:
    """ValueError for the first of the bad documents, if the policy says so. *bad*: row, reason and detail of each."""
    if bad and policy.on_bad == "error":
        raise bad_document(slice_, source, *min(bad))


SPANS = "\0\2"
"""The mark between a text and its spans, which are digits, dashes and commas: the last one of a text is it."""


def with_spans(texts: pa.LargeStringArray, spans: Sequence[Sequence[IntPair] | None]) -> pa.LargeStringArray:
    """Each text followed by the spans of its characters that count (None: all of them). ``text_and_spans`` divides them again."""
    written = ("all" if of is None else ",".join(f"{start}-{stop}" for start, stop in of) for of in spans)
    both = [f"{text}{SPANS}{of}" for text, of in zip(texts.to_pylist(), written, strict=True)]
    return pa.array(both, pa.large_string())


def text_and_spans(text: str) -> tuple[str, list[IntPair]]:
    """A text and the spans of its characters that count."""
    text, _, written = text.rpartition(SPANS)
    if written == "all":
        return text, [(0, len(text))]
    pairs = (pair.partition("-") for pair in written.split(",") if pair)
    return text, [(min(int(start), len(text)), min(int(stop), len(text))) for start, _, stop in pairs if int(start) < int(stop)]


def bad_document(slice_: Slice, source: Source, row: int, reason: str, detail: str) -> ValueError:
    """The error for a bad document, by its *row* in the slice; in the error its row counts from the start of the file."""
    return ValueError(
        f"{row_name(slice_, source, row)}: {detail} [{reason}]. Repair it, or set documents.on_bad to 'skip' or 'replace'."
    )


def row_name(slice_: Slice, source: Source, row: int) -> str:
    """The file of a row of a slice, and its number there, for errors: ``a.parquet, row 1``, ``a.jsonl, line 2 (row 1)``."""
    # Rows before it are counted only here, where somebody wants to know.
    policy, part = DocumentPolicy(), slice_.ranges[-1]
    row -= slice_.rows_before
    if len(slice_.ranges) > 1:
        run = RunOfFiles(slice_.ranges, source, policy, lambda rows, part: None)
        for number, count in enumerate(count for some in run.read() for count in some.file_rows):
            if row < count:
                part = slice_.ranges[number]
                break
            row -= count
    before = FORMATS[part.file.format].rows_before(text_file(part.file, source, policy), range_of(part))
    if before is None:
        return f"{part.file.name}, row {row} from record batch {part.start} on"
    row += before
    # Editors count lines from 1, the dataset's table of documents counts rows from 0.
    return f"{part.file.name}, " + (f"line {row + 1} (row {row})" if part.file.format == "jsonl" else f"row {row}")
