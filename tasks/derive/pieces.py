"""Pieces of datasets: cutting inputs, the facts of their documents, choosing and counting documents, and lists of them."""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from flat_tokens.arrays.opening import open_array
from flat_tokens.arrays.stored import StoredArray
from flat_tokens.batch import TokenBatch
from flat_tokens.columns import Kinds, batch_of, with_kinds
from flat_tokens.formats.contract import bounded_batches, checked_entries, sequence_ranges
from flat_tokens.keys import document_keys, mix, token_keys
from flat_tokens.manifest import SPLITS
from flat_tokens.reader import FlatTokens, open_split
from flat_tokens.rows.facts import Recorded, matching, recorded_of
from flat_tokens.rows.shuffle import derive_keys
from flat_tokens.rows.views import Int64s
from flat_tokens.stores.store import Store, file_at
from flat_tokens.where import parse
from tasks.derive.inputs import Input
from tasks.models import Model, Split
from tasks.output.paths import DOCUMENTS
from tasks.output.staging import Place
from tasks.progress import meter
from tasks.shards.runs import Reads, read_runs
from tasks.split.spans import Placed
from tasks.split.write import DOCUMENT_ARRAYS

PIECE_TOKENS = 1 << 25
"""Tokens of a piece, unless one document has more: a shuffle holds a piece in memory for each worker."""
PIECE_DOCUMENTS = 1 << 20
DOCUMENT_BYTES = 8 * len(("start", *DOCUMENT_ARRAYS))
BLOCK_TOKENS = 1 << 18

SAMPLING = 0x5A3B1E
"""Samples and validation are drawn with different keys, or a sample of the same seed would begin with validation's documents."""
RADIX_BITS = 16
HEXADECIMAL = re.compile(rb"(0x)?[0-9a-fA-F]{16}")


class Piece(Placed):
    """Sequences ``start:stop`` of one split of an input. Those that are taken get a place in the output's split of that name."""

    location: str = Field(description="The input's")
    foreign: bool = Field(description="Written by somebody else: read as its writer cut it, and kept by caches")
    split: Split
    number: int = Field(description="Among the pieces of its split")
    start: int
    stop: int
    file: int = Field(description="The number that the input's first file has")
    source: int = Field(description="The number that the input's first source has")
    source_stops: tuple[int, ...] = Field(description="Where each source's files end, as the input counts them")
    wanted: tuple[int, ...] | None = Field(description="The sources that a filter lets through, by their index in the input")
    made_keys: str | None = Field(description="Below the staging: keys made of tokens, where the input has none")
    ties: int = 0

    @property
    def label(self) -> str:
        return f"{self.location.rpartition('/')[2]} {self.split} {self.start:,} to {self.stop:,}"


class Selection(Model):
    """The documents that are taken; filters by source are in the pieces. ``below``: for each split, documents whose hash is
    below this are in the sample; of those with this hash, each piece takes its first ``ties``.
    """

    splits: tuple[Split, ...] = SPLITS
    dropped: Split | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    where: str | None = None
    listed: str | None = Field(None, description="Below the staging: keys in order, and what has been found of them beside")
    seed: int = 0
    below: dict[Split, int] | None = None


ALL = Selection()


class Facts(NamedTuple):
    """Facts of each sequence of a piece: its start (with the end of the last one), key, file by the input's numbers, and row."""

    starts: npt.NDArray[np.uint64]
    key: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]

    @property
    def lengths(self) -> npt.NDArray[np.uint64]:
        return np.diff(self.starts)


class Counted(NamedTuple):
    """Counts of what is taken of a piece. ``sources``: documents and tokens of each source of its input."""

    seq_count: int
    token_count: int
    sources: tuple[tuple[int, int], ...]
    skipped: dict[str, int]


