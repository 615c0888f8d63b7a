"""Which texts were met before, by their digests: against a dictionary."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.assemble.duplicates import FirstTexts
from tasks.text.signatures import text_digests
from tests.benchmarks.bench import run_whole
from tests.examples import examples

HALVES = st.integers(0, 3) | st.sampled_from([2**63, 2**64 - 1])
"""Few, so that digests with the same first half are common, which they are not in life."""


@given(st.lists(st.lists(st.tuples(HALVES, HALVES), max_size=30), max_size=12))
@examples(200)
def test_a_text_is_a_copy_of_the_first_one_with_its_digest(files: list[list[tuple[int, int]]]) -> None:
    seen, first = {}, FirstTexts()
    for file, digests in enumerate(files):
        keys = np.arange(len(digests), dtype=np.uint64) + np.uint64(100 * file)
        expected = []
        for i, (digest, key) in enumerate(zip(digests, keys.tolist(), strict=True)):
            of = seen.setdefault(digest, key)
            expected += [] if of == key else [(i, of)]
        before = first.copy()
        found = first.add(np.array(digests, np.uint64).reshape(-1, 2), keys)
        again = before.add(np.array(digests, np.uint64).reshape(-1, 2), keys)  # a copy does not see what is added later
        assert all((one == other).all() for one, other in zip(found, again, strict=True))
        assert list(zip(*(array.tolist() for array in found), strict=True)) == expected


@given(st.lists(st.text(max_size=4), max_size=20), st.integers(0, 20))
def test_equal_texts_have_equal_digests_wherever_they_stand(texts: list[str], start: int) -> None:
    array = pa.array(texts, pa.large_string())
    whole = [tuple(row) for row in text_digests(array, bytes(32)).tolist()]
    assert len(set(whole)) == len(set(texts))
    assert [tuple(row) for row in text_digests(array.slice(start), bytes(32)).tolist()] == whole[start:]
    other = {tuple(row) for row in text_digests(array, b"k" * 32).tolist()}
    assert not other & set(whole)


@pytest.mark.slow
def test_ten_million_texts_take_less_than_two_gigabytes() -> None:
    """In a process of its own, whose peak is all of its memory; each text in ten is a copy."""
    program = (
        "import numpy as np\n"
        "from tasks.assemble.duplicates import FirstTexts\n"
        "first, draw, copies = FirstTexts(), np.random.default_rng(0), 0\n"
        "for i in range(0, 10_000_000, 50_000):\n"
        "    digests = draw.integers(0, 2**64, (50_000, 2), np.uint64)\n"
        "    digests[:5_000] = before if i else digests[5_000:10_000]\n"
        "    before = digests[-5_000:].copy()\n"
        "    copies += len(first.add(digests, np.arange(i, i + 50_000, dtype=np.uint64)).copies)\n"
        "print(copies)\n"
    )
    told = run_whole([sys.executable, "-c", program])
    assert int(told.out) == 200 * 5_000
    assert told.peak < 2_000_000_000
