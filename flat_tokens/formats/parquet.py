"""A row a sequence: Parquet files with a column of token lists, and Arrow files as ``datasets`` saves them to disk.

Both are written with int32 lists, from flat arrays: an Arrow list array *is* a flat array of values with offsets.
"""

from __future__ import annotations

import hashlib
import posixpath
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, Bools, Int64s, IntPair, UInt32s
from flat_tokens.arrays.layouts import to_json
from flat_tokens.batch import MAX_TOKEN_ID, TokenBatch
from flat_tokens.columns import ObjectFile, type_of
from flat_tokens.extras import pa
from flat_tokens.formats import contract
from flat_tokens.formats.contract import BATCH_TOKENS, ExportFile, Files, Format, Splits
from flat_tokens.pages import first_page, open_in_pieces, pages_of, sound_metadata
from flat_tokens.rows.documents import kept_columns
from flat_tokens.rows.split import checked_stop
from flat_tokens.rows.views import IGNORED_LABEL, running_sums
from flat_tokens.stores.reading import library_path
from flat_tokens.stores.store import Store, StoredObject, read_json
from flat_tokens.text.limits import LARGEST_PAGE

MAX_ROW_TOKENS = 2**31 - 1
"""A list's offsets are 32 bits wide."""
MAX_BATCH_ROWS = 1 << 20

PARQUET_ENDINGS = (".parquet", ".pq")
ARROW_ENDINGS = (".arrow", ".ipc", ".feather")
LABELS = "labels"
"""The column of lists next to the tokens of a dataset with a loss mask: the tokens that count, -100 for the others."""
LOSS_MASKS = (LABELS, "completion_mask", "assistant_masks")
"""Columns that say which tokens count: where there are several, those that count in all."""
ATTENTION = "attention_mask"
"""The column with 0 for padding, on either side of a row. Padding is left out."""
ARROW_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"


@dataclass(frozen=True)
class Lists(contract.Options):
    """Options that Parquet and Arrow files share. ``labels``: read makes the loss mask of the columns of lists ``labels``,
    ``completion_mask`` and ``assistant_masks``; ignore passes over them.
    """

    column: str = "input_ids"
    labels: Literal["read", "ignore"] = "read"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in asdict(self).items():
            if isinstance(value, int) and value > MAX_ROW_TOKENS:
                raise ValueError(f"{name} is {value}, but lists hold up to {MAX_ROW_TOKENS} tokens")


@dataclass(frozen=True)
class Parquet(Lists):
    """How Parquet files are written and which columns are read.

    ``tokens_per_file`` and ``tokens_per_row_group``: at most, unless one sequence is longer. ``zstd`` makes files less than
    half as large, and several times as slow to write as disks are.
    """

    tokens_per_file: int = 1 << 26
    tokens_per_row_group: int = 1 << 22
    compression: Literal["zstd", "none"] = "none"


@dataclass(frozen=True)
class Arrow(Lists):
    """How Arrow files are written, with up to this many tokens, unless one sequence has more, and which columns are read."""

    tokens_per_file: int = 1 << 27
    tokens_per_batch: int = 1 << 20


# Writing


def plan(splits: Splits, options: Parquet | Arrow, key: str) -> list[ExportFile]:
    """Files of whole sequences, under names by which ``datasets`` finds splits. A split without sequences has no file."""
    if options.column == LABELS and any(split.loss_mask is not None for split in splits.values()):
        raise ValueError(f"column is {LABELS!r}, but that is the column of the loss mask. Give the tokens' column another name.")
    for kept in filter(None, map(kept_columns, splits.values())):
        if taken := sorted({options.column, LABELS} & set(kept.kinds)):
            raise ValueError(f"the dataset keeps a column {taken[0]!r}. Give the tokens' column another name.")
    files = contract.plan_files(splits, options.tokens_per_file, key)
    for _, name, start, stop in files:
        split = splits[name]
        # Several sequences are never more tokens than a file's, so only one alone can be too long for a list.
        if stop == start + 1 and (length := contract.entry(split, stop) - contract.entry(split, start)) > MAX_ROW_TOKENS:
            raise ValueError(f"{split.store.url}: sequence {start} has {length} tokens, but a list holds {MAX_ROW_TOKENS}")
    return files


