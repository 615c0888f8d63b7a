"""Stage shard-write: the token batches of a slice into a token shard, with a key and a row for every sequence."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.arrays.writing import ArrayWriter
from flat_tokens.stores.local import make_directory, sync_directory
from flat_tokens.stores.store import NO_OBJECT, Store
from flat_tokens.writer import FlatTokensWriter
from tasks.download.cut import at_hand, fetched_ahead
from tasks.download.sources import naming
from tasks.models import Slice, TokenShard
from tasks.output.paths import DOCUMENTS, RECEIPT, shard_key
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.read import SHARD_LAYOUT, DocumentArrays, document_spec
from tasks.shards.receipts import load_shard, put_aside, receipt_json, repairing, without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally
from tasks.tokenize.engines import engine_of
from tasks.tokenize.tokenize_slice import token_batches
from tasks.tokenize.tokenizers import load_tokenizer

UPLOADERS = 4


class Staged(NamedTuple):
    """A token shard in this attempt's staging directory, not stored yet."""

    shard: TokenShard


def tokenize_or_load(slice_: Slice, recipe: Recipe) -> Staged | TokenShard:
    """The token shard of a slice: the one that is stored, if it is whole, else tokenized now. Only then is its file fetched,
    where it is not here.
    """
    stored = load_shard(recipe.place.root, recipe.key(slice_))
    if stored is not None:
        meter.add("tokenize", slice_.text_bytes, stored.read, stored.token_count)
        return stored
    return Staged(tokenize_slice(at_hand(slice_, recipe.sources, recipe.place), recipe))


def store_shard(made: Staged | TokenShard, place: Place) -> TokenShard:
    """Store a staged token shard. One that is stored already is left as it is."""
    return write_shard(made.shard, place) if isinstance(made, Staged) else made


@contextlib.contextmanager
def fetching_ahead(slices: Sequence[Slice], recipe: Recipe) -> Iterator[None]:
    """On a worker that tokenizes some slices of a build: fetch the files of those that are not stored, in their order, until
    the block ends. ValueError where this machine's tokenizer is not the build's.
    """
    check_tokenizer(recipe)
    by_key = {recipe.key(slice_): slice_ for slice_ in slices}
    missing = [by_key[key] for key in without_receipt(recipe.place.root, by_key)]
    with fetched_ahead(missing, recipe.sources, recipe.place):
        yield


def check_tokenizer(recipe: Recipe) -> None:
    """ValueError where this machine's tokenizer is not the one that the shards are to be named after."""
    digest = load_tokenizer(recipe.tokenizer).digest
    if digest != recipe.tokenizer_digest:
        raise ValueError(
            f"tokenizer {recipe.tokenizer.name!r} on {platform.node()} has digest {digest[:12]}, the build's has "
            f"{recipe.tokenizer_digest[:12]}. Give every machine the same file."
        )


class ShardWriter(NamedTuple):
    """The arrays of a token shard while they are written."""

    tokens: FlatTokensWriter
    key: ArrayWriter
    row: ArrayWriter

    @property
    def stored(self) -> dict[str, Any]:
        """The facts of the shard that its arrays tell, once they are closed."""
        objects = tuple(sorted([*self.tokens.objects, *self.key.objects, *self.row.objects]))
        return {"objects": objects, "token_count": self.tokens.token_count, "max_token_id": self.tokens.max_token_id}


@contextlib.contextmanager
def staging_shard(key: str, place: Place) -> Iterator[ShardWriter]:
    """Write a token shard into this attempt's staging directory. The block appends to its arrays."""
    store, spec = Store.at(Path(place.staging) / key), document_spec(SHARD_LAYOUT)
    keys, rows = (ArrayWriter(store, f"{DOCUMENTS}/{name}", spec) for name in DocumentArrays._fields)
    with FlatTokensWriter(store, SHARD_LAYOUT) as tokens, keys, rows:
        yield ShardWriter(tokens, keys, rows)


def tokenize_slice(slice_: Slice, recipe: Recipe) -> TokenShard:
    """Tokenize a slice into this attempt's staging directory, in memory bounded by one batch or the longest document."""
    key = recipe.key(slice_)
    engine = engine_of(load_tokenizer(recipe.tokenizer), recipe.fast)
    tally, before = Tally(), 0
    with naming(recipe.sources, slice_.file.source), staging_shard(key, recipe.place) as writer:
        for batch, beside in token_batches(slice_, recipe.source(slice_), recipe.documents, engine, tally):
            writer.tokens.append(batch)
            writer.key.append(beside.keys)
            writer.row.append(beside.rows)
            meter.add("tokenize", tally.text_bytes - before, batch.seq_count, batch.token_count)
            before = tally.text_bytes
    # The estimate and the true count differ: this keeps the display's total true.
    meter.add("tokenize", slice_.text_bytes - tally.text_bytes)
    return TokenShard(
        key=key,
        inputs=recipe.key_inputs(slice_),
        text_bytes=tally.text_bytes,
        rows=tally.rows,
        read=tally.read,
        written=tally.written,
        skipped={reason: count for reason, count in sorted(tally.skipped.items()) if count},
        replaced={reason: count for reason, count in sorted(tally.replaced.items()) if count},
        **writer.stored,
    )


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
    make_directory(target.parent)
    for _ in range(3):
        try:
            os.rename(staged, target)
        except OSError:
            if not target.exists():
                raise
        else:
            sync_directory(target.parent)
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
        return all(store.digest(stored.key) == stored for stored in shard.objects)
    except NO_OBJECT:
        return False
