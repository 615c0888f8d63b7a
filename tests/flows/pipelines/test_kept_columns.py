"""Columns of the sources that are kept beside the tokens: in every format and layout, in expressions, through refreshes."""

import shutil
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.formats import open_any
from flat_tokens.manifest import SPLITS
from tests.damage import flip
from tests.faults.support import build_here, derive_here, same_bytes, settings_of, shards_stay
from tests.flat_tokens.formats.exporting import sequences_in
from tests.made import small
from tests.refusal import refusal
from tests.sources import Rows, as_text, held, write_rows

NAMES = ["url", "language", "score", "likes", "good", "seen"]


def some_rows(count: int, start: int = 0) -> Rows:
    """Documents with columns of every kind. Every fifth has no url, the last column is all null."""
    return [
        {
            "id": f"d{i}",
            "text": f"document {i} " + "salt wind " * (i % 7),
            "url": None if i % 5 == 4 else f"https://example.org/{i}?é",
            "language": ("en", "de", "fr")[i % 3],
            "score": i / 8,
            "likes": i * 1_000_000_007,
            "good": i % 2 == 0,
            "seen": None,
        }
        for i in range(start, start + count)
    ]


settings = partial(settings_of, keep=NAMES, validation_fraction=0.4, verify_level="full")


def kept(path: Path) -> dict[str, Rows]:
    """The kept columns of all documents by split, with each document's row, as the dataset has them."""
    return {split: [{"row": one.row, **one.columns} for one in docs] for split, docs in held(path).items()}


def of_source(rows: Rows, found: dict[str, Rows], text: bool = False) -> dict[str, Rows]:
    """The columns that the documents of each split have in the source."""

    def columns(row: int) -> dict[str, Any]:
        return {name: as_text(rows[row][name]) if text else rows[row][name] for name in NAMES}

    return {split: [{"row": one["row"], **columns(one["row"])} for one in found[split]] for split in SPLITS}


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.arrow", "x.csv"])
def test_columns_are_those_of_the_source(tmp_path, name, monkeypatch):
    """In both splits, in the documents' order, whatever the slices and the spans are; those of documents that are left out are,
    too. CSV has text alone.
    """
    monkeypatch.setattr("flat_tokens.columns.GROUP_ROWS", 4)
    rows = some_rows(50)
    for bad in (0, 7, 23):
        rows[bad]["text"] = None
    rows[9]["text"] = ""
    source = write_rows(tmp_path / "in" / name, rows)
    build_here(settings(tmp_path / "out", source, slice_bytes=700, documents={"on_bad": "skip", "empty": "skip"}))
    found = kept(tmp_path / "out")
    assert sorted(one["row"] for split in SPLITS for one in found[split]) == [row for row in range(50) if rows[row]["text"]]
    assert found == of_source(rows, found, text=name.endswith("csv"))
    kinds = {"url": "text", "language": "text", "score": "float64", "likes": "int64", "good": "bool", "seen": "null"}
    dataset = flat_tokens.open(tmp_path / "out")
    assert dataset.manifest["columns"] == (dict.fromkeys(NAMES, "text") if name.endswith("csv") else kinds)


@pytest.mark.parametrize(("keep", "held"), [(NAMES, True), (NAMES, False), (None, True)])
def test_a_column_that_changed_or_is_kept_from_now_on_costs_no_tokenizing(tmp_path, keep, held):
    """Its texts are known by segments, of a version or of shards; the bytes are those of a build from nothing."""
    rows = some_rows(40)
    source = write_rows(tmp_path / "in/x.jsonl", rows)
    first = build_here(settings(tmp_path / "out", source, keep=keep))
    write_rows(source, [{**row, "score": row["score"] + 1} for row in rows] if keep else rows)
    with shards_stay():
        second = build_here(settings(tmp_path / "out", source))
    assert (second.text_bytes_tokenized, first.text_bytes_tokenized > 0) == (0, True)
    if not held:
        shutil.rmtree(tmp_path / "out/versions")
        (tmp_path / "out/latest.json").unlink()
        second = build_here(settings(tmp_path / "out", source))
    assert same_bytes(build_here(settings(tmp_path / "clean", source)), second)


def test_slices_that_a_version_holds_bring_their_columns(tmp_path, monkeypatch):
    """Also where the version holds them as another kind than they are: beside fractions integers are float64."""
    monkeypatch.setattr("flat_tokens.columns.GROUP_ROWS", 4)
    whole = [{"id": f"w{i}", "text": f"whole {i}", "score": i} for i in range(30)]
    parts = [{"id": f"p{i}", "text": f"part {i}", "score": i + 0.5} for i in range(30)]
    a, b = write_rows(tmp_path / "in/a.jsonl", whole), write_rows(tmp_path / "in/b.jsonl", parts)
    build_here(settings(tmp_path / "out", a, b, keep=["score"]))
    for seed, kind, inputs in ((3, "float64", (b, a)), (0, "int64", (a,))):
        now, clean = (
            build_here(settings(tmp_path / f"{name}", *inputs, keep=["score"], split_seed=seed)) for name in ("out", seed)
        )
        assert (now.slices_reused, now.text_bytes_tokenized) == (len(inputs), 0)
        assert flat_tokens.open(now.path).manifest["columns"] == {"score": kind}
        assert same_bytes(clean, now)