def write_parquet(splits: Splits, file: ExportFile, store: Store, options: Parquet) -> list[StoredObject]:
    """One file, with a row group for each batch of sequences."""
    settings: dict[str, Any] = {
        "compression": options.compression,
        "use_dictionary": False,  # a vocabulary has more entries than a dictionary page is good for
        "write_statistics": False,
        "write_page_checksum": True,
        "use_content_defined_chunking": True,  # so that two versions share bytes in a store that knows chunks, as the hub's
    }
    opened = partial(pa.parquet.ParquetWriter, **settings)
    return _write(splits, file, store, options.column, options.tokens_per_row_group, opened)


def write_arrow(splits: Splits, file: ExportFile, store: Store, options: Arrow) -> list[StoredObject]:
    """One file, a stream of record batches."""
    return _write(splits, file, store, options.column, options.tokens_per_batch, pa.ipc.new_stream)


def _write(
    splits: Splits, file: ExportFile, store: Store, column: str, max_tokens: int, opened: Callable[..., Any]
) -> list[StoredObject]:
    """Write the sequences of a file as rows of one list each, with labels and kept columns if there are any."""
    kind = pa.list_(pa.int32())
    masked, kept = splits[file.split].loss_mask is not None, kept_columns(splits[file.split])
    beside = [] if kept is None else [(name, type_of(kind)) for name, kind in kept.kinds.items()]
    schema, at = pa.schema([(column, kind), *([(LABELS, kind)] if masked else []), *beside]), file.start
    with store.create(file.key) as writing, opened(ObjectFile(writing), schema) as writer:
        for batch in splits[file.split].batches(file.start, file.stop, max_tokens=max_tokens):
            tokens = (batch.encoded_tokens >> np.uint32(1)).view(np.int32)  # ids end at 2**31 - 1
            values = [tokens, *([] if batch.loss_mask is None else [np.where(batch.loss_mask, tokens, np.int32(IGNORED_LABEL))])]
            starts = batch.seq_starts.astype(np.int32)
            lists = [pa.ListArray.from_arrays(starts, of_column, type=kind) for of_column in values]
            rows = np.arange(at, at + batch.seq_count)
            columns = [] if kept is None else kept.take(rows, list(kept.kinds)).columns
            writer.write_batch(pa.record_batch([*lists, *columns], schema=schema))
            at += batch.seq_count
    return [writing.stored]


def finish_arrow(splits: Splits, written: Sequence[StoredObject], store: Store, options: Arrow) -> list[StoredObject]:
    """The files that ``datasets.load_from_disk`` finds the others by. The list of splits comes last."""
    objects, names = [], [name for name in splits if any(posixpath.dirname(item.key) == name for item in written)]
    for name in names:
        files = [item for item in written if posixpath.dirname(item.key) == name]
        fingerprint = hashlib.sha256("".join(item.digest for item in files).encode()).hexdigest()[:16]
        state: dict[str, Any] = {
            "_data_files": [{"filename": posixpath.basename(item.key)} for item in files],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": name,
        }
        # Releases spell features differently; without features, all of them take the schema's.
        objects.append(store.put(f"{name}/dataset_info.json", to_json({"features": None})))
        objects.append(store.put(f"{name}/state.json", to_json(state)))
    objects.append(store.put("dataset_dict.json", to_json({"splits": names})))
    return objects


# Reading


class TokenLists(NamedTuple):
    """Rows of a file from row *first* on: a list array of token ids, and those of masks by their names."""

    first: int
    ids: Any
    masks: dict[str, Any]

    @classmethod
    def of(cls, first: int, batch: Any, columns: Sequence[str]) -> TokenLists:
        """A record batch of the *columns*, from row *first* on."""
        return cls(first, batch.column(columns[0]), {name: batch.column(name) for name in columns[1:]})

    def slice(self, low: int, high: int) -> TokenLists:
        """Its rows ``low:high``."""
        masks = {name: lists.slice(low, high - low) for name, lists in self.masks.items()}
        return TokenLists(self.first + low, self.ids.slice(low, high - low), masks)


