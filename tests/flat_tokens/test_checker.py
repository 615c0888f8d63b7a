"""verify: what is right passes, and each thing that is wrong is named."""

import contextlib
import functools
import hashlib
import json
import operator
import os
import pickle
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import flat_tokens.checker
import flat_tokens.manifest
from flat_tokens import LAYOUTS, CheckProgress, DamagedError, Layout, LayoutName, verify
from flat_tokens.arrays.layouts import group_metadata
from flat_tokens.manifest import history_digest, manifest_bytes, read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.writer import ArrayWriter, commit, put_metadata, write_dataset
from tests.damage import change_file, flip
from tests.examples import first_fast
from tests.flat_tokens.test_reader import ENCODED, NAMES, SEQUENCES
from tests.made import write_sequences
from tests.refusal import refusal

STARTS = [0, 2, 5, 5, 8]
LEVELS = pytest.mark.parametrize("level", ["quick", "full"])


def in_small_objects(name: LayoutName) -> Layout:
    """The layout with objects of six items, in chunks of two where it has shards."""
    layout = LAYOUTS[name]
    small = {"object_length": 6, "chunk_length": 6 if layout.zarr_format == 2 else 2}
    blocks = layout.encoded_tokens.block_length and 1
    tokens = replace(layout.encoded_tokens, **small, block_length=blocks)
    return layout._replace(encoded_tokens=tokens, seq_starts=replace(layout.seq_starts, **small))


def publish(
    root: Path,
    layout: Layout,
    encoded: list[int] = ENCODED,
    starts: list[int] = STARTS,
    max_token_id: int = 8,
    manifest: bool = True,
) -> Path:
    """A dataset of exactly these arrays, right or wrong, with sound objects and a manifest that agrees with them."""
    store, objects = Store.at(root), []
    arrays = {"encoded_tokens": (encoded, layout.encoded_tokens), "seq_starts": (starts, layout.seq_starts)}
    for split in ("train", "validation"):
        for name, (items, spec) in arrays.items():
            with ArrayWriter(store, f"{split}/{name}", spec) as writer:
                writer.append(np.array(items, spec.numpy_dtype))
            objects += writer.objects
        objects += put_metadata(store, split, group_metadata(layout.zarr_format, {"max_token_id": max_token_id}))
    if manifest:
        counts = {"token_count": 0, "seq_count": 0, "max_token_id": 0}
        totals = dict.fromkeys(("train", "validation"), counts)
        store.put("manifest.json", manifest_bytes(objects, totals, layout.name, {}))
    commit(store, layout)
    return root


@pytest.fixture(params=NAMES)
def layout(request: pytest.FixtureRequest) -> Layout:
    return in_small_objects(request.param)


@pytest.fixture
def dataset(tmp_path: Path, layout: Layout) -> Path:
    return publish(tmp_path / "dataset", layout)


def tokens_object(dataset: Path, i: int) -> Path:
    return next(
        path for path in (dataset / f"train/encoded_tokens/{i}", dataset / f"train/encoded_tokens/c/{i}") if path.exists()
    )


def refused(dataset: Path, level: Any = "full") -> str:
    with pytest.raises(ValueError, match=str(dataset)) as raised:
        verify(dataset, level)
    return str(raised.value)


# What is right


