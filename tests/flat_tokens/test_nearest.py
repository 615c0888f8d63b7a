"""What is said of a path that is no dataset: what is there, and the nearest that is one."""

import json
import os
import re
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens import TokenBatch, write_dataset
from flat_tokens.reader import datasets_below
from flat_tokens.stores.store import Store
from tests.refusal import refusal

BATCH = TokenBatch.from_sequences([[1, 2, 3]])


def output(path: Path, version: str = "one") -> Path:
    """A build's output, by what readers look at."""
    write_dataset(path / "versions" / version, [BATCH])
    (path / "latest.json").write_text(json.dumps({"version": version, "manifest_sha256": "", "sequence": 1}))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    output(tmp_path / "out/web")
    write_dataset(tmp_path / "out/deep/er/plain", [BATCH])
    (tmp_path / "empty").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files/notes.txt").write_text("notes")
    (tmp_path / "web.yaml").write_text("name: web\noutput: out/web  # here\nsource: {}\n")
    return tmp_path


SAID = {
    "out/wep": "there is nothing here. Did you mean: {place}/out/web?",
    "out/other": "there is nothing here. Did you mean: {place}/out/web?",
    "out/deep/x": "there is nothing here. The nearest directory that is there is {place}/out/deep.",
    "files/no/where": "there is nothing here. The nearest directory that is there is {place}/files.",
    "out/web/latest": "there is nothing here. Name the dataset around it: {place}/out/web",
    "out": "is not a dataset itself. Name one below: {place}/out/web, {place}/out/deep/er/plain",
    "empty": "is an empty directory. A dataset is ",
    "files": "is not a flat-tokens dataset. A dataset is a build's output",
    "files/notes.txt": "is a file, no flat-tokens dataset. A dataset is ",
    "web.yaml": "is a configuration, not a dataset. Name the output of its build: out/web",
    "out/web/versions": "holds the versions of an output. Name the dataset around it: {place}/out/web",
    "out/web/latest.json": "is a file of a dataset. Name the dataset around it: {place}/out/web",
    "out/web/versions/one/train": "is one flat-tokens array, not a dataset with train and validation. "
    "Name the dataset around it: {place}/out/web/versions/one",
    "out/deep/er/plain/train/seq_starts/c": "is a part of a dataset, not a dataset. Name the dataset around it: "
    "{place}/out/deep/er/plain",
}


@pytest.mark.parametrize("path", SAID)
def test_what_is_there_and_the_nearest_dataset_are_named(place, path):
    said = re.escape(f"{place}/{path}: {SAID[path].format(place=place)}")
    with refusal(f"^{said}", FileNotFoundError):
        flat_tokens.open(place / path)


def test_many_datasets_are_counted(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}/latest.json").touch()
    with refusal(rf"below: {tmp_path}/0, .*{tmp_path}/4 and 3 more$", FileNotFoundError):
        flat_tokens.open(tmp_path)


def test_a_url_is_answered_in_the_same_way():
    write_dataset("memory://nearest/web", [BATCH])
    with refusal(r"nearest/wep: there is nothing here. Did you mean: memory://.*/web\?", FileNotFoundError):
        flat_tokens.open("memory://nearest/wep")


def test_hidden_directories_links_and_what_is_inside_a_dataset_are_not_looked_into(place):
    output(place / "out/.hidden")
    os.symlink(place / "out", place / "out/again")
    assert [store.url for store in datasets_below(Store.at(place))] == [f"{place}/out/web", f"{place}/out/deep/er/plain"]


def test_inspect_lists_the_datasets_below(place, tool):
    output(place / "out/broken")
    (place / "out/broken/latest.json").write_text("{}")
    said = tool.json("inspect", place / "out")
    assert [(one["path"], one["token_count"], one["format"]) for one in said["datasets"]] == [
        (f"{place}/out/web", 3, "flat-tokens"),
        (f"{place}/out/deep/er/plain", 3, "flat-tokens"),
    ]
    assert [one["path"] for one in said["not_read"]] == [f"{place}/out/broken"]
    lines = tool.lines("inspect", place / "out")
    assert lines[0] == f"{place}/out: no dataset itself, 2 datasets below"
    assert lines[3].split() == ["web", "flat-tokens", "one", "3", "1"]


def test_inspect_lists_exports_below_but_takes_one_in_several_directories_for_one(place, tool):
    for format in ("mds", "modalities"):
        tool.out("export", place / "out/web", place / "exports" / format, "--to", format)
    listed = tool.json("inspect", place / "exports")["datasets"]
    found = {(one["path"].removeprefix(f"{place}/exports/"), one["format"]) for one in listed}
    assert found == {("mds", "mds"), ("modalities", "modalities")}
    assert tool.json("inspect", place / "exports/mds")["format"] == "mds"
