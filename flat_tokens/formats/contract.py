"""The contract of the formats' modules.

Writing is divided by output file, so that files can be written by different machines and again after a failure:

- ``plan(splits, options) -> list[ExportFile]``: the files, each with the range of sequences or tokens that goes into
  it. Options that do not fit the arrays are refused here, before anything is written.
- ``write(splits, file, store, options) -> list[StoredObject]``: one of them, whole, through ``Store.create``. Writing a
  file again gives the same bytes.
- ``finish(splits, written, store, options) -> list[StoredObject]``: objects that need the files, such as an index over
  them; *written* is what ``write`` returned for all of the plan's files, in order. Most formats need none.

A format is recognised by its content: ``recognise(files)`` says whether some of the files have it, and
``open(files, options)`` returns their splits as `Readable`, a subset of ``FlatTokens``. The options of a format, for both
directions, are one frozen dataclass of fields that JSON holds, derived from `Options`, which checks them.

Files of tokens with an index of their documents, as Modalities, Megatron-LM and datatrove have them, are written and read by
``IndexedDocuments`` and ``IndexedFile``. Documents follow one another. Their consumers want a token at each document's end, which
the sequences here do not have: it is added on export and removed on import.
"""

from __future__ import annotations

import bisect
import itertools
import json
import posixpath
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from types import NoneType
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from flat_tokens.annotations import AnyArray, Bools, DType, Int64Pair, Int64s, IntPair, JsonObject, UInt8s, UInt32s, UInt64s
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.manifest import TEST, SplitName
from flat_tokens.options import true_or_false
from flat_tokens.rows.split import STARTS_AT_A_TIME, FlatTokens, ahead, checked_stop
from flat_tokens.stores.store import NO_OBJECT, PathOrUrl, Store, StoredObject, file_at, is_below, read_json

EXPORT_RECORD = ".export/export.json"
"""The record of a finished export, next to its files."""
BATCH_TOKENS = 1 << 19
"""Tokens processed at a time: 2 MB, which fit into a processor's cache."""

Splits = Mapping[SplitName, FlatTokens]
"""The splits to export: ``dataset.splits``, or some of them."""


class ExportFile(NamedTuple):
    """One file of an export: its *key*, and the range of its *split* that goes into it, in the format's own units."""

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

    def sequence(self, i: int) -> UInt32s:
        """Sequence *i*, decoded: uint32[length]. IndexError if there is none."""
        ...

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        """Sequences ``start:stop`` in order.

        A batch may end inside a sequence that is longer than *max_tokens*. The next one then continues it: its
        ``seq_starts`` begins above 0, or is only ``[token_count]`` if no sequence starts in it, and its tokens before
        that are not marked. So a file of one endless sequence is read in bounded memory, and all batches together are
        the whole array, as ``FlatTokensWriter.append`` takes them.
        """
        ...


class Files(NamedTuple):
    """The files at a path: their *keys* below the directory *store*, in order."""

    store: Store
    keys: tuple[str, ...]

    @classmethod
    def at(cls, path_or_url: PathOrUrl) -> Self:
        """The files at a path or URL: all below a directory, one file, or those that begin with a prefix and a dot.

        FileNotFoundError if there are none, but for an export of no sequence. Hidden files are left out.
        """
        store, (above, name) = Store.at(path_or_url), file_at(path_or_url)
        if store.exists("") and store.info("")["type"] == "file":
            return cls(above, (name,))
        keys = sorted(key for key, _ in store.listing() if not key.startswith(".") and "/." not in key)
        if keys:
            return cls(store, tuple(keys))
        if store.exists(EXPORT_RECORD):
            return cls(store, ())
        if above.exists(""):
            beside = (posixpath.basename(path) for path in above.ask("ls", detail=False))
            keys = sorted(key for key in beside if key.startswith(f"{name}."))
        if not keys:
            raise FileNotFoundError(f"{store.url}: there is no file here, none below and none of that name with an ending")
        return cls(above, tuple(keys))

    @property
    def url(self) -> str:
        return self.store.path(self.keys[0]) if len(self.keys) == 1 else self.store.url


