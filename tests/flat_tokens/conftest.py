"""Datasets that tests of the library read. Nothing changes them: change a copy. What makes them is imported late: other
tests need none of it.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a build of the demo's sources, with one version and its shards."""
    from tests.faults.support import shards_stay
    from tests.flat_tokens.demo import build_demo

    output = tmp_path_factory.mktemp("tools") / "out"
    with shards_stay():
        build_demo(output)
    return output


@pytest.fixture(scope="session")
def version(demo: Path) -> Path:
    """The version at that output."""
    return (demo / "latest").resolve()


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Versions of datasets of two sources each, with kept columns."""
    from tests.flat_tokens.record.corpora import build_corpus

    root = tmp_path_factory.mktemp("record")
    return {name: build_corpus(root, name, seed=k) for k, name in enumerate(("one", "two"))}
