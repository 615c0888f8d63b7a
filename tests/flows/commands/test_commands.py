"""The commands for a dataset's life after its first build, as a person meets them, without a server."""

import json
import os
from pathlib import Path

import pytest

from flat_tokens.stores.store import Store
from tasks.output.leases import build_lease
from tests.faults.support import write_notes
from tests.flat_tokens.demo import TOKENIZER


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration of a directory with two files, built."""
    for name in ("a", "b"):
        write_notes(tmp_path / "in" / f"{name}.jsonl", 5)
    path = tmp_path / "config.yaml"
    path.write_text(f"output: {tmp_path / 'out'}\nsource: {{path: {tmp_path / 'in'}, id_column: id}}\ntokenizer: bytes\n")
    return path


def test_a_datasets_life(config, tmp_path, terminal):
    """What a person sees from the first refresh to the removal of what is not needed any more."""
    output, lines = tmp_path / "out", terminal.lines
    first = lines("refresh", config)
    assert first[0].endswith(": 2 files added")
    assert lines("refresh", config)[0].startswith("nothing changed: ")

    (tmp_path / "in/b.jsonl").unlink()
    write_notes(tmp_path / "in/c.jsonl", 7)
    second = lines("refresh", config)
    assert second[0].endswith(": 1 file added, 1 removed")
    assert "  source     documents 12 (+2), tokens" in "\n".join(second)

    table = lines("versions", output)
    assert table[0].split() == ["version", "made", "(UTC)", "documents", "tokens", "tokenizer", "layout", "size"]
    latest, former = (line.split()[0] for line in table[1:])
    assert table[1].endswith("latest")
    assert "former until" in table[2]

    assert lines("pin", output, former, "--note", "the paper") == [f"pinned {former}"]
    assert lines("versions", output)[2].endswith("pinned: the paper")
    assert lines("rollback", output) == [f"latest is now {former} (number 3). It was {latest}, which is withdrawn."]
    assert os.readlink(output / "latest") == f"versions/{former}"
    assert "was rolled back" in lines("refresh", config)[0]
    assert lines("rollback", output, latest[:5]) == [f"latest is now {latest} (number 4). It was {former}."]
    assert lines("unpin", output, former) == [f"unpinned {former}"]

    status = terminal.out("status", output)
    assert f"latest     {latest}, made " in status
    assert "pinned     none" in status
    assert "now        no build is under way" in status
    with build_lease(Store.at(output), output / "_cache"):
        assert "now        a build is running" in terminal.out("status", config)

    assert lines("gc", output)[0] == "nothing to remove"
    assert "at least one version is kept" in terminal.errors("gc", output, "--keep", "0")
    assert "should be 0 or more" in terminal.errors("gc", output, "--days", "nan")
    dry = lines("gc", output, "--keep", "1", "--days", "0")
    assert dry[0].startswith("may go: 2 things")
    assert dry[0].endswith("--delete removes it.")
    done = lines("gc", output, "--keep", "1", "--days", "0", "--delete")
    assert done[0].startswith("removed 2 things")
    assert done[-1] == f"  kept: {latest} (latest)"
    assert len(lines("versions", output)) == 2


def test_the_last_refresh_is_told_although_nothing_was_new(config, tmp_path, terminal):
    terminal.lines("refresh", config)
    (origin,) = (tmp_path / "out/origins").glob("*.json")
    then = {**json.loads(origin.read_text()), "at": "2020-01-02T03:04:00Z", "looked_up": "2020-01-02T03:04:00Z"}
    origin.write_text(json.dumps(then))
    assert "refreshed  2020-01-02 03:04 UTC, " in terminal.out("status", config)
    terminal.lines("refresh", config)
    told = terminal.json("status", config)
    assert (told["last_refresh"] > "2024", told["latest"]["at"]) == (True, "2020-01-02T03:04:00Z")
    del then["looked_up"]  # as a checkout before this one wrote it
    origin.write_text(json.dumps(then))
    assert "refreshed  2020-01-02 03:04 UTC, " in terminal.out("status", config)


def test_results_as_json(config, tmp_path, terminal):
    output = tmp_path / "out"
    refreshed = terminal.json("refresh", config)
    assert terminal.json("versions", output)[0]["version"] == refreshed["version"]
    collected = terminal.json("gc", output)
    assert (collected["garbage"], collected["deleted"]) == ([], False)
    policy = terminal.lines("refresh", config, "--keep", "1", "--days", "0", "--set", "split_seed=1")
    assert f"  removed    version {refreshed['version']}" in policy


def test_what_a_first_build_left_is_told_and_removed(config, tmp_path, terminal):
    """Nothing was ever published there, while it runs and when it was cancelled."""
    output = tmp_path / "out"
    shard, unfinished = output / "_cache" / ("a" * 64), output / "_cache/unfinished/attempt"
    for directory in (shard, unfinished):
        directory.mkdir(parents=True)
        (directory / "tokens").write_bytes(bytes(5000))
    with build_lease(Store.at(str(output)), tmp_path):
        status, garbage = ("\n".join(terminal.lines(command, config)) for command in ("status", "gc"))
    assert "latest      nothing is published yet" in status
    assert "unfinished  10.0 kB of builds that have not published" in status
    assert "now         a build is running" in status
    assert "a build is running, or another collection: token shards, downloads and unfinished versions would be left" in garbage
    assert "kept for builds that are run again: 5.0 kB" in terminal.out("gc", output)
    assert terminal.lines("gc", output, "--days", "0", "--delete")[0] == "removed 2 things, 10.0 kB"
    assert not list(output.rglob("tokens"))


def test_staging_of_a_build_that_was_cancelled_is_told(config, tmp_path, terminal):
    """A full disk may be full of it, and nothing else says so before gc does."""
    output = tmp_path / "out"
    staged = output / "_staging/build/attempt"
    staged.mkdir(parents=True)
    (staged / "tokens").write_bytes(bytes(5000))
    told = "staging    5.0 kB of processes that are gone: the next build removes it, and so does 'gc --delete'"
    assert told in terminal.out("status", output)
    terminal.lines("build", config)
    assert not staged.exists()


def test_a_rerun_that_cannot_go_everywhere_goes_nowhere(config, tmp_path, terminal):
    """Not into the dataset itself, under whatever name, and not to the first of two outputs where the second cannot be had."""
    terminal.lines("build", config)
    output = tmp_path / "out"
    before = (output / "latest.json").read_bytes()
    for place, words in (
        (f"file://{output}", "are one place"),
        ("{output}", "would be the output of two"),
        ("", "is not a path or URL"),
    ):
        status, _, errors = terminal("retokenize", "--trust-records", output, "--tokenizer", TOKENIZER, "--output", place)
        assert (status, (output / "latest.json").read_bytes()) == (1, before)
        assert words in errors

    (tmp_path / "out-tokenizer").touch()
    errors = terminal.errors("retokenize", "--trust-records", output, "--tokenizer", "bytes", "--tokenizer", TOKENIZER, status=1)
    assert f"cannot write to output {tmp_path}/out-tokenizer" in errors
    assert not (tmp_path / "out-bytes/versions").exists()


def test_a_datasets_own_record_is_read_with_consent_or_below_roots(config, tmp_path, terminal, monkeypatch):
    """Whoever made a dataset wrote into it what a refresh of it reads."""
    terminal.lines("build", config)
    output = tmp_path / "out"
    for command in (["refresh", output], ["retokenize", output, "--tokenizer", "bytes"]):
        status, out, errors = terminal(*command)
        assert (status, out) == (2, "")
        assert f"the record of {output} names the source: {tmp_path / 'in'}" in errors
        assert "--trust-records" in errors
        assert not (tmp_path / "out-bytes").exists()
    assert terminal.lines("refresh", output, "--trust-records")[0].startswith("nothing changed: ")
    monkeypatch.setenv("FLAT_TOKENS_OUTPUT_ROOTS", str(tmp_path))
    monkeypatch.setenv("FLAT_TOKENS_INPUT_ROOTS", str(tmp_path / "in"))
    assert terminal.lines("refresh", output)[0].startswith("nothing changed: ")
    monkeypatch.setenv("FLAT_TOKENS_OUTPUT_ROOTS", str(output))
    monkeypatch.setenv("FLAT_TOKENS_INPUT_ROOTS", str(tmp_path / "elsewhere"))
    for consent in ([], ["--trust-records"]):
        errors = terminal.errors("refresh", output, *consent)
        assert "may not be read here" in errors
