"""Collecting garbage beside builds and readers."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tasks.output.versions import list_versions, unpin
from tests.faults.power_loss import tree_of
from tests.faults.support import build_here, digests, receipts, settings_of, staged, version_digests, write_notes
from tests.flows.pipelines.test_reruns import stamps_of
from tests.processes import in_threads
from tests.refusal import refusal

EVERYTHING = Policy(keep_versions=1, grace_days=0)


def test_builds_and_collections_at_once_do_not_disturb_each_other(tmp_path):
    """A build takes shards from the cache that only an older version names; it gets them or makes them, and ends right."""
    root = tmp_path / "out"
    paths = [write_notes(tmp_path / "in" / f"{name}.jsonl", 6) for name in ("a", "b", "c")]
    ended = threading.Event()

    def collect_all_the_time() -> None:
        while not ended.is_set():
            collect(Store.at(root), EVERYTHING, delete=True)

    build_here(settings_of(root, paths[0], slice_bytes=400))
    with ThreadPoolExecutor() as beside:
        collecting = beside.submit(collect_all_the_time)
        try:
            for turn in range(4):
                chosen = [paths[turn % 3], paths[(turn + 1) % 3]]
                result = build_here(settings_of(root, *chosen, slice_bytes=400, split_seed=turn))
                assert flat_tokens.verify(root, "full").path == result.path
        finally:
            ended.set()
    collecting.result()
    calm = tmp_path / "calm"
    build_here(settings_of(calm, *chosen, slice_bytes=400, split_seed=3))
    assert version_digests(root, result.version) == version_digests(calm, result.version)
    collect(Store.at(root), EVERYTHING, delete=True)
    assert [path.name for path in (root / "versions").iterdir()] == [result.version]
    assert receipts(root) == receipts(calm)
    assert staged(root) == []


def test_collections_at_once_do_not_disturb_each_other(tmp_path):
    """Nor do lists of the versions: what another one has just removed is no error."""
    root = tmp_path / "out"
    first = build_here(settings_of(root, write_notes(tmp_path / "in/a.jsonl", 2)))
    collected = partial(collect, Store.at(root), EVERYTHING, delete=True)
    for turn in range(3):
        for i in range(8):
            shutil.copytree(first.path, root / "versions" / f"{turn}-{i}")
        in_threads(lambda act: act(), (collected, collected, partial(list_versions, Store.at(root))))
    collected()
    assert os.listdir(root / "versions") == [first.version]
    assert staged(root) == []


def test_the_link_leads_somewhere_behind_a_kill_between_pointer_and_link(tmp_path):
    """A collection mends it before it removes what it led to."""
    root = tmp_path / "out"
    source = write_notes(tmp_path / "in/a.jsonl", 4)
    first, last = build_here(settings_of(root, source)), build_here(settings_of(root, source, split_seed=1))
    (root / "latest").unlink()
    (root / "latest").symlink_to(f"versions/{first.version}")
    (root / ".latest.fresh").symlink_to(f"versions/{last.version}")
    collect(Store.at(root), EVERYTHING, delete=True)
    assert os.readlink(root / "latest") == f"versions/{last.version}"
    assert not (root / ".latest.fresh").is_symlink()


def test_a_collection_removes_what_deaths_left(tmp_path):
    """However young it is: nobody goes on with half a record, a probe, or the origin of a version that is gone."""
    root = tmp_path / "out"
    build = build_here(settings_of(root, write_notes(tmp_path / "in/a.jsonl", 4)))
    before = tree_of(root)
    for name in ("origins/.x.json.0123.part", "runs/.x.json.0123.part", "origins/gone.json",
                 ".latest.json.0123.part", ".probe", f".probe-{'0' * 32}"):  # fmt: skip
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{")
    with refusal("is not pinned; pinned are: none"):
        unpin(Store.at(root), "x")
    collect(Store.at(root), Policy(), delete=True)
    assert tree_of(root) == before
    assert flat_tokens.verify(root).path == build.path


def test_readers_keep_their_version_while_the_next_is_built_and_until_it_is_collected(tmp_path):
    """What is published is never touched again; a version goes whole. What is mapped stays, what is opened anew is not there."""
    root = tmp_path / "out"
    source = write_notes(tmp_path / "in/a.jsonl", 20)
    first = Path(build_here(settings_of(root, source)).path)
    reader, before = flat_tokens.open(root / "latest").train, (digests(first), stamps_of(first))
    tokens = reader.slice(0, reader.token_count)
    build_here(settings_of(root, source, split_seed=1))
    assert (digests(first), stamps_of(first)) == before
    collect(Store.at(root), EVERYTHING, delete=True)
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(first)
    assert (reader.slice(0, reader.token_count) == tokens).all()