@dataclass(frozen=True)
class Options:
    """Options. ValueError if ``end_of_text`` is not a token id, another integer no count, a text no text, or a value none
    of its type's literals.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            if get_origin(hint) is Literal and value not in kinds:
                *most, last = map(str, kinds)
                raise ValueError(f"{name} is {value!r}, but it is {', '.join(most)} or {last}")
            if bool in kinds:
                true_or_false(name, value)
            if str in kinds and not (isinstance(value, str) or (value is None and NoneType in kinds)):
                raise ValueError(f"{name} is {value!r}, but it is text")
            if name == "column" and value == "":
                raise ValueError("column is '', but it is a column's name")
            if name == "end_of_text":
                check_token_id(name, value)
            elif int in kinds and not (value is None and NoneType in kinds) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}, but it is a whole number above 0")


@dataclass(frozen=True)
class DocumentOptions(Options):
    """Options of files of whole documents. ``end_of_text``: closes every document on the way out, and is removed from its end on
    the way in; None leaves the tokens as they are. ``vocabulary_size``: decides the bytes of a token; without it, the highest id
    there is does. ``tokens_per_file``: several files of about this many tokens a split.
    """

    end_of_text: int | None = None
    vocabulary_size: int | None = None
    tokens_per_file: int | None = None

    def size(self, splits: Splits) -> int:
        """The size of a vocabulary that holds all ids, or the one that is set. ValueError if that is too small."""
        highest = max(self.end_of_text or 0, 0, *(split.max_token_id for split in splits.values() if split.token_count))
        if self.vocabulary_size is not None and highest >= self.vocabulary_size:
            raise ValueError(
                f"vocabulary_size is {self.vocabulary_size}, but max_token_id or end_of_text is {highest}. Set the size of the "
                "tokenizer's vocabulary, special tokens included."
            )
        return self.vocabulary_size or highest + 1

    def narrow_dtype(self, splits: Splits) -> DType:
        """The type of the tokens, as datatrove and OLMo-core take it: two bytes for up to 65,536 ids, else four."""
        return np.dtype("<u2" if self.size(splits) <= 1 << 16 else "<u4")


T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """A neighbour's format: its description, and its module's functions. ``finish`` is left out if files need no others."""

    name: str
    summary: str
    """One line for a list of formats."""
    keeps: str
    """The properties that survive a round trip."""
    loses: str
    """The properties that do not."""
    options: type[Any]
    recognise: Callable[[Files], bool]
    open: Callable[[Files, Any], Mapping[SplitName, Readable]]
    plan: Callable[[Splits, Any], list[ExportFile]]
    write: Callable[[Splits, ExportFile, Store, Any], list[StoredObject]]
    finish: Callable[[Splits, Sequence[StoredObject], Store, Any], list[StoredObject]] = lambda *_: []
    keeps_loss_mask: bool = False
    """Whether a file says which tokens count for the loss, where the dataset does."""


def with_ending(files: Files, *endings: str) -> list[str]:
    """The files with one of *endings*, or a single file whatever its name."""
    return [key for key in files.keys if len(files.keys) == 1 or key.lower().endswith(endings)]


def members(files: Files, has_format: Callable[[Store, str], object], *endings: str) -> list[str]:
    """The files to open in a given format: a single file, else all with one of *endings*, else all whose content has it.

    Files with the ending are not examined here: a damaged one must not be passed over. ValueError if there is no file.
    """
    keys = with_ending(files, *endings) or [key for key in files.keys if has_format(files.store, key)]
    if not keys:
        raise ValueError(f"{files.url}: none of its {len(files.keys)} files is a {' or '.join(endings)} file")
    return keys


VALIDATION_WORDS = {"validation", "valid", "val", "test", "dev", "eval", "holdout"}


def _words_for_validation(key: str) -> set[str]:
    return VALIDATION_WORDS.intersection(re.split(r"[^a-z]+", key.lower()))


def split_of(key: str, has_test: bool = False) -> SplitName:
    """The split of a file, from the words in its path: ``fineweb_val_000000.npy`` is validation. *has_test*: ``test`` is a split
    of its own; else it is a word for validation.
    """
    words = _words_for_validation(key)
    return TEST if has_test and TEST in words else "validation" if words else "train"


def has_test(files: Files) -> bool:
    """Whether ``test`` is a split of its own: of an export that says so, or next to files with another word for validation."""
    try:
        return TEST in read_json(files.store, EXPORT_RECORD).get("splits", ())
    except (*NO_OBJECT, ValueError, TypeError):
        return any(TEST not in words for words in map(_words_for_validation, files.keys) if words)


INDEX = "index.json"
"""The list of a split's files, next to them."""
MAX_INDEX_BYTES = 32 << 20


