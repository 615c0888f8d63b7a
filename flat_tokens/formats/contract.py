"""What every format's module agrees on.

Writing is divided by output file, so that files can be written by different machines and again after a failure:

- ``plan(splits, options) -> list[Part]``: the files, each with the run of sequences or tokens that goes into it. All
  that can be refused is refused here, from what the arrays say of themselves, before anything is written.
- ``write(splits, part, store, options) -> list[StoredObject]``: one of them, whole, through ``Store.create``. Writing a
  part again gives the same bytes.
- ``finish(splits, written, store, options) -> list[StoredObject]``: what can be written only when the parts are there,
  such as an index over them; *written* is what ``write`` returned for all of the plan's parts, in order.

Reading knows a format by its content: ``recognise(files)`` says whether some of the files have it, and
``open(files, options)`` gives their splits as `Readable`, the shape of ``FlatTokens``. Options are one frozen dataclass
a format, for both directions, of fields that JSON holds; what is wrong in one raises ValueError when it is made.
"""

from __future__ import annotations

import bisect
import os
import posixpath
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.manifest import SplitName
from flat_tokens.reader import STARTS_AT_A_TIME, FlatTokens
from flat_tokens.stores.store import Store, StoredObject

BATCH_TOKENS = 1 << 19
"""Tokens handled at a time: 2 MB as they are stored, which a processor's cache holds."""

Splits = Mapping[SplitName, FlatTokens]
"""What is exported: ``{"train": dataset.train, "validation": dataset.validation}``, or one of them alone."""


class Part(NamedTuple):
    """One file of an export: its *key*, and which run of its *split*, in the format's own units, goes into it."""

    key: str
    split: SplitName
    start: int
    stop: int


class Readable(Protocol):
    """One split of a dataset in some format, read as ``FlatTokens`` is."""

    @property
    def token_count(self) -> int: ...

    @property
    def seq_count(self) -> int: ...

    def sequence(self, i: int) -> npt.NDArray[np.uint32]:
        """Sequence *i*, decoded: uint32[length]. IndexError where there is none."""
        ...

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        """Sequences ``start:stop`` in order.

        A batch may end inside a sequence that is longer than *max_tokens*. The next one then goes on with it: its
        ``seq_starts`` begins above 0, or is ``[token_count]`` alone where no sequence starts in it, and its tokens before
        that carry no mark. So a file of one endless sequence is read in bounded memory, and batches one behind the other
        are always the whole array, which is how ``FlatTokensWriter.append`` takes them.
        """
        ...


class Files(NamedTuple):
    """What a path names: *keys*, in order, of files below *store*, which is a directory."""

    store: Store
    keys: tuple[str, ...]

    @classmethod
    def at(cls, path_or_url: str | os.PathLike[str]) -> Self:
        """The files at a path or URL: all below a directory, one file, or those that begin with a prefix and a dot.

        FileNotFoundError where there are none. Hidden files are left out.
        """
        store, (above, name) = Store.at(path_or_url), file_at(path_or_url)
        if store.exists("") and store.info("")["type"] == "file":
            return cls(above, (name,))
        keys = sorted(key for key, _ in store.listing() if not key.startswith(".") and "/." not in key)
        if keys:
            return cls(store, tuple(keys))
        if above.exists(""):
            beside = (posixpath.basename(path) for path in above.ask("ls", detail=False))
            keys = sorted(key for key in beside if key.startswith(f"{name}."))
        if not keys:
            raise FileNotFoundError(f"{store.url}: there is no file here, none below and none of that name with an ending")
        return cls(above, tuple(keys))

    @property
    def url(self) -> str:
        return self.store.path(self.keys[0]) if len(self.keys) == 1 else self.store.url


def file_at(path_or_url: str | os.PathLike[str]) -> tuple[Store, str]:
    """The directory of a file, as a store, and the file's key in it."""
    store = Store.at(path_or_url)
    parent, name = posixpath.split(store.root)
    return Store(parent or "/", store.fs), name


O = TypeVar("O")  # noqa: E741 - the options of a format
T = TypeVar("T")


@dataclass(frozen=True)
class Format(Generic[O]):
    """A neighbour's format: what it is, and its module's functions."""

    name: str
    summary: str
    """One line for a list of formats."""
    keeps: str
    """What a round trip gives back."""
    loses: str
    """What it doesn't."""
    options: type[O]
    recognise: Callable[[Files], bool]
    open: Callable[[Files, O], Mapping[SplitName, Readable]]
    plan: Callable[[Splits, O], list[Part]]
    write: Callable[[Splits, Part, Store, O], list[StoredObject]]
    finish: Callable[[Splits, Sequence[StoredObject], Store, O], list[StoredObject]]


