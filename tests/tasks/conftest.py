"""Outputs of the tests of tasks, and versions in them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flat_tokens.stores.store import Store
from tests.faults.support import build_here, settings_of, write_notes

Build = Callable[..., str]
ON_DISK = pytest.mark.parametrize("output", ["disk"], indirect=True)
IN_A_STORE = pytest.mark.parametrize("output", ["memory"], indirect=True)


@pytest.fixture
def root(output: str) -> Store:
    """A new output, on a disk and in an object store."""
    made = Store.at(output)
    if made.is_local:
        Path(made.root).mkdir()
    return made


@pytest.fixture
def build(output: str, tmp_path: Path) -> Build:
    """Makes a version of the texts in files of these names, one shard each; the version."""

    def made(*names: str, **settings: object) -> str:
        paths = [write_notes(tmp_path / "in" / f"{name}.jsonl", 2) for name in names]
        whole = {**settings_of(Path("unused"), *paths, scratch=str(tmp_path / "scratch")), "output": output, **settings}
        return build_here(whole).version

    return made
