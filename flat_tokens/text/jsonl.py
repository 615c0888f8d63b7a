"""JSON lines: a block at a time by Arrow's parser; a block that it does not take, line by line."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flat_tokens.annotations import Int64s, JsonFacts, JsonObject, UInt8s
from flat_tokens.columns import FLOAT64_HAS_ALL
from flat_tokens.extras import LazyModule, pa
from flat_tokens.text import limits
from flat_tokens.text.paths import ABSENT, column_at, has_paths, value_at
from flat_tokens.text.plain import BOM, Separator, blocks, byte_ranges
from flat_tokens.text.rows import (
    BOUNDARY,
    ESCAPED_NUL,
    NUL,
    SURROGATE,
    BadRowError,
    CollectedRows,
    Range,
    Rows,
    SourceFormat,
    TextFile,
    check_names,
    json_bytes,
    passed_over,
    too_long,
    utf8,
)

if TYPE_CHECKING:
    import msgspec
else:
    msgspec = LazyModule("msgspec", "reading conversations in JSON lines")

MAX_BRACKETS = 1000
"""Lines with more brackets outside of strings go through the parser that survives deep nesting."""

_BEFORE_BRACKETS = np.isin(np.arange(256), list(b"[{:, \t\r\n"))
"""By its value, whether JSON allows a byte before a bracket that opens, outside of strings."""

LINE_FEED = Separator(b"\n")
LINES_LOOKED_AT = 100
JSON_TYPES = {bool: "bool_", int: "int64", float: "float64", str: "string"}
Types: TypeAlias = "dict[str, pa.DataType]"

NULL_BESIDE_OBJECT = re.compile(rb"\}[ \t\r]*null")

codecs.register_error("lone-surrogate", lambda error: ("\ud800", error.end))  # type: ignore[attr-defined]


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    start = seen = 0
    limit = limits.longest_line(file.max_bytes)
    types: Types = {}
    for block, whole in blocks(file, part, LINE_FEED, limit):
        seen += len(block)
        if whole:
            types = _types_to_try(block, file, types)
            rows = _parse_fast(block, file, limit, start, seen, types) or _parse_lines(block, file, limit, start, seen)
            fields = rows.columns.schema if rows.columns is not None else ()
            found = {one.name: one.type for one in fields if not pa.types.is_null(one.type)}
            # The parser makes texts of this kind.
            types |= {name: pa.string() if pa.types.is_large_string(kind) else kind for name, kind in found.items()}
        else:
            rows = passed_over(file, start, seen)
        yield rows
        start = rows.end


def parse_together(block: bytes, file: TextFile) -> Rows | None:
    """The lines of several files of a source, of which *file* is one. None if each file alone might give another result: a line
    needs a closer look, or a kept column has fractions, which change the kind of integers next to them.
    """
    rows = _parse_alone(block, file)
    has_fractions = rows is not None and rows.columns is not None and pa.float64() in rows.columns.schema.types
    return None if has_fractions else rows


def parse_block(block: bytes, file: TextFile) -> Rows:
    """The lines of a file that is one block."""
    rows = _parse_alone(block, file) if block else None
    return rows or _parse_lines(block, file, limits.longest_line(file.max_bytes), 0, len(block))


def _parse_alone(block: bytes, file: TextFile) -> Rows | None:
    limit = limits.longest_line(file.max_bytes)
    return _parse_fast(block, file, limit, 0, len(block), _types_to_try(block, file, {}))


def _types_to_try(block: bytes, file: TextFile, known: Types) -> Types:
    """The types of the kept columns: those of the blocks before, else of the first lines that have a value."""
    left = [name for name in file.kept_here if name not in known]
    types = dict(known)
    for line in block[: limits.LOOK_BYTES].split(b"\n")[:LINES_LOOKED_AT] if left else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name in left if isinstance(value, dict) else ():
            if name not in types and (kind := JSON_TYPES.get(type(value_at(value, name)))) is not None:
                types[name] = getattr(pa, kind)()
    return types


def _parse_fast(block: bytes, file: TextFile, limit: int, start: int, seen: int, types: Types) -> Rows | None:
    """The lines of a block by Arrow's parser; None if it does not take a line, so that each is looked at alone. *types*: of kept
    columns and of ids, that are tried first; the type of these ids is added.
    """
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (
        file.has_messages
        or (ends - starts).max() > limit
        or not _one_object_a_line(block, data, starts, ends)
        or _deeply_nested(block, data, starts, ends)
        or (has_paths(file.columns) and _may_have_dots(block, file.columns))
    ):
        return None
    has_own_id = file.id_column not in (None, *file.text_columns)
    id_types = sorted((pa.string(), pa.int64()), key=lambda kind: kind != types.get(file.id_column or "", pa.string()))
    kept = {name: types.get(name, pa.null()) for name in file.kept_here}
    with_fractions = {name: pa.float64() if one == pa.int64() else one for name, one in kept.items()}
    tried = [kept] if kept == with_fractions else [kept, with_fractions]
    for kind, beside in itertools.product(id_types if has_own_id else id_types[:1], tried):
        own_id = {str(file.id_column): kind} if has_own_id else {}
        own = {**dict.fromkeys(file.text_columns, pa.string()), **own_id}
        fields = {**beside, **own}
        try:
            table = pa.json.read_json(
                pa.BufferReader(block),
                pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
                pa.json.ParseOptions(_nested(fields), newlines_in_values=False, unexpected_field_behavior="ignore"),
            )
            (batch,) = table.combine_chunks().to_batches()
            columns = {name: column_at(batch, name) for name in fields}
            for column in columns.values():
                column.validate(full=True)
        except pa.ArrowException:
            continue
        if table.num_rows != len(ends):  # several objects on a line
            return None
        fractions = [columns[name].to_numpy(zero_copy_only=False) for name in beside if columns[name].type == pa.float64()]
        if any((np.abs(some) >= FLOAT64_HAS_ALL).any() for some in fractions):  # integers, which Arrow's parser may have rounded
            return None
        end = start + len(ends)
        ids = columns[file.id_column] if file.id_column else None
        rows = Rows(file.texts(columns), ids, np.arange(start, end), end, seen, columns=file.kept(columns, len(ends)))
        needed = [columns[name] for name in own]
        nulls = {int(i) for values in needed if values.null_count for i in np.flatnonzero(values.is_null())}
        types |= own_id
        return _without_faults(rows, {i: _fault_of(block[starts[i] : ends[i]], file) for i in sorted(nulls)})
    return None


def _may_have_dots(block: bytes, paths: Sequence[str]) -> bool:
    """Whether names of keys may contain the dots of a path: then each line decides what the path means."""
    if b"\\u002" in block:
        return True
    for path in paths:
        parts = path.split(".")
        spans = ((i, k) for i in range(len(parts)) for k in range(i + 2, len(parts) + 1))
        if any(b'"%b"' % ".".join(parts[i:k]).encode(errors="replace") in block for i, k in spans):
            return True
    return not all(all(path.split(".")) for path in paths)


def _nested(fields: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema of columns and paths as lines have them."""
    tree: dict[str, Any] = {}
    for path, kind in fields.items():
        *structs, name = path.split(".")
        inner = tree
        for struct in structs:
            inner = inner.setdefault(struct, {})
            if not isinstance(inner, dict):
                raise pa.ArrowInvalid(f"{path!r} is within a column")
        if name in inner:
            raise pa.ArrowInvalid(f"{path!r} has columns within")
        inner[name] = kind
    return pa.schema(_as_types(tree))


