"""Rows of source files as Arrow arrays: what every reader takes and gives."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from flat_tokens import columns as kept
from flat_tokens.annotations import Int64s, IntPair, JsonObject, UInt8s, UInt64s
from flat_tokens.extras import LazyModule, pa
from flat_tokens.keys import document_keys
from flat_tokens.stores.reading import open_plain
from flat_tokens.stores.store import Store
from flat_tokens.text import limits
from flat_tokens.text.paths import column_at, nearest_path, with_paths

if TYPE_CHECKING:
    import msgspec
else:
    msgspec = LazyModule("msgspec", "reading conversations")


class TextFile(NamedTuple):
    """An unpacked source file and how its text is read. ``name`` is for messages; ``path`` may be a URL. ``batch_bytes``:
    text to read at a time, if less than BATCH_BYTES is wanted, from formats that are not cut as finely.
    """

    path: str
    name: str
    size: int
    text_column: str
    id_column: str | None = None
    separator: bytes = b""
    max_bytes: int = 1 << 31
    max_expansion: int = limits.MAX_EXPANSION
    batch_bytes: int | None = None
    completion_column: str | None = None
    """The column that follows the text's, which is the prompt then."""
    has_messages: bool = False
    """Whether the text column holds lists of messages, which become JSON."""
    tools_column: str | None = None
    """With messages: the column of the tools that a conversation may call; null if it has none."""
    kept_columns: tuple[str, ...] = ()
    """The columns that are given with the texts."""
    crlf: bool = False
    """Whether a line feed of the separator may be CR LF in the file."""
    delimiter: str | None = None
    """The character between the fields of a CSV file: without it a tab where the name says .tsv, else a comma."""
    quotes: Literal["csv", "none"] | None = None
    """Quotes in a CSV file: of a field that may hold delimiters and line ends, or text like any other. Without it as CSV, but
    rows that may well be several are refused.
    """
    content: bytes | None = None
    """The bytes of the file, where they are in memory: then nothing is at the path."""
    partitions: tuple[tuple[str, str | None], ...] = ()
    """Kept columns that the names of its directories give, each with the value of all its rows."""

    @classmethod
    def of(cls, path: str, name: str, size: int, settings: Mapping[str, Any], **more: Any) -> TextFile:
        """A file of a source, whose *settings*, by a configuration or a manifest, say how it is read."""

        def text(setting: str) -> str | None:
            return str(settings.get(setting) or "") or None

        messages = text("messages_column")
        return cls(
            path,
            name,
            size,
            messages or text("prompt_column") or text("text_column") or "text",
            text("id_column"),
            (text("document_separator") or "").encode(),
            max_expansion=int(settings.get("max_expansion") or limits.MAX_EXPANSION),
            completion_column=text("completion_column"),
            has_messages=messages is not None,
            tools_column=text("tools_column"),
            delimiter=settings.get("delimiter"),
            quotes=settings.get("quotes"),
            **more,
        )

    @property
    def text_columns(self) -> list[str]:
        """The columns that a document's text is made of."""
        return list(dict.fromkeys(filter(None, (self.text_column, self.completion_column, self.tools_column))))

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once: those of the text, the id's and those that are kept."""
        return list(dict.fromkeys(filter(None, (*self.text_columns, self.id_column, *self.kept_here))))

    @property
    def kept_here(self) -> tuple[str, ...]:
        """The kept columns that the file itself has."""
        given = dict(self.partitions)
        return tuple(name for name in self.kept_columns if name not in given) if given else self.kept_columns

    def kept(self, columns: Mapping[str, pa.Array], count: int) -> pa.RecordBatch | None:
        """The kept columns of *count* rows, of their columns by name; None if none is kept."""
        if not self.kept_columns:
            return None
        given = {name: _repeated(value, count) for name, value in self.partitions}
        own = {name: as_kept(columns[name], name, self.name) for name in self.kept_here}
        return kept.batch_of({name: own[name] if name in own else given[name] for name in self.kept_columns})

    def texts(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """The texts of rows, of their columns by name."""
        first = columns[self.text_column]
        if self.completion_column is not None:
            return with_completions(first, columns[self.completion_column])
        if self.tools_column is not None:
            return with_tools(first, columns[self.tools_column])
        return first if not self.has_messages or is_text(first.type) else messages_as_json(first)

    @property
    def is_local(self) -> bool:
        return "://" not in self.path and self.content is None

    def open(self) -> BinaryIO:
        """The file, open for reading."""
        if self.content is not None:
            return io.BytesIO(self.content)
        return open_plain(self.path) if self.is_local else Store.at(self.path).open("")


class Range(NamedTuple):
    """A range of a file: row groups or record batches ``start:stop``, of those the rows ``rows``; or bytes ``start:stop`` at
    ends of documents. ``text_bytes``: about how much text.
    """

    start: int
    stop: int
    rows: IntPair | None
    text_bytes: int


class Rows(NamedTuple):
    """A batch of a range as the file has it: texts and ids, text or bytes, with nulls; and the row of each, int64[n].

    Rows count from the start of the range. ``end``: rows read so far, blank lines included; ``seen``: about how many of the
    range's ``text_bytes`` these are. ``faults``: rows that cannot be parsed, as (row, reason, detail). ``columns``: those
    that are kept, of as many rows, each of a kind of ``flat_tokens.columns``.
    """

    texts: pa.Array
    ids: pa.Array | None
    rows: Int64s
    end: int
    seen: int
    faults: tuple[tuple[int, str, str], ...] = ()
    columns: pa.RecordBatch | None = None

    def behind(self, rows: int, seen: int) -> Rows:
        """These rows, counted after *rows* earlier ones with *seen* bytes of text."""
        if not rows and not seen:
            return self
        faults = tuple((row + rows, reason, detail) for row, reason, detail in self.faults)
        return self._replace(rows=self.rows + rows, end=self.end + rows, seen=self.seen + seen, faults=faults)

    @classmethod
    def of_batch(cls, file: TextFile, batch: pa.RecordBatch, start: int, seen: int) -> Rows:
        """All rows of a record batch that begins at row *start*."""
        end = start + batch.num_rows
        ids = batch.column(file.id_column) if file.id_column else None
        texts = file.texts({name: batch.column(name) for name in file.text_columns})
        columns = file.kept({name: batch.column(name) for name in file.kept_here}, len(batch))
        return cls(texts, ids, np.arange(start, end), end, seen, columns=columns)


class BadRowError(ValueError):
    """A row that cannot be read. ``fault``: its reason and the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = reason, detail


class CollectedRows:
    """Rows of a batch that a reader parses one by one: texts and ids as UTF-8, values of kept columns, and faults. ``size``: the
    bytes of text, as far as the reader counts them.
    """

    def __init__(self, file: TextFile) -> None:
        self._file = file
        self._found: list[Sequence[Any]] = []
        self.faults: list[tuple[int, str, str]] = []
        self.size = 0

    def __len__(self) -> int:
        return len(self._found) + len(self.faults)

    def batch(self, end: int, seen: int, *, is_last: bool = False) -> Iterator[Rows]:
        """The rows so far, if they are as many as a batch has, or the last ones and any. They are forgotten then."""
        size = self._file.batch_bytes or limits.BATCH_BYTES
        if len(self) and (is_last or self.size >= size or len(self) >= limits.BATCH_ROWS):
            yield self.rows(end, seen)
            self._found, self.faults, self.size = [], [], 0

    def add(self, row: int, text: bytes | None, identity: bytes | None, kept: Sequence[Any] = ()) -> None:
        """Add a row. *kept*: the value of each kept column of the file: None, a truth, a number, or text, which may be UTF-8
        already.
        """
        self._found.append((row, text, identity, *kept))

    def rows(self, end: int, seen: int) -> Rows:
        file = self._file
        rows, *values = zip(*self._found, strict=True) if self._found else [()] * (3 + len(file.kept_here))
        texts, ids = (kept.texts_as_arrow(column, pa.large_binary()) for column in values[:2])
        named = zip(file.kept_here, values[2:], strict=True)
        columns = file.kept({name: values_as_array(column, name, file.name) for name, column in named}, len(rows))
        found = np.array(rows, np.int64)
        return Rows(texts, ids if file.id_column else None, found, end, seen, tuple(self.faults), columns)


def passed_over(file: TextFile, row: int, seen: int) -> Rows:
    """A document that is too long to be read."""
    collected = CollectedRows(file)
    collected.faults.append((row, "too_long", too_long(file.max_bytes + 1, file.max_bytes)))
    return collected.rows(row + 1, seen)


def too_long(length: int, max_bytes: int) -> str:
    return f"the document has {length:,} bytes or more, above documents.max_bytes = {max_bytes:,}"


WANTED = {
    "id_column": "text or integers",
    "messages_column": "lists of messages or JSON",
    "tools_column": "lists of tools or JSON",
}
"""The kind of text that the columns of these settings hold."""


def check_columns(file: TextFile, schema: pa.Schema) -> None:
    """Refuse a file without the text column, or with one that holds no text."""
    first = "messages_column" if file.has_messages else "prompt_column" if file.completion_column else "text_column"
    settings = [(first, file.text_column), ("completion_column", file.completion_column), ("tools_column", file.tools_column)]
    settings += [("id_column", file.id_column), *(("keep_columns", column) for column in file.kept_here)]
    written, schema = schema, with_paths(schema, file.columns)
    for setting, column in settings:
        if column is None:
            continue
        if column not in (names := schema.names):
            raise _no_column(file, column, written, setting)
        if names.count(column) > 1:
            raise ValueError(f"{file.name} has {names.count(column)} columns named {column!r}; give them different names.")
        if setting == "keep_columns":
            as_kept(pa.nulls(0, schema.field(column).type), column, file.name)
            continue
        kind = plain_type(schema.field(column).type)
        is_list = setting in ("messages_column", "tools_column") and is_messages(kind)
        if is_list and (twice := _named_twice(kind)):
            raise ValueError(f"{file.name}: column {column!r} has two fields named {twice!r}; give them different names.")
        right = (setting == "id_column" and pa.types.is_integer(kind)) or is_list
        if not (is_text(kind) or right or pa.types.is_null(kind)):
            wanted = WANTED.get(setting, "text")
            raise ValueError(
                f"{file.name}: column {column!r} is {kind}, not {wanted}. Set source.{setting} to another column"
                f"{', or source.messages_column to this one' if is_messages(kind) else ''}."
            )


def check_names(file: TextFile, names: Iterable[str]) -> None:
    """Refuse a file without the text column, if it states only the names of its columns: each may hold text."""
    check_columns(file, pa.schema([(name.encode(errors="replace"), pa.string()) for name in names]))


def _repeated(value: str | None, count: int) -> pa.Array:
    """*count* times the same text, or null."""
    if value is None:
        return pa.nulls(count)
    return pa.repeat(pa.scalar(value.encode(errors="replace").decode(), pa.large_string()), count)


def _named_twice(kind: pa.DataType) -> str | None:
    """The name of two fields of a struct, at any depth; None if names differ."""
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [field.name for field in fields] if pa.types.is_struct(kind) else []
    own = next((name for name in names if names.count(name) > 1), None)
    return own if own is not None else next(filter(None, (_named_twice(field.type) for field in fields)), None)


def _no_column(file: TextFile, column: str, schema: pa.Schema, setting: str) -> ValueError:
    found = ", ".join(map(repr, schema.names)) or "none"
    directory = next((part for part in f"{file.path}/{file.name}".split("/") if part.startswith(f"{column}=")), None)
    path = nearest_path(schema, column)
    remedy = f"Set source.{setting}." if path is None else f"Set source.{setting} to {path!r}, a field of its structs."
    if directory is not None and setting != "keep_columns":
        remedy = f"Directories, such as {directory}, give columns to source.keep_columns alone."
    elif directory is not None:
        remedy = f"Directories give columns if they are below source.path: set it to one that {directory} is below."
    return ValueError(f"{file.name} has no column {column!r}; it has {found}. {remedy}")


def as_kept(values: pa.Array, name: str, file: str) -> pa.Array:
    """The values of a kept column as one of the kinds of ``flat_tokens.columns``: numbers as int64, uint64 or float64, dates and
    times as ISO 8601 text, U+FFFD for what is not UTF-8. ValueError if the column holds something else.
    """
    values = as_plain(values)
    kind, types = values.type, pa.types
    if types.is_dictionary(kind):
        return as_kept(values.dictionary_decode(), name, file)
    if types.is_null(kind) or types.is_boolean(kind) or types.is_uint64(kind):
        return values
    if types.is_integer(kind):
        return values.cast(pa.int64())
    if types.is_decimal(kind):
        floats = values.cast(pa.float64())
        for i in np.flatnonzero(np.abs(floats.to_numpy(zero_copy_only=False)) >= kept.FLOAT64_HAS_ALL).tolist():
            if (value := values[i].as_py()) != floats[i].as_py():
                raise _not_a_float(value, name, file)
        return floats
    if types.is_floating(kind):
        return values.cast(pa.float64())
    if is_text(kind):
        return as_unicode(values)[0]
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        written = (values.cast(pa.timestamp(kind.unit)) if types.is_timestamp(kind) else values).cast(pa.large_string())
        if pa.compute.any(pa.compute.starts_with(written, "<")).as_py():  # Arrow's text for what is in no calendar
            raise ValueError(f"{file}: column {name!r} has a {kind} that is out of range. {kept.REMEDY}")
        written = pa.compute.replace_substring(written, " ", "T")
        zone, nothing = (pa.scalar(text, pa.large_string()) for text in ("Z", ""))
        return pa.compute.binary_join_element_wise(written, zone, nothing) if getattr(kind, "tz", None) else written
    raise ValueError(
        f"{file}: column {name!r} is {kind}; kept are text, numbers, truth values, dates and times. Leave it out of "
        "source.keep_columns."
    )


def _not_a_float(value: Any, name: str, file: str) -> ValueError:
    return ValueError(f"{file}: column {name!r} is float64 here, which does not have its value {value}. {kept.REMEDY}")


def values_as_array(values: Sequence[Any], name: str, file: str) -> pa.Array:
    """Values of a kept column that a reader has parsed, as an array. Integers beyond 64 bits, or next to fractions, are float64.
    ValueError for integers that float64 does not have then, for values of several kinds, and for lists and mappings.
    """
    kinds = {type(value) for value in values} - {type(None)}
    is_large = kinds == {int} and any(not -(1 << 63) <= value < 1 << 63 for value in values if value)
    if is_large or kinds == {int, float} or (Decimal in kinds and kinds <= {int, float, Decimal}):
        return pa.array([None if value is None else _as_float(value, name, file) for value in values], pa.float64())
    if kinds <= {str, bytes}:
        as_bytes = [utf8(value) if isinstance(value, str) else value for value in values]
        return pa.array(as_bytes, pa.large_binary()) if kinds else pa.nulls(len(values))
    if len(kinds) > 1 or kinds & {list, dict}:
        types = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"{file}: column {name!r} holds values of type {types}; kept are text, numbers and truth values, one of them. Leave "
            "it out of source.keep_columns."
        )
    return pa.array(values, pa.bool_() if kinds == {bool} else pa.int64() if kinds == {int} else pa.float64())


UUID = "arrow.uuid"
DASHES = (8, 13, 18, 23)
"""Where the 36 characters of a UUID have them."""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that ``as_plain`` makes of values of another."""
    if pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if not isinstance(kind, pa.BaseExtensionType):
        return kind
    return pa.large_string() if kind.extension_name == UUID else plain_type(kind.storage_type)


def as_plain(values: pa.Array) -> pa.Array:
    """Values of an extension type as they are stored, JSON as its text; UUIDs as their 36 characters; bytes of a fixed length as
    any bytes; others as they are.
    """
    if not isinstance(values.type, pa.BaseExtensionType):
        return values.cast(pa.large_binary()) if pa.types.is_fixed_size_binary(values.type) else values
    return _uuids_as_text(values.storage) if values.type.extension_name == UUID else as_plain(values.storage)


def chosen(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The columns and paths *names* of a batch, as ``as_plain`` has them; others may come with them."""
    if not set(batch.schema.names).issuperset(names):
        batch = pa.RecordBatch.from_arrays([column_at(batch, name) for name in names], names=list(names))
    if all(plain_type(kind) is kind for kind in batch.schema.types):
        return batch
    return pa.RecordBatch.from_arrays(list(map(as_plain, batch.columns)), names=batch.schema.names)


def _uuids_as_text(stored: pa.FixedSizeBinaryArray) -> pa.LargeStringArray:
    count, digits = len(stored), np.frombuffer(b"0123456789abcdef", np.uint8)
    data = np.frombuffer(stored.buffers()[1] or b"", np.uint8)[16 * stored.offset : 16 * (stored.offset + count)]
    text = np.full((count, 36), ord("-"), np.uint8)
    text[:, [i for i in range(36) if i not in DASHES]] = digits[np.stack([data >> 4, data & 15], 1)].reshape(count, 32)
    offsets = np.arange(0, 36 * count + 1, 36, dtype=np.int64)
    texts = pa.LargeStringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1)))
    nothing = pa.scalar(None, pa.large_string())
    return pa.compute.if_else(stored.is_null(), nothing, texts) if stored.null_count else texts


def _as_float(value: float, name: str, file: str) -> float:
    try:
        if (found := float(value)) == value or isinstance(value, float):
            return found
    except OverflowError:
        pass
    raise _not_a_float(value, name, file)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, or bytes that may be text."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()) or is_view(kind)


def is_view(kind: pa.DataType) -> bool:
    """Whether texts or bytes of this type are views of data in another buffer."""
    return kind in (pa.string_view(), pa.binary_view())


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists of messages."""
    return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type))


