"""The versions of an output: listed, pinned, gone back to, held for a person, and where each came from. The pointer: what it
remembers, and that no move is lost, on a disk and on object stores that compare before they write.
"""

import errno
import hashlib
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
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
from tasks.output.pointer import Candidate, Pointer, change_pointer, publish, read_history, read_pointer
from tasks.output.swap import ObjectState, read_state, swap
from tasks.output.versions import (
    approve,
    at_dataset,
    check_distinct,
    find_version,
    hold,
    list_versions,
    pin,
    read_origin,
    read_origin_files,
    reject,
    roll_back,
    unpin,
)
from tests.faults.stores import BUCKETS
from tests.faults.support import build_here, settings_of, write_notes
from tests.keys import KEY
from tests.processes import in_threads
from tests.refusal import refusal
from tests.tasks.conftest import IN_A_STORE, Build


def versions_of(build: Build, count: int) -> list[str]:
    """Versions of the same few texts, one for each seed."""
    return [build("a", "b", split_seed=seed) for seed in range(count)]


def states(root: Store) -> dict[str, str]:
    """The state of each version, in the order in which they are listed."""
    return {version.version: version.state for version in list_versions(root)}


def test_versions_are_listed_the_latest_first(root, build):
    one, two, three = versions_of(build, 3)
    assert [*states(root).items()] == [(three, "latest"), (two, "former"), (one, "former")]
    latest = (versions := list_versions(root))[0]
    assert (latest.documents, latest.tokenizer, latest.pinned, latest.until) == (4, "bytes", None, None)
    assert latest.tokens == flat_tokens.verify(root.url).token_count
    assert latest.byte_count > 0
    assert all(version.at is not None for version in versions)


def test_a_rollback_goes_back_one_version_at_a_time_and_the_number_goes_on(root, build):
    one, two, three = versions_of(build, 3)
    assert [(now.version, now.sequence) for now in (roll_back(root), roll_back(root))] == [(two, 4), (one, 5)]
    assert flat_tokens.open(root.url).path.endswith(one)
    assert [*states(root).items()] == [(one, "latest"), (two, "withdrawn"), (three, "withdrawn")]
    with refusal(r"no version before .* is left"):
        roll_back(root)
    if root.is_local:
        assert os.readlink(Path(root.root, "latest")) == f"versions/{one}"


def test_a_rollback_to_a_named_version_and_forward_again(root, build):
    one, _, three = versions_of(build, 3)
    assert roll_back(root, one[:6]).version == one
    pointer = read_pointer(root)
    assert (pointer.names("former"), pointer.names("withdrawn")) == ([], [three])
    forward = roll_back(root, three)
    assert (forward.version, forward.sequence, forward.withdrawn) == (three, 5, ())
    assert roll_back(root).version == one
    four = build("a", "b", split_seed=3)  # it follows on what was gone back to
    assert read_pointer(root).version == four
    assert roll_back(root).version == one
    assert read_pointer(root).names("withdrawn") == [three, four]


def test_nothing_is_gone_back_to_that_is_damaged_gone_or_not_meant(root, build):
    with refusal("nothing was ever published"):
        roll_back(root)
    one, two = versions_of(build, 2)
    for name, words in (
        ("nope", "no version begins with 'nope'"),
        ("", "not the name"),
        ("../x", "not the name"),
        (two, "already"),
    ):
        with refusal(words):
            roll_back(root, name)
    root.remove(f"versions/{one}/train/seq_starts/c/0")
    with refusal("is missing"):
        roll_back(root)
    assert (read_pointer(root).version, read_pointer(root).sequence) == (two, 2)


def test_a_name_may_be_shortened_where_only_one_version_begins_so(tmp_path):
    root = Store.at(tmp_path)
    for name in ("abc1", "abc2", "b"):
        root.put(f"versions/{name}/zarr.json", b"{}")
    assert find_version(root, "b") == "b"
    assert find_version(root, "abc1") == "abc1"
    with refusal("several versions begin with 'abc': abc1, abc2"):
        find_version(root, "abc")


