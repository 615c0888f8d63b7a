"""The command as tests of the tools run it."""

import shutil
from pathlib import Path

import pytest

from tests.terminal import Terminal


@pytest.fixture
def trusting(tool: Terminal) -> Terminal:
    """Runs commands of ``flat-tokens`` that trust the records of datasets."""
    return tool.with_more("--trust-records")


@pytest.fixture
def copy(demo: Path, tmp_path: Path) -> Path:
    """An output that may be damaged."""
    return Path(shutil.copytree(demo, tmp_path / "out", symlinks=True))