BOUNDARY, NUL, ESCAPED_NUL = b"\0\2", b"\0", b"\0\1"
"""The mark between a prompt and its completion in a text. A zero of the prompt's own is written so that it can't be taken for
the mark.
"""


def with_completions(prompts: pa.Array, completions: pa.Array) -> pa.Array:
    """Each prompt and its completion as one text, which `prompts_and_completions` divides again; null if one of them is."""
    before, behind = (to_large(values).cast(pa.large_binary()) for values in (prompts, completions))
    before = pa.compute.replace_substring(before, NUL, ESCAPED_NUL)
    return pa.compute.binary_join_element_wise(before, behind, pa.scalar(BOUNDARY, pa.large_binary()))


def prompts_and_completions(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """The prompt and the completion of each of n texts, in order: 2 n texts."""
    parts = pa.compute.split_pattern(texts, BOUNDARY.decode(), max_splits=1).flatten()
    count = len(texts)
    prompts, completions = parts.take(pa.array(np.arange(0, 2 * count, 2))), parts.take(pa.array(np.arange(1, 2 * count, 2)))
    prompts = pa.compute.replace_substring(prompts, ESCAPED_NUL.decode(), NUL.decode())
    both = pa.concat_arrays([prompts, completions])
    return both.take(pa.array(np.arange(2 * count).reshape(2, count).T.reshape(-1)))


KEPT_NULLS = ("role", "content")
"""Keys of a message that may be null. Others are not there then: a column of messages has every key that one of them has."""


def messages_as_json(values: pa.Array) -> pa.Array:
    """Lists of messages as JSON."""
    encoder, colon = msgspec.json.Encoder(), b": "
    encode = encoder.encode
    with contextlib.suppress(UnicodeDecodeError):
        if (texts := _texts_as_json(values, encoder)) is not None:
            return texts

    def message(one: JsonObject | None) -> bytes:
        """As ``json_bytes``, in half of the time if the values are text."""
        if not one:
            return json_bytes(one)
        some = [pair for pair in one.items() if pair[1] is not None or pair[0] in KEPT_NULLS]
        return b"{" + b", ".join([encode(k) + colon + (encode(v) if type(v) is str else json_bytes(v)) for k, v in some]) + b"}"

    found = [one if one is None else b"[" + b", ".join(map(message, one)) + b"]" for one in _as_objects(values)]
    return kept.texts_as_arrow(found, pa.large_binary())


def _texts_as_json(values: pa.Array, encoder: msgspec.json.Encoder) -> pa.Array | None:
    """The same if all values of the messages are texts: it makes one Python string a value, and no other object. None if they are
    not, or something is null.
    """
    messages = values.flatten()
    columns, parts = messages.flatten(), list[Any]()
    if (
        not 0 < len(messages.type) == len({field.name for field in messages.type})
        or any(column.type not in (pa.string(), pa.large_string()) for column in columns)
        or any(some.null_count for some in (values, messages, *columns))
    ):
        return None
    texts, join = functools.partial(kept.texts_as_arrow, kind=pa.large_binary()), pa.compute.binary_join_element_wise
    for number, (field, column) in enumerate(zip(messages.type, columns, strict=True), 1):
        parts.append(texts([(b" " if parts else b"{") + encoder.encode(field.name) + b": "])[0])
        # No string of JSON has a line's end within. What stands behind a value takes the place of its own.
        lines = encoder.encode_lines(column.to_pylist())
        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1
        buffers = [np.append(0, ends), lines.replace(b"\n", b"," if number < len(columns) else b"}")]
        parts.append(pa.Array.from_buffers(pa.large_binary(), len(column), [None, *map(pa.py_buffer, buffers)]))
    opening, between, closing, nothing = texts([b"[", b", ", b"]", b""])
    starts = values.offsets.cast(pa.int64())
    lists = pa.LargeListArray.from_arrays(pa.compute.subtract(starts, starts[0]), join(*parts, nothing))
    return join(opening, pa.compute.binary_join(lists, between), closing, nothing)


def with_tools(messages: pa.Array, tools: pa.Array) -> pa.Array:
    """Conversations and their tools as texts: JSON both, with BOUNDARY in between; null if there are no messages. In a column
    that is not JSON yet, keys with null are left out at every depth: such a column has every key that any of its rows has.
    """
    before, behind = (
        kept.texts_as_arrow(
            [None if one is None else json_bytes([_known(item, KEPT_NULLS) for item in one]) for one in _as_objects(values)],
            pa.large_binary(),
        )
        if is_messages(values.type)
        else values
        for values in (messages, tools)
    )
    nothing = pa.scalar(b"", pa.large_binary())
    return with_completions(before, pa.compute.coalesce(to_large(behind).cast(pa.large_binary()), nothing))


def _known(value: Any, kept_nulls: Sequence[str] = ()) -> Any:
    """A value without keys that are null, at any depth."""
    if isinstance(value, list):
        return [_known(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _known(item) for key, item in value.items() if item is not None or key in kept_nulls}


def _as_objects(values: pa.Array) -> list[Any]:
    """Lists of structs as Python objects. Times are text there. Text that is not UTF-8 is bytes."""
    kind = _replaced(values.type, _plain_times)
    if kind != values.type:
        utc = lambda one: pa.timestamp(one.unit, "UTC") if pa.types.is_timestamp(one) and one.tz is not None else one  # noqa: E731
        values = values.cast(_replaced(values.type, utc)).cast(kind)
    try:
        found: list[Any] = values.to_pylist()
    except UnicodeDecodeError:
        found = values.cast(_replaced(kind, lambda one: pa.large_binary() if is_text(one) else one)).to_pylist()
    return found


def _replaced(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with other types in its lists and structs."""
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_replaced(kind.field(i).type, leaf)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        field = kind.value_field.with_type(_replaced(kind.value_type, leaf))
        return pa.large_list(field) if pa.types.is_large_list(kind) else pa.list_(field)
    return leaf(kind)


def _plain_times(kind: pa.DataType) -> pa.DataType:
    """Text for dates and times, and the number of a duration: Python has no nanoseconds."""
    if pa.types.is_duration(kind):
        return pa.int64()
    return pa.string() if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind) else kind


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8, in which each lone surrogate, and each byte of no UTF-8, becomes a byte that no UTF-8 has, to be
    seen later.
    """
    return utf8(json.dumps(value, ensure_ascii=False, default=_as_text))


def _as_text(value: Any) -> str:
    """The text of a value that JSON does not have."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


SURROGATE = re.compile("[\ud800-\udfff]")


def utf8(text: str) -> bytes:
    """UTF-8 of a string, in which each lone surrogate becomes a byte that no UTF-8 has, to be seen later."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return SURROGATE.sub("\udcff", text).encode("utf-8", "surrogateescape")


def neighbours(sizes: list[int], most: int) -> Iterator[IntPair]:
    """Ranges ``(start, stop)`` of neighbours whose sizes add up to *most* or less, or that have a single member."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts whose texts and ids, written out, have BATCH_BYTES at most, or that have a single row."""
    ends = np.cumsum(sum((_lengths(column) for column in batch.columns), np.zeros(len(batch), np.int64)))
    start = 0
    while start < len(batch):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limits.BATCH_BYTES, "right")))
        yield batch.slice(start, stop - start)
        start = stop


