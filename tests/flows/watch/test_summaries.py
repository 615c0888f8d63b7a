"""What people see of a run at its end: a summary with tables and links, and what was made as an asset of what it was made of."""

from pathlib import Path
from typing import Any, TypeVar

import pytest

from flat_tokens import DamagedError, Verification
from flat_tokens.stores.store import StoredObject
from flat_tokens.tools.export import ExportResult, export_of
from flat_tokens.tools.terminal import markdown
from flows.derive import derive_dataset, import_dataset
from flows.export import export_dataset
from flows.pipelines.build import BuildResult
from flows.pipelines.derive import DerivedResult
from flows.pipelines.publish import PublishResult
from flows.pipelines.refresh import RefreshResult
from flows.refresh import changed
from flows.verify import verify_dataset
from flows.watch.page import dataset_page
from flows.watch.pictures import link
from flows.watch.summaries import asset_key, checked, derived, exported, origin, output_of, summary
from tasks.config import Source
from tasks.derive.request import DeriveRequest, ImportRequest, Merge
from tasks.finalize.card import card_sources
from tasks.output.changes import changes_between
from tasks.progress import Done, Progress
from tests.flows.asked import Seen, ask, on_prefect_server
from tests.flows.watch.test_page import STATUS, run, version
from tests.flows.watch.test_progress import config
from tests.made import docs_of, publish_docs
from tests.processes import until
from tests.refusal import refusal

TOTALS = {
    "train": {"seq_count": 1990, "token_count": 999_000, "max_token_id": 50_255},
    "validation": {"seq_count": 10, "token_count": 1_000, "max_token_id": 50_000},
}


P = TypeVar("P", bound=PublishResult)


def result_of(kind: type[P], documents: dict[str, Any], **particular: Any) -> P:
    """The result of a publication of documents that have these totals."""
    common = {"path": "/out/versions/abc", "version": "abc", "sequence": 2, "was_published": False, "layout": "mmap"}
    totals = {"totals": {**TOTALS, "documents": documents}, "byte_count": 4_000_000}
    return kind.model_validate({**common, **totals, **particular})


def test_the_summary_reckons_up_every_source_and_leads_to_it():
    counts = {"read": 1200, "written": 1000, "text_bytes": 4_000_000, "token_count": 1_000_000}
    documents = {
        "by_source": [
            {"name": "web", "skipped": {"null": 150, "too_long": 50}, **counts},
            {"name": "notes", "skipped": {}, **counts, "read": 1000, "text_bytes": 0, "token_count": 0},
        ],
        "skipped": {"null": 150, "too_long": 50},
        "replaced": {"lone_surrogate": 2},
        "repeated_keys": 7,
    }
    particular = {"path": "gs://bucket/out/versions/abc", "slices": 12, "slices_reused": 5, "seconds": {"tokenize": 3.21}}
    result = result_of(BuildResult, documents, **particular)
    text = summary(config("gs://bucket/out"), result, "Seen_By.People")
    for line in (
        "- web: 1,200 documents read, 1,000 written, 150 null, 50 too_long skipped; 1,000,000 tokens of 4.0 MB of text, 4.00 "
        "bytes a token. [HuggingFaceFW/fineweb-edu sample-10BT train](https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu)",
        "- notes: 1,000 documents read, 1,000 written, none skipped; 0 tokens of 0 B of text. `/notes`",
        "- **all**: 2,200 documents read, 2,000 written, 150 null, 50 too_long skipped; 1,000,000 tokens of 4.0 MB of text, 4.00 "
        "bytes a token",
        "- train: 999,000 tokens in 1,990 sequences, largest id 50,255",
        "Repaired: 2 lone_surrogate.",
        "7 documents have the key of another.",
        "5 of 12 slices were taken from earlier builds.",
        "| tokenize | 3.2 |",
    ):
        assert line in text.splitlines()
    assert "[gs://bucket/out/versions/abc](https://console.cloud.google.com/storage/browser/bucket/out/versions/abc)" in text


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/data/text", "`/data/text`"),
        ("https://example.org/a.jsonl", "[https://example.org/a.jsonl](https://example.org/a.jsonl)"),
        ("s3://bucket/a/b", "[s3://bucket/a/b](https://s3.console.aws.amazon.com/s3/buckets/bucket?prefix=a/b/)"),
        (
            "hf://datasets/org/name@main/a.parquet",
            "[hf://datasets/org/name@main/a.parquet](https://huggingface.co/datasets/org/name)",
        ),
    ],
)
def test_places_are_links_where_a_browser_can_follow_them(location, shown):
    assert link(location) == shown