def test_a_good_dataset_passes(dataset):
    files = [path for path in dataset.rglob("*") if path.is_file() and path.parent != dataset]
    for level in ("quick", "full"):
        assert verify(dataset, level) == (  # type: ignore[arg-type]
            str(dataset),
            level,
            len(files),
            sum(path.stat().st_size for path in files),
            16,
            8,
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_written_dataset_passes(tmp_path, name):
    dataset = write_sequences(tmp_path / "dataset", SEQUENCES, layout=name, provenance={"from": "here"})
    verify(dataset, "full")
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert manifest["format"] == "flat-tokens"
    assert manifest["format_version"] == 1
    assert manifest["layout"] == name
    assert manifest["provenance"] == {"from": "here"}
    assert manifest["totals"]["train"] == {"token_count": 8, "seq_count": 4, "max_token_id": 8}
    keys = [described["key"] for described in manifest["objects"]]
    assert keys == sorted(keys)


def test_nothing_published_is_a_file_not_found_error(dataset):
    for marker in ("zarr.json", ".zgroup"):
        (dataset / marker).unlink(missing_ok=True)
    for read in (flat_tokens.open, partial(verify, level="quick"), partial(verify, level="full")):
        with refusal(f"{dataset}: is not a flat-tokens dataset", FileNotFoundError):
            read(dataset)


# What is wrong with the objects


@LEVELS
def test_any_missing_file_is_named(dataset, level):
    for path in [path for path in dataset.glob("*/**/*") if path.is_file()]:
        data = path.read_bytes()
        path.unlink()
        assert f"{path.relative_to(dataset)} is missing" in refused(dataset, level)
        path.write_bytes(data)
    shutil.rmtree(dataset / "validation")
    assert "validation" in refused(dataset, level)


@LEVELS
def test_an_object_of_another_size_is_named(dataset, level):
    path = tokens_object(dataset, 1)
    size = path.stat().st_size
    for change in (-1, 1):
        os.truncate(path, size + change)
        assert f"{path.relative_to(dataset)} has {size + change} bytes instead of {size}" in refused(dataset, level)


@LEVELS
@pytest.mark.parametrize(
    "name", ["stray", "train/encoded_tokens/c/2", "train/encoded_tokens/.0.1234.part", "elsewhere/zarr.json"]
)
def test_an_extra_object_is_named(dataset, level, name):
    (dataset / name).parent.mkdir(parents=True, exist_ok=True)
    (dataset / name).write_bytes(b"")
    assert f"{name} is not in the manifest" in refused(dataset, level)


def test_an_older_dataset_is_checked_by_its_sha256(dataset):
    """Releases before BLAKE3 wrote a sha256 of each object, and every reader of a manifest takes either."""
    manifest = json.loads((dataset / "manifest.json").read_text())
    for one in manifest["objects"]:
        del one["blake3"]
        one["sha256"] = hashlib.sha256((dataset / one["key"]).read_bytes()).hexdigest()
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    assert flat_tokens.verify(dataset, "full").object_count == len(manifest["objects"])
    flip(dataset / (key := manifest["objects"][0]["key"]))
    assert f"{key} has sha256" in refused(dataset)


def test_a_flipped_byte_anywhere_is_named_by_full(dataset):
    """quick reads no data; full names every object whose digest has changed, whichever it is."""
    for path in sorted(p for p in dataset.rglob("*") if p.is_file() and p.parent != dataset):
        good = path.read_bytes()
        flip(path)
        assert f"{path.relative_to(dataset)} has blake3" in refused(dataset)
        path.write_bytes(good)
    tokens_object(dataset, 0).write_bytes(bytes(tokens_object(dataset, 0).stat().st_size))
    verify(dataset, "quick")


# What is wrong with the tokens, although every digest is right


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"encoded": [3, 5, 7, 8, 10, 13, 14, 16]}, "train: token 1 is marked as a start where seq_starts says otherwise"),
        ({"encoded": [3, 4, 6, 8, 10, 13, 14, 16]}, "train: token 2 is marked"),
        ({"encoded": [2, 4, 7, 8, 10, 13, 14, 16]}, "train: token 0 is marked"),
        ({"encoded": [3, 4, 7, 8, 10, 13, 14, 17]}, "train: token 7 is marked"),
        ({"encoded": [3, 4, 7, 8, 10, 13, 14, 2**32 - 2]}, "train: token id 2147483647 is above max_token_id 8"),
        ({"encoded": [19, 4, 7, 8, 10, 13, 14, 16]}, "train: token id 9 is above max_token_id 8"),
        ({"max_token_id": 7}, "train: token id 8 is above max_token_id 7"),
        ({"starts": [0, 5, 2, 5, 8]}, "train/seq_starts decreases"),
        ({"starts": [0, 2, 2**63, 5, 8]}, "train/seq_starts decreases"),
        ({"starts": [0, 2, 5, 5, 5, 6, 4, 8]}, "train/seq_starts decreases"),
        ({"starts": [0, 1, 5, 5, 8]}, "train: token 1 is marked"),
        ({"starts": [0, 2, 2, 8]}, "train: token 5 is marked"),
    ],
)
@pytest.mark.parametrize("block", [2, 3, 5, 7, 1 << 22])
def test_what_breaks_a_sentence_of_the_format_is_named_by_full(tmp_path, layout, wrong, complaint, block, monkeypatch):
    """Wherever blocks end."""
    monkeypatch.setattr(flat_tokens.checker, "BLOCK_TOKENS", block)
    verify(publish(tmp_path / "right", layout), "full")
    said = refused(dataset := publish(tmp_path / "dataset", layout, **wrong))
    assert complaint in said
    assert "blake3" not in said
    verify(dataset, "quick")


