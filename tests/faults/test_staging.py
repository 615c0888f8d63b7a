"""Whose staging is whose: what a dead process left is swept, what a live one writes is not."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tasks.output.leases
import tasks.shards.write
from flat_tokens.stores.store import Store
from tasks.assemble.assembler import Assembler
from tasks.output.leases import attempt, sweep
from tests.faults.support import build_here, staged
from tests.processes import ROOT, in_threads
from tests.refusal import refusal

HOLD = """
import sys
from pathlib import Path
from flat_tokens.stores.store import Store
from tasks.output.leases import attempt
with attempt(Store.at(sys.argv[1]), Path(sys.argv[1]) / "_cache", "0123456789abcdef") as place:
    Path(place.staging, "half").write_text("written")
    print(place.staging, flush=True)
    sys.stdin.read()
"""


def test_staging_of_a_live_process_stays_and_of_a_dead_one_goes(settings, tmp_path):
    """Also if it was another version's; and what it wrote is never taken for its own by another attempt."""
    output = tmp_path / "out"
    command, pipe = [sys.executable, "-c", HOLD, str(output)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        staging = Path(process.stdout.readline().strip())
        result = build_here(settings)
        assert (staging / "half").read_text() == "written"
        build_here({**settings, "split_seed": 1})
        assert (staging / "half").read_text() == "written"
        process.kill()
    assert (staging / "half").exists()
    assert build_here(settings).version == result.version
    assert staged(output) == []
    assert not (output / "_staging").exists()


def test_remains_of_a_sweep_or_of_a_death_between_two_steps_are_swept(tmp_path):
    """A directory without a lock, a lock without a directory, an empty build; and what an attempt wrote that fails."""
    staging = tmp_path / "_staging"
    (staging / "build" / "0123456789ab" / "deep").mkdir(parents=True)
    (staging / "build" / "0123456789ab" / "deep" / "file").write_text("x")
    (staging / "other").mkdir()
    (staging / "other" / "ba9876543210.lock").touch()
    (staging / "third").mkdir()
    with refusal("stop", RuntimeError), attempt(Store.at(tmp_path), tmp_path, "mine") as place:
        assert sorted(path.name for path in staging.iterdir()) == ["mine"]
        Path(place.staging, "file").write_text("x")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    sweep(str(tmp_path))


def test_attempts_that_come_and_go_do_not_sweep_each_other(tmp_path):
    """Every one finds its directory there, however many begin, sweep and end beside it."""

    def come_and_go(build: str) -> None:
        for _ in range(60):
            with attempt(Store.at(tmp_path), tmp_path, build) as place:
                written = Path(place.staging, "file")
                written.write_text("x")
                sweep(str(tmp_path))
                assert written.read_text() == "x"

    in_threads(come_and_go, ("one", "one", "two", "two"))
    assert not (tmp_path / "_staging").exists()


def test_staging_stays_until_who_writes_there_has_ended(settings, monkeypatch):
    """A build that fails waits for the shards that are under way. Else half a shard is moved to the cache, with a receipt."""
    failed, stayed = threading.Event(), []
    real = tasks.shards.write.tokenize_slice

    def tokenize(slice_: Any, recipe: Any, place: Any, *more: Any) -> Any:
        if slice_.ranges[0].start:
            failed.wait(20)
            time.sleep(0.3)
            stayed.append(Path(place.staging).exists())
        return real(slice_, recipe, place, *more)

    def add(*_: Any) -> Any:
        failed.set()
        raise OSError("stop")

    monkeypatch.setattr("tasks.shards.write.tokenize_slice", tokenize)
    monkeypatch.setattr(Assembler, "add", add)
    with refusal("stop", OSError):
        build_here(settings)
    assert stayed
    assert all(stayed)


def test_nothing_leaves_a_staging_directory_that_is_being_removed(tmp_path, monkeypatch):
    """As a thread would have it that somebody did not wait for, such as behind a second Ctrl-C: half of a shard would get its
    name.
    """
    target, real = tmp_path / "shard", tasks.output.leases.remove

    def remove(home: str, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(staged, target)
        real(home, key)

    monkeypatch.setattr("tasks.output.leases.remove", remove)
    with attempt(Store.at(tmp_path / "out"), tmp_path / "scratch", "0123") as place:
        staged = Path(place.staging) / "shard"
        staged.mkdir()
        (staged / "object").write_bytes(b"tokens")
    assert not target.exists()
    assert not (tmp_path / "out/_staging").exists()
