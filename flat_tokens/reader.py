"""Reading a dataset: ``flat_tokens.open(path_or_url)`` and its splits; and the message for a path that is not a dataset:
what is there, and the nearest path that is one.
"""

from __future__ import annotations

import os
import posixpath
import re
import reprlib
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flat_tokens.annotations import Int32s, Int64Pair, Int64s, IntPair, JsonObject, UInt8s, UInt32s, UInt64s
from flat_tokens.arrays.opening import open_array, read_metadata
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import LOSS_MASK, MAX_TOKEN_ID, TOKENS, TokenBatch
from flat_tokens.manifest import (
    BYTES_RECORD,
    EVERY_SPLIT,
    GROUPS,
    LINK,
    MANIFEST,
    POINTER,
    RECEIPT,
    SPLITS,
    TEST,
    VERSIONS,
    SplitName,
    latest_of,
    manifest_of,
    read_manifest,
    read_token_bytes,
    splits_at,
    splits_of,
)
from flat_tokens.options import at_least, nearest
from flat_tokens.rows.documents import LEFT_OUT, DocumentTable, beside, chosen_by, key_of, matching, numbers_of, recorded_of
from flat_tokens.rows.frameworks import Fields, Framework
from flat_tokens.rows.packing import PackedDocumentsView
from flat_tokens.rows.packing_index import Fit, OnCrop, TooLong
from flat_tokens.rows.views import BlocksView, DocumentsView, PackedView, read_starts
from flat_tokens.rows.virtual import FillInMiddle, selected, with_ends, with_middle
from flat_tokens.rows.where import parse
from flat_tokens.stores import signing
from flat_tokens.stores.cached import READ_AHEAD_BYTES, CachedStore
from flat_tokens.stores.disk_cache import DiskCache
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.reading import followed
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, read_json, stored_object