def test_an_unreadable_inner_chunk_is_named_without_a_manifest(tmp_path, layout):
    dataset = publish(tmp_path / "dataset", layout, manifest=False)
    path = tokens_object(dataset, 0)
    path.write_bytes(bytes(path.stat().st_size))
    assert str(path) in refused(dataset)


# Pointers and manifests


def pointed_at(tmp_path: Path, **wrong: Any) -> Path:
    root = tmp_path / "output"
    publish(root / "versions/a", in_small_objects("mmap"))
    digest = hashlib.sha256((root / "versions/a/manifest.json").read_bytes()).hexdigest()
    (root / "latest.json").write_text(json.dumps({"version": "a", "manifest_sha256": digest, "sequence": 1} | wrong))
    return root


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sequence": sequence} for sequence in (None, "1", 1.5, True, 0, -1)),
        *({name: value} for name in ("former", "withdrawn") for value in ("a", "", 3, [3], ["a"], [{}], {"version": "a"})),
        *(
            {"former": [{"version": "b", "until": "2026-01-01T00:00:00", **more}]}
            for more in ({}, {"until": "2026-01-01T00:00:00+00:00", "more": 1})
        ),
        *({"forgotten": forgotten} for forgotten in ("", {"documents": 1, "sha256": "", "more": 1})),
        {"pins": {}},  # without the digest of what people decided
        {"decisions": [], "sha256": "0" * 64},
    ],
    ids=str,
)
def test_a_pointer_that_stops_builds_is_named(tmp_path, wrong):
    root = pointed_at(tmp_path, **wrong)
    assert "latest.json: is not a pointer to a version. Restore it or remove it" in refused(root, "quick")
    assert flat_tokens.open(root).train.token_count == 8


FORMER = [
    {"version": "v1", "until": "2026-01-01T00:00:00+00:00"},
    {"version": "v2", "until": "2026-01-05T07:08:09.123456+00:00"},
]


@LEVELS
@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"sequence": 2}, "is number 2, but names 3 versions that were the latest in order"),
        ({"former": [*FORMER, FORMER[0]]}, "names version 'v1' twice"),
        ({"former": [{**FORMER[0], "version": "a"}]}, "names version 'a' twice"),
        ({"withdrawn": [FORMER[1]]}, "names version 'v2' twice"),
        ({"former": FORMER[::-1]}, "says that version v1 was the latest until 2026-01-01T00:00:00+00:00, which cannot be"),
        (
            {"former": [{**FORMER[0], "until": "2026-01-01T00:00:00+01:00"}]},
            "says '2026-01-01T00:00:00+01:00', which is not a time as builds write it",
        ),
        (
            {"former": [{**FORMER[0], "until": "2026-01-01 00:00:00+00:00"}]},
            "says '2026-01-01 00:00:00+00:00', which is not a time as builds write it",
        ),
        ({"gormer": FORMER}, "has 'gormer', which no pointer has"),
    ],
)
def test_a_pointer_that_no_build_writes_is_named(tmp_path, wrong, complaint, level):
    verify(pointed_at(tmp_path / "right", sequence=3, former=FORMER), "full")
    assert f"latest.json {complaint}" in refused(
        pointed_at(tmp_path / "wrong", **{"sequence": 9, "former": FORMER, **wrong}), level
    )


def recorded(root: Path, at: str = "2026-01-06T00:00:00+00:00", **facts: Any) -> Path:
    """The record that a run leaves of the pointer as it is."""
    pointer = json.loads((root / "latest.json").read_bytes())
    known = {"at": at, "version": pointer["version"], "sequence": pointer["sequence"], "history_sha256": history_digest(pointer)}
    (root / "runs").mkdir(exist_ok=True)
    path = root / f"runs/{at[:10].replace('-', '')}T000000000000-{pointer['version']}.json"
    path.write_text(json.dumps({name: value for name, value in {**known, **facts}.items() if value is not None}))
    return path


