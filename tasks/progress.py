"""Progress of this process's work, as its tasks count it, and calls that are repeated meanwhile."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

WINDOW_SECONDS = 60.0
"""The rate of late is that of this many seconds."""
MARK_SECONDS = 1.0
SETTLING_SECONDS = 4.0
"""Show no rate before this many seconds of work."""
STEADY = 2.0
"""Nor before the rates of the earlier and the later half of the time differ by less than this factor."""


STANDING_SECONDS, LONGER = 10.0, 3.0
"""Work has stalled after this many seconds, and this multiple of the longest gap so far, without progress."""


class Done(NamedTuple):
    """Counts of a stage; bytes are those of text tokenized, of tokens written or of objects checked. ``stored``: those bytes of
    them that earlier work had stored, and that were only found to be there.
    """

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    faults: int = 0
    stored: int = 0


class Progress(NamedTuple):
    """A stage at a moment: seconds since it began, the bytes that it will do in all (0: not known) and what it has done.
    ``before``: bytes that were done when it began, during the stage before. ``stored``: bytes of the total that were stored when
    it began. ``recent``: bytes of its own work a second of late; None until that is known, 0 while it stands still.
    """

    stage: str
    seconds: float
    total: int
    done: Done
    before: int = 0
    stored: int = 0
    recent: float | None = None

    @property
    def work(self) -> int:
        """Bytes of its own work."""
        return max(self.done.bytes - self.done.stored - self.before, 0)

    @property
    def rate(self) -> float:
        """Bytes of its own work a second: of late, or else since it began."""
        return self.recent or self.work / max(self.seconds, 0.1)

    @property
    def left(self) -> float | None:
        """Seconds left: at the rate of late, or about, at the rate since it began. None if that is not known."""
        to_do = self.total - self.done.bytes - max(self.stored - self.done.stored, 0)
        return max(to_do, 0) / self.rate if self.work and self.recent != 0 and self.total > self.done.bytes else None


class Pace:
    """The pace of a stage's work, from its first result on: the time before that was waiting. The same applies after the work
    stood still, for a server or a store.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._is_known = False
        self._done, self._last, self._gap = 0, math.inf, 0.0

    def mark(self, at: float, work: int) -> None:
        """Take note of the bytes that have been done."""
        if self._stands_still(at):
            self._marks.clear()
            self._is_known = False
        if work > self._done:
            self._done, self._last, self._gap = work, at, max(self._gap, at - self._last)
        if work > 0 and (not self._marks or at >= self._marks[-1][0] + MARK_SECONDS):
            self._marks.append((at, work))
            while len(self._marks) > 2 and at - self._marks[1][0] >= WINDOW_SECONDS:
                self._marks.popleft()

    def _stands_still(self, now: float) -> bool:
        return now - self._last > max(STANDING_SECONDS, LONGER * self._gap)

    def rate(self, now: float, work: int) -> float | None:
        """Recent bytes a second. None until work is under way and steady; 0 while it stands still."""
        if self._stands_still(now):
            return 0.0
        if not self._marks or now - self._marks[0][0] < SETTLING_SECONDS:
            return None
        began, first = self._marks[0]
        middle, half = min(self._marks, key=lambda mark: abs(mark[0] - (began + now) / 2))
        if not self._is_known and began < middle < now:
            earlier, later = (half - first) / (middle - began), (work - half) / (now - middle)
            self._is_known = 0 < earlier < STEADY * later and later < STEADY * earlier
        return (work - first) / (now - began) if self._is_known and work > first else None


class _Begun(NamedTuple):
    stage: str
    at: float
    total: int
    before: int
    stored: int
    pace: Pace


class Meter:
    """Counts what tasks report, from any thread. There is one a process: a process builds one dataset at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Done] = {}
        self._begun: dict[str, _Begun] = {}
        self._told: Callable[[tuple[Any, ...]], object] | None = None
        self.begin("start")

    def forward(self, tell: Callable[[tuple[Any, ...]], object]) -> None:
        """Forward all counts to *tell*, as arguments of ``add`` (used in worker processes)."""
        self._told = tell

    def begin(self, stage: str, total: int = 0, stored: int = 0) -> None:
        """Begin a stage. Work that was counted for it during the stage before counts. *stored*: bytes of the total for which
        there is nothing left to do.
        """
        with self._lock:
            self._begun.pop(stage, None)
            before = self._counts.get(stage, Done()).bytes
            self._begun[stage] = _Begun(stage, time.monotonic(), total, before, stored, Pace())

    def expect(self, more: int) -> None:
        """Add to the work of the stage that is under way."""
        with self._lock:
            now = next(reversed(self._begun.values()))
            self._begun[now.stage] = now._replace(total=now.total + more)

    def add(self, stage: str, done: int, documents: int = 0, tokens: int = 0, faults: int = 0, stored: int = 0) -> None:
        if self._told is not None:
            self._told((stage, done, documents, tokens, faults, stored))
            return
        with self._lock:
            before = self._counts.get(stage, Done())
            self._count(stage, Done(*map(sum, zip(before, (done, documents, tokens, faults, stored), strict=True))))

    def put(self, stage: str, total: int, done: Done) -> None:
        """Set the total and the counts of a stage that is counted elsewhere."""
        with self._lock:
            self._begun[stage] = self._begun[stage]._replace(total=total)
            self._count(stage, done)

    def _count(self, stage: str, done: Done) -> None:
        self._counts[stage] = done
        if begun := self._begun.get(stage):
            begun.pace.mark(time.monotonic(), done.bytes - done.stored - begun.before)

    def reset(self) -> None:
        with self._lock:
            self._counts.clear()
            self._begun.clear()
        self.begin("start")

    def read(self) -> Progress:
        """The stage that is under way."""
        return self.stages()[-1]

    def stages(self) -> list[Progress]:
        """The stages that have begun, in order. The last one is under way, the others are as they ended."""
        with self._lock:
            begun, now = list(self._begun.values()), time.monotonic()
            ends = [*(following.at for following in begun[1:]), now]
            found = [
                Progress(one.stage, end - one.at, one.total, self._counts.get(one.stage, Done()), one.before, one.stored)
                for one, end in zip(begun, ends, strict=True)
            ]
            return [*found[:-1], found[-1]._replace(recent=begun[-1].pace.rate(now, found[-1].work))]


meter = Meter()


@contextlib.contextmanager
def repeating(seconds: float, call: Callable[[], object], name: str, patience: float | None = None) -> Iterator[None]:
    """Call *call* every this many seconds, in a thread of that name, until the block ends. Then wait for a call under way, at
    most *patience* seconds. *call* handles its own errors.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(patience)