T = TypeVar("T")
ROOTS = ("zarr.json", ".zgroup")
DEPTH, DIRECTORIES = 4, 1000
"""How deep datasets are looked for below a path, and in how many directories."""
NAMED = 5
CONFIG_BYTES = 1 << 16
OUTPUT = re.compile(rb"^output:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
WANTED = f"A dataset is a build's output, with {POINTER}, or one version, with {' and '.join(SPLITS)}."

OTHERS = "flat-tokens inspect says whether it is of another format, and flat-tokens import makes a dataset of it."


class Directory(NamedTuple):
    """A directory with the names of what is right in it."""

    store: Store
    files: tuple[str, ...]
    directories: tuple[str, ...]

    @property
    def is_dataset(self) -> bool:
        """Whether it is a build's output or a version, by the names in it."""
        if POINTER in self.files and _has_latest(self.store):
            return True
        return set(SPLITS) <= {*self.directories} and not {*ROOTS}.isdisjoint(self.files)


def _has_latest(store: Store) -> bool:
    """Whether an output's pointer names a version, or cannot be read."""
    with suppress(ValueError, OSError):
        return latest_of(store) is not None
    return True


def directory(store: Store) -> Directory:
    """The directory at *store*, by one listing. Links are left out. FileNotFoundError or NotADirectoryError if there is none."""
    found = [info for info in store.ask("ls", detail=True) if not info.get("islink")]
    names: dict[bool, list[str]] = {False: [], True: []}
    for info in found:
        path = info["name"].rstrip("/")
        if posixpath.dirname(path) == store.root.rstrip("/"):  # web servers list links to anywhere
            names[info["type"] == "directory"].append(posixpath.basename(path))
        elif path == store.root and info["type"] != "directory":
            raise NotADirectoryError(path)
    return Directory(store, tuple(sorted(names[False])), tuple(sorted(names[True])))


def directories_below(store: Store) -> Iterator[Directory]:
    """The directories at and below a path, nearest first; none within a dataset, and no hidden ones. What nobody may list is left
    out.
    """
    level, left = [store], DIRECTORIES
    for _ in range(DEPTH + 1):
        following: list[Store] = []
        for place in level[:left]:
            with suppress(*NO_OBJECT, PermissionError):
                found = directory(place)
                yield found
                if not found.is_dataset:
                    following += [place / name for name in found.directories if not name.startswith(".")]
        level, left = following, left - len(level)
        if left <= 0:
            return


def datasets_below(store: Store) -> list[Store]:
    """The outputs and datasets below a path, nearest first."""
    return [found.store for found in directories_below(store) if found.is_dataset]


def no_dataset(store: Store) -> FileNotFoundError:
    """The error that says what is at *store*, that a dataset was wanted, and the nearest that is one."""
    return FileNotFoundError(f"{store.url}: {_seen(store)}")


def _seen(store: Store) -> str:
    try:
        here = directory(store)
    except NO_OBJECT:
        return _seen_file(store) if store.exists("") else f"there is nothing here.{_beside(store)}"
    if RECEIPT in here.files:
        return f"is a token shard, not a dataset.{_around(store) or ' flat-tokens inspect shows it.'}"
    if not {*ROOTS}.isdisjoint(here.files) and "encoded_tokens" in here.directories:
        return f"is one flat-tokens array, not a dataset with {' and '.join(SPLITS)}.{_around(store)}"
    versions = here if posixpath.basename(store.root) == VERSIONS else None
    if versions is None and VERSIONS in here.directories:
        versions = directory(store / VERSIONS)
    if versions is not None:
        names = [versions.store.path(name) for name in versions.directories]
        if above := _around(store):
            return f"holds the versions of an output.{above}"
        return f"no version here is the latest. {_one_of(names, 'Name a version')}" if names else "nothing is published here yet."
    if around := _around(store):
        return f"is a part of a dataset, not a dataset.{around}"
    if not here.files and not here.directories:
        return f"is an empty directory. {WANTED}"
    if below := datasets_below(store):
        return f"is not a dataset itself. {_one_of([one.url for one in below], 'Name one below')}"
    holds = ", ".join([*(f"{name}/" for name in here.directories), *here.files][:NAMED])
    return f"is not a flat-tokens dataset. {WANTED} Here are {holds}. {OTHERS}"


def _seen_file(store: Store) -> str:
    if output := config_output(store):
        return f"is a configuration, not a dataset. Name the output of its build: {output}"
    if around := _around(store):
        return f"is a file of a dataset.{around}"
    return f"is a file, no flat-tokens dataset. {WANTED} {OTHERS}"


def config_output(store: Store) -> str | None:
    """The output that a build's configuration names, if *store* is such a file."""
    if not store.root.endswith((".yaml", ".yml")):
        return None
    with suppress(*NO_OBJECT):
        found = OUTPUT.search(store.read_range("", 0, CONFIG_BYTES))
        return found[1].decode(errors="replace") if found else None
    return None


def _around(store: Store) -> str:
    """The remedy where a dataset lies around a path."""
    path = posixpath.dirname(store.root)
    while path not in ("", "/"):
        with suppress(*NO_OBJECT, PermissionError):
            if (found := directory(replace(store, root=path))).is_dataset:
                return f" Name the dataset around it: {found.store.url}"
        path = posixpath.dirname(path)
    return ""


def _beside(store: Store) -> str:
    """The remedy where nothing is at a path: a dataset around or next to it, the one with the most similar name first."""
    if around := _around(store):
        return around
    path, name = posixpath.split(store.root)
    above = None
    while above is None and path:
        try:
            above = directory(replace(store, root=path))
        except (*NO_OBJECT, PermissionError):
            if path == posixpath.dirname(path):
                break
            path, name = posixpath.split(path)
    if above is None:
        return ""
    for names in (filter(None, [nearest(name, above.directories)]), above.directories[:DIRECTORIES]):
        found = [one.store.url for one in map(_if_listed, (above.store / other for other in names)) if one and one.is_dataset]
        if found:
            return f" {_one_of(found, 'Did you mean')}?"
    return f" The nearest directory that is there is {above.store.url}."


def _if_listed(store: Store) -> Directory | None:
    with suppress(*NO_OBJECT, PermissionError):
        return directory(store)
    return None


def _one_of(names: Sequence[str] | Iterable[str], lead: str) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{lead}: {', '.join(names[:NAMED])}{more}"


STARTS_AT_A_TIME = 1 << 20
MAX_LINKS = 40
"""The most links that a path leads through, as in Linux."""


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
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.store.url}: there are no tokens {start} to {stop}; there are {self.token_count}")
        return self.encoded_tokens.read(start, stop)

    def mask(self, start: int, stop: int) -> UInt8s:
        """Which of the tokens ``start:stop`` count for the loss: uint8[stop - start], 1 or 0. All do if there is no mask."""
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.store.url}: there are no tokens {start} to {stop}; there are {self.token_count}")
        return np.ones(stop - start, np.uint8) if self.loss_mask is None else self.loss_mask.read(start, stop)

    def bounds(self, indices: Int64s) -> Int64Pair:
        """Starts and lengths of many sequences: int64[n], int64[n]. Indices are 0 to ``seq_count - 1``."""
        indices = np.asarray(indices, np.int64)
        if (outside := indices[(indices < 0) | (indices >= self.seq_count)]).size:
            raise IndexError(f"{self.store.url}: there is no sequence {outside[0]}; there are {self.seq_count}")
        starts, stops = self.seq_starts.take(np.concatenate([indices, indices + 1])).reshape(2, -1)
        if (wrong_ones := np.flatnonzero((stops < starts) | (stops > np.uint64(self.token_count)))).size:
            k = wrong_ones[0]
            raise ValueError(self.wrong_bounds(int(indices[k]), int(starts[k]), int(stops[k])))
        return starts.astype(np.int64), (stops - starts).astype(np.int64)

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = 1 << 22) -> Iterator[TokenBatch]:
        """Sequences ``start:stop`` in order, about *max_tokens* tokens at a time; a longer sequence stands alone.

        Each batch is a flat-tokens array of its own: its ``seq_starts`` begin with 0.
        """
        stop = self.seq_count if stop is None else stop
        if not 0 <= start <= stop <= self.seq_count:
            raise IndexError(f"{self.store.url}: there are no sequences {start} to {stop}; there are {self.seq_count}")
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
        *loss_mask* rows have a ``loss_mask`` in any case: where the dataset has none, all tokens count. With *fim* the middle of
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
        every row is full: where no document fits, one is cut; *on_crop* drops or keeps its rest. ``view.fill`` has the waste.
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


