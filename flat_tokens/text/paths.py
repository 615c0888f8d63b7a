"""Columns by path: ``doc.text`` is the field ``text`` of the structs in the column ``doc``, unless a column has that very name.

A field's own name may have dots, too: of ``a.b.c`` the field ``c`` of ``a.b`` comes before the field ``b.c`` of ``a``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flat_tokens.extras import pa

ABSENT = object()
"""For a value that is not there."""


def value_at(value: Mapping[str, Any], path: str) -> Any:
    """The value at a path in a mapping of JSON; ABSENT if there is none."""
    if path in value:
        return value[path]
    for name, rest in _divisions(path):
        inner = value.get(name)
        if isinstance(inner, dict) and (found := value_at(inner, rest)) is not ABSENT:
            return found
        if name in value and inner is None:
            return None
    return ABSENT


def _divisions(path: str) -> Iterator[tuple[str, str]]:
    """A path as a column and the path within it, in each way, the longest column first."""
    at = path.rfind(".")
    while at > 0:
        yield path[:at], path[at + 1 :]
        at = path.rfind(".", 0, at)


def steps_of(fields: Mapping[str, pa.DataType], path: str) -> list[str] | None:
    """The names on the way to a path in columns of these types: one alone if it is a column; None if there is no such path."""
    if path in fields:
        return [path]
    for name, rest in _divisions(path):
        kind = fields.get(name)
        if kind is not None and pa.types.is_struct(kind):
            inner = steps_of({kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}, rest)
            if inner is not None:
                return [name, *inner]
    return None


def fields_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The types of a schema's columns, by their names."""
    return dict(zip(schema.names, schema.types, strict=True))


def with_paths(schema: pa.Schema, wanted: Sequence[str]) -> pa.Schema:
    """A schema with a column for each path of *wanted* that is not one already and leads to a field."""
    names = set(schema.names)
    if names.issuperset(wanted):
        return schema
    fields = fields_of(schema)
    for path in wanted:
        if path not in names and (steps := steps_of(fields, path)) is not None:
            kind = fields[steps[0]]
            for name in steps[1:]:
                kind = kind.field(name).type
            schema = schema.append(pa.field(path, kind))
    return schema


def column_at(batch: pa.RecordBatch, path: str) -> pa.Array:
    """The values at a path of a batch that has it; null if a struct on the way is null."""
    if path in batch.schema.names:
        return batch.column(path)
    first, *steps = steps_of(fields_of(batch.schema), path) or [path]
    values = batch.column(first)
    for name in steps:
        values = values.flatten()[values.type.get_field_index(name)]
    return values


def nearest_path(schema: pa.Schema, name: str) -> str | None:
    """The path to a field of this name, in a struct of any depth; None if there is none."""
    fields = fields_of(schema)
    while fields:
        structs = {path: kind for path, kind in fields.items() if pa.types.is_struct(kind)}
        fields = {
            f"{path}.{kind.field(i).name}": kind.field(i).type for path, kind in structs.items() for i in range(kind.num_fields)
        }
        for path in fields:
            if path.endswith(f".{name}"):
                return path
    return None


def has_paths(names: Collection[str]) -> bool:
    """Whether any of these columns may be a path."""
    return any("." in name for name in names)