@dataclass(frozen=True)
class ListRows:
    """A column of lists in a file, as a `Readable`. A row is read as a whole, so that memory is bounded by the longest one.

    ``masks``: the columns that say which of the tokens are read, and which count.
    """

    store: Store
    key: str
    options: Lists

    @property
    def path(self) -> str:
        return self.store.path(self.key)

    @property
    def seq_count(self) -> int:
        raise NotImplementedError

    @property
    def masks(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def loss_mask(self) -> str | None:
        """The columns that say which tokens count, None without one."""
        return " and ".join(name for name in self.masks if name != ATTENTION) or None

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.options.column, *self.masks]

    def parts(self, start: int, stop: int, max_tokens: int) -> Iterator[TokenLists]:
        """Ranges that cover rows ``start:stop``, each of about *max_tokens* if possible."""
        raise NotImplementedError

    @cached_property
    def token_count(self) -> int:
        """Counted in one pass over the file, once."""
        return sum(batch.token_count for batch in self.batches())

    def sequence(self, i: int) -> UInt32s:
        """Row *i*, decoded: uint32[length]. Reads its row group up to there."""
        row = contract.checked_index(i, self.seq_count, self.path)
        return np.concatenate([batch.encoded_tokens for batch in self.batches(row, row + 1)]) >> np.uint32(1)

    def batches(self, start: int = 0, stop: int | None = None, *, max_tokens: int = BATCH_TOKENS) -> Iterator[TokenBatch]:
        done, stop = start, checked_stop(start, stop, self.seq_count, self.path)
        for part in self.parts(start, stop, max_tokens):
            low, high = max(start - part.first, 0), min(stop - part.first, len(part.ids))
            if low < high:
                yield from _batches(part.slice(low, high), self.path, max_tokens)
                done = part.first + high
        if done != stop:
            raise ValueError(f"{self.path}: says that it has {self.seq_count} rows, but ends before row {stop}")


class RowGroup(NamedTuple):
    """A row group by the footer: its rows, and of each column that is read the values of its lists (an empty one counts) and
    where their pages begin.
    """

    rows: int
    chunks: tuple[IntPair, ...]


