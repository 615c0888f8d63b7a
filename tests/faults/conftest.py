"""What several tests of faults build."""

from pathlib import Path

import pytest

from tests.faults.support import Settings, settings_of, write_notes


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A build of several slices."""
    return settings_of(tmp_path / "out", write_notes(tmp_path / "in/a.jsonl", 12), slice_bytes=400)