def cut(inputs: Sequence[Input], wanted: Sequence[str] | None) -> list[Piece]:
    """The pieces of all inputs, in order, split by split. *wanted*: names of the sources that a filter lets through."""
    pieces: list[Piece] = []
    for split in SPLITS:
        file, source, before = 0, 0, len(pieces)
        for index, one in enumerate(inputs):
            stops = np.cumsum([len(source["files"]) for source in one.sources]).tolist()
            through = None if wanted is None else tuple(i for i, source in enumerate(one.sources) if source["name"] in wanted)
            ranges = sequence_ranges(open_split(Store.at(one.location) / split), PIECE_TOKENS)
            for start, stop in ((start, end) for begin, end in ranges for start in range(begin, end, PIECE_DOCUMENTS)):
                pieces.append(
                    Piece(
                        location=one.location,
                        foreign=one.manifest_sha256 is None,
                        split=split,
                        number=len(pieces) - before,
                        start=start,
                        stop=min(start + PIECE_DOCUMENTS, stop),
                        file=file,
                        source=source,
                        source_stops=tuple(stops),
                        wanted=through,
                        made_keys=None if one.has_documents else f"keys/{index}-{split}-{start}.npy",
                    )
                )
            file += stops[-1]
            source += len(stops)
    return pieces


def open_piece(piece: Piece) -> FlatTokens:
    """The split of a piece. One of ours is read past the page cache."""
    return open_split(Store.at(piece.location, read_once=not piece.foreign) / piece.split)


def make_keys(piece: Piece, place: Place) -> Piece:
    """Make the keys of a piece from its documents' tokens, where its input has none. Return the piece."""

    def counted() -> Iterator[TokenBatch]:
        for batch in bounded_batches(open_piece(piece), piece.start, piece.stop):
            yield batch
            meter.add("count", batch.encoded_tokens.nbytes)

    if piece.made_keys is not None:
        path = Path(place.staging) / piece.made_keys
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.concatenate([*token_keys(counted()), np.empty(0, np.uint64)]))
    return piece


def facts_of(piece: Piece, source: FlatTokens, place: Place) -> Facts:
    starts = checked_entries(source, piece.start, piece.stop)
    if piece.made_keys is not None:
        rows = np.arange(piece.start, piece.stop, dtype=np.uint64)
        number = np.full(len(rows), SPLITS.index(piece.split), np.uint64)
        return Facts(starts, np.load(Path(place.staging) / piece.made_keys), number, rows)
    documents = Store.at(piece.location) / f"{DOCUMENTS}/{piece.split}"
    arrays = (open_array(documents / name, "uint64") for name in DOCUMENT_ARRAYS)
    facts = Facts(starts, *(array.read(piece.start, piece.stop) for array in arrays))
    if len(facts.file) and (largest := int(facts.file.max())) >= piece.source_stops[-1]:
        raise ValueError(
            f"{documents.url}/file: names file {largest}, but the manifest lists {piece.source_stops[-1]}. The dataset is "
            "damaged: run flat_tokens.verify on it."
        )
    return facts


def choose(piece: Piece, facts: Facts, selection: Selection, place: Place) -> tuple[npt.NDArray[np.bool_], Counter[str]]:
    """Documents of a piece that are taken, bool[n], and counts of the others by the first reason against them."""
    keep = np.ones(len(facts.key), bool)
    skipped: Counter[str] = Counter()

    def without(reason: str, let_through: npt.NDArray[np.bool_]) -> None:
        nonlocal keep
        before, keep = int(keep.sum()), keep & let_through
        skipped[reason] += before - int(keep.sum())

    if piece.split == selection.dropped:
        without("split", np.zeros(len(keep), bool))
    if piece.split not in selection.splits:
        return keep, skipped
    if piece.wanted is not None:
        without("source", np.isin(sources_of(piece, facts), piece.wanted))
    if selection.min_tokens is not None:
        without("too_short", facts.lengths >= np.uint64(selection.min_tokens))
    if selection.max_tokens is not None:
        without("too_long", facts.lengths <= np.uint64(selection.max_tokens))
    if selection.where is not None:
        tokens, recorded = open_split(Store.at(piece.location) / piece.split), functools.partial(_recorded_at, piece.location)
        without("where", matching(tokens, parse(selection.where), piece.start, piece.stop, recorded))
    if selection.listed is not None:
        without("not_listed", _listed(facts.key, Path(place.staging) / selection.listed))
    if selection.below is not None:
        hashes, below = sample_hashes(facts.key, selection.seed), selection.below[piece.split]
        if below < 1 << 64:
            tied = np.flatnonzero(keep & (hashes == np.uint64(below)))[: piece.ties]
            drawn = hashes < np.uint64(below)
            drawn[tied] = True
            without("not_sampled", drawn)
    return keep, skipped


