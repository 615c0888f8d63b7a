"""Groups of work for other processes: what is stored is what comes back, and what cannot be trusted is not."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flat_tokens.stores.store import Store, StoredObject
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.download.cut import cut_file
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.groups import (
    Files,
    Group,
    Slices,
    Spans,
    check_seen,
    check_tokenizer,
    forget,
    put_group,
    read_group,
    read_report,
    reporting,
)
from tasks.models import FoundFile
from tasks.output.paths import GROUPS
from tasks.output.staging import Place, attempt
from tasks.progress import meter
from tasks.shards.recipe import Recipe
from tasks.split.rule import SplitRule
from tasks.split.spans import Span
from tasks.split.write import Written
from tasks.text.slices import plan_slices
from tasks.tokenize.tokenizers import load_tokenizer
from tests.made import docs_of, publish_docs

WRITTEN = Written((StoredObject("train/encoded_tokens/c/0", 12, "ab"),), 7)


def group_of_slices(tmp_path: Path, **facts: Any) -> Group:
    """The slices of a Parquet file that lies on this machine."""
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(40)]}), data / "a.parquet", row_group_size=20)
    source = Source(path=str(data))
    pinned = resolve_source(source, 0)
    files = [fetch_file(found, (source,), tmp_path / "scratch") for found in pinned.files]
    tokenizer = TokenizerConfig(name="bytes")
    recipe = Recipe(
        place=Place(output=str(tmp_path / "out"), staging=""),
        sources=(source,),
        tokenizer=tokenizer,
        tokenizer_digest=load_tokenizer(tokenizer).digest,
        fast=False,
        documents=DocumentPolicy(),
        engine=None,
    )
    work = Slices(recipe=recipe, slices=tuple(plan_slices(files[0], source, 1)))
    told = {
        "output": str(tmp_path / "out"),
        "scratch": None,
        "keep_files": True,
        "workers": 1,
        "report_seconds": 0.02,
        "work": work,
        **facts,
    }
    return Group.model_validate(told)


def group_of_files(tmp_path: Path, **facts: Any) -> Group:
    source = Source(path=str(tmp_path / "data"))
    found = FoundFile(source=0, name="a.parquet", uri=str(tmp_path / "data" / "a.parquet"), size=None)
    told = {"output": str(tmp_path / "out"), "scratch": None, "keep_files": True, "workers": None, "report_seconds": 60, **facts}
    return Group.model_validate({**told, "work": Files(files=(found,), sources=(source,), slice_bytes=200)})


def group_of_spans(tmp_path: Path) -> Group:
    span = Span(split="train", of_tokens=True, start=0, stop=8, places=())
    work = Spans(spans=(span,), rule=SplitRule(fraction=0.5, seed=0), layout="mmap", version="0123456789abcdef")
    return Group(output=str(tmp_path), scratch=None, keep_files=True, workers=None, report_seconds=60, work=work)


def test_a_group_comes_back_as_it_was_stored_under_a_digest_of_its_work(tmp_path: Path) -> None:
    root = Store.at(tmp_path / "out")
    for group in (group_of_slices(tmp_path), group_of_files(tmp_path), group_of_spans(tmp_path)):
        digest = put_group(root, group)
        assert read_group(root, digest) == group
        assert put_group(root, group) == digest == group.digest
        other = group.model_copy(update={"workers": 3})
        assert other.digest != digest


def test_a_group_that_was_altered_or_is_of_another_release_is_refused(tmp_path: Path) -> None:
    root, group = Store.at(tmp_path / "out"), group_of_slices(tmp_path)
    digest = put_group(root, group)
    path = tmp_path / "out" / GROUPS / digest / "group.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "workers": 7}))
    with pytest.raises(ValueError, match="does not have its own digest"):
        read_group(root, digest)
    path.write_text(json.dumps({**facts, "semantics": "0"}))
    with pytest.raises(ValueError, match="stores tokens by semantics 0, this worker by"):
        read_group(root, digest)


def test_results_come_with_the_last_report_and_not_before(tmp_path: Path) -> None:
    root, group = Store.at(tmp_path), group_of_spans(tmp_path)
    digest = put_group(root, group)
    assert read_report(root, digest, "run") is None
    with reporting(root, group, "run") as report:
        first = read_report(root, digest, "run")
        assert first is not None
        assert (first.written, first.fault, first.process) == (None, None, os.getpid())
        assert first.under_way == ("train tokens 0 to 8",)
        report.add(WRITTEN)
    last = read_report(root, digest, "run")
    assert last is not None
    assert last.written == (WRITTEN,)
    assert last.shards is None
    assert last.under_way == ()


def test_reports_keep_coming_and_tell_how_far_the_work_is(tmp_path: Path) -> None:
    root, group = Store.at(tmp_path / "out"), group_of_slices(tmp_path)
    digest = put_group(root, group)
    meter.reset()
    meter.begin("tokenize")
    with reporting(root, group, "run"):
        meter.add("tokenize", 1000, 3, 200)
        until = time.monotonic() + 60
        while (report := read_report(root, digest, "run")) is None or report.done.bytes < 1000:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert report.number > 1
        assert tuple(report.done)[:3] == (1000, 3, 200)
        # the group is not concluded: no results were added


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ValueError("a.parquet, row 3: null"), False),
        (PermissionError("no"), False),
        (OSError("connection reset"), True),
        (MemoryError(), True),
        (RuntimeError("HTTP 503"), True),
    ],
)
def test_a_failure_is_reported_with_whether_another_try_may_help(tmp_path: Path, error: Exception, may_pass: bool) -> None:
    root, group = Store.at(tmp_path), group_of_spans(tmp_path)
    digest = put_group(root, group)
    with pytest.raises(type(error)), reporting(root, group, "run"):
        raise error
    report = read_report(root, digest, "run")
    assert report is not None
    assert report.fault is not None
    assert (report.fault.kind, report.fault.message, report.fault.may_pass) == (type(error).__name__, str(error), may_pass)
    assert report.written is None


def test_a_report_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    root, group = Store.at(tmp_path), group_of_spans(tmp_path)
    digest = put_group(root, group)
    with reporting(root, group, "run") as report:
        report.add(WRITTEN)
    path = tmp_path / GROUPS / digest / "run.json"
    whole = path.read_text()
    for damaged in (whole[:-20], whole.replace("12", "13"), "[]", "null", '{"sha256": "00"}'):
        path.write_text(damaged)
        assert read_report(root, digest, "run") is None


def test_a_group_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    root, group = Store.at(tmp_path), group_of_spans(tmp_path)
    digest = put_group(root, group)
    forget(root, digest)
    assert not list(tmp_path.iterdir())
    forget(root, digest)


def test_a_file_that_was_cut_comes_back_in_a_report(tmp_path: Path) -> None:
    group_of_slices(tmp_path)  # writes the file
    root, group = Store.at(tmp_path / "out"), group_of_files(tmp_path)
    assert isinstance(group.work, Files)
    (found,) = group.work.files
    cut = cut_file(found, group.work.sources, 200, Place(output=group.output, staging="", scratch=str(tmp_path / "scratch")))
    with reporting(root, group, "run") as report:
        report.add(cut)
    told = read_report(root, group.digest, "run")
    assert told is not None
    assert told.results == (cut,)
    assert told.results[0].slices[0].file.found == found


def test_what_a_group_fetches_is_kept_for_others_or_goes_with_its_attempt(tmp_path: Path) -> None:
    with attempt(str(tmp_path / "out"), tmp_path / "scratch", "one") as place:
        assert group_of_files(tmp_path).place(place).scratch == str(tmp_path / "scratch")
        assert group_of_files(tmp_path, keep_files=False).place(place).scratch == place.staging


def test_a_machine_that_does_not_see_the_output_says_so(tmp_path: Path) -> None:
    """Where a dataset is, a group that is not there is one whose build has ended."""
    root = Store.at(tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        read_group(root, "0" * 64)
    with pytest.raises(ValueError, match=re.escape("sees neither the build nor a dataset at")):
        check_seen(root)
    publish_docs(tmp_path / "out", docs_of((1, 2)))
    check_seen(root)


def test_another_tokenizer_of_the_same_name_is_refused(tmp_path: Path) -> None:
    work = group_of_slices(tmp_path).work
    assert isinstance(work, Slices)
    check_tokenizer(work.recipe)
    with pytest.raises(ValueError, match=re.escape("Give every machine the same file.")):
        check_tokenizer(work.recipe.model_copy(update={"tokenizer_digest": "0" * 64}))
