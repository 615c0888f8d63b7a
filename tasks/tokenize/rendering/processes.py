"""Conversations rendered by processes that have limits, a batch at a time, without a Python object for each here."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from flat_tokens.annotations import Int64s, JsonObject
from flat_tokens.text.rows import text_buffers
from tasks.tokenize.rendering.request import ANSWER, BATCH, FACTS, ORDINARY, Limits, Settings

PROCESS = "tasks.tokenize.rendering.process"
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "PYTHONPATH")
"""Variables of the environment that a process may need to begin."""
MOST_IDLE = 64
"""Processes that wait for the next batch."""


class BadText(NamedTuple):
    """Why a conversation is refused. ``reason``: the name under which it is counted."""

    reason: str
    detail: str


class TextParts(NamedTuple):
    """Texts in parts. ``counts``: parts of each, int64[n]. ``kinds``: int64[p], of each part: ORDINARY, or the number of its
    special token. ``texts``: the ordinary parts. ``spans``: the places of what counts, int64[s, 2], text by text, in bytes of all
    parts, if a special token has two. ``faults``: texts that are refused, by their numbers; they have no parts.
    """

    counts: Int64s
    kinds: Int64s
    texts: pa.LargeStringArray
    spans: Int64s
    faults: dict[int, BadText]

    @property
    def widths(self) -> Int64s:
        """The bytes of each part, int64[p]: 2 of a special token."""
        found = np.full(len(self.kinds), 2, np.int64)
        found[self.kinds == ORDINARY] = np.diff(text_buffers(self.texts)[1])
        return found


class _EndedError(Exception):
    """A process has ended within a batch."""


class RenderProcess:
    """A process that renders conversations. ValueError if the template cannot be used. ``why_slow``: why each beginning of a
    conversation is rendered alone; None if that is not needed.
    """

    def __init__(self, settings: Settings, limits: Limits) -> None:
        root = str(Path(__file__).parents[3])
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (root, variables.get("PYTHONPATH"))))
        # What a template makes depends on nothing else.
        variables |= {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            process_group=0,  # an interrupt of the terminal is not for it
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._pipes = self._requests, self._answers, self._errors = [cast("IO[bytes]", one) for one in pipes]
        try:
            given = json.dumps({"settings": settings._asdict(), "limits": limits._asdict()}).encode()
            self._send(FACTS.pack(len(given)), given)
            (size,) = FACTS.unpack(self._read(FACTS.size))
            facts: JsonObject = json.loads(self._read(size))
        except BaseException as error:
            status, said = self.end()
            if not isinstance(error, _EndedError):
                raise
            cause = f"status {status}" if status >= 0 else f"by signal {-status}, {signal.Signals(-status).name}"
            raise ValueError(f"the chat template ends its process ({cause}){said}") from error
        if facts["fault"] is not None:
            self.end()
            raise ValueError(facts["fault"])
        self.why_slow: str | None = facts["why_slow"]

    def render(self, texts: pa.LargeStringArray) -> Iterator[TextParts]:
        """Render some conversations, in order, in several answers if they are large. _EndedError if the process ends."""
        data, offsets = text_buffers(texts)
        own = data[offsets[0] : offsets[-1]]
        self._send(BATCH.pack(len(texts), len(own)), (offsets - offsets[0]).data, own.data)
        left = len(texts)
        while left:
            *lengths, text_bytes, fault_bytes = ANSWER.unpack(self._read(ANSWER.size))
            counts, kinds, ends, spans = (np.frombuffer(self._read(8 * length), np.int64) for length in lengths)
            text = self._read(text_bytes)
            faults = {i: BadText(*of) for i, *of in json.loads(self._read(fault_bytes) or b"[]")}
            borders = pa.py_buffer(np.append(0, ends))
            left -= len(counts)
            parts = pa.LargeStringArray.from_buffers(len(ends), borders, pa.py_buffer(text))
            yield TextParts(counts, kinds, parts, spans.reshape(-1, 2), faults)

    def _send(self, *parts: Any) -> None:
        try:
            for part in parts:
                self._requests.write(part)
            self._requests.flush()
        except (BrokenPipeError, ConnectionError) as error:
            raise _EndedError from error

    def _read(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            raise _EndedError
        return data

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> tuple[int, str]:
        """End the process: its status, and the last line of what it said, without the advice that Rust gives."""
        self._process.kill()
        status, said = self._process.wait(), b""
        for one in self._pipes:
            with contextlib.suppress(OSError):  # what was not sent cannot be sent any more
                said = one.read() if one is self._errors else b""
                one.close()
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip() and not line.startswith("note: ")]
        return status, f": {lines[-1][:200]}" if lines else ""

    def forget(self) -> None:
        """Close this process's side, as a child of it that has inherited it."""
        for one in self._pipes:
            with contextlib.suppress(OSError):
                os.close(one.fileno())
        self._process.returncode = 0


class Renderers:
    """Processes with the same settings, one for each thread that renders at the time. ValueError if the template cannot be
    used. ``why_slow``: why each beginning of a conversation is rendered alone; None if that is not needed.
    """

    def __init__(self, settings: Settings, limits: Limits) -> None:
        self._settings, self._limits = settings, limits
        self._key = json.dumps([settings, limits])
        with self._process() as process:
            self.why_slow = process.why_slow

    def __call__(self, texts: pa.LargeStringArray) -> Iterator[TextParts]:
        """Render some conversations, in order. A process that ends within one is replaced, and that conversation is refused."""
        at, alone, times = 0, False, 0
        while at < len(texts):
            part = texts.slice(at, 1) if alone else texts.slice(at)
            try:
                with self._process() as process:
                    for answer in process.render(part):
                        at += len(answer.counts)
                        yield answer
                    times = 0
            except _EndedError:
                # One by one, until the conversation is found that ends it. It has a second time: others end processes, too.
                times += len(part) == 1
                if len(part) > 1 or times < ATTEMPTS:
                    alone = True
                    continue
                nothing = np.empty(0, np.int64)
                fault = BadText(
                    "limits",
                    "the process that renders it ended each time: the chat template takes too much time or memory for it",
                )
                yield TextParts(np.zeros(1, np.int64), nothing, texts.slice(0, 0), nothing.reshape(0, 2), {0: fault})
                at, alone, times = at + 1, False, 0

    @contextlib.contextmanager
    def _process(self) -> Iterator[RenderProcess]:
        """A process for this thread alone, until the block ends."""
        process = _taken(self._key) or RenderProcess(self._settings, self._limits)
        try:
            yield process
        except BaseException:
            process.end()  # it may be within an answer
            raise
        with _lock:
            _idle.append((self._key, process))
            ended = _idle[:-MOST_IDLE]
            del _idle[:-MOST_IDLE]
        for _, one in ended:
            one.end()


ATTEMPTS = 2
_idle: list[tuple[str, RenderProcess]] = []
"""Processes for the next batch, with their settings, the last used one last."""
_lock = threading.Lock()


def _taken(key: str) -> RenderProcess | None:
    """An idle process with these settings; None if there is none."""
    while True:
        with _lock:
            found = next((one for one in reversed(_idle) if one[0] == key), None)
            if found is None:
                return None
            _idle.remove(found)
        if found[1].is_there:
            return found[1]
        found[1].end()


def _end_all() -> None:
    while _idle:
        _idle.pop()[1].end()


def _forget_all() -> None:
    """Drop the processes of a parent, which uses them."""
    global _lock
    _lock = threading.Lock()
    for _, one in _idle:
        one.forget()
    _idle.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
