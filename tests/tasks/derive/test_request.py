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


def test_a_source_that_gets_another_name_is_told_of_and_keeps_a_record_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever chooses documents by the name of their source would look for it in vain."""
    a, b = made(tmp_path, "a", "web"), made(tmp_path, "b", "books", "web")
    with caplog.at_level(logging.WARNING, "tasks.derive.provenance"):
        sources = merge(a, b).sources
    assert [source["name"] for source in sources] == ["web", "books", "web-2"]
    assert [source.get("renamed_from") for source in sources] == [None, None, "web"]
    (said,) = caplog.messages
    assert said.startswith("The source 'web' of b (")
    assert said.endswith(") is called 'web-2' here: another source has its name")


def test_a_number_is_given_that_no_source_has(tmp_path: Path) -> None:
    sources = merge(made(tmp_path, "a", "web", "web-2"), made(tmp_path, "b", "web")).sources
    assert [source["name"] for source in sources] == ["web", "web-2", "web-3"]


def test_nothing_is_said_of_sources_whose_names_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources = merge(made(tmp_path, "a", "web"), made(tmp_path, "b", "books")).sources
    assert ["renamed_from" in source for source in sources] == [False, False]
    assert caplog.messages == []
