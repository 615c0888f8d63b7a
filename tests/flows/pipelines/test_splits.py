"""Splits: what decides on them, the third one, and what becomes of it in everything that is made of the dataset."""

import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.manifest import EVERY_SPLIT, read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import export_of
from flows.commands.build import summary as told_summary
from flows.watch.summaries import summary
from tasks.config import BuildConfig
from tests.examples import first_fast
from tests.faults.support import build_here, derive_here, export_here, import_here, refresh_here, settings_of
from tests.flat_tokens.test_keys import MODULUS, A, mix, reference_key
from tests.made import sequences, small
from tests.refusal import refusal
from tests.sources import by_place, write_rows

Row = dict[str, Any]
Placed = dict[tuple[str, str], str]
"""The split of each document, by its id and text."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 200)
    monkeypatch.setattr("tasks.assemble.write.SPAN_TOKENS", 1024)
    monkeypatch.setattr("tasks.assemble.write.SPAN_DOCUMENTS", 1024)
    monkeypatch.setitem(LAYOUTS, "mmap", small("mmap", 1024, 256))


def rows_of(count: int, seed: int = 0) -> list[Row]:
    """Documents of which a third have the text of another; domains, some of them null, are shared by a few."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        text = draw.choice(rows)["text"] if rows and i % 3 == 2 else f"{seed} text {i} " + "salt " * draw.randrange(9)
        domain = None if i % 11 == 7 else f"d{draw.randrange(count // 4)}"
        rows.append({"id": f"{seed}-{i}", "text": text, "domain": domain, "number": draw.randrange(count // 4)})
    return rows


told = partial(
    settings_of,
    keep=["domain", "number"],
    validation_fraction=0.3,
    test_fraction=0.2,
    slice_bytes=600,
    verify_level="full",
)


def naive(rows: list[Row], by: str, validation: float, test: float, seed: int = 0) -> Placed:
    """Where each document goes, one after the other."""
    found = Placed()
    for row in rows:
        name = "id" if by == "key" or row[by] is None else by
        drawn = mix(reference_key(str(row[name]).encode()) ^ mix((seed * A + A) % MODULUS)) / MODULUS
        split = "validation" if drawn < validation else "test" if drawn < validation + test else "train"
        found[row["id"], row["text"]] = split
    return found


def placed(path: str | Path, rows: list[Row]) -> Placed:
    """Where each document of a dataset of byte tokens is, by its place in *rows*, which are those of its only file."""
    return {(rows[row]["id"], one.text): split for (_, row), (split, one) in by_place(path).items()}


def apart(found: Placed) -> int:
    """How many documents outside train have a text that another split has."""
    splits = defaultdict(set)
    for (_, text), split in found.items():
        splits[text].add(split)
    return sum(split != "train" and len(splits[text]) > 1 for (_, text), split in found.items())


@pytest.mark.parametrize("by", ["key", "text", "domain"])
def test_documents_go_where_a_naive_program_puts_them(tmp_path, by):
    rows = rows_of(54)
    wanted = naive(rows, by, 0.3, 0.2)
    assert set(wanted.values()) == set(EVERY_SPLIT)
    result = build_here(told(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), split={"by": by}))
    assert placed(result.path, rows) == wanted
    assert result.equal_texts_apart == (None if by == "text" else apart(wanted))
    assert result.slices > 3
    untold = told(tmp_path / "untold", tmp_path / "a.jsonl")  # who speaks of no split does not have equal texts looked for
    del untold["test_fraction"]
    assert build_here(untold).equal_texts_apart is None


@pytest.mark.parametrize("by", first_fast(["key", "cluster", "domain", "text"], every=2))
def test_what_the_latest_version_has_in_train_stays_there(tmp_path, by):
    """With a file that sorts before all, and another seed; by another value that is refused."""
    rows = rows_of(54)
    write_rows(tmp_path / "in/b.jsonl", rows)
    settings = told(tmp_path / "out", split={"by": by, "keep": "latest"}, test_fraction=0)
    settings["sources"] = [{**told(tmp_path, tmp_path / "in")["sources"][0], "path": str(tmp_path / "in/*.jsonl")}]
    settings |= {"documents": {"near_duplicates": {"action": "keep"}}} if by == "cluster" else {}
    first = build_here(settings)
    write_rows(tmp_path / "in/a.jsonl", [{**row, "id": f"new {row['id']}", "text": f"{row['text']} x"} for row in rows])
    settings |= {"split_seed": 7, "publish": {"max_split_changes": 99}}
    found = refresh_here(settings)
    assert [(one.before, one.after) for one in found.changes.documents.of_splits] == [("validation", "train")]
    split = read_manifest(Store.at(found.path))["provenance"]["split"]
    assert (split["keep"], split["seed"]) == (first.version, 7)
    assert refresh_here(settings).outcome == "unchanged"
    assert refresh_here({**settings, "publish": {}, "split_seed": 8}).outcome == "held"
    other = {**settings, "split": {"by": "number", "keep": first.version}}
    with refusal(rf"was split by {by}, so it has no values of 'number'"):
        refresh_here(other)


def test_what_is_made_of_a_dataset_keeps_its_test_split(tmp_path, tool):
    """A subset, exports and their imports. A format that calls validation test has no third one."""
    one = build_here(told(tmp_path / "one", write_rows(tmp_path / "a.jsonl", rows_of(36)))).path
    splits = {name: sequences(split) for name, split in flat_tokens.open(one).splits.items()}
    subset = derive_here({"operation": "subset", "min_tokens": 30, "split": "test"}, one, output=tmp_path / "subset").path
    assert "train sequences | validation sequences | test sequences" in Path(subset, "README.md").read_text()
    few = {**splits, "test": [ids for ids in splits["test"] if len(ids) >= 30]}
    export_here(subset, tmp_path / "megatron")
    back = import_here(tmp_path / "megatron", tmp_path / "back")
    assert {name: sequences(split) for name, split in flat_tokens.open(back.path).splits.items()} == few
    with refusal("Export train or validation"):
        export_here(one, tmp_path / "files", "jaxformer", end_of_text=300)
    with refusal("a split"):
        export_of(build_here(told(tmp_path / "two", tmp_path / "a.jsonl", test_fraction=0)).path, "megatron", {}, ("test",))
    tool.out("trace", one, "--split", "test", "--sequence", "0", "--source", tmp_path / "a.jsonl", "--json")
    assert "0.2 of the documents, by the same hash" in tool.out("inspect", one)


def test_gates_and_summaries_know_it(tmp_path):
    rows = rows_of(60)
    gate = {"of": "documents", "split": "test", "at_least": 1000}
    settings = told(tmp_path / "out", write_rows(tmp_path / "a.jsonl", rows), publish={"gates": [gate]})
    with refusal("split test"):
        build_here({**settings, "output": str(tmp_path / "stopped")})
    gates = [{**gate, "at_least": 1}, {"of": "tokens", "by": "split", "at_least": 1}]
    config = BuildConfig.model_validate({**settings, "publish": {"gates": gates}})
    result = build_here({**settings, "publish": {"gates": gates}})
    count = sum(split == "test" for split in placed(result.path, rows).values())
    assert result.totals["test"]["seq_count"] == count
    said = "\n".join(told_summary(result))
    assert f"  test       {result.totals['test']['token_count']:,} tokens in {count} sequences" in said
    assert f"{result.equal_texts_apart} documents outside train with a text that another split has" in said
    shown = summary(config, result, "x")
    assert f"- test: {result.totals['test']['token_count']:,} tokens in {count} sequences" in shown
    assert f"**{result.equal_texts_apart} documents outside train" in shown
    assert "Test: a share of 0.2 by the same hash." in Path(result.path, "README.md").read_text()


def test_numbers_are_the_same_value_whatever_their_kind(tmp_path):
    """5 of one file and 5.0 of another go to one split."""
    paths = [
        write_rows(tmp_path / f"{of}.jsonl", [{"id": f"{of}{i}", "text": f"{of} {i}", "n": kind(i)} for i in range(40)])
        for of, kind in (("a", int), ("b", float))
    ]
    made = build_here(told(tmp_path / "out", *paths, keep=["n"], split={"by": "n"}))
    splits = {place: split for place, (split, _) in by_place(made.path).items()}
    assert [splits[0, row] for row in range(40)] == [splits[1, row] for row in range(40)]