@dataclass(frozen=True)
class Dataset:
    """An immutable version of a dataset: the splits ``train``, ``validation`` and ``test``, None if there is no such split."""

    store: Store
    train: FlatTokens
    validation: FlatTokens
    test: FlatTokens | None = None

    @property
    def splits(self) -> dict[SplitName, FlatTokens]:
        """The splits that there are, by their names."""
        some: dict[SplitName, FlatTokens | None] = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in some.items() if split is not None}

    @property
    def path(self) -> str:
        """The version's own path or URL, whose content never changes."""
        return self.store.url

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {split.token_count:,} tokens" for name, split in self.splits.items())
        return f"Dataset({self.store.url!r}: {counts})"

    @cached_property
    def manifest(self) -> JsonObject:
        """The manifest: the origin of the tokens, totals, digests. FileNotFoundError if the dataset has none; ValueError if it
        is not valid.
        """
        return read_manifest(self.store)

    @property
    def documents(self) -> Any:
        """The documents, those that were left out among them, a row each: a pyarrow.RecordBatchReader, which duckdb, polars and
        pandas take. ``split`` and ``place``: where it is; ``reason``: why it is in no split; ``of``: the key of the document that
        stayed. It warns if the dataset does not know all that it left out. It needs pyarrow.
        """
        table = document_table(self.store, self.splits)
        if table.unknown:
            warnings.warn(table.unknown, stacklevel=2)
        return table.read()

    @cached_property
    def token_bytes(self) -> Int32s:
        """The bytes that each token id stands for: int32[highest id + 1]. Special tokens have 0, as ids without a token have.

        Loss in bits per byte is the sum of the losses of tokens with bytes, over the sum of their bytes and ln 2.
        FileNotFoundError for tokens from elsewhere; ValueError if the record is damaged.
        """
        try:
            return read_token_bytes(self.store, self.manifest).lengths
        except NO_OBJECT as error:
            raise FileNotFoundError(
                f"{self.store.url}: has no {BYTES_RECORD}: its tokens are from elsewhere. "
                "flat_tokens.vocabulary.token_bytes has the bytes of a tokenizer by its name."
            ) from error