def _as_types(tree: Mapping[str, Any]) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.struct(_as_types(kind)) if isinstance(kind, dict) else kind) for name, kind in tree.items()]


def _without_faults(rows: Rows, looked_at: dict[int, tuple[str, str] | None]) -> Rows:
    """The rows without those of *looked_at* that have a fault: a null may be there, or its key is missing."""
    if not (found := {i: fault for i, fault in looked_at.items() if fault}):
        return rows
    keep = np.ones(len(rows.rows), bool)
    keep[list(found)] = False
    texts, ids = (None if values is None else values.filter(pa.array(keep)) for values in (rows.texts, rows.ids))
    faults = tuple((int(rows.rows[i]), *fault) for i, fault in found.items())
    columns = None if rows.columns is None else rows.columns.filter(pa.array(keep))
    return rows._replace(texts=texts, ids=ids, rows=rows.rows[keep], faults=faults, columns=columns)


def _one_object_a_line(block: bytes, data: UInt8s, starts: Int64s, ends: Int64s) -> bool:
    """Whether each line begins and ends with an object, and no null follows an object. Arrow's parser does not see lines: it
    takes blank ones and values that run over them, and a null between objects ends the process.
    """
    last = ends - 1
    last = last - (data[last] == ord("\r"))
    whole = (data[starts] == ord("{")).all() and (data[last] == ord("}")).all()
    return bool(whole) and not (b"null" in block and NULL_BESIDE_OBJECT.search(block))