def test_a_damaged_object_of_columns_is_not_taken_from_a_version(tmp_path):
    rows = some_rows(30)
    source = write_rows(tmp_path / "in/x.jsonl", rows)
    build_here(settings(tmp_path / "out", source))
    flip(next((tmp_path / "out").glob("versions/*/documents/train/columns/0.parquet")))
    build_here(settings(tmp_path / "out", source, split_seed=5))
    found = kept(tmp_path / "out")
    assert found == of_source(rows, found)


def test_half_a_character_in_a_column_is_replaced(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"id": "1", "text": "a", "s": "\\ud800"}\n')
    build_here(settings(tmp_path / "out", tmp_path / "x.jsonl", keep=["s"], validation_fraction=0))
    assert kept(tmp_path / "out")["train"] == [{"row": 0, "s": "\ufffd"}]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_integers_that_fractions_of_another_file_would_round_are_refused(tmp_path, form):
    """Whichever file is read first, and where the integers are stored already. The error names both files."""
    scores = {"a": [(1 << 53) + 1, 1], "b": [0.5]}
    a, b = (
        write_rows(tmp_path / f"{name}.{form}", [{"id": f"{name}{one}", "text": name, "score": one} for one in some])
        for name, some in scores.items()
    )
    for inputs in ((a, b), (b, a), (a,), (a, b)):
        told = settings(tmp_path / "out", *inputs, keep=["score"], validation_fraction=0)
        if len(inputs) == 1:
            build_here(told)
            assert [one["score"] for one in kept(tmp_path / "out")["train"]] == scores["a"]
            continue
        with refusal(rf"column 'score' is .* in {inputs[0].name} and .* in {inputs[1].name}\. Repair one"):
            build_here(told)


def test_large_integers_and_fractions_of_one_file_are_refused_by_its_name(tmp_path):
    """Also where they are so far apart that no block has both."""
    lines = (
        [{"text": "x" * 1000, "score": (1 << 53) + 1}]
        + [{"text": "y" * 100_000, "score": 1}] * 50
        + [{"text": "z", "score": 0.5}]
    )
    write_rows(tmp_path / "x.jsonl", lines)
    told = settings(tmp_path / "out", tmp_path / "x.jsonl", keep=["score"])
    del told["sources"][0]["id_column"]
    with refusal(r"^x.jsonl: column 'score' is float64 in one place and int64 beyond 2\*\*53 in another\. Repair"):
        build_here(told)


@pytest.mark.parametrize(
    ("name", "keep", "words"),
    [
        *(
            (f"x.{ending}", "colour", r"has no column 'colour'; it has 'id', 'text', .*Set source.keep_columns")
            for ending in ("parquet", "jsonl", "arrow", "csv")
        ),
        ("x.txt", "url", "x.txt is plain text, which has no column 'url'. Leave source.keep_columns out"),
        ("x.parquet", "tags", "x.parquet: column 'tags' is list<.*kept are text, numbers, truth values"),
        ("x.jsonl", "tags", "x.jsonl: column 'tags' holds values of type list"),
    ],
)
def test_what_is_no_column_is_refused(tmp_path, name, keep, words):
    source = write_rows(tmp_path / name, [{"id": "1", "text": "a", "tags": ["x"]}])
    with refusal(words):
        build_here(settings(tmp_path / "out", source, keep=[keep]))


def test_dates_decimals_and_small_numbers(tmp_path):
    at = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    columns = {
        "day": [at.date()],
        "at": pa.array([at], pa.timestamp("s", "UTC")),
        "local": pa.array([at.replace(tzinfo=None)], pa.timestamp("ms")),
        "cost": [Decimal("1.25")],
        "small": pa.array([7], pa.uint8()),
        "large": pa.array([(1 << 64) - 1], pa.uint64()),
        "tag": pa.array(["x"]).dictionary_encode(),
        "half": pa.array([0.5], pa.float32()),
        "hash": pa.array([b"ab\xff"], pa.binary(3)),
        "hashes": pa.array([b"ab\xff"], pa.binary(3)).dictionary_encode(),
    }
    pq.write_table(pa.table({"id": ["1"], "text": ["a"], **columns}), tmp_path / "x.parquet")
    build_here(settings(tmp_path / "out", tmp_path / "x.parquet", keep=list(columns), validation_fraction=0))
    (found,) = kept(tmp_path / "out")["train"]
    wanted = ["2024-05-06", "2024-05-06T07:08:09.000Z", "2024-05-06T07:08:09.000", 1.25, 7, (1 << 64) - 1, "x", 0.5]
    assert found == dict(zip(["row", *columns], [0, *wanted, "ab\ufffd", "ab\ufffd"], strict=True))


