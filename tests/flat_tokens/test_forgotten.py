"""The list of forgotten documents: keys are recognised, runs of tokens are found, and nothing else is."""

import numpy as np
import pytest

from flat_tokens.forgotten import STEP, WINDOW, Forgotten, Scan, hashes, windows_of
from tests.refusal import refusal

SALT = bytes(range(8))
KEYS = np.arange(1, 1001, dtype=np.uint64) * np.uint64(7919)


def test_the_listed_keys_and_no_others_are_forgotten():
    listed = Forgotten(SALT).with_documents(KEYS[::3], np.empty(0, np.uint64))
    assert (listed.those(KEYS) == (np.arange(1000) % 3 == 0)).all()
    assert not Forgotten(SALT).those(KEYS).any()
    assert listed.those(KEYS[:0]).shape == (0,)
    read = Forgotten.of(listed.described())
    assert read.sha256 == listed.sha256 != Forgotten(bytes(8)).with_documents(KEYS[::3], KEYS[:0]).sha256
    assert (read.those(KEYS) == listed.those(KEYS)).all()
    assert Forgotten(SALT).sha256 == ""
    assert listed.with_documents(KEYS[::3], KEYS[:0]).sha256 == listed.sha256


def test_a_damaged_list_is_refused():
    for wrong in ({}, {"salt": "zz", "digests": "", "windows": ""}, {"salt": "00" * 8, "digests": "AAA", "windows": ""}):
        with refusal("is not a list of forgotten documents"):
            Forgotten.of(wrong)


def test_any_run_of_23_tokens_of_a_document_is_found():
    """Wherever it begins, and however the tokens come in parts."""
    document = np.random.default_rng(0).integers(0, 50_000, 480).astype(np.uint32)
    others = np.random.default_rng(1).integers(0, 50_000, 5_000).astype(np.uint32)
    scan = Scan(Forgotten(SALT).with_documents(KEYS[:1], windows_of(document, SALT)))
    length = WINDOW + STEP - 1
    for start in range(len(document) - length):
        tokens = np.concatenate([others[:100], document[start : start + length], others[100:200]])
        for parts in ([tokens], np.array_split(tokens, 7)):
            found = list(scan.of(parts))
            assert found
            at = np.concatenate([begins for begins, _ in found])
            assert ((at >= 100) & (at <= 100 + length - WINDOW)).all()
    assert list(scan.of([others])) == []


@pytest.mark.parametrize(("length", "windows"), [(0, 0), (15, 0), (16, 1), (17, 2), (24, 2), (25, 3), (100_000, 64)])
def test_a_document_has_a_window_for_each_step_up_to_64(length, windows):
    document = np.random.default_rng(0).integers(0, 50_000, length).astype(np.uint32)
    assert len(windows_of(document, SALT)) == windows
    assert len(hashes(document, SALT)) == max(length - WINDOW + 1, 0)


def test_windows_that_others_have_are_left_out():
    document = np.arange(100, dtype=np.uint32)
    listed = Forgotten(SALT).with_documents(KEYS[:1], windows_of(document, SALT))
    shared = np.concatenate([found for _, found in Scan(listed).of([document[:50]])])
    left = listed.without_windows(shared)
    assert 0 < len(left.windows) < len(listed.windows)
    assert list(Scan(left).of([document[:50]])) == []
    assert list(Scan(left).of([document]))
