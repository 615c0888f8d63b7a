"""Stage shard-write: the segments of a slice, read, or taken from files that are known; tokenized but for those that are known;
and written into a token shard, with a key and a row for every sequence, and one object of kept columns.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s, Structs
from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.columns import as_arrow, with_kinds
from flat_tokens.keys import strings_by_key
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.local import named_errors
from flat_tokens.text.rows import text_buffers
from tasks.download.cut import fetched_ahead, local_slice
from tasks.download.sources import naming
from tasks.models import HereOnly, Slice, TokenShard, digest_of
from tasks.output.forgotten import forgotten_at
from tasks.output.leases import Workspace
from tasks.parts.documents import REASONS, Documents
from tasks.progress import meter
from tasks.rows import FILE, KEY, REASON, ROW, as_rows, changed, fact, kept_of
from tasks.shards.index import (
    StoredTokens,
    VersionNames,
    as_text,
    files_of,
    load_or_published,
    segments_without,
    stored_tokens,
    unread,
    unread_slices,
    without_tokens,
)
from tasks.shards.receipts import without_receipt, write_shard
from tasks.shards.recipe import Recipe
from tasks.shards.stream import BrokenStreamError, Sink
from tasks.shards.writers import BATCH_TOKENS, Batch, OpenStream, staging_of, stream_staged, writer_of
from tasks.text.documents import Tally, TextBatch, read_documents
from tasks.tokenize.chat import encoder_of
from tasks.tokenize.engines import Encoder, engine_of, tokens_of
from tasks.tokenize.pool import map_in_order
from tasks.tokenize.segments import NO_DIGEST, STORED, STORED_FILE, Segments, cut
from tasks.tokenize.tokenizers import load_tokenizer


class StagedShard(NamedTuple):
    """A token shard in this attempt's staging directory, not stored yet."""

    shard: TokenShard


def tokenize_or_load(
    slice_: Slice, recipe: Recipe, workspace: Workspace, versions: VersionNames = (), sink: HereOnly[Sink] = None
) -> StagedShard | TokenShard:
    """Tokenize a slice, or load its stored or published tokens, if they are undamaged. New tokens are streamed into the version
    if *sink* has a stream for them, which it has in the build's own process. Only then are the slice's files fetched.
    """
    key = recipe.key(slice_)
    stored = load_or_published(workspace.root, versions, key)
    if stored is not None:
        meter.add("tokenize", slice_.text_bytes, stored.read, stored.token_count, stored=slice_.text_bytes)
        if sink is not None:
            sink.skip(key)
        return stored
    files = stored_tokens(workspace.root, versions).sound_files(slice_, recipe)
    with local_slice(
        unread(slice_, files), recipe.sources, workspace, (lambda: None) if sink is None else sink.stop
    ) as lent_here:
        ranges = iter(lent_here.ranges)
        here = Slice(tuple(next(ranges) if number < 0 else part for part, number in zip(slice_.ranges, files, strict=True)))
        if sink is not None:
            with contextlib.suppress(BrokenStreamError):
                return StagedShard(tokenize_slice(here, recipe, workspace, versions, partial(sink.stream, key), files))
        return StagedShard(tokenize_slice(here, recipe, workspace, versions, None, files))


def store_shard(made: StagedShard | TokenShard, workspace: Workspace, sink: HereOnly[Sink] = None) -> TokenShard:
    """Store a staged token shard. Tokens that another process staged are streamed into the version if *sink* has a stream for
    them. A shard that is stored already is left as it is.
    """
    if not isinstance(made, StagedShard):
        if sink is not None:
            sink.skip(made.key)
        return made
    shard = made.shard
    if sink is not None and shard.unfinished is None:
        with contextlib.suppress(BrokenStreamError), sink.stream(shard.key) as stream:
            if stream is not None:
                shard = stream_staged(shard, workspace, stream)
    return write_shard(shard, workspace)


