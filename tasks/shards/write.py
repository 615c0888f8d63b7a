"""Stage shard-write: the token batches of a slice into a token shard, with a key and a row for every sequence."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flat_tokens.stores.local import kind_of, make_directory, make_durable, named_errors, sync
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.text.rows import text_buffers
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.download.cut import at_hand, fetched_ahead
from tasks.download.sources import naming
from tasks.models import Slice, TokenShard
from tasks.output.paths import DOCUMENTS, RECEIPT, shard_key
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.columns import ShardColumns
from tasks.shards.fresh import Fresh, Making
from tasks.shards.index import Indexed, holdings, load_or_held, segments_as_text, without_tokens
from tasks.shards.read import SHARD_LAYOUT, DigestArrays, DocumentArrays, document_spec
from tasks.shards.receipts import put_aside, receipt_json, repairing, without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.digests import text_digests
from tasks.text.documents import Documents, Tally, read_documents
from tasks.tokenize.engines import engine_of, tokens_of
from tasks.tokenize.masks import encoder_of
from tasks.tokenize.segments import DIGEST_BYTES, cut
from tasks.tokenize.tokenizers import load_tokenizer

UPLOADERS = 4


class Staged(NamedTuple):
    """A token shard in this attempt's staging directory, not stored yet."""

    shard: TokenShard


def tokenize_or_load(slice_: Slice, recipe: Recipe, place: Place, indexed: Indexed = ()) -> Staged | TokenShard:
    """The tokens of a slice: those that are stored or that a version holds, if they are whole, else made now. Only then is its
    file fetched.
    """
    return tokenize_and_keep(None, slice_, recipe, place, indexed)


def tokenize_and_keep(
    fresh: Fresh | None, slice_: Slice, recipe: Recipe, place: Place, indexed: Indexed = ()
) -> Staged | TokenShard:
    """The same; what is made now is kept in memory, too, where *fresh* has room for it."""
    stored = load_or_held(place.root, indexed, recipe.key(slice_))
    if stored is not None:
        meter.add("tokenize", slice_.text_bytes, stored.read, stored.token_count, stored=slice_.text_bytes)
        return stored
    return Staged(tokenize_slice(at_hand(slice_, recipe.sources, place), recipe, place, indexed, fresh))


def store_shard(made: Staged | TokenShard, place: Place) -> TokenShard:
    """Store a staged token shard. One that is stored already is left as it is."""
    return write_shard(made.shard, place) if isinstance(made, Staged) else made


@contextlib.contextmanager
def fetching_ahead(slices: Sequence[Slice], recipe: Recipe, place: Place, indexed: Indexed) -> Iterator[None]:
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
    missing = [by_key[key] for key in without_tokens(place.root, indexed, without_receipt(place.root, by_key))]
    with fetched_ahead(missing, recipe.sources, place):
        yield


class ShardWriter(NamedTuple):
    """The arrays of a token shard while they are written."""

    tokens: FlatTokensWriter
    key: ArrayWriter
    row: ArrayWriter
    columns: ShardColumns
    digest: ArrayWriter | None = None
    text_bytes: ArrayWriter | None = None

    @property
    def stored(self) -> dict[str, Any]:
        """The facts of the shard that its arrays tell, once they are closed."""
        arrays = [array for array in (self.key, self.row, self.digest, self.text_bytes) if array is not None]
        beside = [*self.columns.objects, *(stored for array in arrays for stored in array.objects)]
        objects = tuple(sorted([*self.tokens.objects, *beside]))
        counts = {"token_count": self.tokens.token_count, "max_token_id": self.tokens.max_token_id}
        return {"objects": objects, "masked": self.tokens.masked, **counts}


@contextlib.contextmanager
def staging_shard(key: str, place: Place, masked: bool = False, digested: bool = False) -> Iterator[ShardWriter]:
    """Write a token shard into this attempt's staging directory, *masked* with a loss mask, *digested* with digests of the
    texts. The block appends to its arrays. What a staging directory holds need not survive a power loss.
    """
    store, spec = replace(Store.at(Path(place.staging) / key), durable=False), document_spec(SHARD_LAYOUT)
    names = (*DocumentArrays._fields, *(DigestArrays._fields if digested else ()))
    with FlatTokensWriter(store, SHARD_LAYOUT, masked) as tokens, contextlib.ExitStack() as stack:
        arrays = {name: stack.enter_context(ArrayWriter(store, f"{DOCUMENTS}/{name}", spec)) for name in names}
        yield ShardWriter(tokens, columns=stack.enter_context(ShardColumns(store)), **arrays)


