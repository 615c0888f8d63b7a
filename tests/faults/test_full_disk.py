"""A disk that is full, limited, failing or read-only: no success is claimed, one line says why, and a rerun completes."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tests.faults.support import (
    ROOT,
    Settings,
    build_here,
    command,
    run_command,
    settings_of,
    staged,
    version_digests,
    write_notes,
)

WRITES = ("write", "ftruncate", "fsync", "replace", "rename", "mkdir", "open")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path / "out", write_notes(tmp_path / "in" / "a.jsonl", 6), slice_bytes=400)


def write_config(settings: Settings, directory: Path) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(settings))
    return path


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
    """From the *number*-th call on, the system refuses to write, as a full disk does."""
    count = itertools.count(1)

    def failing(real: Any, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if (name != "open" or arguments[1] & os.O_CREAT) and next(count) >= number:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **named)

        return call

    for name in WRITES:
        monkeypatch.setattr(os, name, failing(getattr(os, name), name))


def failure_of(settings: Settings, number: int, code: int) -> str | None:
    """What a build says to which the disk says no at the *number*-th call; None where there are fewer."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number, code)
        try:
            build_here(settings, 1)
        except (OSError, ValueError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_build_fails_wherever_the_disk_does_and_completes_afterwards(settings: Settings, tmp_path: Path, code: int) -> None:
    """Whatever call is refused, an OSError comes out; the next build takes over what is whole."""
    calm = build_here({**settings, "output": str(tmp_path / "calm")})
    expected = version_digests(tmp_path / "calm", calm.version)
    root = Path(settings["output"])
    failures = 0
    for number in itertools.count(1, 40):
        shutil.rmtree(root, ignore_errors=True)
        error = failure_of(settings, number, code)
        if error is None:
            break
        failures += 1
        assert os.strerror(code) in error
        if (root / "latest.json").exists():
            flat_tokens.verify(root, "full")
        again = build_here(settings)
        assert again.version == calm.version
        assert version_digests(root, calm.version) == expected
        assert staged(root) == []
    assert failures >= 5


def test_error_of_a_full_disk_names_the_object_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.at(tmp_path)
    fail_at(monkeypatch, 2, errno.ENOSPC)
    with pytest.raises(OSError, match=r"No space left on device. Make room and run the same command again: '.*/small'"):
        store.put("small", b"x" * 1000)
    monkeypatch.undo()
    fail_at(monkeypatch, 2, errno.ENOSPC)
    with pytest.raises(OSError, match=r"No space left on device. Make room and run the same command again: '.*/large'"):
        store.put("large", bytes(9 << 20))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def limited(code: str, limit: int) -> str:
    """What a process prints that may write no file above *limit* bytes."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
    )
    return run.stdout


@pytest.mark.parametrize("limit", [100_000, 4 << 20, 5_000_001])
def test_limit_within_a_direct_write_is_called_by_its_name(tmp_path: Path, limit: int) -> None:
    """A direct write is refused as invalid where the limit is not at a block's end; that is not the cause."""
    code = f"""
from flat_tokens.stores.store import Store
try:
    Store.at({str(tmp_path)!r}).put("large", bytes(10_000_000))
except OSError as error:
    print(error)
"""
    assert limited(code, limit) == f"[Errno 27] File too large: '{tmp_path}/large'\n"
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_fails_the_command_in_one_line(settings: Settings, tmp_path: Path) -> None:
    """And without the limit the same command completes."""
    root, config = Path(settings["output"]), write_config(settings, tmp_path)
    failed = run_command(config, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)))
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1, failed.stderr
    assert "File too large" in failed.stderr
    assert str(root) in failed.stderr
    assert not (root / "latest.json").exists()
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(root)

    assert run_command(config).returncode == 0
    check_as_undisturbed(settings, root, tmp_path)


def check_as_undisturbed(settings: Settings, root: Path, directory: Path) -> None:
    calm = build_here({**settings, "output": str(directory / "calm")})
    assert version_digests(root, calm.version) == version_digests(directory / "calm", calm.version)
    assert staged(root) == []


@pytest.fixture(scope="module")
def _may_mount() -> None:
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("a file system of our own cannot be mounted here")


def in_a_small_disk(script: str, disk: Path) -> list[str]:
    """Lines that a shell script prints, for which a small file system is mounted at *disk*: nobody else sees it."""
    disk.mkdir()
    mounted = f"set -eu; mount -t tmpfs -o size=900k none {disk}; {script}"
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.usefixtures("_may_mount")
def test_full_file_system_fails_the_command_in_one_line_and_more_room_completes_it(settings: Settings, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    config = write_config({**settings, "output": str(disk / "out")}, tmp_path)
    build = " ".join(command(config))
    lines = in_a_small_disk(
        f"""
        status=0; {build} 2>&1 || status=$?; echo "status $status"
        test ! -e {disk}/out/latest.json
        mount -o remount,size=64m {disk}
        {build} --json > {tmp_path}/result.json
        mount -o remount,ro {disk}
        cp -r {disk}/out {tmp_path}/out
        """,
        disk,
    )
    assert len(lines) == 2, lines
    assert lines[0].startswith("build failed: [Errno 28] No space left on device. Make room and run the same command again: ")
    assert str(disk) in lines[0]
    assert lines[1] == "status 1"
    check_as_undisturbed(settings, tmp_path / "out", tmp_path)


@pytest.mark.usefixtures("_may_mount")
def test_read_only_output_is_refused_in_one_line(settings: Settings, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    config = write_config({**settings, "output": str(disk / "out")}, tmp_path)
    build = " ".join(command(config))
    lines = in_a_small_disk(f"mount -o remount,ro {disk}; status=0; {build} 2>&1 || status=$?; echo status $status", disk)
    assert lines == [
        f"build failed: cannot write to output {disk}/out: Read-only file system. Choose another output.",
        "status 1",
    ]


def test_output_that_is_no_directory_is_refused_in_one_line(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    failed = run_command(write_config({**settings, "output": str(tmp_path / "file" / "out")}, tmp_path))
    assert failed.returncode == 1
    assert failed.stderr.splitlines() == [
        f"build failed: cannot write to output {tmp_path}/file/out: Not a directory. Choose another output."
    ]
