"""Opening a shard or a part for its documents, wherever these are. Those of a bucket are in the order of their places."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import AnyArray, Int64s, UInt64s
from flat_tokens.batch import TOKEN_ARRAYS
from flat_tokens.columns import Columns, batch_of, joined
from flat_tokens.keys import concatenated, keys_of_bytes
from flat_tokens.manifest import CLUSTER
from flat_tokens.reader import open_split
from flat_tokens.rows.split import FlatTokens
from flat_tokens.stores.store import Store
from tasks.models import TokenShard
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.documents import Documents, Read, Runs
from tasks.parts.input import BLOCK_TOKENS, input_documents, published_documents
from tasks.parts.part import REPEAT, BucketPart, InputPart, Part, Repeats, ShardPart
from tasks.parts.stored import open_facts, stored_documents, unfinished_documents
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
    documents = open_shard(target.root, part.shard, *names)

    @functools.cache
    def compared() -> dict[str, UInt64s]:
        """The facts that comparing the documents gave, by OF_CHOICE: uint64[n] each. ValueError if they are damaged."""
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


GATHERED_TOKENS = 1 << 17
"""Tokens put into their places at a time, few enough for the processor's cache."""
OPEN_PARTS = 1 << 14
SCATTERED_COLUMNS = f"{DOCUMENTS}/columns.parquet"
PLACE, BUCKET = "place", "bucket"
"""Arrays of a stored part next to the facts of its documents, which are in the order of their places: these, and where each
bucket's documents begin.
"""


def gather(tokens: AnyArray, begins: Int64s, lengths: Int64s) -> Iterator[tuple[AnyArray, Int64s]]:
    """Consecutive runs of *tokens*, in any order, in blocks of whole runs, each with the lengths of its runs."""
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, done + GATHERED_TOKENS, "right")))
        mine, here = lengths[first:last], begins[first:last]
        if last == first + 1:
            yield tokens[here[0] : here[0] + mine[0]], mine
        else:
            # place in the gathered block -> place in tokens: each run's begin, and on from there
            index = np.arange(int(ends[last - 1]) - done)
            index += np.repeat(here - (ends[first:last] - mine - done), mine)
            yield tokens[index], mine
        first, done = last, int(ends[last - 1])


@functools.lru_cache(OPEN_PARTS)
def _open_scattered(path: str) -> tuple[FlatTokens, Read]:
    """Open a stored part once: the staging has a new name in each attempt, so what is stored there never changes."""
    store = Store.at(path, read_once=True)
    return open_split(store), open_facts(store)


class _Share(NamedTuple):
    """A bucket's documents in one stored part: ``first:last``, and where each starts."""

    tokens: FlatTokens
    read: Read
    first: int
    last: int
    starts: Int64s


def bucket_documents(bucket: BucketPart, target: Target) -> Documents:
    """A bucket's documents in the order of their places. Their tokens are read into memory once, when they are asked for."""
    shares = list[_Share]()
    for number in range(bucket.stored_parts):
        tokens, read_of_part = _open_scattered(f"{target.workspace.staging}/{bucket.shuffling.directory}/{number}")
        first, last = map(int, read_of_part(BUCKET, bucket.number, bucket.number + 2))
        if first < last:
            starts = tokens.seq_starts.read(first, last + 1).astype(np.int64)
            shares.append(_Share(tokens, read_of_part, first, last, starts))

    def of_shares(name: str) -> UInt64s:
        return concatenated(share.read(name, share.first, share.last) for share in shares)

    lengths = np.concatenate([*(np.diff(share.starts) for share in shares), np.empty(0, np.int64)])
    order = np.argsort(of_shares(PLACE))
    begins = np.cumsum(lengths) - lengths

    def columns(wanted: Int64s) -> pa.RecordBatch:
        kinds, found = bucket.shuffling.kinds, []
        for share in shares:
            kept = Columns.in_one(share.tokens.store, kinds, SCATTERED_COLUMNS, share.tokens.seq_count)
            found.append(kept.take(np.arange(share.first, share.last), list(kinds)))
        return joined(found).take(pa.array(order[wanted]))

    def items(name: str) -> Runs:
        return lambda begins, ends: (
            block for block, _ in gather(_read_items(shares, bucket.token_count, name), begins, ends - begins)
        )

    def read(name: str, first: int, stop: int) -> UInt64s:
        return of_shares(name)[order][first:stop]

    arrays = {name: items(name) for name in TOKEN_ARRAYS if any(name in share.tokens.arrays for share in shares)}
    return Documents(np.zeros(len(order), np.int8), begins[order], lengths[order], (arrays,), read, columns)


def _read_items(shares: list[_Share], count: int, name: str) -> AnyArray:
    """The items of a token array of all shares, in their order: dtype[count]."""
    items, at = TOKEN_ARRAYS[name].all_absent(count), 0
    for share in shares:
        first, last, array = int(share.starts[0]), int(share.starts[-1]), share.tokens.arrays.get(name)
        for start in range(first, last, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, last)
            if array is not None:
                array.read(start, stop, items[at : at + stop - start])
            at += stop - start
    return items