def test_a_pin_is_seen_until_it_is_taken_away(root, build):
    one, _ = versions_of(build, 2)
    assert pin(root, one[:8], "for the paper") == one
    assert {version.version: version.pinned for version in list_versions(root)}[one] == "for the paper"
    with refusal("'' is not the name of a version"):
        unpin(root, "")  # the only pin begins so, but nobody has named it
    assert unpin(root, one[:8]) == one
    assert all(version.pinned is None for version in list_versions(root))
    with refusal("is not pinned; pinned are: none"):
        unpin(root, one)
    with refusal("no version begins"):
        pin(root, "nope")


@pytest.mark.parametrize("record", ["held.json", "pins/x.json"])
def test_records_of_an_earlier_checkout_are_named(root, record):
    """Whoever pinned a version there is told before it may be collected."""
    root.put(record, b"{}")
    with refusal(r"is of an earlier checkout\. Pins and the version that waits are in latest\.json now"):
        collect(root, Policy())


def test_two_names_of_one_place_are_refused(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path)
    for other in ("out", "./out/", "link", f"file://{tmp_path}/out"):
        with refusal(f"{tmp_path}/out and {other} are one place"):
            check_distinct([f"{tmp_path}/out", f"{tmp_path}/other", other])
    check_distinct([f"{tmp_path}/out", f"{tmp_path}/out-2", "memory://out"])


def test_where_a_version_came_from_is_remembered_and_when_it_was_first_there(root, build, tmp_path):
    (version,) = versions_of(build, 1)
    origin = read_origin(root, version)
    assert origin.config["sources"][0]["path"] == str(tmp_path / "in/a.jsonl")
    assert [file.name for file in read_origin_files(root, version).found] == ["a.jsonl", "b.jsonl"]
    early = origin.model_copy(update={"at": origin.at.replace(year=2020)})
    root.put(f"origins/{version}.json", early.model_dump_json().encode())
    versions_of(build, 1)
    assert read_origin(root, version).at.year == 2020


def test_an_origin_is_recorded_as_json_writes_it(tmp_path):
    """Names in any alphabet, and the digits of small numbers."""
    write_notes(tmp_path / "in" / 'a"\\é海.jsonl', 4)
    built = build_here(settings_of(tmp_path / "out", tmp_path / "in", validation_fraction=0.00001))
    record = (tmp_path / "out/origins" / f"{built.version}.json").read_text()
    assert record == json.dumps(json.loads(record), ensure_ascii=False, separators=(",", ":")) + "\n"


@pytest.mark.parametrize("spoiled", [b"", b"{}", b"[]", b"\xff"])
def test_an_origin_that_cannot_be_read_is_none(tmp_path, spoiled):
    root = Store.at(tmp_path)
    root.put("origins/x.json", spoiled)
    assert read_origin(root, "x") is None


def test_a_dataset_is_found_by_its_output_a_version_or_the_link(root, build, tmp_path):
    one, two = versions_of(build, 2)
    link = {"/latest": two} if root.is_local else {}
    for below, version in ({"": two, f"/versions/{one}": one} | link).items():
        found, name = at_dataset(f"{root.url}{below}")
        assert (found.url, name) == (root.url, version)
    if not link:
        return
    with refusal("is neither a configuration file nor an output"):
        at_dataset(str(tmp_path / "in"))
    with refusal(r"latest\.json: is a file, not a dataset\. Give the output"):
        at_dataset(f"{root.root}/latest.json")


def versions(root: Store, *names: str) -> Store:
    for name in names:
        root.put(f"versions/{name}/manifest.json", name.encode())
        root.put(f"versions/{name}/zarr.json", b"{}")
    return root


