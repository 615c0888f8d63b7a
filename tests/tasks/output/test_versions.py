"""The versions of an output: listed, pinned, gone back to, and where each came from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tasks.output.pointer import read_pointer
from tasks.output.versions import (
    at_dataset,
    check_distinct,
    find_version,
    list_versions,
    pin,
    read_origin,
    read_origin_files,
    roll_back,
    unpin,
)
from tests.faults.support import build_here, settings_of, write_notes
from tests.refusal import refusal
from tests.tasks.conftest import ON_DISK, Build


def versions_of(build: Build, count: int) -> list[str]:
    """Versions of the same few texts, one for each seed."""
    return [build("a", "b", split_seed=seed) for seed in range(count)]


def test_versions_are_listed_the_latest_first(root, build):
    one, two, three = versions_of(build, 3)
    versions = list_versions(root)
    assert [(version.version, version.state) for version in versions] == [(three, "latest"), (two, "former"), (one, "former")]
    latest = versions[0]
    assert (latest.documents, latest.tokenizer, latest.pinned, latest.until) == (4, "bytes", None, None)
    assert latest.tokens == sum(
        split.token_count for split in (flat_tokens.open(root.url).train, flat_tokens.open(root.url).validation)
    )
    assert latest.byte_count > 0
    assert all(version.at is not None for version in versions)


def test_a_rollback_goes_back_one_version_at_a_time_and_the_number_goes_on(root, build):
    one, two, three = versions_of(build, 3)
    assert [(now.version, now.sequence) for now in (roll_back(root), roll_back(root))] == [(two, 4), (one, 5)]
    assert flat_tokens.open(root.url).path.endswith(one)
    listed = [(version.version, version.state) for version in list_versions(root)]
    assert listed == [(one, "latest"), (two, "withdrawn"), (three, "withdrawn")]
    with refusal(r"no version before .* is left"):
        roll_back(root)
    if root.is_local:
        assert os.readlink(Path(root.root, "latest")) == f"versions/{one}"


def test_a_rollback_to_a_named_version_and_forward_again(root, build):
    one, two, three = versions_of(build, 3)
    assert roll_back(root, one[:6]).version == one
    pointer = read_pointer(root)
    assert ([step.version for step in pointer.former], [step.version for step in pointer.withdrawn]) == ([], [three])
    forward = roll_back(root, three)
    assert (forward.version, forward.sequence, forward.withdrawn) == (three, 5, ())
    assert roll_back(root).version == one
    assert two not in [step.version for step in read_pointer(root).former]


def test_after_a_rollback_the_next_version_follows_on_what_was_gone_back_to(root, build):
    _, two, three = versions_of(build, 3)
    roll_back(root)
    four = build("a", "b", split_seed=3)
    assert read_pointer(root).version == four
    assert roll_back(root).version == two
    assert read_pointer(root).names("withdrawn") == [three, four]


def test_nothing_is_gone_back_to_that_is_damaged_gone_or_not_meant(root, build):
    with refusal("nothing was ever published"):
        roll_back(root)
    one, two = versions_of(build, 2)
    for name, words in (
        ("nope", "no version begins with 'nope'"),
        ("", "not the name"),
        ("../x", "not the name"),
        (two, "already"),
    ):
        with refusal(words):
            roll_back(root, name)
    root.remove(f"versions/{one}/train/seq_starts/c/0")
    with refusal("is missing"):
        roll_back(root)
    assert (read_pointer(root).version, read_pointer(root).sequence) == (two, 2)


def test_a_name_may_be_shortened_where_only_one_version_begins_so(tmp_path):
    root = Store.at(tmp_path)
    for name in ("abc1", "abc2", "b"):
        root.put(f"versions/{name}/zarr.json", b"{}")
    assert find_version(root, "b") == "b"
    assert find_version(root, "abc1") == "abc1"
    with refusal("several versions begin with 'abc': abc1, abc2"):
        find_version(root, "abc")


def test_a_pin_is_seen_until_it_is_taken_away(root, build):
    one, _ = versions_of(build, 2)
    assert pin(root, one[:8], "for the paper") == one
    assert {version.version: version.pinned for version in list_versions(root)}[one] == "for the paper"
    with refusal("'' is not the name of a version"):
        unpin(root, "")  # the only pin begins so, but nobody has named it
    assert unpin(root, one[:8]) == one
    assert all(version.pinned is None for version in list_versions(root))
    with refusal("is not pinned; pinned are: none"):
        unpin(root, one)
    with refusal("no version begins"):
        pin(root, "nope")


@pytest.mark.parametrize("record", ["held.json", "pins/x.json"])
def test_records_of_an_earlier_checkout_are_named(root, record):
    """Whoever pinned a version there is told before it may be collected."""
    root.put(record, b"{}")
    with refusal(r"is of an earlier checkout\. Pins and the version that waits are in latest\.json now"):
        collect(root, Policy())


def test_two_names_of_one_place_are_refused(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path)
    for other in ("out", "./out/", "link", f"file://{tmp_path}/out"):
        with refusal(f"{tmp_path}/out and {other} are one place"):
            check_distinct([f"{tmp_path}/out", f"{tmp_path}/other", other])
    with refusal("are one place"):
        check_distinct(["memory://a/out", "memory://a/out/"])
    check_distinct([f"{tmp_path}/out", f"{tmp_path}/out-2", "memory://out"])


def test_where_a_version_came_from_is_remembered_and_when_it_was_first_there(root, build, tmp_path):
    (version,) = versions_of(build, 1)
    origin = read_origin(root, version)
    assert origin is not None
    assert origin.config["sources"][0]["path"] == str(tmp_path / "in/a.jsonl")
    files = read_origin_files(root, version)
    assert files is not None
    assert [file.name for file in files.files] == [file.name for file in files.found] == ["a.jsonl", "b.jsonl"]
    early = origin.model_copy(update={"at": origin.at.replace(year=2020)})
    root.put(f"origins/{version}.json", early.model_dump_json().encode())
    versions_of(build, 1)
    again = read_origin(root, version)
    assert again is not None
    assert again.at.year == 2020


def test_an_origin_is_recorded_as_json_writes_it(tmp_path):
    """Names in any alphabet, and the digits of small numbers."""
    write_notes(tmp_path / "in" / 'a"\\é海.jsonl', 4)
    built = build_here(settings_of(tmp_path / "out", tmp_path / "in", validation_fraction=0.00001))
    record = (tmp_path / "out/origins" / f"{built.version}.json").read_text()
    assert record == json.dumps(json.loads(record), ensure_ascii=False, separators=(",", ":")) + "\n"


@pytest.mark.parametrize("spoiled", [b"", b"{}", b"[]", b"\xff"])
def test_an_origin_that_cannot_be_read_is_none(tmp_path, spoiled):
    root = Store.at(tmp_path)
    root.put("origins/x.json", spoiled)
    assert read_origin(root, "x") is None


def test_a_dataset_is_found_by_its_output_or_a_version(root, build):
    one, two = versions_of(build, 2)
    for path, version in ((root.url, two), (f"{root.url}/versions/{one}", one)):
        found, name = at_dataset(path)
        assert (found.url, name) == (root.url, version)


@ON_DISK
def test_a_dataset_is_found_by_the_link_too(root, build, tmp_path):
    (version,) = versions_of(build, 1)
    found, name = at_dataset(f"{root.root}/latest")
    assert (found.root, name) == (root.root, version)
    with refusal("is neither a configuration file nor an output"):
        at_dataset(str(tmp_path / "in"))
    with refusal(r"latest\.json: is a file, not a dataset\. Give the output"):
        at_dataset(f"{root.root}/latest.json")
