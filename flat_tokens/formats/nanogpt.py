"""The nanoGPT family: files of tokens, with an end-of-text token between documents.

=============  ======================================  =========  ====================  =====================
format         files                                   token      header                end-of-text stands
=============  ======================================  =========  ====================  =====================
nanogpt        ``train.bin``, ``val.bin``              uint16     none                  after each document
build-nanogpt  ``edufineweb_{val,train}_000000.npy``   uint16     numpy's               before each document
jaxformer      ``{test,train}_0000.npy``               uint32     numpy's               before each document
llm.c          ``{name}_{val,train}_000000.bin``       uint16     256 int32             before each document
llm.c-llama-3  the same                                uint32     256 int32             before each document
=============  ======================================  =========  ====================  =====================

Those in shards cut documents wherever a shard is full. build-nanogpt and both of llm.c number validation and train in one
sequence, shard 0 being validation; Jaxformer begins with 0 in each.
"""

from __future__ import annotations

import bisect
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, DType, Int64s, UInt32s
from flat_tokens.batch import TokenBatch
from flat_tokens.formats import contract
from flat_tokens.formats.contract import (
    BATCH_TOKENS,
    ExportFile,
    Files,
    FileTokens,
    Format,
    Readable,
    Splits,
    StoredItems,
    insert,
    split_of,
)
from flat_tokens.manifest import SplitName
from flat_tokens.rows.split import FlatTokens, ahead, checked_stop
from flat_tokens.stores.store import Store, StoredObject

Place = Literal["before", "after"]

LLMC_INTEGERS = 256
LLMC_BEGINNINGS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
"""Magic number and version for each type of tokens."""
NPY_MAGIC = b"\x93NUMPY"
NPY_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Stream(contract.Options):
    """How the family's files are written and read.

    ``end_of_text``: is before or after every document, as the format has it. On the way in it is removed, and the
    documents are rebuilt from it; None makes one sequence of the whole split. On the way out None is for splits of one
    sequence. ``inner_end_of_text``: what is done with a sequence that holds that token itself, and so would come back as
    several: ``refuse`` it, when it is met, or ``keep`` it as it is.
    """

    end_of_text: int | None = None
    inner_end_of_text: Literal["refuse", "keep"] = "refuse"


@dataclass(frozen=True)
class Shards(Stream):
    """``tokens_per_shard``: in every shard of a split but the last one."""

    tokens_per_shard: int = 100_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_shard > 2**31 - 1:
            raise ValueError(f"tokens_per_shard is {self.tokens_per_shard}, but headers count tokens up to 2**31 - 1")


@dataclass(frozen=True)
class NamedShards(Shards):
    """``name``: what the files' names begin with."""

    name: str = "edufineweb"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name or "/" in self.name or self.name.startswith(".") or split_of(self.name) != "train":
            raise ValueError(f"name is {self.name!r}, but it begins a file's name, and does not itself name a split")


class Kind(NamedTuple):
    """The properties in which the formats of the family differ."""

    name: str
    dtype: DType
    place: Place
    header: Callable[[int, DType], bytes]
    """Of a file of this many tokens."""
    parse: Callable[[Store, str], StoredItems]
    """The tokens of a file. ValueError, naming it, if it is not of the kind."""
    ending: str

    @property
    def largest_id(self) -> int:
        return min(int(np.iinfo(self.dtype).max), 2**31 - 1)


def npy_header(count: int, dtype: DType) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return buffer.getvalue()


def llmc_header(count: int, dtype: DType) -> bytes:
    header = np.zeros(LLMC_INTEGERS, "<i4")
    header[:3] = *LLMC_BEGINNINGS[dtype.name], count
    return header.tobytes()


def npy_tokens(store: Store, key: str) -> StoredItems:
    """The items of a one-dimensional ``.npy`` file. ValueError, naming it, if it is none or not complete.

    The header is a Python literal. It is matched, not evaluated: numpy's own parser fails on strange ones in too many
    ways.
    """
    first = store.read_range(key, 0, min(store.size(key), NPY_HEADER_BYTES))
    if not first.startswith(NPY_MAGIC) or len(first) < 12 or first[6] not in (1, 2, 3):
        raise ValueError(f"{store.path(key)}: is not a .npy file")
    begin = 10 if first[6] == 1 else 12
    offset = begin + int.from_bytes(first[8:begin], "little")
    header = first[begin:offset]
    descr, shape = re.search(rb"'descr' *: *'([<>]u[24])'", header), re.search(rb"'shape' *: *\( *(\d{1,18}) *, *\)", header)
    if descr is None or shape is None:
        raise ValueError(
            f"{store.path(key)}: its header is {header[:200]!r}, but tokens are in one dimension of uint16 or uint32"
        )
    return _whole(StoredItems(store, key, np.dtype(descr[1].decode()), offset, int(shape[1])))


