"""The command as tests of the tools run it."""

from __future__ import annotations

import pytest

from tests.terminal import Terminal


@pytest.fixture
def trusting(tool: Terminal) -> Terminal:
    """Runs commands of ``flat-tokens`` that trust the records of datasets."""
    return tool.with_more("--trust-records")
