"""What is made of datasets, against making it by hand: merged, chosen, shuffled and laid out anew, on threads."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
import tasks.assemble.write
import tasks.derive.inputs
import tasks.derive.shuffle
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.keys import document_keys
from flat_tokens.stores.store import Store
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.sources import Locator, places_of
from flows.pipelines.derive import DerivedResult
from tasks.derive.choice import sample_hashes
from tasks.output.pointer import read_pointer
from tasks.output.target import SplitRule
from tasks.output.versions import list_versions
from tasks.parts.documents import Reads
from tests.examples import examples
from tests.faults.support import build_here, derive_here, digests, settings_of, write_notes
from tests.made import GPT2, Doc, docs_of, foreign, publish_docs, read_docs, small
from tests.refusal import refusal

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of 8 tokens and 4 entries, parts, blocks and buckets of a few tokens, so that few documents fill many of them."""
    for name in LAYOUTS:
        monkeypatch.setitem(LAYOUTS, name, small(name, 8, 4))
    monkeypatch.setattr(tasks.assemble.write, "SPAN_TOKENS", 16)
    monkeypatch.setattr(tasks.assemble.write, "SPAN_DOCUMENTS", 4)
    monkeypatch.setattr(tasks.derive.inputs, "PART_TOKENS", 24)
    monkeypatch.setattr(tasks.derive.inputs, "PART_DOCUMENTS", 5)
    monkeypatch.setattr("tasks.parts.input.WHOLE_BLOCKS", Reads(8, None, whole=True))
    monkeypatch.setattr("tasks.parts.buckets.BLOCK_TOKENS", 8)
    monkeypatch.setattr(tasks.derive.shuffle, "BUCKET_TOKENS", 16)
    monkeypatch.setattr(tasks.derive.shuffle, "BUCKET_DOCUMENTS", 3)
    monkeypatch.setattr("tasks.parts.buckets.GATHERED_TOKENS", 10)


def run(operation: dict[str, Any] | str, inputs: Sequence[Path], output: Path, **settings: Any) -> DerivedResult:
    return derive_here(operation, *inputs, output=output, **settings)


def shifted(docs: Sequence[Doc], files: int) -> list[Doc]:
    return [doc._replace(file=doc.file + files) for doc in docs]


LENGTHS = st.one_of(st.integers(0, 4), st.sampled_from([0, 1, 7, 8, 9, 16, 40]))


@st.composite
def documents(draw: st.DrawFn, files: int = 3) -> list[Doc]:
    """Documents of ragged lengths, many empty, some with the key of another."""
    lengths = draw(st.lists(LENGTHS, max_size=14))
    keys = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 3))
    return [
        Doc(
            tuple(draw(st.lists(st.integers(0, 50256), min_size=length, max_size=length))),
            draw(keys),
            draw(st.integers(0, files - 1)),
            draw(st.integers(0, 2**40)),
        )
        for length in lengths
    ]


PAIRS = st.tuples(documents(), documents())
LAYOUT_NAMES = st.sampled_from(list(LAYOUTS))


# Merge


@examples(15)
@given(datasets=st.lists(PAIRS, min_size=1, max_size=3), layouts=st.tuples(LAYOUT_NAMES, LAYOUT_NAMES, LAYOUT_NAMES))
def test_a_merge_is_the_concatenation(tmp_path, datasets, layouts):
    """Whatever the lengths, however the inputs are cut, stored and written; repeated keys are counted."""
    work = tmp_path / str(next(_numbers))
    for i, ((train, validation), layout) in enumerate(zip(datasets, layouts, strict=False)):
        publish_docs(work / str(i), train, validation, sources=[("one", 1), ("two", 2)], layout=layout)

    result = run("merge", [work / str(i) for i in range(len(datasets))], work / "out", layout=layouts[-1])

    expected = {
        name: [doc for i, pair in enumerate(datasets) for doc in shifted(pair[k], 3 * i)]
        for k, name in enumerate(("train", "validation"))
    }
    assert read_docs(work / "out") == expected
    keys = [doc.key for docs in expected.values() for doc in docs]
    assert result.totals["documents"]["repeated_keys"] == len(keys) - len(set(keys))
    assert result.totals["documents"]["by_source"] == [
        {
            "name": name,
            "written": sum(doc.file in files for docs in expected.values() for doc in docs),
            "token_count": sum(len(doc.ids) for docs in expected.values() for doc in docs if doc.file in files),
        }
        for i in range(len(datasets))
        for name, files in (
            (f"one-{i + 1}" if i else "one", [3 * i]),
            (f"two-{i + 1}" if i else "two", [3 * i + 1, 3 * i + 2]),
        )
    ]


