"""Shuffling the documents of a split that fits in no memory, in two passes over the disk.

Document i of the split goes to place ``p(i)``; p is a keyed permutation that depends on the seed alone. The places are cut into
*buckets*. The first pass reads one part of the input after another and stores its documents in the order of their places: a
flat-tokens array for each part, in which every bucket has its share. The second pass assembles the version from buckets
(``tasks.parts.bucket``). Both passes read and write long runs, and hold one part or one bucket for each worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flat_tokens.batch import TokenBatch
from flat_tokens.columns import ColumnsWriter, Kinds
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.models import Split
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.bucket import SCATTERED_ARRAYS, SCATTERED_COLUMNS, gather
from tasks.parts.input import choose, input_documents, open_input
from tasks.parts.part import InputPart, Shuffling
from tasks.parts.stored import SHARD_LAYOUT, document_spec
from tasks.progress import meter

BUCKET_TOKENS = 1 << 23
MAX_BUCKET_TOKENS = 1 << 26
BUCKET_DOCUMENTS = 1 << 20
MAX_BUCKETS = 1 << 12
"""With more buckets their runs would be too short for a disk. Buckets become larger instead, as far as memory goes."""


def shuffling_of(split: Split, seed: int, parts: Sequence[InputPart], kinds: Kinds) -> Shuffling:
    """How the documents of *parts* are shuffled."""
    tokens, documents = sum(part.token_count for part in parts), sum(part.seq_count for part in parts)
    size = min(max(BUCKET_TOKENS, tokens // MAX_BUCKETS), MAX_BUCKET_TOKENS)
    buckets = max(-(-tokens // size), -(-documents // BUCKET_DOCUMENTS))
    return Shuffling(split=split, seed=seed, seq_count=documents, buckets=min(buckets, documents), kinds=dict(kinds))


def scatter(part: InputPart, target: Target, shufflings: dict[Split, Shuffling]) -> tuple[int, ...]:
    """Store a part's documents in the order of their places. Return its count of tokens for each bucket."""
    shuffling, spec = shufflings[part.split], document_spec(SHARD_LAYOUT)
    documents = input_documents(part, target)
    keep, _ = choose(part, documents, target.selection, target)
    documents = documents.those(keep)
    places = shuffling.places(np.arange(part.first_seq, part.first_seq + len(documents.keys), dtype=np.uint64))
    order = np.argsort(places)
    tokens = _all_of(documents.tokens, part.token_count, np.dtype(np.uint32))
    is_masked = open_input(part).loss_mask is not None
    mask = _all_of(documents.masks, part.token_count, np.dtype(np.uint8)) if is_masked else None
    begins, lengths = np.cumsum(documents.lengths) - documents.lengths, documents.lengths[order]
    bounds, (file, row) = np.searchsorted(places[order], shuffling.bounds()), documents.places()
    of_documents = [array[order] for array in (places, documents.keys, file, row)]
    store = Store.at(target.workspace.staging) / f"{shuffling.directory}/{part.number}"
    blocks = gather(tokens, begins[order], lengths)
    masks = itertools.repeat(None) if mask is None else (some for some, _ in gather(mask, begins[order], lengths))
    with FlatTokensWriter(store, SHARD_LAYOUT, mask is not None) as writer:
        for (block, of_runs), of_block in zip(blocks, masks, strict=False):
            writer.append(TokenBatch(block, np.append(0, np.cumsum(of_runs)).astype(np.uint64), 0, of_block))
            meter.add("shuffle", block.nbytes, len(of_runs), len(block))
    for name, array in zip(SCATTERED_ARRAYS, [*of_documents, bounds.astype(np.uint64)], strict=True):
        with ArrayWriter(store / DOCUMENTS, name, spec) as array_writer:
            array_writer.append(array)
    if shuffling.kinds and len(order):
        kept = documents.columns(np.arange(len(order))).take(pa.array(order))
        with store.create(SCATTERED_COLUMNS) as stored, ColumnsWriter(stored, shuffling.kinds) as columns_writer:
            columns_writer.append(kept)
    sums = np.append(0, np.cumsum(lengths))
    return tuple(np.diff(sums[bounds]).tolist())


def _all_of(read: Callable[[int, int], Iterator[npt.NDArray[Any]]], count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The items of documents, in their order: dtype[count]."""
    items, at = np.empty(count, dtype), 0
    for block in read(0, count):
        items[at : at + len(block)] = block
        at += len(block)
    return items
