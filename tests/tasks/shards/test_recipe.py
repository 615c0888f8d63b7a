"""What a shard is made of: by its receipt, and by the manifest of a version that needs it."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.shards.recipe import ingredients_needed, ingredients_of

POLICY = {"on_bad": "skip", "empty": "keep", "max_bytes": 1000}
BUILT = {
    "file": ["f" * 64, "jsonl"],
    "range": [0, 100, None],
    "reading": ["text", "id", None],
    "tokenizer": "t" * 64,
    "documents": POLICY,
    "semantics": "1",
}
BUILDS = {
    "sources": [{"name": "a", "text_column": "text", "id_column": "id", "files": [{"name": "a", "sha256": "f" * 64}]}],
    "tokenizer": {"name": "bytes", "digest": "t" * 64, "engine": "reference"},
    "documents": POLICY,
    "semantics": "1",
}
IMPORTED = {
    "content": "c696124d1ff175311f5ade540b078048454ccf9ee25bdd1a62a1f970958b7ff5",
    "format": "megatron",
    "options": {},
    "range": ["train", 0, 2],
    "tokenizer": "",
    "semantics": "1",
}
PARTS = [{"key": key, "size": 3, "sha256": digit * 64} for key, digit in (("train.bin", "1"), ("train.idx", "2"))]
IMPORTS = {
    "sources": [{"name": "a", "format": "megatron", "options": {}, "files": [{"sha256": "f" * 64, "parts": PARTS[::-1]}]}],
    "tokenizer": {"digest": None},
    "documents": {},
    "semantics": "1",
}


def is_needed(inputs: dict[str, Any], made_of: dict[str, Any]) -> bool:
    return ingredients_of(inputs).digest in {ingredients.digest for ingredients in ingredients_needed(made_of)}


@pytest.mark.parametrize(("inputs", "made_of"), [(BUILT, BUILDS), (IMPORTED, IMPORTS)], ids=["built", "imported"])
def test_a_shard_of_a_version_is_known_by_its_receipt_whatever_its_range(inputs: dict[str, Any], made_of: dict[str, Any]) -> None:
    """As receipts and manifests were written by earlier releases."""
    assert is_needed(inputs, made_of)
    assert is_needed({**inputs, "range": [7, 8, None]}, made_of)
    for name in set(inputs) - {"range"}:
        other = {list: ["another"], dict: {"another": 1}, str: "another"}[type(inputs[name])]
        assert not is_needed({**inputs, name: other}, made_of), name


def test_the_engine_tells_no_shards_apart() -> None:
    """A version whose documents may depend on it keeps the shards of both."""
    assert is_needed({**BUILT, "engine": "reference"}, BUILDS)
