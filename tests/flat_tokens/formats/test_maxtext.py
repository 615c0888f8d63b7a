"""Exports as MaxText's own readers take them. MaxText needs Python 3.12, so it is not among the peers."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.formats.megatron import Megatron
from flat_tokens.formats.olmo import Olmo
from tests.flat_tokens.formats.exporting import export, splits_of

pytestmark = pytest.mark.needs("maxtext", "grain")

SEQUENCES = [[10 * d + k + 1 for k in range(d % 7)] for d in range(40)]


def module(name: str) -> Any:
    return importlib.import_module(f"maxtext.input_pipeline.{name}")


def test_its_rows_of_token_files_are_the_tokens_in_order(tmp_path: Path) -> None:
    export("olmo-core", splits_of(SEQUENCES), tmp_path, Olmo(end_of_text=0))
    olmo, files = module("olmo_data"), [(str(path), "demo") for path in sorted((tmp_path / "train").glob("*.npy"))]
    index = olmo.build_index(
        files, 16, tokenizer="demo", header_reader=lambda path: olmo.read_raw_metadata_from_path(path, "uint16")
    )
    source = module("olmo_data_grain").OlmoNpyDataSource(index)
    tokens = list(itertools.chain.from_iterable([*sequence, 0] for sequence in SEQUENCES))
    assert len(source) == len(tokens) // 16
    rows = [source[i]["tokens"].tolist() for i in range(len(source))]
    assert list(itertools.chain.from_iterable(rows)) == tokens[: len(tokens) // 16 * 16]


def test_its_documents_of_an_indexed_dataset_are_the_sequences(tmp_path: Path) -> None:
    export("megatron", splits_of(SEQUENCES), tmp_path, Megatron(end_of_text=0))
    source = module("_mmap_datasource").MMapIndexedDataSource(str(tmp_path / "train"))
    documents = [np.asarray(source[i]["text"]).tolist() for i in range(len(source))]
    assert documents == [[*sequence, 0] for sequence in SEQUENCES]