def test_datasets_of_different_tokenizers_are_not_merged_unasked(tmp_path):
    publish_docs(tmp_path / "a", docs_of([1]))
    publish_docs(tmp_path / "b", docs_of([2]), tokenizer={**GPT2, "name": "r50k_base", "digest": "ab" * 32})
    publish_docs(tmp_path / "c", docs_of([3]), tokenizer=None)
    with refusal(r"a/versions/.* has tokens of gpt2 .*b/versions/.* has tokens of r50k_base .*--allow-diff"):
        run("merge", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with refusal(r"of .*c/versions/.* no tokenizer is recorded"):
        run("merge", [tmp_path / "a", tmp_path / "c"], tmp_path / "out")
    assert not (tmp_path / "out/versions").exists()

    allowed = {"operation": "merge", "allow_different_tokenizers": True}
    run(allowed, [tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "out")

    made_of = flat_tokens.open(tmp_path / "out").manifest["provenance"]
    assert made_of["tokenizer"] == {"digest": None}
    assert [one["tokenizer"].get("name") for one in made_of["inputs"]] == ["gpt2", "r50k_base", None]
    run(allowed, [tmp_path / "a", tmp_path / "c"], tmp_path / "same")
    assert flat_tokens.open(tmp_path / "same").manifest["provenance"]["tokenizer"] == GPT2


def test_a_dataset_without_records_is_its_own_source(tmp_path):
    """A plain zarr dataset: keys are made of the tokens, its splits are files and its sequences rows."""
    train = [[1, 2, 3], [], list(range(50)), [4], []]
    foreign(tmp_path / "plain", train, [[5, 6]])

    run("merge", [tmp_path / "plain"], tmp_path / "out")

    def key(ids: list[int]) -> int:
        data = np.frombuffer(np.array(ids, "<u4").tobytes(), np.uint8)
        return int(document_keys(data, np.array([0, len(data)]))[0])

    assert read_docs(tmp_path / "out") == {
        "train": [Doc(tuple(ids), key(ids), 0, row) for row, ids in enumerate(train)],
        "validation": [Doc((5, 6), key([5, 6]), 1, 0)],
    }
    made_of = flat_tokens.open(tmp_path / "out").manifest["provenance"]
    assert [(source["name"], [file["name"] for file in source["files"]]) for source in made_of["sources"]] == [
        ("plain", ["train", "validation"])
    ]
    assert run("merge", [tmp_path / "plain"], tmp_path / "out").was_published
    (tmp_path / "plain/validation/zarr.json").touch()
    shutil.rmtree(tmp_path / "plain")
    foreign(tmp_path / "plain", [*train, [9]], [[5, 6]])
    assert not run("merge", [tmp_path / "plain"], tmp_path / "out").was_published


def test_what_breaks_the_format_is_refused_before_anything_is_written(tmp_path):
    foreign(tmp_path / "plain", [[1, 2], [3, 4]])
    metadata = json.loads((tmp_path / "plain/train/zarr.json").read_text())
    (tmp_path / "plain/train/zarr.json").write_text(json.dumps({**metadata, "attributes": {"max_token_id": 3}}))
    with refusal("plain/train: token id 4 is above max_token_id 3"):
        run("merge", [tmp_path / "plain"], tmp_path / "out")
    publish_docs(tmp_path / "a", docs_of([1, 2]))
    (chunk,) = (tmp_path / "a").glob("versions/*/train/encoded_tokens/c/0")
    chunk.unlink()
    with refusal("train/encoded_tokens/c/0 is missing"):
        run("merge", [tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out/versions").exists()


@pytest.mark.parametrize("operation", ["merge", "shuffle"])
def test_a_damaged_input_is_noticed_and_nothing_is_published(tmp_path, operation):
    """A bit that flipped in the tokens since the input was verified."""
    publish_docs(tmp_path / "a", docs_of(*[[i, i + 1, i + 2] for i in range(20)]))
    chunk = sorted((tmp_path / "a").glob("versions/*/train/encoded_tokens/c/*"))[3]
    data = bytearray(chunk.read_bytes())
    data[1] ^= 4
    chunk.write_bytes(data)
    with refusal(r"encoded_tokens/c/\d+: inner chunk 0 does not match its crc32c"):
        run(operation, [tmp_path / "a"], tmp_path / "out")
    assert read_pointer(Store.at(tmp_path / "out")).version is None
    assert list_versions(Store.at(tmp_path / "out")) == []


def test_appending_makes_a_new_version_and_moves_latest_once(tmp_path):
    """The same command again finds what it appended, though its first input is another one by now."""
    version = publish_docs(tmp_path / "a", docs_of([1]))
    publish_docs(tmp_path / "b", docs_of([2], key=7))

    first = run("merge", [tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    again = run("merge", [tmp_path / "a", tmp_path / "b"], tmp_path / "a")

    assert [doc.ids for doc in read_docs(tmp_path / "a")["train"]] == [(1,), (2,)]
    assert (first.was_published, again.was_published, again.sequence) == (False, True, 2)
    assert [(one.version, one.state) for one in list_versions(Store.at(tmp_path / "a"))] == [
        (first.version, "latest"),
        (version, "former"),
    ]
    publish_docs(tmp_path / "b", docs_of([3], key=8))
    assert not run("merge", [tmp_path / "a", tmp_path / "b"], tmp_path / "a").was_published
    assert [doc.ids for doc in read_docs(tmp_path / "a")["train"]] == [(1,), (2,), (3,)]


def test_appending_to_what_was_merged_elsewhere_appends(tmp_path):
    publish_docs(tmp_path / "a", docs_of([1]))
    run("merge", [tmp_path / "a", tmp_path / "a"], tmp_path / "out")
    assert not run("merge", [tmp_path / "out", tmp_path / "a"], tmp_path / "out").was_published
    assert [doc.ids for doc in read_docs(tmp_path / "out")["train"]] == [(1,), (1,), (1,)]


def test_what_is_no_dataset_and_where_nothing_can_be_written(tmp_path):
    publish_docs(tmp_path / "a", docs_of([1]))
    (tmp_path / "file.txt").write_text("text")
    with refusal("nowhere: there is nothing here", FileNotFoundError):
        run("merge", [tmp_path / "nowhere"], tmp_path / "out")
    with refusal(r"file.txt: is a file, no flat-tokens dataset.*flat-tokens import", FileNotFoundError):
        run("merge", [tmp_path / "file.txt"], tmp_path / "out")
    with refusal(r"train: is one flat-tokens array.* Name the dataset around it", FileNotFoundError):
        run("merge", [tmp_path / "a/latest/train"], tmp_path / "out")
    with refusal("is within the dataset"):
        run("merge", [tmp_path / "a"], tmp_path / "a/latest/more")
    assert not (tmp_path / "a/latest/more").exists()
    with refusal("there is no source 'news'; there are web"):
        run({"operation": "subset", "sources": ["news"]}, [tmp_path / "a"], tmp_path / "out")
    with refusal("shuffle takes one dataset, not 2"):
        run("shuffle", [tmp_path / "a", tmp_path / "a"], tmp_path / "out")


def test_a_merged_document_is_traced_to_its_text(tmp_path):
    """What builds recorded of where their sources lay is passed on."""
    for name in "ab":
        build_here(settings_of(tmp_path / name, write_notes(tmp_path / "in" / name / "notes.jsonl", 3)))
    for _ in range(2):
        run("merge", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
        run("merge", [tmp_path / "out", tmp_path / "b"], tmp_path / "out")
        run("merge", [tmp_path / "out", tmp_path / "b"], tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    found = {
        Locator(corpus, trusted=True).find(place.file)
        for split in ("train", "validation")
        for place in places_of(corpus, split, range(corpus.splits[split].seq_count)) or []
        if place.file is not None
    }
    assert found == {str(tmp_path / "in" / name / "notes.jsonl") for name in "ab"}


# Subset


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    told = {
        "sources": draw(st.none() | st.lists(st.sampled_from(["one", "two"]), min_size=1, unique=True)),
        "min_tokens": draw(st.integers(0, 10)),
        "split": draw(st.none() | st.sampled_from(["train", "validation"])),
        "seed": draw(st.integers(0, 3)),
    }
    kind = draw(st.sampled_from(["fraction", "count", "none"]))
    if kind == "fraction":
        told["fraction"] = draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    elif kind == "count":
        told["count"] = draw(st.integers(0, 9))
    else:
        told["max_tokens"] = told["min_tokens"] + draw(st.integers(0, 10))
    return told


def naive(docs: list[Doc], told: dict[str, Any], split: str) -> list[Doc]:
    """The filters one document after the other."""
    if told["split"] not in (None, split):
        return docs
    files = {"one": [0], "two": [1, 2]}
    kept = []
    for doc in docs:
        of_source = told["sources"] is None or any(doc.file in files[name] for name in told["sources"])
        length = len(doc.ids)
        if of_source and told["min_tokens"] <= length <= told.get("max_tokens", length):
            kept.append(doc)
    hashes = sample_hashes(np.array([doc.key for doc in kept], np.uint64), told["seed"]).tolist()
    if "fraction" in told:
        kept = [doc for doc, value in zip(kept, hashes, strict=True) if value < told["fraction"] * 2**64]
    if "count" in told:
        first = sorted(range(len(kept)), key=lambda i: (hashes[i], i))[: told["count"]]
        kept = [kept[i] for i in sorted(first)]
    return kept


@examples(20)
@given(pair=PAIRS, told=filters(), layout=LAYOUT_NAMES)
def test_a_subset_is_what_the_filters_let_through(tmp_path, pair, told, layout):
    work = tmp_path / str(next(_numbers))
    publish_docs(work / "a", *pair, sources=[("one", 1), ("two", 2)], layout=layout)
    result = run({"operation": "subset", **told}, [work / "a"], work / "out")
    expected = {name: naive(docs, told, name) for name, docs in zip(("train", "validation"), pair, strict=True)}
    assert read_docs(work / "out") == expected
    documents = result.totals["documents"]
    assert documents["read"] == sum(map(len, pair)) == documents["written"] + sum(documents["skipped"].values())


def test_samples_have_nothing_to_do_with_how_validation_was_drawn():
    """Of the same seed, a tenth of the documents holds about a tenth of those that are validation."""
    keys = np.arange(200_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sampled = sample_hashes(keys, 0) < np.uint64(2**64 // 10)
    validation = SplitRule(fraction=0.1, seed=0).numbers(keys)
    assert abs(int((sampled & validation).sum()) - 2000) < 250


def test_documents_are_listed_by_key_or_by_id(tmp_path):
    """Keys in hexadecimal as trace shows them, or in an array; what no document has is counted."""
    ids = [b"first", b"second", "drittes ä".encode()]
    data = np.frombuffer(b"".join(ids), np.uint8)
    keys = document_keys(data, np.cumsum([0, *map(len, ids)])).tolist()
    docs = [Doc((i,), key, 0, i) for i, key in enumerate(keys)]
    publish_docs(tmp_path / "a", docs, docs[:1])
    (tmp_path / "keys.txt").write_text(f"{keys[2]:016x}\n0x{keys[0]:016X}\n{keys[0]:016x}\n{5:016x}\n")
    np.save(tmp_path / "keys.npy", np.array([keys[0], keys[2], 5], np.uint64))
    (tmp_path / "ids.txt").write_bytes(b"first\r\n\ndrittes \xc3\xa4\nnobody\n")
    for told in ({"key_list": "keys.txt"}, {"key_list": "keys.npy"}, {"id_list": "ids.txt"}):
        ((kind, name),) = told.items()
        result = run({"operation": "subset", kind: str(tmp_path / name)}, [tmp_path / "a"], tmp_path / name.replace(".", "-"))
        assert read_docs(result.path) == {"train": [docs[0], docs[2]], "validation": [docs[0]]}
        assert result.totals["documents"]["skipped"] == {"not_listed": 1}
        assert result.not_found == 1
    run({"operation": "subset", "key_list": str(tmp_path / "keys.npy")}, [tmp_path / "a"], tmp_path / "keys-txt")
    assert len(list_versions(Store.at(tmp_path / "keys-txt"))) == 1
    (tmp_path / "wrong.txt").write_text("12\n")
    with refusal(r"wrong.txt: item 1 is '12', but a key is 16 hexadecimal digits.*--ids"):
        run({"operation": "subset", "key_list": str(tmp_path / "wrong.txt")}, [tmp_path / "a"], tmp_path / "out")


def test_a_split_is_dropped(tmp_path):
    train, validation = docs_of([1], [2, 3], [4, 5, 6]), docs_of([7], [8])
    publish_docs(tmp_path / "a", train, validation)
    run({"operation": "subset", "min_tokens": 2, "split": "train", "drop": "validation"}, [tmp_path / "a"], tmp_path / "one")
    result = run({"operation": "subset", "drop": "train"}, [tmp_path / "a"], tmp_path / "two")
    assert read_docs(tmp_path / "one") == {"train": train[1:], "validation": []}
    assert read_docs(tmp_path / "two") == {"train": [], "validation": validation}
    assert result.totals["documents"]["skipped"] == {"split": 3}


# Shuffle


@examples(15)
@given(pair=PAIRS, seed=st.integers(0, 2**63 - 1), layout=LAYOUT_NAMES)
def test_a_shuffle_is_a_permutation_of_each_split(tmp_path, pair, seed, layout):
    """Each document with its key, file and row."""
    work = tmp_path / str(next(_numbers))
    publish_docs(work / "a", *pair, sources=[("one", 3)], layout=layout)
    run({"operation": "shuffle", "seed": seed}, [work / "a"], work / "out")
    found = read_docs(work / "out")
    assert {name: sorted(docs) for name, docs in found.items()} == {"train": sorted(pair[0]), "validation": sorted(pair[1])}


def test_the_seed_alone_decides_the_order(tmp_path, monkeypatch):
    """Not the number of threads, nor how much is held in memory; each place is as likely as the others."""
    monkeypatch.undo()  # sizes as they are
    docs = docs_of(*[[i] * (i % 7) for i in range(300)])
    publish_docs(tmp_path / "a", docs, docs)
    first = run({"operation": "shuffle", "seed": 4}, [tmp_path / "a"], tmp_path / "first", workers=1)
    monkeypatch.setattr(tasks.derive.inputs, "PART_TOKENS", 500)
    monkeypatch.setattr(tasks.derive.inputs, "PART_DOCUMENTS", 70)
    monkeypatch.setattr(tasks.derive.shuffle, "BUCKET_TOKENS", 90)
    monkeypatch.setattr(tasks.derive.shuffle, "BUCKET_DOCUMENTS", 31)
    second = run({"operation": "shuffle", "seed": 4}, [tmp_path / "a"], tmp_path / "second", workers=4)
    assert digests(Path(first.path)) == digests(Path(second.path))

    orders = [[doc.row for doc in read_docs(first.path)[split]] for split in ("train", "validation")]
    run({"operation": "shuffle", "seed": 5}, [tmp_path / "a"], tmp_path / "other")
    orders.append([doc.row for doc in read_docs(tmp_path / "other")["train"]])
    for a, b in itertools.combinations([list(range(300)), *orders], 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


def test_one_split_alone_is_shuffled_on_request(tmp_path):
    docs = docs_of(*[[i] for i in range(40)])
    publish_docs(tmp_path / "a", docs, docs)
    run({"operation": "shuffle", "split": "train"}, [tmp_path / "a"], tmp_path / "out")
    found = read_docs(tmp_path / "out")
    assert found["validation"] == docs
    assert found["train"] != docs


# Relayout


def test_the_layout_that_is_there_is_nothing_to_do(tmp_path):
    publish_docs(tmp_path / "a", docs_of([1, 2]))
    assert run("relayout", [tmp_path / "a"], tmp_path / "a", layout="mmap").was_published
    assert not run("relayout", [tmp_path / "a"], tmp_path / "a", layout="compact").was_published
    assert run("relayout", [tmp_path / "a"], tmp_path / "a", layout="compact").was_published
    with refusal("relayout needs a layout"):
        run("relayout", [tmp_path / "a"], tmp_path / "a")
    assert len(list_versions(Store.at(tmp_path / "a"))) == 2
