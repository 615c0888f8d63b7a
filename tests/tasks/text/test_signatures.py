"""Signatures: what counts as the same text, how near the estimates are, and that nothing else decides on the bytes."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.text.signatures
from tasks.text.signatures import NO_SHINGLE, signatures, similarity
from tests.benchmarks.planted import edited, shingles_of
from tests.examples import examples

KIND = bytes(32)
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."


def signed(*texts: str, words: int = 5, kind: bytes = KIND) -> np.ndarray:
    return signatures(pa.array(texts, pa.large_string()), kind, words)


def estimate(one: str, other: str) -> float:
    found = signed(one, other)
    return float(similarity(found[:1], found[1:])[0][0])


def words(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(f"word{draw.randrange(10**6)}" for _ in range(count))


def test_literal_numbers():
    """A change of these asks for another EDITION."""
    found = signed(TEXT, "two words", "", "Größe — 東京都")
    assert [f"{row[0]:016x}" for row in found] == LITERALS
    assert [int(np.bitwise_xor.reduce(row) % np.uint64(1_000_003)) for row in found] == SUMS


LITERALS = ["b9a1c0b5e69ee6b4", "99b9d9f999b9d9f9", "8080808080808080", "dbfb9bbbdbfb9bbb"]
SUMS = [744986, 477207, 0, 534107]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (TEXT, TEXT.upper()),
        (TEXT, TEXT.replace(",", " -- ").replace(" ", "\n\t ")),
        (TEXT, f"\u00a0{TEXT} «»"),
        ((other := "ΚΑΛΗΜΕΡΑ ΚΟΣΜΕ ÄÖÜ ÉCOLE ПРИВЕТ МИР"), other.lower()),
    ],
)
def test_case_punctuation_and_spaces_make_no_difference(one, same):
    assert estimate(same, one) == 1


def test_characters_of_scripts_without_spaces_are_words():
    """One character of thirty is another one: of 26 runs five differ."""
    text = "人人生而自由在尊严和权利上一律平等他们赋有理性和良心并应以兄弟"
    other = text.replace("律", "样")
    assert estimate(text, other) == pytest.approx((len(text) - 9) / (len(text) + 1), abs=0.06)


def test_short_texts_are_one_run_and_texts_without_words_have_nothing():
    assert estimate("two words", "Two, words!") == 1
    assert estimate("two words", "two other words") == 0
    found = signed("", " .. !", "a")
    assert (found[:2] == NO_SHINGLE).all()
    assert float(similarity(found[:1], found[1:2])[0][0]) == 0


def test_texts_of_two_kinds_have_nothing_in_common():
    one, other = signed(words(500)), signed(words(500), kind=b"\1" * 32)
    assert float(similarity(one, other)[0][0]) < 0.02


@pytest.mark.parametrize(("count", "most"), [(40, 0.05), (200, 0.07), (3000, 0.1)])
def test_estimates_are_near_the_similarity_of_the_sets(count, most):
    """Nearly exact for few runs, and within four standard errors for many."""
    text, draw = words(count), random.Random(1)
    for share in (0.01, 0.05, 0.2, 0.5):
        other = edited(text, share, False, [words(1, k) for k in range(5)], draw)
        one, two = map(set, (runs.tolist() for runs in shingles_of([text, other])))
        assert estimate(text, other) == pytest.approx(len(one & two) / len(one | two), abs=most)


@given(st.lists(st.text(st.sampled_from("ab, .É京—"), max_size=60), min_size=1, max_size=12), st.integers(1, 7))
@examples(40)
def test_batches_and_blocks_make_no_difference(texts, length):
    """A text has the signature that it has alone, however many stand around it."""
    together = signed(*texts, words=length)
    for text, row in zip(texts, together, strict=True):
        assert (signed(text, words=length)[0] == row).all()
    offset = pa.array(["before", *texts], pa.large_string()).slice(1)
    assert (signatures(offset, KIND, length) == together).all()


def test_a_long_text_is_hashed_piece_by_piece(monkeypatch):
    """The pieces may be of any length; a word that fills one is cut, where nothing else could be done."""
    texts = [f"{words(300, seed)} {'京都' * 90} fin" for seed in range(3)]
    whole = signed(*texts)
    for length in (64, 200, 1000):
        monkeypatch.setattr(tasks.text.signatures, "BLOCK_BYTES", length)
        assert (signed(*texts) == whole).all()
    monkeypatch.setattr(tasks.text.signatures, "BLOCK_BYTES", 16)
    assert (signed("x" * 100, "é" * 100) != NO_SHINGLE).all()
