"""How far the work of this process has come: counted by the tasks, shown by whoever watches."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class Done(NamedTuple):
    """What a stage has done: bytes of text tokenized, or bytes of tokens written."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0


class Progress(NamedTuple):
    """A moment of a build: the stage that is under way, how long it has been, what it has done and will do (0: not known)."""

    stage: str
    seconds: float
    total: int
    done: Done


class Meter:
    """Counts what tasks report, from any thread. One a process: a process builds one dataset at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Done] = {}
        self.begin("start")

    def begin(self, stage: str, total: int = 0) -> None:
        """A stage begins. What was already done of it, while the one before was still under way, counts."""
        with self._lock:
            self._stage, self._total, self._begun = stage, total, time.monotonic()

    def add(self, stage: str, done: int, documents: int = 0, tokens: int = 0) -> None:
        with self._lock:
            before = self._counts.get(stage, Done())
            self._counts[stage] = Done(before.bytes + done, before.documents + documents, before.tokens + tokens)

    def of(self, stage: str) -> Done:
        """What has been done of a stage, under way or not."""
        with self._lock:
            return self._counts.get(stage, Done())

    def reset(self) -> None:
        with self._lock:
            self._counts.clear()

    def read(self) -> Progress:
        with self._lock:
            seconds = time.monotonic() - self._begun
            return Progress(self._stage, seconds, self._total, self._counts.get(self._stage, Done()))


meter = Meter()