@pytest.mark.parametrize("every", first_fast([5, 1]))
def test_no_changed_byte_of_a_pointer_passes(tmp_path, every):
    """Not one of its number or of its former versions, with the record of the run that moved it."""
    root = pointed_at(tmp_path, sequence=3, former=FORMER)
    recorded(root)
    verify(root, "full")
    stored = (root / "latest.json").read_bytes()
    for at in range(0, len(stored), every):
        changed = bytearray(stored)
        changed[at] ^= 1 << at % 7
        (root / "latest.json").write_bytes(changed)
        with pytest.raises((ValueError, OSError)):
            verify(root, "full")


@pytest.mark.parametrize("kept", [None, "0" * 64])
def test_a_number_that_no_run_has_seen_is_named(tmp_path, kept):
    """By the record of an earlier release, too, which has no digest."""
    root = pointed_at(tmp_path, sequence=5, former=FORMER)
    recorded(root, sequence=5, history_sha256=kept)
    if kept is None:
        verify(root, "full")
    for number, complaint in ((4, "but the run of .* knew of number 5"), (7, "but it was number 5 at .*, and no version was")):
        change_file(root / "latest.json", {"sequence": number})
        assert re.search(f"latest.json is number {number}, {complaint}", refused(root, "full"))
        verify(root, "quick")


def test_a_pointer_that_was_moved_since_the_last_record_passes(tmp_path):
    """By a rollback, say, or by a run that died before its record; and one with other records."""
    since = {"version": "v3", "until": "2026-01-06T00:00:01+00:00"}
    root = pointed_at(tmp_path, sequence=3, former=FORMER)
    path = recorded(root)
    value = json.loads((root / "latest.json").read_bytes())
    for moved in ({"sequence": 4, "former": [*FORMER, since]}, {"sequence": 4, "withdrawn": [since]}):
        (root / "latest.json").write_text(json.dumps({**value, **moved}))
        verify(root, "full")
    path.write_text(path.read_text().replace('"version": "a"', '"version": "v3"'))
    (root / "latest.json").write_text(json.dumps({**value, "sequence": 4}))
    verify(root, "full")
    for content in (b"{", b"{}", b'{"at": 3, "sequence": 1}', b'{"at": "yesterday", "sequence": 1}'):
        path.write_bytes(content)
        verify(root, "full")


def test_a_pointer_that_moves_while_it_is_checked_passes(tmp_path, monkeypatch):
    root = pointed_at(tmp_path, sequence=3, former=FORMER)
    recorded(root)
    value = json.loads((root / "latest.json").read_bytes())
    value |= {"sequence": 4, "former": [*FORMER, {"version": "v3", "until": "2026-01-07T00:00:00+00:00"}]}
    recorded(root, "2026-01-07T00:00:01+00:00", sequence=4, history_sha256=history_digest(value))
    real = flat_tokens.checker._differs_from_record

    def moved(*arguments: Any) -> str | None:
        found = real(*arguments)
        (root / "latest.json").write_text(json.dumps(value))
        return found

    monkeypatch.setattr(flat_tokens.checker, "_differs_from_record", moved)
    assert verify(root, "full").level == "full"
    assert json.loads((root / "latest.json").read_bytes()) == value  # it has moved


@pytest.mark.parametrize("wrong", ["another version", "nowhere", "a directory"])
def test_a_link_that_leads_elsewhere_than_the_pointer_is_named(tmp_path, wrong):
    root = pointed_at(tmp_path)
    assert verify(root).path == f"{root}/versions/a"
    (root / "latest").symlink_to("versions/a")
    verify(root)
    verify(root / "latest")
    (root / "latest").unlink()
    if wrong == "a directory":
        shutil.copytree(root / "versions/a", root / "latest")
    else:
        (root / "latest").symlink_to(f"versions/{wrong}")
    told = refused(root)
    assert "latest leads to " in told
    assert "but latest.json names a" in told