@contextlib.contextmanager
def fetching_ahead(
    slices: Sequence[Slice], recipe: Recipe, workspace: Workspace, versions: VersionNames, sink: HereOnly[Sink] = None
) -> Iterator[None]:
    """On a worker that tokenizes some slices of a build: fetch the files of those that are not stored, in their order, until
    the block ends. ValueError if this machine's tokenizer or a step is not the build's.
    """
    digest = load_tokenizer(recipe.tokenizer).digest
    if digest != recipe.tokenizer_digest:
        raise ValueError(
            f"tokenizer {recipe.tokenizer.name!r} on {platform.node()} has digest {digest[:12]}, the build's has "
            f"{recipe.tokenizer_digest[:12]}. Give every machine the same file."
        )
    for here, there in zip(recipe.documents.opened().described, recipe.steps, strict=True):
        if here != there:
            raise ValueError(
                f"step {there['use']!r} on {platform.node()} is of version {here['version']}, the build's of {there['version']}. "
                "Give every machine the same packages."
            )
    by_key = {recipe.key(slice_): slice_ for slice_ in slices}
    missing = without_tokens(workspace.root, versions, without_receipt(workspace.root, by_key))
    left = unread_slices(map(by_key.__getitem__, missing), recipe, stored_tokens(workspace.root, versions))
    with fetched_ahead(left, recipe.sources, workspace):
        yield


def tokenize_slice(
    slice_: Slice,
    recipe: Recipe,
    workspace: Workspace,
    versions: VersionNames = (),
    open_stream: OpenStream | None = None,
    files: Int64s | None = None,
) -> TokenShard:
    """Tokenize a slice into this attempt's staging directory, or into the stream of *open_stream*, in memory bounded by some
    batches or the longest document. Segments whose tokens the output has are not tokenized again. *files*: the numbers of its
    files among the known ones, which are not read; -1 for the others.
    """
    source, first, inputs = recipe.source(slice_), slice_.ranges[0].file, recipe.key_inputs(slice_)
    key = digest_of(inputs)
    engine = engine_of(load_tokenizer(recipe.tokenizer), recipe.fast)
    by_reference = slice_.source in recipe.by_reference
    encoder = encoder_of(engine, source, recipe.chat(slice_), recipe.tokenizer, recipe.documents, by_reference)
    known = stored_tokens(workspace.root, versions)
    work = partial(tokenize_segments, recipe=recipe, encoder=encoder, known=known)
    tally, refused, taken, tokenized = Tally(forgotten=forgotten_at(workspace.root, recipe.forgotten)), Tally(), 0, 0
    segments = [np.empty(0, STORED)]
    reads = read_slice(slice_, np.full(len(slice_.ranges), -1) if files is None else files, recipe, known, tally)
    with (
        naming(recipe.sources, slice_.source),
        named_errors(first.location or first.name),
        contextlib.closing(reads),
        map_in_order(reads, work, attrgetter("byte_count")) as results,
        writer_of(slice_, key, recipe, workspace, open_stream) as writer,
    ):
        for done in results:
            for batch in done.batches:
                writer.append(batch)
                meter.add("tokenize", 0, batch.tokens.seq_count, batch.tokens.token_count)
            meter.add("tokenize", done.text_bytes)
            tokenized += done.text_bytes
            segments.append(done.segments)
            taken += done.text_bytes_taken
            refused.add(done.refused)
        left_out = [*tally.left_out, *refused.left_out]
        if left_out:
            last = rows_left_out(left_out, recipe.facts(slice_), tally.kinds.now)
            writer.append(last)
            reasons = fact(last.rows, REASON).astype("<u8").tobytes()
            writer.columns.objects.append(staging_of(key, workspace).put(REASONS, reasons))
        writer.columns.kinds = dict(tally.kinds.now)  # of rows that were not appended, too
    tally.add(refused)
    # The estimate and the true count differ: this keeps the display's total true.
    meter.add("tokenize", slice_.text_bytes - tokenized)
    return TokenShard(
        key=key,
        inputs=inputs,
        text_bytes=tally.text_bytes,
        rows=tally.rows,
        read=tally.read,
        written=tally.written,
        left_out=sum(map(len, left_out)),
        skipped={reason: count for reason, count in sorted(tally.skipped.items()) if count},
        replaced={reason: count for reason, count in sorted(tally.replaced.items()) if count},
        matches=dict(sorted(tally.matches.items())),
        examples=dict(sorted(tally.examples.items())),
        segments=as_text(np.concatenate(segments)),
        file_rows=as_text(np.array(tally.file_rows, "<u4")) if len(tally.file_rows) > 1 else "",
        files=files_as_text(slice_, recipe, tally, refused),
        text_bytes_taken=taken,
        facts=recipe.facts(slice_),
        **writer.stored,
    )


