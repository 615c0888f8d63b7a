"""Builds whose tokens go straight into the version, and are stored once."""

import itertools
import random
import shutil
import uuid
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult
from tasks.assemble.assembler import Assembler
from tasks.garbage import Policy, collect
from tasks.output.paths import UNFINISHED
from tasks.parts.part import Part
from tasks.parts.stored import ENTRIES, TAILS
from tasks.shards.receipts import read_receipt
from tests.examples import first_fast
from tests.faults.support import Settings, build_here, receipts, same_bytes, settings_of, shards_stay, staged
from tests.made import small
from tests.refusal import refusal
from tests.sources import write_rows

NOW = Policy(keep_versions=1, grace_days=0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice has several batches, an object 4,096 tokens."""
    monkeypatch.setattr("flat_tokens.text.limits.BATCH_BYTES", 500)
    for name in LAYOUTS:
        monkeypatch.setitem(LAYOUTS, name, small(name, 4096, 64, in_blocks=True))
    monkeypatch.setattr("tasks.assemble.write.SPAN_TOKENS", 4096)
    monkeypatch.setattr("tasks.assemble.write.SPAN_DOCUMENTS", 64)
    monkeypatch.setattr("tasks.assemble.write.SMALL_TOKENS", 1)
    monkeypatch.setattr("tasks.assemble.write.BACKLOG", 100)


def put(path: Path, count: int, bad: int | None = None) -> Path:
    """A file of documents of some hundred bytes, one of which is not text."""
    drawn = random.Random(path.stem)
    texts = [f"{path.stem} {i}: " + "salt wind " * drawn.randrange(40) for i in range(count)]
    rows = [{"id": f"{path.stem}-{i}", "text": text, "n": i} for i, text in enumerate(texts)]
    if bad is not None:
        rows[bad]["text"] = None
    return write_rows(path, rows)


@pytest.fixture(params=first_fast(["mmap", "compact"]))
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    """Five files, each of some slices."""
    files = [put(tmp_path / "in" / f"{name}.jsonl", 40) for name in "abcde"]
    return settings_of(tmp_path / "out", *files, slice_bytes=4000, layout=request.param)


def is_that(result: BuildResult, settings: Settings, tmp_path: Path) -> None:
    """A version is what is built without streams, and all that lies at the output."""
    out = tmp_path / "out"
    with shards_stay():
        assert same_bytes(result, build_here({**settings, "output": str(tmp_path / uuid.uuid4().hex)}))
    flat_tokens.verify(out, "full")
    assert receipts(out) == set()
    assert staged(out) == []
    assert not (out / UNFINISHED).exists()


def streamed(out: Path) -> list[str]:
    """Keys of the stored shards whose tokens an unfinished version has. Others are of slices behind one that failed."""
    shards = [read_receipt((out / f"_cache/{key}/receipt.json").read_bytes()) for key in receipts(out)]
    found = [shard for shard in shards if shard.unfinished is not None]
    assert all([stored.key for stored in shard.objects] in ([ENTRIES], [ENTRIES, TAILS]) for shard in found)
    return sorted(shard.key for shard in found)


def test_a_slice_that_comes_twice_is_read_from_where_it_stands(settings, tmp_path):
    """Equal files have the same slices. The second one is of the version that is being written."""
    shutil.copy(tmp_path / "in/a.jsonl", tmp_path / "in/again.jsonl")
    settings["sources"].append({"name": "again", "path": str(tmp_path / "in/again.jsonl"), "id_column": "id"})
    is_that(build_here(settings), settings, tmp_path)


def failed(settings: Settings, tmp_path: Path, parts: int = 8) -> list[str]:
    """A build that is interrupted after so many slices. Keys of those that it streamed."""
    real, added = Assembler.add, itertools.count(1)

    def add(self: Assembler, part: Part) -> None:
        real(self, part)
        if next(added) == parts:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembler, "add", add)
        with pytest.raises(KeyboardInterrupt):
            build_here(settings)
    found = streamed(tmp_path / "out")
    assert len(found) > 3
    assert len(receipts(tmp_path / "out")) >= parts
    assert staged(tmp_path / "out") == []
    return found


def test_a_build_that_failed_goes_on_from_the_last_slice(settings, tmp_path):
    """Twice: an attempt takes what the one before it took and made, and removes objects that no receipt names."""
    first, left = failed(settings, tmp_path, 4), tmp_path / f"out/{UNFINISHED}/killed"
    left.mkdir()
    second = failed(settings, tmp_path, 9)
    assert set(first) <= set(second)
    assert not left.exists()
    result = build_here(settings)
    assert result.slices_reused >= len(second)
    is_that(result, settings, tmp_path)


@pytest.mark.parametrize("which", ["whole", "unfinished"])
def test_slices_whose_tokens_are_damaged_are_tokenized_again(settings, which, tmp_path, caplog):
    """Others are not. A bit is another one, of a token or of what says how long a compressed block is."""
    stored = failed(settings, tmp_path)
    directory = "versions/*/train/encoded_tokens/c" if which == "whole" else f"{UNFINISHED}/*"
    for path in (tmp_path / "out").glob(f"{directory}/*"):
        data = path.read_bytes()
        path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    result = build_here(settings)
    assert 0 < caplog.text.count("is not trusted and is rebuilt: ") < len(stored)
    is_that(result, settings, tmp_path)


def test_what_a_resumed_build_needs_is_no_garbage(settings, tmp_path):
    found, root = failed(settings, tmp_path), Store.at(tmp_path / "out")
    collected = collect(root, Policy(keep_versions=1, grace_days=7), delete=True)
    assert not collected.garbage
    assert streamed(tmp_path / "out") == found
    collected = collect(root, NOW, delete=True)
    assert {item.kind for item in collected.garbage} == {"unfinished version", "shard", "unfinished objects"}
    assert sum(item.byte_count for item in collected.garbage if item.kind == "unfinished objects") > 0
    assert not (tmp_path / "out" / UNFINISHED).exists()
    is_that(build_here(settings), settings, tmp_path)


def test_objects_that_no_shard_names_go_with_the_next_build(settings, tmp_path):
    failed(settings, tmp_path)
    for key in receipts(tmp_path / "out"):
        shutil.rmtree(tmp_path / "out/_cache" / key)
    is_that(build_here(settings), settings, tmp_path)
    (tmp_path / "out" / UNFINISHED).mkdir()  # as a kill leaves one behind the commit: there is nothing to do
    is_that(build_here(settings), settings, tmp_path)


def test_a_bad_document_ends_slices_that_wait_for_their_turn(settings, tmp_path):
    """Four threads have a slice each. Those of the files before the bad one are stored."""
    put(tmp_path / "in/d.jsonl", 40, bad=30)
    with refusal(r"d\.jsonl, line 31 \(row 30\): the text is null"):
        build_here(settings, 4)
    assert len(streamed(tmp_path / "out")) >= 3
    put(tmp_path / "in/d.jsonl", 40)
    assert build_here(settings, 4).slices_reused >= 3
