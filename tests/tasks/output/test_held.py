"""Versions that wait for a person: held, approved, rejected, replaced; and what comes in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

import flat_tokens
import tasks.output.swap
from flat_tokens.manifest import manifest_digest
from flat_tokens.stores import signing
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tasks.gates import Finding
from tasks.output.paths import version_store
from tasks.output.pointer import Candidate, read_history, read_pointer
from tasks.output.swap import Seen
from tasks.output.versions import approve, hold, list_versions, reject, roll_back
from tests.keys import key_file
from tests.processes import in_threads
from tests.refusal import refusal
from tests.tasks.conftest import IN_A_STORE, ON_DISK, Build


class At:
    """An output with versions of the same few texts, one for each seed, the last of which waits."""

    def __init__(self, root: Store, build: Build) -> None:
        self.root = root
        self.first, self.latest = (build("a", "b", split_seed=seed) for seed in range(2))
        self.waits = build("a", "b", split_seed=2, publish={"gates": [{"of": "documents", "at_least": 5, "action": "hold"}]})

    def hold(self, version: str | None = None, since: int | None = None, **other: Any) -> Candidate:
        version, now = version or self.waits, read_pointer(self.root)
        facts = {
            "version": version,
            "manifest_sha256": manifest_digest(version_store(self.root, version)),
            "before": now.version,
            "at": datetime.now(UTC),
            "gates": (),
            "findings": (Finding(of="documents", place="", value=1, limit="at least 2", action="hold"),),
            "documents": 4,
            "tokens": 100,
        }
        return hold(self.root, Candidate(**{**facts, **other}), now.sequence if since is None else since)


@pytest.fixture
def at(root: Store, build: Build) -> At:
    return At(root, build)


def test_a_version_that_waits_is_listed_kept_and_not_the_latest(at):
    assert {one.version: one.state for one in list_versions(at.root)} == {
        at.latest: "latest",
        at.first: "former",
        at.waits: "held",
    }
    gone = collect(at.root, Policy(keep_versions=1, grace_days=0), delete=True)
    assert {one.version for one in gone.kept} == {at.latest, at.waits}
    assert flat_tokens.open(at.root.url).path.endswith(at.latest)
    with refusal("waits for a person"):
        roll_back(at.root, at.waits)


def test_an_approval_is_recorded_and_made_once(at):
    number = read_pointer(at.root).sequence
    done = approve(at.root, at.waits[:6], "looks right", "eve")
    again = approve(at.root, None, "me too", "mallory")
    assert [(one.pointer.version, one.pointer.sequence, one.was_decided) for one in (done, again)] == [
        (at.waits, number + 1, False),
        (at.waits, number + 1, True),
    ]
    assert again.decision == done.decision
    (line,) = [one for one in read_history(at.root) if one.decision]
    assert (line.version, line.decision) == (at.waits, done.decision)
    records = [json.loads(at.root.read(f"runs/{name}")) for name, _ in (at.root / "runs").listing() if name.endswith(".json")]
    (record,) = [one for one in records if one.get("decision")]
    assert (record["decision"]["by"], record["decision"]["why"], record["version"]) == ("eve", "looks right", at.waits)
    flat_tokens.verify(at.root.url, "full")


def test_a_rejected_version_leaves_latest_alone(at):
    reject(at.root, None, "too small", "eve")
    assert (read_pointer(at.root).version, read_pointer(at.root).names("rejected")) == (at.latest, [at.waits])
    assert {one.version: one.state for one in list_versions(at.root)}[at.waits] == "rejected"
    with refusal("was rejected by eve"):
        approve(at.root, None, "no, it is right")
    assert reject(at.root, at.waits, "again").was_decided
    flat_tokens.verify(at.root.url, "full")
    assert roll_back(at.root, at.waits).version == at.waits  # a person names it
    assert read_pointer(at.root).rejected == ()


def test_what_is_no_longer_the_candidate_is_not_approved(at):
    roll_back(at.root)
    assert read_pointer(at.root).candidate is None
    with refusal(f"does not wait for a person. One waits until latest moves, which is {at.first} now"):
        approve(at.root, at.waits, "late")
    at.hold()
    at.hold(at.latest)  # another refresh replaces it
    with refusal(f"version {at.waits} does not wait for a person; {at.latest} does"):
        approve(at.root, at.waits, "late")
    assert read_pointer(at.root).version == at.first


def test_a_version_is_not_held_where_latest_has_moved(at):
    with refusal("another build published"):
        at.hold(since=read_pointer(at.root).sequence - 1)


def test_a_version_that_was_changed_is_not_approved(at):
    at.hold(manifest_sha256="ab" * 32)
    with refusal("is not what the gates looked at"):
        approve(at.root, None, "yes")
    assert read_pointer(at.root).version == at.latest


@pytest.mark.parametrize("others", [[approve, approve], [approve, reject], [reject, reject]])
def test_of_several_decisions_at_once_one_counts(at, others):
    barrier, said = threading.Barrier(len(others)), []

    def decide(one: Callable[..., Any]) -> None:
        barrier.wait()
        with suppress(ValueError):
            said.append(one(at.root, None, "why", one.__name__))

    in_threads(decide, others)
    (decision,) = (one.decision for one in read_pointer(at.root).decisions)
    assert {one.decision for one in said} == {decision}
    assert read_pointer(at.root).version == (at.waits if decision.what == "approved" else at.latest)


@IN_A_STORE
def test_an_approval_beside_another_one_is_the_others(at, monkeypatch):
    """A store has no lock that machines share: the other approval is made whole between two of this one's reads."""
    look, others = tasks.output.swap.look, ["another"]

    def late(root: Store, key: str) -> Seen:
        seen = look(root, key)
        if others:
            approve(root, None, "looked at it", by=others.pop())
        return seen

    monkeypatch.setattr(tasks.output.swap, "look", late)
    decided = approve(at.root, None, "looked at it, too", by="one")
    assert (decided.was_decided, decided.decision.by, decided.pointer.version) == (True, "another", at.waits)
    assert [one.decision.by for one in read_history(at.root) if one.decision] == ["another"]


def test_an_approval_that_is_killed_is_made_or_not(at, monkeypatch):
    """Before the swap nothing has changed; after it the move and the decision are both there, whatever else was not written."""

    def killed(*_: Any) -> bool:
        raise KeyboardInterrupt

    for module, name in (("swap", "swap"), ("versions", "put_run")):
        before = read_pointer(at.root)
        with monkeypatch.context() as patched:
            patched.setattr(f"tasks.output.{module}.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                approve(at.root, None, "yes")
        assert (read_pointer(at.root) == before) == (name == "swap")
    assert approve(at.root, None, "yes").was_decided
    assert [(one.version, one.decision.why) for one in read_history(at.root) if one.decision] == [(at.waits, "yes")]
    assert read_pointer(at.root).version == at.waits


@ON_DISK
def test_with_a_key_the_record_of_what_waits_is_signed(root, build, tmp_path, monkeypatch):
    monkeypatch.setenv(signing.KEY_FILE, str(key_file(tmp_path / "keys")))
    at = At(root, build)
    told = at.root.read("latest.json")
    (tmp_path / "out/latest.json").write_bytes(told.replace(at.waits.encode(), at.first.encode()))
    with refusal(r"latest\.json: the signature next to it is of something else"):
        approve(at.root, None, "yes")
    (tmp_path / "out/latest.json").write_bytes(told)
    assert approve(at.root, None, "yes").pointer.version == at.waits