def _lengths(values: pa.Array) -> Int64s:
    """Bytes of each text, 0 of a null: int64[n]."""
    if pa.types.is_dictionary(values.type):
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return _lengths(as_plain(values.dictionary))[indices] if len(values.dictionary) else np.zeros(len(values), np.int64)
    if not is_text(values.type):
        return np.full(len(values), 8)
    if is_view(values.type):
        views = values.buffers()[1]
        return np.frombuffer(views, np.int32, views.size // 4)[4 * values.offset :: 4][: len(values)].astype(np.int64)
    offset_type = np.int64 if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type) else np.int32
    buffer = values.buffers()[1]
    if buffer is None:
        return np.zeros(len(values), np.int64)
    # By numpy: Arrow imports pandas before it makes its first array or scalar, which takes longer than a small build.
    offsets = np.frombuffer(buffer, offset_type, values.offset + len(values) + 1)[values.offset :]
    lengths = np.diff(offsets).astype(np.int64)
    if values.null_count:
        lengths[np.asarray(values.is_null())] = 0
    return lengths


def bounded(read: Callable[[TextFile, Range], Iterator[Rows]]) -> Callable[[TextFile, Range], Iterator[Rows]]:
    """A reader with a limit, for a format whose files may expand to any amount of text. ValueError if it is too much."""

    def read_within(file: TextFile, part: Range) -> Iterator[Rows]:
        text_bytes = 0
        for rows in read(file, part):
            text_bytes += int(_lengths(rows.texts).sum()) + len(rows.texts)  # empty texts and nulls take time, too
            text_bytes += 0 if rows.columns is None else rows.columns.nbytes
            limits.check_expansion(text_bytes, file.size, file.max_expansion, file.name)
            yield rows

    return read_within


