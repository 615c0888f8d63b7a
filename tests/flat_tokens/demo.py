"""Small datasets for the tools to look into, made by the build itself."""

import os
from pathlib import Path
from typing import Any

import pytest

from flows.pipelines.build import build
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tests.sources import write_rows

DEMO = Path(__file__).parents[2] / "deployments/demo"
TOKENIZER = str(DEMO / "tokenizer.json")


def build_dataset(output: Path, **settings: Any) -> Path:
    """Build a dataset; the path of its version. Other tests look at what is on the disk when."""
    with Threads(1) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        return Path(build(BuildConfig.model_validate({"output": str(output), **settings}), runner).path)


def build_demo(output: Path, **settings: Any) -> Path:
    """The demo's two sources, a Parquet file and a JSON-lines file; the path of the version."""
    sources = [
        {"name": "stories", "path": str(DEMO / "stories.parquet"), "id_column": "id"},
        {"name": "notes", "path": str(DEMO / "notes.jsonl"), "id_column": "id"},
    ]
    return build_dataset(output, **{"sources": sources, "tokenizer": TOKENIZER, "validation_fraction": 0.2, **settings})


def build_lines(root: Path, *texts: str) -> Path:
    """Build ``out`` of a file ``in/x.jsonl`` below *root*, with a token for each byte; the file."""
    path = write_rows(root / "in/x.jsonl", [{"text": text} for text in texts])
    build_dataset(root / "out", source={"path": str(path.parent)}, tokenizer="bytes", validation_fraction=0)
    return path


def shard_in(output: Path) -> Path:
    """The first token shard below an output."""
    return min(path.parent for path in output.glob("_cache/*/receipt.json"))
