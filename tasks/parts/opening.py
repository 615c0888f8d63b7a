"""Opening a shard or a part for its documents, wherever these are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.columns import batch_of
from flat_tokens.manifest import CLUSTER, DUPLICATE, NEAR_DUPLICATE
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.target import Target
from tasks.parts.bucket import bucket_documents
from tasks.parts.documents import Documents, Places
from tasks.parts.input import input_documents
from tasks.parts.part import BucketPart, Copies, InputPart, NearCopies, Part, ShardPart
from tasks.parts.published import published_documents
from tasks.parts.reserve import reserved_texts
from tasks.parts.stored import entries_of, stored_documents, stored_texts
from tasks.parts.unfinished import read_entries, unfinished_documents


def open_shard(root: Store, shard: TokenShard, *names: str) -> Documents:
    """All documents of a shard; files and rows count from the slice's first. *names*: arrays besides keys and starts that will be
    read, too.
    """
    if shard.published is not None:
        return published_documents(root, shard, shard.published)
    if shard.unfinished is not None:
        return unfinished_documents(root, shard, shard.unfinished)
    return stored_documents(root, shard, *names)


def read_texts(root: Store, shard: TokenShard, name: str, first: int = 0, stop: int | None = None) -> npt.NDArray[np.uint64]:
    """Read the array *name* about the texts of a shard, for documents ``first:stop``: uint64[n] or, where a document has several
    entries, uint64[n, entries].
    """
    stop, each = shard.written if stop is None else stop, entries_of(name)
    if shard.unfinished is not None:
        found: npt.NDArray[np.uint64] = getattr(read_entries(root, shard), name)[first:stop]
        return found
    if shard.published is not None:
        array, begin = reserved_texts(root, shard.published, name)
    else:
        array, begin = stored_texts(root, shard, name), 0
    read = array.read(each * (begin + first), each * (begin + stop))
    return read if each == 1 else read.reshape(-1, each)


def open_part(part: Part, target: Target, *names: str) -> Documents:
    """All documents of a part, those that the version leaves out among them; files and rows as the version has them."""
    if isinstance(part, InputPart):
        return input_documents(part, target)
    if isinstance(part, BucketPart):
        return bucket_documents(part, target)
    documents = open_shard(target.root, part.shard, *names)

    def places() -> Places:
        # (slice, file, row) -> (version, file, row)
        file, row = documents.places()
        return Places(file + np.uint64(part.file), row + np.where(file == 0, np.uint64(part.first_row), np.uint64(0)))

    placed = documents._replace(places=places)
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
    cluster, alone = documents.keys.copy(), np.ones(len(documents.keys), bool)
    cluster[at], alone[at] = found["of_key"], False

    def columns(wanted: npt.NDArray[np.int64]) -> pa.RecordBatch:
        kept = documents.columns(wanted) if part.shard.columns else batch_of({})
        clusters = pa.array(cluster[wanted], mask=alone[wanted])
        return batch_of({**dict(zip(kept.schema.names, kept.columns, strict=True)), CLUSTER: clusters})

    return documents._replace(columns=columns, split_keys=cluster if near.together else documents.split_keys)