def indices(files: Files) -> list[str]:
    """Each INDEX, without those below another one, which lists their files as well."""
    keys = [key for key in files.keys if posixpath.basename(key) == INDEX]
    above = {PurePosixPath(key).parent for key in keys}
    return [key for key in keys if above.isdisjoint(PurePosixPath(key).parent.parents)]


def by_index(files: Files, opened: Callable[[str], list[T]]) -> dict[SplitName, list[T]]:
    """The files that *opened* finds in each INDEX, by its split, which the name of its directory says."""
    found: dict[SplitName, list[T]] = {}
    for key in indices(files):
        directory = posixpath.dirname(key)
        # The user chose the name of the root directory: only a whole word in it names a split.
        name = directory or posixpath.basename(files.store.root)
        split = split_of(name, has_test(files)) if directory or name in VALIDATION_WORDS else "train"
        found.setdefault(split, []).extend(opened(key))
    return found


@contextmanager
def reading_index(store: Store, key: str) -> Iterator[JsonObject]:
    """An INDEX. ValueError, naming it, if it is not valid, or the block finds that it is not."""
    index = read_json(store, key, MAX_INDEX_BYTES, "an index")
    with index_errors(store.path(key)):
        yield index


@contextmanager
def index_errors(path: str) -> Iterator[None]:
    """Turn errors about an index into ValueError with its *path*."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not complete ({reprlib.repr(error)})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def name_in_index(name: Any) -> str:
    """The name of a file in an index. ValueError if it is not next to it, or below."""
    if not is_below(name):
        raise ValueError(f"lists {reprlib.repr(name)}, which is not a file's name next to it")
    return str(name)


def put_indices(
    store: Store,
    files: Sequence[ExportFile],
    written: Sequence[StoredObject],
    described: Callable[[ExportFile, StoredObject], JsonObject],
    name: str,
    **more: Any,
) -> list[StoredObject]:
    """Write the INDEX of each split: its files, as they are *described*, by *name*, and what all have."""
    found: dict[SplitName, list[JsonObject]] = {}
    for file, item in zip(files, written, strict=True):
        found.setdefault(file.split, []).append(described(file, item))
    return [
        store.put(f"{split}/{INDEX}", json.dumps({name: entries, **more}, sort_keys=True).encode())
        for split, entries in found.items()
    ]


def by_split(
    files: Files, keys: Sequence[str], opened: Callable[[Store, str, Any], Readable], options: Any
) -> dict[SplitName, Readable]:
    """The readers of some of the files by split, joined in the order of the keys."""
    found: dict[SplitName, list[Readable]] = {}
    of_test = has_test(files)
    for key in keys:
        found.setdefault(split_of(key, of_test), []).append(opened(files.store, key, options))
    return {split: readers[0] if len(readers) == 1 else JoinedReaders(tuple(readers)) for split, readers in found.items()}


@dataclass(frozen=True)
class JoinedReaders:
    """Several readers, one after another, as one."""

    readers: tuple[Readable, ...]

    @property
    def token_count(self) -> int:
        return sum(reader.token_count for reader in self.readers)

    @property
    def seq_count(self) -> int:
        return sum(reader.seq_count for reader in self.readers)

    @property
    def loss_mask(self) -> str | None:
        """The array or column that says which tokens count. A reader without one has tokens that all count."""
        return next((of for reader in self.readers if (of := getattr(reader, "loss_mask", None)) is not None), None)

    def sequence(self, i: int) -> UInt32s:
        i, firsts = checked_index(i, self.seq_count, "the files"), self._firsts()
        k = bisect.bisect_right(firsts, i) - 1
        return self.readers[k].sequence(i - firsts[k])

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        stop = checked_stop(start, stop, self.seq_count, "the files")
        for first, reader in zip(self._firsts(), self.readers, strict=True):
            low, high = max(start - first, 0), min(stop - first, reader.seq_count)
            if low < high:
                for batch in reader.batches(low, high, max_tokens=max_tokens):
                    if self.loss_mask is not None and batch.loss_mask is None:
                        batch = batch._replace(loss_mask=np.ones(batch.token_count, np.uint8))
                    yield batch

    def _firsts(self) -> list[int]:
        return list(itertools.accumulate((reader.seq_count for reader in self.readers), initial=0))[:-1]


def checked_index(i: int, seq_count: int, where: str) -> int:
    """Sequence *i*, of which negative ones count from the end, counted from the start. IndexError if there is none."""
    if not -seq_count <= i < seq_count:
        raise IndexError(f"{where}: there is no sequence {i}; there are {seq_count}")
    return i % seq_count


def write_mask(store: Store, key: str, split: FlatTokens, masks: Iterator[UInt8s]) -> list[StoredObject]:
    """Write which tokens count for the loss, a byte a token, if the split has a loss mask: no object or one."""
    if split.loss_mask is None:
        return []
    with store.create(key) as writer:
        for mask in ahead(masks):
            writer.write(mask)
    return [writer.stored]


def check_token_id(name: str, value: int | None, largest: int = MAX_TOKEN_ID) -> None:
    """ValueError if an option is set, but not to a token id."""
    if value is not None and (type(value) is not int or not 0 <= value <= largest):
        raise ValueError(f"{name} is {value!r}, but it is a token id from 0 to {largest}")


def bounded_batches(split: FlatTokens, start: int = 0, stop: int | None = None) -> Iterator[TokenBatch]:
    """Sequences ``start:stop`` of a flat-tokens array, in batches of at most BATCH_TOKENS; see `Readable.batches`."""
    for part in bounded_ranges(split, start, split.seq_count if stop is None else stop):
        encoded = split.slice(part.start, part.stop)
        yield TokenBatch(encoded, part.seq_starts, int(encoded.max() >> 1) if len(encoded) else 0)


class StreamRange(NamedTuple):
    """Tokens ``start:stop`` of an array, and the sequences that start and end among them, as positions in the array."""

    start: int
    stop: int
    starts: UInt64s
    begins: UInt64s
    """Starts of the sequences that end here. The first may have begun in an earlier range."""
    ends: UInt64s

    @property
    def seq_starts(self) -> UInt64s:
        """``seq_starts`` of a ``TokenBatch`` of these tokens."""
        return np.append(self.starts, np.uint64(self.stop)) - np.uint64(self.start)

    @property
    def last(self) -> Int64s:
        """Positions in the range of the last tokens of the non-empty sequences that end here: int64[n], increasing."""
        return (self.ends[self.ends > self.begins] - np.uint64(self.start)).astype(np.int64) - 1


def token_ranges(entries_of: Callable[[int, int], UInt64s], start: int, stop: int, max_tokens: int) -> Iterator[StreamRange]:
    """Sequences ``start:stop`` in ranges of at most *max_tokens* tokens, cut between sequences unless one is longer.

    ``entries_of(first, last)`` gives ``seq_starts[first : last + 1]``. A sequence ends in the range of its last token.
    """
    while start < stop:
        entries = entries_of(start, min(start + STARTS_AT_A_TIME, stop))
        k, token = 0, int(entries[0])  # the next sequence to start, the next token
        while k < len(entries) - 1 or token < entries[-1]:
            begun = k - (token < entries[k])  # the first sequence that has not ended
            last = int(np.searchsorted(entries, np.uint64(token + max_tokens), side="right")) - 1
            if last > begun:  # up to a sequence's end
                yield StreamRange(token, int(entries[last]), entries[k:last], entries[begun:last], entries[begun + 1 : last + 1])
                k, token = last, int(entries[last])
            else:  # into one that is too long
                started = entries[k : begun + 1]
                yield StreamRange(token, token + max_tokens, started, entries[:0], entries[:0])
                k, token = begun + 1, token + max_tokens
        start += len(entries) - 1


def bounded_ranges(split: FlatTokens, start: int, stop: int) -> Iterator[StreamRange]:
    """Sequences ``start:stop`` of a flat-tokens array, in ranges of at most BATCH_TOKENS."""
    return token_ranges(split.entries, start, stop, BATCH_TOKENS)


def sequence_ranges(split: FlatTokens, max_tokens: int | None) -> list[IntPair]:
    """Ranges of whole sequences, of at most *max_tokens* tokens each unless one sequence is longer; one range if None.

    Reads a few entries of ``seq_starts`` for each range, however many sequences there are. No range without a sequence.
    """
    if max_tokens is None:
        return [(0, split.seq_count)] if split.seq_count else []
    return list(ranges_within(max_tokens, split.seq_count, lambda i: entry(split, i)))


def entry(split: FlatTokens, i: int) -> int:
    """Entry *i* of ``seq_starts``."""
    return int(split.seq_starts.read(i, i + 1)[0])


def ranges_within(limit: int, count: int, size: Callable[[int], int], most: int | None = None) -> Iterator[IntPair]:
    """Ranges that cover ``range(count)``, each as long as ``size(stop) - size(start) <= limit``, but of 1 to *most* items."""
    start = 0
    while start < count:
        end = count if most is None else min(start + most, count)
        stop = max(bisect.bisect_right(range(end + 1), size(start) + limit, start + 1, key=size) - 1, start + 1)
        yield start, stop
        start = stop


def byte_ranges(
    split: FlatTokens, limit: int, head: int, alone: int, end: int, what: str, most: int | None = None
) -> list[IntPair]:
    """Ranges of 1 to *most* sequences, for files that have a *head* and at most *limit* bytes in all: 4 of each token, and those
    that each sequence takes *alone*. ValueError for a sequence with which a file, *what*, would have *end* bytes or more.
    """

    def size(i: int) -> int:
        """The bytes of the first *i* sequences."""
        return 4 * entry(split, i) + i * alone

    ranges = list(ranges_within(max(limit - head, 1), split.seq_count, size, most))
    for start, stop in ranges:
        if stop == start + 1 and (taken := size(stop) - size(start) + head) >= end:
            raise ValueError(f"{split.store.url}: sequence {start} takes {taken} bytes, but {what} end at {end - 1}")
    return ranges


def plan_files(splits: Splits, tokens_per_file: int | None, key: str) -> list[ExportFile]:
    """A file a split, or several of at most *tokens_per_file* tokens in whole sequences. The ranges are of sequences.

    *key* is made of ``{split}``, ``{i:05d}`` of the split's ``{count:05d}`` files, and ``{number}``, which is ``_00000`` if there
    may be several. A split without sequences has no file.
    """
    files = []
    for name, split in splits.items():
        ranges = sequence_ranges(split, tokens_per_file)
        for i, (start, stop) in enumerate(ranges):
            number = "" if tokens_per_file is None else f"_{i:05d}"
            files.append(ExportFile(key.format(split=name, i=i, count=len(ranges), number=number), name, start, stop))
    return files


Closing = Literal["always", "unless_present"]


class FileTokens(Protocol):
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

    stored: FileTokens
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
        i = checked_index(i, self.seq_count, self.stored.path)
        start, stop = (int(entry) for entry in self.entries(i, i + 1))
        tokens = self.stored.tokens(start, stop)
        return tokens[:-1] if len(tokens) and tokens[-1] == self.end_of_text else tokens

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        stop = checked_stop(start, stop, self.seq_count, self.stored.path)
        for part in token_ranges(self.entries, start, stop, max_tokens):
            tokens, seq_starts = self.stored.tokens(part.start, part.stop), part.seq_starts
            mask: UInt8s | None = None
            if self.mask is not None:
                mask = self.mask.read(part.start, part.stop).copy()
                if (wrong := np.flatnonzero(mask > 1)).size:
                    at = f"{mask[wrong[0]]} for token {part.start + wrong[0]}"
                    raise ValueError(f"{self.mask.path}: has {at}, but a token counts, 1, or not, 0")
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
        for tokens in ahead(self.tokens(dtype)):
            writer.write(tokens)

    @cached_property
    def token_count(self) -> int:
        """Including the added tokens. Needs a pass over the tokens only if some may close a sequence already."""
        if not self._must_look:
            tokens = entry(self.split, self.stop) - entry(self.split, self.start)
            return tokens + (self.end_of_text is not None) * (self.stop - self.start)
        return sum(int(lengths.sum()) for lengths in self.lengths())

    def lengths(self) -> Iterator[Int64s]:
        """Number of tokens of each document, including the added one: int64 arrays, in order."""
        if self._must_look:
            for part, tokens in self._ranges():
                yield (part.ends - part.begins).astype(np.int64) + self._are_closed(part, tokens)
            return
        for start in range(self.start, self.stop, STARTS_AT_A_TIME):
            entries = self.split.entries(start, min(start + STARTS_AT_A_TIME, self.stop))
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
            ends = (part.ends - np.uint64(part.start)).astype(np.int64)[self._are_closed(part, tokens)]
            yield insert(tokens, ends + np.arange(len(ends)), self.end_of_text, dtype)

    def masks(self) -> Iterator[UInt8s]:
        """Which tokens of closed documents count for the loss, 1 or 0, in arrays of some megabytes. An added token counts if
        the token before it does; that of an empty document does not count.
        """
        for part in bounded_ranges(self.split, self.start, self.stop):
            mask = self.split.mask(part.start, part.stop)
            if self.end_of_text is None:
                yield mask
                continue
            at = (part.ends - np.uint64(part.start)).astype(np.int64) + np.arange(len(part.ends))
            out = insert(mask, at, 0, np.dtype(np.uint8))
            out[at[part.ends > part.begins]] = mask[part.last]
            yield out

    def _are_closed(self, part: StreamRange, tokens: UInt32s) -> Bools:
        """Whether a token is added to each of the documents that end in a range: bool[n]."""
        added = np.ones(len(part.ends), np.bool_)
        if self._must_look:
            added[part.ends > part.begins] = tokens[part.last] != self.end_of_text
        return added

    @property
    def _must_look(self) -> bool:
        return self.closing == "unless_present" and self.end_of_text is not None and self.end_of_text <= self.split.max_token_id

    def _ranges(self) -> Iterator[tuple[StreamRange, UInt32s]]:
        for part in bounded_ranges(self.split, self.start, self.stop):
            yield part, self.split.slice(part.start, part.stop) >> np.uint32(1)


def insert(tokens: AnyArray, at: Int64s, token: int, dtype: DType) -> AnyArray:
    """*tokens* in another type, with *token* inserted at the positions *at* (int64[n]) of the result."""
    out = np.full(len(tokens) + len(at), token, dtype)
    keep = np.ones(len(out), np.bool_)
    keep[at] = False
    out[keep] = tokens
    return out
