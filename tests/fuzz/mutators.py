"""Mutations: of bytes, of JSON values, of pickles, of Parquet."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz.driver import Mutator

INTEGERS = [0, 1, 2, 3, -1, -2]
INTEGERS += [(1 << bits) - less for bits in (3, 7, 8, 15, 16, 20, 24, 28, 31, 32, 40, 48, 60, 63, 64) for less in (0, 1)]


def havoc(*words: bytes) -> Mutator:
    """Mutations of bytes: bits, integers of any width, ranges moved, cut out, repeated; and *words* put in."""

    def mutate(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        out = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
            at, stop = sorted((chance.randint(0, len(out)), chance.randint(0, len(out))))
            stop = min(stop, at + chance.choice((1, 4, 16, 64, 1 << 20)))
            kind = chance.randrange(8 if words else 7)
            if kind == 0 and out:
                out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
            elif kind < 3:
                width, order = chance.choice((1, 2, 4, 4, 8, 8)), chance.choice(("little", "little", "big"))
                if chance.random() < 0.5:
                    at -= at % width
                before = int.from_bytes(out[at : at + width], order)  # type: ignore[arg-type]
                value = chance.choice((chance.choice(INTEGERS), before + chance.choice((-1, 1, -8, 8, 1 << 20)), len(out)))
                out[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, order)  # type: ignore[arg-type]
            elif kind == 3:
                del out[at:stop]
            elif kind == 4:
                out[at:at] = out[at:stop] * chance.choice((1, 1, 2, 50))
            elif kind == 5:
                del out[stop:]
            elif kind == 6:
                other = chance.choice(pool)
                first = chance.randint(0, len(other))
                out[at:stop] = other[first : first + stop - at]
            else:
                out[at : chance.choice((at, stop))] = chance.choice(words)
        return bytes(out)

    return mutate


def either(*mutators: Mutator) -> Mutator:
    def mutate(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        return chance.choice(mutators)(chance, data, pool)

    return mutate


# JSON

STRINGS = [
    "", " ", ".", "..", "../..", "/", "/etc/passwd", "a\0b", "\ud800", "\n", "é", "x" * 5000, "memory://x", "1", "-1",
    "2026-01-01", "2026-01-01T00:00:00+00:00", "0" * 64, "<u4", "<f8", "uint32", "object", "zstd", "blosc", "c",
    "NaN",
]  # fmt: skip
VALUES: list[Any] = [None, True, False, 0.5, 1e308, float("nan"), float("inf"), -0.0, [], {}, [[]], [{}], {"": None}, 10**400]
DEEP = 3_000


def json_values(seal: Callable[[Any], Any] | None = None, *, lines: bool = False) -> Mutator:
    """Mutations of values in JSON: swapped, removed, renamed, nested deep. *seal* mends a digest in the value, half of the time.
    With *lines* one line of JSON lines is changed.
    """

    def mutate(chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        parts = data.split(b"\n") if lines else [data]
        chosen = chance.randrange(len(parts))
        try:
            box = [json.loads(parts[chosen])]
        except (ValueError, RecursionError):
            return havoc()(chance, data, pool)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            _change(chance, box)
        if seal is not None and chance.random() < 0.7:
            box = [seal(*box)]
        deep = chance.random() < 0.02
        if deep:
            holder, key = chance.choice(_places(box, 0))
            holder[key] = "DEEP"
        text = json.dumps(*box, ensure_ascii=chance.random() < 0.5)
        if deep:
            text = text.replace('"DEEP"', chance.choice(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP)))
        parts[chosen] = text.encode("utf-8", "surrogatepass")
        return b"\n".join(parts)

    return mutate


def _places(holder: Any, key: Any) -> list[tuple[Any, Any]]:
    """Where a value is, a container and a key, and where all is that is in it."""
    found, value = [(holder, key)], holder[key]
    for inner in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += _places(value, inner)
    return found


def _change(chance: random.Random, box: list[Any]) -> None:
    """Change something of the value in a list of one."""
    holder, key = chance.choice(_places(box, 0))
    here, kind = holder[key], chance.randrange(7)
    if kind == 0 and holder is not box:
        del holder[key]
    elif kind == 1 and isinstance(here, dict):
        name = chance.choice([*here, *STRINGS])
        here[chance.choice(STRINGS)] = here.get(name)
    elif kind == 2 and isinstance(here, list):
        here += [here[chance.randrange(len(here))] if here else None] * chance.choice((1, 1, 100))
    elif type(here) is int and kind < 5:
        holder[key] = chance.choice((here + 1, here - 1, -here, here * 2, chance.choice(INTEGERS), str(here), float(here)))
    elif isinstance(here, str) and kind < 5:
        holder[key] = chance.choice((here[:-1], here + "x", here.upper(), chance.choice(STRINGS), f"{here}/../x", [here]))
    else:
        other, at = chance.choice(_places(box, 0))
        new = chance.choice((chance.choice(VALUES), chance.choice(STRINGS), chance.choice(INTEGERS), other[at]))
        holder[key] = json.loads(json.dumps(new))  # a copy: no value in itself


# Pickles

OPCODES = [
    b"\x80\x04", b"\x95" + bytes(8), b".", b"]", b"\x94", b"(", b"K\x01", b"M\x00\x01", b"J\xff\xff\xff\xff", b"\x86",
    b"\x8a\x08" + b"\xff" * 8, b"a", b"e", b"q\x00", b"r\x00\x00\x00\x00", b"N", b"cos\nsystem\n", b"R", b"h\x00",
    b"\x8a\x00", b"\x8b\x00\x00\x00\x7f",
]  # fmt: skip


NUMBERS = [(value & ((1 << 8 * width) - 1)).to_bytes(width, "little") for value in INTEGERS for width in (4, 8)]
NUMBERS += [struct.pack("<d", float("nan"))]
"""Interesting integers of 4 and 8 bytes, as words."""

parquet = havoc(
    b"PAR1", b"\x15\x00", b"\x15\x80\x80\x80\x80\x10", b"\x19\xfc\xff\xff\xff\xff\x07", b"\x1c" * 9, b"\x19" * 5000 + b"\x15",
    b"\x18\xff\xff\xff\xff\x0f", b"\x11", b"\x1b\x01\x55\x02\x02",
)  # fmt: skip
"""Mutations with values of Thrift, in which pages and footer of a Parquet file are: huge, nested, of other kinds."""