def llmc_tokens(store: Store, key: str) -> StoredItems:
    """The tokens of an llm.c ``.bin`` file. ValueError, naming it, if it is none or not complete."""
    header = np.frombuffer(store.read_range(key, 0, 4 * LLMC_INTEGERS).ljust(12, b"\0")[:12], "<i4")
    magic, version, count = header.tolist()
    dtypes = [dtype for dtype, beginning in LLMC_BEGINNINGS.items() if beginning == (magic, version)]
    if not dtypes or count < 0:
        known = " or ".join(f"{known[0]}, {known[1]} ({dtype})" for dtype, known in LLMC_BEGINNINGS.items())
        raise ValueError(
            f"{store.path(key)}: begins with {magic}, {version}, {count}, but a .bin file of llm.c with {known} and the number "
            "of tokens"
        )
    return _whole(StoredItems(store, key, np.dtype(dtypes[0]).newbyteorder("<"), 4 * LLMC_INTEGERS, count))


def plain_tokens(store: Store, key: str) -> StoredItems:
    """The tokens of a file that holds nothing else. ValueError, naming it, if its size is not a multiple of theirs."""
    size = store.size(key)
    if size % 2:
        raise ValueError(f"{store.path(key)}: has {size} bytes, but tokens of two bytes each. It is truncated or no such file.")
    return StoredItems(store, key, np.dtype("<u2"), 0, size // 2)


def _whole(tokens: StoredItems) -> StoredItems:
    size, expected = tokens.store.size(tokens.key), tokens.offset + tokens.length * tokens.dtype.itemsize
    if size != expected:
        raise ValueError(f"{tokens.path}: has {size} bytes, but its header says {expected}. Fetch or write it again.")
    return tokens


# In the files a split is one stream of tokens, in which every sequence takes one place more than it has tokens.


def stream_length(split: FlatTokens, options: Stream) -> int:
    return split.token_count + (split.seq_count if options.end_of_text is not None else 0)


def check_bounds(split: FlatTokens, options: Stream, what: str) -> None:
    """ValueError if the split's sequences would run into each other."""
    if options.end_of_text is None and split.seq_count and (split.seq_count > 1 or not split.token_count):
        raise ValueError(
            f"{split.store.url}: has {split.seq_count} sequences, and {what} no bounds between them. "
            "Set end_of_text to the tokenizer's end-of-text token (50256 for gpt2)."
        )


STREAM_NAMES: dict[SplitName, str] = {"train": "train", "validation": "val", "test": "test"}


def plan(splits: Splits, options: Stream, kind: Kind) -> list[ExportFile]:
    """The files of each split. ValueError if the format cannot hold its ids, or the bounds of its sequences."""
    contract.check_token_id("end_of_text", options.end_of_text, kind.largest_id)
    for split in splits.values():
        if split.token_count and split.max_token_id > kind.largest_id:
            what = f"{kind.name}'s {kind.dtype.name} holds ids up to {kind.largest_id}"
            raise ValueError(f"{split.store.url}: max_token_id is {split.max_token_id}, but {what}")
        check_bounds(split, options, f"{kind.name} keeps")
    lengths = {name: stream_length(split, options) for name, split in splits.items() if split.seq_count}
    if not isinstance(options, Shards):
        return [ExportFile(f"{STREAM_NAMES[name]}.bin", name, 0, length) for name, length in lengths.items()]
    named, size = isinstance(options, NamedShards), options.tokens_per_shard
    prefix, digits = (f"{options.name}_", 6) if isinstance(options, NamedShards) else ("", 4)
    names: dict[SplitName, str] = {"validation": "val" if named else "test", "train": "train"}
    if "test" in lengths:
        if not named:
            raise ValueError(
                f"{kind.name} calls validation 'test', and has no place for a test split. Export train or validation."
            )
        names["test"] = "test"
    files: list[ExportFile] = []
    for name, word in names.items():
        # The numbers of named shards go on from validation to train, whose first is 1 if there is no validation.
        first, length = max(len(files), 1) if named and name == "train" else 0, lengths.get(name, 0)
        for i, start in enumerate(range(0, length, size), first):
            key = f"{prefix}{word}_{i:0{digits}d}{kind.ending}"
            files.append(ExportFile(key, name, start, min(start + size, length)))
    return files


def write(splits: Splits, file: ExportFile, store: Store, options: Stream, kind: Kind) -> list[StoredObject]:
    with store.create(file.key) as writer:
        writer.write(kind.header(file.stop - file.start, kind.dtype))
        for tokens in ahead(stream(splits[file.split], file.start, file.stop, options, kind.place, kind.dtype)):
            writer.write(tokens)
    return [writer.stored]


def stream(split: FlatTokens, start: int, stop: int, options: Stream, place: Place, dtype: DType) -> Iterator[AnyArray]:
    """Tokens ``start:stop`` of the stream, in arrays of some megabytes."""
    end_of_text = options.end_of_text
    if end_of_text is None:
        for at in range(start, stop, BATCH_TOKENS):
            yield (split.slice(at, min(at + BATCH_TOKENS, stop)) >> np.uint32(1)).astype(dtype)
        return
    must_look = options.inner_end_of_text == "refuse" and end_of_text <= split.max_token_id
    # Sequence i is tokens ``seq_starts[i] + i`` to ``seq_starts[i + 1] + i + 1`` of the stream.
    first = bisect.bisect_right(range(split.seq_count), start, key=lambda i: contract.entry(split, i) + i) - 1
    at = contract.entry(split, first) + first
    for part in contract.bounded_ranges(split, first, split.seq_count):
        marks = part.starts if place == "before" else part.ends
        begin, at = at, at + part.stop - part.start + len(marks)
        if begin >= stop:
            return
        if at <= start:
            continue
        places = (marks - np.uint64(part.start)).astype(np.int64) + np.arange(len(marks))
        low, high = max(start - begin, 0), min(stop, at) - begin
        passed, last = np.searchsorted(places, [low, high]).tolist()
        # stream -> array: less the end-of-text tokens before; none is read for another file
        base = part.start + low - passed
        tokens = split.slice(base, part.start + high - last) >> np.uint32(1)
        if must_look and (found := np.flatnonzero(tokens == end_of_text)).size:
            raise ValueError(
                f"{split.store.url}: token {base + found[0]} is end_of_text ({end_of_text}) inside a sequence, which would come "
                "back as two. Set inner_end_of_text='keep' to write it all the same."
            )
        yield insert(tokens, places[passed:last] - low, end_of_text, dtype)


@dataclass(frozen=True)
class StreamReader:
    """The files of a split, one stream of tokens, as a `Readable`.

    The starts of documents are found in one pass over the files when they are needed; ``batches`` of all needs none.
    """

    files: tuple[FileTokens, ...]
    end_of_text: int | None
    place: Place

    @property
    def path(self) -> str:
        return self.files[0].path if self.files else "no files"

    @property
    def stored_count(self) -> int:
        return sum(file.length for file in self.files)

    @property
    def token_count(self) -> int:
        return self.stored_count if self.end_of_text is None else self.stored_count - len(self._marks)

    @property
    def seq_count(self) -> int:
        return len(self._bounds) - 1

    def sequence(self, i: int) -> UInt32s:
        i = contract.checked_index(i, self.seq_count, self.path)
        start, stop = (int(bound) for bound in self._bounds[i : i + 2])
        tokens = np.concatenate([np.empty(0, np.uint32), *self._tokens(start, stop, BATCH_TOKENS)])
        return tokens[tokens != self.end_of_text] if self.end_of_text is not None else tokens

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        begin, end = 0, self.stored_count
        if (start, stop) != (0, None):
            stop = checked_stop(start, stop, self.seq_count, self.path)
            begin, end = int(self._bounds[start]), int(self._bounds[stop])
        # The end-of-text tokens of the stream become starts of sequences.
        begun = False  # a sequence continues in the next block
        held = False  # a mark ended a block: its sequence begins with the next block's first token
        for tokens in self._tokens(begin, end, max_tokens):
            marks = np.flatnonzero(tokens == self.end_of_text) if self.end_of_text is not None else np.empty(0, np.int64)
            kept = np.delete(tokens, marks)
            starts = marks - np.arange(len(marks))  # of the sequences after the marks, among the tokens that are kept
            ends_with_mark = bool(len(marks)) and marks[-1] == len(tokens) - 1
            if held or not (begun or (self.place == "before" and len(marks) and marks[0] == 0)):
                starts = np.append(0, starts)
            if ends_with_mark:
                starts = starts[:-1]  # there may be nothing after the last one
            held = ends_with_mark and self.place == "before"
            begun = not (ends_with_mark and self.place == "after")
            yield TokenBatch.from_flat(kept, np.append(starts, len(kept)).astype(np.uint64))
        if held:
            yield TokenBatch.from_flat(np.empty(0, np.uint32), np.zeros(2, np.uint64))

    def _tokens(self, start: int, stop: int, max_tokens: int) -> Iterator[UInt32s]:
        """Tokens ``start:stop`` of the stream, none of the arrays empty."""
        first = 0
        for file in self.files:
            low, high = max(start - first, 0), min(stop - first, file.length)
            for at in range(low, high, max_tokens):
                yield file.tokens(at, min(at + max_tokens, high))
            first += file.length

    @cached_property
    def _marks(self) -> Int64s:
        """Positions of the end-of-text tokens in the stream."""
        found, at = [np.empty(0, np.int64)], 0
        for tokens in self._tokens(0, self.stored_count, BATCH_TOKENS):
            found.append(np.flatnonzero(tokens == self.end_of_text) + at)
            at += len(tokens)
        return np.concatenate(found)

    @cached_property
    def _bounds(self) -> Int64s:
        """Starts of the sequences in the stream, with their end-of-text tokens, then the end of the last one."""
        count = self.stored_count
        if self.end_of_text is None:
            return np.array([0, count] if count else [0])
        inner = self._marks if self.place == "before" else self._marks + 1
        # Tokens before the first mark, or after the last one, are a sequence that has none.
        ends = np.concatenate([[0], inner, [count]]) if count else np.zeros(1, np.int64)
        return np.unique(ends)


def open_streams(files: Files, options: Stream, kind: Kind) -> Mapping[SplitName, Readable]:
    found: dict[SplitName, list[StoredItems]] = {}
    of_test = contract.has_test(files)
    for key in contract.members(files, partial(has_kind, kind=kind), kind.ending):
        tokens = kind.parse(files.store, key)
        if tokens.dtype.itemsize != kind.dtype.itemsize:
            raise ValueError(f"{tokens.path}: has tokens of {tokens.dtype.name}, but {kind.name} has {kind.dtype.name}")
        found.setdefault(split_of(key, of_test), []).append(tokens)
    return {split: StreamReader(tuple(those), options.end_of_text, kind.place) for split, those in found.items()}


def has_kind(store: Store, key: str, kind: Kind) -> bool:
    """Whether a file begins like one of the kind, and is whole."""
    try:
        return kind.parse(store, key).dtype.itemsize == kind.dtype.itemsize
    except ValueError:
        return False


def _format(kind: Kind, options: type[Stream], summary: str, recognised: bool = True) -> Format:
    return Format(
        name=kind.name,
        summary=summary,
        keeps=f"sequences, empty ones too, by the end-of-text token; ids up to {kind.largest_id}",
        loses="the bounds of sequences where the end-of-text token is not named on the way in, or is inside sequences",
        options=options,
        recognise=lambda files: recognised and any(has_kind(files.store, key, kind) for key in files.keys),
        open=lambda files, chosen: open_streams(files, chosen, kind),
        plan=lambda splits, chosen: plan(splits, chosen, kind),
        write=lambda splits, file, store, chosen: write(splits, file, store, chosen, kind),
    )


_U2, _U4 = np.dtype("<u2"), np.dtype("<u4")
NANOGPT = _format(
    Kind("nanogpt", _U2, "after", lambda count, dtype: b"", plain_tokens, ".bin"),
    Stream,
    "nanoGPT's train.bin and val.bin, which have to be named: they have no header",
    recognised=False,
)
BUILD_NANOGPT = _format(
    Kind("build-nanogpt", _U2, "before", npy_header, npy_tokens, ".npy"), NamedShards, "build-nanogpt's .npy shards of uint16"
)
JAXFORMER = _format(Kind("jaxformer", _U4, "before", npy_header, npy_tokens, ".npy"), Shards, "Jaxformer's .npy shards of uint32")
LLMC = _format(Kind("llm.c", _U2, "before", llmc_header, llmc_tokens, ".bin"), NamedShards, "llm.c's .bin shards of uint16")
LLMC_LLAMA = _format(
    Kind("llm.c-llama-3", _U4, "before", llmc_header, llmc_tokens, ".bin"),
    NamedShards,
    "llm.c's .bin shards of uint32, as for Llama 3",
)
