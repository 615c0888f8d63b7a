"""What people see of a run while it is under way: progress that moves, log lines, tags; none of it from what is not there."""

import errno
import logging
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect import flow
from prefect.client.schemas.objects import FlowRun

from flat_tokens.manifest import SPLITS
from flows.build import build_dataset
from flows.watch.progress import (
    dataset_name,
    flow_run,
    logging_to_server,
    run_heartbeats,
    showing_progress,
)
from flows.watch.words import describe, percent, slug, tags_of, what_was_done
from tasks.config import BuildConfig
from tasks.progress import Done, Meter, Pace, Progress, meter
from tasks.shards.receipts import write_shard
from tests.faults.support import derive_here, settings_of, write_notes
from tests.flows.asked import Seen, artifacts, ask, on_prefect_server, progress_of
from tests.made import docs_of, foreign, publish_docs
from tests.processes import in_threads, until
from tests.refusal import refusal


def config(output: Path | str, **settings: Any) -> BuildConfig:
    sources = [
        {"name": "web", "hub": {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}},
        {"name": "notes", "path": "/notes"},
    ]
    return BuildConfig.model_validate(
        {"output": str(output), "name": "Seen_By.People", "sources": sources, "tokenizer": "gpt2", **settings}
    )


def test_progress_says_first_how_much_is_done_and_left():
    """The card that it stands on shows how it begins."""
    now = Progress("tokenize", 10.0, 4_000_000_000, Done(1_000_000_000, 1234, 300_000_000))
    counts = "1,234 documents, 300,000,000 tokens, 1.0 GB of 4.0 GB at 100 MB/s"
    assert describe(now) == f"**25%**, ~0:30 left: {counts}"
    assert describe(now._replace(recent=1e8)) == f"**25%**, 0:30 left: {counts}"
    assert describe(Progress("download", 3.0, 0, Done())) == "**0%**: begun"
    assert percent(Progress("split", 1.0, 100, Done(250))) == 100.0
    assert slug("FineWeb_Edu 10BT!") == "fineweb-edu-10bt"  # which Prefect takes for a key


def test_what_was_stored_before_is_no_speed_and_takes_no_time():
    """Neither what has been found to be there, nor what is still to be found: 300 of the 500 bytes that are left are stored.
    Objects of the final arrays are written while slices are still tokenized, before that stage begins.
    """
    before = Progress("split", 2.0, 1000, Done(900), before=700)
    assert (before.rate, before._replace(done=Done(700)).left) == (100.0, None)
    now = Progress("tokenize", 2.0, 1000, Done(500, stored=400), stored=700, recent=50.0)
    assert (now.rate, now.left) == (50.0, 4.0)
    assert now._replace(recent=None).rate == 50.0
    assert describe(now) == "**50%**, 0:04 left: 500 B of 1.0 kB (400 B were stored) at 50 B/s"
    found = Progress("tokenize", 1.0, 400, Done(400, 2, stored=400), stored=400)
    assert (what_was_done(found), found.left) == ("2 documents, 400 B (400 B were stored)", None)


def rates_of(done: list[int]) -> list[float | None]:
    """The rate that is told of work each second."""
    pace, told = Pace(), []
    for second, work in enumerate(done):
        pace.mark(second, work)
        told.append(pace.rate(second, work))
    return told


def test_a_rate_is_told_when_it_is_steady():
    """A start that is slow, or that waits, is not taken for the rate of the whole."""
    told = rates_of([0, 0, 0, 10, 20, 30, 40, *range(500, 57_000, 500)])
    assert told[:7] == [None] * 7  # nothing was done for three seconds, and four are too few
    assert told[7:11] == [None] * 4  # it became fifty times as fast
    assert 300 < told[19] < 500
    assert told[-1] == 500  # of the last minute alone
    assert Pace().rate(100.0, 0) is None


