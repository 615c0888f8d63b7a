"""Huge documents: bounded memory, or a clear error at the cap. Each build is a process of its own, measured as a whole."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flat_tokens
from tests.examples import first_fast
from tests.faults.support import command
from tests.flat_tokens.demo import TOKENIZER
from tests.processes import python

pytestmark = pytest.mark.slow


class Measured(NamedTuple):
    """How a build ended, what it said, and the most memory that it held."""

    status: int
    stderr: str
    peak_bytes: int


def build(tmp_path: Path, source: Path, **settings: Any) -> Measured:
    config = tmp_path / "config.yaml"
    whole = {"output": str(tmp_path / "out"), "source": {"path": str(source)}, "validation_fraction": 0, **settings}
    config.write_text(json.dumps({"tokenizer": TOKENIZER, **whole}))
    done = python("-c", IN_BETWEEN, *command(config), timeout=None)
    status, peak = map(int, done.stdout.split())
    return Measured(status, done.stderr, peak * (1 if sys.platform == "darwin" else 1024))


IN_BETWEEN = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command. A process starts with the peak of the one that it was forked from, and the tests' own may be large."""


@pytest.mark.parametrize("kind", first_fast(["jsonl", "text"], 0, every=2))
def test_one_document_of_200_mb_is_one_sequence_in_under_2_gb(tmp_path, kind):
    text = "A long document says the same thing again, and again, in slightly other words. " * 2_531_646
    source = tmp_path / f"long.{kind}"
    source.write_text(json.dumps({"text": text}) + "\n" if kind == "jsonl" else text)
    done = build(tmp_path, source)
    assert done.status == 0, done.stderr
    dataset = flat_tokens.open(tmp_path / "out")
    assert (dataset.train.seq_count, dataset.manifest["totals"]["documents"]["text_bytes"]) == (1, len(text))
    assert done.peak_bytes < 2e9


@pytest.mark.parametrize("tokenizer", first_fast(["demo", "cl100k_base"], 0, every=2))
def test_10_mb_without_a_space_take_bounded_memory_and_time(tmp_path, vocabularies, tokenizer):
    source = tmp_path / "spaceless.txt"
    source.write_bytes(b"abcdefghij" * 1_000_000)
    done = build(tmp_path, source, **({} if tokenizer == "demo" else {"tokenizer": tokenizer}))
    assert done.status == 0, done.stderr
    assert done.peak_bytes < 2e9


def test_a_line_of_2_gb_is_a_clear_error_in_little_memory(tmp_path):
    """test_a_line_over_the_cap_is_not_held_in_memory skips one of 32 MB."""
    path = tmp_path / "line.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        file.truncate(2 << 30)  # a hole: zero bytes up to the end
    done = build(tmp_path, path)
    assert done.status == 1
    assert "line.jsonl, line 2 (row 1)" in done.stderr
    assert "documents.max_bytes" in done.stderr
    assert done.peak_bytes < 1.5e9
