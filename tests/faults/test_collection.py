"""Collecting garbage while everything goes wrong: killed at any change of the disk, beside builds, beside readers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tests.faults.support import ROOT, build_here, command, digests, receipts, settings_of, staged, version_digests, write_notes

EVERYTHING = Policy(keep_versions=1, grace_days=0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with a superfluous version, a pinned one, the latest, and remains of every kind."""
    work = tmp_path_factory.mktemp("garbage")
    root = work / "template"
    for name in ("a", "b", "c"):
        result = build_here(settings_of(root, write_notes(work / "in" / f"{name}.jsonl", 2)))
        if name == "b":
            (root / "pins").mkdir()
            (root / "pins" / f"{result.version}.json").write_text("{}")
    (root / "versions" / "unfinished" / "train").mkdir(parents=True)
    (root / "versions" / "unfinished" / "train" / "zarr.json").write_text("{}")
    (root / "_staging" / "dead" / "0123").mkdir(parents=True)
    (root / "_staging" / "dead" / "0123" / "file").write_text("x")
    (root / "_quarantine" / "damaged").mkdir(parents=True)
    (root / "_cache" / "files").mkdir()
    (root / "_cache" / "files" / f"{'0' * 64}.raw").write_text("x")
    return root


def check_kills(template: Path, work: Path, step: int) -> int:
    calm = work / "calm"
    subprocess.run(["cp", "-a", template, calm], check=True)
    collect(Store.at(calm), EVERYTHING, delete=True)
    latest = Path(flat_tokens.open(calm).path).name
    assert len(list((calm / "versions").iterdir())) == len(receipts(calm)) == 2
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.collected", str(template), str(work), str(step)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    deaths = 0
    for line in run.stdout.splitlines():
        outcome = json.loads(line)
        where = f"killed at mutation {outcome['mutation']}"
        assert "error" not in outcome, f"{where}: {outcome['traceback']}"
        result = outcome["result"]
        assert (result["seen"], result["halves"]) == (latest, []), where
        assert result["left"] == digests(calm), where
        deaths += outcome["died"]
    return deaths


def test_a_killed_collection_leaves_whole_versions_and_the_next_one_ends_it(template: Path, tmp_path: Path) -> None:
    assert check_kills(template, tmp_path, 17) >= 3


@pytest.mark.slow
def test_a_collection_survives_a_kill_at_every_change_of_the_disk(template: Path, tmp_path: Path) -> None:
    assert check_kills(template, tmp_path, 1) >= 50


def test_builds_and_collections_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A build takes shards from the cache that only an older version names; it gets them or makes them, and ends right."""
    root = tmp_path / "out"
    paths = [write_notes(tmp_path / "in" / f"{name}.jsonl", 6) for name in ("a", "b", "c")]
    ended = threading.Event()
    faults: list[str] = []

    def collect_all_the_time() -> None:
        try:
            while not ended.is_set():
                collect(Store.at(root), EVERYTHING, delete=True)
        except BaseException:
            faults.append(traceback.format_exc())

    build_here(settings_of(root, paths[0], slice_bytes=400))
    thread = threading.Thread(target=collect_all_the_time)
    thread.start()
    try:
        for turn in range(6):
            chosen = [paths[turn % 3], paths[(turn + 1) % 3]]
            result = build_here(settings_of(root, *chosen, slice_bytes=400, split_seed=turn))
            assert flat_tokens.verify(root, "full").path == result.path
    finally:
        ended.set()
        thread.join()
    assert faults == []
    calm = tmp_path / "calm"
    build_here(settings_of(calm, *chosen, slice_bytes=400, split_seed=5))
    assert version_digests(root, result.version) == version_digests(calm, result.version)
    collect(Store.at(root), EVERYTHING, delete=True)
    assert [path.name for path in (root / "versions").iterdir()] == [result.version]
    assert receipts(root) == receipts(calm)
    assert staged(root) == []


@pytest.mark.slow
def test_builds_as_commands_survive_collections_as_commands(tmp_path: Path) -> None:
    root = tmp_path / "out"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings_of(root, write_notes(tmp_path / "in" / "a.jsonl", 40), slice_bytes=400)))
    running = subprocess.Popen(command(config), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    collections = 0
    while running.poll() is None:
        arguments = ["gc", str(root), "--keep", "1", "--days", "0", "--delete"]
        done = subprocess.run([sys.executable, "-m", "flows", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or "nothing was built here" in done.stderr, done.stderr
        collections += 1
    _, errors = running.communicate()
    assert running.returncode == 0, errors
    assert collections
    flat_tokens.verify(root, "full")


def test_who_has_a_version_open_by_its_files_reads_on(tmp_path: Path) -> None:
    """A version that goes while it is read goes whole: what is mapped stays, what is opened anew is not there."""
    root = tmp_path / "out"
    source = write_notes(tmp_path / "in" / "a.jsonl", 20)
    first = build_here(settings_of(root, source))
    reader = flat_tokens.open(root)
    tokens = reader.train.slice(0, reader.train.token_count)
    build_here(settings_of(root, source, split_seed=1))
    collect(Store.at(root), EVERYTHING, delete=True)
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(first.path)
    assert len(tokens) == reader.train.token_count
