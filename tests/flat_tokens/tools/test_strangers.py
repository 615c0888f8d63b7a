"""Datasets of strangers: what they say of files and servers is not followed, and what they are called moves no terminal."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.sources import Locator, place_below
from flat_tokens.tools.terminal import VISIBLE, line, markdown
from tests.damage import change_file
from tests.flat_tokens.demo import build_lines
from tests.made import write_sequences
from tests.processes import serving

EVIL = "\x1b]52;c;ZXZpbA==\x07 \x1b[2K\rright\n\x9b2J\x7f\u202e<img src=x onerror=alert(1)>|`[a](javascript:b)"


@contextmanager
def requests_to_a_server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server on this machine, which has the source of the dataset, and the paths that it was asked for."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "in")))) as url:
        yield url, asked


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A build's output of two documents, whose source is still where it was."""
    build_lines(tmp_path, "one", "two")
    shutil.rmtree(tmp_path / "out/_cache")
    return tmp_path / "out"


def change(output: Path, what: dict[str, Any]) -> None:
    """Change the provenance in the manifest."""
    (path,) = output.glob("versions/*/manifest.json")
    change_file(path, {"provenance": what})
    change_file(output / "latest.json", {"manifest_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})


def record(output: Path, **settings: Any) -> None:
    """Change the configuration in the record of the run."""
    (path,) = output.glob("runs/*.json")
    change_file(path, {"config": settings})


def change_source(output: Path, **facts: Any) -> None:
    """Change the one file of the one source in the manifest."""
    change(output, {"sources": {0: {"files": {0: facts}}}})


def commands(output: Path) -> list[list[str]]:
    return [["trace", str(output), "--sequence", "0"], ["verify", str(output), "--sample", "1/1"]]


CHAINS = ("{}/x.jsonl", "reference::{}/refs.json", "simplecache::{}/x.jsonl", "zip://x::{}/a.zip", "filecache::reference::{}/x")


@pytest.mark.parametrize("url", CHAINS)
def test_no_server_is_asked_for_what_a_manifest_or_a_record_names(dataset, tmp_path, url, tool):
    with requests_to_a_server(tmp_path) as (server, asked):
        record(dataset, sources=[{"path": url.format(server)}])
        change(dataset, {"sources": {0: {"from": url.format(server)}}})
        for command in commands(dataset):
            tool(*command)
        change_source(dataset, name=url.format(server))
        for command in commands(dataset):
            tool(*command, "--source", dataset.parent / "in")
            if "::" in url:
                tool(*command, "--trust-records")
        assert asked == []


def test_with_consent_a_plain_url_is_read(dataset, tmp_path, tool):
    """So the tests of what is not asked for test something."""
    shutil.copytree(tmp_path / "in", tmp_path / "in/texts")
    with requests_to_a_server(tmp_path) as (server, asked):
        for path, origin in ((f"{server}/x.jsonl", ""), (f"{server}/texts", ""), (None, server)):
            record(dataset, sources=[{"path": path}])
            change(dataset, {"sources": {0: {"from": origin}}})
            assert "text from  the source" in tool.out(*commands(dataset)[0], "--trust-records")
        assert set(asked) == {"/x.jsonl", "/texts/x.jsonl"}


def test_without_consent_the_record_of_a_run_opens_no_file(dataset, tool):
    said = tool.out(*commands(dataset)[0])
    assert "x.jsonl is not found; say where it is with --source, or trust the dataset's own records: --trust-records" in said
    assert "text from  the source" in tool.out(*commands(dataset)[0], "--source", dataset.parent / "in")


def test_a_name_leads_to_regular_files_below_the_directory_alone(tmp_path, dataset):
    given, outside = tmp_path / "given", tmp_path / "outside"
    given.mkdir()
    outside.mkdir()
    (outside / "x.jsonl").write_bytes(b"")
    (given / "zero").symlink_to("/dev/zero")
    (given / "link").symlink_to(outside / "x.jsonl")
    (given / "away").symlink_to(outside)
    os.mkfifo(given / "pipe")
    for name in ("/dev/zero", "dev/zero", "../../dev/zero", "zero", "link", "away/x.jsonl", "pipe", "", ".", "a\0b"):
        change_source(dataset, name=name, size=0)
        corpus = open_corpus(dataset)
        (file,) = corpus.sources[0].files
        assert [Locator(corpus, [str(given)], trusted).find(file) for trusted in (False, True)] == [None, None], name


def test_files_of_the_given_directory_are_found_through_links_within_it(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a b#?.txt").write_bytes(b"")
    (tmp_path / "real/link").symlink_to("a b#?.txt")
    (tmp_path / "given").symlink_to("real")
    for base in (str(tmp_path / "given"), f"file://{tmp_path}/given/"):
        assert place_below(base, "link") == str(tmp_path / "real/a b#?.txt")
    assert place_below("https://host/d", "a b#?.txt") == "https://host/d/a%20b%23%3F.txt"
    assert place_below("memory://d/", "a b#?.txt") == "memory://d/a b#?.txt"
    for url in ("reference://x", "HTTP://host", "data://x", "zip://a", "ftp://host", "memory://x://y"):
        assert place_below(url, "x") is None
    assert place_below(str(tmp_path), "\ud800") is None
    for name in ("../x", "a/../../x", "/x", "x::http://host/y"):
        assert place_below("s3://bucket/d", name) is None


@pytest.mark.parametrize("sha256", ["../../../outside", "/etc/hostname", "linked"])
def test_a_copy_that_a_build_left_lies_in_its_output(tmp_path, dataset, sha256):
    (tmp_path / "outside").write_bytes((tmp_path / "in/x.jsonl").read_bytes())
    (dataset / "_cache/files").mkdir(parents=True)
    (dataset / "_cache/files/linked").symlink_to(tmp_path / "outside")
    record(dataset, scratch=str(tmp_path))
    change_source(dataset, sha256=sha256, name="elsewhere")
    corpus = open_corpus(dataset)
    assert Locator(corpus).find(corpus.sources[0].files[0]) is None


def test_a_tokenizer_that_a_manifest_names_is_no_file_and_no_repository(tmp_path, dataset, tool, monkeypatch):
    (tmp_path / "vocabulary").mkdir()
    monkeypatch.chdir(tmp_path)
    record(dataset, tokenizer={"name": "/dev/zero"})
    with requests_to_a_server(tmp_path) as (server, asked):
        monkeypatch.setenv("HF_ENDPOINT", server)
        for name in ("/dev/zero", "evil/repository", "tokenizer.json", "~", ".", "vocabulary", "x.tiktoken"):
            change(dataset, {"tokenizer": {"name": name}})
            assert "If you trust who made the dataset: --trust-records" in tool.errors("inspect", dataset, "--sequence", "0")
            for command in (*commands(dataset), ["stats", str(dataset)]):
                tool.out(*command)
            assert asked == [], name


# What is shown


def evil_dataset(path: Path) -> Path:
    source = {**dict.fromkeys(("name", "from", "revision", EVIL), EVIL), "files": [{"name": EVIL, "size": 1, "sha256": EVIL}]}
    tokenizer = dict.fromkeys(("name", "digest", "revision"), EVIL)
    provenance = {"name": EVIL, "sources": [source], "tokenizer": tokenizer, "documents": {EVIL: EVIL}, "split": {"seed": EVIL}}
    return Path(write_sequences(path, [[1, 2], [3]], [[1, 2], [3]], provenance=provenance))


def is_harmless(said: str) -> bool:
    return not {ord(character) for character in said} & set(VISIBLE) and "right\n" not in said


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_names_move_no_terminal(tmp_path, as_json, tool):
    evil, plain = str(evil_dataset(tmp_path / "evil")), tmp_path / "plain"
    write_sequences(plain, [[1]], provenance={"name": "plain"})
    for command in (
        *(["inspect", evil], ["stats", evil], ["trace", evil, "--sequence", "0"], ["diff", evil, str(plain)]),
        *(["verify", evil, "--full"], ["verify", evil, "--sample", "1/1"]),
        *(["inspect", evil, "--sequence", "0"], ["inspect", evil, "--find", "x"]),
        *(["inspect", evil, "--split", EVIL], ["inspect", f"{evil}/{EVIL}"], ["verify", f"{evil}/{EVIL}"]),
    ):
        _, out, err = tool(*command, *as_json)
        assert is_harmless(out), command
        assert is_harmless(err), command
    assert tool.json("inspect", evil)["name"] == EVIL


def test_with_colours_names_bring_none_of_their_own(tmp_path, tool):
    out = tool.out("inspect", evil_dataset(tmp_path / "evil"), "--color", "always")
    assert "\x1b[1m" in out
    assert is_harmless(out.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", ""))


def test_lines_and_markdown_of_any_text():
    assert line("a\nb\x1b[2J\t\ud800") == "a␊b␛[2J\t\ufffd"
    assert markdown({"a|b": ["<b>", ("`x`", 3, None)]}) == {r"a\|b": ["&lt;b&gt;", ("'x'", 3, None)]}
    assert markdown("![a](b)[c][d]\n# e\\") == r"![a\](b)[c\][d]␊# e" + "\\\\"
    files = [{"name": f"({n}_[x]*", "size": n, "split": None} for n in range(3)]
    assert markdown(files) is files  # nothing in so many files is to be escaped
    assert markdown([*files, {"name": "a|b"}]) == [*files, {"name": r"a\|b"}]
    assert markdown([{"`": "x"}, {"of": 0.5}]) == [{"'": "x"}, {"of": 0.5}]
