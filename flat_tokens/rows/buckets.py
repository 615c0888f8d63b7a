"""Batches of documents of about one length, each with a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from flat_tokens.annotations import Int64Pair, Int64s, UInt8s
from flat_tokens.options import at_least, true_or_false, whole_number
from flat_tokens.rows.frameworks import Fields, Framework
from flat_tokens.rows.loader import ByStep, checked_seed
from flat_tokens.rows.orders import KeyedPermutation, derive_keys
from flat_tokens.rows.views import DocumentsView, Part, read_starts, running_sums
from flat_tokens.rows.virtual import with_ends

if TYPE_CHECKING:
    from flat_tokens.rows.split import FlatTokens

MAX_BUCKETS = 255


class BucketedLoader(ByStep):
    """Batches of documents of about one length: ``loader[step]`` is rows of `DocumentTokens`, and needs nothing but the step.

    *lengths* are the buckets' row lengths: a document is in the first one that holds it, and a longer one than all is cut to
    the last. A batch has one bucket's rows, as many as fit into *batch_tokens* with their padding, a multiple of *multiple_of*
    (the number of hosts, say). In each epoch every document is in one batch. Batches and the documents in them are shuffled; the
    last batch of each bucket may have fewer rows, or is left out with *drop_last*. Empty documents are in no batch:
    ``left_out`` counts them and the rows of dropped batches, for an epoch.

    ``position`` and *start* count batches. The index takes nine bytes a document. ValueError for lengths that do not
    increase, and for a budget too small for *multiple_of* rows of the longest.
    """

    def __init__(
        self,
        tokens: FlatTokens,
        lengths: Sequence[int],
        batch_tokens: int,
        seed: int = 0,
        *,
        epochs: int | None = 1,
        drop_last: bool = False,
        start: int = 0,
        multiple_of: int = 1,
        pad_id: int = 0,
        bos: int | None = None,
        eos: int | None = None,
        loss_mask: bool = False,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> None:
        self.lengths, self.seed = tuple(whole_number("a length", length) for length in lengths), checked_seed(seed)
        ascend = all(low < high for low, high in zip((0, *self.lengths), self.lengths, strict=False))
        if not ascend or not 1 <= len(self.lengths) <= MAX_BUCKETS:
            raise ValueError(
                f"lengths are {list(self.lengths)}, but they are 1 to {MAX_BUCKETS} numbers, each larger than the last"
            )
        drop_last = true_or_false("drop_last", drop_last)
        multiple = at_least(1, "multiple_of", multiple_of)
        sizes = [at_least(1, "batch_tokens", batch_tokens) // length // multiple * multiple for length in self.lengths]
        if not sizes[-1]:
            raise ValueError(f"batch_tokens is {batch_tokens}, but {multiple} rows of {self.lengths[-1]} tokens are more")
        self._views = tuple(
            DocumentsView(with_ends(tokens, bos, eos, loss_mask), length, pad_id, fields=fields, framework=framework)
            for length in self.lengths
        )
        self._bucket = _buckets(self._views[0].tokens, self.lengths)
        self._documents = np.argsort(self._bucket, kind="stable")  # one bucket's after another's, then the empty ones
        counts = np.bincount(self._bucket, minlength=MAX_BUCKETS + 1)
        self._counts, self._firsts = counts[: len(sizes)], running_sums(counts[: len(sizes)])
        self._sizes = np.array(sizes)
        self._batches = running_sums(self._counts // self._sizes if drop_last else -(-self._counts // self._sizes))
        self.epoch_steps = int(self._batches[-1])
        if not self.epoch_steps:
            raise ValueError("there is no batch to load: the documents are empty, or too few for a whole batch")
        dropped = int((self._counts % self._sizes).sum()) if drop_last else 0
        self.left_out = len(self._bucket) - int(self._counts.sum()) + dropped
        self._order = KeyedPermutation(self.epoch_steps)
        self._orders = tuple(KeyedPermutation(max(int(count), 1)) for count in self._counts)
        self.epochs = epochs if epochs is None else at_least(1, "epochs", epochs)
        super().__init__(self._views[-1], 1, start, None, None if self.epochs is None else self.epochs * self.epoch_steps)

    def _check_shares(self, process_count: int) -> None:
        if (self._sizes % process_count).any():
            raise ValueError(
                f"batches of {', '.join(map(str, self._sizes))} rows do not divide evenly among {process_count} processes. "
                f"Set multiple_of={process_count}."
            )

    def indices(self, step: SupportsIndex) -> Int64s:
        """The documents of a step on this host: int64[rows]. IndexError if there is no such step."""
        return self._parts(step)[0][1]

    def _parts(self, step: SupportsIndex) -> list[Part]:
        # step -> (epoch, place in the epoch) -> (bucket, batch of the bucket) -> places in the bucket -> documents
        epoch, place = divmod(self._batch_range(step)[0], self.epoch_steps)
        slot = int(self._order(np.array([place]), derive_keys(self.seed, 3, epoch))[0])
        bucket = int(np.searchsorted(self._batches, slot, side="right")) - 1
        first = (slot - int(self._batches[bucket])) * int(self._sizes[bucket])
        rows = min(int(self._sizes[bucket]), int(self._counts[bucket]) - first)
        places = first + np.arange(*self._share(rows))
        within = self._orders[bucket](places, derive_keys(self.seed, 4, bucket, epoch))
        return [(self._views[bucket], self._documents[self._firsts[bucket] + within], np.arange(len(places)))]

    def _epochs_in(self, steps: int, source: str | None) -> Int64s:
        return np.arange(self.start // self.epoch_steps, -(-(self.start + steps) // self.epoch_steps))

    def _places_of(self, rows: Int64s, epochs: Int64s, source: str | None) -> Int64Pair:
        buckets, step, batch_row = self._bucket[rows], np.full(len(rows), -1), np.zeros(len(rows), np.int64)
        for bucket in np.unique(buckets[buckets < MAX_BUCKETS]).tolist():
            of = np.flatnonzero(buckets == bucket)
            within = np.searchsorted(self._documents[self._firsts[bucket] : self._firsts[bucket + 1]], rows[of])
            place = self._orders[bucket].inverse(within, derive_keys(self.seed, 4, bucket, epochs[of]))
            batch, batch_row[of] = np.divmod(place, self._sizes[bucket])
            there = np.flatnonzero(batch < self._batches[bucket + 1] - self._batches[bucket])
            of, slot = of[there], self._batches[bucket] + batch[there]
            in_epoch = self._order.inverse(slot, derive_keys(self.seed, 3, epochs[of]))
            step[of] = epochs[of] * self.epoch_steps + in_epoch - self.start
        return step, batch_row


def _buckets(tokens: FlatTokens, lengths: Sequence[int]) -> UInt8s:
    """The bucket of each document: uint8[seq_count], 255 for an empty one."""
    found, first = np.empty(tokens.seq_count, np.uint8), 0
    for entries in read_starts(tokens):
        sizes = np.diff(entries)
        buckets = np.searchsorted(lengths, np.minimum(sizes, lengths[-1]))
        found[first : first + len(sizes)] = np.where(sizes > 0, buckets, MAX_BUCKETS)
        first += len(sizes)
    return found