def _deeply_nested(block: bytes, data: UInt8s, starts: Int64s, ends: Int64s) -> bool:
    """Whether a line has so many brackets outside of its strings that it could be nested too deep. Texts have many, too."""
    brackets = (data | 0x20) == ord("{")  # '[' and '{' differ in this bit
    if np.count_nonzero(brackets) <= MAX_BRACKETS:
        return False
    places = np.flatnonzero(brackets)
    places = places[_BEFORE_BRACKETS[data[places - 1]]]  # what stands after anything else ends the parsing
    counts = np.diff(np.searchsorted(places, starts), append=len(places))
    lines = (block[starts[i] : ends[i]] for i in np.flatnonzero(counts > MAX_BRACKETS))
    return any(_brackets_outside_strings(line) > MAX_BRACKETS for line in lines)


def _brackets_outside_strings(line: bytes) -> int:
    data = np.frombuffer(line, np.uint8)
    quotes, backslash = np.flatnonzero(data == ord('"')), ord("\\")
    escaped = data[quotes - 1] == backslash
    if (data[quotes[escaped] - 2] == backslash).any():  # an escaped backslash may be before the quote
        return _brackets_outside_strings(line.replace(rb"\\", b""))
    places = np.flatnonzero((data | 0x20) == ord("{"))
    return int(np.count_nonzero(np.searchsorted(quotes[~escaped], places) % 2 == 0))


def _parse_lines(block: bytes, file: TextFile, limit: int, start: int, seen: int) -> Rows:
    """The lines of a block one by one, with what is wrong with each. Blank lines are not documents, but they are rows."""
    collected = CollectedRows(file)
    fast = _conversations(file) if file.has_messages and not has_paths(file.columns) else None
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for row, line in enumerate(lines, start):
        if not line.strip():
            continue
        try:
            if len(line) > limit:
                raise BadRowError("too_long", too_long(file.max_bytes + 1, file.max_bytes))
            text, identity, kept = (fast and fast(line)) or _parse_line(line, file)
            collected.add(row, text, identity, kept)
        except BadRowError as error:
            collected.faults.append((row, *error.fault))
    return collected.rows(start + len(lines), seen)


Line: TypeAlias = "tuple[bytes | None, bytes | None, tuple[Any, ...]]"
"""Text and id of one line, and its values of the kept columns."""


def _conversations(file: TextFile) -> Callable[[bytes], Line | None]:
    """Reads lines with conversations as `_parse_line` does, in half of the time. None for what that has to look at: numbers with
    a fraction, which Python writes in its own way, and all that may be a fault.
    """
    columns, own, identity, kept = tuple(file.columns), file.text_columns, file.id_column, file.kept_here
    fields = [(f"of_{i}", Any, msgspec.field(name=column, default=None)) for i, column in enumerate(columns)]
    decode = msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False), float_hook=int).decode  # int takes no fraction
    encode, spaced, values_of = msgspec.json.Encoder().encode, msgspec.json.format, msgspec.structs.astuple

    def read(line: bytes) -> Line | None:
        try:
            values = dict(zip(columns, values_of(decode(line)), strict=True))
            lists = [values[column] for column in own]
            if any(type(one) is not list for one in lists):
                return None
            texts = [spaced(encode(one), indent=0) for one in lists]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        key = values[identity] if identity else ""
        if type(key) not in (str, int):
            return None
        return _together(texts), str(key).encode() if identity else None, tuple([values[name] for name in kept])

    return read


def _number(written: str) -> float | Decimal:
    """A number with a fraction or an exponent; a decimal if float64 has none so large."""
    if math.isfinite(found := float(written)):
        return found
    try:
        return Decimal(written)
    except ArithmeticError:
        raise ValueError(f"no number is as large as {written[:40]}") from None


def _parse_line(line: bytes, file: TextFile) -> Line:
    return row_of(object_in(line, "the line"), file)


def _fault_of(line: bytes, file: TextFile) -> tuple[str, str] | None:
    """The reason and the detail for which a line cannot be read; None if it can be."""
    try:
        _parse_line(line, file)
    except BadRowError as error:
        return error.fault
    return None


def object_in(data: bytes, what: str) -> JsonObject:
    """The object of JSON in *data*, which is *what*. BadRowError if it is something else."""
    try:
        value = json.loads(data.decode("utf-8", "lone-surrogate"), parse_float=_number)
    except RecursionError:
        raise BadRowError("malformed", f"{what} is JSON nested too deep") from None
    except ValueError as error:
        # The decoder counts lines within the text that it was given, which mostly is one line.
        is_one_line = isinstance(error, json.JSONDecodeError) and error.lineno == 1
        why = f"{error.msg.removesuffix(' at')} at column {error.colno}" if is_one_line else error  # type: ignore[attr-defined]
        raise BadRowError("malformed", f"{what} is not JSON ({why})") from error
    if not isinstance(value, dict):
        raise BadRowError("wrong_type", f"{what} is a JSON {_json_type(value)}, not an object")
    return value


