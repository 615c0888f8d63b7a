"""Terminated, a build goes on where it was; who reads a version sees nothing of the next one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

import flat_tokens
from tests.faults.support import (
    ROOT,
    Settings,
    build_here,
    command,
    digests,
    pointer,
    receipts,
    settings_of,
    staged,
    version_digests,
    write_notes,
)

DEMO = ROOT / "deployments/demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, str, dict[str, str]]:
    """A build of about a second with 26 slices: what it is told, its version, its bytes."""
    work = tmp_path_factory.mktemp("demo")
    settings = settings_of(work / "out", DEMO / "stories.parquet", DEMO / "notes.jsonl", slice_bytes=8000)
    result = build_here(settings)
    return settings, result.version, version_digests(work / "out", result.version)


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command(config), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(root: Path, process: subprocess.Popen[str]) -> None:
    """Until the build has begun to write, or is over."""
    while not root.exists() and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.slow
def test_terminated_build_ends_and_goes_on(demo: tuple[Settings, str, dict[str, str]], tmp_path: Path) -> None:
    """Exit status 143 and one line that says what to do, whenever the signal comes."""
    settings, version, expected = demo
    rng = random.Random(15)
    for turn in range(5):
        root = tmp_path / str(turn)
        config = tmp_path / f"{turn}.yaml"
        config.write_text(json.dumps({**settings, "output": str(root)}))
        with start(config) as process:
            wait_for(root, process)
            time.sleep(rng.uniform(0, 0.3))
            process.terminate()
            _, errors = process.communicate(timeout=120)
        assert process.returncode in (143, 0), errors  # 0: the build was faster
        if process.returncode:
            assert errors.splitlines() == ["terminated: run the same command again to resume after the last stored shard"]
        finished = receipts(root)
        result = build_here({**settings, "output": str(root)})
        assert result.was_published or result.slices_reused == len(finished)
        assert version_digests(root, version) == expected
        assert staged(root) == []


def test_a_reader_keeps_its_version_while_the_next_one_is_built_and_published(tmp_path: Path) -> None:
    """What is published is never touched again, and who has it open sees no change."""
    root = tmp_path / "out"
    first = build_here(settings_of(root, write_notes(tmp_path / "in/a.jsonl", 3)))
    reader = flat_tokens.open(root)
    before, tokens = digests(Path(first.path)), reader.train.slice(0, reader.train.token_count)
    stamps = {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")}

    build_here(settings_of(root, write_notes(tmp_path / "in/b.jsonl", 6)))

    assert pointer(root)["sequence"] == 2
    assert (reader.train.slice(0, reader.train.token_count) == tokens).all()
    assert digests(Path(first.path)) == before
    assert stamps == {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")}
    assert os.path.realpath(root / "latest") == os.path.realpath(flat_tokens.open(root).path)
