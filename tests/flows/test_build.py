"""The Prefect flow against a real server: what people see, what the cache does, what is never stored."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows.build import build_dataset
from flows.pipelines.stages import Stage, in_order
from flows.runners.prefect_tasks import PACK_ITEMS, PrefectTasks
from tasks.config import BuildConfig
from tests.faults.support import build_here, same_bytes
from tests.flat_tokens.demo import DEMO
from tests.flows.asked import task_runs
from tests.refusal import refusal
from tests.sources import write_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def config(output: Path, **settings: Any) -> BuildConfig:
    sources = [{"name": "stories", "path": str(DEMO / "stories.parquet"), "id_column": "id"}]
    return BuildConfig.model_validate(
        {"output": str(output), "name": "watched", "sources": sources, "tokenizer": "bytes", "slice_bytes": 1_000_000, **settings}
    )


def test_steps_and_duplicates_are_seen_by_name(tmp_path):
    """Of more steps than a name has room for, the others are counted."""
    steps = [{"use": "length", "min_bytes": 1}, *({"use": "length", "name": name, "min_bytes": 1} for name in "abcde")]
    documents = {"steps": steps, "duplicates": "drop"}
    result = build_dataset(config(tmp_path / "out", name="stepped", documents=documents, slice_bytes=20_000))
    seen = task_runs("build stepped with bytes")
    tokenized = [name for name in seen if name.startswith("tokenize ")]
    assert tokenized
    assert all(name.endswith(" (length, a, b, c, 2 more)") for name in tokenized)
    assert sum(name.startswith("duplicates of file 1 from row ") for name in seen) == result.slices
    assert list(result.seconds) == ["download", "trial", "tokenize", "duplicates", "split", "finalize"]


def test_five_stages_are_seen_by_name_and_prefects_cache_is_a_view_of_the_receipts(tmp_path):
    """A new split finds the tokens of every slice, and the server shows it as cached; without the indexes it does not."""
    result = build_dataset(config(tmp_path / "out", name="first"))
    seen = task_runs("build first with bytes")
    whole = ("download stories.parquet", "tokenize stories.parquet[0:3]", f"finalize {result.version}")
    assert [seen[name] for name in whole] == ["Completed"] * 3
    assert all(any(name.startswith(begin) for name in seen) for begin in ("shard-write ", "split train tokens 0 to "))
    again = build_dataset(config(tmp_path / "out", name="second", validation_fraction=0.5))
    assert again.slices_reused == again.slices == 1
    assert task_runs("build second with bytes")["tokenize stories.parquet[0:3]"] == "Cached"
    for index in (tmp_path / "out/_cache/index").glob("*.json"):
        index.unlink()
    build_dataset(config(tmp_path / "out", name="third", validation_fraction=0.25))
    assert task_runs("build third with bytes")["tokenize stories.parquet[0:3]"] == "Completed"


def hundred_lines(directory: Path) -> Path:
    """A file of a hundred lines, each a slice of its own with ``slice_bytes`` 50."""
    return write_rows(directory / "lines.jsonl", [{"text": f"{i} " + "a" * 60} for i in range(100)])


def test_a_hundred_small_slices_are_a_few_tasks_and_the_same_dataset(tmp_path):
    settings = {"sources": [{"path": str(hundred_lines(tmp_path))}], "slice_bytes": 50, "workers": 2}
    watched = build_dataset(config(tmp_path / "watched", name="small", **settings))
    alone = build_here(config(tmp_path / "alone", name="small", **settings))
    assert watched.slices == alone.slices == 100
    assert same_bytes(watched, alone)
    assert not any("serializer" in json.loads(path.read_text()) for path in (tmp_path / "watched/_cache").rglob("*.json"))

    seen = task_runs("build small with bytes")
    tokenized = [name for name in seen if name.startswith("tokenize ")]
    assert 100 / PACK_ITEMS <= len(tokenized) < 50


@pytest.mark.timeout(120)
def test_a_task_of_slices_that_are_stored_and_slices_that_are_not_ends(tmp_path):
    """Every other slice is published already. None waits for one of its own task."""
    sources = [{"name": f"{i}", "path": str(tmp_path / f"{i}.jsonl")} for i in range(12)]
    for i, source in enumerate(sources):
        Path(source["path"]).write_text(json.dumps({"text": f"{i} " + "a" * 60}) + "\n")
    first = build_dataset(config(tmp_path / "out", name="half", sources=sources[1::2], workers=1))
    again = build_dataset(config(tmp_path / "out", name="all", sources=sources, workers=1))
    assert (first.slices, again.slices, again.slices_reused) == (6, 12, 6)


def test_after_an_error_nothing_is_begun_any_more():
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        time.sleep(0.2)
        if number == 0:
            raise ValueError("the first one is bad")
        return number

    @flow(persist_result=False)
    def order() -> None:
        with PrefectTasks(1) as runner:
            list(in_order(runner, range(80), Stage("work", work, str, retries=False).given()))

    with refusal("the first one is bad"):
        order()
    assert 0 < len(begun) < 40