def test_the_summary_of_a_derived_dataset_says_of_what_it_is_and_what_was_left_out():
    documents = {
        "read": 2500,
        "written": 2000,
        "skipped": {"too_long": 500},
        "by_source": [{"name": "web", "written": 2000, "token_count": 1_000_000}],
    }
    result = result_of(DerivedResult, documents, operation="subset", not_found=5, seconds={})
    made_of = {
        "name": "short",
        "operation": {"operation": "subset", "sources": ["web"], "max_tokens": 9, "listed": {"sha256": "ab"}},
        "inputs": [
            {
                "name": "whole",
                "version": "def",
                "seq_counts": {"train": 2400, "validation": 100},
                "token_counts": {"train": 5000, "validation": 200},
            }
        ],
    }
    lines = derived(made_of, result).splitlines()
    for line in (
        "Subset (sources web, max_tokens 9, listed sha256 ab) of:",
        "- whole def: 5,200 tokens, 2,400 sequences of train and 100 sequences of validation",
        "| web | 2,000 | 1,000,000 |",
        "2,000 of 2,500 documents. Left out: 500 too_long.",
        "5 of the list belong to no document.",
    ):
        assert line in lines
    assert lines[2].startswith("Version `abc` published, number 2: `/out/versions/abc`, 4.0 MB as mmap.")
    # A dataset that has the layout already was made otherwise.
    again = derived(
        {"name": "short"}, result.model_copy(update={"operation": "relayout", "was_published": True, "latest_before": "abc"})
    )
    assert "Version `abc` was published already" in again


def test_the_summary_of_an_export_says_what_was_read_and_written(tmp_path):
    publish_docs(tmp_path / "a", docs_of([1, 2], [3]), docs_of([4], key=9))
    order = export_of(tmp_path / "a", "megatron", {})
    files = tuple(StoredObject(f"train|{i}.bin", 500, "ab") for i in range(2))
    result = ExportResult("gs://bucket/out", "megatron", files, 2, 1, was_done=False, loses_loss_mask=False, seconds=0.5)
    lines = exported("made", order, result).splitlines()
    where = "[gs://bucket/out](https://console.cloud.google.com/storage/browser/bucket/out)"
    assert lines[0] == "# made as megatron"
    assert lines[2] == f"{where}: 1.0 kB in 2 files, of `{order.location}`."
    for line in ("1 of 2 parts had been written by an earlier run.", "| train | 2 | 3 |"):
        assert line in lines
    assert r"- `train\|0.bin`, 500 bytes, sha256 `ab`" in lines  # a bar would end the cell
    assert lines[-1] == "It took 0.5 s: 0.0 MB of tokens a second."
    assert "There was nothing to do" in exported("made", order, result._replace(was_done=True, seconds=0.0))


def test_the_summary_of_a_check_has_the_result_or_the_faults():
    took = Progress("verify", 65.0, 130_000_000, Done(130_000_000))
    right = checked("made", "full", Verification("/out/versions/abc", "full", 12, 4_000_000, 900, 30), took)
    assert "`/out/versions/abc` is what it says, checked byte by byte and token by token." in right.splitlines()
    assert right.endswith("130.0 MB read in 1:05, at 2.0 MB/s.\n")
    wrong = checked(
        "made", "quick", DamagedError("/out/versions/abc", ("a is missing", "b has `3` bytes")), Progress("verify", 0, 0, Done())
    )
    assert "**`/out/versions/abc` is damaged**: 2 faults, checked by names, sizes and metadata." in wrong.splitlines()
    assert wrong.splitlines()[4:6] == ["- `a is missing`", "- `b has '3' bytes`"]


def test_a_dataset_is_one_asset_whatever_its_version(tmp_path):
    version = publish_docs(tmp_path / "a", docs_of([1]))
    assert output_of(str(tmp_path / "a")) == output_of(f"{tmp_path}/a/versions/{version}") == str(tmp_path / "a")
    assert output_of(str(tmp_path / "elsewhere")) == str(tmp_path / "elsewhere")


def test_names_that_assets_accept():
    assert asset_key("/data/my text/ä.jsonl") == "file:///data/my-text/-.jsonl"
    assert asset_key("GS://bucket/x") == "gs://bucket/x"
    assert origin(Source.model_validate({"hub": {"path": "a/b", "name": "c"}})) == "hf://datasets/a/b/c/train"


# With a server


def made_of(location: Path) -> list[str]:
    """What the asset there was last made of, by the server."""

    def last() -> Any:
        wanted = {"event": {"name": ["prefect.asset.materialization.succeeded"]}}
        found = ask("/events/filter", filter=wanted, limit=50)["events"]
        return next((one for one in found if one["resource"]["prefect.resource.id"] == f"file://{location}"), None)

    return sorted(one["prefect.resource.id"] for one in until(last)["related"] if one["prefect.resource.role"] == "asset")


