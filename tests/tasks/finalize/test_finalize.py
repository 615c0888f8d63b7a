"""Whole versions as readers find them: every layout through zarr itself, where each document came from, what is reused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
import tasks.finalize.seal
import tasks.shards.write
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult, build
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.finalize.seal import Provenance, build_id, count_repeated, is_published
from tasks.output.pointer import publish, read_pointer
from tasks.shards.index import read_index
from tests.examples import first_fast
from tests.refusal import refusal
from tests.sources import write_rows

DEMO = Path(__file__).parents[3] / "deployments/demo"
TOKENIZER = str(DEMO / "tokenizer.json")


def make(output: Path | str, workers: int = 2, **settings: Any) -> BuildResult:
    config = BuildConfig.model_validate({"output": str(output), "tokenizer": "bytes", **settings})
    with Threads(workers) as runner:
        return build(config, runner)


def demo_sources() -> list[dict[str, str]]:
    return [
        {"name": "stories", "path": str(DEMO / "stories.parquet"), "id_column": "id"},
        {"name": "notes", "path": str(DEMO / "notes.jsonl"), "id_column": "id"},
    ]


def digests(directory: Path | str) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


def keys_in(output: Path) -> set[str]:
    indexes = [read_index(Store.at(output), path.stem) for path in output.glob("_cache/index/*.json")]
    return {shard.key for index in indexes for shard in index.published}


def column(result: BuildResult, split: str, name: str) -> list[int]:
    return zarr.open_array(f"{result.path}/documents/{split}/{name}", mode="r")[:].tolist()


def texts(result: BuildResult, split: str) -> list[bytes]:
    """The documents of a split that was built with ``bytes``, through zarr alone."""
    group = zarr.open_group(result.path, mode="r")[split]
    tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:]
    return [bytes(((tokens[a:b] >> 1) - 1).astype(np.uint8)) for a, b in itertools.pairwise(starts)]


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
        assert len(entries) >= 1
        assert entries[0] == 0
        assert entries[-1] == len(encoded)
        assert (entries[1:] >= entries[:-1]).all()
        marked = np.zeros(len(encoded), bool)
        marked[entries[:-1][entries[:-1] < entries[1:]]] = True
        assert ((encoded & 1).astype(bool) == marked).all()
        assert root[split].attrs["max_token_id"] == int((encoded >> 1).max(initial=0))
        for name in ("key", "file", "row"):
            array = zarr.open_array(f"{path}/documents/{split}/{name}", mode="r")
            assert array.shape == (len(entries) - 1,)
            assert array.dtype == np.uint64
        counts[split] = len(entries) - 1
    return counts


@pytest.mark.parametrize(
    ("layout", "zarr_format", "fraction"),
    first_fast(
        [
            *(("mmap", 3, 0), ("compact", 3, 0.3), ("zarr2", 2, 1)),
            *(("mmap", 3, 0.3), ("compact", 3, 1), ("zarr2", 2, 0)),
            *(("mmap", 3, 1), ("compact", 3, 0), ("zarr2", 2, 0.3)),
        ],
        3,
        several=True,
    ),
)
def test_zarr_reads_every_layout_and_an_empty_split_is_a_valid_one(
    tmp_path: Path, layout: str, zarr_format: int, fraction: float
) -> None:
    result = make(
        tmp_path, sources=demo_sources(), layout=layout, validation_fraction=fraction, tokenizer=TOKENIZER, slice_bytes=30_000
    )
    counts = check_with_zarr(result.path, zarr_format)
    assert sum(counts.values()) == result.totals["documents"]["written"] > 200
    assert (counts["train"] == 0) == (fraction == 1)
    assert (counts["validation"] == 0) == (fraction == 0)
    for split in SPLITS:
        assert result.totals[split]["seq_count"] == counts[split]
    assert flat_tokens.verify(tmp_path, "full").seq_count == sum(counts.values())


def test_a_dataset_of_no_documents_at_all_is_valid(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n\n")
    result = make(tmp_path / "out", source={"path": str(tmp_path / "in")})
    assert check_with_zarr(result.path, 3) == {"train": 0, "validation": 0}
    assert flat_tokens.verify(tmp_path / "out", "full").token_count == 0


# Where each document came from.


# Bytes depend on what is built, not on how.


@pytest.fixture(scope="module")
def reference_build(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        return make(tmp_path_factory.mktemp("reference"), 1, sources=demo_sources(), validation_fraction=0.3)


def test_a_version_is_the_same_wherever_its_files_lie(tmp_path: Path, reference_build: BuildResult) -> None:
    """Other directories, times and settings of the machine; the same names."""
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for source in demo_sources():
        shutil.copyfile(source["path"], moved / Path(source["path"]).name)
    sources = [{**source, "path": str(moved / Path(source["path"]).name)} for source in demo_sources()]
    result = make(
        tmp_path / "out", sources=sources, validation_fraction=0.3, scratch=str(tmp_path / "scratch"), verify_level="full"
    )
    assert result.version == reference_build.version
    assert digests(result.path) == digests(reference_build.path)


def test_a_version_is_the_same_wherever_its_tokenizer_lies(tmp_path: Path) -> None:
    """A path of this machine is no part of a dataset."""
    (tmp_path / "tokenizer").mkdir()
    moved = shutil.copyfile(TOKENIZER, tmp_path / "tokenizer/tokenizer.json")
    one = make(tmp_path / "one", sources=demo_sources(), tokenizer=TOKENIZER)
    other = make(tmp_path / "other", sources=demo_sources(), tokenizer=str(moved))
    assert one.version == other.version
    assert digests(one.path) == digests(other.path)
    assert str(DEMO) not in Path(one.path, "manifest.json").read_text() + Path(one.path, "README.md").read_text()


# What is reused.


def write_lines(path: Path, *values: str) -> None:
    write_rows(path, [{"text": value} for value in values])


def test_a_changed_file_redoes_exactly_its_slices(tmp_path: Path) -> None:
    """Its content counts: not its time, which may even be set back."""
    source = {"path": str(tmp_path / "in")}
    for name in ("a", "b", "c"):
        write_lines(tmp_path / "in" / f"{name}.jsonl", *(f"{name} {i}" for i in range(20)))
    first = make(tmp_path / "out", source=source, slice_bytes=100)
    changed = tmp_path / "in/b.jsonl"
    times = changed.stat()
    before = keys_in(tmp_path / "out")
    write_lines(changed, *(f"B {i}" for i in range(20)))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = make(tmp_path / "out", source=source, slice_bytes=100)
    assert second.version != first.version
    assert second.slices == first.slices
    assert second.slices_reused == second.slices * 2 // 3
    assert len(keys_in(tmp_path / "out") - before) == second.slices // 3
    for path in (tmp_path / "in").iterdir():
        os.utime(path)
    assert make(tmp_path / "out", source=source, slice_bytes=100).was_published


def test_files_of_equal_content_share_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenized once, placed twice, each under its own number; and counted as repeated."""
    tokenized = []
    real = tasks.shards.write.tokenize_slice
    monkeypatch.setattr(
        tasks.shards.write, "tokenize_slice", lambda part, *rest: tokenized.append(part.label) or real(part, *rest)
    )
    for name in ("a", "c"):
        write_lines(tmp_path / "in" / f"{name}.jsonl", *(f"same {i}" for i in range(10)))
    write_lines(tmp_path / "in/b.jsonl", "other")
    result = make(tmp_path / "out", source={"path": str(tmp_path / "in")}, slice_bytes=80, validation_fraction=0)
    assert len(tokenized) == len(keys_in(tmp_path / "out")) < result.slices
    assert column(result, "train", "file") == [0] * 10 + [1] + [2] * 10
    assert column(result, "train", "row") == [*range(10), 0, *range(10)]
    assert texts(result, "train")[:10] == texts(result, "train")[11:]
    assert result.totals["documents"]["repeated_keys"] == 10
    assert result.totals["documents"]["written"] == 21


