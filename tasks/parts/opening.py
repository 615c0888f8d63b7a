"""Opening a shard or a part for its documents, wherever these are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s, UInt64s
from flat_tokens.columns import batch_of
from flat_tokens.keys import keys_of_bytes
from flat_tokens.manifest import CLUSTER
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.target import Target
from tasks.parts.buckets import bucket_documents
from tasks.parts.documents import Documents
from tasks.parts.input import input_documents, published_documents
from tasks.parts.part import REPEAT, BucketPart, InputPart, Part, Repeats, ShardPart
from tasks.parts.stored import stored_documents, unfinished_documents
from tasks.rows import FILE, OF, OF_CHOICE, REASON, ROW, SIMILARITY, SPLIT_KEY, TEXT_BYTES


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
    documents, compared = open_shard(target.root, part.shard, *names), functools.cache(lambda: _repeated(part, target))

    def read(name: str, first: int, stop: int) -> UInt64s:
        if name in OF_CHOICE:
            of_version = compared()[name][first:stop]
            return np.where(of_version, of_version, documents.read(REASON, first, stop)) if name == REASON else of_version
        found = documents.read(name, first, stop)
        if name == SPLIT_KEY and any(some.together for some in part.repeats):
            of = compared()[OF][first:stop]
            return np.where(of > 0, of, found)
        if name == FILE:
            return found + np.uint64(part.file)  # (slice, file) -> (version, file)
        if name == ROW and part.first_row:
            return found + np.where(documents.read(FILE, first, stop) == 0, np.uint64(part.first_row), np.uint64(0))
        return found

    def columns(wanted: Int64s) -> pa.RecordBatch:
        kept = documents.columns(wanted) if part.shard.columns else batch_of({})
        cluster, reason = (compared()[name][wanted] for name in (OF, REASON))
        named = pa.array(cluster, mask=(cluster == 0) | (reason > 0))
        return batch_of({**dict(zip(kept.schema.names, kept.columns, strict=True)), CLUSTER: named})

    return replace(documents, read=read, columns=columns if SIMILARITY in target.texts else documents.columns)


def _repeated(part: ShardPart, target: Target) -> dict[str, UInt64s]:
    """The facts that comparing documents gives those of a part, by OF_CHOICE: uint64[n] each. ValueError if
    they are not what was written.
    """
    facts = {name: np.zeros(part.shard.seq_count, np.uint64) for name in OF_CHOICE}
    for some in part.repeats:
        store = target.of_attempt(some.attempt)
        data = store.read(some.stored.key)
        if not some.stored.is_of(data):
            raise ValueError(f"{store.path(some.stored.key)}: is not what was written. Run the build again.")
        found = np.frombuffer(data, REPEAT)
        for name in OF_CHOICE:
            facts[name][found["document"].astype(np.int64)] = found[name]
    return facts


def with_repeats(
    part: ShardPart,
    documents: Documents,
    target: Target,
    number: int,
    reason: Literal["duplicate", "near_duplicate"] | None,
    facts: Mapping[str, UInt64s],
    later: Int64s,
    *,
    together: bool = False,
) -> ShardPart:
    """Part *number*, with those of its *documents* that repeat others, by their *facts* in REPEAT, which are written for
    the attempt. *later*: those that count, all but the first of a cluster that is kept.
    """
    found = np.zeros(len(facts[OF]), REPEAT)
    for name, values in facts.items():
        found[name] = values
    if reason is not None:
        found[REASON] = keys_of_bytes([reason.encode()])
    attempt = target.workspace.attempt
    stored = target.of_attempt(attempt).put(Repeats.name_of(attempt, number, reason), found.tobytes())
    repeats = Repeats(
        attempt=attempt,
        number=number,
        reason=reason,
        size=stored.size,
        digest=stored.digest,
        documents=len(later),
        token_count=int(documents.lengths[later].sum()),
        text_bytes=int(documents.fact(TEXT_BYTES)[later].sum()),
        together=together,
    )
    return part.model_copy(update={"repeats": (*part.repeats, repeats)})
