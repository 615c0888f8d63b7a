"""Groups of work for other processes: what is stored is what comes back, and what cannot be trusted is not."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores import signing
from flat_tokens.stores.store import Store
from tasks.groups import (
    Group,
    GroupFault,
    check_seen,
    forget,
    put_group,
    read_group,
    read_report,
    reporting,
)
from tasks.models import FORMAT_SEMANTICS
from tasks.output.leases import attempt
from tasks.output.paths import GROUPS
from tasks.progress import meter
from tests.damage import change_file
from tests.keys import KEY, OTHER
from tests.made import docs_of, publish_docs
from tests.processes import until
from tests.refusal import refusal

WRITTEN = {"objects": [["train/encoded_tokens/c/0", 12, "ab"]], "max_token_id": 7}


def group(tmp_path: Path, **facts: Any) -> Group:
    """Two items of a stage, as a runner hands them out."""
    told = {
        "output": str(tmp_path / "out"),
        "scratch": None,
        "keeps": True,
        "room": None,
        "workers": 1,
        "report_seconds": 0.02,
        "steps": [{"stage": "split", "shared": [{"fraction": 0.5, "seed": 0}, "mmap"]}],
        "items": [{"start": 0}, {"start": 8}],
        "labels": ["train tokens 0 to 8", "train tokens 8 to 16"],
        **facts,
    }
    return Group.model_validate(told)


@pytest.fixture
def root(tmp_path: Path) -> Store:
    return Store.at(tmp_path / "out")


@pytest.fixture
def mine(tmp_path: Path) -> Group:
    return group(tmp_path)


@pytest.fixture
def digest(root: Store, mine: Group) -> str:
    """The digest of a group that is stored."""
    return put_group(root, mine)


@pytest.fixture
def path(root: Store, digest: str) -> Path:
    """The stored group's."""
    return Path(root.path(f"{GROUPS}/{digest}/group.json"))


def test_a_group_comes_back_as_it_was_stored_under_a_digest_of_its_work(root, mine, digest):
    assert read_group(root, digest) == mine
    assert put_group(root, mine) == digest == mine.digest
    assert mine.model_copy(update={"workers": 3}).digest != digest
    assert (mine.stage, mine.label) == ("split", "train tokens 0 to 8 to train tokens 8 to 16 (2)")


def test_a_group_that_was_altered_or_is_of_another_release_is_refused(root, digest, path):
    change_file(path, {"workers": 7})
    with refusal("does not have its own digest"):
        read_group(root, digest)
    change_file(path, {"semantics": "0"})
    with refusal("stores tokens by semantics 0, this worker by"):
        read_group(root, digest)
    change_file(path, {"semantics": FORMAT_SEMANTICS, "work": {"kind": "tokenize"}})
    change_file(path, lambda facts: facts.pop("steps"))
    with refusal("another form than this worker reads"):
        read_group(root, digest)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"labels": []}, "labels: needs at least one item"),
        ({"workers": "many"}, "workers: should be a whole number"),
        ({"output": "https://user:word@host/out"}, "output: "),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_group_that_is_damaged_is_refused_by_its_path(root, digest, path, damage, words):
    change_file(path, damage)
    with refusal(re.escape(f"{path} is damaged: {words}")):
        read_group(root, digest)


def test_results_come_with_the_last_report_and_not_before(root, mine, digest):
    assert read_report(root, digest, "run") is None
    with reporting(root, mine, "run") as results:
        first = read_report(root, digest, "run")
        assert (first.results, first.fault, first.process) == (None, None, os.getpid())
        assert first.under_way == mine.labels
        results.append(WRITTEN)
        results.append(WRITTEN)
    last = read_report(root, digest, "run")
    assert (last.results, last.under_way) == ((WRITTEN, WRITTEN), ())


def test_reports_keep_coming_and_tell_how_far_the_work_is(root, mine, digest):
    meter.reset()
    meter.begin("tokenize")
    with reporting(root, mine, "run"):
        meter.add("tokenize", 1000, 3, 200)
        until(lambda: (report := read_report(root, digest, "run")) and report.number > 1 and report.done[:3] == (1000, 3, 200))
        # the group is not concluded: no results were added


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ValueError("a.parquet, row 3: null"), False),
        (PermissionError("no"), False),
        (OSError("connection reset"), True),
        (RuntimeError("HTTP 503"), True),
    ],
)
def test_a_failure_is_reported_with_whether_another_try_may_help(root, mine, digest, error, may_pass):
    with pytest.raises(type(error)), reporting(root, mine, "run"):
        raise error
    report = read_report(root, digest, "run")
    assert report.fault == GroupFault(kind=type(error).__name__, message=str(error), may_pass=may_pass)
    assert report.results is None


def test_a_report_that_is_damaged_counts_as_none(root, mine, digest, tmp_path):
    with reporting(root, mine, "run") as results:
        results.append(WRITTEN)
    path = tmp_path / "out" / GROUPS / digest / "run.json"
    whole = path.read_text()
    for damaged in (whole[:-20], whole.replace("12", "13"), "[]", "null", '{"sha256": "00"}'):
        path.write_text(damaged)
        assert read_report(root, digest, "run") is None


def test_a_group_that_is_forgotten_leaves_nothing(root, digest, tmp_path):
    forget(root, digest)
    assert not list((tmp_path / "out").iterdir())
    forget(root, digest)


def test_what_a_group_fetches_is_kept_for_others_or_goes_with_its_attempt(tmp_path):
    with attempt(Store.at(tmp_path / "out"), tmp_path / "scratch", "one") as place:
        assert group(tmp_path).place(place) == place
        assert group(tmp_path, keeps=False, room=9).place(place) == place._replace(keeps=False, room=9)
        assert group(tmp_path, keeps=False, room=9).digest == group(tmp_path).digest


def test_a_machine_that_does_not_see_the_output_says_so(root, tmp_path):
    """Where a dataset is, a group that is not there is one whose build has ended."""
    with pytest.raises(FileNotFoundError):
        read_group(root, "0" * 64)
    with refusal(re.escape("sees neither the build nor a dataset at")):
        check_seen(root)
    publish_docs(tmp_path / "out", docs_of((1, 2)))
    check_seen(root)


def test_a_build_that_signs_takes_no_worker_without_its_key_and_no_report_without_a_signature(root, mine):
    with signing.using(KEY):
        digest = put_group(root, mine)
        assert read_group(root, digest) == mine
    with refusal(f"the build signs, but .* has no key. Set {signing.KEY_FILE} on every worker"):
        read_group(root, digest)
    with (
        signing.using(OTHER),
        refusal(r"group\.json: the signature next to it is of something"),
    ):
        read_group(root, digest)
    with reporting(root, mine, "plain") as results:
        results += [WRITTEN, WRITTEN]
    with signing.using(KEY):
        with reporting(root, mine, "signed") as results:
            results += [WRITTEN, WRITTEN]
        assert read_report(root, digest, "plain") is None
        assert read_report(root, digest, "signed").results == (WRITTEN, WRITTEN)
        for suffix in ("", signing.SIGNATURE):  # one run's report is not another's
            os.replace(root.path(f"{GROUPS}/{digest}/signed.json{suffix}"), root.path(f"{GROUPS}/{digest}/plain.json{suffix}"))
        assert read_report(root, digest, "plain") is None
