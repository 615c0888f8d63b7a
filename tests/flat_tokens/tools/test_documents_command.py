"""The table of documents: every document that was read, where it is, and why it is in no split. Counts are those of manifests."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_tokens
from flat_tokens.keys import keys_of_bytes
from flows.pipelines.forget import forget
from tasks.derive.request import ForgetRequest
from tests.examples import first_fast
from tests.faults.support import build_here, derive_here, refresh_here, retokenize_here

TEXTS = [
    "salt and wind " * 9,
    "",
    "salt and wind " * 9,
    "x",
    "the harbour wall in the morning",
    None,
    "the harbour wall in the evening",
]
NEAR: dict[str, Any] = {"near_duplicates": {"threshold": 0.5, "words": 2}}
BAD: dict[str, Any] = {"on_bad": "skip", "empty": "skip"}
SHORT = {"use": "length", "min_bytes": 3}
POLICIES: dict[str, dict[str, Any]] = {
    "duplicates": {"duplicates": "drop"},
    "bad": {**BAD, "max_bytes": 100},
    "kept clusters": {"near_duplicates": {**NEAR["near_duplicates"], "action": "keep"}},
    "all": {**BAD, **NEAR, "duplicates": "drop", "steps": [SHORT, {"use": "pattern", "drop": "evening"}]},
}


def told(home: Path, policy: str, **more: Any) -> dict[str, Any]:
    """Three files of two sources, one of which has no ids."""
    for name, texts in (("a/1", TEXTS[:4]), ("a/2", TEXTS[2:]), ("b/3", TEXTS)):
        is_bad = "on_bad" in POLICIES[policy]
        of = enumerate(texts)
        rows = [json.dumps({"id": f"{name}-{i}", "text": text, "note": f"n{i}"}) for i, text in of if is_bad or text is not None]
        if is_bad:
            rows[1:1] = ['{"id": "broken', "", '{"text": 7}', "{}", r'{"text": "\ud800"}'][: 5 if name == "b/3" else 1]
        (home / name).parent.mkdir(exist_ok=True)
        (home / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    sources = [{"name": name, "path": str(home / name), "keep_columns": ["note"]} for name in "ab"]
    settings = {"sources": [sources[0] | {"id_column": "id"}, sources[1]], "documents": POLICIES[policy], "tokenizer": "bytes"}
    return {"output": str(home / "out"), "validation_fraction": 0.3, "slice_bytes": 150, **settings, **more}


def rows_of(output: Path | str) -> list[dict[str, Any]]:
    return flat_tokens.open(output).documents.read_all().to_pylist()


def check_counts(output: Path | str) -> None:
    """The counts of the table are those of the manifest: in all, by source, split and reason."""
    totals, rows = flat_tokens.open(output).manifest["totals"], rows_of(output)
    documents = totals["documents"]
    splits = {name: of["seq_count"] for name, of in totals.items() if name != "documents" and of["seq_count"]}
    assert Counter(row["split"] for row in rows if row["split"]) == splits
    assert Counter(row["reason"] for row in rows if row["reason"]) == documents["skipped"]
    assert len(rows) == documents["read"]
    for source in documents["by_source"]:
        mine = [row for row in rows if row["source"] == source["name"]]
        assert (len(mine), sum(row["split"] is not None for row in mine)) == (source["read"], source["written"])
        assert Counter(row["reason"] for row in mine if row["reason"]) == source["skipped"]
        assert sum(row["tokens"] for row in mine if row["split"]) == source["token_count"]
    gone = documents["skipped"].get("forgotten", 0)
    places = [(row["source"], row["file"], row["row"]) for row in rows if row["file"]]
    assert len(set(places)) == len(places) == documents["read"] - gone
    assert all((row["split"] is None) != (row["reason"] is None) for row in rows)
    assert all(row["file"] is None for row in rows if row["reason"] == "forgotten")


@pytest.mark.parametrize("policy", first_fast(list(POLICIES)[::-1], 2, every=9))
def test_counts_are_those_of_the_manifest(tmp_path, policy):
    """Of a build, of one that takes its tokens from there, of a refresh, of other tokens, and once documents are forgotten; each
    document that is left out has its place. Datasets that were derived say of theirs how many there are.
    """
    settings = told(tmp_path, policy)
    first = build_here(settings)
    check_counts(first.path)
    again = build_here({**settings, "split_seed": 7})
    check_counts(again.path)
    (rerun,) = retokenize_here(settings["output"], "bytes", output=str(tmp_path / "again"))
    check_counts(rerun.path)
    (tmp_path / "a/2.jsonl").write_text(json.dumps({"id": "new", "text": "something else", "note": "n0"}) + "\n")
    refreshed = refresh_here({**settings, "split_seed": 7}).build
    check_counts(refreshed.path)
    named = {row["reason"]: row["key"] for row in rows_of(refreshed.path)}
    (tmp_path / "keys").write_text("\n".join(named.values()))
    forget(ForgetRequest(output=settings["output"], reason="asked", key_list=str(tmp_path / "keys")))
    check_counts(latest := settings["output"] + "/latest")
    left = rows_of(latest)
    assert not {*named.values()} & {row["key"] for row in left}
    rebuilt = build_here({**settings, "split_seed": 7})
    derived = derive_here({"operation": "subset", "min_tokens": 20}, rebuilt.path, output=tmp_path / "less", workers=1)
    with pytest.warns(UserWarning, match="the source and the reason alone are known"):
        counts = Counter(row["reason"] for row in rows_of(derived.path) if row["reason"])
    assert counts == derived.totals["documents"]["skipped"]


def test_rows_say_what_was_left_out(tmp_path):
    """Equal texts count as that, not as nearly equal ones. The key of a document is that of its id, or without ids that of its
    text; of one that has neither that of no text.
    """
    rows = {(row["file"], row["row"]): row for row in rows_of(build_here(told(tmp_path, "all")).path) if row["reason"]}
    assert {row: (of["reason"], of["note"]) for (file, row), of in rows.items() if file == "3.jsonl"} == {
        0: ("duplicate", "n0"),
        1: ("malformed", None),
        3: ("wrong_type", None),
        4: ("null", None),
        5: ("invalid_unicode", None),
        6: ("empty", "n1"),
        7: ("duplicate", "n2"),
        8: ("length.min_bytes", "n3"),
        9: ("duplicate", "n4"),
        10: ("null", "n5"),
        11: ("pattern.drop", "n6"),
    }
    keys = keys_of_bytes([b"a/2-3", b"x", b""]).tolist()
    assert [int(rows[place]["key"], 16) for place in (("2.jsonl", 4), ("3.jsonl", 8), ("3.jsonl", 1))] == keys


def test_kept_columns_have_names_of_their_own(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x", "of": 1, "columns": {"of": 2}}) + "\n")
    source = {"path": str(tmp_path / "a.jsonl"), "keep_columns": ["of", "columns.of"]}
    (row,) = rows_of(build_here({"source": source, "tokenizer": "bytes", "output": str(tmp_path / "out")}).path)
    assert [row[name] for name in ("of", "columns.of", "columns.columns.of")] == [None, 1, 2]


@pytest.fixture
def output(tmp_path: Path) -> str:
    """Where copies are left out."""
    settings = told(tmp_path, "duplicates")
    build_here(settings)
    return str(settings["output"])


def test_the_command_shows_chosen_columns_and_writes_parquet(output, tmp_path, tool):
    where = ["documents", output, "--where", "reason = 'duplicate' and source = 'a'"]
    assert tool.out(*where, "--columns", "file,row,note") == "file\trow\tnote\n1.jsonl\t2\tn2\n2.jsonl\t0\tn0\n2.jsonl\t1\tn1\n"
    assert tool.out(*where, "--json", "--columns", "row") == '{"row": 2}\n{"row": 0}\n{"row": 1}\n'
    path = tmp_path / "documents.parquet"
    tool.out("documents", output, "--to", path)
    assert pq.read_table(path).to_pylist() == rows_of(output)
    for there in (path, tmp_path / "documents.csv"):
        tool.errors("documents", output, "--to", there)
    tool.errors("documents", output, "--where", "row = 'a'", "--to", tmp_path / "none.parquet")
    assert list(tmp_path.glob("none*")) == []
    tool.errors("documents", output, "--where", "split = 'test'", status=1)
    assert "there is no column 'nothing'; there are key, source" in tool.errors("documents", output, "--columns", "nothing")


def test_trace_says_why_a_document_is_not_in_the_dataset(output, tmp_path, tool):
    rows = rows_of(output)
    (copy,) = [row for row in rows if (row["file"], row["row"]) == ("2.jsonl", 0)]
    kept = next(row for row in rows if row["split"] == "train")
    assert tool.json("trace", output, "--document", copy["key"]) == copy
    shown = tool.out("trace", output, "--document", copy["key"])
    assert "not in the dataset" in shown
    assert copy["of"] in shown
    assert tool.json("trace", output, "--document", kept["key"])["document"]["key"] == kept["key"]
    assert "has no document with key" in tool.errors("trace", output, "--document", "f" * 16)
    (tmp_path / "keys").write_text(kept["key"])
    forget(ForgetRequest(output=output, reason="asked", key_list=str(tmp_path / "keys")))
    assert tool.json("trace", output, "--document", kept["key"]) == {"key": kept["key"], "reason": "forgotten"}


def test_another_format_has_no_table(tmp_path, tool):
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), tmp_path / "x.parquet")
    assert "which has no record of documents. Name a dataset" in tool.errors("documents", tmp_path / "x.parquet")