def nothing_to_finish(splits: Splits, written: Sequence[StoredObject], store: Store, options: Any) -> list[StoredObject]:
    """For formats whose files stand alone."""
    return []


def members(files: Files, ending: str, has_format: Callable[[Store, str], bool]) -> list[str]:
    """The files to open in a format that is asked for: one that was named, all with its *ending*, or else all that have it.

    A file with the ending that is damaged must not be passed over, so what has the ending is not looked into here.
    ValueError where there is no such file.
    """
    if len(files.keys) == 1:
        return list(files.keys)
    keys = [key for key in files.keys if key.endswith(ending)] or [key for key in files.keys if has_format(files.store, key)]
    if not keys:
        raise ValueError(f"{files.url}: none of its {len(files.keys)} files is a {ending} file")
    return keys


VALIDATION_WORDS = {"validation", "valid", "val", "test", "dev", "eval", "holdout"}


def split_of(key: str) -> SplitName:
    """The split that a file's path says it belongs to, by its words: ``fineweb_val_000000.npy`` is validation."""
    return "validation" if VALIDATION_WORDS & set(re.split(r"[^a-z]+", key.lower())) else "train"


def by_split(keys: Sequence[str], opened: Callable[[str], Readable]) -> dict[SplitName, Readable]:
    """The files' readers, those of a split one behind the other in the order of the keys."""
    parts: dict[SplitName, list[Readable]] = {}
    for key in keys:
        parts.setdefault(split_of(key), []).append(opened(key))
    return {split: readers[0] if len(readers) == 1 else Joined(tuple(readers)) for split, readers in parts.items()}


@dataclass(frozen=True)
class Joined:
    """Several readers, one behind the other, as one."""

    parts: tuple[Readable, ...]

    @property
    def token_count(self) -> int:
        return sum(part.token_count for part in self.parts)

    @property
    def seq_count(self) -> int:
        return sum(part.seq_count for part in self.parts)

    def sequence(self, i: int) -> npt.NDArray[np.uint32]:
        first, count = self._firsts(), self.seq_count
        check_index(i, count, "the files")
        k = bisect.bisect_right(first, i % count) - 1
        return self.parts[k].sequence(i % count - first[k])

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        if not 0 <= start <= (self.seq_count if stop is None else stop) <= self.seq_count:
            raise IndexError(f"the files: there are no sequences {start} to {stop}; there are {self.seq_count}")
        for first, part in zip(self._firsts(), self.parts, strict=True):
            last = first + part.seq_count
            low, high = max(start, first), last if stop is None else min(stop, last)
            if low < high:
                yield from part.batches(low - first, high - first, max_tokens=max_tokens)

    def _firsts(self) -> list[int]:
        firsts = [0]
        for part in self.parts[:-1]:
            firsts.append(firsts[-1] + part.seq_count)
        return firsts


def check_index(i: int, seq_count: int, where: str) -> None:
    """IndexError where there is no sequence *i*, negative ones counted from the end."""
    if not -seq_count <= i < seq_count:
        raise IndexError(f"{where}: there is no sequence {i}; there are {seq_count}")


def check_token_id(name: str, value: int | None, largest: int = MAX_TOKEN_ID) -> None:
    """ValueError where an option is set, but not to a token id."""
    if value is not None and (type(value) is not int or not 0 <= value <= largest):
        raise ValueError(f"{name} is {value!r}, but it is a token id from 0 to {largest}")


def check_positive(name: str, value: int | None) -> None:
    """ValueError where an option is set, but not to a count."""
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} is {value!r}, but it is a whole number above 0")


def check_id_fits(splits: Splits, largest: int, what: str) -> None:
    """ValueError, naming ``max_token_id``, where a split holds ids that *what* can't."""
    for split in splits.values():
        if split.token_count and split.max_token_id > largest:
            raise ValueError(f"{split.store.url}: max_token_id is {split.max_token_id}, but {what} holds ids up to {largest}")


def bounded_batches(
    split: FlatTokens, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS
) -> Iterator[TokenBatch]:
    """Sequences ``start:stop`` of a flat-tokens array, long ones cut as `Readable.batches` says: none above *max_tokens*."""
    stop = split.seq_count if stop is None else stop
    for run in runs(lambda first, last: checked_entries(split, first, last), start, stop, max_tokens):
        encoded = split.slice(run.start, run.stop)
        yield TokenBatch(encoded, run.seq_starts, int(encoded.max() >> 1) if len(encoded) else 0)


