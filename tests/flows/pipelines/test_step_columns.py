"""Columns that steps write: kept as those of sources are, whatever the workers, the slices and the runner."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flat_tokens
import flat_tokens.steps
from flat_tokens.steps import Outcome
from tasks.config import BuildConfig
from tests.faults.support import build_here, settings_of
from tests.refusal import refusal
from tests.sources import by_place, held, write_rows

Rows = list[dict[str, Any]]


class Words:
    """Counts words, which is an integer, and their mean length, which has no value without words. Leaves out *drop*."""

    version = "1"
    gives_columns = ("words", "mean")

    def __init__(self, *, drop: str = "nothing of the kind") -> None:
        self._drop = drop

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        split = [text.split() for text in documents.column("text").to_pylist()]
        means = [sum(map(len, words)) / len(words) if words else None for words in split]
        columns = {"words": pa.array([len(words) for words in split], pa.int32()), "mean": pa.array(means, pa.float32())}
        return Outcome(keep=pa.array([self._drop not in words for words in split]), columns=columns)


class Twice:
    """Sees the column of an earlier step, and the source's."""

    version = "1"
    gives_columns = ("twice",)

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        pairs = zip(documents.column("words").to_pylist(), documents.column("score").to_pylist(), strict=True)
        return Outcome(columns={"twice": pa.array([f"{2 * words} {score}" for words, score in pairs])})


@pytest.fixture(autouse=True)
def _steps(monkeypatch: pytest.MonkeyPatch, small_segments: None) -> None:
    monkeypatch.setattr("flat_tokens.steps.SHIPPED", {**flat_tokens.steps.SHIPPED, "words": Words, "twice": Twice})


def rows_of(count: int) -> Rows:
    return [
        {"id": f"d{i}", "text": " ".join(["salt", "wind", "drop", "harbour"][: i % 5]) * (i % 3), "score": i / 4}
        for i in range(count)
    ]


STEPS = [{"use": "words", "drop": "drop"}, {"use": "twice"}]


def told(output: Path, path: Path, **more: Any) -> dict[str, Any]:
    common = {"validation_fraction": 0.4, "slice_bytes": 400, "verify_level": "full", "documents": {"steps": STEPS}}
    return settings_of(output, path, keep=["score"], **common | more)


def naive(rows: Rows) -> dict[int, dict[str, Any]]:
    """The columns of each document that stays, by its row."""
    found = {}
    for number, row in enumerate(rows):
        words = row["text"].split()
        if "drop" not in words:
            mean = float(np.float32(sum(map(len, words)) / len(words))) if words else None
            found[number] = {
                "score": row["score"],
                "words": len(words),
                "mean": mean,
                "twice": f"{2 * len(words)} {row['score']}",
            }
    return found


def kept(path: str | Path) -> dict[int, dict[str, Any]]:
    return {row: one.columns for (_, row), (_, one) in by_place(path).items()}


def test_a_dataset_keeps_what_steps_write_and_expressions_gates_and_splits_go_by_it(tmp_path, tool):
    rows = rows_of(60)
    gates = {"gates": [{"of": "null_share", "column": "mean", "at_most": 0.9}]}
    result = build_here(told(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), split={"by": "words"}, publish=gates))
    assert kept(result.path) == naive(rows)
    tool.out("verify", result.path, "--sample", "1/1", "--trust-records")
    dataset = flat_tokens.open(result.path)
    assert dataset.manifest["columns"] == {"score": "float64", "words": "int64", "mean": "float64", "twice": "text"}
    chosen = dataset.train.select(where="words >= 2 and twice != '4 1.75'")
    wanted = {number for number, one in naive(rows).items() if one["words"] >= 2 and one["twice"] != "4 1.75"}
    assert chosen.numbers is not None
    row, others = ([one.row for one in held(tmp_path / "out")[split]] for split in ("train", "validation"))
    assert chosen.seq_count > 0
    assert {row[i] for i in chosen.numbers} == wanted & {*row}
    of_train, of_others = ({naive(rows)[number]["words"] for number in some} for some in (row, others))
    assert of_train.isdisjoint(of_others)


class Odd(Words):
    gives_columns = ("words", "row")


class Silent(Words):
    gives_columns = ("words", "mean", "third")


class Lists(Words):
    gives_columns = ("words",)

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        return Outcome(columns={"words": pa.array([[1]] * len(documents), pa.list_(pa.int64()))})


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Odd, "step 'odd' gives a column 'row', which every document has already"),
        (Silent, "step 'odd' gives the columns 'words', 'mean', but its gives_columns names 'words', 'mean', 'third'"),
        (Lists, "step 'odd' gives column 'words' of type list<item: int64>; columns are text, numbers"),
    ],
)
def test_columns_that_no_dataset_keeps_are_refused(tmp_path, step, message, monkeypatch):
    monkeypatch.setattr("flat_tokens.steps.SHIPPED", {"odd": step})
    settings = told(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows_of(9)), documents={"steps": [{"use": "odd"}]})
    with refusal(message):
        build_here(settings)


def test_a_source_keeps_no_column_of_a_steps_name(tmp_path):
    settings = told(tmp_path / "out", tmp_path / "a.jsonl")
    settings["sources"][0]["keep_columns"] = ["words"]
    with refusal("gives the column 'words', and source 'a' keeps one of that name"):
        BuildConfig.model_validate(settings)


def test_documents_on_which_a_step_fails_have_no_values(tmp_path, monkeypatch):
    """They are left out as bad documents; the values of the others stay theirs."""

    class Failing(Words):
        def __call__(self, documents: pa.RecordBatch) -> Outcome:
            if any(text.startswith("salt wind drop") for text in documents.column("text").to_pylist()):
                raise RuntimeError("no")
            return super().__call__(documents)

    monkeypatch.setattr("flat_tokens.steps.SHIPPED", {"words": Failing, "twice": Twice})
    rows = rows_of(30)
    settings = told(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), documents={"steps": STEPS, "on_bad": "skip"})
    result = build_here(settings)
    assert result.totals["documents"]["skipped"]["words.failed"] > 0
    assert kept(result.path) == naive(rows)
