"""What added, removed and changed between two manifests."""

from typing import Any

import pytest

from tasks.output.changes import as_markdown, as_text, changes_between, file_changes

A, B, C = "a" * 64, "b" * 64, "c" * 64


def manifest(files: dict[str, str], tokens: int = 0, counted: bool = True, **changed: Any) -> dict[str, Any]:
    by_source = [{"name": "s", "written": len(files), "token_count": tokens}]
    source = {"name": "s", "revision": None, "files": [{"name": name, "sha256": sha256} for name, sha256 in files.items()]}
    made_of = {
        "name": "d",
        "sources": [source],
        "tokenizer": {"name": "bytes", "digest": "1"},
        "documents": {"on_bad": "error"},
        "split": {"seed": 0},
        "semantics": "1",
    }
    totals = {"documents": {"by_source": by_source} if counted else {}}
    return {"layout": "mmap", "totals": totals, "provenance": {**made_of, **changed}}


def test_files_come_go_change_and_move():
    then = {"changed": A, "gone": B, "here": C, "old": "d" * 64}
    now = {"changed": B, "fresh": A, "here": C, "new": "d" * 64}
    found = [(change.kind, change.name, change.former_name) for change in file_changes("s", then, now)]
    assert found == [("changed", "changed", None), ("added", "fresh", None), ("removed", "gone", None), ("moved", "new", "old")]


@pytest.mark.parametrize("absent", [{"sources": None}, {"tokenizer": None}, {"documents": None, "split": None}])
def test_a_manifest_may_lack_what_another_one_has(absent):
    """As one of another writer does, or null stands for it."""
    whole, less = manifest({"x": A}), manifest({"x": A}, **absent)
    for name in absent:
        del less["provenance"][name]
        assert changes_between("1", less, "2", whole) == changes_between("1", manifest({"x": A}, **absent), "2", whole)
    assert changes_between("1", whole, "2", less).settings


def test_a_summary_counts_documents_and_tokens_by_source():
    changes = changes_between("v1", manifest({"x": A}, 1000), "v2", manifest({"x": A, "y": B}, 2500))
    assert changes.headline == "1 file added"
    assert as_text(changes) == [
        f"  added      s: y  {B[:12]}",
        "  s          documents 2 (+1), tokens 2,500 (+1,500), files 2 (+1)",
    ]
    assert f"- added: s, `y`, `{B[:12]}`" in as_markdown(changes)


def test_a_first_version_and_one_without_counts():
    first = changes_between(None, None, "v1", manifest({"x": A, "y": B}))
    assert (first.before, first.headline, first.settings) == (None, "2 files added", ())
    uncounted = changes_between("v1", manifest({"x": A}, counted=False), "v2", manifest({"x": B}, counted=False))
    assert as_text(uncounted)[-1] == "  s          documents unknown, tokens unknown, files 1"


def test_settings_that_differ_are_told():
    old, new = manifest({"x": A}), manifest({"x": A}, tokenizer={"name": "gpt2", "digest": "2"}, split={"seed": 1})
    new["provenance"]["sources"] = [{**old["provenance"]["sources"][0], "revision": "0123456789" * 4}]
    new["provenance"]["documents"] = {**old["provenance"]["documents"], "runs": True, "forgotten": {"count": 1}}
    assert changes_between("v1", old, "v2", new).settings == (
        "s.revision none -> 012345678901",
        "tokenizer.digest 1 -> 2",
        "tokenizer.name bytes -> gpt2",
        "split.seed 0 -> 1",
    )


def test_sources_come_and_go():
    old, new = manifest({"x": A}), manifest({"x": A})
    new["provenance"]["sources"] = [{"name": "t", "files": [{"name": "x", "sha256": A}]}]
    changes = changes_between("v1", old, "v2", new)
    assert [(change.kind, change.source) for change in changes.files] == [("added", "t"), ("removed", "s")]
    assert changes.settings == ("the list of sources changed",)


def test_many_files_are_not_all_listed():
    changes = changes_between("v1", manifest({}), "v2", manifest({f"{i:03}": A for i in range(50)}))
    assert as_text(changes)[20] == "  ...        and 30 more files"
    assert "and 30 more" in as_markdown(changes)
    assert changes.headline == "50 files added"
