"""Whole versions as readers find them: every layout through zarr itself, where each document came from, what is reused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
import tasks.finalize.seal
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult
from tasks.finalize.seal import count_repeated
from tasks.output.pointer import is_dataset, read_pointer
from tasks.shards.index import read_index
from tests.faults.support import build_here
from tests.flat_tokens.demo import DEMO, TOKENIZER
from tests.refusal import refusal
from tests.sources import held, write_rows


def make(output: Path, workers: int = 2, **settings: Any) -> BuildResult:
    return build_here({"output": str(output), "tokenizer": "bytes", **settings}, workers)


SOURCES = [{"name": path.stem, "path": str(path), "id_column": "id"} for path in (DEMO / "stories.parquet", DEMO / "notes.jsonl")]


def keys_in(output: Path) -> set[str]:
    indexes = [read_index(Store.at(output), path.stem) for path in output.glob("_cache/index/*.json")]
    return {shard.key for index in indexes for shard in index.published}


# The format, sentence by sentence.


def check_with_zarr(path: str, zarr_format: int) -> dict[str, int]:
    """Every sentence of the format, said by zarr and numpy; the number of sequences of each split."""
    root = zarr.open_group(path, mode="r")
    assert root.metadata.zarr_format == zarr_format
    counts = {}
    for split in SPLITS:
        tokens, starts = root[split]["encoded_tokens"], root[split]["seq_starts"]
        assert (tokens.dtype, starts.dtype) == (np.uint32, np.uint64)
        encoded, entries = tokens[:], starts[:]
        assert (entries[0], entries[-1]) == (0, len(encoded))
        assert (entries[1:] >= entries[:-1]).all()
        assert np.flatnonzero(encoded & 1).tolist() == entries[:-1][entries[:-1] < entries[1:]].tolist()
        assert root[split].attrs["max_token_id"] == int((encoded >> 1).max(initial=0))
        for name in ("key", "file", "row"):
            array = zarr.open_array(f"{path}/documents/{split}/{name}", mode="r")
            assert (array.shape, array.dtype) == ((len(entries) - 1,), np.uint64)
        counts[split] = len(entries) - 1
    return counts


@pytest.mark.parametrize(
    ("layout", "zarr_format", "fraction"), [("mmap", 3, 0), ("compact", 3, 0.3), ("compact", 3, 1), ("zarr2", 2, 1)]
)
def test_zarr_reads_every_layout_and_an_empty_split_is_a_valid_one(tmp_path, layout, zarr_format, fraction):
    result = make(tmp_path, sources=SOURCES, layout=layout, validation_fraction=fraction, tokenizer=TOKENIZER, slice_bytes=30_000)
    counts = check_with_zarr(result.path, zarr_format)
    assert sum(counts.values()) == result.totals["documents"]["written"] > 200
    assert (counts["train"] == 0) == (fraction == 1)
    assert (counts["validation"] == 0) == (fraction == 0)
    for split in SPLITS:
        assert result.totals[split]["seq_count"] == counts[split]
    assert flat_tokens.verify(tmp_path, "full").seq_count == sum(counts.values())


# What is reused.


def write_lines(path: Path, *values: str) -> None:
    write_rows(path, [{"text": value} for value in values])


def test_the_sources_own_validation_split_is_kept_whole(tmp_path):
    """Even where both hold the same documents, whose shard they share."""
    for name in ("a-train.jsonl", "test/b.jsonl"):
        write_lines(tmp_path / "in" / name, "x", "y", "z")
    result = make(tmp_path / "out", source={"path": str(tmp_path / "in"), "split": "train", "validation_split": "test"})
    assert [[one.text for one in docs] for docs in held(result.path).values()] == [["x", "y", "z"]] * 2
    assert len(keys_in(tmp_path / "out")) == 1


# Identity, pointer, commit.


def test_a_version_is_named_by_all_that_its_bytes_depend_on(tmp_path):
    write_lines(tmp_path / "in/a.jsonl", "x", "y")
    base = {"source": {"path": str(tmp_path / "in")}}
    changes = (
        {},
        {"name": "other"},
        {"validation_fraction": 0.25},
        {"split_seed": 1},
        {"layout": "compact"},
        {"tokenizer": TOKENIZER},
    )
    versions = [make(tmp_path / "out", **base, **settings).version for settings in (*changes, {"documents": {"empty": "skip"}})]
    write_lines(tmp_path / "in/a.jsonl", "x", "z")
    versions.append(make(tmp_path / "out", **base).version)
    assert len(set(versions)) == len(versions)
    assert read_pointer(Store.at(tmp_path / "out")).sequence == len(versions)


def test_the_engine_is_no_part_of_a_version_where_it_decides_nothing(tmp_path):
    write_lines(tmp_path / "in/a.jsonl", "x", "y")
    base = {"source": {"path": str(tmp_path / "in")}}
    for tokenizer, policy, is_same in ((TOKENIZER, "error", True), ("bytes", "skip", True), (TOKENIZER, "skip", False)):
        first, second = (
            make(tmp_path / "out", **base, documents={"on_bad": policy}, tokenizer={"name": tokenizer, "engine": engine})
            for engine in ("auto", "reference")
        )
        assert second.was_published == (first.version == second.version) == is_same


def test_an_uncommitted_version_is_none_for_any_reader(tmp_path, monkeypatch):
    """All is there but the root's metadata: zarr, our reader and the next build see no dataset."""

    def fail(*_: object) -> None:
        raise OSError("pulled the plug")

    for layout in ("mmap", "zarr2"):
        output = tmp_path / layout
        with monkeypatch.context() as patch:
            patch.setattr("tasks.finalize.seal.commit", fail)
            with refusal("pulled the plug", OSError):
                make(output, sources=SOURCES, layout=layout)
        (version,) = (output / "versions").iterdir()
        assert (version / "manifest.json").exists()
        assert not is_dataset(Store.at(output), version.name)
        with pytest.raises(FileNotFoundError):
            zarr.open_group(str(version), mode="r")
        with pytest.raises(FileNotFoundError):
            flat_tokens.open(output)
        result = make(output, sources=SOURCES, layout=layout)
        assert result.version == version.name
        assert not result.was_published
        assert is_dataset(Store.at(output), version.name)


def test_a_version_with_a_file_too_many_is_not_published(tmp_path):
    first = make(tmp_path, sources=SOURCES)
    stray = Path(first.path, "train", "stray")
    shutil.rmtree(first.path)
    stray.parent.mkdir(parents=True)
    stray.write_text("x")
    with refusal(r"nothing was published: train/stray is not in the manifest"):
        make(tmp_path, sources=SOURCES)
    assert not is_dataset(Store.at(tmp_path), first.version)
    stray.unlink()
    assert make(tmp_path, sources=SOURCES).version == first.version


@given(
    keys=st.lists(st.integers(0, 40), max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    at_once=st.sampled_from([0, 99]),
)
def test_repeated_keys_are_counted_in_memory_and_by_a_query(keys, cuts, at_once):
    """The first of equal keys is none of an earlier one, the others are."""
    stored = np.array(keys, np.uint64) * np.uint64(2**58)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.finalize.seal, "KEYS_AT_ONCE", at_once)
        found = count_repeated(np.split(stored, sorted(cuts)), len(keys))
    assert found == len(keys) - len(set(keys))