class Run(NamedTuple):
    """Tokens ``start:stop`` of an array, and which sequences start and end among them, as positions in the array."""

    start: int
    stop: int
    starts: npt.NDArray[np.uint64]
    begins: npt.NDArray[np.uint64]
    """Of the sequences that end: the first may have begun in an earlier run."""
    ends: npt.NDArray[np.uint64]

    @property
    def seq_starts(self) -> npt.NDArray[np.uint64]:
        """Those of a ``TokenBatch`` of the run's tokens."""
        return np.append(self.starts, np.uint64(self.stop)) - np.uint64(self.start)

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """Positions among the run's tokens of the last ones of the sequences that end and have any: int64[n], increasing."""
        return (self.ends[self.ends > self.begins] - np.uint64(self.start)).astype(np.int64) - 1


def runs(entries_of: Callable[[int, int], npt.NDArray[np.uint64]], start: int, stop: int, max_tokens: int) -> Iterator[Run]:
    """Sequences ``start:stop`` in runs of at most *max_tokens* tokens, cut between sequences unless one is longer.

    ``entries_of(first, last)`` gives ``seq_starts[first : last + 1]``. A sequence's end is in the run of its last token.
    """
    while start < stop:
        entries = entries_of(start, min(start + STARTS_AT_A_TIME, stop))
        k, token = 0, int(entries[0])  # the next sequence to start, the next token
        while k < len(entries) - 1 or token < entries[-1]:
            begun = k - (token < entries[k])  # the first sequence that has not ended
            last = int(np.searchsorted(entries, np.uint64(token + max_tokens), side="right")) - 1
            if last > begun:  # up to a sequence's end
                yield Run(token, int(entries[last]), entries[k:last], entries[begun:last], entries[begun + 1 : last + 1])
                k, token = last, int(entries[last])
            else:  # into one that is too long
                started = entries[k : begun + 1]
                yield Run(token, token + max_tokens, started, entries[:0], entries[:0])
                k, token = begun + 1, token + max_tokens
        start += len(entries) - 1


def ahead(items: Iterator[T], count: int = 2) -> Iterator[T]:
    """The same items, made by a thread while those before them are used. Up to *count* of them wait."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, items, end))
            yield cast(T, item)


def checked_entries(split: FlatTokens, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """``seq_starts[start : stop + 1]``: uint64[stop - start + 1]. ValueError where they do not increase to the token count."""
    if not 0 <= start <= stop <= split.seq_count:
        raise IndexError(f"{split.store.url}: there are no sequences {start} to {stop}; there are {split.seq_count}")
    entries = split.seq_starts.read(start, stop + 1)
    if (entries[1:] < entries[:-1]).any() or entries[-1] > split.token_count:
        raise ValueError(
            f"{split.store.url}: seq_starts does not increase to the {split.token_count} tokens that there are, between "
            f"entries {start} and {stop}. The dataset is damaged: run flat_tokens.verify on it."
        )
    return entries


def cut_at_sequences(split: FlatTokens, max_tokens: int | None) -> list[tuple[int, int]]:
    """Runs of whole sequences, each of at most *max_tokens* tokens unless one sequence is longer; one run where None.

    Looks up a few entries of ``seq_starts`` a run, however many sequences there are. No run where there is no sequence.
    """

    def entry(i: int) -> int:
        return int(split.seq_starts.read(i, i + 1)[0])

    runs, start = [], 0
    while start < split.seq_count:
        stop = split.seq_count
        if max_tokens is not None:
            stop = bisect.bisect_right(range(stop + 1), entry(start) + max_tokens, start + 1, key=entry) - 1
        stop = max(stop, start + 1)
        runs.append((start, stop))
        start = stop
    return runs


def plan_files(splits: Splits, tokens_per_file: int | None, ending: str) -> list[Part]:
    """A file a split, or several of at most *tokens_per_file* tokens in whole sequences: ``train.bin``, ``train_00000.bin``.

    The parts' runs are of sequences. A split without sequences has no file.
    """
    require_sequences(splits)
    parts = []
    for name, split in splits.items():
        for i, (start, stop) in enumerate(cut_at_sequences(split, tokens_per_file)):
            number = "" if tokens_per_file is None else f"_{i:05d}"
            parts.append(Part(f"{name}{number}{ending}", name, start, stop))
    return parts


def require_sequences(splits: Splits) -> None:
    """ValueError where there is nothing to export."""
    if not any(split.seq_count for split in splits.values()):
        raise ValueError(f"{', '.join(split.store.url for split in splits.values())}: there are no sequences to export")
