"""Directories whose files are not all content: tables, datasets saved to disk, data with notes beside it, names with brackets."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flat_tokens.stores.store import Store
from tasks.config import Source
from tasks.download.sources import _matching, resolve_source
from tests.flows.test_stores import s3  # noqa: F401  a fixture
from tests.refusal import refusal

DELTA, HUDI = ("_delta_log/00000000000000000000.json", "a Delta table"), (".hoodie/hoodie.properties", "a Hudi table")
ICEBERG = ("metadata/00000-ab.metadata.json", "an Iceberg table")


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": ["a"]}), root / name)
        else:
            (root / name).write_text('{"text": "a"}\n')
    return root


def names(path: Path | str) -> list[str]:
    return [file.name for file in resolve_source(Source(path=path), 0).files]


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    yield "memory://directories"
    fs.rm("/directories", recursive=True)


def pipe(*names: str) -> None:
    fsspec.filesystem("memory").pipe({f"/directories/{name}": b'{"text": "a"}\n' for name in names})


@pytest.mark.parametrize(("log", "kind"), [DELTA, HUDI, ICEBERG])
@pytest.mark.parametrize(
    "path",
    ["tab", "tab/", "tab/**/*.parquet", "tab/day=1", "tab/day=1/*.parquet", "*/*/*.parquet", ".", "tab/day=1/part-1.parquet"],
)
def test_the_files_of_a_table_are_refused(tmp_path, monkeypatch, log, kind, path):
    """Also where a partition alone is named, by relative paths and patterns: some may be of rows that the table has removed."""
    put(tmp_path, f"tab/{log}", "tab/day=1/part-0.parquet", "tab/day=1/part-1.parquet")
    monkeypatch.chdir(tmp_path)
    for place in (f"{tmp_path}/{path}", path):
        with refusal(rf"^the source: {tmp_path}/tab is {kind}: it has {log.partition('/')[0]}, and its"):
            names(place)


@pytest.mark.parametrize(("log", "kind"), [DELTA, HUDI, ICEBERG])
@pytest.mark.parametrize("path", ["tab", "tab/day=1", "tab/*/*.parquet", "tab/day=1/part-0.parquet"])
def test_the_files_of_a_table_in_a_store_are_refused(memory, log, kind, path):
    pipe(f"tab/{log}", "tab/day=1/part-0.parquet")
    with refusal(rf"^the source: /directories/tab is {kind}"):
        names(f"{memory}/{path}")


TREE = ("b.jsonl", "a/z.jsonl", "a.jsonl", "metadata/c.jsonl", "_SUCCESS", ".h.jsonl", "_d.jsonl", "_e/x.jsonl", "a/.git/y")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ["a.jsonl", "a/z.jsonl", "b.jsonl", "metadata/c.jsonl"]),  # by name, but hidden ones; metadata makes no table
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("_*.jsonl", ["_d.jsonl"]),
        ("**/[az].jsonl", ["a.jsonl", "a/z.jsonl"]),
        ("_d.jsonl", ["_d.jsonl"]),
        ("link", ["z.jsonl"]),
    ],
)
def test_hidden_files_are_found_only_where_a_path_says_so(tmp_path, path, found):
    put(tmp_path / "in", *TREE)
    if path == "link":
        (tmp_path / "in/link").symlink_to("a")
    for place in (f"{tmp_path}/in/{path}", f"file://{tmp_path}/in/{path}"):
        assert names(place) == found


@pytest.mark.parametrize(
    ("split", "validation_split", "expected"),
    [
        ("train", None, ["train-0 None"]),
        ("train", "test", ["test-0 validation", "train-0 train"]),
        (None, "test", ["constrained train", "test-0 validation", "train-0 train"]),
    ],
)
def test_splits_are_told_by_names_that_stand_alone(tmp_path, split, validation_split, expected):
    root = put(tmp_path, "train-0.jsonl", "test-0.jsonl", "constrained.jsonl")
    found = resolve_source(Source(path=root, split=split, validation_split=validation_split), 0).files
    assert [f"{file.name.removesuffix('.jsonl')} {file.split}" for file in found] == expected
    with refusal(r"no file is of split 'dev'; there are constrained.jsonl, test-0"):
        resolve_source(Source(path=root, split="dev"), 0)


def test_files_named_as_a_test_split_do_not_become_train_without_a_word(tmp_path, caplog):
    root = put(tmp_path, "test-0.jsonl", "train-0.jsonl", "validation-0.jsonl", "latest.jsonl")
    said = "the source: test-0.jsonl: named as a test split, but train here. Set source.split to leave it out."
    for split, expected in ((None, [said]), ("train", [])):
        caplog.clear()
        resolve_source(Source(path=root, split=split, validation_split="validation"), 0)
        assert caplog.messages == expected


def test_a_dataset_that_was_saved_to_disk_is_refused_with_the_pattern_of_its_data(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["one", "two"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    for name, places in (("one", ["one"]), ("two", ["two/test", "two/train"])):
        patterns = " or ".join(f"{tmp_path}/{place}/data-*.arrow" for place in places)
        words = "was written by save_to_disk of datasets: its text is in its *.arrow files alone. Set source.path to "
        with refusal(re.escape(words + patterns) + "$"):
            names(tmp_path / name)
    assert names(tmp_path / "two/*/data-*.arrow") == [f"{part}/data-00000-of-00001.arrow" for part in ("test", "train")]


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        (["README.md", "data/train-0.parquet"], "**/*.parquet"),
        (["README.md", "a.jsonl.zst", "b.jsonl.zst"], "*.jsonl.zst"),
        (["README.md", "a.jsonl", "b.jsonl.zst", "c.jsonl"], "*.jsonl"),
        (["dataset_infos.json", "data/a.csv", "notes.md"], "**/*.csv"),
    ],
)
def test_notes_beside_data_are_refused_with_the_pattern_of_the_data(tmp_path, files, pattern):
    """Before a byte of them is fetched. The pattern finds the data."""
    put(tmp_path, *files)
    with pytest.raises(
        ValueError, match=rf"holds files of several formats: .*such as {re.escape(f'{tmp_path}/{pattern}')};"
    ) as error:
        names(tmp_path)
    found = re.search(r"such as (\S+);", str(error.value))
    assert names(found[1])


def test_what_is_no_text_beside_data_is_refused_with_the_pattern_of_the_data(tmp_path):
    put(tmp_path, "data/a.parquet", "b")
    (tmp_path / "LICENSE").write_text("Terms")
    with refusal(rf"cannot tell the format of LICENSE.* such as {re.escape(str(tmp_path))}/\*\*/\*\.parquet"):
        names(tmp_path)
    (tmp_path / "LICENSE").unlink()
    assert names(tmp_path) == ["b", "data/a.parquet"]  # what it is, its content tells


@pytest.mark.parametrize("name", ["x[1]", "x*", "x?", "[", "[!x]"])
def test_a_directory_that_is_there_by_its_very_name_is_no_pattern(tmp_path, monkeypatch, name):
    put(tmp_path, f"a/{name}/b/c[2]/d.jsonl", "a/x1/b/c2/other.jsonl")
    monkeypatch.chdir(tmp_path)
    for place in (f"{tmp_path}/", "./", ""):
        assert names(f"{place}a/{name}/b/c[2]/*.jsonl") == ["d.jsonl"]


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.jsonl",
        "a*",
        "*/*",
        "*/b.jsonl",
        "**/*.jsonl",
        "a/**/*",
        "**/[bc].jsonl",
        "a/../*",
        "**/d?/*",
        "*/*/*/*",
        "a/d1",
        "x/*",
    ],
)
def test_a_pattern_means_what_it_means_to_pathlib(tmp_path, pattern):
    put(tmp_path, "a/b.jsonl", "a/c.jsonl", "a/d1/b.jsonl", "a/d1/e/b.jsonl", "x/b.jsonl", "b.jsonl", "a.jsonl", "x/.h/c.jsonl")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "x/closed").mkdir(mode=0)
    assert sorted(path for path, _ in _matching(tmp_path, pattern)) == sorted(map(str, tmp_path.glob(pattern)))
    assert all(real == os.path.realpath(os.path.dirname(path)) + "/" for path, real in _matching(tmp_path, pattern))


def test_a_directory_of_a_store_that_is_there_by_its_very_name_is_no_pattern(memory):
    pipe("x[1]/d.jsonl", "x[1]/b/e.jsonl", "x1/other.jsonl", "y1/f.jsonl")
    assert names(f"{memory}/x[1]/*.jsonl") == ["d.jsonl"]
    assert names(f"{memory}/x[1]/**/*.jsonl") == ["b/e.jsonl", "d.jsonl"]
    assert names(f"{memory}/x[1]/d.jsonl") == ["d.jsonl"]
    assert names(f"{memory}/x[1]") == ["b/e.jsonl", "d.jsonl"]
    assert names(f"{memory}/y[1]/*.jsonl") == ["y1/f.jsonl"]


def test_nothing_at_a_path_says_where_that_is_and_what_is_near(tmp_path, monkeypatch):
    put(tmp_path, "data/webtext/a.jsonl", ".hidden/a.jsonl")
    monkeypatch.chdir(tmp_path)
    for path, words in (
        ("data/webtxt", f"nothing at data/webtxt, which is {tmp_path}/data/webtxt. Did you mean {tmp_path}/data/webtext?"),
        (f"{tmp_path}/dat/webtext", f"nothing at {tmp_path}/dat/webtext. Did you mean {tmp_path}/data?"),
        (f"{tmp_path}/hidden", f"nothing at {tmp_path}/hidden. {tmp_path} has data. Name what is there, or put it there."),
        ("data/webtext/a.jsonl/b", f"{tmp_path}/data/webtext/a.jsonl is a file. Leave out what follows it."),
        ("data/*.parquet", f"no files at data/*.parquet, which is {tmp_path}/data/*.parquet. {tmp_path}/data has webtext"),
        (
            "data/x[1]/*.jsonl",
            f"no files at data/x[1]/*.jsonl, which is {tmp_path}/data/x[1]/*.jsonl. Brackets are a pattern: [[] is",
        ),
        ("data/webtext/*.json", f"Did you mean {tmp_path}/data/webtext/*.jsonl?"),
        ("$HOME/x/*.txt", "It has a variable, $HOME, which only a shell"),
        ("C:\\x\\*.txt", "It is a path of Windows"),
    ):
        with refusal(f"there (is nothing|are no files) at .*{re.escape(words.partition(' at ')[2] or words)}"):
            names(path)


def test_what_nobody_may_list_is_no_table(tmp_path):
    put(tmp_path, "tab/metadata/a.metadata.json", "tab/data/a.jsonl")
    (tmp_path / "tab/metadata").chmod(0)
    try:
        if os.access(tmp_path / "tab/metadata", os.R_OK):
            pytest.skip("this user may list all")
        assert names(tmp_path / "tab/data") == ["a.jsonl"]
    finally:
        (tmp_path / "tab/metadata").chmod(0o700)


def test_an_object_that_stands_for_a_directory_is_no_file(s3):  # noqa: F811
    """Consoles of stores make one for a directory that has nothing yet."""
    store = Store.at(f"{s3}/text")
    for name, content in (("", b""), ("sub/", b""), ("sub/a.txt", b"text")):
        store.fs.pipe_file(f"{store.root}/{name}", content)
    assert names(f"{s3}/text") == ["sub/a.txt"]
