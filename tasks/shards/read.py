"""Reading a token shard: a small flat-tokens array with a key and a row for every sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, group_metadata
from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.paths import DOCUMENTS, shard_key
from tasks.shards.known_objects import KnownStore

SHARD_LAYOUT = LAYOUTS["mmap"]._replace(encoded_tokens=replace(LAYOUTS["mmap"].encoded_tokens, chunk_length=1 << 15))
"""Raw, in smaller chunks than a dataset, so that a split that draws few documents reads little else."""


def document_spec(layout: Layout) -> ArraySpec:
    """How the arrays beside the tokens are stored: one uint64 a document."""
    starts = layout.seq_starts
    return ArraySpec("uint64", "document", starts.zarr_format, starts.object_length, starts.chunk_length, 1)


class DocumentArrays(NamedTuple):
    """Arrays beside a shard's tokens, with an entry for each sequence: its document's key, and its row counted from the slice's
    first row.
    """

    key: StoredArray
    row: StoredArray


def open_shard(root: Store, shard: TokenShard) -> tuple[FlatTokens, DocumentArrays]:
    store = root / shard_key(shard.key)
    key, row = (open_array(store / f"{DOCUMENTS}/{name}", "uint64") for name in DocumentArrays._fields)
    return open_split(store), DocumentArrays(key, row)


def open_arrays(root: Store, shard: TokenShard, *names: str) -> tuple[FlatTokens, DocumentArrays]:
    """Open a shard to read its arrays *names*. Facts that the receipt has are not read from the store."""
    if root.is_local:
        return open_shard(root, shard)
    directory = shard_key(shard.key)
    store = KnownStore.of(root, directory, shard.objects, _metadata_of(shard))
    store.fetch(f"{directory}/{stored.key}" for stored in shard.objects if stored.key.startswith(names))
    return open_shard(store, shard)


def _metadata_of(shard: TokenShard) -> Iterator[bytes]:
    """The metadata that this code writes for a shard."""
    column = document_spec(SHARD_LAYOUT)
    for spec, length in (
        (SHARD_LAYOUT.encoded_tokens, shard.token_count),
        (SHARD_LAYOUT.seq_starts, shard.written + 1),
        (column, shard.written),
    ):
        yield from spec.metadata(length).values()
    yield from group_metadata(SHARD_LAYOUT.zarr_format, {"max_token_id": shard.max_token_id}).values()