def to_large(values: pa.Array) -> pa.LargeStringArray:
    """Text or bytes of any Arrow type as large_string, nulls as they are; bytes are not checked to be UTF-8."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.large_string())
    if pa.types.is_string(values.type) and len(values) and not values.null_count:
        # Without the library's compute functions, which take long to import.
        _, offsets, data = values.buffers()
        window = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
        return pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(window.astype(np.int64)), data)
    if values.type in (pa.binary(), pa.large_binary(), pa.binary_view()):
        values = values.cast(pa.large_binary())
        return pa.Array.from_buffers(pa.large_string(), len(values), values.buffers(), offset=values.offset)
    return values.cast(pa.large_string())


def as_unicode(values: pa.Array) -> tuple[pa.LargeStringArray, list[int]]:
    """Values as text, with U+FFFD for bytes that are not UTF-8, and the indices of the texts that had such bytes."""
    texts = to_large(values)
    try:
        texts.validate(full=True)
        return texts, []
    except pa.ArrowInvalid:
        pass
    # Python objects, but only of a batch that is known to be bad.
    wrong, mended = [], []
    data = texts.cast(pa.large_binary())
    data.validate(full=True)  # not text is one thing, offsets that lead astray another
    for i, value in enumerate(data.to_pylist()):
        text = None if value is None else value.decode("utf-8", "replace")
        if text is not None and text.encode() != value:
            wrong.append(i)
        mended.append(text)
    return pa.array(mended, pa.large_string()), wrong


def ids_as_text(ids: pa.Array) -> pa.LargeStringArray:
    """Ids as text, integers by their digits."""
    return to_large(ids.cast(pa.string()) if pa.types.is_integer(ids.type) else ids)


def keys_of(texts: pa.LargeStringArray, ids: pa.Array | None) -> UInt64s:
    """Keys of documents without nulls, uint64[n]: of their ids, or else of their texts."""
    return document_keys(*text_buffers(texts if ids is None else ids_as_text(ids)))


def text_buffers(texts: pa.LargeStringArray) -> tuple[UInt8s, Int64s]:
    """The bytes and offsets of an Arrow array of texts without nulls: uint8[n], int64[m + 1]. No copy."""
    _, offsets, data = texts.buffers()
    window = np.zeros(1, np.int64)
    if offsets:
        window = np.frombuffer(offsets, np.int64, offsets.size // 8)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), window


Span = IntPair
"""Bytes ``start:stop`` of a file."""


class Outline(NamedTuple):
    """How files of a format are cut and read without most of their bytes. Each ends with a footer, its length in 4 bytes, and
    ``end``. ``heads``: the spans that say where columns are in a range, or in the file. A file that has these alone can be cut.
    ``to_read``: the spans that reading a range needs in addition.
    """

    end: bytes
    to_read: Callable[[TextFile, Range], Iterator[Span]]
    heads: Callable[[TextFile, Range | None], Iterator[Span]] = lambda file, part: iter(())


class SourceFormat(NamedTuple):
    """A format of source files.

    ``ranges`` checks a file and cuts it into ranges of about this many bytes of text. ``read`` yields the rows of a range.
    ``rows_before`` counts the rows of the file before a range; None if these are not here. ``holding`` yields ranges that hold
    all of some rows, each with its first row; without it the whole file is one range. ``columns``: the names of the columns,
    None if a file does not state them; without it files have no columns. ``outline``: of a format that is read by ranges.
    """

    endings: tuple[str, ...]
    ranges: Callable[[TextFile, int], Iterator[Range]]
    read: Callable[[TextFile, Range], Iterator[Rows]]
    rows_before: Callable[[TextFile, Range], int | None]
    begins: tuple[bytes, ...] = ()
    holding: Callable[[TextFile, Any], Iterator[tuple[Range, int]]] | None = None
    columns: Callable[[TextFile], Sequence[str] | None] = lambda file: ()
    outline: Outline | None = None