def test_a_file_without_rows_keeps_its_number(tmp_path: Path) -> None:
    """The numbers are those of the manifest, which lists it."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in/0.parquet")
    with pq.ParquetWriter(tmp_path / "in/1.parquet", pa.schema([("text", pa.string())])):
        pass
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "in/2.parquet")
    result = make(tmp_path / "out", source={"path": str(tmp_path / "in")}, validation_fraction=0)
    assert column(result, "train", "file") == [0, 2]


@pytest.mark.parametrize(("one", "other"), [("train.jsonl", "test.jsonl"), ("a-train.jsonl", "test/b.jsonl")])
def test_the_sources_own_validation_split_is_kept_whole(tmp_path: Path, one: str, other: str) -> None:
    """Even where both hold the same documents, whose shard they share."""
    write_lines(tmp_path / "in" / one, "x", "y", "z")
    (tmp_path / "in" / other).parent.mkdir(exist_ok=True)
    write_lines(tmp_path / "in" / other, "x", "y", "z")
    result = make(tmp_path / "out", source={"path": str(tmp_path / "in"), "split": "train", "validation_split": "test"})
    assert texts(result, "train") == texts(result, "validation") == [b"x", b"y", b"z"]
    assert len(keys_in(tmp_path / "out")) == 1


# Identity, pointer, commit.


def test_a_version_is_named_by_all_that_its_bytes_depend_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "in/a.jsonl", "x", "y")
    base = {"source": {"path": str(tmp_path / "in")}}
    versions = [
        make(tmp_path / "out", **base, **settings).version
        for settings in (
            {},
            {"name": "other"},
            {"validation_fraction": 0.25},
            {"split_seed": 1},
            {"layout": "compact"},
            {"tokenizer": TOKENIZER},
            {"documents": {"empty": "skip"}},
        )
    ]
    skipping = {**base, "documents": {"on_bad": "skip"}}
    versions += [
        make(tmp_path / "out", **skipping, tokenizer={"name": TOKENIZER, "engine": engine}).version
        for engine in ("auto", "reference")  # what one of them does not take, the other may
    ]
    write_lines(tmp_path / "in/a.jsonl", "x", "z")
    versions.append(make(tmp_path / "out", **base).version)
    assert len(set(versions)) == len(versions)
    assert read_pointer(Store.at(tmp_path / "out")).sequence == len(versions)


def test_the_engine_is_no_part_of_a_version_where_it_decides_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "in/a.jsonl", "x", "y")
    base = {"source": {"path": str(tmp_path / "in")}}
    for tokenizer, policy in ((TOKENIZER, "error"), ("bytes", "skip")):
        first, second = (
            make(tmp_path / "out", **base, documents={"on_bad": policy}, tokenizer={"name": tokenizer, "engine": engine})
            for engine in ("auto", "reference")
        )
        assert second.was_published
        assert first.version == second.version


def test_an_uncommitted_version_is_none_for_any_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is there but the root's metadata: zarr, our reader and the next build see no dataset."""

    def fail(*_: object) -> None:
        raise OSError("pulled the plug")

    for layout in ("mmap", "zarr2"):
        output = tmp_path / layout
        with monkeypatch.context() as patch:
            patch.setattr("tasks.finalize.seal.commit", fail)
            with refusal("pulled the plug", OSError):
                make(output, sources=demo_sources(), layout=layout)
        (version,) = (output / "versions").iterdir()
        assert (version / "manifest.json").exists()
        assert not is_published(Store.at(output), version.name, layout)
        with pytest.raises(FileNotFoundError):
            zarr.open_group(str(version), mode="r")
        with pytest.raises(FileNotFoundError):
            flat_tokens.open(output)
        result = make(output, sources=demo_sources(), layout=layout)
        assert result.version == version.name
        assert not result.was_published
        assert is_published(Store.at(output), version.name, layout)