@LEVELS
@pytest.mark.parametrize("name", NAMES)
def test_other_metadata_of_the_root_is_named(tmp_path, name, level):
    """It is the one thing that no manifest knows, and plain zarr takes the arrays' shapes from a copy there."""
    publish(tmp_path, in_small_objects(name))
    verify(tmp_path, level)  # type: ignore[arg-type]
    for key in group_metadata(LAYOUTS[name].zarr_format, {}):
        before = (tmp_path / key).read_bytes()
        consolidated = {"kind": "inline", "must_understand": False, "metadata": {}}
        for more in ({"attributes": {"max_length": 1}}, {"consolidated_metadata": consolidated}, {"max_length": 1}):
            (tmp_path / key).write_text(json.dumps({**json.loads(before), **more}))
            assert f"{key} is missing, or says something else" in refused(tmp_path, level)
        (tmp_path / key).write_bytes(before)
    if LAYOUTS[name].zarr_format == 2:
        (tmp_path / ".zattrs").unlink()
        assert ".zattrs is missing" in refused(tmp_path, level)


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("name", NAMES)
def test_consolidated_metadata_of_another_writer_agrees_with_the_arrays(tmp_path, name):
    """Right copies pass; one with another shape makes plain zarr read fewer tokens."""
    publish(tmp_path, in_small_objects(name), manifest=False)
    zarr.consolidate_metadata(str(tmp_path))
    verify(tmp_path, "full")
    key, wrong = ".zmetadata" if LAYOUTS[name].zarr_format == 2 else "zarr.json", 6
    value = json.loads((tmp_path / key).read_bytes())
    copies = value.get("consolidated_metadata", value)["metadata"]
    copies[next(path for path in copies if path.startswith("train/encoded_tokens") and not path.endswith("attrs"))]["shape"] = [
        wrong
    ]
    (tmp_path / key).write_text(json.dumps(value))
    assert zarr.open_group(tmp_path, mode="r")["train/encoded_tokens"].shape == (wrong,)  # type: ignore[union-attr]
    assert "differs from its copy in the consolidated metadata" in refused(tmp_path, "quick")


@LEVELS
def test_a_changed_or_missing_manifest_is_named(tmp_path, level):
    root = pointed_at(tmp_path)
    manifest = root / "versions/a/manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert "manifest.json is not the one that latest.json names" in refused(root, level)
    manifest.unlink()
    assert "manifest.json is not the one that latest.json names" in refused(root, level)
    for wrong in ("0" * 64, None, 3, ""):
        other = pointed_at(tmp_path / f"{wrong}", manifest_sha256=wrong)
        assert "manifest.json is not the one that latest.json names" in refused(other, level)


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "junk",
        "[]",
        "null",
        "[" * 100_000,
        "{}",
    ],
)
def test_a_manifest_of_junk_is_a_named_error(tmp_path, junk):
    dataset = publish(tmp_path / "dataset", in_small_objects("mmap"))
    (dataset / "manifest.json").write_text(junk)
    for attempt in (verify, partial(verify, level="full")):
        with refusal(f"{dataset}/manifest.json: is not a manifest that is understood here"):
            attempt(dataset)  # type: ignore[operator]


STORED = {"key": "a", "size": 1, "sha256": ""}
FILE = {"name": "a", "size": 1, "sha256": ""}


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("format", "other"),
        ("format_version", 2),
        ("layout", "fast"),
        ("layout", {}),
        ("objects", 3),
        ("objects", [{"key": "a", "size": 1}]),
        ("objects", [{**STORED, "more": 1}]),
        ("objects", [{**STORED, "blake3": "ab"}]),
        ("objects", [{**STORED, "size": True}]),
        ("objects", [{**STORED, "size": -1}]),
        ("objects", [{**STORED, "size": 1 << 63}]),
        ("totals", None),
        ("totals", {}),
        ("totals.train.seq_count", "1"),
        ("totals.validation.token_count", float("inf")),
        ("totals.documents", 3),
        ("totals.documents", {"by_source": [{"name": 1}]}),
        ("totals.documents", {"skipped": {"empty": "many"}}),
        ("columns", {"a": ["int64"]}),
        ("provenance", None),
        ("provenance.name", 1),
        ("provenance.tokenizer", {"name": "bytes", "highest_id": "256"}),
        ("provenance.documents", 268435456),
        ("provenance.split", [1]),
        ("provenance.semantics", 1),
        ("provenance.inputs", [1]),
        ("provenance.sources", "x"),
        ("provenance.sources", [{"files": []}]),
        ("provenance.sources", [{"name": "a", "files": [{"name": "a"}]}]),
        ("provenance.sources", [{"name": "a", "files": [{**FILE, "size": float("inf")}]}]),
        ("provenance.sources", [{"name": "a", "files": [{**FILE, "parts": [1]}]}]),
    ],
)
def test_a_value_of_another_type_in_a_manifest_is_a_named_error(tmp_path, at, value):
    path = write_sequences(tmp_path / "dataset", SEQUENCES) / "manifest.json"
    *above, name = at.split(".")
    change_file(path, lambda manifest: functools.reduce(operator.getitem, above, manifest).update({name: value}))
    with refusal(rf"{path}: is not a manifest that is understood here \(.+\)\. Restore it"):
        read_manifest(Store.at(path.parent))