class Tokenized(NamedTuple):
    """Some segments: their documents, in batches; the segments as STORED[m]; bytes of text, and those whose tokens were there
    already. ``refused``: counts of the documents that the engine did not take. ``byte_count``: of tokens that were taken unread.
    """

    batches: list[Batch]
    segments: Structs
    text_bytes: int
    text_bytes_taken: int
    refused: Tally
    byte_count: int = 0


class ReadSegments(NamedTuple):
    """Some segments of files of a slice that were read: their bytes of text, and the kinds of their kept columns."""

    slice_: Slice
    segments: Segments
    byte_count: int
    kinds: Mapping[str, str]


def read_slice(
    slice_: Slice, files: Int64s, recipe: Recipe, known: StoredTokens, tally: Tally
) -> Generator[ReadSegments | Tokenized]:
    """The documents of a slice. Those of *files* that are known, by their numbers, are not read: -1 for the others."""
    for first, stop in known.files.stretches(files):
        if files[first] >= 0:
            yield from take_files(slice_.ranges[first].file.name, files[first:stop], known, tally)
            continue
        part = Slice(slice_.ranges[first:stop], tally.rows)
        texts = read_documents(part, recipe.source(part), recipe.documents, tally, split_by=recipe.split_by_of(part))
        for segments in cut(texts):
            yield ReadSegments(part, segments, text_length(segments.documents), tally.kinds.now)


def take_files(name: str, numbers: Int64s, known: StoredTokens, tally: Tally) -> Iterator[Tokenized]:
    """The documents of known files that stand side by side in a shard, by their *numbers*. *name*: of the first one. *tally*
    counts them.
    """
    shard, first = known.files.shards[known.files.shard[numbers[0]]], int(known.files.first[numbers[0]])
    stop, starts, rows_before = first + len(numbers), shard.file_starts, np.uint64(tally.rows)
    text_bytes, opened = files_of(shard)["text_bytes"][first:stop].tolist(), known.opened(shard)
    assert opened is not None

    def rows_of(documents: Documents, *facts: str) -> pa.RecordBatch:
        # (shard, file, row) -> (shard, row) -> (slice, row)
        rows = documents.fact(ROW) + starts[documents.fact(FILE).astype(np.int64)] - starts[first] + rows_before
        kept = documents.columns(np.arange(len(documents))) if shard.columns else None
        return as_rows({**{name: documents.fact(name) for name in facts}, ROW: rows}, kept)

    places = [np.searchsorted(some.fact(FILE), np.array([first, stop], np.uint64)).tolist() for some in opened]
    kept, others = (some.part(*place) for some, place in zip(opened, places, strict=True))
    left_out, reasons = rows_of(others, KEY, REASON), strings_by_key(shard.skipped)
    tally.kinds.add(shard.columns, name)
    tally.left_out += [left_out] if len(left_out) else []
    tally.skipped.update(reasons[key] for key in fact(left_out, REASON).tolist())
    tally.rows += int(starts[stop] - starts[first])
    tally.read += len(kept) + len(left_out)
    tally.written += len(kept)
    tally.text_bytes += sum(text_bytes)
    tally.file_rows += np.diff(starts[first : stop + 1]).tolist()
    tally.file_bytes += text_bytes
    tally.file_kinds += [shard.columns] * len(numbers)
    gone = np.ones(shard.written, bool)
    gone[slice(*places[0])] = False
    segments = segments_without(shard, gone)
    borders = np.searchsorted(np.cumsum(kept.lengths), np.arange(0, int(kept.lengths.sum()), BATCH_TOKENS))
    for low, high in itertools.pairwise(np.unique([0, *borders, len(kept)]).tolist()):
        part = kept.part(low, high)
        batch = Batch(part.batch(shard.token_arrays), rows_of(part, *shard.facts), tally.kinds.now)
        size = TOKEN_BYTES * batch.tokens.token_count
        yield Tokenized([batch], segments, sum(text_bytes), sum(text_bytes), Tally(), size)
        segments, text_bytes = segments[:0], []


