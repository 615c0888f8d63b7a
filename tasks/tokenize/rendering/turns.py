"""The places of messages that count in a rendered conversation, and of the parts of them that count.

Marks are put around the texts of all messages, and the conversation is rendered once more. Without the marks it has to be the
same. Then the text between two messages is divided: up to the end of the conversation's beginning if nothing follows, and from
the place at which the template asks for an answer. Texts between messages are few, so each is divided once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from tasks.tokenize.rendering.counted import BEGIN_OF_THOUGHT, CALLS, CONTENT, MessagePart, divide, with_marks
from tasks.tokenize.rendering.messages import END_OF_THOUGHT, Message, RefusedError, names_of_calls
from tasks.tokenize.rendering.request import IntPair
from tasks.tokenize.rendering.templates import Template

OPEN, CLOSE = "\U0010fffe", "\U0010ffff"
"""Characters that no text may have. With the character of a number they are around a part, with a seal around what counts."""
FIRST, MOST = 0xF0000, 0xFFF0
"""The character of the number 0, and how many numbers there are."""
SEAL, FIRST_OF_SEAL = 4, 0x100000
"""Characters of a seal, a digest of the conversation: no text can have its own. And the first character of its alphabet."""
MARKS = re.compile(f"[{OPEN}{CLOSE}](?:([{chr(FIRST)}-{chr(FIRST + MOST)}])|([{chr(FIRST_OF_SEAL)}-\U0010fffd]{{{SEAL}}}))")
ASSISTANT = ("assistant",)
LONGEST, MOST_KNOWN = 1000, 4096
"""Texts between messages that are remembered: their characters, and their number."""
EMPTY_THOUGHT = re.compile(r"\s*(?:<(\w+)>\s*</\1>|\[(\w+)\]\s*\[/\2\]|(?:(?<=<think>)|(?<=<think>\n))\s*</think>)[\r\n]*")
"""A thought without text, of which the prompt may have the begin."""
NOT_DIVIDED = (
    "the chat template looks into its messages: which of its text is content, calls and thought is not known. Leave source.count "
    "out, so that all of it counts"
)
NOT_FOUND = (
    "its message {} is rendered otherwise when others follow, so that it cannot be found: put {{% generation %}} and "
    "{{% endgeneration %}} around what counts in the template, as trl/chat_templates/*_training.jinja of TRL have them for many "
    "models, or leave such conversations out by documents.on_bad: skip"
)
OUT_OF_ORDER = NOT_FOUND.replace("otherwise when others follow", "out of order")


class MarkedText(NamedTuple):
    """Rendered text without marks, the parts that were marked, and the places of what counts by ``{% generation %}``.
    ``has_repeats``: it has a text of a message twice.
    """

    text: str
    parts: list[MessagePart]
    spans: list[IntPair]
    has_repeats: bool


class Turns:
    """Finds the parts that count. *counted*: the kinds of parts that count; None: all. ``by_prefixes``: the number of
    conversations whose prefixes were each rendered alone.
    """

    def __init__(self, template: Template, roles: Sequence[str], counted: Sequence[str] | None, specials: Sequence[str]) -> None:
        self._template, self._roles, self._counted = template, roles, counted
        self._has_marks = template.has_marks and tuple(roles) == ASSISTANT
        self._specials = tuple(text for text in specials if text)
        longest_first = "|".join(map(re.escape, sorted(self._specials, key=len, reverse=True))) or "(?!)"
        self._special, self._borders = re.compile(longest_first), re.compile(f"\\s|{longest_first}")
        self._known: dict[tuple[Any, ...], int] = {}
        self.by_prefixes = 0

    def find(self, messages: list[Message], tools: Any, seal: str) -> tuple[str, list[IntPair]]:
        """The rendered conversation, and the places of what counts in it, in characters."""
        marks = (OPEN + seal, CLOSE + seal) if self._has_marks else ("", "")
        plain = _read(self._template.render(messages, tools, marks), [], seal)
        answers = [i for i, message in enumerate(messages) if message.get("role") in self._roles]
        numbers = [i for i in answers if _counts(messages[i], i)]
        is_narrow = self._counted is not None and not _kinds(messages, numbers) <= {*self._counted}
        is_marked = self._has_marks and numbers == answers
        if not numbers or (is_marked and not is_narrow):
            return plain.text, plain.spans if is_marked else []
        conversation = self._conversation(messages, tools, numbers, plain, marks, seal)
        if is_narrow and conversation is None:
            raise RefusedError(NOT_DIVIDED)
        turns = plain.spans
        if not is_marked:
            self.by_prefixes += conversation is None
            found = [
                self._turn(conversation, i) if conversation else self._by_prefixes(messages, tools, plain.text, i)
                for i in numbers
            ]
            turns = _in_order(found, numbers)
            if self._has_marks:  # also around messages that do not count
                turns = [one for one in plain.spans if any(one[0] < stop and start < one[1] for start, stop in turns)]
        return plain.text, self._narrowed(conversation, turns, numbers) if conversation and is_narrow else turns

    def places(self, messages: list[Message], text: str) -> list[IntPair] | None:
        """The places of contents in a conversation of nothing else, which is rendered as *text*. None if they are not known."""
        found = self._conversation(messages, None, [], MarkedText(text, [], [], False), ("", ""), "")
        parts = found.parts if found else []
        is_each = [part.message for part in parts] == [*range(len(messages))]
        return [(part.start, part.stop) for part in parts] if is_each else None

    def _conversation(
        self,
        messages: list[Message],
        tools: Any,
        numbers: list[int],
        plain: MarkedText,
        marks: tuple[str, str],
        seal: str,
    ) -> _Conversation | None:
        """The conversation with marks around those texts that the template does not inspect; None if these are not known."""
        for only, of_empty in ((None, True), (None, False), (numbers, False)):
            owners = list[tuple[str, int]]()
            marked = [
                message
                if only is not None and i not in only
                else with_marks(message, _marker(i, owners, of_empty and names_of_calls(message) is None))
                for i, message in enumerate(messages)
            ]
            if len(owners) > MOST:
                return None
            try:
                reading = _read(self._template.render(marked, tools, marks), owners, seal)
            except RefusedError:
                continue
            if reading.text == plain.text and reading.spans == plain.spans and not reading.has_repeats:
                return _Conversation(self._template, messages, marked, tools, reading, owners)
        return None

    def _turn(self, of: _Conversation, i: int) -> IntPair:
        """The place of message *i*: from after the prompt that asks for it, to its end."""
        start = self._cut(of, i, asks=of.messages[i].get("role") in ASSISTANT, ends=False)
        stop = self._cut(of, i + 1, asks=False, ends=True)
        stop = self._trimmed(of.text, start, stop)
        if END_OF_THOUGHT not in str(of.messages[i].get("content")):
            # A thought that the template alone has: it is empty.
            empty = EMPTY_THOUGHT.match(of.text, start, min(stop, of.starts.get(i, stop)))
            start = empty.end() if empty else start
        following = next((of.starts[k] for k in range(i + 1, len(of.messages)) if k in of.starts), stop)
        if not start <= of.starts.get(i, start) <= of.ends.get(i, stop) <= stop or start <= following < stop:
            raise RefusedError(OUT_OF_ORDER.format(i))
        return start, stop

    def _cut(self, of: _Conversation, count: int, asks: bool, ends: bool) -> int:
        """The end of the first *count* messages in the rendered text. *asks*: with the prompt for the next message, if the text
        continues with it. *ends*: it must be the end of the last of these messages.
        """
        near = next((i for i in range(count - 1, -1, -1) if i in of.ends), -1)
        at = of.ends.get(near, 0)
        gap = of.text[at : max(at, of.starts.get(count, len(of.text)))]
        is_last = count == len(of.messages)
        roles = [str(of.messages[i].get("role")) if 0 <= i < len(of.messages) else None for i in (count - 1, count)]
        key = (asks, ends, is_last, near == count - 1, *roles, gap)
        length = self._known.get(key)
        if length is None:
            length = self._length(of, count, near, gap, asks, ends)
            if len(gap) <= LONGEST and len(self._known) < MOST_KNOWN and (near == count - 1) and (is_last or count in of.starts):
                self._known[key] = length
        return at + length

    def _length(self, of: _Conversation, count: int, near: int, gap: str, asks: bool, ends: bool) -> int:
        """Characters of a *gap* that belong to the beginning of *count* messages. It begins at the end of message *near*."""
        if count == len(of.messages):
            # Text that is written only if nobody is asked is not the message's, such as an end of the text.
            tail = of.tail(count, near, True)
            shared = len(gap) if tail is None or tail.startswith(gap) else self._shared(gap, tail)
            return shared if gap[:shared].strip() else len(gap)
        found = 0
        for prompt in (True, False) if asks and count else (asks,):
            tail = of.tail(count, near, prompt)
            if tail is not None and gap.startswith(tail):
                return max(found, len(tail))
            if tail is not None:
                found = max(found, self._shared(gap, tail))
            elif ends:
                raise of.refusal
        if ends and near != count - 1:
            raise RefusedError(NOT_FOUND.format(count - 1))
        if ends and not gap[:found].strip() and (end := self._special.match(gap, len(gap) - len(gap.lstrip()))):
            return end.end()  # another one ends the last message
        return self._asked(of, gap) if asks and not found else found

    def _asked(self, of: _Conversation, gap: str) -> int:
        """Characters of a *gap* up to the end of the prompt that asks for a message after the last one; 0 if it is not there. For
        messages before which a conversation cannot end, such as the first one.
        """
        plain, asked = (of.tail(len(of.messages), max(of.ends, default=-1), prompt) or "" for prompt in (False, True))
        # Earlier answers may have no thought.
        prompt = asked[len(commonprefix([plain, asked])) :].partition(BEGIN_OF_THOUGHT)[0]  # noqa: RUF071  of texts
        return gap.index(prompt) + len(prompt) if prompt in gap else 0

    def _shared(self, gap: str, tail: str) -> int:
        """The characters that two texts begin with, up to the last special token or space."""
        return max((one.end() for one in self._borders.finditer(commonprefix([gap, tail]))), default=0)  # noqa: RUF071  the same

    def _trimmed(self, text: str, start: int, stop: int) -> int:
        """The end of a turn without the space after its last special token."""
        last = start + len(text[start:stop].rstrip())
        return last if last < stop and text.endswith(self._specials, start, last) else stop

    def _by_prefixes(self, messages: list[Message], tools: Any, whole: str, i: int) -> IntPair:
        """The place of message *i*, by rendering the beginnings that end before it and with it."""

        def end_of(count: int, prompt: bool) -> int | None:
            text = self._template.render(messages[:count], tools, prompt=prompt) if count or prompt else ""
            return len(text) if whole.startswith(text) else None

        stop, start = len(whole) if i == len(messages) - 1 else end_of(i + 1, False), None
        for prompt in (True, False) if messages[i].get("role") in ASSISTANT else (False,):
            try:
                start = end_of(i, prompt) if start is None else start
            except RefusedError:
                continue  # some templates take no conversation that ends there
        if stop is None or start is None or start > stop:
            raise RefusedError(NOT_FOUND.format(i))
        return start, self._trimmed(whole, start, stop)

    def _narrowed(self, of: _Conversation, turns: list[IntPair], numbers: list[int]) -> list[IntPair]:
        """The parts of turns that count."""
        calls = {i: names for i in numbers if (names := names_of_calls(of.messages[i])) is not None}
        owners = iter(numbers if len(turns) == len(numbers) else [None] * len(turns))
        found = list[IntPair]()
        for (start, stop), number in zip(turns, owners, strict=True):
            parts = [part for part in of.parts if start <= part.start < part.stop <= stop and part.kind != CALLS]
            number = parts[0].message if number is None and parts else number
            places = [one._replace(start=one.start - start, stop=one.stop - start) for one in parts if one.message == number]
            names = calls.get(number) if number is not None else [] if calls else None
            divided = divide(of.text[start:stop], places, names, self._special)
            found += [(start + one.start, start + one.stop) for one in divided if one.kind in (self._counted or ())]
        return found


class _Conversation:
    """A rendered conversation with its parts. ``starts``, ``ends``: of the first and of the last part of messages."""

    def __init__(
        self,
        template: Template,
        messages: list[Message],
        marked: list[Message],
        tools: Any,
        reading: MarkedText,
        owners: list[tuple[str, int]],
    ) -> None:
        self.messages, self.text, self.parts = messages, reading.text, reading.parts
        self._template, self._marked, self._tools, self._owners = template, marked, tools, owners
        self.starts, self.ends = dict[int, int](), dict[int, int]()
        for part in reading.parts:
            self.starts.setdefault(part.message, part.start)
            self.ends[part.message] = part.stop
        self._tails: dict[tuple[int, bool], MarkedText | RefusedError] = {}
        self.refusal = RefusedError("")

    def tail(self, count: int, near: int, prompt: bool) -> str | None:
        """The text after message *near* if there are *count* messages. None if the template refuses that: ``refusal``."""
        if count == 0 and not prompt:
            return ""
        if (count, prompt) not in self._tails:
            try:
                rendered = self._template.render(self._marked[:count], self._tools, prompt=prompt)
                self._tails[count, prompt] = _read(rendered, self._owners, "")
            except RefusedError as error:
                self._tails[count, prompt] = error
        found = self._tails[count, prompt]
        if isinstance(found, RefusedError):
            self.refusal = found
            return None
        ends = (part.stop for part in found.parts if part.message == near)
        at = max(ends, default=None) if near >= 0 else 0
        if at is None:
            self.refusal = RefusedError(NOT_FOUND.format(count - 1))
        return None if at is None else found.text[at:]


def _in_order(turns: list[IntPair], numbers: list[int]) -> list[IntPair]:
    """The turns. RefusedError if one begins within an earlier one."""
    for i, (_, stop), (start, _) in zip(numbers[1:], turns, turns[1:], strict=False):
        if start < stop:
            raise RefusedError(f"its message {i} is rendered before the end of an earlier one that counts")
    return turns


def _marker(number: int, owners: list[tuple[str, int]], of_empty: bool) -> Any:
    def mark(text: str, kind: str) -> str:
        if not text and not (of_empty and kind == CONTENT):
            return text
        own = chr(FIRST + min(len(owners), MOST))
        owners.append((kind, number))
        return OPEN + own + text + CLOSE + own

    return mark


def _read(rendered: str, owners: Sequence[tuple[str, int]], seal: str) -> MarkedText:
    """Rendered text, by the marks in it. Others than these are left to it."""
    pieces, parts, spans, has_repeats = list[str](), dict[int, MessagePart](), list[IntPair](), False
    opened, begun, at, length = dict[int, int](), 0, 0, 0
    for found in MARKS.finditer(rendered):
        number = ord(found[1]) - FIRST if found[1] else -1
        if number >= len(owners) or (found[2] and found[2] != seal):
            continue
        pieces.append(rendered[at : found.start()])
        length, at = length + found.start() - at, found.end()
        is_open = found[0][0] == OPEN
        if number >= 0 and is_open:
            opened[number] = length
        elif number >= 0:
            # Names of functions may be written again for what they return.
            has_repeats |= number in parts and parts[number].kind != CALLS
            parts.setdefault(number, MessagePart(opened.pop(number, length), length, *owners[number]))
        elif is_open:
            begun = length
        else:
            spans.append((begun, length))
    return MarkedText("".join([*pieces, rendered[at:]]), [*parts.values()], spans, has_repeats)


def _counts(message: Message, number: int) -> bool:
    """Whether a message of a role that counts does. RefusedError for a weight that a loss mask cannot have."""
    if (weight := message.get("weight")) not in (None, 0, 1):
        raise RefusedError(f"its message {number} has the weight {weight!r}, but a loss mask has 0 and 1 alone. Round it")
    return weight != 0


def _kinds(messages: list[Message], numbers: list[int]) -> set[str]:
    """The kinds of parts of some messages; a message without parts ends like a content."""
    kinds = set[str]()
    for i in numbers:
        owners = list[tuple[str, int]]()
        with_marks(messages[i], _marker(i, owners, False))
        own = {kind for kind, _ in owners} | ({CALLS} if names_of_calls(messages[i]) is not None else set())
        kinds |= own or {CONTENT}
    return kinds
