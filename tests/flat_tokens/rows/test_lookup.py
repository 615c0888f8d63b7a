"""Documents by their keys, against looking at every key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import FlatTokens
from flat_tokens.rows import documents
from tests.examples import examples
from tests.made import docs_of, publish_docs, write_sequences
from tests.refusal import refusal

LARGE = 2**64 - 1


def published(root: Path, keys: list[int]) -> FlatTokens:
    publish_docs(root, [docs_of([number], key=key)[0] for number, key in enumerate(keys)])
    return flat_tokens.open(root).train


@given(
    keys=st.lists(st.integers(0, 30) | st.just(LARGE), min_size=1, max_size=40),
    asked=st.lists(st.integers(0, 31) | st.just(LARGE), max_size=12),
    picks=st.none() | st.lists(st.integers(0, 39), max_size=20),
    at_a_time=st.integers(1, 9),
)
@examples(60)
def test_numbers_are_those_of_the_first_document_with_the_key(tmp_path_factory, keys, asked, picks, at_a_time):
    train = published(tmp_path_factory.mktemp("keys") / "d", keys)
    if picks is not None:
        keys = [keys[pick % len(keys)] for pick in picks]
        train = train.select(indices=np.array([pick % train.seq_count for pick in picks], np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "KEYS_AT_A_TIME", at_a_time)
        assert train.by_keys(asked).tolist() == [keys.index(key) if key in keys else -1 for key in asked]
        assert train.by_keys(np.array(asked, np.uint64)).tolist() == train.by_keys([f"{key:016x}" for key in asked]).tolist()


def test_one_document_is_found_by_its_key(tmp_path):
    train = published(tmp_path / "d", [5, LARGE, 7])
    assert train.by_key(7) == 2
    assert train[train.by_key("ffffffffffffffff")].tolist() == [1]
    with refusal("there is no document with key 0000000000000006", KeyError):
        train.by_key(6)
    for wrong in ("7", "FFFFFFFFFFFFFFFF", -1, 2**64):
        with refusal("a key is"):
            train.by_key(wrong)
    with refusal(r"keys are uint64\[n\], or a list of them, but these are int64\[2\]", TypeError):
        train.by_keys(np.arange(2))
    write_sequences(tmp_path / "bare", [[1]])
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(tmp_path / "bare").train.by_key(1)
