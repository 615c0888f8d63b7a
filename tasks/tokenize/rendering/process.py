"""The process that renders conversations. A template can use much time and memory: this process has limits for each conversation,
and it is not a loss if one ends it.

It reads settings, and then batches of conversations. It writes their parts, as bytes for the tokenizer. `processes` has the
other side.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from tasks.tokenize.rendering.forms import RenderedConversation
from tasks.tokenize.rendering.messages import RefusedError
from tasks.tokenize.rendering.renderer import NotATemplateError, Renderer
from tasks.tokenize.rendering.request import ANSWER, BATCH, FACTS, Limits, Settings

ANSWER_BYTES = 4 << 20
"""Text after which an answer is sent, and the next one begins."""
IDLE_SECONDS = 60
"""A process that nobody uses for this time ends."""
LEAST_MEMORY, MEMORY_OF_A_BYTE = 256 << 20, 64
"""Memory that any conversation may need, and each of its bytes."""
SHARE_OF_SECONDS = 0.1
"""Of the seconds that a tokenizer may take: what a conversation may take, and each megabyte of it."""
TRIAL = (
    ("user",),
    ("user", "assistant"),
    ("system", "user", "assistant"),
    ("user", "assistant", "user", "assistant", "user", "assistant", "user", "assistant"),
)
"""The roles of conversations that every template is tried on."""
TRIED_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Its name"}}},
    },
}
"""The tool of the same conversations, where they have tools."""


T = TypeVar("T")
R = TypeVar("R")


class _TooLongError(BaseException):
    """The time of a conversation is over. It is not an Exception, so that no template can go on."""


class Limiter:
    """Calls functions within limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory = self._seconds = 0
        self._most_memory = resource.getrlimit(resource.RLIMIT_DATA)[1]
        self._most_seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def call(self, function: Callable[[T], R], argument: T, size: int, what: str = "for it", others: int = 0) -> R:
        """Call a function with an argument of *size* bytes, while this process holds *others*. RefusedError if it fails or
        reaches a limit; *what* names the purpose of the call.
        """
        seconds = self._limits.seconds * SHARE_OF_SECONDS * (1 + size / 1e6)
        memory = min(LEAST_MEMORY + MEMORY_OF_A_BYTE * (-(-size >> 20) << 20), self._limits.memory)
        if memory + others != self._memory:
            self._memory = memory + others
            with contextlib.suppress(ValueError, OSError):  # not every system has it
                resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._most_memory))
        # The system ends this process if Python cannot: within a single operation.
        if (now := time.process_time()) + seconds + 1 > self._seconds:
            self._seconds = int(now + 1.5 * seconds + 3)
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_CPU, (self._seconds, self._most_seconds))
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                return function(argument)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except _TooLongError:
            share = f"tokenizer.max_seconds allows {SHARE_OF_SECONDS:.0%} of itself, and as much for each megabyte"
            detail = f"the chat template takes more than {seconds:.1f} seconds of processor time {what}: {share}"
            raise RefusedError(detail, "limits") from None
        except MemoryError:
            raise RefusedError(f"the chat template takes more than {memory:,} bytes of memory {what}", "limits") from None
        except (RefusedError, NotATemplateError):
            raise
        except Exception as error:  # whatever a conversation makes of a template, or of this code
            raise RefusedError(f"it cannot be rendered: {type(error).__name__}: {error}") from error


def trial(renderer: Renderer, limiter: Limiter, boundary: str | None) -> str | None:
    """The fault of a template that a few short messages show; None if there is none. Messages that it does not accept are no
    fault: documents will show whether they occur. *boundary*: the text before tools, if there are tools.
    """
    for roles in TRIAL:
        names = renderer.names
        text = json.dumps([{names.role: role, names.content: f"message {i}"} for i, role in enumerate(roles)])
        text += "" if boundary is None else boundary + json.dumps([TRIED_TOOL])
        try:
            limiter.call(renderer, text.encode(), len(text), f"for a conversation of short messages: {', '.join(roles)}")
        except RefusedError as error:
            if error.reason in ("limits", "no_day"):
                return str(error)
    return None


class _Reply:
    """Rendered conversations on their way."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.text_bytes = 0
        self._kinds = array("q")
        self._counts, self._ends, self._spans = list[int](), list[int](), list[int]()
        self._faults: list[tuple[int, str, str]] = []
        self._at = 0

    def add(self, rendered: RenderedConversation) -> None:
        self._spans += [self._at + place for place in rendered.spans]
        self._kinds.extend(rendered.kinds)
        self._ends += [self.text_bytes + end for end in rendered.ends]
        self._counts.append(len(rendered.kinds))
        self.texts.append(rendered.text)
        self.text_bytes += len(rendered.text)
        self._at += len(rendered.text) + 2 * (len(rendered.kinds) - len(rendered.ends))

    def refuse(self, error: RefusedError) -> None:
        self._faults.append((len(self._counts), error.reason, str(error)))
        self._counts.append(0)

    def send(self, out: BinaryIO) -> None:
        faults = json.dumps(self._faults).encode() if self._faults else b""
        arrays = (array("q", self._counts), self._kinds, array("q", self._ends), array("q", self._spans))
        out.write(ANSWER.pack(*map(len, arrays), self.text_bytes, len(faults)))
        for one in arrays:
            out.write(one.tobytes())
        out.write(b"".join(self.texts))
        out.write(faults)
        out.flush()


def _serve(renderer: Renderer, limiter: Limiter, requests: BinaryIO, out: BinaryIO) -> None:
    """Render batches until there are no more, or none for a while."""
    while select.select([requests], [], [], IDLE_SECONDS)[0]:
        head = requests.read(BATCH.size)
        if len(head) < BATCH.size:
            return
        count, size = BATCH.unpack(head)
        offsets = array("q", requests.read(8 * (count + 1)))
        data = requests.read(size)
        answer = _Reply()
        for i in range(count):
            text = data[offsets[i] : offsets[i + 1]]
            try:
                answer.add(limiter.call(renderer, text, len(text), others=2 * (size + ANSWER_BYTES)))
            except RefusedError as error:
                answer.refuse(error)
            if answer.text_bytes > ANSWER_BYTES:
                answer.send(out)
                answer = _Reply()
        answer.send(out)


def _say(facts: dict[str, Any], out: BinaryIO) -> None:
    said = json.dumps(facts).encode()
    out.write(FACTS.pack(len(said)) + said)
    out.flush()


def _too_long(*_: object) -> None:
    raise _TooLongError


def main() -> None:
    """Read the settings, try the template, and render conversations until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals this process, too: the other side decides
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, out = open(0, "rb", closefd=False), sys.stdout.buffer  # noqa: SIM115
    (size,) = FACTS.unpack(requests.read(FACTS.size))
    given = json.loads(requests.read(size))
    settings, limiter = Settings(**given["settings"]), Limiter(Limits(**given["limits"]))
    try:
        renderer = limiter.call(Renderer, settings, len(settings.template), "to be read")
        fault = trial(renderer, limiter, settings.boundary)
    except (RefusedError, NotATemplateError) as error:
        fault = str(error)
    if fault is not None:
        _say({"fault": fault}, out)
        return
    _say({"fault": None, "why_slow": "it changes what its messages hold" if renderer.turns.by_prefixes else None}, out)
    _serve(renderer, limiter, requests, out)


if __name__ == "__main__":
    main()
