"""datatrove's tokenized files: tokens in a ``.ds``, each document's end in tokens (u64) in a ``.ds.index``.

Neither has a header. A ``.ds.metadata`` beside them has the bytes of a token in its first line, behind the tokenizer's
name. Without it, the width follows from the last document's end and the size of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flat_tokens.formats.contract import (
    ExportFile,
    Files,
    Format,
    Readable,
    Splits,
    ahead,
    by_split,
    check_positive,
    check_token_id,
    nothing_to_finish,
    require_sequences,
    sequence_ranges,
)
from flat_tokens.formats.indexed import Documents, IndexedFile, StoredItems, vocabulary_size
from flat_tokens.manifest import SplitName
from flat_tokens.stores.store import Store, StoredObject


@dataclass(frozen=True)
class Datatrove:
    """How ``.ds`` files are written and read.

    ``end_of_text``: closes every document on the way out, and is removed from its end on the way in; None leaves the
    tokens as they are. ``vocabulary_size``: up to 65,536 ids have two bytes, else four; without it, the highest id
    there is decides. ``tokens_per_file``: several files of about so many tokens a split. ``tokenizer``: its name, for the
    metadata.
    """

    end_of_text: int | None = None
    vocabulary_size: int | None = None
    tokens_per_file: int | None = None
    tokenizer: str = "unknown"

    def __post_init__(self) -> None:
        check_token_id("end_of_text", self.end_of_text)
        check_positive("vocabulary_size", self.vocabulary_size)
        check_positive("tokens_per_file", self.tokens_per_file)
        if type(self.tokenizer) is not str or {"|", "\n"} & set(self.tokenizer):
            raise ValueError(f"tokenizer is {self.tokenizer!r}, but it is a name without | and without line breaks")


def token_dtype(splits: Splits, options: Datatrove) -> np.dtype[Any]:
    """The type of the tokens, as datatrove chooses it."""
    return np.dtype("<u2" if vocabulary_size(splits, options.vocabulary_size, options.end_of_text) <= 1 << 16 else "<u4")


def plan(splits: Splits, options: Datatrove) -> list[ExportFile]:
    """A directory a split: datatrove's own readers take all files of a directory."""
    token_dtype(splits, options)
    require_sequences(splits)
    return [
        ExportFile(f"{name}/{i:05d}_{name}.ds", name, start, stop)
        for name, split in splits.items()
        for i, (start, stop) in enumerate(sequence_ranges(split, options.tokens_per_file))
    ]


def write(splits: Splits, file: ExportFile, store: Store, options: Datatrove) -> list[StoredObject]:
    dtype = token_dtype(splits, options)
    documents = Documents(splits[file.split], file.start, file.stop, options.end_of_text)
    with store.create(file.key) as tokens_writer:
        for tokens in ahead(documents.tokens(dtype)):
            tokens_writer.write(tokens)
    end = 0
    with store.create(f"{file.key}.index") as writer:
        for lengths in documents.lengths():
            ends = end + np.cumsum(lengths)
            writer.write(ends.astype("<u8"))
            end = int(ends[-1]) if len(ends) else end
    metadata = f"{options.tokenizer}|{dtype.itemsize}\n{end}\n{_metric(end)}"
    return [tokens_writer.stored, writer.stored, store.put(f"{file.key}.metadata", metadata.encode())]


def _metric(count: int) -> str:
    """A count of tokens in three digits: ``1.23 GT``."""
    value, prefixes = float(count), ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5:
        value, prefixes = value / 1000, prefixes[1:]
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f} {prefixes[0]}T"


def token_width(store: Store, key: str) -> int:
    """Bytes of a token in the tokens *key*. ValueError, naming the file, if there is no index of them."""
    index = f"{key}.index"
    if not store.exists(index):
        raise ValueError(f"{store.path(key)}: has no {index} beside it. Without it, where the documents end is not known.")
    size, index_size = store.size(key), store.size(index)
    end = int.from_bytes(store.read_range(index, max(index_size - 8, 0), index_size), "little")
    said = _said_width(store, key)
    for width in (2, 4) if said is None else (said,):
        if index_size % 8 == 0 and end * width == size:
            return width
    raise ValueError(
        f"{store.path(index)}: ends with document end {end}, in {index_size} bytes, but the tokens have {size} bytes. "
        "The two are not of one dataset, or one of them is truncated."
    )


def _said_width(store: Store, key: str) -> int | None:
    """Bytes of a token according to the metadata, if there is any."""
    metadata = f"{key}.metadata"
    if not store.exists(metadata):
        return None
    first_line = store.read_range(metadata, 0, min(store.size(metadata), 4096)).partition(b"\n")[0]
    return {b"2": 2, b"4": 4}.get(first_line.rpartition(b"|")[2])


def open_file(store: Store, key: str, options: Datatrove) -> IndexedFile:
    """Open one ``.ds`` file with its index."""
    width = token_width(store, key)
    tokens = StoredItems(store, key, np.dtype(f"<u{width}"), 0, store.size(key) // width)
    index = StoredItems(store, f"{key}.index", np.dtype("<u8"), 0, store.size(f"{key}.index") // 8)

    def entries(first: int, last: int) -> npt.NDArray[np.uint64]:
        ends = index.read(max(first - 1, 0), last)
        starts = ends if first else np.append(np.uint64(0), ends)
        if (starts[1:] < starts[:-1]).any() or starts[-1] > tokens.length:
            raise ValueError(f"{index.path}: its documents {first} to {last} do not end one behind the other")
        return starts

    return IndexedFile(tokens, index.length, entries, options.end_of_text)


def recognise(files: Files) -> bool:
    for key in _tokens_of(files):
        if files.store.exists(f"{key}.index"):
            try:
                token_width(files.store, key)
            except ValueError:
                continue
            return True
    return False


def open_files(files: Files, options: Datatrove) -> Mapping[SplitName, Readable]:
    keys = _tokens_of(files)
    if not keys:
        raise ValueError(f"{files.url}: none of its {len(files.keys)} files is a .ds file")
    return by_split(keys, lambda key: open_file(files.store, key, options))


def _tokens_of(files: Files) -> list[str]:
    """The files of tokens: a single file, or those that end with ``.ds``."""
    if len(files.keys) == 1:
        return [files.keys[0].removesuffix(".index").removesuffix(".metadata")]
    return [key for key in files.keys if key.endswith(".ds")]


DATATROVE: Format[Any] = Format(
    name="datatrove",
    summary="datatrove tokenized files (.ds and .ds.index)",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="nothing",
    options=Datatrove,
    recognise=recognise,
    open=open_files,
    plan=plan,
    write=write,
    finish=nothing_to_finish,
)
