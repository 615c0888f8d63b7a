"""A dry run: what it reckons is what a build then makes, and it writes nothing."""

import random
import shutil
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.pipelines.plan
import tasks.shards.sample
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from flows.commands.build import plan_text
from flows.pipelines.build import BuildResult
from flows.pipelines.plan import Plan, plan
from tasks.config import BuildConfig
from tasks.shards.sample import lack_of_room
from tasks.text.documents import read_documents
from tasks.tokenize.engines import Engine
from tests.examples import NIGHTLY, first_fast
from tests.faults.support import build_here
from tests.flat_tokens.demo import TOKENIZER
from tests.refusal import refusal
from tests.sources import write_rows
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401  a fixture


def configured(output: Path, *paths: Path | str, **settings: Any) -> BuildConfig:
    sources = [{"name": f"s{i}", "path": str(path)} for i, path in enumerate(paths)]
    return BuildConfig.model_validate({"output": str(output), "sources": sources, "tokenizer": "bytes", **settings})


def texts(count: int, length: int) -> list[str]:
    return [f"{i} ".ljust(length + i % 3, "x") for i in range(count)]


def write(path: Path, rows: list[str]) -> Path:
    """A file of texts, most of whose bytes are not text: keys, escapes, other columns."""
    return write_rows(path, [{"url": "y" * 50, "text": row} for row in rows], group=100, codec="snappy")


def test_parquet_files_of_the_hub_are_fetched_only_as_far_as_they_are_sampled(stand_in_hub, tmp_path):
    files = [write(tmp_path / "data" / f"{i}.parquet", texts(500, 60)) for i in range(5)]
    stand_in_hub.commit("org/text", {file.name: file.read_bytes() for file in files})
    there = configured(tmp_path / "out", sources=[{"hub": {"path": "org/text"}}], slice_bytes=5000)
    made = plan(there)
    assert len(list((tmp_path / "huggingface/hub").rglob("*.parquet"))) == 2
    check_estimate(made, build_here(there), 0.25)  # small files are cut unevenly


def tokens_of(result: BuildResult) -> int:
    return sum(result.totals[split]["token_count"] for split in SPLITS)


def check_estimate(made: Plan, result: BuildResult, tolerance: float) -> None:
    documents = result.totals["documents"]
    assert made.documents == pytest.approx(documents["written"], rel=tolerance)
    assert made.text_bytes == pytest.approx(documents["text_bytes"], rel=tolerance)
    assert made.tokens == pytest.approx(tokens_of(result), rel=tolerance)
    assert made.slices == pytest.approx(result.slices, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "slice_bytes"),
    [("a.parquet", 1 << 27), *((name, 3000) for name in ("a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz", "a.csv"))],
)
def test_little_text_is_read_as_a_whole_and_what_is_not_text_is_not_reckoned_as_text(tmp_path, name, slice_bytes):
    config = configured(tmp_path / "out", write(tmp_path / "in" / name, texts(1000, 20)), slice_bytes=slice_bytes)
    made, result = plan(config), build_here(config)
    assert (made.version, made.exact, made.slices) == (result.version, True, result.slices)
    check_estimate(made, result, 0.05)
    assert {made.tokens_low, made.tokens, made.tokens_high} == {tokens_of(result)}
    again = plan(config)
    assert (again.is_published, again.slices_stored) == (True, result.slices)


@pytest.mark.parametrize("is_far", [True, False])
def test_many_files_and_those_that_are_far_are_reckoned_from_some_of_them(tmp_path, monkeypatch, is_far):
    monkeypatch.setattr("flows.pipelines.plan.READ_WHOLE_FILES", 8)
    monkeypatch.setattr("flows.pipelines.plan.SAMPLED_LOCAL_FILES", 4)
    source, place = tmp_path / "in", f"memory://{uuid.uuid4().hex}"
    for i in range(9):
        path = write(source / f"{i}.jsonl", texts(100 * (i + 1) if is_far else 100, 20))
        Store.at(place).upload(path.name, path)
    config = configured(tmp_path / "new/out", place if is_far else source, scratch=str(tmp_path / "scratch"))
    made = plan(config)
    assert (made.version, made.exact, made.files) == (None, False, 9)
    assert not (tmp_path / "new").exists()
    assert len(list((tmp_path / "scratch/files").glob("*.raw"))) == (2 if is_far else 0)
    check_estimate(made, build_here(config), 0.1)
    assert made.disk_bytes >= made.file_bytes * is_far + made.dataset_bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"output": "/dev/null/out"}, "^cannot write to output /dev/null/out: /dev/null: Not a directory. Choose another"),
        ({"sources": [{"path": "/nowhere"}]}, "^the source: there is nothing at /nowhere"),
        ({"documents": {"max_bytes": 21}}, r"^a.jsonl, line 2 \(row 1\): the document has 22 bytes .*\[too_long\]"),
    ],
)
def test_a_plan_refuses_what_a_build_would(tmp_path, settings, words):
    config = configured(tmp_path / "out", write(tmp_path / "in/a.jsonl", texts(10, 21)))
    refused = BuildConfig.model_validate(config.model_dump() | settings)
    with refusal(words):
        plan(refused)
    with refusal(words.replace(": /dev/null: N", ": N")):
        build_here(refused)


