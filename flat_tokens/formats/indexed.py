"""Files of tokens with an index of their documents, as Modalities, Megatron-LM and datatrove have them.

Documents follow one another. Their consumers want a token at each document's end, which the sequences here do not have:
it is added on export and removed on import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol, Self

import numpy as np

from flat_tokens.annotations import AnyArray, DType, Int64Pair, Int64s, UInt8s, UInt32s, UInt64s
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.formats import contract
from flat_tokens.formats.contract import BATCH_TOKENS, ExportFile, Splits, TokenRange, token_ranges
from flat_tokens.reader import STARTS_AT_A_TIME, FlatTokens
from flat_tokens.stores.store import Store

Closing = Literal["always", "unless_present"]


class Tokens(Protocol):
    """Token ids in a file."""

    @property
    def path(self) -> str: ...

    @property
    def length(self) -> int: ...

    def tokens(self, start: int, stop: int) -> UInt32s:
        """Tokens ``start:stop``: uint32[stop - start], a copy. ValueError, naming the file, if it does not hold them."""
        ...


@dataclass(frozen=True)
class StoredItems:
    """An array of numbers of one type in a stored object, read in ranges."""

    store: Store
    key: str
    dtype: DType
    offset: int
    length: int

    @property
    def path(self) -> str:
        return self.store.path(self.key)

    def read(self, start: int, stop: int) -> AnyArray:
        """Items ``start:stop`` as they are stored. ValueError if the object ends before."""
        size = self.dtype.itemsize
        data = self.store.read_range(self.key, self.offset + start * size, self.offset + stop * size)
        if len(data) != (stop - start) * size:
            raise ValueError(f"{self.path}: ends before item {stop}. The file is truncated: fetch or write it again.")
        return np.frombuffer(data, self.dtype)

    def tokens(self, start: int, stop: int) -> UInt32s:
        """Items ``start:stop`` as token ids: uint32[stop - start], a copy. ValueError if one is not a token id."""
        return token_ids(self.read(start, stop), self.path)


def token_ids(items: AnyArray, path: str) -> UInt32s:
    """Numbers from the file at *path* as token ids: uint32[n], a copy. ValueError if one is not a token id."""
    if len(items) and not (items.dtype.kind == "u" and items.dtype.itemsize < 4):
        low, high = items.min(), items.max()
        if not 0 <= low <= high <= MAX_TOKEN_ID:  # false for what is not a number, too
            raise ValueError(f"{path}: holds {low} to {high} where there are token ids, from 0 to {MAX_TOKEN_ID}")
    tokens = items.astype(np.uint32)
    if items.dtype.kind == "f" and (tokens != items).any():
        raise ValueError(f"{path}: holds {items[tokens != items][0]}, which is not a token id")
    return tokens


@dataclass(frozen=True)
class IndexedFile:
    """A file of documents as a `Readable`: ``entries(i, j)`` is ``seq_starts[i : j + 1]`` in stored tokens, checked.

    ``end_of_text`` is removed from the end of each document that has it there. ``mask``: bytes that say which of the stored
    tokens count for the loss, 1 or 0.
    """

    stored: Tokens
    seq_count: int
    entries: Callable[[int, int], UInt64s]
    end_of_text: int | None = None
    mask: StoredItems | None = None

    @property
    def loss_mask(self) -> str | None:
        """The file that says which tokens count."""
        return None if self.mask is None else self.mask.key

    @cached_property
    def token_count(self) -> int:
        """Without the removed tokens, which are counted in one pass over the file, once."""
        if self.end_of_text is None:
            return self.stored.length
        return sum(batch.token_count for batch in self.batches())

    def sequence(self, i: int) -> UInt32s:
        i = contract.checked_index(i, self.seq_count, self.stored.path)
        start, stop = (int(entry) for entry in self.entries(i, i + 1))
        tokens = self.stored.tokens(start, stop)
        return tokens[:-1] if len(tokens) and tokens[-1] == self.end_of_text else tokens

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        stop = contract.checked_stop(start, stop, self.seq_count, self.stored.path)
        for part in token_ranges(self.entries, start, stop, max_tokens):
            tokens, seq_starts = self.stored.tokens(part.start, part.stop), part.seq_starts
            mask = None if self.mask is None else _checked_mask(self.mask, part.start, part.stop)
            if self.end_of_text is not None:
                removed = part.last[tokens[part.last] == self.end_of_text]
                keep = np.ones(len(tokens), np.bool_)
                keep[removed] = False
                tokens, mask = tokens[keep], None if mask is None else mask[keep]
                # An entry shifts by the tokens removed before it.
                seq_starts -= np.searchsorted(removed, seq_starts.astype(np.int64)).astype(np.uint64)
            yield TokenBatch.from_flat(tokens, seq_starts)._replace(loss_mask=mask)


def mask_beside(store: Store, key: str, token_count: int) -> StoredItems | None:
    """The bytes that say which tokens count, of a file that may not be there. ValueError if they are not as many as tokens."""
    if not store.exists(key):
        return None
    if (size := store.size(key)) != token_count:
        raise ValueError(
            f"{store.path(key)}: has {size} bytes, but there are {token_count} tokens: one says of each whether it counts for "
            "the loss. The two are not of one dataset, or one of them is truncated. Without the file, all tokens count."
        )
    return StoredItems(store, key, np.dtype("u1"), 0, token_count)


def _checked_mask(mask: StoredItems, start: int, stop: int) -> UInt8s:
    found: UInt8s = mask.read(start, stop)
    if (wrong := np.flatnonzero(found > 1)).size:
        raise ValueError(f"{mask.path}: has {found[wrong[0]]} for token {start + wrong[0]}, but a token counts, 1, or not, 0")
    return found.copy()


def vocabulary_size(splits: Splits, size: int | None, end_of_text: int | None) -> int:
    """The size of a vocabulary that holds all ids, or *size* if it is given. ValueError if *size* is too small."""
    highest = max(end_of_text or 0, 0, *(split.max_token_id for split in splits.values() if split.token_count))
    if size is not None and highest >= size:
        raise ValueError(
            f"vocabulary_size is {size}, but max_token_id or end_of_text is {highest}. Set the size of the tokenizer's "
            "vocabulary, special tokens included."
        )
    return highest + 1 if size is None else size


def narrow_dtype(splits: Splits, size: int | None, end_of_text: int | None) -> DType:
    """The type of the tokens, as datatrove and OLMo-core take it from a vocabulary: two bytes for up to 65,536 ids, else four."""
    return np.dtype("<u2" if vocabulary_size(splits, size, end_of_text) <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class IndexedDocuments:
    """Sequences ``start:stop`` of a split as an exporter writes them, each closed by *end_of_text* if that is set.

    ``unless_present``: not if a sequence ends with it already, as in Modalities. An import cannot tell such sequences from
    the others.
    """

    split: FlatTokens
    start: int
    stop: int
    end_of_text: int | None
    closing: Closing = "always"

    @classmethod
    def of(cls, splits: Splits, file: ExportFile, options: Any) -> Self:
        """The sequences of a file."""
        return cls(splits[file.split], file.start, file.stop, options.end_of_text)

    def write_tokens(self, writer: Any, dtype: DType) -> None:
        """Write all tokens as *dtype*."""
        for tokens in contract.ahead(self.tokens(dtype)):
            writer.write(tokens)

    @cached_property
    def token_count(self) -> int:
        """Including the added tokens. Needs a pass over the tokens only if some may close a sequence already."""
        if not self._must_look:
            tokens = contract.entry(self.split, self.stop) - contract.entry(self.split, self.start)
            return tokens + (self.end_of_text is not None) * (self.stop - self.start)
        return sum(int(lengths.sum()) for lengths in self.lengths())

    def lengths(self) -> Iterator[Int64s]:
        """Number of tokens of each document, including the added one: int64 arrays, in order."""
        if self._must_look:
            for part, tokens in self._ranges():
                lengths = (part.ends - part.begins).astype(np.int64)
                added = np.ones(len(lengths), np.bool_)
                added[lengths > 0] = tokens[part.last] != self.end_of_text
                yield lengths + added
            return
        for start in range(self.start, self.stop, STARTS_AT_A_TIME):
            entries = contract.checked_entries(self.split, start, min(start + STARTS_AT_A_TIME, self.stop))
            yield (entries[1:] - entries[:-1]).astype(np.int64) + (self.end_of_text is not None)

    def bounds(self, base: int = 0, width: int = 1) -> Iterator[Int64Pair]:
        """Starts and ends of the documents in bytes, with tokens of *width* bytes from byte *base* on: int64 arrays, in order."""
        for lengths in self.lengths():
            ends = base + np.cumsum(lengths * width)
            yield ends - lengths * width, ends
            base = int(ends[-1]) if len(ends) else base

    def tokens(self, dtype: DType) -> Iterator[AnyArray]:
        """All their tokens as *dtype*, in arrays of some megabytes."""
        for part, tokens in self._ranges():
            if self.end_of_text is None:
                yield tokens.astype(dtype)
                continue
            ends = (part.ends - np.uint64(part.start)).astype(np.int64)
            if self._must_look:
                closed = np.zeros(len(ends), np.bool_)
                closed[part.ends > part.begins] = tokens[part.last] == self.end_of_text
                ends = ends[~closed]
            yield insert(tokens, ends + np.arange(len(ends)), self.end_of_text, dtype)

    def masks(self) -> Iterator[UInt8s]:
        """Which of these tokens count for the loss, 1 or 0, in arrays of some megabytes. An added token counts as the one before
        it does, that of an empty document does not. Of documents that are all closed.
        """
        last = np.zeros(1, np.uint8)  # of the token before the range, in whose document the range may begin
        for part in token_ranges(partial(contract.checked_entries, self.split), self.start, self.stop, BATCH_TOKENS):
            mask = self.split.mask(part.start, part.stop)
            if self.end_of_text is None:
                yield mask
                continue
            ends = (part.ends - np.uint64(part.start)).astype(np.int64)
            closing = np.where(part.ends > part.begins, np.concatenate([last, mask])[ends], np.uint8(0))
            at = ends + np.arange(len(ends))
            out = insert(mask, at, 0, np.dtype(np.uint8))
            out[at] = closing
            yield out
            last = mask[-1:] if len(mask) else last

    @property
    def _must_look(self) -> bool:
        return self.closing == "unless_present" and self.end_of_text is not None and self.end_of_text <= self.split.max_token_id

    def _ranges(self) -> Iterator[tuple[TokenRange, UInt32s]]:
        for part in token_ranges(partial(contract.checked_entries, self.split), self.start, self.stop, BATCH_TOKENS):
            yield part, self.split.slice(part.start, part.stop) >> np.uint32(1)


def insert(tokens: AnyArray, at: Int64s, token: int, dtype: DType) -> AnyArray:
    """*tokens* in another type, with *token* inserted at the positions *at* (int64[n]) of the result."""
    out = np.full(len(tokens) + len(at), token, dtype)
    keep = np.ones(len(out), np.bool_)
    keep[at] = False
    out[keep] = tokens
    return out
