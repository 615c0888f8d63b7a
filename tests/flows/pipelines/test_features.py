"""Features of a build together: in every layout, by every runner and at every place, a version holds what its rows say."""

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

import flat_tokens.steps
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.steps import Outcome
from flat_tokens.stores.store import Store
from tasks.models import Slice
from tests.calls import before_each_call
from tests.examples import first_fast
from tests.faults.support import derive_here
from tests.flows.through_json import built
from tests.sources import Held, Rows, expected, held, write_rows

Settings = dict[str, Any]
FRACTION = 0.3
FORMATS = ("tar.zst", "warc.gz", "jsonl", "parquet", "arrow", "csv", "jsonl.zst", "jsonl.gz")
FEATURES: dict[str, tuple[Settings, Settings, Settings, Settings]] = {
    # settings of each source, of the documents, of the build, and what is expected by them
    "nothing": ({}, {}, {}, {}),
    "columns": ({"keep_columns": ["url"]}, {}, {}, {"columns": ["url"]}),
    "masks": ({"prompt_column": "prompt", "completion_column": "text"}, {}, {}, {"prompt": "prompt"}),
    "steps": ({}, {"steps": [{"use": "length", "min_bytes": 30}]}, {}, {"least_bytes": 30}),
    "duplicates": ({}, {"duplicates": "drop"}, {}, {"once": True}),
    "written": ({}, {"steps": [{"use": "words"}]}, {}, {"columns": ["words"]}),
    "splits": (
        {"keep_columns": ["url"]},
        {},
        {"split": {"by": "url"}, "test_fraction": 0.2},
        {"columns": ["url"], "by": "url", "test": 0.2},
    ),
}
TOGETHER = [
    *((name,) for name in FEATURES),
    ("columns", "masks"),
    ("columns", "steps"),
    ("written", "duplicates"),
    ("masks", "duplicates"),
    ("steps", "duplicates"),
    ("masks", "splits", "duplicates"),
    ("columns", "steps", "duplicates"),
]
CASES = [(features, layout) for layout in LAYOUTS for features in TOGETHER]
# Every two features that go together, and every layout; slowly all.
FIRST = list(zip([*TOGETHER[-2:], ("written",)], LAYOUTS, strict=True))


