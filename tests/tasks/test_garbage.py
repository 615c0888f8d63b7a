"""What is garbage and what is not: versions by policy, then what no kept version and no running build needs."""

import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.garbage import GarbageReport, Policy, collect, remove_superfluous
from tasks.output.leases import build_lease
from tasks.output.pointer import read_pointer
from tasks.output.versions import Version, list_versions, names_of, pin, roll_back
from tasks.shards.receipts import load_shard
from tests.calls import before_each_call
from tests.damage import change_file
from tests.examples import first_fast
from tests.faults.support import build_here, receipts, shards_stay, write_notes
from tests.flows.test_stores import s3  # noqa: F401  a fixture
from tests.refusal import refusal
from tests.tasks.conftest import IN_A_STORE, ON_DISK

NOW, WEEK = (Policy(keep_versions=1, grace_days=days) for days in (0, 7))


def kinds(collected: GarbageReport) -> Counter[str]:
    return Counter(item.kind for item in collected.garbage)


def versions(root: Store) -> list[str]:
    return sorted(version.version for version in list_versions(root))


def shards(root: Store) -> int:
    return sum(key.startswith("_cache/") and key.endswith("/receipt.json") for key, _ in root.listing())


def test_a_dry_run_removes_nothing_and_lists_what_the_deletion_removes(root, build):
    build("a", "b")
    latest = build("b", "c")
    assert shards(root) == 0  # after a build every token is stored once
    before = sorted(root.listing())
    dry = collect(root, NOW)
    assert sorted(root.listing()) == before
    assert kinds(dry) == {"version": 1, "record": 1}
    done = collect(root, NOW, delete=True)
    assert (dry.deleted, done.deleted, done.left) == (False, True, None)
    assert {item.name for item in done.garbage} == {item.name for item in dry.garbage}
    gone = sum(size for _, size in before) - sum(size for _, size in root.listing())
    assert 0 < gone - done.byte_count < 12_000  # a version's manifest, marker, index and origin come on top of its objects
    assert versions(root) == [latest]
    assert collect(root, NOW, delete=True).garbage == ()
    flat_tokens.verify(root.url, "full")


def test_shards_that_a_version_holds_go_at_once_and_others_when_they_are_old(root, build):
    """Those of a build that died behind its commit, and those of one that nobody went on with."""
    with shards_stay():
        build("a")
        lost = build("b")
    roll_back(root)
    for key in [key for key, _ in root.listing() if key.startswith((f"versions/{lost}/", f"_cache/index/{lost}"))]:
        root.remove(key)
    assert shards(root) == 2
    gone = collect(root, WEEK, delete=True).garbage
    assert [item.why for item in gone if item.kind == "shard"] == ["a version holds its tokens"]
    gone = collect(root, NOW, delete=True).garbage
    assert [item.why for item in gone if item.kind == "shard"] == ["no build went on with it"]
    assert shards(root) == 0


def test_the_latest_pinned_ones_and_the_last_n_are_kept(root, build):
    names = [build("a", split_seed=seed) for seed in range(5)]
    pin(root, names[0])
    collect(root, Policy(keep_versions=2, grace_days=0), delete=True)
    assert versions(root) == sorted([names[0], names[3], names[4]])
    roll_back(root, names[0])
    collect(root, NOW, delete=True)
    assert versions(root) == [names[0]]


@ON_DISK
def test_days_of_grace_begin_when_a_version_ceased_to_be_the_latest(root, build):
    """A version that was read for a month and was replaced an hour ago has readers."""
    output = Path(root.root)
    one = build("a")
    age(output, days=30)
    two = build("a", split_seed=1)
    assert collect(root, WEEK).garbage == ()
    pointer = read_pointer(root)
    longer = pointer.former[0].model_copy(update={"until": "2020-01-01T00:00:00+00:00"})
    root.put("latest.json", pointer.model_copy(update={"former": (longer,)}).as_json())
    assert collect(root, WEEK).garbage[0].name == f"versions/{one}"
    assert versions(root) == sorted([one, two])