def test_a_pointer_remembers_what_it_pointed_at_each_version_once(tmp_path):
    """The first has no more than it needs; what dead processes had half written goes."""
    root = versions(Store.at(tmp_path), "one", "two")
    assert read_pointer(root).sequence == 0
    root.put("exports/0123-one.json", b"{}")
    for half_written in ("exports/.0123-one.json.4567.part", ".latest.json.0123.part"):
        root.put(half_written, b"{")
    (tmp_path / ".latest.fresh").symlink_to("versions/old")
    publish(root, "one", 0)
    assert sorted(os.listdir(tmp_path)) == [".latest.lock", "exports", "latest", "latest.json", "versions"]
    assert os.listdir(tmp_path / "exports") == ["0123-one.json"]
    assert sorted(json.loads((tmp_path / "latest.json").read_bytes())) == ["manifest_sha256", "sequence", "version"]  # no more
    for since, version in enumerate(["one", "two", "one", "two"]):
        for _ in range(2):  # whoever is killed after it may do it again
            assert publish(root, version, since) == since + 1
    with pytest.raises(FileNotFoundError):
        publish(root, "absent", 4)
    now = read_pointer(root)
    assert (now.version, now.sequence, now.names("former")) == ("two", 4, ["one"])
    assert (now.manifest_sha256, os.readlink(tmp_path / "latest")) == (hashlib.sha256(b"two").hexdigest(), "versions/two")


FORMER = {"version": "a", "until": "2026-01-01T00:00:00+00:00"}


@pytest.mark.parametrize(
    "spoiled",
    [
        *(
            {"former": [former]}
            for former in (
                [1],
                "text",
                {"version": "a"},
                {**FORMER, "until": 1, "more": 2},
                {**FORMER, "version": 3},
                {**FORMER, "version": "../../a"},
                {**FORMER, "until": "yesterday"},
                {**FORMER, "until": "2026-01-01T00:00:00"},  # of which time zone?
            )
        ),
        *({"version": name} for name in ("", ".", "..", "../../elsewhere", "a/b", "a\0b")),
    ],
)
def test_a_pointer_that_makes_no_sense_or_leads_out_of_the_output_is_refused(tmp_path, spoiled):
    value = {"version": "one", "manifest_sha256": "1", "sequence": 1, **spoiled}
    (tmp_path / "latest.json").write_text(json.dumps(value))
    with refusal(r"latest\.json: is not a pointer to a version"):
        read_pointer(Store.at(tmp_path))


def check_swaps(root: Store) -> None:
    """Only who has seen the present state may replace it; the first object is made once."""
    absent = read_state(root, "latest.json")
    assert absent == (None, None)
    assert swap(root, "latest.json", absent, b"first")
    assert not swap(root, "latest.json", absent, b"other first")
    seen = read_state(root, "latest.json")
    assert swap(root, "latest.json", seen, b"second")
    assert not swap(root, "latest.json", seen, b"other second")
    assert root.read("latest.json") == b"second"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", BUCKETS)
def test_object_stores_swap_only_what_was_seen_and_move_no_pointer_twice(protocol, monkeypatch):
    with BUCKETS[protocol](monkeypatch) as there:
        check_swaps(Store.at(f"{there.url}/swaps"))
        check_racing_publications(f"{there.url}/race")
        # The store itself compares: also where another machine wrote between the last look and the write.
        root = Store.at(f"{there.url}/stale")
        assert swap(root, "latest.json", read_state(root, "latest.json"), b"one")
        seen = read_state(root, "latest.json")
        root.fs.pipe_file(root.path("latest.json"), b"theirs")
        looks = iter([seen])
        monkeypatch.setattr("tasks.output.swap.read_state", lambda root, key: next(looks, None) or read_state(root, key))
        assert not swap(root, "latest.json", seen, b"mine")
        assert root.read("latest.json") == b"theirs"


def test_no_pointer_is_moved_twice(output):
    check_racing_publications(output)


