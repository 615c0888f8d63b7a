"""Stage shard-write: the token batches of a slice into a token shard, with a key and a row for every sequence, and
one object of kept columns.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s
from flat_tokens.stores.local import named_errors
from tasks.download.cut import fetched_ahead, lent
from tasks.download.sources import naming
from tasks.models import Slice, TokenShard, digest_of, file_rows_as_text
from tasks.output.forgotten import forgotten_at
from tasks.output.leases import Workspace
from tasks.parts.documents import REASONS
from tasks.progress import meter
from tasks.rows import REASON, fact
from tasks.shards.index import (
    VersionNames,
    as_text,
    load_or_published,
    stored_tokens,
    unread,
    unread_slices,
    without_tokens,
)
from tasks.shards.receipts import without_receipt, write_shard
from tasks.shards.recipe import Recipe
from tasks.shards.segments import files_as_text, read_slice, rows_left_out, tokenize_segments
from tasks.shards.stream import BrokenStreamError, HereOnly
from tasks.shards.writers import OpenStream, staging_of, stream_staged, writer_of
from tasks.text.documents import Tally
from tasks.tokenize.chat import encoder_of
from tasks.tokenize.engines import engine_of
from tasks.tokenize.pool import map_in_order
from tasks.tokenize.segments import STORED
from tasks.tokenize.tokenizers import load_tokenizer


class Staged(NamedTuple):
    """A token shard in this attempt's staging directory, not stored yet."""

    shard: TokenShard


def tokenize_or_load(
    slice_: Slice, recipe: Recipe, workspace: Workspace, versions: VersionNames = (), sink: HereOnly = None
) -> Staged | TokenShard:
    """Tokenize a slice, or load its stored or published tokens, if they are undamaged. New tokens are streamed into the version
    where *sink* has a stream for them, which it has in the build's own process. Only then are the slice's files fetched.
    """
    key = recipe.key(slice_)
    stored = load_or_published(workspace.root, versions, key)
    if stored is not None:
        meter.add("tokenize", slice_.text_bytes, stored.read, stored.token_count, stored=slice_.text_bytes)
        if sink is not None:
            sink.skip(key)
        return stored
    files = stored_tokens(workspace.root, versions).sound_files(slice_, recipe)
    with lent(unread(slice_, files), recipe.sources, workspace, (lambda: None) if sink is None else sink.stop) as lent_here:
        ranges = iter(lent_here.ranges)
        here = Slice(tuple(next(ranges) if number < 0 else part for part, number in zip(slice_.ranges, files, strict=True)))
        if sink is not None:
            with contextlib.suppress(BrokenStreamError):
                return Staged(tokenize_slice(here, recipe, workspace, versions, partial(sink.stream, key), files))
        return Staged(tokenize_slice(here, recipe, workspace, versions, None, files))


def store_shard(made: Staged | TokenShard, workspace: Workspace, sink: HereOnly = None) -> TokenShard:
    """Store a staged token shard. Tokens that another process staged are streamed into the version where *sink* has a stream for
    them. A shard that is stored already is left as it is.
    """
    if not isinstance(made, Staged):
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
    slices: Sequence[Slice], recipe: Recipe, workspace: Workspace, versions: VersionNames, sink: HereOnly = None
) -> Iterator[None]:
    """On a worker that tokenizes some slices of a build: fetch the files of those that are not stored, in their order, until
    the block ends. ValueError where this machine's tokenizer or a step is not the build's.
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
        writer.columns.end(tally.kinds.now)
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
        file_rows=file_rows_as_text(tally.file_rows),
        files=files_as_text(slice_, recipe, tally, refused),
        text_bytes_taken=taken,
        facts=recipe.facts(slice_),
        **writer.stored,
    )
