"""Pickled lists of pairs of integers, without pickle: the form of Modalities' indexes.

An index is data from strangers, and unpickling executes it. The reader here knows the few opcodes of such a list and
refuses all others. It puts the numbers straight into arrays, so that the memory for an index is bounded by its size. The
writer's bytes are those of ``pickle.dumps(list_of_tuples, protocol=4)``.

A pickle is a program for a stack machine. Of a list of pairs it is, with every integer in its shortest form::

    PROTO 4, FRAME n, EMPTY_LIST, MEMOIZE, then for each thousand pairs
    MARK, (BININT1 a, BININT2 b, TUPLE2, MEMOIZE) ..., APPENDS, and at last STOP

where a new frame begins at every 64 kB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np

from flat_tokens.annotations import Int32s, Int64s, IntPair, UInt8s

PROTO, FRAME, STOP = 0x80, 0x95, 0x2E
EMPTY_LIST, MARK, APPEND, APPENDS = 0x5D, 0x28, 0x61, 0x65
MEMOIZE, BINPUT, LONG_BINPUT = 0x94, 0x71, 0x72
BININT1, BININT2, BININT, LONG1 = 0x4B, 0x4D, 0x4A, 0x8A
TUPLE2 = 0x86

LOOKAHEAD = 32
"""The longest pair has 27 bytes: two LONG1 of eight bytes, TUPLE2 and LONG_BINPUT."""

FRAME_TARGET, FRAME_MINIMUM = 1 << 16, 4
APPENDED_AT_A_TIME = 1000

INT_SIZES = np.zeros(256, np.uint8)
INT_SIZES[[BININT1, BININT2, BININT]] = 2, 3, 5
MEMO_SIZES = np.zeros(256, np.uint8)
MEMO_SIZES[[MEMOIZE, BINPUT, LONG_BINPUT]] = 1, 2, 5


def read_pairs(blocks: Iterable[bytes]) -> Iterator[Int64s]:
    """The pairs of a pickled ``list[IntPair]``, a block of its bytes at a time: int64[n, 2], in order.

    ValueError, saying at which byte, for everything else: other opcodes, references to earlier values, numbers above 64
    bits, a list that does not end or is not alone. Nothing is executed, and no length in the data is trusted.
    """
    machine = _Machine()
    rest, position = b"", 0  # the bytes that are left, and their position in the pickle
    for block in blocks:
        data, at = rest + block, 0
        whole = _WholePairs(data)
        while machine.state != "stopped":
            if machine.state in ("marked", "pairs"):
                at = whole.follow(at, machine)
            if not (length := machine.step(data, at, position + at)):
                break
            at += length
            if machine.pair is not None:
                yield whole.taken()
                yield np.array([machine.pair], np.int64)
                machine.pair = None
        yield whole.taken()
        rest, position = data[at:], position + at
        if machine.state == "stopped" and rest:
            raise ValueError(f"continues after its end, byte {position}")
    if machine.state != "stopped":
        raise ValueError(f"ends in its middle, after byte {position + len(rest)}")


INTEGER = -1
"""Any opcode of an integer."""
NEXT = {
    "begin": {PROTO: "a pickle"},
    "a pickle": {EMPTY_LIST: "a list"},
    "a list": {INTEGER: "one alone", MARK: "marked", STOP: "stopped"},
    "one alone": {INTEGER: "two alone"},
    "two alone": {TUPLE2: "a pair alone"},
    "a pair alone": {APPEND: "a list"},
    "marked": {INTEGER: "one"},
    "one": {INTEGER: "two"},
    "two": {TUPLE2: "pairs"},
    "pairs": {INTEGER: "one", APPENDS: "a list"},
}
"""By the state of the stack, the opcodes that may follow, and the state after each."""


class _Machine:
    """The stack machine, one opcode at a time, of a list and at most two integers."""

    def __init__(self) -> None:
        self.state = "begin"
        self.numbers: list[int] = []
        self.memoizable = False
        self.pair: IntPair | None = None

    def step(self, data: bytes, at: int, position: int) -> int:
        """Take the opcode at ``data[at]`` and return its length, or 0 if it continues beyond *data*."""
        if at >= len(data):
            return 0
        opcode = data[at]
        length = _length(opcode, data, at, position)
        if at + length > len(data):
            return 0
        argument = data[at + 1 : at + length]
        if not self._take(opcode, argument):
            raise ValueError(
                f"has opcode 0x{opcode:02x} at byte {position}, where a list of pairs of integers has none. "
                "It was not read further, and nothing in it was run"
            )
        return length

    def _take(self, opcode: int, argument: bytes) -> bool:
        """Change the state. False if the opcode is not allowed in it."""
        if opcode == FRAME:
            return self.state != "begin"  # the grouping of the bytes does not matter
        if MEMO_SIZES[opcode]:
            allowed, self.memoizable = self.memoizable, False  # kept for references, of which none is taken
            return allowed
        self.memoizable = opcode in (EMPTY_LIST, TUPLE2)
        is_integer = opcode in (BININT1, BININT2, BININT, LONG1)
        self.state = NEXT[self.state].get(INTEGER if is_integer else opcode, "")
        if is_integer:
            number = argument[1:] if opcode == LONG1 else argument
            self.numbers.append(int.from_bytes(number, "little", signed=opcode in (BININT, LONG1)))
        elif opcode == TUPLE2 and self.state:
            self.pair, self.numbers = (self.numbers[0], self.numbers[1]), []
        return self.state != "" and (opcode != PROTO or 2 <= argument[0] <= 5)


def _length(opcode: int, data: bytes, at: int, position: int) -> int:
    """Bytes of an opcode with its argument; 1 for the ones that are refused."""
    if opcode == LONG1:
        if at + 1 >= len(data):
            return 2
        if data[at + 1] > 8:
            raise ValueError(f"has an integer of {data[at + 1]} bytes at byte {position}; up to 8 are read")
        return 2 + data[at + 1]
    if opcode == FRAME:
        return 9
    return int({PROTO: 2}.get(opcode) or INT_SIZES[opcode] or MEMO_SIZES[opcode] or 1)


class _WholePairs:
    """The pairs within a block. Their ends are computed for every byte at once, as if one began there, and then followed."""

    def __init__(self, block: bytes) -> None:
        self._data = np.frombuffer(block + bytes(LOOKAHEAD), np.uint8)
        count = len(block)
        self._sizes = INT_SIZES[self._data]
        longs = np.flatnonzero(self._data[:count] == LONG1)
        self._sizes[longs] = np.where(self._data[longs + 1] <= 8, self._data[longs + 1] + 2, 0)
        at = np.arange(count, dtype=np.int32)
        first = self._sizes[:count]
        second = self._sizes[at + first]
        tuples = at + first + second
        ends = tuples + 1 + MEMO_SIZES[self._data[tuples + 1]]
        # The memo opcode of a pair that ends with the block may follow in the next one.
        ends[(first == 0) | (second == 0) | (self._data[tuples] != TUPLE2) | (ends >= count)] = 0
        self._ends = memoryview(np.append(ends, np.int32(0)).data)
        self._begins: list[int] = []

    def follow(self, at: int, machine: _Machine) -> int:
        """Take the consecutive pairs from byte *at* on and return the byte where they end."""
        ends, take, begin = self._ends, self._begins.append, at
        while end := ends[at]:
            take(at)
            at = end
        if at > begin:
            machine.state, machine.memoizable = "pairs", False
        return at

    def taken(self) -> Int64s:
        """The pairs taken since the last call: int64[n, 2]."""
        at, self._begins = np.array(self._begins, np.int32), []
        return np.stack([_integers(self._data, at), _integers(self._data, at + self._sizes[at])], 1)


def _integers(data: UInt8s, at: Int32s) -> Int64s:
    """The integers whose opcodes are at those bytes: int64[n]."""
    opcodes = data[at]
    long = opcodes == LONG1
    size = np.where(long, data[at + 1], INT_SIZES[opcodes] - 1).astype(np.int64)
    begin = at + 1 + long
    values = np.zeros(len(at), np.int64)
    for k in range(int(size.max(initial=0))):
        here = size > k
        values[here] |= data[begin[here] + k].astype(np.int64) << (8 * k)
    signed = (size > 0) & (size < 8) & (long | (opcodes == BININT))
    shift = 64 - 8 * size[signed]
    values[signed] = values[signed] << shift >> shift
    return values


def write_pairs(blocks: Iterable[Int64s], count: int) -> Iterator[bytes | UInt8s]:
    """The pickle of *count* pairs of non-negative integers, given as int64[n, 2] arrays, in pieces and memory of some blocks."""
    yield bytes([PROTO, 4])
    payload, boundaries = np.array([EMPTY_LIST, MEMOIZE], np.uint8), np.empty(0, np.int64)
    done = 0
    for pairs in blocks:
        opcodes, starts = _opcodes_of(pairs, done, alone=count == 1)
        boundaries = np.concatenate([boundaries, starts + len(payload)])
        payload = np.concatenate([payload, opcodes])
        done += len(pairs)
        cut = 0
        # pickle ends a frame if it is full when the next value is saved.
        while (k := int(np.searchsorted(boundaries, cut + FRAME_TARGET))) < len(boundaries):
            frame = payload[cut : boundaries[k]]
            yield struct.pack("<BQ", FRAME, len(frame))
            yield frame
            cut = int(boundaries[k])
        payload, boundaries = payload[cut:], boundaries[boundaries > cut] - cut
    end = [STOP] if count == 0 else [APPEND, STOP] if count == 1 else [APPENDS, STOP]
    if len(payload) + len(end) >= FRAME_MINIMUM:
        yield struct.pack("<BQ", FRAME, len(payload) + len(end))
    yield payload
    yield bytes(end)


def _opcodes_of(pairs: Int64s, done: int, alone: bool) -> tuple[UInt8s, Int64s]:
    """The opcodes of pairs after *done* others: uint8[n]; and the positions of the integers among them: int64[m], increasing."""
    # A row for each pair: the list's opcodes before it, two integers, the tuple's. Missing ones are masked out.
    rows = np.zeros((len(pairs), 24), np.uint8)
    used = np.zeros(rows.shape, np.bool_)
    index = np.arange(done, done + len(pairs))
    opening = (index % APPENDED_AT_A_TIME == 0) & (not alone)  # a list of one pair has no mark
    rows[:, 0], used[:, 0] = APPENDS, opening & (index > 0)
    rows[:, 1], used[:, 1] = MARK, opening
    for column, values in ((2, pairs[:, 0]), (12, pairs[:, 1])):
        # A LONG1 has as few bytes as hold the number and its sign.
        long_size = 5 + np.searchsorted([1 << 39, 1 << 47, 1 << 55], values, side="right")
        small = [values < 1 << 8, values < 1 << 16, values < 1 << 31]
        rows[:, column] = np.select(small, [BININT1, BININT2, BININT], LONG1)
        size = np.select(small, [1, 2, 4], long_size + 1)
        little = values.astype("<i8").view(np.uint8).reshape(-1, 8)
        rows[:, column + 1 : column + 9] = little
        large = ~small[2]
        rows[large, column + 1] = long_size[large]
        rows[large, column + 2 : column + 10] = little[large]
        used[:, column] = True
        used[:, column + 1 : column + 10] = np.arange(9) < size[:, None]
    rows[:, 22:], used[:, 22:] = (TUPLE2, MEMOIZE), True
    lengths = used.sum(1)
    row_starts = np.cumsum(lengths) - lengths
    first, second = row_starts + used[:, :2].sum(1), row_starts + used[:, :12].sum(1)
    return rows[used], np.stack([first, second], 1).reshape(-1)