def check_racing_publications(url: str) -> None:
    """Of several that saw the same pointer one wins; the others are told."""
    names = [f"v{i}" for i in range(4)]
    versions(Store.at(url), *names)
    barrier, outcomes = threading.Barrier(len(names)), {}

    def race(name: str) -> None:
        barrier.wait()
        try:
            outcomes[name] = publish(Store.at(url), name, 0)
        except ValueError as error:
            outcomes[name] = str(error)

    in_threads(race, names)
    winner = read_pointer(Store.at(url)).version
    assert outcomes.pop(winner) == 1
    assert all("another build published" in str(outcome) for outcome in outcomes.values())
    assert read_pointer(Store.at(url)).sequence == 1


@IN_A_STORE
def test_a_write_that_fails_is_an_error_and_no_refusal(root, monkeypatch):

    def fail(path: str, data: bytes, **options: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(root.fs, "pipe_file", fail)
    with refusal("no space", OSError):
        swap(root, "latest.json", read_state(root, "latest.json"), b"mine")


@IN_A_STORE
def test_a_store_that_knows_no_conditions_is_written_without(root, monkeypatch):

    real = root.fs.pipe_file

    def refuse(path: str, data: bytes, **options: Any) -> None:
        if options:
            raise OSError(errno.ENOSYS, "NotImplemented")
        real(path, data)

    monkeypatch.setattr(root.fs, "pipe_file", refuse)
    check_swaps(root)


@IN_A_STORE
def test_a_version_that_is_collected_while_it_becomes_the_latest_does_not_stay_that(root):
    """Without a lock for all machines: the pointer goes back, and the rerun is told what to do."""
    versions(root, "one", "two")
    publish(root, "one", 0)

    def collected(pointer: Pointer) -> Pointer:
        root.remove("versions/two/zarr.json")
        return pointer.moved("two", "2", is_there=True)

    with refusal("version two has just been removed"):
        change_pointer(root, collected)
    now = read_pointer(root)
    assert (now.version, now.sequence, now.withdrawn) == ("one", 3, ())


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
    assert states(at.root) == {at.latest: "latest", at.first: "former", at.waits: "held"}
    gone = collect(at.root, Policy(keep_versions=1, grace_days=0), delete=True)
    assert {one.version for one in gone.kept} == {at.latest, at.waits}
    assert flat_tokens.open(at.root.url).path.endswith(at.latest)
    with refusal("waits for a person"):
        roll_back(at.root, at.waits)


def test_an_approval_is_recorded_and_made_once(at):
    number = read_pointer(at.root).sequence
    done = approve(at.root, at.waits[:6], "looks right", "eve")
    assert (done.pointer.version, done.pointer.sequence, done.was_decided) == (at.waits, number + 1, False)
    assert approve(at.root, None, "me too", "mallory") == done._replace(was_decided=True)
    assert [(one.version, one.decision) for one in read_history(at.root) if one.decision] == [(at.waits, done.decision)]
    records = [json.loads(at.root.read(f"runs/{name}")) for name, _ in (at.root / "runs").listing() if name.endswith(".json")]
    (record,) = [one for one in records if one.get("decision")]
    assert (record["decision"]["by"], record["decision"]["why"], record["version"]) == ("eve", "looks right", at.waits)


def test_a_rejected_version_leaves_latest_alone(at):
    reject(at.root, None, "too small", "eve")
    assert (read_pointer(at.root).version, read_pointer(at.root).names("rejected")) == (at.latest, [at.waits])
    assert states(at.root)[at.waits] == "rejected"
    with refusal("was rejected by eve"):
        approve(at.root, None, "no, it is right")
    assert reject(at.root, at.waits, "again").was_decided
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
    with signing.using(KEY), refusal(r"latest\.json: is not signed"):
        approve(at.root, None, "yes")
    assert read_pointer(at.root).version == at.latest


@IN_A_STORE
def test_an_approval_beside_another_one_is_the_others(at, monkeypatch):
    """A store has no lock that machines share: the other approval is made whole between two of this one's reads."""
    look, others = tasks.output.swap.read_state, ["another"]

    def late(root: Store, key: str) -> ObjectState:
        seen = look(root, key)
        if others:
            approve(root, None, "looked at it", by=others.pop())
        return seen

    monkeypatch.setattr(tasks.output.swap, "read_state", late)
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
