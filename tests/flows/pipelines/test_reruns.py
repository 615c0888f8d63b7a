"""Refreshes and reruns for another tokenizer: only new content is tokenized, and nothing where there is none."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
import tasks.shards.write
from flat_tokens.stores.store import Store
from flows.pipelines.refresh import RefreshResult
from flows.pipelines.retokenize import BESIDE, base_of, config_of, reruns_of, short_name
from tasks.config import BuildConfig, TokenizerConfig
from tasks.garbage import Policy
from tasks.output.pointer import read_pointer
from tasks.output.versions import list_versions, roll_back
from tasks.progress import meter
from tests.faults.support import (
    Settings,
    build_here,
    derive_here,
    digests,
    refresh_here,
    retokenize_here,
    same_bytes,
    settings_of,
    write_notes,
)
from tests.flat_tokens.demo import TOKENIZER
from tests.made import read_docs
from tests.processes import ROOT
from tests.refusal import refusal
from tests.sources import write_rows
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401  a fixture


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files whose slices were tokenized, in order."""
    names = []
    real = tasks.shards.write.tokenize_slice

    def tokenize(part: Any, *rest: Any) -> Any:
        names.append(part.ranges[0].file.name)
        return real(part, *rest)

    monkeypatch.setattr("tasks.shards.write.tokenize_slice", tokenize)
    return names


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A directory of three files, each a slice; half of the documents validation."""
    for name in ("a", "b", "c"):
        write_notes(tmp_path / "in" / f"{name}.jsonl", 20)
    return settings_of(tmp_path / "out", tmp_path / "in", of_sources={"name": "notes"}, slice_bytes=10_000)


def changed_files(refreshed: RefreshResult) -> list[tuple[str, str]]:
    return [(change.kind, change.name) for change in refreshed.changes.files]


def membership(output: str | Path) -> dict[int, str]:
    """Which split each document is in, by its key."""
    return {doc.key: split for split, docs in read_docs(output).items() for doc in docs}


REFRESHES = """
import sys
from pathlib import Path
from flows.commands.build import read_config
from flows.pipelines.refresh import refresh
from flows.runners.processes import Threads
from tasks.garbage import Policy

config = read_config(Path(sys.argv[1]), [])
for _ in sys.stdin:
    with Threads(2) as runner:
        print(refresh(config, runner, Policy(keep_versions=1, grace_days=0)).version, flush=True)
"""


@pytest.mark.slow
def test_two_refreshes_at_once_that_remove_versions_both_succeed(settings, tmp_path):
    """Each removes, at its end, the version that the other began with."""
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    with contextlib.ExitStack() as held:
        command = [sys.executable, "-c", REFRESHES, str(tmp_path / "config.yaml")]
        both = [
            held.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True))
            for _ in range(2)
        ]
        for round_ in range(20):
            write_notes(tmp_path / "in/d.jsonl", round_ + 1)
            for one in both:
                one.stdin.write("go\n")
                one.stdin.flush()
            versions = {one.stdout.readline() for one in both if one.stdout is not None}
            assert len(versions) == 1
            assert flat_tokens.verify(settings["output"], "full").path.endswith(f"/{versions.pop().strip()}")
        for one in both:
            one.communicate(timeout=60)
            assert one.returncode == 0
    assert len(list_versions(Store.at(settings["output"]))) <= 2


def test_a_directory_gains_changes_and_loses_a_file(settings, tmp_path, tokenized):
    """Only new content is tokenized; the old version's readers see nothing of it; documents stay in their splits."""
    first = refresh_here(settings)
    assert (first.outcome, first.sequence, first.changes.headline) == ("published", 1, "3 files added")
    assert sorted(tokenized) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    before, old_files = membership(first.path), digests(Path(first.path))
    tokenized.clear()

    write_notes(tmp_path / "in/d.jsonl", 20)
    with (tmp_path / "in/b.jsonl").open("a") as file:
        file.write(json.dumps({"id": "b-new", "text": "another one"}) + "\n")
    (tmp_path / "in/c.jsonl").unlink()
    second = refresh_here(settings)

    assert sorted(tokenized) == ["b.jsonl", "d.jsonl"]
    (progress,) = (one for one in meter.stages() if one.stage == "tokenize")
    assert 0 < progress.stored < progress.total
    assert (second.outcome, second.sequence, second.changes.before) == ("published", 2, first.version)
    assert changed_files(second) == [("changed", "b.jsonl"), ("removed", "c.jsonl"), ("added", "d.jsonl")]
    assert digests(Path(first.path)) == old_files
    after = membership(settings["output"])
    assert len(before.items() & after.items()) == len(before.keys() & after.keys()) == 40