def open(
    path_or_url: PathOrUrl,
    *,
    cache: PathOrUrl | None = None,
    cache_bytes: int | None = None,
    read_ahead: int = READ_AHEAD_BYTES,
) -> Dataset:
    """Open a dataset at a local path or fsspec URL.

    The path is a dataset, or a build's output with ``latest.json``. The pointer and links are resolved once: later versions do
    not change an open dataset. FileNotFoundError if there is no published dataset; ValueError, naming the array, if it does
    not have the format, or naming the pointer or manifest, if a key is set and it is not signed.

    *cache*: a local directory for at most *cache_bytes* of what is read from a store, shared by the processes of the machine; a
    local dataset needs none and takes none. Then ``steps()`` of loaders fetch up to *read_ahead* bytes of the steps to come, and
    up to twice as many are in memory. ValueError for a dataset without a manifest: nothing says what its objects hold.
    """
    if (cache is None) != (cache_bytes is None):
        raise ValueError(f"cache is {cache!r} and cache_bytes {cache_bytes}: give both, the directory and its bound, or none")
    checked_bytes, read_ahead = at_least(1, "cache_bytes", cache_bytes or 1), at_least(0, "read_ahead", read_ahead)
    store, metadata = open_root(Store.at(path_or_url))
    manifest: JsonObject = {}
    # Datasets with a manifest were written by this library. Local ones are checked in any case.
    if cache is not None and not store.is_local:
        if not (manifest := manifest_of(store)):
            raise ValueError(f"{store.url}: has no {MANIFEST}, which a cache needs. Open it without one, or make it again.")
        objects = [stored_object(stored) for stored in manifest["objects"]]
        store = CachedStore.over(store, objects, DiskCache(cache, checked_bytes), read_ahead)
    elif not store.reads_last_bytes:  # its sizes are those of the manifest, where there is one
        manifest = manifest_of(store)
        objects = [stored_object(stored) for stored in manifest.get("objects", ())]
        store = replace(store, sizes={store.path(stored.key): stored.size for stored in objects})
    if signing.keys():
        manifest = manifest_of(store)
    in_order = bool(manifest or store.exists(MANIFEST)) and not store.is_local
    marker = f"{TEST}/{GROUPS[metadata['zarr_format']]}"

    def opened(split: SplitName) -> FlatTokens | None:
        if split not in SPLITS and not (split in splits_of(manifest["totals"]) if manifest else store.exists(marker)):
            return None
        return open_split(store / split, in_order=in_order)

    with ThreadPoolExecutor(len(EVERY_SPLIT)) as pool:
        # Round trips of an object store pass together. A local split is opened in less time than a thread is started.
        train, validation, test = (map if store.is_local else pool.map)(opened, EVERY_SPLIT)
    assert train is not None
    assert validation is not None
    return Dataset(store, train, validation, test)


def open_root(root: Store) -> tuple[Store, JsonObject]:
    """The version at a path, and the zarr metadata of its root group. FileNotFoundError, with what is there instead and the
    nearest dataset, if there is no dataset.
    """
    store = resolve(root)
    try:
        metadata = read_metadata(store, "group")
    except NO_OBJECT as error:
        raise no_dataset(store) from error
    if "max_token_id" in metadata["attributes"]:
        raise no_dataset(store)
    return store, metadata


def check_where(root: Store, where: str) -> None:
    """ValueError for an expression that cannot be true or false of a dataset's documents, even if there are none."""
    store, _ = open_root(root)
    for split in open_splits(store).values():
        matching(split, parse(where), 0, 0, lambda: recorded_of(store))


def resolve(store: Store) -> Store:
    """The version that ``latest.json`` points at, or *store* itself if it points at none. Local links are followed, once."""
    store = without_links(store)
    version = latest_of(store)
    return store if version is None else store / VERSIONS / version


def without_links(store: Store) -> Store:
    """The store at its real path. With a key, a link ``latest`` is the output itself: its signed pointer says which version is
    the latest, and whoever writes to the output can change a link. ValueError if there is no pointer.
    """
    if not store.is_local:
        return store
    path = store.root
    for _ in range(MAX_LINKS if signing.keys() else 0):
        above, name = os.path.split(path)
        if name == LINK:
            if kind_of(os.path.join(above, POINTER)) != "file":
                raise ValueError(
                    f"{path}: there is no {POINTER} next to it, whose signature would say which version is the latest. "
                    f"Restore it, or name a version: {os.path.join(above, VERSIONS)}/ID"
                )
            return replace(store, root=followed(above))
        if kind_of(path, follow_links=False) != "link":
            break
        path = os.path.join(above, os.readlink(path)).rstrip("/")
    return replace(store, root=followed(store.root))