def test_a_version_with_a_file_too_many_is_not_published(tmp_path: Path) -> None:
    first = make(tmp_path, sources=demo_sources())
    stray = Path(first.path, "train", "stray")
    shutil.rmtree(first.path)
    stray.parent.mkdir(parents=True)
    stray.write_text("x")
    with refusal(r"nothing was published: train/stray is not in the manifest"):
        make(tmp_path, sources=demo_sources())
    assert not is_published(Store.at(tmp_path), first.version, "mmap")
    stray.unlink()
    assert make(tmp_path, sources=demo_sources()).version == first.version


def test_the_pointer_moves_only_from_where_it_was(tmp_path: Path) -> None:
    root = Store.at(tmp_path)
    for version in ("one", "two", "three"):
        root.put(f"versions/{version}/manifest.json", version.encode())
    assert read_pointer(root).sequence == 0
    assert publish(root, "one", 0) == 1
    assert publish(root, "one", 0) == 1
    with refusal(r"another build published one while this one ran. Version two is complete"):
        publish(root, "two", 0)
    assert read_pointer(root).version == "one"
    assert publish(root, "two", 1) == 2
    assert publish(root, "one", 2) == 3
    now = read_pointer(root)
    assert (now.version, now.manifest_sha256, now.sequence) == ("one", hashlib.sha256(b"one").hexdigest(), 3)
    assert os.readlink(tmp_path / "latest") == "versions/one"
    with pytest.raises(FileNotFoundError):
        publish(root, "absent", 3)
    assert read_pointer(root).sequence == 3


