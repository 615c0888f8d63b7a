"""All objects of docs/reading can be pickled, as it says, and give the same elsewhere. Steps: ``rows/test_loader.py``."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import (
    BlockOrder,
    BucketedLoader,
    FlatTokens,
    Ledger,
    Mixture,
    ReferenceOrder,
    Schedule,
    ShuffledLoader,
)
from flat_tokens.rows.loader import digest_of
from tests.made import write_sequences

OBJECTS: dict[str, Callable[[FlatTokens], Any]] = {
    "a split": lambda train: train,
    "a selection": lambda train: train.select(indices=[5, 3, 3, 80]),
    "packed rows": lambda train: train.packed(16),
    "documents": lambda train: train.documents(8),
    "blocks": lambda train: train.blocks(16),
    "packs with padding": lambda train: train.packed_documents(64, fit="best", pad_to=4),
    "rows of fields": lambda train: train.packed(16, fields=["inputs", "targets"]),
    "a loader in the reference order": lambda train: ShuffledLoader(train.packed(16), 4, order=ReferenceOrder(2, 2, 2)),
    "a loader in blocks": lambda train: ShuffledLoader(train.packed(16), 4, order=BlockOrder(4, 2)),
    "buckets": lambda train: BucketedLoader(train, [8, 32], 64),
    "a mixture": lambda train: Mixture([(train.packed(16), 1), (train.packed(16), Schedule([(0, 1), (9, 2)]))], 4, steps=9),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> FlatTokens:
    root = tmp_path_factory.mktemp("pickled") / "dataset"
    return flat_tokens.open(write_sequences(root, [[i] * (i % 20) for i in range(100)])).train


def content(thing: Any) -> list[Any]:
    """Its rows, in order."""
    return [one.tolist() if isinstance(one, np.ndarray) else digest_of(one) for one in thing]


@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_the_same_elsewhere(train, name):
    thing = OBJECTS[name](train)
    for _ in range(2):  # the second time with warm caches, too
        again = pickle.loads(pickle.dumps(thing))
        assert type(again) is type(thing)
        assert len(expected := content(thing)) > 3
        assert content(again) == expected


def test_what_they_give_is_the_same_elsewhere(train, tmp_path):
    mixture = Mixture([(train.packed(16), 1)], 4, steps=9)
    for thing in (mixture[3], mixture.visits([1, 2], source="0"), train.packed(16).batch([1, 2]), train.packed_documents(64)[0]):
        again = pickle.loads(pickle.dumps(thing))
        assert type(again) is type(thing)
        assert digest_of(again) == digest_of(thing)
    ledger = Ledger.create(tmp_path / "run.json", {"a": (train.packed(16), 1)}, 4)
    again = pickle.loads(pickle.dumps(ledger))
    assert content(again.mixture().steps(0, 5)) == content(ledger.mixture().steps(0, 5))
