"""Exports of a dataset with a loss mask: as labels where the format has a place for them, and said where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens.formats import FORMATS, open_any
from flat_tokens.tools.cli import main
from flat_tokens.tools.export import Exported, export_of, write

SEQUENCES = [[5, 6, 7], [], [8], [9, 10]]
MASK = [0, 1, 1, 0, 1, 0]
LABELS = [[-100, 6, 7], [], [-100], [9, -100]]


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    batch = flat_tokens.TokenBatch.from_sequences(SEQUENCES)._replace(loss_mask=np.array(MASK, np.uint8))
    flat_tokens.write_dataset(tmp_path / "masked", [batch])
    return tmp_path / "masked"


def exported(dataset: Path, out: Path, format: str, **options: Any) -> Exported:
    return write(export_of(dataset, format, options), str(out))


def test_parquet_has_labels(masked: Path, tmp_path: Path) -> None:
    """Beside the tokens, -100 where they do not count, however the rows come in groups. An import takes the tokens alone."""
    done = exported(masked, tmp_path / "out", "parquet", tokens_per_row_group=3)
    table = pq.read_table(tmp_path / "out")
    assert table.column_names == ["input_ids", "labels"]
    assert table["input_ids"].to_pylist() == SEQUENCES
    assert table["labels"].to_pylist() == LABELS
    assert not done.loses_loss_mask
    train = open_any(tmp_path / "out").splits["train"]
    assert [train.sequence(i).tolist() for i in range(train.seq_count)] == SEQUENCES


def test_arrow_has_labels(masked: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported(masked, tmp_path / "out", "arrow")
    rows = datasets.load_from_disk(str(tmp_path / "out"))["train"]
    assert rows["input_ids"][:] == SEQUENCES
    assert rows["labels"][:] == LABELS


def test_without_a_mask_there_are_no_labels(tmp_path: Path) -> None:
    flat_tokens.write_dataset(tmp_path / "plain", [flat_tokens.TokenBatch.from_sequences(SEQUENCES)])
    exported(tmp_path / "plain", tmp_path / "out", "parquet")
    assert pq.read_table(tmp_path / "out").column_names == ["input_ids"]


def test_a_mask_that_would_be_lost_is_told(masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words and in JSON, also when there is nothing left to do."""
    assert main(["export", str(masked), str(tmp_path / "out"), "--to", "megatron"]) == 0
    assert "the loss mask is not exported: megatron has no place for it" in capsys.readouterr().out
    assert main(["export", str(masked), str(tmp_path / "out"), "--to", "megatron", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loses_loss_mask"] is True
    assert main(["export", str(masked), str(tmp_path / "parquet"), "--to", "parquet"]) == 0
    assert "mask" not in capsys.readouterr().out.replace(str(tmp_path), "")


def test_the_column_of_labels_is_taken(masked: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column is 'labels', but that is the column of the loss mask"):
        exported(masked, tmp_path / "out", "parquet", column="labels")


def test_which_formats_keep_it() -> None:
    assert {name for name, entry in FORMATS.items() if entry.keeps_loss_mask} == {"parquet", "arrow"}