@pytest.mark.slow
def test_a_document_that_is_too_much_for_the_reference_engine_does_not_keep_the_fast_one_from_the_rest(tmp_path, vocabularies):
    path = tmp_path / "a.jsonl"
    write_rows(path, [{"text": text} for text in ("first", " " * 1_000_000, "last")])
    config = configured(tmp_path / "out", path, tokenizer="o200k_base")
    made, result = plan(config), build_here(config)
    assert made.engine == "the fast"
    check_estimate(made, result, 0)
    slow = configured(tmp_path / "slow", path, tokenizer={"name": "o200k_base", "engine": "reference"})
    for work in (plan, build_here):
        with refusal(r"^a.jsonl, line 2 \(row 1\): tokenizer 'o200k_base' cannot encode .*Max stack"):
            work(slow)


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.shards.sample.READ_AS_A_WHOLE", 100_000)
    monkeypatch.setattr("tasks.shards.sample.LEAST_BATCH", 500)


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("name", first_fast(["a.jsonl", "a.parquet", "a.csv"], every=2))
@pytest.mark.parametrize("slice_bytes", [300_000, pytest.param(1 << 27, marks=NIGHTLY)])
def test_tokens_and_size_of_a_mixed_corpus_lie_where_a_twentieth_of_it_says(tmp_path, monkeypatch, name, slice_bytes):
    """Long and short documents, of few and of many tokens a byte, in files that differ."""
    draw, read = random.Random(7), 0
    kinds = ["the children walked along the river ", "\u4eca\u65e5\u306f\u826f\u3044\u5929\u6c17 ", "xq#7 zv@9 "]
    for i in range(4):
        rows = [draw.choices(kinds, [6, 1 + i, 1])[0] * int(draw.lognormvariate(2, 1)) + str(k) for k in range(3000)]
        write(tmp_path / "in" / f"{i}{name}", rows)
    config = configured(tmp_path / "out", tmp_path / "in", slice_bytes=slice_bytes, tokenizer=TOKENIZER)

    def count(*arguments: Any) -> Any:
        nonlocal read
        for documents in read_documents(*arguments):
            read += sum(len(text.encode()) for text in documents.texts.to_pylist())
            yield documents

    monkeypatch.setattr("tasks.shards.sample.read_documents", count)
    made, result = plan(config), build_here(config)
    tokens = tokens_of(result)
    assert read <= 0.05 * result.totals["documents"]["text_bytes"]
    assert made.tokens_low <= tokens <= made.tokens_high
    assert made.dataset_bytes_low <= result.byte_count <= made.dataset_bytes_high
    near = 0.3 if name == "a.csv" else 0.12  # CSV is not cut: a piece a file, from its beginning
    assert made.tokens == pytest.approx(tokens, rel=near)
    assert made.text_bytes == pytest.approx(result.totals["documents"]["text_bytes"], rel=near)


@pytest.mark.parametrize("layout", ["mmap", "compact", "zarr2"])
def test_the_size_is_that_of_the_layout_where_nothing_is_estimated(tmp_path, layout):
    draw = random.Random(3)
    rows = [" ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 60))) for _ in range(9000)]
    config = configured(tmp_path / "out", write(tmp_path / "in/a.jsonl", rows), layout=layout)
    made, result = plan(config), build_here(config)
    assert made.dataset_bytes == pytest.approx(result.byte_count, rel=0.02)


def test_a_document_that_is_all_of_its_source_is_no_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.shards.sample.READ_AS_A_WHOLE", 1000)
    path = tmp_path / "a.txt"
    path.write_text("word " * 4000)
    made = plan(configured(tmp_path / "out", path))
    assert (made.documents, made.tokens_low, made.tokens, made.tokens_high) == (1, 20_000, 20_000, 20_000)


@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("workers", [1, 4])
def test_the_time_is_that_of_the_sample_for_as_much_text_as_there_is(tmp_path, monkeypatch, workers):
    """Here reading takes a microsecond a byte, the tokenizer three, whose first texts take it a hundred times as long."""
    times, encode = threading.local(), Engine.__call__

    def passing(seconds: float) -> None:
        times.now = clock() + seconds

    def clock() -> float:
        return float(getattr(times, "now", 0))

    def read(*arguments: Any) -> Any:
        passing(5)  # opening a piece takes long
        for documents in read_documents(*arguments):
            passing(1e-6 * documents.texts.nbytes)
            yield documents

    def tokenize(engine: Any, found: Any) -> Any:
        is_first, times.seen = not getattr(times, "seen", False), len(found) > 1
        passing(3e-6 * found.nbytes * (100 if is_first else 1))
        return encode(engine, found)

    for module in (flows.pipelines.plan, tasks.shards.sample):
        monkeypatch.setattr(module, "clock", clock)
    monkeypatch.setattr("tasks.shards.sample.read_documents", read)
    monkeypatch.setattr(Engine, "__call__", tokenize)
    path = write(tmp_path / "in/a.parquet", texts(20_000, 300))
    made = plan(configured(tmp_path / "out", path, workers=workers))
    assert made.seconds == pytest.approx(4e-6 * 20_000 * 301 / workers, rel=0.1)


@pytest.mark.parametrize(("free", "is_told"), [(300_000, True), (3_000_000, False)])
def test_plan_and_build_warn_when_the_disk_is_too_small(tmp_path, monkeypatch, caplog, free, is_told):
    (tmp_path / "a.txt").write_text("a text. " * 25_000)  # one document, longer than samples are
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    config = configured(tmp_path / "out", tmp_path / "a.txt")
    made = plan(config)
    assert any(line.startswith("  warning ") for line in plan_text(made)) == is_told
    build_here(config, 1)
    told = [line for line in caplog.messages if line.startswith(f"{tmp_path}/out: the build needs about ")]
    assert told == ([made.warning] if is_told else [])
    assert plan(config).warning is None  # there is nothing to build any more


def test_room_that_nobody_knows_is_no_lack_of_room():
    assert lack_of_room(Store.at("memory://out"), 10**18, None) is None