def test_a_manifest_may_say_more_than_is_understood_and_less(tmp_path):
    """Null stands for what is not known."""
    source = {"name": "a", "revision": None, "files": [FILE], "more": [1]}
    said = {"name": None, "sources": [source], "tokenizer": {"digest": None}, "more": {"a": 1.5}}
    dataset = write_sequences(tmp_path / "dataset", SEQUENCES, provenance=said)
    assert read_manifest(Store.at(dataset))["provenance"] == said


def test_a_dataset_whose_manifest_could_not_be_read_is_not_written(tmp_path):
    with refusal("tokenizer is 'bytes'"):
        write_dataset(tmp_path / "dataset", [], provenance={"tokenizer": "bytes"})
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize("key", ["../pipe", "{tmp_path}/pipe", "train/../../pipe", "", "train//zarr.json", "..\\pipe"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, key):
    """A named pipe would block for ever who reads it."""
    dataset = publish(tmp_path / "dataset", in_small_objects("mmap"))
    os.mkfifo(tmp_path / "pipe")
    named = {"key": key.format(tmp_path=tmp_path), "size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    change_file(dataset / "manifest.json", lambda manifest: manifest["objects"].append(named))
    with refusal(r"manifest.json: is not a manifest that .* is not a name of an object below it"):
        read_manifest(Store.at(dataset))
    for level in ("quick", "full"):
        assert "is not a name of an object below it" in refused(dataset, level)


# The reference writer's dataset, which has no manifest


def test_the_reference_writers_dataset_passes(reference):
    for level in ("quick", "full"):
        assert verify(reference / "seqax/synthetic_dataset.zarr", level)[2:] == (0, 0, 543027, 1024)  # type: ignore[arg-type]


# What is told meanwhile


def told_of(dataset: Path, level: Any) -> list[CheckProgress]:
    told = []
    with contextlib.suppress(ValueError):
        verify(dataset, level, watch=told.append)
    return told


@pytest.mark.parametrize("manifest", [True, False])
def test_a_full_check_tells_how_much_it_has_read_of_all(tmp_path, layout, manifest):
    """Every object once for its digest; for the format, two splits of eight tokens and five entries each."""
    dataset = publish(tmp_path / "dataset", layout, manifest=manifest)
    stored = verify(dataset).byte_count
    told = told_of(dataset, "full")
    assert told[0] == (0, stored + 2 * (8 * 4 + 5 * 8), 0)
    assert told[-1] == (told[0].of, told[0].of, 0)
    assert [now.byte_count for now in told] == sorted(now.byte_count for now in told)


def test_a_quick_check_reads_nothing_that_counts(dataset):
    assert told_of(dataset, "quick") == [(0, 0, 0)]


def test_faults_are_told_of_when_they_are_found(dataset):
    for i in range(2):
        flip(tokens_object(dataset, i))
    told = told_of(dataset, "full")
    assert [now.faults for now in told] == sorted(now.faults for now in told)
    with pytest.raises(DamagedError) as damaged:
        verify(dataset, "full")
    assert told[-1].faults == len(damaged.value.faults) >= 2
    assert damaged.value.path == str(dataset)
    assert str(damaged.value).startswith(f"{dataset}: {told[-1].faults} faults: train/encoded_tokens")
    assert pickle.loads(pickle.dumps(damaged.value)).faults == damaged.value.faults


def test_a_check_ends_with_the_tenth_fault(tmp_path):
    dataset = publish(tmp_path, in_small_objects("zarr2"))
    more = [dataset / f"train/more-{i}" for i in range(12)]
    for path in more:
        path.touch()
    with pytest.raises(DamagedError, match="10 or more faults") as damaged:
        verify(dataset)
    assert len(damaged.value.faults) == 10
    for path in more[1:]:
        path.unlink()
    with refusal(": 1 fault:", DamagedError):
        verify(dataset)


def test_a_number_that_no_key_signs_is_refused(dataset):
    """It would be passed over, and an earlier version would be right."""
    for number in (3, "3"):
        with refusal(r"^number is '?3'?, but nothing says who signed it: give key, too"):
            verify(dataset, number=number)  # type: ignore[arg-type]