def test_inspect_and_trace_show_columns(tmp_path, tool):
    """JSON has texts for numbers that are not finite."""
    rows = some_rows(6)
    rows[0]["score"] = float("inf")
    source = write_rows(tmp_path / "in/x.jsonl", rows)
    build_here(settings(tmp_path / "out", source, keep=["score", "url"], validation_fraction=0))
    out = str(tmp_path / "out")
    assert "score (float64), url (text)" in tool.out("inspect", out)
    assert "column url    https://example.org/3?é" in tool.out("trace", out, "--sequence", "3")
    rows[0]["score"] = "inf"
    assert '"score": "inf"' in tool.out("documents", out, "--json")
    step = ["--step", "0", "--length", "100", "--batch-size", "1", "--order", "sequential"]
    (row,) = tool.json("trace", out, *step)["rows"]
    assert [part["columns"] for part in row["parts"]] == [
        {"score": one["score"], "url": one["url"]} for one in rows[: len(row["parts"])]
    ]


def test_a_merge_has_the_columns_of_all(tmp_path):
    """One that an input does not keep is null there; kinds have to go together."""
    inputs = {
        "a": [{"id": "1", "text": "a", "n": 1}, {"id": "2", "text": "b", "n": 2}],
        "b": [{"id": "3", "text": "c", "url": "x", "n": 2.5}],
        "c": [{"id": "4", "text": "d", "n": "one"}],
    }
    for name, rows in inputs.items():
        source = write_rows(tmp_path / f"in/{name}.jsonl", rows)
        build_here(settings(tmp_path / name, source, keep=[*rows[0]][2:], validation_fraction=0))
    merged = derive_here("merge", tmp_path / "a", tmp_path / "b", output=tmp_path / "both").path
    assert flat_tokens.open(merged).manifest["columns"] == {"n": "float64", "url": "text"}
    assert [(one["n"], one["url"]) for one in kept(merged)["train"]] == [(1.0, None), (2.0, None), (2.5, "x")]
    with refusal(r"column 'n' is int64 in .*/a/versions/.* and text in .*/c/versions/"):
        derive_here("merge", tmp_path / "a", tmp_path / "c", output=tmp_path / "none")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_exports_have_the_columns(tmp_path, kind, tool):
    """In several files. What is beside an export to tell its origin does not have them a second time."""
    build_here(settings(tmp_path / "out", write_rows(tmp_path / "in/x.parquet", some_rows(40))))
    out = tmp_path / "export"
    tool.out("export", tmp_path / "out", out, "--to", kind, "--tokens-per-file", "200")
    for split in SPLITS:
        files = sorted(out.glob(f"{split}*.parquet" if kind == "parquet" else f"{split}/*.arrow"))
        assert len(files) > 2
        tables = [pq.read_table(file) if kind == "parquet" else pa.ipc.open_stream(file).read_all() for file in files]
        wanted = [{"input_ids": one.ids, **one.columns} for one in held(tmp_path / "out")[split]]
        assert pa.concat_tables(tables).select(["input_ids", *NAMES]).to_pylist() == wanted
        assert sequences_in(open_any(out).splits[split]) == [one["input_ids"] for one in wanted]
    assert not list(out.glob(".export/documents/*/columns/*"))
    assert "the dataset keeps a column 'url'. Give the tokens' column another name" in tool.errors(
        "export", tmp_path / "out", tmp_path / "no", "--to", kind, "--column", "url"
    )


@pytest.mark.parametrize("last", [True, False])
def test_all_objects_have_the_kinds_of_the_dataset(tmp_path, monkeypatch, last):
    """Whatever is in each, and wherever slices end. A document that a step leaves out counts for the kinds of its source's
    columns, whichever slice it is in. A source without a column has nulls.
    """
    monkeypatch.setattr("tasks.assemble.write.SPAN_DOCUMENTS", 1)
    monkeypatch.setitem(LAYOUTS, "mmap", small("mmap", 1 << 20, 4))
    left_out = {"score": 2.5, "word": "high", "truth": True, "whole": 3}
    scores = [None] * 5 + [1, 2, 3] + [None] * 4
    rows = [{"text": f"text {i}", **dict.fromkeys(left_out), "score": score} for i, score in enumerate(scores)]
    files = [rows, [{"text": "a longer text " * 9, **left_out}]]
    for number, some in enumerate(files if last else files[::-1]):
        write_rows(tmp_path / f"in/{number}.jsonl", some)
    keeps = (list(left_out), None, ["whole"])
    sources = [{"name": f"s{i}", "path": str(tmp_path / "in"), "keep_columns": keep} for i, keep in enumerate(keeps)]
    documents = {"steps": [{"use": "length", "max_characters": 20}]}
    told = {"sources": sources, "tokenizer": "bytes", "validation_fraction": 0, "documents": documents}
    made = [build_here({**told, "output": str(tmp_path / str(size)), "slice_bytes": size}) for size in (30, 6000)]
    assert same_bytes(*made)
    assert [*flat_tokens.open(made[0].path).manifest["columns"].values()] == ["float64", "text", "bool", "int64"]
    objects = Path(made[0].path).glob("documents/train/columns/*.parquet")
    assert {pq.read_schema(file).field("score").type for file in objects} == {pa.float64()}
    found = [[one[name] for name in left_out] for one in kept(made[0].path)["train"]]
    assert found == [[score, None, None, None] for score in scores] + [[None] * 4] * 24
