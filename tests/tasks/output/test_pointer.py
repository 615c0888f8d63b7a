"""The pointer: what it remembers, and that no move is lost, on a disk and on object stores that compare before they write."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from typing import Any

import pytest

from flat_tokens.stores.store import Store
from tasks.output.pointer import Former, Pointer, change, publish, read_pointer
from tasks.output.swap import look, swap
from tests.faults.stores import BUCKETS
from tests.processes import in_threads
from tests.refusal import refusal
from tests.tasks.conftest import IN_A_STORE


def versions(root: Store, *names: str) -> Store:
    for name in names:
        root.put(f"versions/{name}/manifest.json", name.encode())
        root.put(f"versions/{name}/zarr.json", b"{}")
    return root


def test_a_pointer_remembers_what_it_pointed_at_each_version_once(tmp_path):
    root = versions(Store.at(tmp_path), "one", "two")
    assert read_pointer(root).sequence == 0
    for since, version in enumerate(["one", "two", "one", "two"]):
        for _ in range(2):  # whoever is killed after it may do it again
            assert publish(root, version, since) == since + 1
    with pytest.raises(FileNotFoundError):
        publish(root, "absent", 4)
    now = read_pointer(root)
    assert (now.version, now.sequence, now.names("former")) == ("two", 4, ["one"])
    assert (now.manifest_sha256, os.readlink(tmp_path / "latest")) == (hashlib.sha256(b"two").hexdigest(), "versions/two")


def test_a_first_pointer_has_no_more_than_version_digest_and_number(tmp_path):
    publish(versions(Store.at(tmp_path), "one"), "one", 0)
    assert sorted(json.loads((tmp_path / "latest.json").read_bytes())) == ["manifest_sha256", "sequence", "version"]


def test_moving_back_forgets_what_came_after_and_withdraws_what_it_left():
    past = tuple(Former(version=name, until="2026-01-01T00:00:00+00:00") for name in ("one", "two", "three"))
    back = Pointer(version="four", manifest_sha256="4", sequence=4, former=past).moved_back("two", "2")
    assert Pointer.model_validate_json(back.as_json()) == back
    assert (back.version, back.manifest_sha256, back.sequence) == ("two", "2", 5)
    assert back.names("former") == ["one"]
    assert back.names("withdrawn") == ["four"]
    on = back.moved("four", "4", is_there=True)
    assert (on.names("former"), on.withdrawn, on.sequence) == (["one", "two"], (), 6)


@pytest.mark.parametrize(
    "spoiled",
    [
        [1],
        {"version": "a", "until": 1, "more": 2},
        "text",
        {"version": "a"},
        {"version": 3, "until": "2026-01-01T00:00:00+00:00"},
        {"version": "../../a", "until": "2026-01-01T00:00:00+00:00"},
        {"version": "a", "until": "yesterday"},
        {"version": "a", "until": "2026-01-01T00:00:00"},  # of which time zone?
    ],
)
def test_a_pointer_whose_past_makes_no_sense_is_refused(tmp_path, spoiled):
    value = {"version": "one", "manifest_sha256": "1", "sequence": 1, "former": [spoiled]}
    (tmp_path / "latest.json").write_text(json.dumps(value))
    with refusal(r"latest\.json: is not a pointer to a version"):
        read_pointer(Store.at(tmp_path))


@pytest.mark.parametrize("name", ["", ".", "..", "../../elsewhere", "a/b", "a\0b"])
def test_a_pointer_out_of_the_output_is_refused(tmp_path, name):
    (tmp_path / "latest.json").write_text(json.dumps({"version": name, "manifest_sha256": "1", "sequence": 1}))
    with refusal(r"latest\.json: is not a pointer to a version"):
        read_pointer(Store.at(tmp_path))


def check_swaps(root: Store) -> None:
    """Only who has seen the present state may replace it; the first object is made once."""
    absent = look(root, "latest.json")
    assert absent == (None, None)
    assert swap(root, "latest.json", absent, b"first")
    assert not swap(root, "latest.json", absent, b"other first")
    seen = look(root, "latest.json")
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
        assert swap(root, "latest.json", look(root, "latest.json"), b"one")
        seen = look(root, "latest.json")
        root.fs.pipe_file(root.path("latest.json"), b"theirs")
        looks = iter([seen])
        monkeypatch.setattr("tasks.output.swap.look", lambda root, key: next(looks, None) or look(root, key))
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
        swap(root, "latest.json", look(root, "latest.json"), b"mine")


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
        change(root, collected)
    now = read_pointer(root)
    assert (now.version, now.sequence, now.withdrawn) == ("one", 3, ())