def test_a_lost_or_foreign_link_is_mended(tmp_path: Path) -> None:
    root = Store.at(tmp_path)
    root.put("versions/one/manifest.json", b"one")
    publish(root, "one", 0)
    (tmp_path / "latest").unlink()
    assert publish(root, "one", 0) == 1
    assert os.readlink(tmp_path / "latest") == "versions/one"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/nowhere")
    publish(root, "one", 0)
    assert os.readlink(tmp_path / "latest") == "versions/one"


def test_half_written_pointers_and_notes_of_dead_processes_are_removed(tmp_path: Path) -> None:
    root = Store.at(tmp_path)
    root.put("versions/one/manifest.json", b"one")
    root.put("exports/0123-one.json", b"{}")
    root.put("exports/.0123-one.json.4567.part", b"{")
    (tmp_path / ".latest.json.0123.part").write_bytes(b"{")
    (tmp_path / ".latest.fresh").symlink_to("versions/old")
    publish(root, "one", 0)
    assert sorted(os.listdir(tmp_path)) == [".latest.lock", "exports", "latest", "latest.json", "versions"]
    assert os.listdir(tmp_path / "exports") == ["0123-one.json"]


def test_a_build_id_is_sixteen_hexadecimal_digits_of_provenance_and_layout(reference_build: BuildResult) -> None:
    manifest = json.loads(Path(reference_build.path, "manifest.json").read_bytes())
    made_of = Provenance.model_validate(manifest["provenance"])
    assert build_id(made_of, manifest["layout"]) == reference_build.version == Path(reference_build.path).name


@given(
    keys=st.lists(st.integers(0, 40), max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    at_once=st.sampled_from([0, 99]),
)
def test_repeated_keys_are_counted_in_memory_and_by_a_query(keys: list[int], cuts: list[int], at_once: int) -> None:
    """The first of equal keys is none of an earlier one, the others are."""
    stored = np.array(keys, np.uint64) * np.uint64(2**58)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.finalize.seal, "KEYS_AT_ONCE", at_once)
        found = count_repeated(np.split(stored, sorted(cuts)), len(keys))
    assert found == len(keys) - len(set(keys))