def row_of(value: JsonObject, file: TextFile) -> Line:
    """The row of an object, which a line is. BadRowError if it is not one."""
    needed = (column for column in file.text_columns if column != file.tools_column)  # a conversation may do without tools
    for column, reason in (*((column, "null") for column in needed), (file.id_column, "null_id")):
        if column is not None and value_at(value, column) is ABSENT:
            raise BadRowError(reason, f"the line has no key {column!r}")
    texts = [_value(value, column) for column in file.text_columns]
    for column, text in zip(file.text_columns, texts, strict=True):
        if text is not None and not isinstance(text, (str, list) if file.has_messages else str):
            wanted = f"an array of {'tools' if column == file.tools_column else 'messages'}" if file.has_messages else "a string"
            remedy = "; a list of messages is source.messages_column" if isinstance(text, list) else ""
            raise BadRowError("wrong_type", f"{column!r} is a JSON {_json_type(text)}, not {wanted}{remedy}")
    identity = _value(value, file.id_column) if file.id_column else None
    if identity is not None and type(identity) not in (str, int):
        raise BadRowError("wrong_type", f"{file.id_column!r} is a JSON {_json_type(identity)}, not a string or an integer")
    if isinstance(identity, str) and SURROGATE.search(identity):
        raise BadRowError("invalid_unicode", f"{file.id_column!r} is not valid UTF-8")
    kept = tuple(_value(value, name) for name in file.kept_here)
    if file.tools_column is not None and texts[-1] is None:
        texts[-1] = ""
    try:
        parts = [utf8(text) if isinstance(text, str) else json_bytes(text) for text in texts]
    except RecursionError:  # writing JSON goes a little less deep than reading it
        raise BadRowError("malformed", "the line is JSON nested too deep") from None
    return None if None in texts else _together(parts), None if identity is None else str(identity).encode(), kept


def _value(line: JsonObject, path: str) -> Any:
    """The value at a path of a line; None if there is none."""
    found = value_at(line, path)
    return None if found is ABSENT else found


def _together(parts: Sequence[bytes]) -> bytes:
    """A document of a text, or of two."""
    return parts[0] if len(parts) == 1 else parts[0].replace(NUL, ESCAPED_NUL) + BOUNDARY + parts[-1]


def _json_type(value: Any) -> str:
    names: Iterable[tuple[type, str]] = ((bool, "boolean"), (Number, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object" if value is not None else "null")


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    # The keys of the first lines are checked. Lines that are not JSON objects are left to the policy for documents.
    keys = _first_keys(file, set(file.columns))
    if keys:
        check_names(file, keys)
    yield from byte_ranges(file, LINE_FEED, range_bytes)


def _first_keys(file: TextFile, wanted: set[str]) -> dict[str, None]:
    """The keys of the first lines, until they have all that are *wanted*."""
    with file.open() as opened:
        head = opened.read(limits.LOOK_BYTES).removeprefix(BOM)
    return keys_of_lines(head if file.size <= limits.LOOK_BYTES else head[: head.rfind(b"\n") + 1], wanted)


def keys_of_lines(whole: bytes, wanted: set[str]) -> dict[str, None]:
    """The keys of lines, until they have all that are *wanted*."""
    keys: dict[str, None] = {}
    for line in whole.splitlines()[:1000]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            keys |= keys_of_row(value, wanted)
            if keys.keys() >= wanted:
                break
    return keys


def keys_of_row(value: JsonFacts, wanted: set[str]) -> dict[str, None]:
    """The keys of an object, and the paths of *wanted* that lead to a value of it."""
    paths = (path for path in wanted if path not in value and value_at(value, path) is not ABSENT)
    return {**dict.fromkeys(value), **dict.fromkeys(paths)}


def columns(file: TextFile) -> list[str] | None:
    return list(_first_keys(file, set(file.kept_columns))) or None


def rows_before(file: TextFile, part: Range) -> int:
    return lines_within(file, 0, part.start)


def lines_within(file: TextFile, start: int, stop: int) -> int:
    """The lines of the bytes *start* to *stop* of a file, of which the last may have no end."""
    count, last = 0, b"\n"
    with file.open() as opened:
        opened.seek(start)
        for at in range(start, stop, limits.BATCH_BYTES):
            block = opened.read(min(limits.BATCH_BYTES, stop - at))
            count, last = count + block.count(b"\n"), block[-1:] or last
    return count + (last != b"\n")


JSONL = SourceFormat((".jsonl", ".ndjson", ".json"), ranges, read, rows_before, columns=columns)
