"""Before a marker says that something is whole, the disk has been told to keep every file and directory of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.support import build_here, settings_of, write_notes


class Disk:
    """Watches a build: which files were synced, which directories have changed since they were."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.synced: set[int] = set()
        self.changed: set[int] = {root.stat().st_ino}
        self.markers: list[str] = []
        real_fsync, real_mkdir, real_rename, real_replace = os.fsync, os.mkdir, os.rename, os.replace

        def fsync(fd: int) -> None:
            real_fsync(fd)
            number = os.fstat(fd).st_ino
            self.synced.add(number)
            self.changed.discard(number)

        def mkdir(path: Any, *arguments: Any, **named: Any) -> None:
            real_mkdir(path, *arguments, **named)
            self._change(path)

        def rename(source: Any, target: Any) -> None:
            self._mark(Path(target))
            real_rename(source, target)
            self._change(target)

        def replace(source: Any, target: Any) -> None:
            self._mark(Path(target))
            real_replace(source, target)
            self._change(target)

        for name, watched in (("fsync", fsync), ("mkdir", mkdir), ("rename", rename), ("replace", replace)):
            monkeypatch.setattr(os, name, watched)

    def _change(self, path: Any) -> None:
        self.changed.add(Path(path).parent.stat().st_ino)

    def _mark(self, target: Path) -> None:
        """Check what a marker that is about to appear vouches for."""
        name = target.relative_to(self.root)
        match name.parts:
            case ("_cache", _, "receipt.json") | ("versions", _, "zarr.json"):
                vouched = target.parent
            case ("latest.json",):
                vouched = self.root / "versions"
                assert any(vouched.glob("*/zarr.json"))
            case _:
                return
        self.markers.append(name.name)
        above = [path for path in vouched.parents if path.is_relative_to(self.root)]
        for path in (*above, vouched, *vouched.rglob("*")):
            where = f"{path.relative_to(self.root)} before {name}"
            if path.is_dir():
                assert path.stat().st_ino not in self.changed, f"a power loss may undo what is in {where}"
            else:
                assert path.stat().st_ino in self.synced, f"a power loss may empty {where}"


@pytest.mark.parametrize("layout", ["mmap", "compact"])
def test_all_that_a_marker_vouches_for_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Receipt, root metadata and pointer."""
    root = tmp_path / "out"
    root.mkdir()
    settings = settings_of(root, write_notes(tmp_path / "in" / "a.jsonl", 6), slice_bytes=400, layout=layout)
    disk = Disk(root, monkeypatch)
    build_here(settings, 1)
    assert disk.markers == ["receipt.json", "receipt.json", "zarr.json", "latest.json"]
