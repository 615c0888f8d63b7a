"""What tests of flows and of what people see of them share."""

from pathlib import Path

import pytest

from tests.made import docs_of, publish_docs


@pytest.fixture
def datasets(tmp_path: Path) -> tuple[Path, Path]:
    """Two small ones, of other sources each."""
    publish_docs(tmp_path / "a", docs_of([1, 2], [3]), docs_of([4], key=9), sources=[("web", 1)], name="a-texts")
    publish_docs(tmp_path / "b", docs_of([5, 6, 7], [], key=50), sources=[("books", 1)], name="b-texts")
    return tmp_path / "a", tmp_path / "b"