def tokenize_slice(slice_: Slice, recipe: Recipe, place: Place, indexed: Indexed = (), fresh: Fresh | None = None) -> TokenShard:
    """Tokenize a slice into this attempt's staging directory, in memory bounded by one batch or the longest document. Segments
    whose tokens the output has are not tokenized again.
    """
    key, source = recipe.key(slice_), recipe.source(slice_)
    engine = engine_of(load_tokenizer(recipe.tokenizer), recipe.fast)
    encoder = encoder_of(engine, source, recipe.chat(slice_), recipe.tokenizer, recipe.documents)
    known, known_by = holdings(place.root, indexed), recipe.of_segments(slice_)
    tally, before, taken = Tally(), 0, 0
    digests, documents = list[npt.NDArray[np.void]](), list[npt.NDArray[np.int64]]()
    file, made = slice_.file, Making(fresh) if fresh is not None and fresh.takes(slice_.text_bytes) else None
    with (
        naming(recipe.sources, file.source),
        named_errors(file.location or file.name),
        engine.at_work(),
        staging_shard(key, place, recipe.masked(slice_), recipe.documents.duplicates == "drop") as writer,
    ):
        for segments in cut(read_documents(slice_, source, recipe.documents, tally)):
            names, numbers = known.find(segments, known_by)
            borders = np.concatenate([[0], segments.ends])
            counts = np.diff(borders)
            for first, last in known.stretches(numbers):
                part = segments.documents.part(int(borders[first]), int(borders[last]))
                batch = known.take(numbers[first:last]) if numbers[first] >= 0 else None
                if batch is not None:
                    taken += text_length(part)
                else:
                    last_rows = part.rows[borders[first + 1 : last + 1] - borders[first] - 1]
                    batch, part = tokens_of(part, slice_, source, recipe.documents, encoder, tally)
                    counts[first:last] = np.diff(np.searchsorted(part.rows, last_rows, "right"), prepend=0)
                writer.tokens.append(batch)
                writer.key.append(part.keys)
                writer.row.append(part.rows)
                if made is not None:
                    made.append(batch, part.keys, part.rows)
                if part.columns is not None:
                    writer.columns.append(part.columns, tally.kinds)
                if writer.digest is not None and writer.text_bytes is not None:
                    writer.digest.append(text_digests(part.texts, recipe.of_texts(slice_)).reshape(-1))
                    writer.text_bytes.append(np.diff(text_buffers(part.texts)[1]).astype(np.uint64))
                meter.add("tokenize", tally.text_bytes - before, batch.seq_count, batch.token_count)
                before = tally.text_bytes
            names[counts != np.diff(borders)] = np.void(bytes(DIGEST_BYTES))  # not known by what it has lost
            digests.append(names)
            documents.append(counts)
            del segments, part, batch  # or they stay while the next ones are read
    # The estimate and the true count differ: this keeps the display's total true.
    meter.add("tokenize", slice_.text_bytes - tally.text_bytes)
    shard = TokenShard(
        key=key,
        inputs=recipe.key_inputs(slice_),
        text_bytes=tally.text_bytes,
        rows=tally.rows,
        read=tally.read,
        written=tally.written,
        skipped={reason: count for reason, count in sorted(tally.skipped.items()) if count},
        replaced={reason: count for reason, count in sorted(tally.replaced.items()) if count},
        segments=segments_as_text(digests, documents),
        text_bytes_taken=taken,
        columns=writer.columns.kinds,
        **writer.stored,
    )
    if made is not None:
        made.end(place.root, shard)
    return shard


def text_length(documents: Documents) -> int:
    """Bytes of text."""
    _, offsets = text_buffers(documents.texts)
    return int(offsets[-1] - offsets[0])


def write_shard(draft: TokenShard, place: Place) -> TokenShard:
    """Put a tokenized slice under its content's name, the receipt last. Whoever else did the same wrote the same bytes."""
    root = place.root
    staged, target = Path(place.staging) / draft.key, root / shard_key(draft.key)
    if root.is_local:
        _move(root, staged, Path(target.root), draft)
    else:
        with ThreadPoolExecutor(UPLOADERS) as uploaders:
            list(uploaders.map(lambda stored: target.upload(stored.key, staged / stored.key), draft.objects))
    target.put(RECEIPT, receipt_json(draft))
    shutil.rmtree(staged, ignore_errors=True)  # last, so that all of this can be done again
    return draft


def _move(root: Store, staged: Path, target: Path, draft: TokenShard) -> None:
    make_durable(staged)
    make_directory(target.parent)
    for _ in range(3):
        try:
            os.rename(staged, target)
        except OSError:
            if kind_of(target) is None:
                raise
        else:
            sync(target.parent)
            return
        # Without a receipt: left by a dead process, or being written by another one at this moment.
        if _is_whole(root / shard_key(draft.key), draft):
            return
        with repairing(root):
            if not _is_whole(root / shard_key(draft.key), draft):
                put_aside(root, draft.key)
    raise OSError(f"{target}: something else keeps writing there. Run the build again.")


def _is_whole(store: Store, shard: TokenShard) -> bool:
    try:
        return all(store.now(stored) == stored for stored in shard.objects)
    except NO_OBJECT:
        return False