def files_as_text(slice_: Slice, recipe: Recipe, tally: Tally, refused: Tally) -> str:
    """The files of a run as its receipt has them. Those are not known that have documents which an engine *refused*, or kept
    columns of other kinds than the run.
    """
    if len(slice_.ranges) == 1:
        return ""
    files = np.zeros(len(slice_.ranges), STORED_FILE)
    files["digest"] = recipe.of_files(slice_)
    files["text_bytes"] = tally.file_bytes
    unknown = np.array([kinds != tally.kinds.now for kinds in tally.file_kinds])
    for rows in refused.left_out:
        unknown[np.searchsorted(np.cumsum(tally.file_rows), fact(rows, ROW).astype(np.int64), "right")] = True
    files["digest"][unknown] = NO_DIGEST
    return as_text(files)


def tokenize_segments(read: ReadSegments | Tokenized, recipe: Recipe, encoder: Encoder, known: StoredTokens) -> Tokenized:
    """Tokenize segments of a slice, but for those that are *known*."""
    if isinstance(read, Tokenized):
        return read
    slice_, segments, text_bytes, kinds = read
    names, numbers = known.find(segments, recipe.of_segments(slice_))
    borders = np.concatenate([[0], segments.ends])
    counts, refused, taken = np.diff(borders), Tally(), 0
    batches, of_texts = list[Batch](), recipe.facts_of_texts(slice_)
    for first, last in known.segments.stretches(numbers):
        part = segments.documents.part(int(borders[first]), int(borders[last]))
        tokens, facts = known.take(numbers[first:last], of_texts) if numbers[first] >= 0 else (None, {})
        if tokens is not None:
            taken += text_length(part)
        else:
            last_rows = fact(part.rows, ROW)[borders[first + 1 : last + 1] - borders[first] - 1]
            tokens, part = tokens_of(part, slice_, recipe.source(slice_), recipe.documents, encoder, refused)
            counts[first:last] = np.diff(np.searchsorted(fact(part.rows, ROW), last_rows, "right"), prepend=0)
        made = {name: facts[name] if name in facts else of.of(part.texts) for name, of in of_texts.items()}
        batches.append(Batch(tokens, changed(part.rows, as_rows(made)), kinds))
    stored = np.empty(len(counts), STORED)
    stored["digest"], stored["documents"] = names, counts
    stored["digest"][counts != np.diff(borders)] = NO_DIGEST  # not known by what it has lost
    return Tokenized(batches, stored, text_bytes + refused.text_bytes, taken, refused)


def rows_left_out(left_out: Iterable[pa.RecordBatch], facts: Mapping[str, int], kinds: Mapping[str, str]) -> Batch:
    """Documents that are left out, in the order of their rows. They have no tokens, columns *kinds* and 0 for other *facts*."""
    parts = list[pa.RecordBatch]()
    for rows in left_out:
        zeros = {name: np.zeros((len(rows), *[numbers] * (numbers > 1)), np.uint64) for name, numbers in facts.items()}
        kept = kept_of(rows)
        kept = with_kinds(rows.select([ROW]) if kept is None else kept, kinds)  # no column is called as that
        parts.append(changed(as_rows(zeros, kept), rows.select([KEY, ROW, REASON])))
    rows = pa.concat_batches(parts)
    rows = rows.take(as_arrow(np.argsort(fact(rows, ROW))))
    tokens = TokenBatch.of_arrays({TOKENS: np.empty(0, np.uint32)}, np.zeros(len(rows) + 1, np.uint64), 0)
    return Batch(tokens, rows, kinds)


def text_length(documents: TextBatch) -> int:
    """Bytes of text."""
    _, offsets = text_buffers(documents.texts)
    return int(offsets[-1] - offsets[0])
