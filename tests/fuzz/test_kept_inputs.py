"""Inputs that broke something once break nothing now, but for those of faults that are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz.driver import CORPUS, LEFT, clear
from tests.fuzz.known import reason

ROOT = Path(__file__).parents[2]
KEPT = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*--*"))


def fuzz(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def faults() -> dict[str, str | None]:
    """The fault of each kept input, None where there is none any more."""
    done = fuzz("--replay", timeout=580)
    assert done.returncode == 0, done.stderr
    return {name: detail for name, _, detail in map(json.loads, done.stdout.splitlines())}


def kept(name: str) -> object:
    why = reason(name.partition("--")[0])
    return pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=why)] if why else [], id=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [kept(name) for name in KEPT])
def test_an_input_that_was_kept_breaks_nothing(faults, name):
    assert faults[name] is None


def test_every_fault_that_is_known_has_an_input():
    """A fault that was mended is no longer known."""
    from tests.fuzz.known import KNOWN

    found = {reason(name.partition("--")[0]) for name in KEPT}
    assert set(KNOWN.values()) <= found


@pytest.mark.slow
def test_what_a_killed_driver_leaves_is_removed_by_the_next_one(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "300", "--keep", str(tmp_path), "groups"]
    driver = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    places = (Path("/dev/shm"), tmp_path)

    def left() -> list[Path]:
        return [path for place in places for path in place.glob(f"{LEFT}{driver.pid}-*")]

    until = time.monotonic() + 200
    while not left():
        assert time.monotonic() < until
        time.sleep(0.1)
    driver.kill()
    driver.wait()
    assert left()
    for place in places:
        clear(place)
    assert not left()


@pytest.mark.slow
def test_some_fuzzing_finds_no_other_faults(tmp_path):
    """As many runs of the same seed on every machine. Datasets are in ``tests/faults/test_dataset_mutations.py``."""
    from tests.fuzz.targets import TARGETS

    targets = [name for name in TARGETS if not name.startswith("dataset-")]
    done = fuzz("--seconds", "120", "--runs", "10", "--seed", "0", "--keep", str(tmp_path), *targets, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
