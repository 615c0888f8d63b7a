"""Datasets in every layout with bits flipped, objects cut off, swapped, removed and added, and metadata changed.

``verify --full`` finds it, and readers get the right tokens or an error, but for what zarr cannot show. The mutations are drawn
and judged by ``tests/fuzz/mutated_datasets.py``.
"""

import re

import pytest

from tests.fuzz.mutated_datasets import DATASETS
from tests.fuzz.test_kept_inputs import fuzz

NAMES = [target.name for target in DATASETS]


@pytest.mark.slow
def test_some_mutations_are_found_and_never_misread(tmp_path):
    """``docs/measured/fuzzing.md`` says how ten thousand are made."""
    runs, seconds = 12, 80
    amount = ("--runs", str(runs), "--seconds", str(seconds))
    done = fuzz(*amount, "--seed", "2", "--keep", str(tmp_path), *NAMES, timeout=seconds * len(NAMES) + 60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(rf"^\| (dataset-\S+) \| {runs:,} \|", done.stdout, re.M)[: len(NAMES)] == NAMES, done.stdout