@dataclass(frozen=True)
class ParquetRows(ListRows):
    """The rows of a Parquet file. ValueError when it is made, if the file is not Parquet or has no such column of token ids."""

    def __post_init__(self) -> None:
        if any(group.rows < 0 for group in self.groups):
            raise ValueError(f"{self.path}: has a row group of less than no rows")

    @cached_property
    def _footer(self) -> tuple[tuple[str, ...], tuple[RowGroup, ...]]:
        """The masks, and the row groups."""
        with _refused_by_name(self.path, "Parquet"), self.store.open(self.key) as opened:
            columns, metadata = sound_metadata(opened, lambda schema: [self.options.column, *_masks(schema, self)])
            paths = [column.path for column in metadata.schema]
            leaves = [next(i for i, path in enumerate(paths) if path.startswith(f"{column}.")) for column in columns]
            found = map(metadata.row_group, range(metadata.num_row_groups))
            chunks = [(group.num_rows, map(group.column, leaves)) for group in found]
            return tuple(columns[1:]), tuple(
                RowGroup(rows, tuple((chunk.num_values, first_page(chunk)) for chunk in of_group)) for rows, of_group in chunks
            )

    @property
    def masks(self) -> tuple[str, ...]:
        return self._footer[0]

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        return self._footer[1]

    @property
    def seq_count(self) -> int:
        return sum(group.rows for group in self.groups)

    def parts(self, start: int, stop: int, max_tokens: int) -> Iterator[TokenLists]:
        first = 0
        with (
            _refused_by_name(self.path, "Parquet"),
            _source(self.store, self.key) as source,
            open_in_pieces(source) as file,
        ):
            for number, (rows, chunks) in enumerate(self.groups):
                if first < stop and first + rows > start:
                    at = first
                    for column, (values, first_page_at) in zip(self.columns, chunks, strict=True):
                        self._check_pages(column, values, first_page_at)
                    at_a_time = min(max(max_tokens * rows // max(chunks[0][0], 1), 1), MAX_BATCH_ROWS)
                    for batch in file.iter_batches(at_a_time, [number], self.columns, use_threads=False):
                        yield TokenLists.of(at, batch, self.columns)
                        at += len(batch)
                        if at >= stop:
                            return
                    if at != first + rows:
                        raise ValueError(f"{self.path}: row group {number} has {at - first} rows, but the file says {rows}")
                first += rows

    def _check_pages(self, column: str, values: int, start: int) -> None:
        """ValueError if a page of a column chunk says that it is larger than any is: the library would take that memory."""
        try:
            with self.store.open(self.key) as opened:
                for _ in pages_of(opened, start, values, LARGEST_PAGE):
                    pass
        except ValueError as error:
            raise ValueError(f"{self.path}: column {column!r} cannot be read: {error}.") from error


@dataclass(frozen=True)
class ArrowRows(ListRows):
    """The rows of an Arrow file or stream. ValueError when it is made, if it is neither or has no such column of token ids."""

    def __post_init__(self) -> None:
        self.masks  # noqa: B018  # the file is looked at

    @cached_property
    def masks(self) -> tuple[str, ...]:
        with self._opened() as (schema, _):
            return _masks(schema, self)

    @cached_property
    def seq_count(self) -> int:
        """Counted in one pass over the batches' headers, once."""
        with self._opened(mapped=True) as (_, batches):
            return sum(len(batch) for batch in batches)

    def parts(self, start: int, stop: int, max_tokens: int) -> Iterator[TokenLists]:
        # A single row is read through a map, which reads only the pages it touches; all rows in large reads.
        first, columns = 0, self.columns  # looked up before: some stores have one position for all who read a file
        with self._opened(mapped=stop - start == 1) as (_, batches):
            for batch in batches:
                if first + len(batch) > start:
                    yield TokenLists.of(first, batch, columns)
                first += len(batch)
                if first >= stop:
                    return

    @contextmanager
    def _opened(self, mapped: bool = False) -> Iterator[tuple[Any, Iterator[Any]]]:
        """The schema, and the record batches in order."""
        with _refused_by_name(self.path, "Arrow"), _source(self.store, self.key, mapped) as source:
            is_file = source.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            source.seek(0)
            with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as file:
                yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches)) if is_file else iter(file)


def _batches(part: TokenLists, path: str, max_tokens: int) -> Iterator[TokenBatch]:
    """The rows of a part without padding, in ranges of at most *max_tokens*."""
    tokens, entries = _flat(part.ids, path, part.first, "token id", 0)
    is_read = _mask(part, ATTENTION, path, tokens, entries) if ATTENTION in part.masks else None
    counted = [_mask(part, name, path, tokens, entries, is_read) for name in part.masks if name != ATTENTION]
    mask = np.logical_and.reduce(counted).astype(np.uint8) if counted else None
    if is_read is not None:
        follows = np.zeros_like(is_read)
        follows[1:] = is_read[:-1]
        follows[entries[:-1][np.diff(entries) > 0]] = False
        if (wrong := np.flatnonzero(np.diff(running_sums((is_read & ~follows).view(np.uint8))[entries]) > 1)).size:
            raise ValueError(
                f"{path}: row {part.first + wrong[0]} has padding between tokens, by {ATTENTION!r}. Pad the ends of rows."
            )
        tokens, entries, mask = (
            tokens[is_read],
            running_sums(is_read.view(np.uint8))[entries],
            None if mask is None else mask[is_read],
        )
    ids, starts = tokens.astype(np.uint32), entries.astype(np.uint64)
    for some in contract.token_ranges(lambda i, j: starts[i : j + 1], 0, len(part.ids), max_tokens):
        batch = TokenBatch.from_flat(ids[some.start : some.stop], some.seq_starts)
        yield batch if mask is None else batch._replace(loss_mask=mask[some.start : some.stop])


