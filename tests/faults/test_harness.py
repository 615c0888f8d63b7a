"""Samples of the harness's campaigns: nothing is wrong but what is known. ``make faults`` makes all trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.faults.support import ROOT

pytestmark = pytest.mark.slow

Flaws = list[dict[str, Any]]


def campaign(names: str, *options: str, trials: int | None = None) -> Flaws:
    """What did not hold in campaigns, made by one process: of so many trials, if wanted, and of one at least."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults", *(f"--only={name}" for name in names.split()), "--jobs", "1", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert " trials in " in run.stderr, run.stderr
    assert run.stderr.startswith(f"{trials} trials") if trials else not run.stderr.startswith("0 trials"), run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_power_loss_does_not_undo_what_was_said_to_be_done() -> None:
    """The link ``latest`` is moved, the first version of an output, and a new directory of files, with those above it."""
    only_the_end = 1_000_000
    flaws = campaign("power", "--under", "rollback|retokenize|export", "--every", str(only_the_end))
    assert [flaw for flaw in flaws if "claimed" in flaw["told"]] == []


OF_OPERATIONS = "kills elsewhere lasting power"


@pytest.mark.parametrize(
    ("names", "under", "every"),
    [
        (OF_OPERATIONS, "^build", 700),
        (OF_OPERATIONS, "^(?!build)", 700),
        ("faults", "", 400),
        ("readers", "", 10),
        ("histories", "", 34),
        ("decisions", "", 67),
        ("chains", "", 90),
    ],
)
def test_a_sample(names: str, under: str, every: int) -> None:
    flaws = [flaw for flaw in campaign(names, "--under", under, "--every", str(every)) if not flaw["known"]]
    assert not flaws, "\n".join(f"{flaw['what']}: {flaw['under']}, {flaw['name']}: {flaw['told']}" for flaw in flaws)


@pytest.mark.parametrize(
    ("name", "under", "every"),
    [
        ("stores", "build, s3|gc, gs|refresh, abfs", 40),
        ("together", "two different builds, s3|gc and the build of a new version, gs", 50),
    ],
)
def test_a_sample_on_stores(name: str, under: str, every: int) -> None:
    assert [flaw for flaw in campaign(name, "--under", under, "--every", str(every)) if not flaw["known"]] == []


@pytest.mark.usefixtures("corpus", "vocabularies")
def test_a_sample_of_kills_on_the_corpus() -> None:
    assert campaign("corpus", "--every", "100") == []
