"""Inputs that broke something once break nothing now, and a little fuzzing finds no others."""

import json
import re

import pytest

from tests.fuzz.driver import CORPUS
from tests.processes import python


def fuzz(*arguments: str) -> str:
    """What the fuzzers say that find no fault."""
    done = python("-m", "tests.fuzz", *arguments, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_inputs_that_were_kept_break_nothing():
    faults = {name: fault for name, *fault in map(json.loads, fuzz("--replay").splitlines())}
    assert {name: fault for name, fault in faults.items() if fault != [None, None]} == {}
    assert sorted(faults) == sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*--*"))


@pytest.mark.slow
def test_some_fuzzing_finds_no_other_faults(tmp_path):
    """As many runs of the same seed on every machine."""
    from tests.fuzz.targets import TARGETS

    targets = [name for name in TARGETS if not name.startswith("dataset-")]
    fuzz("--seconds", "120", "--runs", "10", "--seed", "0", "--keep", str(tmp_path), *targets)


@pytest.mark.slow
def test_some_mutations_of_datasets_are_found_and_never_misread(tmp_path):
    """``verify --full`` finds them, and readers get the right tokens or an error, but for what zarr cannot show.
    ``docs/measured/fuzzing.md`` says how ten thousand are made.
    """
    from tests.fuzz.mutated_datasets import DATASETS

    said = fuzz("--runs", "12", "--seconds", "80", "--seed", "2", "--keep", str(tmp_path), *DATASETS)
    assert re.findall(r"^\| (dataset-\S+) \| 12 \|", said, re.M)[: len(DATASETS)] == [*DATASETS], said
