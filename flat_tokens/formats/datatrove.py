"""datatrove's tokenized files: tokens in a ``.ds``, each document's end in tokens (u64) in a ``.ds.index``, and if not all
tokens count for the loss a byte a token in a ``.ds.loss``, 1 or 0.

None has a header. A ``.ds.metadata`` next to them has the bytes of a token in its first line, after the tokenizer's
name. Without it, the width follows from the last document's end and the size of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flat_tokens.annotations import UInt64s
from flat_tokens.formats import contract
from flat_tokens.formats.contract import (
    ExportFile,
    Format,
    IndexedDocuments,
    IndexedFile,
    Splits,
    StoredItems,
    mask_beside,
)
from flat_tokens.stores.store import Store, StoredObject

LOSS = ".loss"


@dataclass(frozen=True)
class Datatrove(contract.DocumentOptions):
    """How ``.ds`` files are written and read.

    ``end_of_text``: closes every document on the way out, and is removed from its end on the way in; None leaves the
    tokens as they are. ``vocabulary_size``: up to 65,536 ids have two bytes, else four; without it, the highest id
    there is decides. ``tokens_per_file``: several files of about this many tokens a split. ``tokenizer``: its name, for the
    metadata.
    """

    tokenizer: str = "unknown"

    def __post_init__(self) -> None:
        super().__post_init__()
        if {"|", "\n"} & set(self.tokenizer):
            raise ValueError(f"tokenizer is {self.tokenizer!r}, but it is a name without | and without line breaks")


def plan(splits: Splits, options: Datatrove) -> list[ExportFile]:
    """A directory a split: datatrove's own readers take all files of a directory."""
    options.narrow_dtype(splits)
    return contract.plan_files(splits, options.tokens_per_file, "{split}/{i:05d}_{split}.ds")


def write(splits: Splits, file: ExportFile, store: Store, options: Datatrove) -> list[StoredObject]:
    dtype = options.narrow_dtype(splits)
    documents = IndexedDocuments.of(splits, file, options)
    with store.create(file.key) as tokens_writer:
        documents.write_tokens(tokens_writer, dtype)
    with store.create(f"{file.key}.index") as writer:
        for _, ends in documents.bounds():
            writer.write(ends.astype("<u8"))
    losses = contract.write_mask(store, f"{file.key}{LOSS}", splits[file.split], documents.masks())
    count = documents.token_count
    metadata = f"{options.tokenizer}|{dtype.itemsize}\n{count}\n{_metric(count)}"
    return [tokens_writer.stored, writer.stored, *losses, store.put(f"{file.key}.metadata", metadata.encode())]


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
        raise ValueError(f"{store.path(key)}: has no {index} next to it. Without it, where the documents end is not known.")
    size, index_size = store.size(key), store.size(index)
    end = int.from_bytes(store.read_range(index, max(index_size - 8, 0), index_size), "little")
    widths: tuple[int, ...] = (2, 4)
    if store.exists(metadata := f"{key}.metadata"):
        first_line = store.read_range(metadata, 0, min(store.size(metadata), 4096)).partition(b"\n")[0]
        widths = {b"2": (2,), b"4": (4,)}.get(first_line.rpartition(b"|")[2], widths)
    for width in widths:
        if index_size % 8 == 0 and end * width == size:
            return width
    raise ValueError(
        f"{store.path(index)}: ends with document end {end}, in {index_size} bytes, but the tokens have {size} bytes. "
        "The two are not of one dataset, or one of them is truncated."
    )


def open_file(store: Store, key: str, options: Datatrove) -> IndexedFile:
    """Open one ``.ds`` file with its index, by the key of any of its files."""
    key = tokens_key(key)
    width = token_width(store, key)
    tokens = StoredItems(store, key, np.dtype(f"<u{width}"), 0, store.size(key) // width)
    index = StoredItems(store, f"{key}.index", np.dtype("<u8"), 0, store.size(f"{key}.index") // 8)

    def entries(first: int, last: int) -> UInt64s:
        ends = index.read(max(first - 1, 0), last)
        starts = ends if first else np.append(np.uint64(0), ends)
        if (starts[1:] < starts[:-1]).any() or starts[-1] > tokens.length:
            raise ValueError(f"{index.path}: its documents {first} to {last} do not end in order")
        return starts

    mask = mask_beside(store, f"{key}{LOSS}", tokens.length)
    return IndexedFile(tokens, index.length, entries, options.end_of_text, mask)


def has_index(store: Store, key: str) -> bool:
    """Whether an index of the tokens *key* is next to them."""
    try:
        return token_width(store, key) > 0
    except ValueError:
        return False


def tokens_key(key: str) -> str:
    """The key of the tokens, by the key of any of the files that belong together."""
    return key.removesuffix(".index").removesuffix(".metadata").removesuffix(LOSS)


DATATROVE = Format(
    name="datatrove",
    summary="datatrove tokenized files (.ds and .ds.index)",
    keeps="sequences, empty ones too; ids up to 2**31 - 1",
    loses="nothing",
    options=Datatrove,
    recognise=lambda files: any(has_index(files.store, tokens_key(key)) for key in contract.with_ending(files, ".ds")),
    open=lambda files, options: contract.by_split(files, contract.members(files, has_index, ".ds"), open_file, options),
    plan=plan,
    write=write,
    keeps_loss_mask=True,
)