def test_reports_that_come_now_and_then_have_a_rate():
    """Groups of slices report every ten seconds."""
    known = [rate for rate in rates_of([100 * (second // 10) for second in range(60)]) if rate is not None]
    assert known
    assert 5 < min(known) <= max(known) < 15


def test_while_work_stands_still_and_just_behind_that_no_rate_is_told():
    """As in an outage: what is left does not grow meanwhile, and the wait is not taken for work."""
    pace = Pace()
    for second in range(1, 21):
        pace.mark(second, 100 * second)
    assert [pace.rate(second, 2000) == 0 for second in (20, 29, 31, 90)] == [False, False, True, True]
    assert Progress("tokenize", 90.0, 4000, Done(2000), recent=0.0).left is None
    rates = []
    for second in range(91, 111):
        pace.mark(second, 2000 + 100 * (second - 90))
        rates.append(pace.rate(second, 2000 + 100 * (second - 90)))
    assert rates[:3] == [None] * 3
    assert rates[-1] == 100


def test_a_meter_remembers_the_stages_that_have_ended():
    counted = Meter()
    counted.reset()
    counted.begin("download", 10)
    counted.add("download", 10)
    counted.begin("tokenize", 100)
    counted.add("split", 5)
    counted.begin("split", 50)
    assert [(one.stage, one.total, one.done.bytes, one.before) for one in counted.stages()] == [
        ("start", 0, 0, 0),
        ("download", 10, 10, 0),
        ("tokenize", 100, 0, 0),
        ("split", 50, 5, 5),
    ]
    counted.reset()
    assert [one.stage for one in counted.stages()] == ["start"]


@on_prefect_server
def test_every_stage_is_an_artifact_that_moves(monkeypatch):
    """However short it was, and at its end with all that was done. One run may do several things: what the one before has shown
    ends, and the tags of both stay.
    """
    monkeypatch.setattr("flows.watch.progress.UPDATE_SECONDS", 0.1)

    @flow
    def moving() -> None:
        run_id = flow_run().id
        with showing_progress("Seen_By.People", ["dataset:first"]):
            meter.begin("download", 10)
            meter.add("download", 10)
            meter.begin("tokenize", 1000)
            for size, share in ((250, 25.0), (250, 50.0), (500, 100.0)):
                meter.add("tokenize", size, 3, 40)
                until(lambda share=share: progress_of(run_id).get("seen-by-people-tokenize", (0.0,))[0] == share)
        with showing_progress("second", ["dataset:second"]):
            meter.begin("split")
            meter.begin("verify", 1)

    moving()
    seen = Seen("dataset:first", "dataset:second")
    names = ["seen-by-people-download", "seen-by-people-tokenize", "second-verify"]
    assert seen.shares == dict.fromkeys(names, 100.0)  # there was nothing to split, and it was over at once
    assert seen.progress["seen-by-people-tokenize"][1].startswith("Done: 9 documents, 120 tokens, 1.0 kB at ")
    assert seen.progress["second-verify"][1] == "Done: there was nothing to do"


@on_prefect_server
def test_log_lines_of_our_modules_reach_the_server_once_from_any_thread():
    """The library's lines too, however often they are asked for. Where the settings of Prefect name our loggers, it has handlers
    there already.
    """
    names, run_ids = ["flat_tokens.stores.retry", "flows.runners.work_pool", "tasks.download", "tasks.output.leases"], []

    def tell(name: str) -> None:
        logging.getLogger(name).info("said by %s", name)

    @flow
    def talking() -> None:
        run_ids.append(flow_run().id)
        with logging_to_server(), logging_to_server():
            tell(names[0])
            in_threads(tell, names[1:])

    talking()

    def lines() -> list[str]:
        found = ask("/logs/filter", logs={"flow_run_id": {"any_": [str(run_ids[0])]}}, limit=200)
        return sorted(line["message"] for line in found if "said" in line["message"])

    until(lambda: len(lines()) >= len(names))
    assert lines() == [f"said by {name}" for name in names]
    assert logging.getLogger(names[0]).getEffectiveLevel() == logging.WARNING


@on_prefect_server
def test_a_run_has_tags_to_search_by_and_goes_on_when_nothing_can_be_shown(monkeypatch, tmp_path, caplog):
    def refuse(**_: Any) -> Any:
        raise ConnectionError("nobody answers")

    @flow
    def seen() -> str:
        with showing_progress("Seen_By.People", tags_of(config(tmp_path))):
            return "done"

    assert seen() == "done"
    assert Seen("dataset:Seen_By.People", "tokenizer:gpt2").run["state_type"] == "COMPLETED"
    monkeypatch.setattr("flows.watch.progress.get_client", refuse)
    with caplog.at_level(logging.WARNING, "flows.watch.progress"):
        assert seen() == "done"
    assert "The tags could not be shown: nobody answers" in caplog.text


@on_prefect_server
@pytest.mark.parametrize(("error", "tries"), [(OSError(errno.EIO, "Input/output error"), 2), (ValueError("bad input"), 1)])
def test_a_store_that_failed_is_tried_again_and_bad_input_is_not(monkeypatch, tmp_path, error, tries):
    asked = []

    def once_broken(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 1:
            raise error
        return write_shard(*arguments)

    monkeypatch.setattr("tasks.shards.write.write_shard", once_broken)
    settings = settings_of(tmp_path / "out", write_notes(tmp_path / "notes.jsonl", 1))
    notes = BuildConfig.model_validate({**settings, "name": "broken-once"})
    if tries > 1:
        assert build_dataset(notes).totals["documents"]["written"] == 1
    else:
        with refusal("bad input"):
            build_dataset(notes)
        assert artifacts("dataset-broken-once")[-1][0].endswith("the last run failed")
    assert len(asked) == tries


@on_prefect_server
def test_a_run_that_fails_shows_how_far_it_came():
    """What had not begun to be counted has no artifact."""
    run_ids = []

    @flow
    def failing(begun: bool, error: BaseException) -> None:
        run_ids.append(flow_run().id)
        with showing_progress("failing", []):
            meter.begin("examine", 10)
            meter.add("examine", 10)
            meter.begin("verify", 100 if begun else 0)
            if begun:
                meter.add("verify", 25, faults=3)
            raise error

    for begun in (False, True):
        with refusal("three faults"):
            failing(begun, ValueError("three faults are enough"))
    with pytest.raises(SystemExit):
        failing(True, SystemExit())
    assert progress_of(run_ids[0])["failing-examine"][0] == 100.0
    assert "failing-verify" not in progress_of(run_ids[0])
    share, description = progress_of(run_ids[1])["failing-verify"]
    assert (share, description) == (25.0, "Failed at **25%**: 3 faults, 25 B of 100 B at 250 B/s")
    assert progress_of(run_ids[2])["failing-verify"][1].startswith("Stopped at **25%**: 3 faults, ")  # as by a cancellation


def test_a_dataset_is_called_what_its_manifest_says(tmp_path):
    """Where that cannot be read, by its place: what is wrong, who reads it will tell."""
    publish_docs(tmp_path / "out", docs_of([1]), name="web-texts")
    assert dataset_name(str(tmp_path / "out")) == "web-texts"
    assert dataset_name(f"{tmp_path}/nothing/") == "nothing"
    assert dataset_name("nowhere://bucket/there") == "there"


def test_the_automations_wait_for_no_heartbeat_of_a_run_that_tells_its_end(monkeypatch):
    """The end follows the last of its heartbeats, so that the server never takes a heartbeat behind it."""
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="a run", tags=["flat-tokens", "dataset:a"])
    told = []

    def emit(event: str, resource: dict[str, str], **settings: Any) -> str:
        assert resource["prefect.resource.id"] == f"prefect.flow-run.{run.id}"
        told.append((event, settings))
        return event

    monkeypatch.setattr("flows.watch.progress.flow_run", lambda: run)
    monkeypatch.setattr("flows.watch.progress.emit_event", emit)
    monkeypatch.setattr("flows.watch.progress.HEARTBEAT_SECONDS", 0.01)

    @run_heartbeats()
    def work() -> None:
        until(lambda: len(told) > 2)
        raise ValueError("however it ends")

    with refusal("however"):
        work()
    *beats, (end, settings) = told
    ((beat, number),) = Counter(name for name, _ in beats).items()
    assert number > 3
    assert settings["follows"] == beat
    assert "prefect.tag.flat-tokens" in [tag["prefect.resource.id"] for tag in settings["related"]]
    rules = yaml.safe_load((Path(__file__).parents[3] / "deployments/automations.yaml").read_text())["automations"]
    (silent,) = (rule["trigger"] for rule in rules if rule["trigger"].get("after") == [beat])
    assert end in silent["expect"]


def test_all_that_is_read_and_written_is_counted(tmp_path):
    """Of a dataset without a manifest every byte for its digest, its six entries and seven tokens for the format, the tokens
    again for keys; of each of its four documents 32 bytes; tokens as they are shuffled and written; the check at the end.
    """
    plain = foreign(tmp_path / "plain", [[1, 2, 3], [4]], [[5, 6, 7], []])
    stored = sum(path.stat().st_size for split in SPLITS for path in (plain / split).rglob("*") if path.is_file())
    derive_here("shuffle", plain, output=tmp_path / "out", verify_level="full")
    stages = {one.stage: one for one in meter.stages()}
    assert {name: (one.total, one.done) for name, one in stages.items() if name in ("examine", "count", "shuffle", "split")} == {
        "examine": (6 * 8 + 7 * 4 + stored, Done(6 * 8 + 7 * 4 + stored)),
        "count": (4 * 32 + 7 * 4, Done(4 * 32 + 7 * 4, 4)),
        "shuffle": (7 * 4, Done(7 * 4, 4, 7)),
        "split": (7 * 4, Done(7 * 4)),
    }
    assert stages["verify"].done.bytes == stages["verify"].total > stored
