"""Mutations of Parquet files: of the structs in them, which Thrift's compact protocol writes. Such values have no lengths around
them, so that one is replaced in its place.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from flat_tokens.options import varint
from tests.fuzz.mutators import INTEGERS, havoc

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def packed(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 70) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def zigzag(value: int) -> bytes:
    return packed(value * 2 if value >= 0 else -value * 2 - 1)


COUNTS = (0, 1, 14, 15, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1)
KINDS = (TRUE, BYTE, I64, DOUBLE, BINARY, LIST, STRUCT)
LISTS = [bytes([240 | of]) + packed(count) for of in KINDS for count in COUNTS]
NESTED = [bytes([16 | LIST]) * depth + bytes([I32]) for depth in (1, 9, 100, 5000)]
STRANGE = {
    **{kind: [b""] for kind in (TRUE, FALSE, 13, 14, 15)},
    BYTE: [b"\0", b"\x80"],
    I32: [*map(zigzag, INTEGERS)],
    I64: [*map(zigzag, INTEGERS)],
    DOUBLE: [bytes(8)],
    BINARY: [packed(count) + b"abc" for count in (3, 1 << 31, 1 << 62)],
    LIST: LISTS + NESTED * 6,
    SET: LISTS,
    MAP: [b"\0", b"\x01\x55\x02\x02", packed(1 << 40) + b"\x88"],
    STRUCT: [b"\x1c" * depth + bytes(depth + 1) for depth in (0, 1, 3)],
}
"""Values of each kind that nobody asked for."""


class Value(NamedTuple):
    """A value in ``data[start:stop]``. *head*: where the header of its field is; an item of a list has none, and the number 0."""

    kind: int
    head: int
    start: int
    stop: int
    number: int
    depth: int


def struct(data: bytes, at: int, depth: int = 0) -> tuple[list[Value], int]:
    """The values of the struct at *at*, each before those within it, and where it ends."""
    found, number = [], 0
    while kind := data[at] & 15:
        head, delta, at = at, data[at] >> 4, at + 1
        if not delta:
            delta, at = _integer(data, at)
            number = 0
        number += delta
        inner, stop = ([], at) if kind in (TRUE, FALSE) else _within(data, at, kind, depth)
        found += [Value(kind, head, at, stop, number, depth), *inner]
        at = stop
    return found, at + 1


def _within(data: bytes, at: int, kind: int, depth: int) -> tuple[list[Value], int]:
    """The values within another one, and where that ends."""
    if kind in (I16, I32, I64):
        return [], varint(data, at)[1]
    if kind == BINARY:
        length, at = varint(data, at)
        return [], at + length
    if kind == STRUCT:
        return struct(data, at, depth + 1)
    if kind in (LIST, SET):
        of, found = data[at] & 15, []
        count, at = _count(data, at)
        if count > len(data):
            raise ValueError("a list of more items than bytes")
        for _ in range(count):
            inner, stop = _within(data, at, of, depth + 1)
            found += [Value(of, at, at, stop, 0, depth + 1), *inner]
            at = stop
        return found, at
    return [], at + {TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8}[kind]


def _count(data: bytes, at: int) -> tuple[int, int]:
    """Items of a list, and where the first one is."""
    return (data[at] >> 4, at + 1) if data[at] < 240 else varint(data, at + 1)


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = varint(data, at)
    return value >> 1 ^ -(value & 1), at


def changed(chance: random.Random, data: bytes) -> bytes:
    """A struct of which a value is another one or of another kind, has another count, is repeated or left out; or with a field
    that nobody asked for.
    """
    values, _ = struct(data, 0)
    kind, head, start, stop, *_ = chance.choice(values)
    what, of = chance.choice((0, 1, 2, 3, 4, *[5] * 7)), chance.choice([*STRANGE])
    strange = chance.choice(STRANGE[of])
    if what == 0:
        after = bytearray(data[stop:])
        if head < start and after[0] & 15 and (delta := (after[0] >> 4) + (data[head] >> 4)) < 16:
            after[0] = delta << 4 | after[0] & 15  # the next field keeps its number
        return data[:head] + after
    if what == 1:
        at = chance.choice([one.stop for one in values if one.head < one.start and data[one.stop] == 0])  # a struct's end
        return data[:at] + chance.choice((bytes([16 | of]), bytes([of]) + zigzag(30_000))) + strange + data[at:]
    if what == 2 and kind in (LIST, SET, BINARY):
        _, first = varint(data, start) if kind == BINARY else _count(data, start)
        items = b"" if kind == BINARY else bytes([240 | data[start] & 15])
        return data[:start] + items + packed(chance.choice(COUNTS)) + data[first:]
    if what == 3:
        field = bytes([data[head] & 240 | of]) + data[head + 1 : start] if head < start else b""
        return data[:head] + field + strange + data[stop:]
    if what == 4:
        return data[:stop] + data[head:stop] + data[stop:]
    new = data[start:stop]
    if kind in (I16, I32, I64):
        value, _ = _integer(data, start)
        new = zigzag(chance.choice((chance.choice(INTEGERS), value + 1, value - 1, value * 2, -value)))
    elif kind == BINARY:
        text = data[varint(data, start)[1] : stop]
        text = chance.choice((b"", text[:-1], text + b"x", b"\xff", text * 50))
        new = packed(len(text)) + text
    return data[:start] + new + data[stop:]


def parquet(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Mutations of a Parquet file without page indexes: of page headers and footer. All else is kept right, most of the time."""
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    try:
        pages, footer = _pages(data, end), data[end:-8]
    except (LookupError, RecursionError, StopIteration, ValueError):
        return havoc()(chance, data, pool)
    footers = 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        if page := chance.choice([None, *pages.values(), *pages.values()]):
            page[0] = changed(chance, page[0])
        else:
            footers += 1
    if chance.random() < 0.1 and pages:
        page = chance.choice([*pages.values()])
        page[1] = havoc()(chance, page[1], pool)
    out, moved = bytearray(b"PAR1"), {}
    for start, page in pages.items():
        moved[start] = len(out)
        out += b"".join(page)
    for one in reversed(struct(footer, 0)[0] if chance.random() < 0.7 else []):  # where columns begin
        if one.number in (9, 11) and one.kind == I64 and (at := _integer(footer, one.start)[0]) in moved:
            footer = footer[: one.start] + zigzag(moved[at]) + footer[one.stop :]
    for _ in range(footers):
        footer = changed(chance, footer)
    return bytes(out) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _pages(data: bytes, end: int) -> dict[int, list[bytes]]:
    """Header and body of each page, by where it begins."""
    if data[:4] + data[-4:] != b"PAR1PAR1" or not 4 <= end < len(data):
        raise ValueError("not a Parquet file")
    found, at = {}, 4
    while at < end:
        values, body = struct(data, at)
        stop = body + _integer(data, next(one.start for one in values if (one.depth, one.number) == (0, 3)))[0]
        if not body <= stop <= end:
            raise ValueError("not a page")
        found[at] = [data[at:body], data[body:stop]]
        at = stop
    return found
