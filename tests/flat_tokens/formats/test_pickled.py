"""Pickled lists of pairs: byte for byte pickle's, read without pickle, refused where they are anything else."""

import itertools
import os
import pickle
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.annotations import Int64s
from flat_tokens.formats.pickled import FRAME, read_pairs, write_pairs
from tests.examples import examples, first_fast
from tests.refusal import refusal

EDGES = [0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**39 - 1, 2**39, 2**47 - 1, 2**47, 2**55 - 1, 2**55, 2**63 - 1]
"""Where an integer's form in a pickle changes."""


def dumps(pairs: Int64s, block: int = 1000) -> bytes:
    blocks = (pairs[at : at + block] for at in range(0, len(pairs), block))
    return b"".join(bytes(piece) for piece in write_pairs(blocks, len(pairs)))


def loads(data: bytes, block: int = 1 << 20) -> list[tuple[int, int]]:
    pairs = read_pairs(data[at : at + block] for at in range(0, len(data), block))
    return [(int(a), int(b)) for part in pairs for a, b in part]


@pytest.mark.parametrize(("protocol", "block"), [(2, 1), (3, 7), (4, 1 << 20), (5, 1)])
def test_every_form_of_integer_is_written_and_read_as_pickle_does_it(protocol, block):
    pairs = list(itertools.product(EDGES, EDGES))
    assert dumps(np.array(pairs, np.int64)) == pickle.dumps(pairs, 4)
    assert loads(pickle.dumps(pairs, protocol), block) == pairs


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 1001, 2001, 7281, 7282, 20_000])
@pytest.mark.parametrize("bits", first_fast([16, 60, 8, 31], 2))
def test_lists_of_every_length_are_pickles_own_bytes(count, bits):
    """One and none, around the thousand that are appended together, and over several frames."""
    pairs = (2 ** (np.random.default_rng(count).random((count, 2)) * bits)).astype(np.int64)
    reference = pickle.dumps([(a, b) for a, b in pairs.tolist()], 4)
    assert dumps(pairs) == reference
    assert dumps(pairs, 777) == reference
    assert loads(reference, 4096) == [(a, b) for a, b in pairs.tolist()]


@examples(50)
@given(
    pairs=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=30),
    protocol=st.integers(2, 5),
    block=st.integers(1, 60),
    python=st.booleans(),
    cut=st.integers(0),
)
def test_what_any_pickler_makes_of_pairs_is_read_and_refused_wherever_it_is_cut(pairs, protocol, block, python, cut):
    data = (pickle._dumps if python else pickle.dumps)(pairs, protocol)  # type: ignore[attr-defined]
    assert loads(data, block) == pairs
    with refusal("ends in its middle"):
        loads(data[: cut % len(data)], block)


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


ALLOWED = {*b"KMJ\x8a", *b"e", FRAME}
"""Opcodes that may follow a pair in a list."""


def hostile(marker: str) -> Iterator[tuple[str, bytes]]:
    """Pickles that would run a command or build what they should not, by name."""
    command = f"touch {marker}"
    text = command.encode()
    for protocol in range(6):
        yield f"REDUCE, protocol {protocol}", pickle.dumps([(0, 1), Exploit(command)], protocol)
        yield f"in a pair, protocol {protocol}", pickle.dumps([(0, Exploit(command))], protocol)
    short = b"\x8c" + bytes([len(text)]) + text
    start = b"\x80\x04]\x94("
    yield "STACK_GLOBAL", start + b"\x8c\x05posix\x8c\x06system\x93" + short + b"\x85Re."
    for opcode in set(range(256)) - ALLOWED:
        yield f"opcode {opcode:02x}", start + b"K\0K\1\x86\x94" + bytes([opcode]) + b"\0\n\ne."
    yield "tuples in tuples", b"\x80\x02]" + b"K\0" + b"K\0\x86" * 50_000 + b"a."
    yield "a large integer", pickle.dumps([(1 << 64, 0)])
    yield "a huge integer", b"\x80\x02](\x8b" + struct.pack("<i", 2**31 - 1) + b"\0" * 100 + b"e."
    yield "a second pickle", pickle.dumps([(0, 1)]) * 2
    yield "a pair alone", pickle.dumps((0, 1))
    yield "marks on marks", b"\x80\x02]" + b"(" * 1000 + b"."
    yield "pairs not appended", b"\x80\x02](K\0K\1\x86."
    yield "numbers left", b"\x80\x02](K\0K\1\x86K\0e."
    yield "protocol 9", b"\x80\x09]."
    yield "nothing", b""


NAMES = [name for name, _ in hostile("x")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_everything_else_is_refused_unrun_in_little_memory(tmp_path, name, block):
    marker = os.path.join(tmp_path, "it-ran")
    data = dict(hostile(marker))[name]
    tracemalloc.start()
    try:
        with refusal(r"opcode 0x|ends in its middle|continues after its end|integer of \d+ bytes"):
            loads(data, block)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 200 * len(data)
    finally:
        tracemalloc.stop()
    assert not os.path.exists(marker)
