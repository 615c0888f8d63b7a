"""Samples of the harness's campaigns: nothing is wrong. ``make faults`` makes all trials."""

import json
import os
from typing import Any

import pytest

from tests.faults.campaigns import MENDED
from tests.faults.store_bench import protocols
from tests.processes import python

pytestmark = pytest.mark.slow


def campaign(names: str, *options: str, trials: int | None = None) -> list[dict[str, Any]]:
    """What did not hold in campaigns, made by one process: of so many trials, if wanted, and of one at least."""
    chosen = (f"--only={name}" for name in names.split())
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = python("-m", "tests.faults", *chosen, "--jobs", "1", *options, env=environment, timeout=580)
    assert " trials in " in run.stderr, run.stderr
    assert run.stderr.startswith(f"{trials} trials") if trials else not run.stderr.startswith("0 trials"), run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


OF_OPERATIONS = "kills elsewhere lasting power"


@pytest.mark.parametrize(
    ("names", "under", "every"),
    [
        (OF_OPERATIONS, "^build, (mmap|signed|streamed(, (loss masks|duplicates dropped|processes))?)$", 1000),
        (OF_OPERATIONS, "^(refresh|retokenize|forget|gc|import)$", 900),
        ("faults", "", 400),
        ("readers", "", 10),
        ("histories", "", 67),
        ("decisions", "", 101),
        ("chains", "streamed($|, .*(dropped|columns|files))", 200),
    ],
)
def test_a_sample(names, under, every):
    flaws = campaign(names, "--under", under, "--every", str(every))
    assert not flaws, "\n".join(f"{flaw['what']}: {flaw['under']}, {flaw['name']}: {flaw['told']}" for flaw in flaws)


@pytest.mark.parametrize(
    ("name", "under", "match", "every"),
    [
        ("stores", "build, s3|gc, gs", "", 45),
        ("stores", f"refresh, {protocols()[-1]}", "and after$", 16),
        ("together", "two different builds, s3|gc and the build of a new version, gs", "", 13),
    ],
)
def test_a_sample_on_stores(name, under, match, every):
    """Deaths, faults that pass and faults that stay, in the midst of a command's requests; and two commands at once."""
    assert campaign(name, "--under", under, "--match", match, "--every", str(every)) == []


def test_what_was_mended_stays_so():
    """All of these trials can still be made."""
    assert campaign("mended", trials=len(MENDED)) == []


@pytest.mark.usefixtures("corpus", "vocabularies")
def test_a_sample_of_kills_on_the_corpus():
    assert campaign("corpus", "--every", "150") == []
