"""What is made of datasets, against making it by hand: merged, chosen, shuffled and laid out anew, on threads."""

import itertools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.keys import keys_of_bytes
from flat_tokens.stores.store import Store
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.sources import Locator, places_of
from flows.pipelines.derive import DerivedResult
from tasks.derive.choice import sample_hashes
from tasks.output.pointer import read_pointer
from tasks.output.target import SplitRule
from tasks.output.versions import list_versions
from tasks.parts.documents import Reads
from tests.damage import change_file, flip
from tests.faults.support import build_here, derive_here, digests, settings_of, write_notes
from tests.made import GPT2, Doc, docs_of, foreign, publish_docs, read_docs, small
from tests.refusal import refusal

PARTS = ("inputs.PART_TOKENS", "inputs.PART_DOCUMENTS", "shuffle.BUCKET_TOKENS", "shuffle.BUCKET_DOCUMENTS")
"""Sizes of parts of inputs, and of buckets of a shuffle."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of 8 tokens and 4 entries, parts, blocks and buckets of a few tokens, so that few documents fill many of them."""
    for name in LAYOUTS:
        monkeypatch.setitem(LAYOUTS, name, small(name, 8, 4))
    sizes = {
        "assemble.write.SPAN_TOKENS": 16,
        "assemble.write.SPAN_DOCUMENTS": 4,
        **{f"derive.{name}": size for name, size in zip(PARTS, (24, 5, 16, 3), strict=True)},
        "parts.input.WHOLE_BLOCKS": Reads(8, None, whole=True),
        "parts.opening.BLOCK_TOKENS": 8,
        "parts.opening.GATHERED_TOKENS": 10,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(f"tasks.{name}", size)


class Here:
    """Datasets below a directory, by their names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, at: str, *docs: Sequence[Doc], **more: Any) -> str:
        return publish_docs(self.path / at, *docs, **more)

    def run(
        self, operation: str, *inputs: str, to: str = "out", layout: str = "auto", workers: int = 2, **told: Any
    ) -> DerivedResult:
        places = (self.path / name for name in inputs)
        return derive_here({"operation": operation, **told}, *places, output=self.path / to, layout=layout, workers=workers)

    def docs(self, name: str = "out") -> dict[str, list[Doc]]:
        return read_docs(self.path / name)

    def versions(self, name: str = "out") -> list[tuple[str, str]]:
        return [(one.version, one.state) for one in list_versions(Store.at(self.path / name))]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def some_docs(lengths: Iterable[int]) -> list[Doc]:
    """Documents of three files, many with the key of another."""
    keys = keys_of_bytes([b"%d" % i for i in range(7)]).tolist()
    return [Doc(tuple(range(i, i + length)), keys[i // 3 % 7], i % 3, i << 33) for i, length in enumerate(lengths)]


# Merge


RAGGED = [0, 3, 8, 0, 0, 7, 9, 16, 1, 40, 2, 0]


@pytest.mark.parametrize("layouts", [("mmap", "compact", "zarr2"), ("zarr2", "mmap", "compact"), ("compact", "zarr2", "mmap")])
def test_a_merge_is_the_concatenation(here, layouts):
    """Whatever the lengths, however the inputs are cut, stored and written; repeated keys are counted. Shuffles lose nothing."""
    datasets = [[some_docs(lengths) for lengths in pair] for pair in ((RAGGED, []), (RAGGED[:0:-1], RAGGED[3:]), ([], [0]))]
    for i, (pair, layout) in enumerate(zip(datasets, layouts, strict=True)):
        here.put(str(i), *pair, sources=[("one", 1), ("two", 2)], layout=layout)
    result = here.run("merge", "0", "1", "2", layout=layouts[-1])

    expected = {
        name: [doc._replace(file=doc.file + 3 * i) for i, pair in enumerate(datasets) for doc in pair[k]]
        for k, name in enumerate(("train", "validation"))
    }
    assert here.docs() == expected
    for name in ("out", "2"):
        here.run("shuffle", name, seed=3, to=f"{name}-mixed")
        assert [*map(sorted, here.docs(f"{name}-mixed").values())] == [*map(sorted, here.docs(name).values())]
    totals = result.totals["documents"]
    assert totals["repeated_keys"] == 29
    assert [(one["written"], one["token_count"]) for one in totals["by_source"]] == [
        (4, 49),
        (8, 37),
        (7, 65),
        (13, 96),
        (1, 0),
        (0, 0),
    ]


def test_datasets_of_different_tokenizers_are_not_merged_unasked(here):
    here.put("a", docs_of([1]))
    here.put("b", docs_of([2]), tokenizer={**GPT2, "name": "r50k_base", "digest": "ab" * 32})
    here.put("c", docs_of([3]), tokenizer=None)
    with refusal(r"a/versions/.* has tokens of gpt2 .*b/versions/.* has tokens of r50k_base .*--allow-diff"):
        here.run("merge", "a", "b")
    with refusal(r"of .*c/versions/.* no tokenizer is recorded"):
        here.run("merge", "a", "c")
    assert not (here.path / "out/versions").exists()

    here.run("merge", "a", "b", "c", allow_different_tokenizers=True)

    made_of = flat_tokens.open(here.path / "out").manifest["provenance"]
    assert made_of["tokenizer"] == {"digest": None}
    assert [one["tokenizer"].get("name") for one in made_of["inputs"]] == ["gpt2", "r50k_base", None]
    here.run("merge", "a", "c", to="same", allow_different_tokenizers=True)
    assert flat_tokens.open(here.path / "same").manifest["provenance"]["tokenizer"] == GPT2


def test_a_source_that_gets_another_name_is_told_of_and_keeps_a_record_of_it(here, caplog):
    """A number that no source has. Whoever chooses documents by the name of their source would look for it in vain."""
    here.put("a", docs_of([1]), sources=[("web", 1), ("web-2", 1)])
    here.put("b", docs_of([3]), sources=[("books", 1), ("web", 1)], name="b")
    here.run("merge", "a", "b")
    sources = flat_tokens.open(here.path / "out").manifest["provenance"]["sources"]
    assert [source["name"] for source in sources] == ["web", "web-2", "books", "web-3"]
    assert [source.get("renamed_from") for source in sources] == [None, None, None, "web"]
    (said,) = caplog.messages
    assert said.endswith(") is called 'web-3' here: another source has its name")


def test_a_dataset_without_records_is_its_own_source(here):
    """A plain zarr dataset: keys are made of the tokens, its splits are files and its sequences rows."""
    train = [[1, 2, 3], [], list(range(50)), [4], []]
    foreign(here.path / "plain", train, [[5, 6]])

    here.run("merge", "plain")

    def key(ids: list[int]) -> int:
        return int(keys_of_bytes([np.array(ids, "<u4").tobytes()])[0])

    assert here.docs() == {
        "train": [Doc(tuple(ids), key(ids), 0, row) for row, ids in enumerate(train)],
        "validation": [Doc((5, 6), key([5, 6]), 1, 0)],
    }
    (source,) = flat_tokens.open(here.path / "out").manifest["provenance"]["sources"]
    assert (source["name"], [file["name"] for file in source["files"]]) == ("plain", ["train", "validation"])
    shutil.rmtree(here.path / "plain")
    foreign(here.path / "plain", [*train, [9]], [[5, 6]])
    assert not here.run("merge", "plain").was_published


def test_what_breaks_the_format_is_refused_before_anything_is_written(here):
    metadata = foreign(here.path / "plain", [[1, 2], [3, 4]]) / "train/zarr.json"
    change_file(metadata, {"attributes": {"max_token_id": 3}})
    with refusal("plain/train: token id 4 is above max_token_id 3"):
        here.run("merge", "plain")
    here.put("a", docs_of([1, 2]))
    (chunk,) = here.path.glob("a/versions/*/train/encoded_tokens/c/0")
    chunk.unlink()
    with refusal("train/encoded_tokens/c/0 is missing"):
        here.run("merge", "a")
    with refusal("is within the dataset"):
        here.run("merge", "a", to="a/latest/more")
    assert not (here.path / "a/latest/more").exists()
    assert not (here.path / "out/versions").exists()


@pytest.mark.parametrize("operation", ["merge", "shuffle"])
def test_a_damaged_input_is_noticed_and_nothing_is_published(here, operation):
    """A bit that flipped in the tokens since the input was verified."""
    here.put("a", docs_of(*[[i, i + 1, i + 2] for i in range(20)]))
    chunk = sorted(here.path.glob("a/versions/*/train/encoded_tokens/c/*"))[3]
    flip(chunk)
    with refusal(r"encoded_tokens/c/\d+: inner chunk \d does not match its crc32c"):
        here.run(operation, "a")
    assert read_pointer(Store.at(here.path / "out")).version is None
    assert here.versions() == []


def test_appending_makes_a_new_version_and_moves_latest_once(here):
    """The same command again finds what it appended, though its first input is another one by now."""
    version = here.put("a", docs_of([1]))
    here.put("b", docs_of([2], key=7))

    first, again = (here.run("merge", "a", "b", to="a") for _ in range(2))

    assert [doc.ids for doc in here.docs("a")["train"]] == [(1,), (2,)]
    assert (first.was_published, again.was_published, again.sequence) == (False, True, 2)
    assert here.versions("a") == [(first.version, "latest"), (version, "former")]
    here.put("b", docs_of([3], key=8))
    assert not here.run("merge", "a", "b", to="a").was_published
    assert [doc.ids for doc in here.docs("a")["train"]] == [(1,), (2,), (3,)]
    here.run("merge", "b", "b")  # what was merged elsewhere is appended to as well
    assert not here.run("merge", "out", "b").was_published
    assert [doc.ids for doc in here.docs()["train"]] == [(3,), (3,), (3,)]


@pytest.mark.parametrize(
    ("words", "message"), [("shuffle a a", "shuffle takes one dataset, not 2"), ("relayout a", "relayout needs a layout")]
)
def test_what_an_operation_cannot_take_is_refused(here, words, message):
    here.put("a", docs_of([1]))
    with refusal(message):
        here.run(*words.split())


def test_a_merged_document_is_traced_to_its_text(here):
    """What builds recorded of where their sources lay is passed on."""
    notes = {name: write_notes(here.path / "in" / name / "notes.jsonl", 3) for name in "ab"}
    for name, path in notes.items():
        build_here(settings_of(here.path / name, path))
    for first in ("a", "out", "out") * 2:
        here.run("merge", first, "b")
    corpus = open_corpus(here.path / "out")
    locator = Locator(corpus, trusted=True)
    counts = {name: split.seq_count for name, split in corpus.splits.items()}
    found = {locator.find(place.file) for name, count in counts.items() for place in places_of(corpus, name, range(count))}
    assert found == {*map(str, notes.values())}


# Subset


@pytest.mark.parametrize(
    ("told", "splits"),
    [
        ({"sources": ["two"], "min_tokens": 2, "max_tokens": 8}, {}),
        ({"sources": ["one"], "fraction": 0.5, "seed": 3}, {"split": "train"}),
        ({"sources": ["one"], "count": 3, "seed": 1}, {"split": "validation", "drop": "train"}),
        ({"count": 0}, {"split": "train", "drop": "validation"}),
        ({"sources": ["two", "one"], "fraction": 1.0}, {}),
        ({"fraction": 0.0}, {"split": "validation"}),
    ],
)
def test_a_subset_is_what_the_filters_let_through(here, told, splits):
    """Of documents with the same key, too."""
    docs = some_docs(i % 11 for i in range(40))
    here.put("a", docs, docs[::-1], sources=[("one", 1), ("two", 2)])
    result = here.run("subset", "a", **told, **splits)
    expected = {"train": docs, "validation": docs[::-1]}
    told = {"sources": ["one", "two"], "min_tokens": 0, "max_tokens": 99, "seed": 0, "fraction": 1.0, "count": 99} | told
    files = [file for name in told["sources"] for file in {"one": [0], "two": [1, 2]}[name]]
    for name in {splits.get("split", name) for name in expected}:
        kept = [doc for doc in expected[name] if doc.file in files and told["min_tokens"] <= len(doc.ids) <= told["max_tokens"]]
        hashes = sample_hashes(np.array([doc.key for doc in kept], np.uint64), told["seed"]).tolist()
        first = sorted(range(len(kept)), key=lambda i, of=hashes: (of[i], i))[: told["count"]]
        expected[name] = [kept[i] for i in sorted(first) if hashes[i] < told["fraction"] * 2**64]
    if "drop" in splits:
        expected[splits["drop"]] = []
    assert here.docs() == expected
    documents = result.totals["documents"]
    assert documents["skipped"].get("split", 0) == 40 * ("drop" in splits)
    assert documents["read"] == 80 == documents["written"] + sum(documents["skipped"].values())


def test_samples_have_nothing_to_do_with_how_validation_was_drawn():
    """Of the same seed, a tenth of the documents holds about a tenth of those that are validation."""
    keys = np.arange(200_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sampled = sample_hashes(keys, 0) < np.uint64(2**64 // 10)
    validation = SplitRule(fraction=0.1, seed=0).numbers(keys)
    assert abs(int((sampled & validation).sum()) - 2000) < 250


def test_documents_are_listed_by_key_or_by_id(here):
    """Keys in hexadecimal as trace shows them, or in an array; what no document has is counted."""
    keys = keys_of_bytes([b"first", b"second", "drittes ä".encode()]).tolist()
    docs = [Doc((i,), key, 0, i) for i, key in enumerate(keys)]
    here.put("a", docs, docs[:1])
    (here.path / "keys.txt").write_text(f"{keys[2]:016x}\n0x{keys[0]:016X}\n{keys[0]:016x}\n{5:016x}\n")
    np.save(here.path / "keys.npy", np.array([keys[0], keys[2], 5], np.uint64))
    (here.path / "ids.txt").write_bytes(b"first\r\n\ndrittes \xc3\xa4\nnobody\n")
    for name, kind in (("keys.txt", "key_list"), ("keys.npy", "key_list"), ("ids.txt", "id_list")):
        result = here.run("subset", "a", to=f"{name}.out", **{kind: str(here.path / name)})
        assert here.docs(f"{name}.out") == {"train": [docs[0], docs[2]], "validation": [docs[0]]}
        assert (result.totals["documents"]["skipped"], result.not_found) == ({"not_listed": 1}, 1)
    # the same list
    assert here.run("subset", "a", to="keys.txt.out", key_list=str(here.path / "keys.npy")).was_published


def test_what_a_subset_cannot_be_chosen_by_is_refused(here):
    here.put("a", docs_of([1]))
    (here.path / "wrong.txt").write_text("12\n")
    with refusal(r"wrong.txt: item 1 is '12', but a key is 16 hexadecimal digits.*--ids"):
        here.run("subset", "a", key_list=str(here.path / "wrong.txt"))
    with refusal("there is no source 'news'; there are web"):
        here.run("subset", "a", sources=["news"])


# Shuffle


def test_the_seed_alone_decides_the_order(here, monkeypatch):
    """Not the number of threads, nor how much is held in memory; each place is as likely as the others. Or of one split alone."""
    monkeypatch.undo()  # sizes as they are
    docs = docs_of(*[[i] * (i % 7) for i in range(300)])
    here.put("a", docs, docs)
    first = here.run("shuffle", "a", seed=4, to="first", workers=1)
    for name, size in zip(PARTS, (500, 70, 90, 31), strict=True):
        monkeypatch.setattr(f"tasks.derive.{name}", size)
    second = here.run("shuffle", "a", seed=4, to="second", workers=4)
    assert digests(Path(first.path)) == digests(Path(second.path))

    here.run("shuffle", "a", seed=5, split="train", to="other")
    other = here.docs("other")
    assert other["validation"] == docs
    found = [*here.docs("first").values(), other["train"]]
    assert [sorted(some, key=lambda doc: doc.row) for some in found] == [docs] * 3
    orders = [list(range(300)), *([doc.row for doc in some] for some in found)]
    for a, b in itertools.combinations(orders, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


# Relayout


def test_the_layout_that_is_there_is_nothing_to_do(here):
    here.put("a", docs_of([1, 2]))
    for layout, is_there in (("mmap", True), ("compact", False), ("compact", True)):
        assert here.run("relayout", "a", to="a", layout=layout).was_published == is_there
    assert len(here.versions("a")) == 2
