"""Datasets and tokenizers on the hub, against a stand-in for it on loopback."""

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tasks.download.hub
from tasks.config import HubDataset, Source, TokenizerConfig
from tasks.download.fetch import fetch_file
from tasks.download.hub import fetch_hub, resolve_hub
from tasks.download.sources import resolve_source
from tasks.models import PinnedSource
from tasks.tokenize.tokenizers import load_tokenizer
from tests.refusal import refusal
from tests.sources import parquet_bytes, tar_bytes
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401
from tests.tasks.tokenize.test_tokenizers import DEMO

TWO_CONFIGURATIONS = """---
configs:
- config_name: english
  data_files:
  - split: train
    path: en/*.jsonl
- config_name: german
  data_files:
  - split: train
    path: de/*.jsonl
---
Two languages.
"""


def parquet(*texts: str) -> bytes:
    return parquet_bytes(pa.table({"text": texts}))


def tar(*samples: Mapping[str, bytes]) -> bytes:
    return tar_bytes(member for sample in samples for member in sample.items())


TWO_SPLITS = {
    "data/train-00001-of-00002.parquet": parquet("c"),
    "data/train-00000-of-00002.parquet": parquet("a", "b"),
    "data/test-00000-of-00001.parquet": parquet("d"),
}


def resolve(path: str = "org/name", **settings: Any) -> PinnedSource:
    """Settings of the hub, and of the source."""
    hub = {key: settings.pop(key) for key in ("name", "split", "revision") if key in settings}
    return resolve_hub(Source(hub=HubDataset(path=path, **hub), **settings), 3)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of waiting, note for how long."""
    noted = []
    here, sleep = threading.current_thread(), time.sleep
    # The library waits, too. Threads of others go on as they did.
    monkeypatch.setattr(time, "sleep", lambda wait: (noted.append if threading.current_thread() is here else sleep)(wait))
    return noted


def test_files_are_those_of_the_split_by_name(stand_in_hub):
    commit = stand_in_hub.commit("org/name", TWO_SPLITS)
    pinned = resolve()
    assert [file.name for file in pinned.files] == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    first = pinned.files[0]
    assert first.uri == f"hf://datasets/org/name@{commit}/data/train-00000-of-00002.parquet"
    assert (first.source, first.immutable, first.split) == (3, commit, None)
    assert [file.size for file in pinned.files] == [len(TWO_SPLITS[file.name]) for file in pinned.files]
    assert (pinned.origin, pinned.revision) == ("hf://datasets/org/name (default, train)", commit)
    both = resolve(validation_split="test").files
    assert [(file.name, file.split) for file in both] == [
        ("data/test-00000-of-00001.parquet", "validation"),
        *((file.name, "train") for file in pinned.files),
    ]


def test_fetched_files_are_whole_and_asked_for_once(stand_in_hub, tmp_path):
    """A copy that was cut short is fetched again."""
    stand_in_hub.commit("org/name", TWO_SPLITS)
    for file in resolve().files:
        assert fetch_hub(file, tmp_path).read_bytes() == TWO_SPLITS[file.name]
        asked = len(stand_in_hub.requests)
        path = fetch_hub(file, tmp_path)
        assert len(stand_in_hub.requests) == asked
        os.truncate(path, 7)
        assert fetch_hub(file, tmp_path).read_bytes() == TWO_SPLITS[file.name]


def test_a_revision_is_a_commit_or_a_branch_and_stays_when_the_branch_moves(stand_in_hub, tmp_path):
    before = stand_in_hub.commit("org/name", {"train.parquet": parquet("before")})
    pinned = resolve()
    after = stand_in_hub.commit("org/name", {"train.parquet": parquet("after")})
    assert fetch_hub(pinned.files[0], tmp_path).read_bytes() == parquet("before")
    assert resolve(revision=before) == pinned
    assert resolve().revision == after != before
    commit = stand_in_hub.commit("org/name", {"train.parquet": parquet("converted")}, branch="refs/convert/parquet")
    pinned = resolve(revision="refs/convert/parquet")
    assert pinned.revision == commit
    assert fetch_hub(pinned.files[0], tmp_path).read_bytes() == parquet("converted")


def test_a_local_directory_of_the_same_name_is_not_the_dataset(stand_in_hub, tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/local.jsonl").write_text('{"text": "local"}\n')
    monkeypatch.chdir(tmp_path)
    stand_in_hub.commit("org/name", {"remote.jsonl": '{"text": "remote"}\n'})
    assert [file.name for file in resolve().files] == ["remote.jsonl"]


def test_a_configuration_has_files_of_its_own(stand_in_hub):
    line = '{"text": "x"}\n'
    stand_in_hub.commit("org/name", {"README.md": TWO_CONFIGURATIONS, "en/1.jsonl": line, "en/0.jsonl": line, "de/0.jsonl": line})
    assert [file.name for file in resolve(name="english").files] == ["en/0.jsonl", "en/1.jsonl"]
    german = resolve(name="german")
    assert german.origin == "hf://datasets/org/name (german, train)"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"split": "trian"}, "dataset org/name has no split 'trian'; it has 'train', 'test'. Set source.hub.split."),
        (
            {"validation_split": "dev"},
            "dataset org/name has no split 'dev'; it has 'train', 'test'. Set source.validation_split.",
        ),
        ({"validation_split": "train"}, "the source: validation_split is 'train', which is the split that is read"),
        (
            {"name": "english"},
            "dataset org/name has no configuration 'english'; it has 'default'. Set source.hub.name.",
        ),
        (
            {"revision": "v9"},
            "dataset org/name has no revision 'v9'. Set source.hub.revision to a branch, tag or commit of it.",
        ),
        (
            {"path": "org/nmae"},
            "there is no dataset org/nmae at HUB, or it is private. Check the name, and HF_TOKEN if it is private.",
        ),
        (
            {"path": "org/name/more"},
            "dataset org/name/more is not named as on the hub, ORGANISATION/NAME. Check source.hub.path and source.hub.revision.",
        ),
        (
            {"path": "org/gated"},
            "dataset org/gated is gated. Ask for access on its page, and set HF_TOKEN to a token of the account that has it.",
        ),
        (
            {"path": "org/two"},
            "dataset org/two has several configurations: 'english', 'german'. Set source.hub.name to one of them.",
        ),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(stand_in_hub, asked, message):
    stand_in_hub.commit("org/name", TWO_SPLITS)
    stand_in_hub.commit("org/gated", TWO_SPLITS)
    stand_in_hub.gated.add("org/gated")
    stand_in_hub.commit("org/two", {"README.md": TWO_CONFIGURATIONS, "en/0.jsonl": "{}\n", "de/0.jsonl": "{}\n"})
    with pytest.raises(ValueError, match=r"org/|source") as caught:
        resolve(**asked)
    assert str(caught.value) == message.replace("HUB", stand_in_hub.url)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("files", [{"README.md": "No data."}, {"README.md": "Code.", "name.py": "raise SystemExit"}])
def test_a_dataset_without_data_files_is_refused_and_no_code_is_run(stand_in_hub, files):
    stand_in_hub.commit("org/name", files)
    with refusal(r"^dataset org/name at revision '[0-9a-f]{40}' cannot be read \([^\n]*\)\. Name"):
        resolve()


def test_one_file_in_both_splits_is_refused(stand_in_hub):
    data_files = "[{split: train, path: '*.jsonl'}, {split: test, path: 1.jsonl}]"
    card = f"---\nconfigs:\n- config_name: a\n  data_files: {data_files}\n---\n"
    stand_in_hub.commit("org/name", {"README.md": card, "0.jsonl": "{}\n", "1.jsonl": "{}\n"})
    with refusal(r"1\.jsonl is in both 'train', 'test'"):
        resolve(validation_split="test")


def test_a_hub_that_cannot_be_reached_is_named(stand_in_hub, monkeypatch, waits):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with refusal(r"the hub at http://127\.0\.0\.1:9 cannot be reached .*\. Check the network"):
        resolve()
    assert len(waits) == tasks.download.hub.ATTEMPTS - 1


def test_a_hub_that_changes_under_the_process_is_refused(stand_in_hub, monkeypatch):
    stand_in_hub.commit("org/name", TWO_SPLITS)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:9")
    with refusal(r"HF_ENDPOINT became .* Set it before the process starts"):
        resolve()


def test_waits_are_as_long_as_the_hub_asks_and_grow_where_it_does_not(stand_in_hub, waits):
    stand_in_hub.commit("org/name", TWO_SPLITS)
    stand_in_hub.fail("/revision/main", 429, Retry_After="77")
    stand_in_hub.fail("/revision/main", 429, ratelimit='"api";r=0;t=88')
    stand_in_hub.fail("/revision/main", 429, Retry_After="99999")
    stand_in_hub.fail("/revision/main", 503, times=2)
    resolve()
    assert waits[:3] == [77, 88, tasks.download.hub.LONGEST_WAIT]
    assert 4 <= waits[3] <= 8 <= waits[4] <= 16


def test_a_hub_that_stays_busy_is_given_up_on(stand_in_hub, tmp_path, waits):
    stand_in_hub.commit("org/name", TWO_SPLITS)
    file = resolve().files[0]
    stand_in_hub.fail(file.name, 503, times=1000)
    with refusal(r"^dataset org/name cannot be had: .* is overloaded \(HfHubHTTPError: HTTP status 503\)", OSError):
        fetch_hub(file, tmp_path)
    # An earlier version in the cache is not taken for the dataset.
    (tmp_path / "huggingface/datasets/org___name/default/0.0.0/0123").mkdir(parents=True)
    stand_in_hub.fail("/README.md", 503, times=1000)
    with refusal("is overloaded"):
        resolve()


def test_other_formats_become_parquet_of_text_and_id(stand_in_hub, tmp_path):
    texts = [f"text {i} äöü" for i in range(2345)]
    members = [{f"{i:04d}.txt": text.encode(), f"{i:04d}.json": b"{}"} for i, text in enumerate(texts)]
    archives = {
        "train-0.tar": tar(*members[:1500]),
        "train-1.tar": tar(*members[1500:]),
        "test-0.tar": tar({"0.txt": b"held out", "0.json": b"{}"}),
    }
    commit = stand_in_hub.commit("org/name", archives)
    pinned = resolve(text_column="txt", id_column="__key__", validation_split="test")
    assert [(file.name, file.split, file.immutable) for file in pinned.files] == [
        ("test.parquet", "validation", commit),
        ("train.parquet", "train", commit),
    ]
    stand_in_hub.commit("org/name", {"train-0.tar": tar({"0.txt": b"later", "0.json": b"{}"})})
    files = tmp_path / "files"
    path = fetch_hub(pinned.files[1], files)
    table = pq.read_table(path)
    assert table.column_names == ["txt", "__key__"]
    assert [text.decode() for text in table["txt"].to_pylist()] == texts
    assert table["__key__"].to_pylist()[-1] == b"2344"
    assert pq.ParquetFile(path).num_row_groups == 3
    assert list(files.iterdir()) == [path]
    assert fetch_hub(pinned.files[1], tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("text", r"dataset org/name, split 'train' has no column 'text'; it has .*'txt'.*\. Set source\.text_column\."),
        ("json", r"dataset org/name, split 'train', row 0: 'json' is dict, not text\. Set source\.text_column to another .*\."),
    ],
)
def test_other_formats_need_a_column_of_text(stand_in_hub, tmp_path, column, message):
    stand_in_hub.commit("org/name", {"train.tar": tar({"0.txt": b"a", "0.json": b'{"a": 1}'})})
    (file,) = resolve(text_column=column).files
    with refusal(f"^{message}$"):
        fetch_hub(file, tmp_path / "files")
    assert not list((tmp_path / "files").iterdir())


def test_settings_and_archives_that_only_datasets_knows_are_converted(stand_in_hub, tmp_path):
    card = "---\nconfigs:\n- config_name: semicolons\n  data_files: '*.csv'\n  sep: ;\n---\n"
    stand_in_hub.commit("org/semicolons", {"README.md": card, "0.csv": "text;n\na, b;1\n"})
    stand_in_hub.commit("org/tabs", {"0.tsv": "text\tn\na\t1\n"})
    (converted,) = resolve("org/semicolons").files
    assert pq.read_table(fetch_hub(converted, tmp_path))["text"].to_pylist() == [b"a, b"]
    assert [file.name for file in resolve("org/tabs").files] == ["0.tsv"]
    named = "hf://datasets/org/semicolons@main/0.csv"
    commit = stand_in_hub.commit("org/semicolons", {"README.md": card.replace("*.csv", named), "0.csv": "text;n"})
    moving = converted._replace(uri=f"datasets://org/semicolons@{commit}?split=train&text=text", immutable=commit)
    with refusal(f"takes {named} from another revision"):
        fetch_hub(moving, tmp_path)


def test_text_that_is_not_unicode_is_left_to_the_policy(stand_in_hub, tmp_path):
    import datasets

    rows = datasets.IterableDataset.from_generator(lambda: iter([{"text": "\ud800", "id": 7}, {"text": None, "id": None}]))
    tasks.download.hub._write_parquet(rows, ["text", "id"], "rows", tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {"text": b"\xed\xa0\x80", "id": b"7"},
        {"text": None, "id": None},
    ]


def test_files_named_by_path_are_fetched_too(stand_in_hub, tmp_path):
    stand_in_hub.commit("org/name", TWO_SPLITS)
    file = resolve().files[0]
    moving = file._replace(uri=f"hf://datasets/org/name/{file.name}", immutable=None)
    assert fetch_hub(moving, tmp_path).read_bytes() == TWO_SPLITS[file.name]
    gone = file._replace(uri=f"{file.uri}.gone")
    with refusal("dataset org/name has no such file"):
        fetch_hub(gone, tmp_path)


def test_files_of_a_bucket_are_pinned_by_their_digests(stand_in_hub, tmp_path):
    """A bucket has no revisions: a file that changes after it was found is an error that names it."""
    names = ["deep/three.jsonl", "one.jsonl", "two.jsonl"]
    files = stand_in_hub.buckets["org/texts"] = {f"a/{name}": (name, name.encode()) for name in names}
    source = Source(path="hf://buckets/org/texts/a")
    found = resolve_source(source, 0).files
    assert [(file.name, file.immutable) for file in found] == [(name, f"xet_hash:{name}") for name in names]
    assert Path(fetch_file(found[1], (source,), tmp_path).location).read_bytes() == b"one.jsonl"
    files["a/two.jsonl"] = ("other", b"other one")
    with refusal(r"hf://buckets/org/texts/a/two\.jsonl cannot be fetched .*: it changed after the build had found", OSError):
        fetch_file(found[2], (source,), tmp_path)


def test_a_tokenizer_of_the_hub_is_pinned(stand_in_hub):
    commit = stand_in_hub.commit("org/tok", {"tokenizer.json": DEMO.read_bytes()}, kind="models")
    tokenizer = load_tokenizer(TokenizerConfig(name="org/tok"))
    assert (tokenizer.revision, tokenizer.digest) == (commit, hashlib.sha256(DEMO.read_bytes()).hexdigest())
