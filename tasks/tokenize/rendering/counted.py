"""Which characters of a rendered message are its content, its thought and its calls of tools.

Marks are put around contents, thoughts and names of functions before the template runs. The places of the marks in the rendered
text show where each part is. Text that the template writes around a part belongs to that part, or to its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tasks.tokenize.rendering.messages import END_OF_THOUGHT, REASONING, Message

CONTENT, CALLS, THOUGHT = "content", "tool_calls", "thinking"
CALLED = ("tool_calls", "function_call")
"""The keys of a message's calls of functions."""
BEGIN_OF_THOUGHT = "<think>"
END = re.compile(rf"\s*{END_OF_THOUGHT}\s*")
"""The end of a thought, and the space around it."""


Mark = Callable[[str, str], str]
"""Puts marks around a text that has no space at its ends. The other argument is the part that it is."""


class MessagePart(NamedTuple):
    """A part of a message at ``text[start:stop]``."""

    start: int
    stop: int
    kind: str
    message: int = 0


def with_marks(message: Message, mark: Mark) -> Message:
    """The message with marks around its content, its thought and the functions that it calls."""
    found, thoughts = {**message}, dict[str, str]()  # a thought that has several names is one
    for name in REASONING:
        if isinstance(text := message.get(name), str) and text.strip():
            found[name] = thoughts[text] = thoughts.get(text) or _marked(text, THOUGHT, mark)
    content = message.get("content")
    if isinstance(content, str):
        found["content"] = _content(content, mark)
    elif isinstance(content, list):
        found["content"] = [_part(part, mark) for part in content]
    for name in CALLED:
        if calls := message.get(name):
            found[name] = [_call(one, mark) for one in calls] if isinstance(calls, list) else _call(calls, mark)
    return found


def _part(part: Any, mark: Mark) -> Any:
    """A part of a content that is a list."""
    if isinstance(part, str):
        return _content(part, mark)
    if not isinstance(part, dict):
        return part
    kinds = {"text": CONTENT, **dict.fromkeys(REASONING, THOUGHT)}
    return {
        name: _marked(value, kinds[name], mark) if name in kinds and isinstance(value, str) else value
        for name, value in part.items()
    }


def _content(text: str, mark: Mark) -> str:
    """A content, which may begin with a thought."""
    before, end, answer = text.partition(END_OF_THOUGHT)
    space, begin, thought = before.rpartition(BEGIN_OF_THOUGHT)
    if not end or END_OF_THOUGHT in answer or space.strip():
        return _marked(text, CONTENT, mark)
    return space + begin + _marked(thought, THOUGHT, mark) + end + _marked(answer, CONTENT, mark)


def _call(call: Any, mark: Mark) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, mark)}
    return {**call, "name": mark(call["name"], CALLS)} if isinstance(call.get("name"), str) else call


def _marked(text: str, part: str, mark: Mark) -> str:
    core = text.strip()
    at = text.index(core)
    return text[:at] + mark(core, part) + text[at + len(core) :]


def divide(text: str, found: Sequence[MessagePart], calls: Sequence[str] | None, specials: re.Pattern[str]) -> list[MessagePart]:
    """The parts of *text*, which a template has written for a message, in order: together all of it. *found*: the places of its
    contents and thoughts. *calls*: the names of the functions that it calls: the calls are after the last of these, or else
    between two of them, or before the first. A template may leave them out.

    What is between a thought and a content belongs to the thought; between one of them and calls, to the calls, but for the end
    of a thought. *specials* finds special tokens, which may be such an end.
    """
    if not found:
        return [MessagePart(0, len(text), CONTENT if calls is None else CALLS)]
    stops, starts = [0, *(one.stop for one in found)], [*(one.start for one in found), len(text)]
    gaps = list(zip(stops, starts, strict=True))
    at = (
        None
        if calls is None
        else next((i for i in (len(found), *range(len(found))) if all(name in text[slice(*gaps[i])] for name in calls)), None)
    )
    borders, parts = list[int](), list[str]()
    for i, (start, stop) in enumerate(gaps):
        before = found[i - 1].kind if i else None
        if i == at:
            borders.append(start + (_closing(text[start:stop], calls or (), specials) if before == THOUGHT else 0))
            parts.append(CALLS)
        if i < len(found):
            is_behind_content = before == CONTENT and found[i].kind == THOUGHT and i != at
            borders.append(0 if not borders else start if is_behind_content else stop)
            parts.append(found[i].kind)
    return [MessagePart(start, stop, part) for start, stop, part in zip(borders, [*borders[1:], len(text)], parts, strict=True)]


def _closing(rest: str, calls: Sequence[str], specials: re.Pattern[str]) -> int:
    """Characters of what is after a thought that end it: its mark, or a special token with another one before the calls."""
    if end := END.match(rest):
        return end.end()
    first = min((at for name in calls if (at := rest.find(name)) >= 0), default=0)
    before = list(specials.finditer(rest, 0, first))
    return before[0].end() if len(before) > 1 and not rest[: before[0].start()].strip() else 0
