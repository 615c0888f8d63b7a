"""Progress of this process's work, as its tasks count it, and calls that are repeated meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Done(NamedTuple):
    """Counts of a stage; bytes are those of text tokenized, of tokens written or of objects checked."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    faults: int = 0


class Progress(NamedTuple):
    """A stage at a moment: seconds since it began, the bytes that it will do in all (0: not known) and what it has done.
    ``before``: bytes that were done when it began, during the stage before.
    """

    stage: str
    seconds: float
    total: int
    done: Done
    before: int = 0

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return (self.done.bytes - self.before) / max(self.seconds, 0.1)

    @property
    def left(self) -> float | None:
        """Seconds left at this rate; None where that is not known."""
        return (self.total - self.done.bytes) / self.rate if self.total > self.done.bytes and self.rate else None


class _Begun(NamedTuple):
    stage: str
    at: float
    total: int
    before: int


class Meter:
    """Counts what tasks report, from any thread. There is one a process: a process builds one dataset at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Done] = {}
        self._begun: dict[str, _Begun] = {}
        self.begin("start")

    def begin(self, stage: str, total: int = 0) -> None:
        """Begin a stage. Work that was counted for it during the stage before counts."""
        with self._lock:
            self._begun.pop(stage, None)
            self._begun[stage] = _Begun(stage, time.monotonic(), total, self._counts.get(stage, Done()).bytes)

    def expect(self, more: int) -> None:
        """Add to the work of the stage that is under way."""
        with self._lock:
            now = next(reversed(self._begun.values()))
            self._begun[now.stage] = now._replace(total=now.total + more)

    def add(self, stage: str, done: int, documents: int = 0, tokens: int = 0, faults: int = 0) -> None:
        with self._lock:
            before = self._counts.get(stage, Done())
            self._counts[stage] = Done(*map(sum, zip(before, (done, documents, tokens, faults), strict=True)))

    def put(self, stage: str, total: int, done: Done) -> None:
        """Set the total and the counts of a stage that is counted elsewhere."""
        with self._lock:
            self._begun[stage] = self._begun[stage]._replace(total=total)
            self._counts[stage] = done

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
            begun = list(self._begun.values())
            ends = [*(following.at for following in begun[1:]), time.monotonic()]
            return [
                Progress(stage, end - at, total, self._counts.get(stage, Done()), before)
                for (stage, at, total, before), end in zip(begun, ends, strict=True)
            ]


meter = Meter()


@contextlib.contextmanager
def repeating(seconds: float, call: Callable[[], object], name: str, patience: float | None = None) -> Iterator[None]:
    """Call *call* every so many seconds, in a thread of that name, until the block ends. Then wait for a call under way, at
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
