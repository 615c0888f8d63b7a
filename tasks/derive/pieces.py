"""Parts of input datasets: cutting inputs, counting the documents that are taken, and lists of documents."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Int64s, IntPair, UInt64s
from flat_tokens.batch import TokenBatch
from flat_tokens.formats.contract import bounded_batches, sequence_ranges
from flat_tokens.keys import keys_of_bytes, token_keys
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store, file_at
from tasks.derive.inputs import Input
from tasks.models import ALL_SPLITS, Split
from tasks.output.target import Target
from tasks.parts.input import choose, input_documents, open_input, sample_hashes, sources_of
from tasks.parts.part import InputPart
from tasks.progress import meter
from tasks.rows import OF_VERSION

PART_TOKENS = 1 << 25
"""Tokens of a part, unless one document has more: a shuffle holds a part in memory for each worker."""
PART_DOCUMENTS = 1 << 20
DOCUMENT_BYTES = 8 * len(("start", *OF_VERSION))
RADIX_BITS = 16
HEXADECIMAL = re.compile(rb"(0x)?[0-9a-fA-F]{16}")


class Counted(NamedTuple):
    """Counts of what is taken of a part. ``sources``: documents and tokens of each source of its input."""

    seq_count: int
    token_count: int
    sources: tuple[IntPair, ...]
    skipped: dict[str, int]


def cut(inputs: Sequence[Input], wanted: Sequence[str] | None) -> list[InputPart]:
    """The parts of all inputs, in order, split by split. *wanted*: names of the sources that a filter lets through."""
    parts: list[InputPart] = []
    for split in ALL_SPLITS:
        file, source, before = 0, 0, len(parts)
        for index, one in enumerate(inputs):
            stops = np.cumsum([len(source["files"]) for source in one.sources]).tolist()
            through = None if wanted is None else tuple(i for i, source in enumerate(one.sources) if source["name"] in wanted)
            is_there = split in one.seq_counts
            ranges = sequence_ranges(open_split(Store.at(one.location) / split), PART_TOKENS) if is_there else ()
            for start, stop in ((start, end) for begin, end in ranges for start in range(begin, end, PART_DOCUMENTS)):
                parts.append(
                    InputPart(
                        location=one.location,
                        foreign=one.manifest_sha256 is None,
                        split=split,
                        number=len(parts) - before,
                        start=start,
                        stop=min(start + PART_DOCUMENTS, stop),
                        file=file,
                        source=source,
                        source_stops=tuple(stops),
                        wanted=through,
                        made_keys=None if one.has_documents else f"keys/{index}-{split}-{start}.npy",
                    )
                )
            file += stops[-1]
            source += len(stops)
    return parts


def make_keys(part: InputPart, target: Target) -> InputPart:
    """Make the keys of a part from its documents' tokens, where its input has none. Return the part."""

    def counted() -> Iterator[TokenBatch]:
        for batch in bounded_batches(open_input(part), part.start, part.stop):
            yield batch
            meter.add("count", batch.encoded_tokens.nbytes)

    if part.made_keys is not None:
        path = Path(target.workspace.staging) / part.made_keys
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.concatenate([*token_keys(counted()), np.empty(0, np.uint64)]))
    return part


def count_hashes(part: InputPart, target: Target, prefix: dict[Split, int], digits: int) -> Int64s:
    """How many documents have each value in the next 16 bits of their hash: int64[65536]. Counted are those that would be taken
    without a sample and whose hash begins with *prefix*, which has *digits* groups of 16 bits.
    """
    documents = input_documents(part, target)
    meter.add("count", DOCUMENT_BYTES * len(documents))
    keep, _ = choose(part, documents, target.selection.model_copy(update={"below": None}), target)
    hashes = sample_hashes(documents.keys[keep], target.selection.seed)
    if digits:
        hashes = hashes[hashes >> np.uint64(64 - RADIX_BITS * digits) == np.uint64(prefix[part.split])]
    values = (hashes >> np.uint64(64 - RADIX_BITS * (digits + 1))) & np.uint64((1 << RADIX_BITS) - 1)
    return np.bincount(values.astype(np.int64), minlength=1 << RADIX_BITS)


def count_taken(part: InputPart, target: Target) -> Counted:
    """Count the documents and tokens that are taken of a part."""
    documents = input_documents(part, target)
    meter.add("count", DOCUMENT_BYTES * len(documents), len(documents))
    keep, skipped = choose(part, documents, target.selection, target)
    lengths, of_source = documents.lengths[keep], sources_of(part, documents)[keep]
    counts = np.bincount(of_source, minlength=len(part.source_stops))
    tokens = np.bincount(of_source, lengths, minlength=len(part.source_stops))  # float64, which is exact up to 2**53
    return Counted(
        int(keep.sum()),
        int(lengths.sum()),
        tuple(zip(counts.tolist(), map(int, tokens), strict=True)),
        {reason: count for reason, count in skipped.items() if count},
    )


def positioned(counted: Sequence[tuple[InputPart, Counted]], split: Split) -> list[InputPart]:
    """The parts of a split with their counts and positions."""
    parts, seqs, tokens = list[InputPart](), 0, 0
    for part, count in counted:
        if part.split == split:
            counts = {"seq_count": count.seq_count, "token_count": count.token_count}
            parts.append(part.model_copy(update={**counts, "first_seq": seqs, "first_token": tokens}))
            seqs, tokens = seqs + count.seq_count, tokens + count.token_count
    return parts


class Listed(NamedTuple):
    """The documents of a list: their sorted keys, each once: uint64[n]."""

    keys: UInt64s

    def facts(self) -> dict[str, object]:
        """The record of the list in a manifest."""
        return {"count": len(self.keys), "sha256": hashlib.sha256(self.keys.astype("<u8").tobytes()).hexdigest()}

    def save(self, path: Path) -> None:
        """Save the keys for the tasks, and next to them a file that notes which ones were found: a byte for each."""
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
    return Listed(np.unique(keys_of_bytes(_ids_in(path_or_url))))


def ids_with(keys: UInt64s, path_or_url: str) -> list[str]:
    """The ids in a text file that have one of the *keys*."""
    ids = _ids_in(path_or_url)
    return [ids[i].decode(errors="replace") for i in np.flatnonzero(np.isin(keys_of_bytes(ids), keys)).tolist()]


def _ids_in(path_or_url: str) -> list[bytes]:
    store, name = file_at(path_or_url)
    return [line for line in (line.removesuffix(b"\r") for line in store.read(name).split(b"\n")) if line]