@functools.lru_cache(4)
def _recorded_at(location: str) -> Recorded:
    """The facts of an input's documents that its manifest has. They do not change."""
    return recorded_of(Store.at(location))


def sources_of(piece: Piece, facts: Facts) -> Int64s:
    """The source of each sequence, by its index in the input: int64[n]."""
    return np.searchsorted(np.array(piece.source_stops, np.uint64), facts.file, side="right")


def _listed(keys: npt.NDArray[np.uint64], path: Path) -> npt.NDArray[np.bool_]:
    """Whether each key is in a saved list. Those that were found are noted beside the list."""
    listed = np.load(path, mmap_mode="r")
    if not len(listed):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(listed, keys), len(listed) - 1)
    found = cast("npt.NDArray[np.bool_]", listed[at] == keys)
    # Threads write the same byte: that it was found.
    np.memmap(path.with_suffix(".found"), np.uint8, "r+")[at[found]] = 1
    return found


def sample_hashes(keys: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Hashes that decide whether documents are in a sample: uint64[n]. Different keys have different hashes."""
    return mix(keys ^ derive_keys(seed, SAMPLING))


def count_hashes(piece: Piece, selection: Selection, place: Place, prefix: dict[Split, int], digits: int) -> Int64s:
    """How many documents have each value in the next 16 bits of their hash: int64[65536]. Counted are those that would be taken
    without a sample and whose hash begins with *prefix*, which has *digits* groups of 16 bits.
    """
    facts = facts_of(piece, open_piece(piece), place)
    meter.add("count", DOCUMENT_BYTES * len(facts.key))
    keep, _ = choose(piece, facts, selection.model_copy(update={"below": None}), place)
    hashes = sample_hashes(facts.key[keep], selection.seed)
    if digits:
        hashes = hashes[hashes >> np.uint64(64 - RADIX_BITS * digits) == np.uint64(prefix[piece.split])]
    values = (hashes >> np.uint64(64 - RADIX_BITS * (digits + 1))) & np.uint64((1 << RADIX_BITS) - 1)
    return np.bincount(values.astype(np.int64), minlength=1 << RADIX_BITS)


def count_piece(piece: Piece, selection: Selection, place: Place) -> Counted:
    """Count the documents and tokens that are taken of a piece."""
    facts = facts_of(piece, open_piece(piece), place)
    meter.add("count", DOCUMENT_BYTES * len(facts.key), len(facts.key))
    keep, skipped = choose(piece, facts, selection, place)
    lengths, of_source = facts.lengths[keep], sources_of(piece, facts)[keep]
    documents = np.bincount(of_source, minlength=len(piece.source_stops))
    tokens = np.bincount(of_source, lengths, minlength=len(piece.source_stops))  # float64, which is exact up to 2**53
    return Counted(
        int(keep.sum()),
        int(lengths.sum()),
        tuple(zip(documents.tolist(), map(int, tokens), strict=True)),
        {reason: count for reason, count in skipped.items() if count},
    )


class Taken(NamedTuple):
    """Documents taken of a piece: where each begins in the input, its length, key, file (by the output's numbers) and row.
    ``numbers``: of each in its split of the input, or in what stands for it: int64[n].
    """

    begins: Int64s
    lengths: Int64s
    key: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    row: npt.NDArray[np.uint64]
    numbers: Int64s


def taken_of(piece: Piece, selection: Selection, source: FlatTokens, place: Place) -> Taken:
    facts = facts_of(piece, source, place)
    keep, _ = choose(piece, facts, selection, place)
    lengths = facts.lengths[keep].astype(np.int64)
    begins = facts.starts[:-1][keep].astype(np.int64)
    files, numbers = facts.file[keep] + np.uint64(piece.file), np.flatnonzero(keep) + piece.start
    return Taken(begins, lengths, facts.key[keep], files, facts.row[keep], numbers)


def columns_of(piece: Piece, numbers: Int64s, kinds: Kinds) -> pa.RecordBatch:
    """The kept columns of documents *numbers*, int64[n], of the input's split, as *kinds*; null where it does not keep one."""
    kept = _recorded_at(piece.location).columns[piece.split]
    names = [name for name in kinds if name in kept.kinds]
    if not names:
        return with_kinds(batch_of({name: pa.nulls(len(numbers)) for name in kinds}), kinds)
    return with_kinds(kept.take(numbers, names), kinds)


def read_documents(source: StoredArray, begins: Int64s, lengths: Int64s) -> Iterator[npt.NDArray[Any]]:
    """The items of many documents, in order, of an array with one a token. The documents must not overlap. A part is valid
    until the next one is asked for.
    """
    some = lengths > 0
    if not some.any():
        return iter(())
    begins, ends = begins[some], (begins + lengths)[some]
    apart = begins[1:] > ends[:-1]  # those that touch are one run
    return read_runs(source, begins[np.append(True, apart)], ends[np.append(apart, True)], Reads(BLOCK_TOKENS, None, whole=True))


class Listed(NamedTuple):
    """The documents of a list: their sorted keys, each once: uint64[n]."""

    keys: npt.NDArray[np.uint64]

    def facts(self) -> dict[str, object]:
        """The record of the list in a manifest."""
        return {"count": len(self.keys), "sha256": hashlib.sha256(self.keys.astype("<u8").tobytes()).hexdigest()}

    def save(self, path: Path) -> None:
        """Save the keys for the tasks, and beside them a file that notes which ones were found: a byte for each."""
        np.save(path, self.keys)
        path.with_suffix(".found").write_bytes(bytes(len(self.keys)))

    def count_unfound(self, path: Path) -> int:
        """How many of the keys, saved at *path*, no task has found a document of."""
        return len(self.keys) - int(np.fromfile(path.with_suffix(".found"), np.uint8).sum())


def read_keys(path_or_url: str) -> Listed:
    """Keys from a file: uint64 in an ``.npy``, or 16 hexadecimal digits a line. ValueError, naming the line, otherwise."""
    store, name = file_at(path_or_url)
    data = store.read(name)
    if data.startswith(b"\x93NUMPY"):
        keys = np.load(io.BytesIO(data), allow_pickle=False)
        if keys.ndim != 1 or keys.dtype != np.uint64:
            raise ValueError(f"{path_or_url}: holds {keys.dtype} of shape {keys.shape}, but keys are uint64 in one dimension")
        return Listed(np.unique(keys))
    lines = data.split()
    for number, line in enumerate(lines, 1):
        if not HEXADECIMAL.fullmatch(line):
            raise ValueError(
                f"{path_or_url}: item {number} is {line[:40].decode(errors='replace')!r}, but a key is 16 hexadecimal digits, as "
                "flat-tokens trace shows it. For ids, use --ids."
            )
    together = b"".join(line[-16:] for line in lines)
    return Listed(np.unique(np.frombuffer(bytes.fromhex(together.decode()), ">u8").astype(np.uint64)))


def read_ids(path_or_url: str) -> Listed:
    """The keys of the ids in a text file, one a line. Empty lines are skipped."""
    store, name = file_at(path_or_url)
    ids = [line for line in (line.removesuffix(b"\r") for line in store.read(name).split(b"\n")) if line]
    offsets = np.cumsum([0, *map(len, ids)])
    return Listed(np.unique(document_keys(np.frombuffer(b"".join(ids), np.uint8), offsets)))
