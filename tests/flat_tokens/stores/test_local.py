"""Local files: what is not there is told apart from what could not be looked up; and what survives a power loss."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores.local import kind_of, make_directory, make_durable, raise_named, real_path
from flat_tokens.stores.store import Store
from tests.refusal import refusal


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """One of each kind."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "itself"),
    [
        ("file", "file", "file"),
        ("directory", "directory", "directory"),
        ("pipe", "special", "special"),
        ("link", "file", "link"),
        ("nowhere", None, "link"),
        ("circle", None, "link"),
        ("missing", None, None),
        ("file/below", None, None),
        ("long" * 100, None, None),
    ],
)
def test_each_kind_is_told_and_absence_too(place, name, kind, itself):
    assert kind_of(place / name) == kind
    assert kind_of(place / name, follow_links=False) == itself


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_lookup_that_fails_is_not_taken_for_an_absence(place, code, monkeypatch):
    def fail(path: Any, **_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "stat", fail)
    with refusal(f"{os.strerror(code)}.*{place}/file", OSError):
        kind_of(place / "file")


def test_links_are_resolved_and_a_lookup_that_fails_is_not_taken_for_no_link(place, monkeypatch):
    assert real_path(place / "link") == str(place / "file")
    assert real_path(place / "missing/more") == str(place / "missing/more")
    real = os.lstat

    def fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("/link"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", fail)
    with refusal("Check the disk and run the same command again", OSError):
        real_path(place / "link")


def test_an_error_of_a_name_below_a_descriptor_gets_the_whole_path(place):
    here = os.open(place, os.O_RDONLY)
    try:
        with pytest.raises(FileNotFoundError) as caught:
            os.rename("missing", "other", src_dir_fd=here, dst_dir_fd=here)
        with refusal(f"directory: '{place}/missing'$", FileNotFoundError):
            raise_named(caught.value, place / "missing")
    finally:
        os.close(here)


def test_a_directory_that_another_process_makes_and_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    def made_and_removed(path: Path, mode: int = 0o777) -> None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    monkeypatch.setattr(os, "mkdir", made_and_removed)
    make_directory(tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_all_that_lies_in_a_directory_is_made_durable_together(tmp_path, monkeypatch):
    """Objects that need not be durable one by one are not, and not written in another place."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    store = replace(Store.at(tmp_path / "staged"), durable=False)
    store.put("a/b/object", b"1")
    store.put("beside", b"2")
    assert synced == []
    make_durable(tmp_path / "staged")
    assert sorted(synced) == [str(tmp_path / "staged" / name) for name in ("", "a", "a/b", "a/b/object", "beside")]


def test_a_directory_that_is_not_there_is_not_made_durable(tmp_path):
    with refusal("missing", FileNotFoundError):
        make_durable(tmp_path / "missing")
