"""The dataset that the tools look into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.support import shards_stay
from tests.flat_tokens.demo import build_demo
from tests.terminal import Terminal


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a build of the demo's sources, with one version and its shards. Nothing changes it: change a copy."""
    output = tmp_path_factory.mktemp("tools") / "out"
    with shards_stay():
        build_demo(output)
    return output


@pytest.fixture
def trusting(tool: Terminal) -> Terminal:
    """Runs commands of ``flat-tokens`` that trust the records of datasets."""
    return tool.with_more("--trust-records")
