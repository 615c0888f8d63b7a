"""The command line as a person meets it, without a server."""

import base64
import contextlib
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from flows.__main__ import run
from flows.commands.build import read_config
from flows.commands.running import prefect_server
from tasks.config import BuildConfig
from tests.processes import ROOT, family, python, serving, until
from tests.refusal import refusal
from tests.tasks.tokenize.test_tokenizers import write_ranks


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trial", "trial, of a terminal", "encoding"])
def test_ctrl_c_does_not_wait_for_a_tokenizer_that_never_ends(what, tmp_path):
    """A terminal interrupts the trial, too."""
    write_ranks(tmp_path / "a.tiktoken", {bytes([i]): i for i in range(256)})
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "qz" * 2_000_000}))
    before = "qz" if what == "encoding" else ""  # which no text of the trial has
    pattern = rf"[\s\S](?={before}.*(a|aa)+$)|[\s\S]"
    tokenizer = {"name": str(tmp_path / "a.tiktoken"), "pattern": pattern, "max_seconds": 900}
    settings = {"output": str(tmp_path / "out"), "source": {"path": str(tmp_path / "a.jsonl")}, "tokenizer": tokenizer}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    building = subprocess.Popen(
        [sys.executable, "-m", "flows", "build", str(tmp_path / "config.yaml"), "--no-server"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        until(lambda: list((tmp_path / "out").glob("_staging/*/*")) if what == "encoding" else family(building.pid)[1:])
        time.sleep(3)  # until the library is at work
        os.killpg(building.pid, signal.SIGINT) if "terminal" in what else building.send_signal(signal.SIGINT)
        _, errors = building.communicate(timeout=120)
        assert building.returncode == 130
        assert errors.endswith("interrupted: run the same command again to resume after the last stored shard\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(building.pid, signal.SIGKILL)


def test_ctrl_c_in_a_finalizer_is_not_lost():
    """It cannot be raised there: it comes again, and nothing is printed."""
    program = """if True:
        import time
        from flows.commands import main
        class Finalized:
            def __del__(self):
                raise KeyboardInterrupt
        def run(options):
            Finalized()
            time.sleep(60)
        import argparse
        main.parser = lambda: argparse.ArgumentParser()
        argparse.ArgumentParser.parse_args = lambda *_: argparse.Namespace(run=run, quiet=True, command="build")
        main.main([])
    """
    done = python("-c", program)
    assert done.returncode == 130
    assert done.stderr == "interrupted: run the same command again to resume after the last stored shard\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    source = f"{{path: {ROOT}/deployments/demo/stories.parquet, id_column: id}}"
    path.write_text(f"output: {tmp_path / 'out'}\nsource: {source}\ntokenizer: bytes\n")
    return path


def test_a_build_says_what_it_made_and_a_second_one_that_there_was_nothing_to_do(config, tmp_path, terminal):
    assert terminal.json("plan", config)["files"] == 1
    assert not (tmp_path / "out/versions").exists()
    status, first, errors = terminal("build", config, "--no-server", "--quiet")
    assert (status, errors) == (0, "")
    assert first.startswith("published\n")
    for words in ("189 read, 189 written", "tokens in", "seconds", "(download", str(tmp_path / "out/versions")):
        assert words in first
    assert terminal.out("build", config, "--no-server").startswith("nothing to do")
    assert "a build has nothing to do" in terminal.out("plan", config)


def test_a_build_begins_anew_once_with_large_pages(monkeypatch):
    """Only where the user has not told the C library something else, and not for commands that tokenize nothing. Arrow's
    allocator and the threads of numpy's linear algebra stay the user's, too.
    """
    begun, left = [], []
    monkeypatch.setattr("flows.commands.main.main", lambda arguments: 0)
    monkeypatch.setattr(os, "execv", lambda path, words: begun.append([path, *words]))
    monkeypatch.setattr("flows.__main__.end_at_once", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda value: None)  # of the whole process, which has other tests to run
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "flows", "build", "x.yaml"])
    for command, given in (
        ("build", {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "3"}),
        ("build", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}),
        ("status", {}),
    ):
        monkeypatch.setattr(sys, "argv", ["flows", command, "/nonexistent"])
        with mock.patch.dict(os.environ, given, clear=True):
            with pytest.raises(SystemExit):
                run()
            left.append({**os.environ})
    pools = [(one.get("ARROW_DEFAULT_MEMORY_POOL"), one.get("OPENBLAS_NUM_THREADS")) for one in left]
    assert pools == [("system", "3"), ("jemalloc", "1"), (None, None)]
    assert "narenas:1" in left[0]["JE_ARROW_MALLOC_CONF"]
    assert begun == [[sys.executable, sys.executable, "-m", "flows", "build", "x.yaml"]]


