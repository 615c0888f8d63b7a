"""What a version made of other datasets says of their sources."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tasks.derive.inputs import examine
from tasks.derive.provenance import Derived, derived
from tasks.derive.request import DeriveRequest
from tests.made import docs_of, publish_docs


def merge(*inputs: Path) -> Derived:
    order = DeriveRequest.model_validate(
        {"operation": {"operation": "merge"}, "inputs": list(map(str, inputs)), "output": str(inputs[0].parent / "out")}
    )
    return derived(order, [examine(str(path)) for path in inputs], {"operation": "merge"})


def made(root: Path, name: str, *sources: str) -> Path:
    publish_docs(root / name, docs_of([1, 2], [3]), sources=[(source, 1) for source in sources], name=name)
    return root / name


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [(["web"], ["books", "web"], "web-2"), (["web", "web-2"], ["web"], "web-3"), (["web"], ["books"], None)],
)
def test_a_source_that_gets_another_name_is_told_of_and_keeps_a_record_of_it(tmp_path, caplog, one, other, name):
    """A number that no source has. Whoever chooses documents by the name of their source would look for it in vain."""
    with caplog.at_level(logging.WARNING, "tasks.derive.provenance"):
        sources = merge(made(tmp_path, "a", *one), made(tmp_path, "b", *other)).sources
    assert [source["name"] for source in sources] == [*one, *other[:-1], name or other[-1]]
    assert [source.get("renamed_from") for source in sources] == [None] * (len(sources) - 1) + ["web" if name else None]
    said = [message.partition(" (")[0] + message.rpartition(")")[2] for message in caplog.messages]
    assert said == [f"The source 'web' of b is called '{name}' here: another source has its name"] * (name is not None)