def open_splits(store: Store) -> dict[SplitName, FlatTokens]:
    """The splits of a dataset, by their names."""
    return {split: open_split(store / split) for split in splits_at(store)}


def document_table(store: Store, splits: Mapping[Any, Any]) -> DocumentTable:
    """The documents of a version, those of its *splits* first, then those that it left out."""
    return DocumentTable(store, {**splits, **left_out_at(store)})


def left_out_at(version: Store) -> dict[str, FlatTokens]:
    """The documents that a version left out, by LEFT_OUT; nothing if they are not there, as next to a copy of the version."""
    at, is_built = beside(version), posixpath.basename(posixpath.dirname(version.root)) == VERSIONS
    return {LEFT_OUT: open_split(at / LEFT_OUT)} if is_built and at.exists(f"texts/{LEFT_OUT}/of/zarr.json") else {}


def open_split(store: Store, *, in_order: bool = False) -> FlatTokens:
    """Open one flat-tokens array. Its few numbers are checked against each other; no token is read."""
    metadata = read_metadata(store, "group")
    attributes = metadata["attributes"]
    if not attributes and metadata["zarr_format"] == 2:
        read_json(store, ".zattrs")  # FileNotFoundError while the version is removed, file by file
    max_token_id = attributes.get("max_token_id")
    if type(max_token_id) is not int or not 0 <= max_token_id <= MAX_TOKEN_ID:
        raise ValueError(f"{store.url}: max_token_id is {reprlib.repr(max_token_id)}, but the format says 0 to {MAX_TOKEN_ID}")
    tokens = open_array(store / "encoded_tokens", "uint32", in_order=in_order)
    starts = open_array(store / "seq_starts", "uint64", in_order=in_order)
    if starts.length == 0:
        raise ValueError(f"{starts.store.url}: is empty, but it ends with the token count")
    begin, end = starts.take(np.array([0, starts.length - 1])).tolist()
    if begin:
        raise ValueError(f"{starts.store.url}: begins with {begin} instead of 0")
    if end != tokens.length:
        raise ValueError(
            f"{starts.store.url}: ends at {end}, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    if attributes.get(LOSS_MASK) is not True:
        if LOSS_MASK in attributes or (store.is_local and store.exists(LOSS_MASK)):  # a request more, of a remote store
            raise ValueError(
                f"{store.url}: loss_mask is {reprlib.repr(attributes.get(LOSS_MASK))}, but where there is one it is true. "
                "The dataset is damaged."
            )
        return FlatTokens(store, max_token_id, tokens, starts)
    mask = open_array(store / LOSS_MASK, "uint8", in_order=in_order)
    if mask.length != tokens.length:
        raise ValueError(
            f"{mask.store.url}: has {mask.length} entries, but encoded_tokens has {tokens.length} tokens. "
            "The dataset is damaged or was not written to its end."
        )
    return FlatTokens(store, max_token_id, tokens, starts, mask)


def checked_entries(split: FlatTokens, start: int, stop: int) -> UInt64s:
    """``seq_starts[start : stop + 1]``: uint64[stop - start + 1]. ValueError if they do not increase to the token count."""
    checked_stop(start, stop, split.seq_count, split.store.url)
    entries = split.seq_starts.read(start, stop + 1)
    if (entries[1:] < entries[:-1]).any() or entries[-1] > split.token_count:
        raise ValueError(
            f"{split.store.url}: seq_starts does not increase to the {split.token_count} tokens that there are, between "
            f"entries {start} and {stop}. The dataset is damaged: run flat_tokens.verify on it."
        )
    return entries


def checked_stop(start: int, stop: int | None, seq_count: int, where: str) -> int:
    """*stop*, or the end if it is None. IndexError if there are no sequences ``start:stop``."""
    stop = seq_count if stop is None else stop
    if not 0 <= start <= stop <= seq_count:
        raise IndexError(f"{where}: there are no sequences {start} to {stop}; there are {seq_count}")
    return stop


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, made ahead by a thread, up to two of them."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(2))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield cast(T, item)
