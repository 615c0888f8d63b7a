"""The target: the version under way, and everything that its final objects have in common."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from pydantic import Field

from flat_tokens.annotations import Bools, Int8s, UInt64s
from flat_tokens.arrays.layouts import LAYOUTS, Layout, LayoutName
from flat_tokens.arrays.opening import open_array
from flat_tokens.batch import TOKENS
from flat_tokens.keys import A, mix
from flat_tokens.manifest import EVERY_SPLIT, SPLITS
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.models import ALL_SPLITS, LEFT_OUT, FactWidth, Model, Name, Split, TokenArrayName
from tasks.output.leases import Workspace
from tasks.output.paths import DOCUMENTS, STAGING, beside_key, home_key, version_key, version_store
from tasks.rows import OF_CHOICE, OF_VERSION

LEFT_OUT_TOKENS = replace(LAYOUTS["mmap"].encoded_tokens, chunk_length=1 << 15, zstd_level=1)
"""Compressed: it is read at most once a build, and stays as long as its version."""


def layout_of(layout: LayoutName, split: Split) -> Layout:
    """The specifications of the arrays of a split, in a version of this *layout*."""
    return LAYOUTS["mmap"]._replace(encoded_tokens=LEFT_OUT_TOKENS) if split == LEFT_OUT else LAYOUTS[layout]


class Kept(Model):
    """The values of a fact, KEY or SPLIT_KEY, that a version has in train. ``version``: its URL."""

    version: str
    fact: Name

    def has(self, values: UInt64s) -> Bools:
        """Which of the values the version has in train: bool[n]."""
        there = _in_train(self)
        at = np.searchsorted(there, values)
        return np.append(there, there[:1])[at] == values if len(there) else np.zeros(len(values), bool)


@functools.lru_cache(2)
def _in_train(kept: Kept) -> UInt64s:
    array = open_array(Store.at(kept.version) / f"{DOCUMENTS}/train/{kept.fact}", "uint64")
    return np.unique(array.read(0, array.length))


class SplitRule(Model):
    """A document is validation if a hash of its split key and the seed is below the fraction, and test if it is below the sum of
    both fractions. It depends on the document alone, not on the tokenizer, the number of workers or the rest of the dataset; and
    the test fraction changes nothing about validation. A document whose value is ``kept`` is in train.
    """

    fraction: float
    seed: int
    test_fraction: float = 0.0
    kept: Kept | None = None

    @classmethod
    def of(cls, config: BuildConfig) -> SplitRule:
        """The rule of a configuration."""
        kept = Kept(version=config.split.keep, fact=config.split_fact) if config.split.keep else None
        return cls(fraction=config.fraction, seed=config.split_seed, test_fraction=config.test_fraction, kept=kept)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that documents go to."""
        return EVERY_SPLIT if self.test_fraction else SPLITS

    def numbers(self, keys: UInt64s, all_in: Split | None = None) -> Int8s:
        """The split of each document, by its number in ALL_SPLITS: int8[n]. *all_in*: that of all, if their file has one."""
        if all_in is not None:
            return np.full(len(keys), ALL_SPLITS.index(all_in), np.int8)
        hashes = mix(keys ^ mix(np.array([self.seed], np.uint64) * A + A))
        in_validation = _below(self.fraction, hashes)
        numbers = in_validation.astype(np.int8)
        if self.test_fraction:
            numbers[_below(self.fraction + self.test_fraction, hashes) & ~in_validation] = EVERY_SPLIT.index("test")
        if self.kept is not None:
            numbers[self.kept.has(keys)] = EVERY_SPLIT.index("train")
        return numbers


def _below(fraction: float, hashes: UInt64s) -> Bools:
    return np.ones(len(hashes), bool) if fraction >= 1 else hashes < np.uint64(int(fraction * 2**64))


RENAMED = np.dtype([(name, "<u8") for name in ("split", "document", "name", "similarity")])
"""A document of an input, by its split's place in EVERY_SPLIT and its number there, and the name that its cluster of
near-duplicates has from now on, 0 for none, with the similarity to the document that names it.
"""


class Target(Model):
    """The version under way: where this process works, the version's name and layout, its splits and which documents go where,
    its token arrays, and the kinds of the columns that it keeps, as far as they are known before its documents are read.
    ``texts``: facts of texts, which are stored next to the version, like its left-out documents.
    """

    workspace: Workspace
    name: Name
    layout: LayoutName
    splits: tuple[Split, ...] = SPLITS
    rule: SplitRule = SplitRule(fraction=0, seed=0)
    leaves_out: bool = False
    """Whether documents that it leaves out are one more split, if there are any."""
    facts: tuple[Name, ...] = OF_VERSION
    """Facts of each document, in arrays with an entry a document."""
    texts: dict[Name, FactWidth] = Field({})
    """The numbers of each of these facts."""
    token_arrays: tuple[TokenArrayName, ...] = (TOKENS,)
    columns: dict[str, str] = Field({})
    """By the columns' names."""
    clusters: str = ""
    """Below the staging: RENAMED[n], clusters of the input that have another name here."""

    @property
    def root(self) -> Store:
        """The output."""
        return self.workspace.root

    @property
    def store(self) -> Store:
        """The version's own store."""
        return version_store(self.root, self.name)

    @property
    def beside(self) -> Store:
        """The store of what the version leaves out."""
        return self.root / beside_key(self.name)

    def of_attempt(self, attempt: str) -> Store:
        """The store of objects that all processes of an attempt read: its staging, which is swept. If the output is remote, its
        staging is on one machine, and the store is that of the left-out documents.
        """
        return self.root / f"{STAGING}/{self.name}/{attempt}" if self.root.is_local else self.beside

    @property
    def every_split(self) -> tuple[Split, ...]:
        """Its splits, with that of the documents that it leaves out."""
        return (*self.splits, LEFT_OUT) if self.leaves_out else self.splits

    def texts_of(self, split: Split) -> dict[Name, FactWidth]:
        """The facts that are next to the version of the documents of a split, and the numbers of each."""
        return {**self.texts, **dict.fromkeys(OF_CHOICE, 1)} if split == LEFT_OUT else self.texts

    def home(self, split: Split) -> Store:
        """The store that has a split."""
        return self.root / home_key(self.name, split)

    def layout_of(self, split: Split) -> Layout:
        """The specifications of the arrays of a split."""
        return layout_of(self.layout, split)

    def key(self, name: str) -> str:
        """Key below the output of an object of the version."""
        return f"{version_key(self.name)}/{name}"