def _mask(
    part: TokenLists,
    name: str,
    path: str,
    tokens: AnyArray,
    entries: Int64s,
    is_read: Bools | None = None,
) -> Bools:
    """A mask of a part: bool[n]. ValueError for a value that is neither 0 nor 1, for a label of a token that *is_read* if it is
    neither the token nor -100.
    """
    is_labels = name == LABELS
    what, least = ("label", IGNORED_LABEL) if is_labels else (f"{name} value", 0)
    values, bounds = _flat(part.masks[name], path, part.first, what, least)
    remedy = f"It has a {what} for each token: {'the token, or -100' if is_labels else '0 or 1'}."
    remedy += "" if name == ATTENTION else f" If {name!r} is something else: labels=ignore"
    if (wrong := np.flatnonzero(np.diff(bounds) != np.diff(entries))).size:
        row = wrong[0]
        raise ValueError(
            f"{path}: row {part.first + row} has {np.diff(bounds)[row]} {what}s for {np.diff(entries)[row]} tokens. {remedy}"
        )
    holds = values == (tokens if is_labels else 1)
    not_one = ~holds & (values != least)
    if (wrong := np.flatnonzero(not_one if is_read is None else not_one & is_read)).size:
        k = int(wrong[0])
        row = part.first + int(np.searchsorted(entries, k, side="right")) - 1
        raise ValueError(f"{path}: row {row} has {what} {values[k]} for token {tokens[k]}. {remedy}")
    return np.asarray(holds, np.bool_)


def _flat(array: Any, path: str, first: int, what: str, least: int) -> tuple[AnyArray, Int64s]:
    """The values of a list array, integers[n], each a *what*, and its rows' bounds, int64[rows + 1]. ValueError for a null, and
    for values outside of *least* to the largest token id.
    """
    with _refused_by_name(path, "lists"):
        array.validate(full=True)  # nothing has checked the offsets, which may come from a stranger
    if array.null_count:
        nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        raise ValueError(f"{path}: row {first + nulls[0]} is null. Leave such rows out, or make them empty lists.")
    if hasattr(array.type, "list_size"):
        entries = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    else:
        entries = array.offsets.to_numpy().astype(np.int64)
        entries -= entries[0]
    values = array.flatten()

    def row(wrong: Bools) -> int:
        return first + int(np.searchsorted(entries, np.flatnonzero(wrong)[0], side="right")) - 1

    if values.null_count:
        raise ValueError(f"{path}: row {row(values.is_null().to_numpy(zero_copy_only=False))} has a null among its {what}s")
    found = values.to_numpy(zero_copy_only=False)  # a copy of booleans
    if len(found) and (found.min() < min(least, 0) or found.max() > MAX_TOKEN_ID):
        wrong = (found < min(least, 0)) | (found > MAX_TOKEN_ID)
        raise ValueError(f"{path}: row {row(wrong)} holds {found[wrong][0]}, but {what}s are {least} to {MAX_TOKEN_ID}")
    return found, entries


def _arrow_keys(files: Files) -> list[str]:
    """The Arrow files. In a directory that ``datasets`` saved, only those of its list: its caches are there too."""
    saved = {posixpath.dirname(key): key for key in files.keys if posixpath.basename(key) == "state.json"}
    keys = [key for key in contract.members(files, _is_arrow, *ARROW_ENDINGS) if posixpath.dirname(key) not in saved]
    for directory, key in saved.items():
        state, path = read_json(files.store, key), files.store.path(key)
        listed = state.get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise ValueError(f"{path}: has no list of data files")
        if state.get("_indices_data_files"):
            raise ValueError(f"{path}: has rows in another order than its data files. Save it with a newer release of datasets.")
        for item in listed:
            name = item.get("filename")
            if not isinstance(name, str) or (found := posixpath.join(directory, name)) not in files.keys:
                raise ValueError(f"{path}: lists {reprlib.repr(name)}, which is not among the files next to it")
            keys.append(found)
    return keys


