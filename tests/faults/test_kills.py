"""Killed at any moment, a build goes on where it was: same bytes, nothing left behind, readers never see half of it."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    run_command,
    settings_of,
    staged,
    version_digests,
    write_notes,
)

DEMO = ROOT / "deployments" / "demo"


class Calm(NamedTuple):
    """An undisturbed build: what it was told, what it made, over which older dataset."""

    settings: Settings
    version: str
    digests: dict[str, str]
    template: Path
    old_version: str
    old_keys: set[str]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    work = tmp_path_factory.mktemp("calm")
    template = work / "template"
    old = build_here(settings_of(template, write_notes(work / "in" / "old.jsonl", 2)))
    settings = settings_of(work / "out", write_notes(work / "in" / "new.jsonl", 6), slice_bytes=400)
    result = build_here(settings)
    assert result.slices == 2
    return Calm(
        settings, result.version, version_digests(work / "out", result.version), template, old.version, receipts(template)
    )


def killed_at(calm: Calm, work: Path, first: int, step: int) -> Iterator[dict[str, Any]]:
    """What came of a build killed at mutation *first*, at ``first + step`` and so on, and run again."""
    arguments = [json.dumps(calm.settings), str(calm.template), str(work), str(first), str(step)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.forked", "kill", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        outcome = json.loads(line)
        assert "error" not in outcome, f"killed at mutation {outcome['mutation']}: {outcome['traceback']}"
        yield {**outcome, **outcome["result"]}


def check_kills(calm: Calm, work: Path, first: int, step: int) -> int:
    """The number of deaths, after each of which all is well."""
    deaths = 0
    for outcome in killed_at(calm, work, first, step):
        where = f"killed at mutation {outcome['mutation']}"
        deaths += outcome["died"]
        committed = outcome["slices"] == 0
        assert outcome["seen"] in (calm.old_version, calm.version), where
        assert outcome["digests"] == calm.digests, where
        assert outcome["staged"] == [], where
        assert outcome["versions"] == sorted([calm.old_version, calm.version]), where
        assert outcome["pointer"]["version"] == calm.version, where
        assert outcome["pointer"]["sequence"] == 2, where
        assert outcome["link"] == f"versions/{calm.version}", where
        assert not [name for name in outcome["beside"] if name.startswith(".latest.") and name != ".latest.lock"], where
        finished = set(outcome["finished"]) - calm.old_keys
        assert not finished & set(outcome["tokenized"]), where
        if committed:
            assert outcome["tokenized"] == [], where
        else:
            assert outcome["slices_reused"] == len(finished), where
            assert len(outcome["tokenized"]) == outcome["slices"] - len(finished), where
    assert not outcome["died"]
    return deaths


def test_killed_build_goes_on_behind_the_last_finished_shard(calm: Calm, tmp_path: Path) -> None:
    """A kill now and then over the whole length of the build."""
    assert check_kills(calm, tmp_path, 29, 60) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_build_survives_a_kill_at_every_mutation_of_the_store(calm: Calm, tmp_path: Path, first: int) -> None:
    assert check_kills(calm, tmp_path, first, 4) >= 50


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
def test_build_survives_kills_at_random_times(demo: tuple[Settings, str, dict[str, str]], tmp_path: Path) -> None:
    """Twenty of them, up to four over one output. A run that was over before it could be killed counts for none."""
    settings, version, expected = demo
    rng = random.Random(20)
    deaths, latest = 0, 0.5
    for turn in itertools.count():
        if deaths >= 20:
            break
        root = tmp_path / str(turn)
        config = tmp_path / f"{turn}.yaml"
        config.write_text(json.dumps({**settings, "output": str(root)}))
        for _ in range(4):
            with start(config) as process:
                wait_for(root, process)
                time.sleep(rng.uniform(0, latest))
                process.kill()
                status = process.wait()
            assert status in (0, -signal.SIGKILL)
            deaths += status != 0
            if status == 0:
                latest /= 2  # this machine is fast
            if (root / "latest.json").exists():
                flat_tokens.verify(root, "full")
        finished = {key: (root / f"_cache/{key}/receipt.json").stat().st_mtime_ns for key in receipts(root)}
        again = run_command(config)
        assert again.returncode == 0, again.stderr
        assert version_digests(root, version) == expected
        assert staged(root) == []
        assert finished == {key: (root / f"_cache/{key}/receipt.json").stat().st_mtime_ns for key in finished}


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
            assert errors.splitlines() == ["terminated: run the same command again to go on behind the last stored shard"]
        finished = receipts(root)
        result = build_here({**settings, "output": str(root)})
        assert result.was_published or result.slices_reused == len(finished)
        assert version_digests(root, version) == expected
        assert staged(root) == []


def test_a_reader_keeps_its_version_while_the_next_one_is_built_and_published(calm: Calm, tmp_path: Path) -> None:
    """What is published is never touched again, and who has it open sees no change."""
    root = tmp_path / "out"
    first = build_here(settings_of(root, write_notes(tmp_path / "in" / "a.jsonl", 3)))
    reader = flat_tokens.open(root)
    before, tokens = digests(Path(first.path)), reader.train.slice(0, reader.train.token_count)
    stamps = {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")}

    build_here({**calm.settings, "output": str(root)})

    assert pointer(root)["sequence"] == 2
    assert (reader.train.slice(0, reader.train.token_count) == tokens).all()
    assert digests(Path(first.path)) == before
    assert stamps == {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")}
    assert os.path.realpath(root / "latest") == os.path.realpath(flat_tokens.open(root).path)
