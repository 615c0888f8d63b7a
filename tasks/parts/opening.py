"""Opening a shard or a part for its documents, wherever these are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.array_types import Int64s, UInt64s
from flat_tokens.columns import batch_of
from flat_tokens.manifest import CLUSTER, DUPLICATE, NEAR_DUPLICATE
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.target import Target
from tasks.parts.bucket import bucket_documents
from tasks.parts.documents import Documents
from tasks.parts.input import input_documents
from tasks.parts.part import BucketPart, Copies, InputPart, NearCopies, Part, ShardPart
from tasks.parts.published import published_documents
from tasks.parts.stored import stored_documents
from tasks.parts.unfinished import unfinished_documents
from tasks.rows import FILE, ROW, SPLIT_KEY


def open_shard(root: Store, shard: TokenShard, *names: str) -> Documents:
    """All documents of a shard; files and rows count from the slice's first. *names*: facts and arrays that will be read."""
    if shard.published is not None:
        return published_documents(root, shard, shard.published)
    if shard.unfinished is not None:
        return unfinished_documents(root, shard, shard.unfinished)
    return stored_documents(root, shard, *names)


def open_part(part: Part, target: Target, *names: str) -> Documents:
    """All documents of a part, those that the version leaves out among them; files and rows as the version has them. *names*:
    facts and arrays that will be read.
    """
    if isinstance(part, InputPart):
        return input_documents(part, target)
    if isinstance(part, BucketPart):
        return bucket_documents(part, target)
    documents = open_shard(target.root, part.shard, *names)

    def read(name: str, first: int, stop: int) -> UInt64s:
        found = documents.read(name, first, stop)
        if name == FILE:
            return found + np.uint64(part.file)  # (slice, file) -> (version, file)
        if name == ROW and part.first_row:
            return found + np.where(documents.read(FILE, first, stop) == 0, np.uint64(part.first_row), np.uint64(0))
        return found

    placed = replace(documents, read=read)
    return placed if part.near is None or part.near.dropped else _with_clusters(placed, part, part.near, target)


def listed(copies: Copies, version: Store) -> npt.NDArray[np.void]:
    """A list of copies, of the version: DUPLICATE[n] or NEAR_DUPLICATE[n]. ValueError where it has changed."""
    data = version.read(copies.stored.key)
    if not copies.stored.is_of(data):
        raise ValueError(f"{version.path(copies.stored.key)}: is not what was written. Run the build again.")
    return np.frombuffer(data, NEAR_DUPLICATE if isinstance(copies, NearCopies) else DUPLICATE)


def _with_clusters(documents: Documents, part: ShardPart, near: NearCopies, target: Target) -> Documents:
    """The documents with one more column, the cluster of each, which may decide on their splits."""
    found = listed(near, target.store)
    at = found["document"].astype(np.int64)
    cluster, alone = documents.keys.copy(), np.ones(len(documents), bool)
    cluster[at], alone[at] = found["of_key"], False

    def columns(wanted: Int64s) -> pa.RecordBatch:
        kept = documents.columns(wanted) if part.shard.columns else batch_of({})
        clusters = pa.array(cluster[wanted], mask=alone[wanted])
        return batch_of({**dict(zip(kept.schema.names, kept.columns, strict=True)), CLUSTER: clusters})

    def read(name: str, first: int, stop: int) -> UInt64s:
        return cluster[first:stop] if name == SPLIT_KEY and near.together else documents.read(name, first, stop)

    return replace(documents, columns=columns, read=read)