def check_watched(name: str, tags: list[str], stages: dict[str, str], summary: str, words: str, *assets: Path) -> None:
    """The server has a run: what its progress says at the end, *words* of its summary, and an asset with what it was made of."""
    seen = Seen(*tags, name=name)
    assert seen.shares == dict.fromkeys(stages, 100.0)
    assert {stage: text[: len(stages[stage])] for stage, (_, text) in seen.progress.items()} == stages
    assert words in seen.texts[summary]
    if assets:
        assert made_of(assets[0]) == [f"file://{path}" for path in assets[1:]]


@on_prefect_server
def test_operations_on_datasets_can_be_watched(datasets, tmp_path):
    a, b = datasets
    files, back, out = (tmp_path / name for name in ("files", "back", "out"))
    export_dataset(str(a), str(files), "megatron")
    tags, said = ["dataset:a-texts", "format:megatron"], {"a-texts-export": "Done: 4 tokens, 16 B at "}
    check_watched(f"export {a} to megatron", tags, said, "a-texts-export-summary", "| train | 2 | 3 |", files, a)

    import_dataset(ImportRequest(path=str(files), output=str(back), name="again", tokenizer={"name": "bytes"}))
    size = sum(path.stat().st_size for path in files.iterdir() if path.is_file())
    said = {
        "again-examine": f"Done: {size} B at ",
        "again-import": "Done: 3 documents, 4 tokens, 16 B at ",
        "again-split": "Done: ",
    }
    check_watched(
        f"import {files}", ["dataset:again", "tokenizer:bytes"], said, "again-import-summary", "- `train.bin`, ", back, files
    )

    derive_dataset(DeriveRequest(operation=Merge(), inputs=(str(a), str(b)), output=str(out), name="both"))
    tags = ["dataset:both", "dataset:a-texts", "dataset:b-texts"]
    said = {"both-count": "Done: 5 documents, 160 B at ", "both-split": "Done: 28 B at "}
    check_watched(f"merge into {out}", tags, said, "both-merge-summary", "Merge of:", out, a, b)

    (object,) = b.glob("versions/*/train/encoded_tokens/c/0")
    object.write_bytes(bytes(object.stat().st_size))
    with refusal("train/encoded_tokens/c/0 has blake3", DamagedError):
        verify_dataset(str(b), "full")
    said = {"b-texts-verify": "Failed at **100%**: "}
    check_watched(f"verify {b}", ["dataset:b-texts"], said, "b-texts-verify-summary", "- `train/encoded_tokens/c/0 has blake3 ")


EVIL = "`<img src=x onerror=alert(1)>`|x\n# [a](javascript:b)\x1b[2J"


def test_names_are_no_markdown(tmp_path):
    """Whoever named a dataset, its sources and files writes no line, link or tag of a summary."""
    sha256 = "0" * 64
    source = {"name": EVIL, "from": EVIL, "revision": EVIL, "files": [{"name": EVIL, "size": 1, "sha256": sha256}]}
    made_of = {"name": EVIL, "sources": [source], "tokenizer": {"name": EVIL}, "operation": {"operation": "merge", "to": EVIL}}
    made_of["inputs"] = [
        {"name": EVIL, "version": EVIL, "seq_counts": {"train": 1, "validation": 0}, "token_counts": {"train": 1}}
    ]
    counts = {"name": EVIL, "read": 1, "written": 1, "skipped": {EVIL: 1}, "token_count": 1, "text_bytes": 1}
    particular = {"path": f"/data/{EVIL}", "operation": "merge", "not_found": 0, "seconds": {}}
    result = result_of(DerivedResult, {**counts, "by_source": [counts]}, **particular)
    new = {"provenance": {**made_of, "documents": {}, "split": {}}, "totals": result.totals, "layout": "mmap"}
    changes = changes_between(None, None, "v", new)
    refreshed = RefreshResult.model_construct(
        path="/data", version="v", outcome="published", changes=changes, removed=(), text_bytes_tokenized=0
    )
    fault = DamagedError(f"https://host/{EVIL}", (EVIL,))
    progress = Progress("verify", 1.0, 0, Done())
    pages = [derived(made_of, result), changed(config(tmp_path), refreshed), checked(EVIL, "full", fault, progress), link(EVIL)]
    pages.append("\n".join(card_sources(markdown(made_of)["sources"])))
    status = STATUS.model_copy(update={"versions": (version("c3", tokenizer=EVIL, pinned=EVIL, state="latest"),)})
    pages.append(dataset_page(EVIL, status, [run("FAILED", EVIL)], "none"))
    for page in pages:
        assert "<" not in page
        assert "\x1b" not in page
        assert "](javascript" not in page.replace(r"\](", "")
        assert not any(line.startswith("# [a]") for line in page.splitlines())
        assert all(line.count("|") - line.count(r"\|") in (0, *range(4, 8)) for line in page.splitlines())