def stamps_of(directory: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def test_where_nothing_changed_nothing_is_done(settings, tmp_path, tokenized, monkeypatch):
    """Not a file is written, even if the sources were touched or their names come in another order."""
    monkeypatch.setattr("tasks.download.table.GRAIN_NS", 1 << 60)  # on a slow machine, too, files are too young to be known
    first = refresh_here(settings)
    (tmp_path / "in/a.jsonl").touch()
    (tmp_path / "out/latest").unlink()
    refresh_here(settings)  # mends the link, and remembers how the files are now
    stamps = stamps_of(tmp_path / "out")
    tokenized.clear()
    again = refresh_here({**settings, "workers": 1, "slice_bytes": 1000, "verify_level": "full"})
    assert (again.outcome, again.version, again.sequence, again.build) == ("unchanged", first.version, 1, None)
    assert again.headline == f"nothing changed: {first.version} is what the sources give"
    assert tokenized == []
    assert {path.name for path, _ in stamps_of(tmp_path / "out") - stamps} <= {f"{first.version}.json"}
    assert (tmp_path / "out/latest/zarr.json").exists()


def test_what_was_rolled_back_is_not_brought_back_by_a_refresh(settings, tmp_path, tokenized):
    """Until the sources give something else again, or somebody builds it on purpose."""
    first = refresh_here(settings)
    (tmp_path / "in/c.jsonl").unlink()
    second = refresh_here(settings)
    roll_back(Store.at(settings["output"]))
    tokenized.clear()
    left = refresh_here(settings)
    assert (left.outcome, left.version, left.sequence) == ("withdrawn", first.version, 3)
    assert second.version in left.headline
    assert "python -m flows build" in left.headline
    write_notes(tmp_path / "in/d.jsonl", 2)
    third = refresh_here(settings)
    assert (third.outcome, third.sequence, tokenized) == ("published", 4, ["d.jsonl"])
    (tmp_path / "in/d.jsonl").unlink()
    assert build_here(settings).version == second.version
    assert refresh_here(settings).outcome == "unchanged"


def test_what_a_policy_does_not_keep_is_removed_though_nothing_changed(settings, tmp_path):
    first = refresh_here(settings)
    write_notes(tmp_path / "in/more.jsonl", 2)
    refresh_here(settings)
    now = refresh_here(settings, Policy(keep_versions=1, grace_days=0))
    assert (now.outcome, now.removed) == ("unchanged", (first.version,))


def test_a_latest_version_that_is_gone_or_damaged_is_no_ground_to_do_nothing(settings, tmp_path):
    """One that is gone is built again, unless the sources give a version that was rolled back."""
    first = refresh_here(settings)
    manifest = Path(first.path, "manifest.json")
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with refusal(r"another manifest\.json than it has: one of them is damaged"):
        refresh_here(settings)
    shutil.rmtree(first.path)
    again = refresh_here(settings)
    assert (again.outcome, again.version, again.sequence) == ("published", first.version, 1)
    flat_tokens.verify(settings["output"], "full")
    write_notes(tmp_path / "in/d.jsonl", 3)
    second = refresh_here(settings)
    roll_back(Store.at(settings["output"]))
    shutil.rmtree(first.path)
    with refusal(f"the latest version, {first.version}, is gone, and the sources give {second.version}"):
        refresh_here(settings)


def hub_settings(tmp_path: Path) -> Settings:
    """A dataset of the hub, whose files are a slice each."""
    source = {"name": "hub", "hub": {"path": "org/notes"}, "id_column": "id"}
    return {**settings_of(tmp_path / "out", slice_bytes=100), "sources": [source]}


def test_a_hub_revision_that_moves_is_a_new_version(stand_in_hub, tmp_path, tokenized):
    """On a machine without the downloads: a branch that stays is found out without a file being asked for; else what is new is
    fetched. Parquet files are cut by their ends, and known by their contents at every revision.
    """
    cache = tmp_path / "huggingface/hub"

    def files(**texts: str) -> dict[str, bytes]:
        return {
            f"{name}.parquet": write_rows(
                tmp_path / f"local/{name}.parquet", [{"id": f"{name} {i}", "text": text} for i in range(9)], group=9
            ).read_bytes()
            for name, text in texts.items()
        }

    commit = stand_in_hub.commit("org/notes", files(a="one", b="two", c="three"))
    settings = hub_settings(tmp_path)
    first = refresh_here(settings)
    shutil.rmtree(cache)
    asked = stand_in_hub.count("/resolve/", "GET")
    unchanged = refresh_here(settings)
    assert (unchanged.outcome, unchanged.version) == ("unchanged", first.version)
    assert stand_in_hub.count("/resolve/", "GET") == asked

    moved = stand_in_hub.commit("org/notes", files(a="one", b="two", c="four"))
    tokenized.clear()
    second = refresh_here(settings)
    assert (second.outcome, second.build.slices_reused, tokenized) == ("published", 2, ["c.parquet"])
    assert changed_files(second) == [("changed", "c.parquet")]
    assert second.changes.settings == (f"hub.revision {commit[:12]} -> {moved[:12]}",)
    assert [path.name for path in cache.rglob("*.parquet")] == ["c.parquet"]


def test_other_tokenizers_get_the_same_documents_in_the_same_splits_beside_the_dataset(settings, tmp_path):
    first = refresh_here(settings)
    (result,) = retokenize_here(settings, TOKENIZER)
    assert result.path.startswith(f"{tmp_path / 'out-tokenizer'}/versions/")
    assert membership(tmp_path / "out-tokenizer") == membership(tmp_path / "out")
    assert flat_tokens.open(tmp_path / "out-tokenizer").train.token_count < flat_tokens.open(tmp_path / "out").train.token_count
    now = read_pointer(Store.at(settings["output"]))
    assert (now.version, now.sequence) == (first.version, 1)
    calm = build_here({**settings, "output": str(tmp_path / "calm"), "tokenizer": TOKENIZER})
    assert same_bytes(result, calm)


def test_a_rerun_uses_the_datasets_downloads(stand_in_hub, tmp_path):
    """Also of a converted dataset, which lies in the dataset's cache, and at the commit that the dataset is of."""
    parts = {
        "README.md": '---\nconfigs:\n- config_name: default\n  data_files: a.tsv\n  sep: "|"\n---\n',
        "a.tsv": "id|text\n1|one\n2|two\n",
    }
    commit = stand_in_hub.commit("org/notes", parts)
    settings = hub_settings(tmp_path)
    first = refresh_here(settings)
    stand_in_hub.commit("org/notes", {**parts, "a.tsv": "id|text\n3|three\n"})
    asked = stand_in_hub.count("/resolve/", "GET")
    for dataset in (settings, first.path):
        (result,) = retokenize_here(dataset, TOKENIZER)
        assert flat_tokens.open(result.path).manifest["provenance"]["sources"][0]["revision"] == commit
        assert membership(result.path) == membership(first.path)
    assert stand_in_hub.count("a.tsv", "GET") <= asked
    kept = [path.suffix for path in (tmp_path / "out-tokenizer/_cache/files").glob("*")]
    assert set(kept) <= {".table"}  # what is known of the files, none of them


def test_a_dataset_is_enough_for_a_rerun_from_any_directory(settings, tmp_path, monkeypatch):
    """Relative paths were remembered as what they meant."""
    monkeypatch.chdir(tmp_path)
    relative = {**settings, "output": "out", "sources": [{**settings["sources"][0], "path": "in"}]}
    first = refresh_here(relative)
    monkeypatch.chdir("/")
    root = tmp_path / "out"
    (result,) = retokenize_here(str(root / "latest"), "bytes", output=f"{tmp_path}/copy")
    assert same_bytes(result, first)
    assert config_of(Store.at(root), first.version).sources[0].path == str(tmp_path / "in")
    assert refresh_here(config_of(Store.at(root), first.version)).outcome == "unchanged"


def test_text_that_is_not_the_datasets_any_more_is_refused(settings, tmp_path):
    """Two tokenizers on two texts could not be compared."""
    refresh_here(settings)
    (tmp_path / "in/c.jsonl").unlink()
    write_notes(tmp_path / "in/d.jsonl", 1)
    with refusal(r"no longer gives the text of version .*: c.jsonl removed, d.jsonl added. Refresh"):
        retokenize_here(settings, TOKENIZER)
    renamed = {**settings, "sources": [{**settings["sources"][0], "name": "other"}]}
    with refusal(r"has the sources other, but version .* was made of notes"):
        retokenize_here(renamed, TOKENIZER)


def test_a_dataset_made_of_datasets_has_no_text_to_tokenize_again(settings, tmp_path):
    refresh_here(settings)
    derive_here("merge", settings["output"], settings["output"], output=tmp_path / "both")
    with refusal(r"was made of the datasets dataset, dataset, not of text. Retokenize each of them"):
        retokenize_here(str(tmp_path / "both"), "bytes")


def test_a_configuration_that_was_never_built_is_built_for_the_tokenizers(settings, tmp_path):
    (result,) = retokenize_here(settings, TOKENIZER)
    assert flat_tokens.verify(tmp_path / "out-tokenizer", "full").path == result.path
    assert not (tmp_path / "out").exists()


def test_reruns_have_outputs_of_their_own(settings, tmp_path):
    base = base_of(BuildConfig.model_validate(settings))
    outputs = [config.output for config in reruns_of(base, ["bytes", TOKENIZER])]
    assert outputs == [f"{tmp_path}/out-bytes", f"{tmp_path}/out-tokenizer"]
    for tokenizers, output in ((["bytes", "bytes"], BESIDE), (["bytes"], "{output}")):
        with refusal("would be the output of two"):
            reruns_of(base, tokenizers, output)
    with refusal(r"x-\{tokeniser\}: \{tokeniser\} is not known; \{output\} and \{tokenizer\} are"):
        reruns_of(base, ["bytes"], f"{tmp_path}/x-{{tokeniser}}")
    with refusal("are within each other"):
        reruns_of(base, ["bytes"], f"{tmp_path}/in/out")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("org/some-1.5", "some-1.5"),
        ("org/some.model", "some"),
        ("/x/my tok.json", "my-tok"),
        ("..", "tokenizer"),
    ],
)
def test_a_tokenizer_has_a_short_name(name, short):
    assert short_name(TokenizerConfig(name=name)) == short


def test_a_dataset_whose_settings_are_not_known_or_understood_needs_its_configuration(settings):
    """The record that has them is named, and the value that is wrong."""
    result = build_here(settings)
    record = Path(settings["output"], "origins", f"{result.version}.json")
    facts = json.loads(record.read_bytes())
    record.write_text(json.dumps({**facts, "config": {**facts["config"], "sources": 7}}))
    with refusal(rf"{record}: has settings that are not understood here \(sources: .+Give the conf"):
        config_of(Store.at(settings["output"]), result.version)
    record.unlink()
    with refusal(r"is not recorded .* Give its configuration file"):
        base_of(settings["output"])
    assert base_of(BuildConfig.model_validate(settings)).version == result.version
