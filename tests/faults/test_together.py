"""Several builds of one output at the same moment: equal ones help each other, different ones lose nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from tests.examples import first_fast
from tests.faults.support import (
    Settings,
    build_here,
    pointer,
    receipts,
    settings_of,
    shards_stay,
    staged,
    unpublish,
    version_digests,
    write_notes,
)
from tests.processes import python


def together(*several: Settings) -> list[dict[str, Any]]:
    """Builds that begin behind one barrier; the result or the error of each."""
    done = python("-m", "tests.faults.together", *map(json.dumps, several), check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def undisturbed(settings: Settings, root: Path) -> tuple[str, dict[str, str]]:
    result = build_here({**settings, "output": str(root)})
    return result.version, version_digests(root, result.version)


def check_equal_builds(settings: Settings, outcomes: list[dict[str, Any]], calm: Path) -> None:
    root = Path(settings["output"])
    version, expected = undisturbed(settings, calm)
    assert [outcome.get("result") for outcome in outcomes] == [{"version": version, "sequence": 1}] * len(outcomes), outcomes
    assert version_digests(root, version) == expected
    assert pointer(root)["sequence"] == 1
    assert staged(root) == []
    assert receipts(root) == receipts(calm)
    flat_tokens.verify(root, "full")


@pytest.mark.parametrize("times", first_fast([1, 4]))
def test_equal_builds_at_once_all_succeed(settings, tmp_path, times):
    """Over damaged shards, too: what one build has just mended, another one that saw the damage leaves in place."""
    root = Path(settings["output"])
    check_equal_builds(settings, together(*[settings] * 2), tmp_path / "calm")
    assert not (root / "_quarantine").exists()
    for turn in range(times):
        shutil.rmtree(root)
        with shards_stay():
            build_here(settings)
        for key in (keys := receipts(root)):
            shard = root / "_cache" / key / "encoded_tokens/c/0"
            shard.write_bytes(shard.read_bytes()[:-1])
        unpublish(root)
        check_equal_builds(settings, together(*[settings] * 4), tmp_path / f"calm-{turn}")
        assert {path.name.rpartition("-")[0] for path in root.glob("_quarantine/*-*")} == keys != set()


@pytest.mark.parametrize("times", first_fast([1, 5]))
def test_different_builds_at_once_lose_no_update(settings, tmp_path, times):
    """Both versions are complete; who comes second to the pointer is told so, and its rerun makes it the latest."""
    root = Path(settings["output"])
    other = settings_of(root, write_notes(tmp_path / "in/b.jsonl", 12), slice_bytes=400)
    sequence = 0
    for turn in range(times):
        builds = [{**settings, "split_seed": turn}, {**other, "split_seed": turn}]
        outcomes, now = together(*builds), pointer(root)
        won = [outcome["result"]["version"] for outcome in outcomes if "result" in outcome]
        assert now["sequence"] == sequence + len(won)
        assert now["version"] in won
        for number, (build, outcome) in enumerate(zip(builds, outcomes, strict=True)):
            if "result" not in outcome:
                told = f"another build published {now['version']} while this one ran"
                assert re.search(f"ValueError.*{told}.*run the build again to make it the latest", outcome["error"])
                again = build_here(build)
                assert (again.was_published, again.sequence) == (True, now["sequence"] + 1)
                assert pointer(root)["version"] == again.version
            version, expected = undisturbed(build, tmp_path / f"calm-{turn}-{number}")
            assert version_digests(root, version) == expected
        flat_tokens.verify(root, "full")
        sequence = pointer(root)["sequence"]
        assert staged(root) == []
