"""Reading a dataset: ``flat_tokens.open(path_or_url)`` and the two splits it hands out."""

from __future__ import annotations

import json
import os
import reprlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays import ReadableArray, open_array, read_json, read_metadata
from flat_tokens.batch import MAX_TOKEN_ID
from flat_tokens.storage import Store

POINTER = "latest.json"
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, ...] = ("train", "validation")


@dataclass(frozen=True)
class FlatTokens:
    """One flat-tokens array: a long run of tokens, and where its sequences start."""

    store: Store
    max_token_id: int
    encoded_tokens: ReadableArray
    seq_starts: ReadableArray

    @property
    def token_count(self) -> int:
        return self.encoded_tokens.length

    @property
    def seq_count(self) -> int:
        return self.seq_starts.length - 1

    def __len__(self) -> int:
        return self.seq_count

    def __getitem__(self, i: int) -> npt.NDArray[np.uint32]:
        return self.sequence(i)

    def sequence(self, i: int) -> npt.NDArray[np.uint32]:
        """Sequence *i*, decoded: uint32[length]. One index read and one token read. Negative *i* counts from the end."""
        if not -self.seq_count <= i < self.seq_count:
            raise IndexError(f"{self.store.url}: there is no sequence {i}; there are {self.seq_count}")
        start, stop = (int(entry) for entry in self.seq_starts.read(i % self.seq_count, i % self.seq_count + 2))
        if not start <= stop <= self.token_count:
            raise ValueError(
                f"{self.store.url}: seq_starts says that sequence {i % self.seq_count} is tokens {start} to {stop}, "
                f"but there are {self.token_count} tokens. The dataset is damaged: run flat_tokens.verify on it."
            )
        return self.slice(start, stop) >> np.uint32(1)

    def slice(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Tokens ``start:stop`` as they are stored: uint32[stop - start], ``id * 2 + starts_a_sequence``."""
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.store.url}: there are no tokens {start} to {stop}; there are {self.token_count}")
        return self.encoded_tokens.read(start, stop)


@dataclass(frozen=True)
class Dataset:
    """An immutable version of a dataset: the splits ``train`` and ``validation``."""

    store: Store
    train: FlatTokens
    validation: FlatTokens

    @property
    def path(self) -> str:
        """The version's own path or URL, which never changes its content."""
        return self.store.url

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest: where the tokens come from, totals, digests. FileNotFoundError where a dataset has none."""
        value: dict[str, Any] = json.loads(self.store.read("manifest.json"))
        return value


def open(path_or_url: str | os.PathLike[str]) -> Dataset:
    """Open a dataset at a local path or fsspec URL.

    The path is a dataset, or a build's output with ``latest.json``, which is resolved once: what is opened stays the
    same however many versions follow. FileNotFoundError where there is no published dataset; ValueError, naming the
    array, where it does not have the format.
    """
    store = resolve(Store.at(path_or_url))
    read_metadata(store, "group")
    return Dataset(store, *(open_split(store / split) for split in SPLITS))


def resolve(store: Store) -> Store:
    """The version that ``latest.json`` points at, or *store* itself where it holds no pointer."""
    try:
        version = read_json(store, POINTER).get("version")
    except FileNotFoundError:
        return store
    if not isinstance(version, str) or {"/", "\0"} & set(version) or version in ("", ".", ".."):
        raise ValueError(f"{store.path(POINTER)}: {reprlib.repr(version)} is not the name of a version")
    return store / "versions" / version


def open_split(store: Store) -> FlatTokens:
    """Open one flat-tokens array; its few numbers are checked against each other, its tokens are not read."""
    attributes = read_metadata(store, "group")["attributes"]
    max_token_id = attributes.get("max_token_id") if isinstance(attributes, dict) else None
    if type(max_token_id) is not int or not 0 <= max_token_id <= MAX_TOKEN_ID:
        raise ValueError(f"{store.url}: max_token_id is {reprlib.repr(max_token_id)}, but the format says 0 to {MAX_TOKEN_ID}")
    tokens, starts = open_array(store / "encoded_tokens", "uint32"), open_array(store / "seq_starts", "uint64")
    if starts.length == 0:
        raise ValueError(f"{(store / 'seq_starts').url}: is empty, but it ends with the token count")
    if begin := int(starts.read(0, 1)[0]):
        raise ValueError(f"{(store / 'seq_starts').url}: begins with {begin} instead of 0")
    if (end := int(starts.read(starts.length - 1, starts.length)[0])) != tokens.length:
        raise ValueError(
            f"{(store / 'seq_starts').url}: ends at {end}, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    return FlatTokens(store, max_token_id, tokens, starts)
