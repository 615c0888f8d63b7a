"""What threads share."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from flat_tokens.arrays import maps
from flat_tokens.arrays.maps import Recent, share
from tests.refusal import refusal


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And none of the threads that other tests began, on the processors that there are."""
    monkeypatch.setattr(maps.os, "sched_getaffinity", lambda _: range(4), raising=False)
    before = maps._decoders[:]
    maps._decoders.clear()
    yield
    for mine in maps._decoders:
        mine.shutdown()
    maps._decoders[:] = before


@pytest.mark.parametrize("count", [0, 1, 15, 16, 33, 1000])
def test_all_of_the_work_is_done_once(four_processors, count):
    done = []
    share(lambda part: done.extend(part), count)
    assert sorted(done) == list(range(count))


def test_much_work_is_done_by_several_threads_at_once(four_processors):
    """Each part waits for the three others: with fewer threads none would come to an end."""
    together = threading.Barrier(4, timeout=60)
    share(lambda part: together.wait() and None, 100)


def test_an_error_of_any_part_is_raised(four_processors):
    def work(part: range) -> None:
        if 99 in part:
            raise ValueError("the last one")

    with refusal("the last one"):
        share(work, 100)


FORK = """
import os
from flat_tokens.arrays import maps
maps.os.sched_getaffinity = lambda _: range(4)
maps.share(lambda part: None, 100)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
maps.share(lambda part: None, 100)
os._exit(7)
"""


def test_a_forked_process_has_threads_of_its_own():
    """In a process of its own: what other tests imported may mind a fork."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=60)
    assert ran.returncode == 7


def test_the_values_used_last_are_kept():
    cache = Recent(2)
    for key in "ab":
        cache.keep(key, key.upper())
    assert cache.find("a") == "A"
    cache.keep("c", "C")
    assert [cache.find(key) for key in "abc"] == ["A", None, "C"]