@pytest.mark.needs("bin/flat-tokens-service")
@pytest.mark.parametrize(
    "program", ["flat-tokens-service --version", "flat-tokens --version", "python -P -c 'import flat_tokens'"]
)
def test_programs_run_in_any_directory(program, tmp_path):
    """Also next to modules of other people that have the same names."""
    for name in ("flat_tokens", "flows", "tasks"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    name, *words = shlex.split(program)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert subprocess.run([Path(sys.executable).parent / name, *words], cwd=tmp_path, env=clean).returncode == 0


@pytest.mark.parametrize("written", ["", "tokenizer: bytes", "tokenizer: {name: bytes}"])
def test_a_setting_makes_the_mappings_that_it_needs(tmp_path, written):
    path = tmp_path / "config.yaml"
    path.write_text(f"output: out\nsource:\n{written}\n")
    settings = ["source.path=in", "tokenizer.name=gpt2", "tokenizer.engine=reference", "documents.on_bad=skip", "workers=3"]
    read = read_config(path, [*settings, "source.text_column=title"])
    assert (read.sources[0].path, read.tokenizer.name, read.tokenizer.engine) == ("in", "gpt2", "reference")
    assert (read.sources[0].text_column, read.documents.on_bad, read.workers) == ("title", "skip", 3)
    assert read_config(path, [*settings, "sources=[{path: x}]", "sources.0.name=y"]).sources[0].name == "y"


def test_a_mapping_may_be_merged_and_overridden(tmp_path):
    """What YAML's anchors are for; that is no key twice."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "output: out\ntokenizer: bytes\nsources:\n- &a {name: a, path: a, text_column: body}\n- {<<: *a, name: b, path: b}\n"
    )
    read = read_config(path, [])
    assert [(source.name, source.text_column) for source in read.sources] == [("a", "body"), ("b", "body")]


def test_a_build_that_fails_before_it_stores_anything_leaves_no_folder(config, tmp_path, terminal):
    settings = ("--set", f"output={tmp_path}/new/out", "--set", "source.path=/nowhere.jsonl")
    assert terminal("build", config, "--no-server", *settings)[2].startswith("flat-tokens-service build: ")
    assert not (tmp_path / "new").exists()


def test_a_server_that_does_not_answer_is_an_error_unless_it_is_not_wanted(config, terminal, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    errors = terminal.errors("build", config)
    assert "does not answer" in errors
    assert "--no-server" in errors
    assert terminal("build", config, "--no-server")[0] == 0


def test_groups_without_a_server_say_what_is_missing(config, terminal):
    settings = ("--set", "runner=groups", "--set", "groups.threshold=1")
    assert "runner: groups needs a Prefect server" in terminal.errors("build", config, *settings, status=1)


class Locked(BaseHTTPRequestHandler):
    """A server that lets in who has its secret, and then has nothing."""

    def do_GET(self) -> None:
        known = base64.b64encode(b"admin:secret").decode()
        self.send_error(404 if self.headers["Authorization"] == f"Basic {known}" else 401)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_a_server_that_asks_for_a_secret_is_told_in_one_line(monkeypatch, tmp_path):
    """By the name of the setting. With the secret, of the environment or of the profile, the run goes on to Prefect."""
    for name, value in {"PREFECT_HOME": str(tmp_path), "PREFECT_CLIENT_MAX_RETRIES": "7"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with serving(HTTPServer(("127.0.0.1", 0), Locked)) as server:
        url = f"{server}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        for wrong in ("", "admin:other"):
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", wrong)
            with refusal(r"HTTP Error 401.*Set PREFECT_API_AUTH_STRING, as make serve prints it"):
                prefect_server()
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:secret")
        assert prefect_server() == url
        monkeypatch.delenv("PREFECT_API_AUTH_STRING")
        (tmp_path / "profiles.toml").write_text('active = "a"\n[profiles.a]\nPREFECT_API_AUTH_STRING = "admin:secret"\n')
        assert prefect_server() == url


def test_the_file_and_its_setting(tmp_path, terminal):
    path = tmp_path / "new/x.tiktoken"
    told = terminal.json("vocabulary", "cl100k_base", "--to", path)
    assert path.stat().st_size == told["bytes"] > 1_000_000
    tokenizer = yaml.safe_load(told["tokenizer"])
    config = {"output": "x", "source": {"path": "x.txt"}, "tokenizer": tokenizer}
    assert BuildConfig.model_validate(config).tokenizer.name == str(path)
