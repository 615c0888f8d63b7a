"""Thrift's compact protocol, as Parquet files use it: parsed into a tree, changed, and written again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 70) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def zigzag(value: int) -> bytes:
    return varint(value * 2 if value >= 0 else -value * 2 - 1)


@dataclass
class Node:
    """A value: of *kind*, an integer, bytes, or children; a struct's children have the numbers of their fields."""

    kind: int
    value: Any = None
    children: list[tuple[int, Node]] = field(default_factory=list)
    of: int = 0
    count: int | None = None
    """Of a list: what it says that it has, if not what it has."""

    def field(self, *path: int) -> Node:
        here = self
        for number in path:
            here = dict(here.children)[number]
        return here

    def has(self, number: int) -> bool:
        return any(key == number for key, _ in self.children)

    def data(self) -> bytes:
        if self.kind in (TRUE, FALSE):
            return b""
        if isinstance(self.value, bytes) and self.kind != BINARY:
            return self.value
        if self.kind in (I16, I32, I64):
            return zigzag(self.value)
        if self.kind == BINARY:
            return varint(len(self.value) if self.count is None else self.count) + self.value
        if self.kind in (LIST, SET):
            count = len(self.children) if self.count is None else self.count
            head = bytes([count << 4 | self.of]) if 0 <= count < 15 else bytes([15 << 4 | self.of]) + varint(count)
            return head + b"".join(child.data() for _, child in self.children)
        out, before = bytearray(), 0
        for number, child in self.children:
            delta = number - before
            out += bytes([delta << 4 | child.kind]) if 0 < delta < 16 else bytes([child.kind]) + zigzag(number)
            out += child.data()
            before = number
        return bytes(out) + b"\0"

    def all(self) -> list[Node]:
        return [self, *(node for _, child in self.children for node in child.all())]

    def mutate(self, chance: random.Random, integers: Sequence[int]) -> None:
        """Change one value below this one, or its kind; or put a field in that nobody asked for."""
        node = chance.choice(self.all())
        kind = chance.randrange(6)
        if kind == 0 and node.children:
            node.children.pop(chance.randrange(len(node.children)))
        elif kind == 1 and node.kind == STRUCT:
            last = max((number for number, _ in node.children), default=0)
            node.children.append((chance.choice((last + 1, last + 20, 30_000)), strange(chance, integers)))
        elif kind == 2 and node.kind in (LIST, SET, BINARY):
            node.count = chance.choice((0, 1, 14, 15, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1))
        elif kind == 3 and node.children:
            at = chance.randrange(len(node.children))
            number, _ = node.children[at]
            node.children[at] = (number, strange(chance, integers))
        elif kind == 4 and node.children:
            node.children.append(chance.choice(node.children))
        elif node.kind in (I16, I32, I64):
            node.value = chance.choice((chance.choice(integers), node.value + 1, node.value - 1, node.value * 2, -node.value))
        elif node.kind == BINARY:
            node.value = chance.choice((b"", node.value[:-1], node.value + b"x", b"\xff", node.value * 50))


def strange(chance: random.Random, integers: Sequence[int], depth: int = 0) -> Node:
    """A value of any kind, such as a list that says to have 2**63 items."""
    kind = chance.choice((TRUE, FALSE, BYTE, I32, I64, DOUBLE, BINARY, LIST, LIST, SET, MAP, STRUCT, 13, 14, 15))
    if kind == BYTE:
        return Node(kind, bytes([chance.randrange(256)]))
    if kind == DOUBLE:
        return Node(kind, bytes(8))
    if kind == MAP:
        return Node(kind, chance.choice((b"\0", b"\x01\x55\x02\x02", varint(1 << 40) + b"\x88")))
    if kind in (I32, I64):
        return Node(kind, chance.choice(integers))
    if kind == BINARY:
        return Node(kind, b"abc", count=chance.choice((None, 1 << 31, 1 << 62)))
    if kind in (LIST, SET):
        of = chance.choice((TRUE, BYTE, I64, DOUBLE, BINARY, LIST, STRUCT))
        if depth < 3 and chance.random() < 0.3:  # lists in lists, perhaps very deep
            return Node(LIST, bytes([1 << 4 | LIST]) * chance.choice((1, 9, 100, 5000)) + bytes([I32]))
        return Node(kind, of=of, count=chance.choice((0, 1, 15, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1)))
    return Node(STRUCT, children=[(1, strange(chance, integers, depth + 1))] if kind == STRUCT and depth < 3 else [])


def parse(data: bytes, at: int) -> tuple[Node, int]:
    """The struct at *at*, and where it ends."""
    node, number = Node(STRUCT), 0
    while kind := data[at] & 15:
        delta = data[at] >> 4
        at += 1
        if delta:
            number += delta
        else:
            number, at = _zigzag(data, at)
        child, at = (Node(kind), at) if kind in (TRUE, FALSE) else _value(data, at, kind)
        node.children.append((number, child))
    return node, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Node, int]:
    if kind in (I16, I32, I64):
        value, at = _zigzag(data, at)
        return Node(kind, value), at
    if kind == BINARY:
        length, at = _varint(data, at)
        return Node(kind, data[at : at + length]), at + length
    if kind == STRUCT:
        return parse(data, at)
    if kind in (LIST, SET):
        count, of = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        if count > len(data):
            raise ValueError("a list of more items than bytes")
        node = Node(kind, of=of)
        for _ in range(count):
            child, at = (Node(BYTE, data[at : at + 1]), at + 1) if of in (TRUE, FALSE, BYTE) else _value(data, at, of)
            node.children.append((0, child))
        return node, at
    size = {BYTE: 1, DOUBLE: 8}[kind]
    return Node(kind, data[at : at + size]), at + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


@dataclass
class Page:
    start: int
    header: Node
    body: bytes


@dataclass
class ParquetFile:
    """A Parquet file without page indexes: its pages, and the footer that says where they are."""

    pages: list[Page]
    footer: Node

    @classmethod
    def parse(cls, data: bytes) -> ParquetFile:
        if data[:4] != b"PAR1" or data[-4:] != b"PAR1":
            raise ValueError("no Parquet file")
        end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        if not 4 <= end < len(data):
            raise ValueError("no footer")
        footer, _ = parse(data, end)
        pages, at = [], 4
        while at < end:
            header, begin = parse(data, at)
            stop = begin + header.field(3).value
            if not begin <= stop <= end:
                raise ValueError("no page")
            pages.append(Page(at, header, data[begin:stop]))
            at = stop
        return cls(pages, footer)

    def data(self, *, mend_offsets: bool = True) -> bytes:
        """The file's bytes. *mend_offsets*: what the footer says of where pages are is made right."""
        out, moved = bytearray(b"PAR1"), {}
        for page in self.pages:
            moved[page.start] = len(out)
            out += page.header.data() + page.body
        if mend_offsets:
            for node in self.footer.all():
                for number, child in node.children:
                    if number in (9, 11) and child.kind == I64 and child.value in moved:
                        child.value = moved[child.value]
        footer = self.footer.data()
        return bytes(out) + footer + len(footer).to_bytes(4, "little") + b"PAR1"
