"""One split: all its tokens, one after another, and where its sequences start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import AnyArray, Int64Pair, Int64s, IntPair, UInt8s, UInt32s, UInt64s
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import LOSS_MASK, TOKENS, TokenBatch
from flat_tokens.rows.documents import chosen_by, key_of, numbers_of
from flat_tokens.rows.frameworks import Fields, Framework
from flat_tokens.rows.packing import PackedDocumentsView
from flat_tokens.rows.packing_index import Fit, OnCrop, TooLong
from flat_tokens.rows.views import BlocksView, DocumentsView, PackedView, read_starts
from flat_tokens.rows.virtual import FillInMiddle, selected, with_ends, with_middle
from flat_tokens.rows.where import parse
from flat_tokens.stores.store import PathOrUrl, Store

T = TypeVar("T")
STARTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class FlatTokens:
    """One flat-tokens array: all tokens of a split, one after another, and where its sequences start.

    ``numbers``: int64[seq_count], the sequences' numbers in the split, of a selection; None of a whole split.
    """

    store: Store
    max_token_id: int
    encoded_tokens: StoredArray
    seq_starts: StoredArray
    loss_mask: StoredArray | None = None
    numbers: Int64s | None = field(default=None, compare=False)

    @property
    def arrays(self) -> dict[str, StoredArray]:
        """Its token arrays, by their names."""
        return {TOKENS: self.encoded_tokens} | ({} if self.loss_mask is None else {LOSS_MASK: self.loss_mask})

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.length

    @property
    def seq_count(self) -> int:
        return self.seq_starts.length - 1

    def __len__(self) -> int:
        return self.seq_count

    def __repr__(self) -> str:
        chosen = "" if self.numbers is None else " selected"
        return f"FlatTokens({self.store.url!r}: {self.seq_count:,}{chosen} sequences, {self.token_count:,} tokens)"

    def sequence(self, i: int) -> UInt32s:
        """Sequence *i*, decoded: uint32[length]. One index read and one token read. Negative *i* counts from the end."""
        return self.slice(*self.span(i)) >> np.uint32(1)

    __getitem__ = sequence

    def span(self, i: int) -> IntPair:
        """Start and end of sequence *i*, in tokens. One index read. Negative *i* counts from the end."""
        if not -self.seq_count <= i < self.seq_count:
            raise IndexError(f"{self.store.url}: there is no sequence {i}; there are {self.seq_count}")
        start, stop = (int(entry) for entry in self.seq_starts.read(i % self.seq_count, i % self.seq_count + 2))
        if not start <= stop <= self.token_count:
            raise ValueError(self.wrong_bounds(i % self.seq_count, start, stop))
        return start, stop

    def slice(self, start: int, stop: int) -> UInt32s:
        """Tokens ``start:stop`` as they are stored: uint32[stop - start], ``id * 2 + starts_a_sequence``."""
        self._check_tokens(start, stop)
        return self.encoded_tokens.read(start, stop)

    def mask(self, start: int, stop: int) -> UInt8s:
        """Which of the tokens ``start:stop`` count for the loss: uint8[stop - start], 1 or 0. All do if there is no mask."""
        self._check_tokens(start, stop)
        return np.ones(stop - start, np.uint8) if self.loss_mask is None else self.loss_mask.read(start, stop)

    def _check_tokens(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.store.url}: there are no tokens {start} to {stop}; there are {self.token_count}")

    def numbers_in(self, indices: AnyArray) -> Int64s:
        """Whole numbers, checked as those of sequences: int64[n]. IndexError for one that is not 0 to ``seq_count - 1``."""
        if (outside := indices[(indices < 0) | (indices >= self.seq_count)]).size:
            raise IndexError(f"{self.store.url}: there is no sequence {outside[0]}; there are {self.seq_count}")
        return indices.astype(np.int64)

    def bounds(self, indices: Int64s) -> Int64Pair:
        """Starts and lengths of many sequences: int64[n], int64[n]. Indices are 0 to ``seq_count - 1``."""
        indices = self.numbers_in(np.asarray(indices, np.int64))
        starts, stops = self.seq_starts.take(np.concatenate([indices, indices + 1])).reshape(2, -1)
        if (wrong_ones := np.flatnonzero((stops < starts) | (stops > np.uint64(self.token_count)))).size:
            k = wrong_ones[0]
            raise ValueError(self.wrong_bounds(int(indices[k]), int(starts[k]), int(stops[k])))
        return starts.astype(np.int64), (stops - starts).astype(np.int64)

    def entries(self, start: int, stop: int) -> UInt64s:
        """``seq_starts[start : stop + 1]``: uint64[stop - start + 1]. ValueError if they do not increase to the token count."""
        checked_stop(start, stop, self.seq_count, self.store.url)
        found = self.seq_starts.read(start, stop + 1)
        if (wrong := np.flatnonzero((found[1:] < found[:-1]) | (found[1:] > np.uint64(self.token_count)))).size:
            raise ValueError(self.wrong_bounds(start + int(wrong[0]), *found[wrong[0] : wrong[0] + 2].tolist()))
        return found

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = 1 << 22) -> Iterator[TokenBatch]:
        """Sequences ``start:stop`` in order, about *max_tokens* tokens at a time; a longer sequence stands alone.

        Each batch is a flat-tokens array of its own: its ``seq_starts`` begin with 0.
        """
        stop = checked_stop(start, stop, self.seq_count, self.store.url)
        for entries in read_starts(self, start, stop, STARTS_AT_A_TIME):
            first = 0
            while first < len(entries) - 1:
                last = int(np.searchsorted(entries, entries[first] + min(max_tokens, self.token_count), side="right")) - 1
                last = min(max(last, first + 1), len(entries) - 1)
                low, high = int(entries[first]), int(entries[last])
                encoded = self.slice(low, high)
                largest = int(encoded.max() >> 1) if len(encoded) else 0
                mask = None if self.loss_mask is None else self.mask(low, high)
                yield TokenBatch(encoded, (entries[first : last + 1] - entries[first]).astype(np.uint64), largest, mask)
                first = last

    def select(self, *, where: str | None = None, indices: npt.ArrayLike | None = None) -> FlatTokens:
        """Some sequences as a split of their own: *indices* (int64[n], 0 to ``seq_count - 1``), in this order, one that is named
        twice twice; or those for which the expression *where* is true, such as ``"source = 'web' and tokens >= 100"``.

        No token is copied: all views read the stored ones. The index is in memory, up to 32 bytes a sequence, and is made of
        ``seq_starts`` alone. Sequences count from 0 in it; ``numbers`` has their numbers in the split. TypeError for indices
        that are not whole numbers, IndexError for one that there is not; ValueError for an expression that is none, or names
        what there is not. Expressions need pyarrow.
        """
        if (where is None) == (indices is None):
            raise ValueError("select takes where or indices, one of them")
        return selected(self, chosen_by(self, parse(where)) if where is not None else cast("npt.ArrayLike", indices))

    def by_key(self, key: str | int) -> int:
        """The number of the sequence of the document with a key, a number or its 16 hexadecimal digits; of several the first.

        It takes one pass over the keys, eight bytes a document: for many keys, take ``by_keys``. KeyError if there is no such
        document, FileNotFoundError for a dataset that does not record its documents.
        """
        if (number := int(self.by_keys([key])[0])) < 0:
            raise KeyError(f"{self.store.url}: there is no document with key {key_of(key):016x}")
        return number

    def by_keys(self, keys: Sequence[str | int] | UInt64s) -> Int64s:
        """The numbers of the sequences of documents with these keys: int64[n], -1 if there is none. One pass for all."""
        asked = keys if isinstance(keys, np.ndarray) else np.array([key_of(key) for key in keys], np.uint64)
        if asked.dtype != np.uint64 or asked.ndim != 1:
            raise TypeError(f"keys are uint64[n], or a list of them, but these are {asked.dtype}{list(asked.shape)}")
        return numbers_of(self, asked)

    def packed(
        self,
        length: int,
        *,
        overlap: int = 0,
        bos: int | None = None,
        eos: int | None = None,
        loss_mask: bool = False,
        fim: FillInMiddle | None = None,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> PackedView:
        """All tokens in order, cut every *length*: rows of ``inputs``, ``targets``, ``is_seq_start`` and so on.

        With *bos* and *eos*, here and below, each document begins and ends with that token, as if it were stored. With
        *loss_mask* rows have a ``loss_mask`` in any case: if the dataset has none, all tokens count. With *fim* the middle of
        some documents is at their end; see `FillInMiddle`.
        """
        return PackedView(
            with_ends(with_middle(self, fim), bos, eos, loss_mask), length, overlap=overlap, fields=fields, framework=framework
        )

    def documents(
        self,
        max_length: int,
        pad_id: int = 0,
        *,
        bos: int | None = None,
        eos: int | None = None,
        loss_mask: bool = False,
        fim: FillInMiddle | None = None,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> DocumentsView:
        """One sequence a row, cut at *max_length* or padded up to it, with a ``loss_mask``."""
        return DocumentsView(
            with_ends(with_middle(self, fim), bos, eos, loss_mask), max_length, pad_id, fields=fields, framework=framework
        )

    def blocks(
        self,
        length: int,
        *,
        bos: int | None = None,
        eos: int | None = None,
        loss_mask: bool = False,
        fim: FillInMiddle | None = None,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> BlocksView:
        """Blocks of *length* tokens by Modalities' Megatron rule, which leaves out most of long sequences: ``view.fill``."""
        return BlocksView(with_ends(with_middle(self, fim), bos, eos, loss_mask), length, fields=fields, framework=framework)

    def packed_documents(
        self,
        length: int,
        *,
        split_across_pack: bool = False,
        max_packs: int | None = None,
        padding_idx: int = 0,
        fit: Fit = "greedy",
        too_long: TooLong = "error",
        pad_to: int = 1,
        on_crop: OnCrop = "drop",
        bos: int | None = None,
        eos: int | None = None,
        loss_mask: bool = False,
        fim: FillInMiddle | None = None,
        cache: PathOrUrl | None = None,
        fields: Fields = None,
        framework: Framework = "numpy",
    ) -> PackedDocumentsView:
        """Documents packed into rows of *length*, as in torchtune or with less padding: ``tokens``, ``labels``, ``input_pos``.

        With *pad_to* each document is padded to a multiple of it, as kernels with context parallelism want. With ``fit="crop"``
        every row is full: if no document fits, one is cut; *on_crop* drops or keeps its rest. ``view.fill`` has the waste.
        """
        return PackedDocumentsView(
            with_ends(with_middle(self, fim), bos, eos, loss_mask),
            length,
            split_across_pack=split_across_pack,
            max_packs=max_packs,
            padding_idx=padding_idx,
            fit=fit,
            too_long=too_long,
            pad_to=pad_to,
            on_crop=on_crop,
            cache=cache,
            fields=fields,
            framework=framework,
        )

    def require_vocab(self, vocabulary_size: int) -> Self:
        """The array itself. ValueError if a model with that many token ids can't read it."""
        if self.max_token_id >= vocabulary_size:
            raise ValueError(
                f"{self.store.url}: max_token_id is {self.max_token_id}, but the vocabulary ends at {vocabulary_size - 1}. "
                "Take the model's own tokenizer, or a larger embedding."
            )
        return self

    def wrong_bounds(self, i: int, start: int, stop: int) -> str:
        """The message of an error: a sequence ends before it starts, or after the last token."""
        return (
            f"{self.store.url}: seq_starts says that sequence {i} is tokens {start} to {stop}, "
            f"but there are {self.token_count} tokens. The dataset is damaged: run flat_tokens.verify on it."
        )


def checked_stop(start: int, stop: int | None, seq_count: int, where: str) -> int:
    """*stop*, or the end if it is None. IndexError if there are no sequences ``start:stop``."""
    stop = seq_count if stop is None else stop
    if not 0 <= start <= stop <= seq_count:
        raise IndexError(f"{where}: there are no sequences {start} to {stop}; there are {seq_count}")
    return stop


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items of an iterator, up to two of which a thread makes in advance."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(2))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield cast(T, item)
