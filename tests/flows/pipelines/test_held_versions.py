"""Gates of builds and refreshes: facts of a version, what is held, stopped, or let through by a person."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
import flows.pipelines.publish
from flat_tokens.manifest import read_token_bytes
from flat_tokens.stores.store import Store
from flows.commands.build import summary
from flows.pipelines.build import BuildResult, result_if_up_to_date
from flows.pipelines.plan import plan
from flows.pipelines.refresh import RefreshResult
from flows.runners.processes import Threads
from flows.watch.page import held_page
from tasks.config import BuildConfig
from tasks.finalize.facts import Difference, VersionFacts, facts_of
from tasks.garbage import Policy, collect
from tasks.gates import Gate, Subject
from tasks.output.pointer import read_history, read_pointer
from tasks.output.versions import approve, reject
from tests.faults.support import build_here, refresh_here, settings_of
from tests.refusal import refusal
from tests.sources import write_rows

NOTHING = [{"id": "none", "text": "", "split": None, "reason": None}]
"""A source of which no document is written."""


def rows(count: int, start: int = 0, **columns: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"{i}", "text": f"text {i} " + "ab " * (i % 4), "split": f"u{i % 3}", "reason": "x", **columns}
        for i in range(start, start + count)
    ]


class Dataset:
    """Sources ``a`` and ``b``, an output, and what is done there. Kept columns have names of facts of documents, too."""

    def __init__(self, here: Path) -> None:
        self.here, self.output = here, str(here / "out")
        self.write(a=rows(40), b=rows(20, 100))

    def write(self, **sources: list[dict[str, Any]]) -> None:
        for name, documents in sources.items():
            write_rows(self.here / f"{name}.jsonl", documents)

    def config(self, *gates: dict[str, Any], defaults: bool = True, **settings: Any) -> BuildConfig:
        common = {"validation_fraction": 0.3, "publish": {"gates": gates, "defaults": defaults}, "documents": {"empty": "skip"}}
        paths = (self.here / f"{name}.jsonl" for name in "ab")
        return BuildConfig.model_validate(settings_of(self.output, *paths, keep=["split", "reason"], **common | settings))

    def refresh(self, *gates: dict[str, Any], anyway: str | None = None, **settings: Any) -> RefreshResult:
        return refresh_here(self.config(*gates, **settings), publish_anyway=anyway)

    def build(self, *gates: dict[str, Any], anyway: str | None = None) -> BuildResult:
        return build_here(self.config(*gates), publish_anyway=anyway)

    def decisions(self) -> list[tuple[str, str]]:
        """What people decided, and why."""
        return [(one.decision.what, one.decision.why) for one in read_history(self.root) if one.decision]

    @property
    def root(self) -> Store:
        return Store.at(self.output)

    @property
    def latest(self) -> str:
        return str(read_pointer(self.root).version)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path)


def test_a_refresh_that_loses_a_source_is_held_until_somebody_decides(dataset):
    first = dataset.refresh()
    dataset.write(b=rows(9, 100))
    held = dataset.refresh()
    assert (held.outcome, held.version, dataset.latest) == ("held", first.version, first.version)
    assert "documents of source b: 9, -55.0 % from 20" in held.headline
    assert dataset.refresh().outcome == "still held"
    assert approve(dataset.root, None, "yes").pointer.version == held.build.version
    assert dataset.refresh().outcome == "unchanged"
    dataset.write(a=NOTHING)
    gone = dataset.refresh()
    assert [one.place for one in gone.build.held.findings] == ["source a", "source a"]  # type: ignore[union-attr]
    reject(dataset.root, None, "no")
    for _ in range(2):  # also when it was collected
        assert dataset.refresh().outcome == "rejected"
        collect(dataset.root, Policy(keep_versions=1, grace_days=0), delete=True)
    assert dataset.refresh(anyway="it is as it should be").outcome == "published"
    assert dataset.decisions() == [("approved", "yes"), ("rejected", "no"), ("published anyway", "it is as it should be")]
    flat_tokens.verify(dataset.output, "full")


def test_a_reason_is_noted_with_the_move_that_it_is_for(dataset, monkeypatch):
    """A refresh that dies before has decided nothing; after the move, the reason is there."""
    dataset.refresh()
    for count, at, outcome in ((9, "publish", "held"), (4, "put_run", "unchanged")):
        dataset.write(b=rows(count, 100))
        with monkeypatch.context() as patch:
            patch.setattr(flows.pipelines.publish, at, lambda *_: sys.exit(1))
            with pytest.raises(SystemExit):
                dataset.refresh(anyway=f"because of {count}")
        assert dataset.refresh().outcome == outcome
    assert dataset.decisions() == [("published anyway", "because of 4")]


def test_a_later_refresh_replaces_what_waits_or_ends_the_waiting(dataset):
    dataset.refresh()
    for count in (5, 4):
        dataset.write(b=rows(count, 100))
        held = dataset.refresh()
        assert read_pointer(dataset.root).candidate.version == held.build.version  # type: ignore[union-attr]
    dataset.write(b=rows(20, 100))
    assert dataset.refresh().outcome == "unchanged"
    assert read_pointer(dataset.root).candidate is None
    dataset.write(b=rows(19, 100))
    assert dataset.refresh().outcome == "published"
    dataset.write(b=rows(5, 100))
    assert dataset.refresh().outcome == "held"
    assert dataset.refresh(defaults=False).outcome == "published"  # other gates are asked again


def test_a_first_version_that_has_nothing_of_a_source_is_held(dataset):
    dataset.write(b=NOTHING)
    held = dataset.refresh()
    assert (held.outcome, held.version, held.sequence) == ("held", None, 0)
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(dataset.output)
    reject(dataset.root, None, "no")
    assert dataset.refresh().outcome == "rejected"
    dataset.write(b=rows(1))
    assert dataset.refresh().outcome == "published"


def test_a_build_does_not_publish_what_waits_or_was_rejected(dataset):
    first = dataset.refresh()
    dataset.write(b=rows(5, 100))
    dataset.refresh()
    waits = dataset.build()
    assert (waits.held is not None, dataset.latest) == (True, first.version)
    with Threads(1) as runner:
        assert result_if_up_to_date(dataset.config(), runner) is None
    reject(dataset.root, None, "no")
    with refusal("is not published: it was rejected"):
        dataset.build()
    done = dataset.build(anyway="it is right after all")
    assert (done.version, dataset.latest) == (waits.version, waits.version)
    assert read_pointer(dataset.root).rejected == ()
    assert dataset.refresh().outcome == "unchanged"


def test_a_gate_stops_a_build_and_a_person_publishes_it_anyway(dataset, caplog):
    gate = {"of": "tokens", "split": "train", "at_least": 10**6}
    for _ in range(2):
        with refusal(r"is not published: tokens of split train: [0-9]+; wanted is at least 1,000,000"):
            dataset.build(gate)
    assert not (Path(dataset.output) / "latest.json").exists()
    with refusal("needs a reason"):
        dataset.build(gate, anyway=" ")
    done = dataset.build(gate, anyway="small, but right")
    assert (done.version, done.decision.why) == (dataset.latest, "small, but right")  # type: ignore[union-attr]
    (record,) = [json.loads(path.read_bytes()) for path in Path(dataset.output, "runs").glob("2*.json")]
    assert (record["decision"]["why"], len(record["findings"]), record["host"]) == ("small, but right", 1, platform.node())
    dataset.write(b=rows(21, 100))
    assert dataset.refresh({**gate, "action": "warn"}).outcome == "published"
    assert "is published though its gates say: tokens of split train" in caplog.text


def test_a_first_version_that_waited_is_published_when_a_person_says_so(dataset):
    """And the program says that it did something."""
    gate = {"of": "tokens", "at_least": 10**6, "action": "hold"}
    held = dataset.build(gate)
    assert (held.is_new, summary(held)[0]) == (False, "held: latest stays where it is until a person decides")
    done = dataset.build(gate, anyway="small, but right")
    assert (done.is_new, summary(done)[0]) == (True, f"made before: latest is moved to {held.version}")
    again = dataset.build(gate)
    assert (again.is_new, summary(again)[0]) == (False, "nothing to do: this version is published")


def test_the_facts_of_a_version(dataset):
    steps = {"documents": {"steps": [{"use": "length", "min_characters": 8}], "empty": "skip"}}
    first = dataset.refresh(**steps, defaults=False)
    dataset.write(a=[*rows(39), {"id": "0", "text": ""}, {"id": "x", "text": "abcdefgh" * 3}], b=rows(30, 90, split=None))
    second = dataset.refresh(**steps, defaults=False)
    facts = [  # of 67 documents; those of a step are shorter than 8 characters
        ("documents", {"source": "a"}, 37),
        ("documents", {"source": "b"}, 30),
        ("tokens", {"split": "validation"}, 190),
        ("largest_length", {}, 24),
        ("skipped_share", {"source": "a", "reason": "empty"}, 1 / 41),
        ("skipped_share", {"step": "length"}, 3 / 71),
        ("duplicate_share", {}, 0),
        ("null_share", {"column": "split"}, 31 / 67),
        ("distinct", {"column": "split"}, 3),
        ("null_share", {"column": "reason"}, 1 / 67),
        ("bytes_per_token", {"split": "train"}, 1),  # of the tokenizer "bytes", each id is a byte
        ("text_bytes", {"split": "train"}, 687),
        ("added_share", {"source": "b"}, 10 / 30),
        ("removed_share", {}, 1 / 57),
    ]
    asked = [{"of": of, **subject} for of, subject, _ in facts] + [{"of": "median_length", "source": "b"}]
    difference = Difference(dataset.root, first.version, second.version)
    now, before = difference.facts([Gate.model_validate({**one, "at_least": 0}) for one in asked])
    for of, subject, value in facts:
        assert now[of, Subject(**subject)] == value, of
    b = Subject(source="b")
    assert (before["documents", b], before["distinct", Subject(column="split")]) == (20, 3)
    assert before["median_length", b] == 12


def test_bytes_of_a_split_are_those_of_its_ids(dataset):
    """They are unknown where a tokenizer changes text."""
    dataset.refresh()
    root, gate = dataset.root, Gate.model_validate({"of": "text_bytes", "by": "split", "at_least": 1})
    version = Path(dataset.output, "versions", dataset.latest)
    known = read_token_bytes(Store.at(version), json.loads((version / "manifest.json").read_bytes()))
    sums = {
        ("text_bytes", Subject(split=name)): sum(int(split[i].sum()) for i in range(len(split)))
        for name, split in flat_tokens.open(version).splits.items()
    }
    for record, wanted in (
        (known._replace(lengths=np.arange(257, dtype=np.int32)), sums),
        (known._replace(is_exact=False), dict.fromkeys(sums)),
    ):
        (version / "token_bytes.json").write_bytes(record.record())
        assert facts_of(VersionFacts(root, version.name), [gate]) == wanted
    (version / "token_bytes.json").unlink()
    assert facts_of(VersionFacts(root, version.name), [gate]) == wanted


def test_the_page_of_what_waits_has_both_versions_side_by_side(dataset):
    dataset.refresh()
    dataset.write(b=rows(3, 100))
    held = dataset.refresh().build
    assert held.held is not None
    assert held.comparison is not None
    text = held_page("web", dataset.output, held.held, held.comparison, ["[Approve it](/x)"])
    assert "| b | 20 | 3 | -85.0 % |" in text
    assert "| b, removed | 17 |" in text
    for title in ("Documents by source", "Tokens by source", "Documents by length in tokens"):
        assert f"![{title}](data:image/svg+xml" in text
    assert f"python -m flows approve {dataset.output} {held.version[:8]} --reason TEXT" in text


def test_a_plan_tells_which_gates_would_stop(dataset):
    dataset.refresh()
    dataset.write(b=rows(3, 100))
    made = plan(dataset.config({"of": "documents", "at_least": 50}, {"of": "largest_length", "at_most": 9, "action": "warn"}))
    assert [(one.place, one.action) for one in made.findings] == [("", "stop"), ("source b", "hold")]
    assert made.untold == ("largest_length",)
