"""Reading a dataset: ``flat_tokens.open(path_or_url)`` and its two splits."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.opening import open_array, read_json, read_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.manifest import MANIFEST, POINTER, SPLITS, VERSIONS
from flat_tokens.rows.blocks import BlocksView
from flat_tokens.rows.documents import DocumentsView
from flat_tokens.rows.frameworks import Framework
from flat_tokens.rows.packed import PackedView
from flat_tokens.rows.packing import PackedDocumentsView
from flat_tokens.rows.packing_index import Fit, TooLong
from flat_tokens.stores.store import Store

STARTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class FlatTokens:
    """One flat-tokens array: all tokens of a split, one after another, and where its sequences start."""

    store: Store
    max_token_id: int
    encoded_tokens: StoredArray
    seq_starts: StoredArray

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.length

    @property
    def seq_count(self) -> int:
        return self.seq_starts.length - 1

    def __len__(self) -> int:
        return self.seq_count

    def __repr__(self) -> str:
        return f"FlatTokens({self.store.url!r}: {self.seq_count:,} sequences, {self.token_count:,} tokens)"

    def __getitem__(self, i: int) -> npt.NDArray[np.uint32]:
        return self.sequence(i)

    def sequence(self, i: int) -> npt.NDArray[np.uint32]:
        """Sequence *i*, decoded: uint32[length]. One index read and one token read. Negative *i* counts from the end."""
        return self.slice(*self.span(i)) >> np.uint32(1)

    def span(self, i: int) -> tuple[int, int]:
        """Start and end of sequence *i*, in tokens. One index read. Negative *i* counts from the end."""
        if not -self.seq_count <= i < self.seq_count:
            raise IndexError(f"{self.store.url}: there is no sequence {i}; there are {self.seq_count}")
        start, stop = (int(entry) for entry in self.seq_starts.read(i % self.seq_count, i % self.seq_count + 2))
        if not start <= stop <= self.token_count:
            raise ValueError(self._wrong_bounds(i % self.seq_count, start, stop))
        return start, stop

    def slice(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Tokens ``start:stop`` as they are stored: uint32[stop - start], ``id * 2 + starts_a_sequence``."""
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.store.url}: there are no tokens {start} to {stop}; there are {self.token_count}")
        return self.encoded_tokens.read(start, stop)

    def bounds(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and lengths of many sequences: int64[n], int64[n]. Indices are 0 to ``seq_count - 1``."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.seq_count:
            wrong = indices[(indices < 0) | (indices >= self.seq_count)][0]
            raise IndexError(f"{self.store.url}: there is no sequence {wrong}; there are {self.seq_count}")
        starts, stops = self.seq_starts.take(np.concatenate([indices, indices + 1])).reshape(2, -1)
        if (wrong_ones := np.flatnonzero((stops < starts) | (stops > np.uint64(self.token_count)))).size:
            k = wrong_ones[0]
            raise ValueError(self._wrong_bounds(int(indices[k]), int(starts[k]), int(stops[k])))
        return starts.astype(np.int64), (stops - starts).astype(np.int64)

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = 1 << 22) -> Iterator[TokenBatch]:
        """Sequences ``start:stop`` in order, about *max_tokens* tokens at a time; a longer sequence stands alone.

        Each batch is a flat-tokens array of its own: its ``seq_starts`` begin with 0.
        """
        stop = self.seq_count if stop is None else stop
        if not 0 <= start <= stop <= self.seq_count:
            raise IndexError(f"{self.store.url}: there are no sequences {start} to {stop}; there are {self.seq_count}")
        while start < stop:
            entries = self.seq_starts.read(start, min(start + STARTS_AT_A_TIME, stop) + 1)
            if (entries[1:] < entries[:-1]).any() or entries[-1] > self.token_count:
                k = int(np.flatnonzero((entries[1:] < entries[:-1]) | (entries[1:] > self.token_count))[0])
                raise ValueError(self._wrong_bounds(start + k, int(entries[k]), int(entries[k + 1])))
            first = 0
            while first < len(entries) - 1:
                last = int(np.searchsorted(entries, entries[first] + np.uint64(max_tokens), side="right")) - 1
                last = min(max(last, first + 1), len(entries) - 1)
                encoded = self.slice(int(entries[first]), int(entries[last]))
                largest = int(encoded.max() >> 1) if len(encoded) else 0
                yield TokenBatch(encoded, entries[first : last + 1] - entries[first], largest)
                first = last
            start += len(entries) - 1

    def packed(
        self, length: int, *, overlap: int = 0, fields: Sequence[str] | None = None, framework: Framework = "numpy"
    ) -> PackedView:
        """All tokens in order, cut every *length*: rows of ``inputs``, ``targets``, ``is_seq_start`` and so on."""
        return PackedView(self, length, overlap=overlap, fields=fields, framework=framework)

    def documents(
        self, max_length: int, pad_id: int = 0, *, fields: Sequence[str] | None = None, framework: Framework = "numpy"
    ) -> DocumentsView:
        """One sequence a row, cut at *max_length* or padded up to it, with a ``loss_mask``."""
        return DocumentsView(self, max_length, pad_id, fields=fields, framework=framework)

    def blocks(self, length: int, *, fields: Sequence[str] | None = None, framework: Framework = "numpy") -> BlocksView:
        """Blocks of *length* tokens that start where sequences do, by Modalities' Megatron rule."""
        return BlocksView(self, length, fields=fields, framework=framework)

    def packed_documents(
        self,
        length: int,
        *,
        split_across_pack: bool = False,
        max_packs: int | None = None,
        padding_idx: int = 0,
        fit: Fit = "greedy",
        too_long: TooLong = "error",
        cache: str | os.PathLike[str] | None = None,
        fields: Sequence[str] | None = None,
        framework: Framework = "numpy",
    ) -> PackedDocumentsView:
        """Documents packed into rows of *length*, as in torchtune or with less padding: ``tokens``, ``labels``, ``input_pos``."""
        return PackedDocumentsView(
            self,
            length,
            split_across_pack=split_across_pack,
            max_packs=max_packs,
            padding_idx=padding_idx,
            fit=fit,
            too_long=too_long,
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

    def _wrong_bounds(self, i: int, start: int, stop: int) -> str:
        return (
            f"{self.store.url}: seq_starts says that sequence {i} is tokens {start} to {stop}, "
            f"but there are {self.token_count} tokens. The dataset is damaged: run flat_tokens.verify on it."
        )


@dataclass(frozen=True)
class Dataset:
    """An immutable version of a dataset: the splits ``train`` and ``validation``."""

    store: Store
    train: FlatTokens
    validation: FlatTokens

    @property
    def path(self) -> str:
        """The version's own path or URL, whose content never changes."""
        return self.store.url

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {getattr(self, name).token_count:,} tokens" for name in SPLITS)
        return f"Dataset({self.store.url!r}: {counts})"

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest: the origin of the tokens, totals, digests. FileNotFoundError if the dataset has none."""
        value: dict[str, Any] = json.loads(self.store.read(MANIFEST))
        return value


def open(path_or_url: str | os.PathLike[str]) -> Dataset:
    """Open a dataset at a local path or fsspec URL.

    The path is a dataset, or a build's output with ``latest.json``. The pointer is resolved once: later versions do not
    change an open dataset. FileNotFoundError if there is no published dataset; ValueError, naming the array, if it does
    not have the format.
    """
    store = resolve(Store.at(path_or_url))
    read_metadata(store, "group")
    # Datasets with a manifest were written by this library. Local ones are checked in any case.
    in_order = not store.is_local and store.exists(MANIFEST)
    with ThreadPoolExecutor(len(SPLITS)) as pool:  # round trips of an object store pass together
        splits = pool.map(lambda split: open_split(store / split, in_order=in_order), SPLITS)
        return Dataset(store, *splits)


def resolve(store: Store) -> Store:
    """The version that ``latest.json`` points at, or *store* itself where it holds no pointer."""
    try:
        version = read_json(store, POINTER).get("version")
    except FileNotFoundError:
        return store
    if not isinstance(version, str) or {"/", "\0"} & set(version) or version in ("", ".", ".."):
        raise ValueError(f"{store.path(POINTER)}: {reprlib.repr(version)} is not the name of a version")
    return store / VERSIONS / version


def open_split(store: Store, *, in_order: bool = False) -> FlatTokens:
    """Open one flat-tokens array. Its few numbers are checked against each other; no token is read."""
    attributes = read_metadata(store, "group")["attributes"]
    max_token_id = attributes.get("max_token_id") if isinstance(attributes, dict) else None
    if type(max_token_id) is not int or not 0 <= max_token_id <= MAX_TOKEN_ID:
        raise ValueError(f"{store.url}: max_token_id is {reprlib.repr(max_token_id)}, but the format says 0 to {MAX_TOKEN_ID}")
    tokens = open_array(store / "encoded_tokens", "uint32", in_order=in_order)
    starts = open_array(store / "seq_starts", "uint64", in_order=in_order)
    if starts.length == 0:
        raise ValueError(f"{(store / 'seq_starts').url}: is empty, but it ends with the token count")
    begin, end = starts.take(np.array([0, starts.length - 1])).tolist()
    if begin:
        raise ValueError(f"{(store / 'seq_starts').url}: begins with {begin} instead of 0")
    if end != tokens.length:
        raise ValueError(
            f"{(store / 'seq_starts').url}: ends at {end}, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    return FlatTokens(store, max_token_id, tokens, starts)
