"""A split that fits in no memory is shuffled in two passes over the disk. Document i of the split goes to place ``p(i)``; p is a
keyed permutation that depends on the seed alone. The places are cut into *buckets*. The first pass reads one part of the input
after another and stores its documents in the order of their places: a flat-tokens array for each part, in which every bucket has
its share. The second pass assembles the version from buckets (``tasks.parts.opening``). Both passes read and write long runs, and
hold one part or one bucket for each worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from flat_tokens.batch import TOKENS, TokenBatch
from flat_tokens.columns import ColumnsWriter, Kinds
from flat_tokens.rows.views import running_sums
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, FlatTokensWriter
from tasks.models import Split
from tasks.output.paths import DOCUMENTS
from tasks.output.target import Target
from tasks.parts.documents import all_items
from tasks.parts.input import documents_taken, input_documents, open_input
from tasks.parts.opening import BUCKET, PLACE, SCATTERED_COLUMNS, gather
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
    documents = documents.those(documents_taken(part, target))
    places = shuffling.places(np.arange(part.first_seq, part.first_seq + len(documents), dtype=np.uint64))
    order = np.argsort(places)
    arrays = {name: all_items(documents, name) for name in open_input(part).arrays}
    begins, lengths = np.cumsum(documents.lengths) - documents.lengths, documents.lengths[order]
    bounds = np.searchsorted(places[order], shuffling.bounds())
    rows = {PLACE: places[order], **{name: documents.fact(name)[order] for name in target.facts}, BUCKET: bounds}
    store = Store.at(target.workspace.staging) / f"{shuffling.directory}/{part.number}"
    blocks = zip(*(gather(items, begins[order], lengths) for items in arrays.values()), strict=True)
    with FlatTokensWriter(store, SHARD_LAYOUT, arrays) as writer:
        for some in blocks:
            of_runs, items = some[0][1], dict(zip(arrays, (block for block, _ in some), strict=True))
            writer.append(TokenBatch.of_arrays(items, running_sums(of_runs).astype(np.uint64), 0))
            meter.add("shuffle", items[TOKENS].nbytes, len(of_runs), len(items[TOKENS]))
    for name, values in rows.items():
        with ArrayWriter(store / DOCUMENTS, name, spec) as array_writer:
            array_writer.append(values.astype(np.uint64))
    if shuffling.kinds and len(order):
        kept = documents.columns(np.arange(len(order))).take(pa.array(order))
        with store.create(SCATTERED_COLUMNS) as stored, ColumnsWriter(stored, shuffling.kinds) as columns_writer:
            columns_writer.append(kept)
    sums = running_sums(lengths)
    return tuple(np.diff(sums[bounds]).tolist())
