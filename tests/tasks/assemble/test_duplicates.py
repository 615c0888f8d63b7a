"""Texts that were met before, by their digests, against a dictionary; and clusters of near ones: union-find by the least number,
whatever the order of pairs, and what naive programs find.
"""

import random
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.assemble.duplicates
from tasks.assemble.duplicates import FirstTexts, _Forest, clusters, least_similarity
from tasks.text.signatures import BYTES, NUMBERS, signatures, text_digests
from tests.benchmarks.bench import run_whole
from tests.benchmarks.planted import planted, right_links, shingles_of, similar_pairs
from tests.calls import before_each_call
from tests.examples import examples


def signed(texts: list[str]) -> np.ndarray:
    return signatures(pa.array(texts, pa.large_string()), bytes(32), 5)


def found_in(labels: np.ndarray) -> list[list[int]]:
    of = {}
    for number, first in enumerate(labels.tolist()):
        of.setdefault(first, []).append(number)
    assert all(first == mine[0] for first, mine in of.items())
    return [mine for mine in of.values() if len(mine) > 1]


def text(seed: int, count: int = 100) -> list[str]:
    draw = random.Random(seed)
    return [f"w{draw.randrange(10**6)}" for _ in range(count)]


def test_equal_texts_are_one_cluster_and_texts_without_words_are_alone():
    texts = ["", "a b", " ".join(text(1)), "A, B.", "", " ".join(text(1)).upper(), "c", "a b"]
    assert clusters(signed(texts), 0.8).tolist() == [0, 1, 2, 1, 4, 2, 6, 1]
    assert clusters(signed([]), 0.8).tolist() == []


def test_pairs_with_a_text_in_common_are_one_cluster():
    forest = _Forest(4)
    forest.join(np.array([2, 2, 3]), np.array([1, 0, 1]))
    assert forest.roots(np.arange(4)).tolist() == [0] * 4


def test_many_copies_in_one_band_are_found_without_all_pairs(monkeypatch):
    compared = before_each_call(monkeypatch, "tasks.assemble.duplicates.similarity", lambda one, _: len(one))
    texts = [" ".join(text(1)[: 100 - k % 3]) for k in range(600)]
    assert clusters(signed(texts), 0.8).tolist() == [0] * 600
    assert sum(compared) < 10_000


def test_few_bands_at_a_time_give_the_same(monkeypatch):
    """So do wide bands of which all texts agree in the half that is sorted."""
    texts = planted([" ".join(text(seed)) for seed in range(60)], 60)
    for threshold in (0.6, 0.8, 0.9):
        whole = clusters(signed(texts), threshold).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(tasks.assemble.duplicates, "BANDS_BYTES", 1)
            patch.setattr(tasks.assemble.duplicates, "PAIRS", 3)
            patch.setattr(tasks.assemble.duplicates, "mix", np.zeros_like)
            assert clusters(signed(texts), threshold).tolist() == whole
        assert len(set(whole)) < len(texts)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_what_a_naive_program_finds_is_found(threshold):
    texts = planted([" ".join(text(seed, 60 + 40 * (seed % 9))) for seed in range(150)], 250, seed=3)
    truth = similar_pairs(shingles_of(texts), threshold)
    recall, precision = right_links(found_in(clusters(signed(texts), threshold)), truth)
    assert len(truth) >= 3
    assert recall > 0.93
    assert precision > 0.6


def test_few_bins_are_judged_more_exactly_than_many():
    least = least_similarity(0.8)
    assert least[0] > 1
    assert least[BYTES] == pytest.approx(0.8 - 0.025)
    assert 0.775 < least[10] < 0.8
    assert NUMBERS * 8 == BYTES


HALVES = st.integers(0, 3) | st.sampled_from([2**63, 2**64 - 1])
"""Few, so that digests with the same first half are common, which they are not in life."""


@given(st.lists(st.lists(st.tuples(HALVES, HALVES), max_size=30), max_size=12))
@examples(200)
def test_a_text_is_a_copy_of_the_first_one_with_its_digest(files):
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
def test_equal_texts_have_equal_digests_wherever_they_stand(texts, start):
    array = pa.array(texts, pa.large_string())
    whole = [tuple(row) for row in text_digests(array, bytes(32)).tolist()]
    assert len(set(whole)) == len(set(texts))
    assert [tuple(row) for row in text_digests(array.slice(start), bytes(32)).tolist()] == whole[start:]
    other = {tuple(row) for row in text_digests(array, b"k" * 32).tolist()}
    assert not other & set(whole)


@pytest.mark.slow
def test_ten_million_texts_take_less_than_two_gigabytes():
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
