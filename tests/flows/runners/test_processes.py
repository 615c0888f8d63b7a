"""Builds on processes of one machine: the bytes of a build on threads, its progress, its log lines, and its errors."""

import subprocess
import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flows.pipelines.build import build
from flows.pipelines.stages import FINALIZE, OF_A_BUILD, SPLIT, TOKENIZE, started_in_order
from flows.runners import processes
from flows.runners.processes import Processes, Threads
from tasks.assemble.write import Span
from tasks.config import BuildConfig
from tasks.models import TokenShard
from tasks.progress import meter
from tasks.shards.writers import stream_staged
from tasks.tokenize import engines
from tests.examples import first_fast
from tests.faults.support import build_here, receipts, same_bytes, settings_of, staged, write_notes
from tests.processes import ROOT, family, python, until
from tests.refusal import refusal

T = TypeVar("T")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    write_notes(path, 400)
    return path


def config_of(output: Path, notes: Path, **changed: Any) -> BuildConfig:
    return BuildConfig.model_validate(settings_of(output, notes, slice_bytes=2000, **changed))


def on_processes(monkeypatch: pytest.MonkeyPatch, config: BuildConfig) -> Any:
    """Build with a process for each worker, however few there are."""
    monkeypatch.setattr(processes, "WORKERS_OF_A_PROCESS", 1)
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    with Threads(config.workers) as runner:
        return build(config, runner)


SETTINGS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "columns": {"keep": ["id"]},
    "compact": {"layout": "compact"},
    "duplicates": {"documents": {"duplicates": "drop"}},
}


@pytest.mark.parametrize("more", first_fast(SETTINGS.values(), every=3), ids=SETTINGS)
def test_tokens_go_straight_into_the_version_where_they_can(tmp_path, notes, monkeypatch, more):
    """Tokens that a process staged are streamed by this one. Nothing is left of them. Bytes and counts are those of threads."""
    streamed = []

    def stream(shard: TokenShard, *others: Any) -> TokenShard:
        made = stream_staged(shard, *others)
        streamed.append(made.key)
        assert made.unfinished is not None
        return made

    monkeypatch.setattr("tasks.shards.write.stream_staged", stream)
    meter.reset()
    made = on_processes(monkeypatch, config_of(tmp_path / "processes", notes, workers=2, **more))
    counted = {stage.stage: stage.done for stage in meter.stages()}
    assert len(streamed) == made.slices > 3
    assert counted["tokenize"].documents == made.totals["documents"]["written"]
    assert counted["split"].bytes == 4 * sum(made.totals[split]["token_count"] for split in ("train", "validation"))
    monkeypatch.setattr(processes, "WORKERS_OF_A_PROCESS", 8)
    assert same_bytes(made, build_here(config_of(tmp_path / "threads", notes, **more)))
    assert receipts(tmp_path / "processes") == set()
    assert staged(tmp_path / "processes") == []


@pytest.mark.slow
def test_an_error_is_that_of_threads(tmp_path, notes, monkeypatch):
    with notes.open("a") as file:
        file.write('{"no": "text"}\n')
    with refusal(r"^notes\.jsonl, line 401 \(row 400\): "):
        on_processes(monkeypatch, config_of(tmp_path / "processes", notes, workers=2))


def test_small_items_are_done_by_the_thread(tmp_path, notes, monkeypatch):
    """A process takes longer to begin than they take."""
    monkeypatch.setattr(processes, "WORKERS_OF_A_PROCESS", 1)
    monkeypatch.setattr(processes.ProcessPoolExecutor, "submit", lambda *_: pytest.fail("a process was asked"))
    assert build_here(config_of(tmp_path / "out", notes)).slices > 3


def test_processes_and_this_one_share_half_of_the_memory(monkeypatch):
    """This one's threads tokenize what is small, however many they are."""
    monkeypatch.setattr(engines, "available_memory", lambda: 10 << 30)
    assert engines.resident_limit(16) == 5 << 30
    with Processes(9):
        assert engines.resident_limit(16) == 512 << 20
    assert engines.resident_limit(16) == 5 << 30


def done(result: T) -> Future[T]:
    future = Future[T]()
    future.set_result(result)
    return future


def test_stages_that_are_not_for_others_are_done_here(monkeypatch):
    asked = []

    def submit(_: object, work: object, stage: str, *more: object) -> Future[str]:
        asked.append(stage)
        return done("elsewhere")

    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    monkeypatch.setattr(processes.ProcessPoolExecutor, "submit", submit)
    here = {"function": lambda *_: "here", "size": lambda _: 1}
    own, alone = TOKENIZE._replace(name="of another pipeline", **here), FINALIZE._replace(**here)
    monkeypatch.setitem(OF_A_BUILD, "finalize", alone)
    span = Span(split="train", of_tokens=True, start=0, stop=8)
    with Processes(1) as hands:
        assert [hands.do(stage.given(None, None), span) for stage in (SPLIT, own, alone)] == ["elsewhere", "here", "here"]
    assert asked == ["split"]


KILLS_ONE = """
import os, signal, sys, threading, time
import tasks.shards.write
from flows.pipelines.build import build
from flows.runners import processes
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tests.flows.pool import family

processes.WORKERS_OF_A_PROCESS = 1
processes.SMALL_BYTES = 0

def strike():
    while not (found := [pid for pid in family(os.getpid())[1:] if b"spawn_main" in commandline(pid)]):
        time.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)

def commandline(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""

if __name__ == "__main__":
    config = BuildConfig.model_validate_json(sys.argv[1])
    threading.Thread(target=strike, daemon=True).start()
    try:
        with Threads(2) as runner:
            build(config, runner)
    except ChildProcessError as error:
        print(error)
"""

WAITS = """
import sys, time
from flows.runners.processes import Processes

if __name__ == "__main__":
    with Processes(2) as hands:
        hands._pool.submit(time.sleep, 600)
        hands._pool.submit(time.sleep, 600)
        print("under way", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_process_is_an_error_and_the_build_goes_on_when_run_again(tmp_path, notes):
    config = config_of(tmp_path / "out", notes, workers=2)
    done = python("-c", KILLS_ONE, config.model_dump_json())
    assert "of 2 processes was killed" in done.stdout, done.stderr
    assert same_bytes(build_here(config), build_here(config_of(tmp_path / "other", notes)))


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them():
    parent = subprocess.Popen([sys.executable, "-c", WAITS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "under way\n"
    children = [pid for pid in family(parent.pid) if pid != parent.pid]
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    until(lambda: not any(map(lives, children)), "the processes outlive the one that started them")
    parent.communicate()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Immediate:
    """A runner that starts an item only when the results of all before it were used: waiting for that is a deadlock."""

    workers, used = "threads", 0

    def window(self, _: Any) -> int:
        return 8

    def start(self, item: int, *_: Any) -> Future[int]:
        assert self.used == item, "the runner waits for an item that waits for a result that nobody uses"
        return done(item)


def test_no_item_is_started_while_a_result_waits_to_be_used():
    """A build with one worker that went on with stored slices hung: the slice under way waited for parts that nobody added."""
    runner, under_way = Immediate(), deque()
    for result in started_in_order(runner, under_way, range(5), TOKENIZE.given()):  # type: ignore[arg-type]
        assert result == runner.used
        runner.used += 1
    assert runner.used == 5