def age(directory: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in [directory, *directory.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


@ON_DISK
@pytest.mark.parametrize("receipt", [None, "{}"])
def test_young_remains_of_a_build_that_may_be_resumed_stay(root, build, receipt):
    """Shards without a version, of which one has no receipt or a damaged one; a version without its marker."""
    output = Path(root.root)
    build("a")
    with shards_stay():
        lost = build("b", "c", split_seed=1)
    roll_back(root)
    (first := output / "_cache" / min(receipts(output)) / "receipt.json").unlink()
    if receipt:
        first.write_text(receipt)
    (output / "versions" / lost / "zarr.json").unlink()
    dry, young = collect(root, WEEK), collect(root, WEEK, delete=True)
    assert young.garbage == ()
    assert dry.recent_bytes == young.recent_bytes > 0
    age(output / "versions" / lost, days=8)
    age(output / "_cache", days=8)
    assert collect(root, WEEK).recent_bytes == 0  # it is listed as garbage
    assert kinds(collect(root, WEEK, delete=True)) == {"unfinished version": 1, "shard": 2, "record": 2}
    assert not (output / "versions" / lost).exists()
    assert not first.parent.exists()


@ON_DISK
def test_staging_of_dead_processes_goes_without_grace(root, build):
    output = Path(root.root)
    build("a")
    root.put("_staging/0123456789abcdef/abc/file", b"12345")
    root.put("_staging/0123456789abcdef/abc.lock", b"")
    done = collect(root, Policy(), delete=True)
    assert [(item.kind, item.byte_count) for item in done.garbage] == [("staging", 5)]
    assert not (output / "_staging").exists()


def test_groups_that_no_build_came_back_for_go_when_they_are_old(root, build, tmp_path):
    """A build that is run again stores them again."""
    build("a")
    root.put("_groups/00/group.json", b"12345")
    root.put("_groups/00/report.json", b"1")
    assert collect(root, WEEK, delete=True).garbage == ()
    gone = collect(root, NOW, delete=True).garbage
    assert [(item.kind, item.name, item.byte_count) for item in gone] == [("group", "_groups/00", 6)]
    assert not list(names_of(root, "_groups"))
    assert not (tmp_path / "out/_groups").exists()


def test_downloads_and_quarantine_go_when_no_kept_version_was_made_of_them(tmp_path):
    output, remote = tmp_path / "out", f"memory://{uuid.uuid4().hex}"
    root = Store.at(output)
    for name in ("a", "b"):
        write_notes(tmp_path / "in" / f"{name}.jsonl", 2)
        Store.at(remote).put(f"{name}.jsonl", (tmp_path / "in" / f"{name}.jsonl").read_bytes())
        build_here({"output": str(output), "source": {"path": f"{remote}/{name}.jsonl", "id_column": "id"}, "tokenizer": "bytes"})
    files = output / "_cache/files"
    assert len(list(files.glob("*.raw"))) == 2
    (files / ".left.part").write_bytes(b"123")
    root.put("_quarantine/shard-1/c", b"1")
    assert collect(root, WEEK).garbage == ()
    assert kinds(collect(root, Policy(keep_versions=2, grace_days=0))) == {"file": 1, "quarantine": 1}
    collected = collect(root, NOW, delete=True)
    assert kinds(collected) == {"version": 1, "file": 2, "quarantine": 1, "record": 1}
    assert len(list(files.glob("*.raw"))) == 1
    assert not list((output / "_quarantine").glob("shard*"))


def test_while_a_build_runs_nothing_goes_that_it_may_read(root, build, tmp_path):
    build("a")
    build("b")
    root.put("_groups/00/group.json", b"1")
    with build_lease(root, tmp_path / "scratch"):
        done = collect(root, NOW, delete=True)
    assert "a build is running" in str(done.left)
    assert kinds(done) == {}
    assert kinds(collect(root, NOW, delete=True)) == {"version": 1, "record": 1, "group": 1}


def test_a_version_that_is_pinned_or_made_the_latest_at_the_last_moment_stays(root, build, monkeypatch):
    """Between the listing and the removal; on object stores even between the marker's removal and the rest's."""
    for late in (lambda version: pin(root, version), lambda version: roll_back(root, version)):
        one = build("a")
        build("a", split_seed=1)
        divide_then(monkeypatch, late)
        collect(root, NOW, delete=True)
        monkeypatch.undo()
        assert one in versions(root)
        flat_tokens.verify(f"{root.url}/versions/{one}", "full")


def divide_then(monkeypatch: pytest.MonkeyPatch, late: Callable[[str], object]) -> None:
    import tasks.garbage

    real, calls = tasks.garbage.divide_versions, []

    def divide(versions: list[Version], policy: Policy) -> object:
        kept, going = real(versions, policy)
        if going and not calls:
            calls.append(late(going[0].version))
        return kept, going

    monkeypatch.setattr(tasks.garbage, "divide_versions", divide)


def deaths(
    root: Store, monkeypatch: pytest.MonkeyPatch, numbers: Iterable[int], prepare: Callable[[], object], run: Callable[[], object]
) -> Iterator[None]:
    """Prepare, and run until a process dies instead of removing the N-th object of a store, for each of the *numbers* N, until
    there are fewer. Yields after each death.
    """
    real, left = root.fs.rm, 0

    def remove(path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        nonlocal left
        for one in filter(root.fs.isfile, root.fs.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            left -= "/_running/" not in one  # a lease of this process, which lives on
            if left == 0 and "/_running/" not in one:
                raise KeyboardInterrupt
            real(one)

    monkeypatch.setattr(root.fs, "rm", remove)
    for number in numbers:
        left = 0
        prepare()
        left = number
        try:
            run()
        except KeyboardInterrupt:
            left = 0
            yield
        else:
            assert number > 20
            return


@IN_A_STORE
@pytest.mark.parametrize("way", ["refresh", "collection"])
@pytest.mark.parametrize("every", first_fast([9, 5]))
def test_the_rest_of_a_version_whose_removal_died_goes_at_once(root, build, monkeypatch, way, every):
    """On an object store, where objects go one by one. A build that has not finished stays: it may be resumed."""
    policy = Policy(keep_versions=1, grace_days=30)
    root.put("versions/unfinished/train/zarr.json", b"{}")
    two = lambda: [build("a", split_seed=seed) for seed in range(2)]  # noqa: E731
    for _ in deaths(root, monkeypatch, itertools.count(2, every), two, lambda: remove_superfluous(root, NOW)):
        last = read_pointer(root).version
        if way == "refresh":
            remove_superfluous(root, policy)
        else:
            assert collect(root, policy).garbage == collect(root, policy, delete=True).garbage
        assert sorted(names_of(root, "versions")) == sorted([str(last), "unfinished"])
        assert [*names_of(root, "origins"), *names_of(root, "_cache/index")] == [f"{last}.json"] * 2
        flat_tokens.verify(root.url, "full")


@IN_A_STORE
def test_two_collections_of_an_object_store_may_meet_at_any_version(root, build, monkeypatch):
    """Found on Google Cloud Storage: one removed a marker that the other one had just seen."""
    old, new = (build("a", split_seed=seed) for seed in range(2))
    others = [root]

    def meet(_: Store, key: str) -> None:
        if key == f"versions/{old}/zarr.json" and others:
            collect(others.pop(), NOW, delete=True)

    before_each_call(monkeypatch, "flat_tokens.stores.store.Store.read", meet)
    collect(root, NOW, delete=True)
    assert (others, versions(root)) == ([], [new])
    flat_tokens.verify(root.url, "full")


@IN_A_STORE
def test_a_collection_of_an_object_store_that_dies_at_any_removal_leaves_whole_versions(root, build, monkeypatch):
    """Who can be opened is whole, and so is every shard that has a receipt; the next collection ends the work."""
    two = lambda: [build(*names, split_seed=seed) for seed, names in enumerate(("ab", "bc"))]  # noqa: E731
    for _ in deaths(root, monkeypatch, itertools.count(1, 7), two, lambda: collect(root, NOW, delete=True)):
        for version in versions(root):
            flat_tokens.verify(f"{root.url}/versions/{version}", "full")
        for key in [name for name in names_of(root, "_cache") if root.exists(f"_cache/{name}/receipt.json")]:
            assert load_shard(root, key) is not None
        collect(root, NOW, delete=True)
        assert len(versions(root)) == 1
        assert shards(root) == 0
        assert list(names_of(root, "_cache/index")) == [f"{version}.json" for version in versions(root)]
        flat_tokens.verify(root.url, "full")


def test_without_a_pointer_no_version_is_superfluous(root, build):
    for seed in range(3):
        build("a", split_seed=seed)
    root.remove("latest.json")
    assert kinds(collect(root, NOW, delete=True)) == {}
    assert len(versions(root)) == 3


@ON_DISK
@pytest.mark.parametrize("value", [7, None, "x", [7], [{"path": 7}], {"path": "x"}])
def test_settings_that_are_not_understood_need_no_tables(root, build, value):
    """The record of an origin is damaged: a version is kept for it all the same, and so is what is young."""
    output = Path(root.root)
    version = build("a")
    change_file(output / "origins" / f"{version}.json", {"config": {"sources": value}})
    assert [one.version for one in collect(root, NOW, delete=True).kept] == [version]


@ON_DISK
def test_what_is_not_understood_stops_a_collection(root, build):
    output = Path(root.root)
    version = build("a")
    (output / "versions" / version / "manifest.json").write_text("{")
    with refusal(r"is not a manifest"):
        collect(root, NOW, delete=True)
    assert (output / "versions" / version / "train").exists()