class Words:
    """A step that writes a column: the number of words."""

    version = "1"
    gives_columns = ("words",)

    def __call__(self, documents: pa.RecordBatch) -> Outcome:
        return Outcome(columns={"words": pa.array([len(text.split()) for text in documents.column("text").to_pylist()])})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several segments, spans, row groups, pieces and buckets."""
    monkeypatch.setitem(flat_tokens.steps.SHIPPED, "words", Words)
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 200)
    monkeypatch.setattr("tasks.assemble.write.SPAN_TOKENS", 1)
    monkeypatch.setattr("tasks.assemble.write.SPAN_DOCUMENTS", 1)
    monkeypatch.setattr("flat_tokens.columns.GROUP_ROWS", 4)
    monkeypatch.setattr("tasks.derive.inputs.PART_DOCUMENTS", 7)
    monkeypatch.setattr("tasks.derive.shuffle.BUCKET_DOCUMENTS", 5)
    yield
    flat_tokens.steps._opened.cache_clear()


def some_rows(name: str, count: int) -> Rows:
    """Documents of which every fourth has the text of one before it, in this file or another."""
    texts = ["the same " * (i % 8) if i % 4 == 3 else f"{name} {i} é " + "salt wind " * (i % 5) for i in range(count)]
    return [
        {
            "id": f"{name}-{i}",
            "prompt": f"say {i % 4}: ",
            "text": text,
            "url": f"https://{name}.example/{i}",
            "words": len(text.split()),
        }
        for i, text in enumerate(texts)
    ]


def sources_of(directory: Path, features: tuple[str, ...]) -> tuple[list[Rows], list[Path]]:
    """Rows, and the file of each format that has them. Records of web pages have no prompts."""
    formats = [one for one in FORMATS if not (one.startswith("warc") and "masks" in features)]
    files = [some_rows(f"f{k}", 8) for k in range(len(formats))]
    return files, [
        write_rows(directory / f"{k}.{one}", rows, 3) for k, (one, rows) in enumerate(zip(formats, files, strict=True))
    ]


def given(features: tuple[str, ...], paths: list[Path], **more: Any) -> tuple[Settings, Settings]:
    """Settings of a build, and what is expected by them."""
    of_sources, of_documents, of_builds, of_versions = ({}, {}, {}, {"fraction": FRACTION})
    for name in features:
        for whole, part in zip((of_sources, of_documents, of_builds, of_versions), FEATURES[name], strict=True):
            whole |= part
    sources = [{"name": path.name, "path": str(path), "id_column": "id", **of_sources} for path in paths]
    common = {"tokenizer": "bytes", "layout": "mmap", "validation_fraction": FRACTION, "slice_bytes": 300, **more}
    return {"sources": sources, "documents": of_documents, **of_builds, **common}, of_versions


def objects_of(output: str, version: str) -> dict[str, str]:
    store = Store.at(output) / "versions" / version
    return {key: store.digest(key, "sha256").digest for key, _ in store.listing()}


@pytest.mark.parametrize(
    "case",
    first_fast([*FIRST, *(case for case in CASES if case not in FIRST)], len(FIRST), every=6),
    ids=lambda case: "+".join((*case[0], case[1])),
)
def test_a_version_is_what_the_rows_say_however_it_is_built_and_whatever_was_there_before(tmp_path, monkeypatch, case):
    """The same objects with any workers, through groups, on a disk and in an object store. A second build makes no token, nor
    does another seed. After a build that was cut off, of changed sources, the bytes are as from nothing.
    """
    files, paths = sources_of(tmp_path / "in", case[0])
    settings, wanted = given(case[0], paths, layout=case[1], scratch=str(tmp_path / "scratch"))
    outputs = {str(tmp_path / "groups"): None, f"memory://{uuid.uuid4().hex}": 3, str(tmp_path / "one"): 1}
    objects = []
    for output, workers in outputs.items():
        first = built({**settings, "output": output}, workers)
        objects.append(objects_of(output, first.version))
        assert first.slices > len(files)
    assert objects[0] == objects[1] == objects[2]
    assert held(output) == expected(files, **wanted)
    output = list(outputs)[case[1] != "mmap"]
    again = built({**settings, "output": output}, 2)
    assert (again.version, again.text_bytes_tokenized) == (first.version, 0)
    assert objects_of(output, first.version) == objects[0]
    other = built({**settings, "output": output, "split_seed": 5}, 2)
    assert (first.text_bytes_tokenized > 0, other.text_bytes_tokenized) == (True, 0)
    assert held(output) == expected(files, seed=5, **wanted)

    del files[0], settings["sources"][0]  # with the first copies: others take their place
    last = files[-1]
    files[-1] = [*last[:3], *some_rows("new", 3), {**last[4], "url": "https://moved.example"}, *last[5:]]
    write_rows(paths[-1], files[-1])
    dies = Mock(side_effect=[None, None, None, KeyboardInterrupt])
    with monkeypatch.context() as patch:
        before_each_call(patch, "tasks.assemble.assembler.Assembler.add", dies)
        with pytest.raises(KeyboardInterrupt):
            built({**settings, "output": output})
    result = built({**settings, "output": output}, 2)
    assert held(output) == expected(files, **wanted)
    assert result.text_bytes_tokenized < first.text_bytes_tokenized / 2
    anew = built({**settings, "output": str(tmp_path / "anew")}, 2)
    assert objects_of(output, result.version) == objects_of(str(tmp_path / "anew"), anew.version)


@pytest.mark.parametrize("features", first_fast([*TOGETHER[-2:], *TOGETHER[:-2]], every=6), ids="+".join)
def test_datasets_made_of_datasets_keep_all_of_each_document(tmp_path, features):
    """A dataset without columns, masks or a test split has nulls, tokens that count, and no such document in a merge."""
    files, paths = sources_of(tmp_path / "in", features)
    settings, wanted = given(features, paths)
    built({**settings, "output": str(tmp_path / "whole")}, 2)
    (plain, _) = given(("nothing",), [write_rows(tmp_path / "plain.jsonl", rows := some_rows("plain", 9))])
    built({**plain, "output": str(tmp_path / "plain")}, 2)
    whole = expected(files, **wanted)

    def made(operation: str | Settings, *inputs: str, **more: Any) -> dict[str, list[Held]]:
        output = tmp_path / f"made-{next(numbers)}"
        return held(derive_here(operation, *(tmp_path / name for name in inputs), output=output, **more).path)

    numbers = itertools.count()
    assert made("relayout", "whole", layout="compact") == whole
    shuffled = made({"operation": "shuffle", "seed": 3}, "whole")
    assert {name: sorted(docs) for name, docs in shuffled.items()} == whole
    assert shuffled["train"] != whole["train"]
    subset = made({"operation": "subset", "where": "tokens >= 30"}, "whole")
    assert subset == {name: [doc for doc in docs if len(doc.ids) >= 30] for name, docs in whole.items()}
    merged = made("merge", "whole", "plain")
    nulls = dict.fromkeys(wanted.get("columns", ()))
    for name, docs in expected([rows], fraction=FRACTION).items():
        more = [
            doc._replace(file=len(files), mask=[1] * len(doc.ids) if "masks" in features else None, columns=nulls) for doc in docs
        ]
        assert merged[name] == whole[name] + more
    assert merged.get("test") == whole.get("test")


@pytest.mark.parametrize("case", first_fast(["jsonl splits duplicates", "parquet columns steps", "csv masks", "jsonl.gz"], 2))
def test_of_small_files_those_that_changed_are_read_again(tmp_path, monkeypatch, case):
    """The others are taken from the version before, unless it is damaged. The version is that of a build from nothing."""
    (ending, *features), read = case.split(), []

    def note(part: Slice, *_: Any) -> None:
        read.extend(one.file.name for one in part.ranges)

    before_each_call(monkeypatch, "tasks.shards.write.read_documents", note)
    paths = [write_rows(tmp_path / f"in/{k}.{ending}", some_rows(f"f{k}", 8)) for k in range(9)]
    settings, _ = given(tuple(features), [tmp_path / "in"], slice_bytes=1 << 20)
    built({**settings, "output": str(tmp_path / "one")})
    assert len(read) == len(paths)
    paths[7].unlink()
    paths[0].rename(tmp_path / f"in/9.{ending}")
    for count in (5, 6):  # what was taken is taken once more
        read.clear()
        write_rows(paths[4], some_rows("new", count))
        result = built({**settings, "output": str(tmp_path / "one")})
        assert read == [paths[4].name]
        anew = built({**settings, "output": str(tmp_path / f"anew-{count}")})
        assert objects_of(str(tmp_path / "one"), result.version) == objects_of(str(tmp_path / f"anew-{count}"), anew.version)
    for path in (tmp_path / "one/versions" / result.version).rglob("encoded_tokens/**/0"):
        path.write_bytes(bytes(len(path.read_bytes())))
    read.clear()
    write_rows(paths[4], some_rows("newer", 5))
    built({**settings, "output": str(tmp_path / "one")})
    assert len(read) == len(paths) - 1