def _source(store: Store, key: str, mapped: bool = False) -> Any:
    if not store.is_local:
        return store.open(key)
    with library_path(store.path(key)) as path:
        return pa.memory_map(path) if mapped else pa.OSFile(path)


@contextmanager
def _refused_by_name(path: str, kind: str) -> Iterator[None]:
    """Turn pyarrow's errors about a file into ValueError with the file's name. The system's own errors pass."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: cannot be read as {kind} ({str(error)[:300]})") from error


def _masks(schema: Any, rows: ListRows) -> tuple[str, ...]:
    """The columns of masks. A label of a whole row is something else; a column of another mask's name is refused by its type, and
    a file without a column of token ids.
    """
    column, path = rows.options.column, rows.path
    indices = schema.get_all_field_indices(column)
    if len(indices) != 1:
        names = ", ".join(reprlib.repr(name) for name in schema.names[:20])
        several = "several columns" if indices else "no column"
        raise ValueError(f"{path} has {several} {column!r}; it has {names}. Set column.")
    kind = schema.field(indices[0]).type
    if not _is_of_lists(kind):
        raise ValueError(f"{path}: column {column!r} is of type {reprlib.repr(str(kind))}, but token ids are lists of integers")
    found = []
    for name in (*(LOSS_MASKS if rows.options.labels == "read" else ()), ATTENTION):
        indices = [] if name == column else schema.get_all_field_indices(name)
        if len(indices) == 1 and _is_of_lists(schema.field(indices[0]).type, is_mask=name != LABELS):
            found.append(name)
        elif indices and name != LABELS:
            kinds = ", ".join(reprlib.repr(str(schema.field(i).type)) for i in indices)
            remedy = "Rename it" if name == ATTENTION else "Rename it, or pass over it: labels=ignore"
            raise ValueError(f"{path}: column {name!r} is of type {kinds}, but a mask is lists of 0 and 1. {remedy}.")
    return tuple(found)


def _is_of_lists(kind: Any, *, is_mask: bool = False) -> bool:
    """Whether a type is a list of integers; for a mask, a list of booleans is one, too."""
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and (types.is_integer(kind.value_type) or (is_mask and types.is_boolean(kind.value_type))))


def _is_arrow(store: Store, key: str) -> bool:
    head = store.read_range(key, 0, 8)
    # A stream begins with a mark and the length of its schema, which is padded to eight bytes.
    return head.startswith(ARROW_MAGIC) or (
        len(head) == 8 and head.startswith(STREAM_MAGIC) and head[4] % 8 == 0 and any(head[4:])
    )


def _is_parquet(store: Store, key: str) -> bool:
    return store.read_range(key, 0, 4) == b"PAR1"


PARQUET = Format(
    name="parquet",
    summary="Parquet files with a column of token lists, as datasets, TRL and others read",
    keeps="sequences, empty ones too; loss masks",
    loses="nothing",
    options=Parquet,
    recognise=lambda files: any(_is_parquet(files.store, key) for key in contract.with_ending(files, *PARQUET_ENDINGS)),
    open=lambda files, options: contract.by_split(
        files, contract.members(files, _is_parquet, *PARQUET_ENDINGS), ParquetRows, options
    ),
    plan=lambda splits, options: plan(splits, options, "{split}-{i:05d}-of-{count:05d}.parquet"),
    write=write_parquet,
    keeps_loss_mask=True,
)
ARROW = Format(
    name="arrow",
    summary="Arrow files in a directory that datasets.load_from_disk reads",
    keeps="sequences, empty ones too; loss masks",
    loses="nothing",
    options=Arrow,
    recognise=lambda files: any(_is_arrow(files.store, key) for key in contract.with_ending(files, *ARROW_ENDINGS)),
    open=lambda files, options: contract.by_split(files, _arrow_keys(files), ArrowRows, options),
    plan=lambda splits, options: plan(splits, options, "{split}/data-{i:05d}-of-{count:05d}.arrow"),
    write=write_arrow,
    finish=finish_arrow,
    keeps_loss_mask=True,
)
