"""Conversations in parts: text, special tokens that the template wrote, and the places of what counts.

Special strings in messages are replaced by references before the template runs. They are put back in the rendered text, after the
strings that the template wrote have been recognized as special tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import date
from typing import Any, NamedTuple

import msgspec
from jinja2 import TemplateError

from tasks.tokenize.rendering.forms import Form, RenderedConversation
from tasks.tokenize.rendering.messages import (
    END_OF_THOUGHT,
    Message,
    Names,
    RefusedError,
    lost_message,
    read_messages,
    read_tools,
    with_reasoning,
)
from tasks.tokenize.rendering.request import IntPair, Settings
from tasks.tokenize.rendering.templates import Template
from tasks.tokenize.rendering.turns import CLOSE, FIRST, FIRST_OF_SEAL, OPEN, SEAL, Turns

SPECIAL, ASIDE = "\U0001ffff", "\U0001fffe"
"""Characters that no text may have, as those of marks. The tokenizer's name of a special token begins with the first. A string
put aside is the second and the character of its number.
"""
RESERVED = f"{SPECIAL}{ASIDE}{OPEN}{CLOSE}"
UNLIKE = f"{RESERVED}\x1c\x1d\x1e\x1f"
"""Characters that no text may have, and space that Python strips and minijinja does not."""
MAX_ASIDE = 0xFFF0
MOST_FORMS = 1024
MAX_DEPTH = 100
"""Lists and objects within each other in a message."""
LEAST_RENDERED, MAX_EXPANSION = 1 << 16, 16
"""Bytes that any conversation may render to, and how many each of its bytes may."""
PLAIN_ROLE = re.compile(r"[A-Za-z0-9_-]+")
ESCAPES = ("\\U0001fffe", "\\ud83f\\udffe")
ESCAPED = re.compile(r"\\U0001fffe(?:\\U(000[0-9a-f]{5}))?|\\ud83f\\udffe(?:\\u(d[0-9a-f]{3})\\u(d[0-9a-f]{3}))?")
"""The escapes of a reference, by Python and by JSON."""


class NotATemplateError(ValueError):
    """The template of a source cannot be used."""


class Simple(NamedTuple):
    """A conversation whose messages have a role and a content alone. ``text``: all its strings."""

    roles: tuple[str, ...]
    contents: list[str]
    messages: list[dict[str, str]]
    text: str


class Renderer:
    """Renders conversations with a template. NotATemplateError if it is not one."""

    def __init__(self, settings: Settings) -> None:
        self._settings, specials = settings, settings.specials
        self.names = Names(**settings.messages or {})
        self._numbers = {text: number for number, text in enumerate(specials)}
        # Alternatives that begin with a literal each: the expression then passes over other characters fast.
        longest_first = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        among = f"|{longest_first}" if specials else ""
        self._special = re.compile("|".join(RESERVED) + among)
        self._found = re.compile(f"{SPECIAL}|{ASIDE}.?|{OPEN}|{CLOSE}{among}", re.DOTALL)
        self._begun = frozenset(text[:i] for text in specials for i in range(1, len(text)))
        self._ends = frozenset(text[-1] for text in self._begun)
        self._longest = max(map(len, self._begun), default=0)
        self._clean: set[str] = set()
        self._forms: dict[tuple[str, ...], Form | None] = {}
        self._firsts, self._joining = {text[0] for text in specials}, set[tuple[str, ...]]()
        self._begins = {END_OF_THOUGHT, *(text[:2] for text in specials)}
        self._read = msgspec.json.Decoder(list[dict[str, str]]).decode
        day = date.fromisoformat(settings.day) if settings.day else None
        try:
            self.template = Template(settings.template, settings.tokens, day, settings.fast)
            if settings.boundary is not None and "tools" not in self.template.names:
                raise TemplateError("it has no use for tools; leave source.tools_column out")
        except MemoryError:
            raise
        except Exception as error:  # whatever Jinja and Python make of it
            raise NotATemplateError(f"it is not one: {error}") from error
        self.turns = Turns(self.template, settings.roles, settings.counted, specials)

    def __call__(self, data: bytes) -> RenderedConversation:
        """Render a conversation, which is JSON. RefusedError if that is not possible, or if text of it is lost."""
        simple = self._simple(data)
        if simple is not None and (form := self._forms.get(simple.roles)) and (formed := self._formed(form, simple)):
            return formed
        given = data.decode()
        text, tools = given, None
        if self._settings.boundary is not None:
            text, _, listed = given.partition(self._settings.boundary)
            tools = read_tools(listed)
        found = read_messages(text)
        self.template.prepare(given)
        fault = self.names.fault_of(found)
        if fault and self._settings.messages:
            raise RefusedError(fault, "no_content")
        if self._settings.messages:
            found = [self.names.applied(message) for message in found]
        aside: list[str] = []
        tools = None if tools is None else self._value_aside(tools, aside, MAX_DEPTH)
        messages = [with_reasoning(self._value_aside(message, aside, MAX_DEPTH + 1)) for message in found]
        digest = hashlib.blake2b(text.encode(), digest_size=2 * SEAL).digest()
        seal = "".join(chr(FIRST_OF_SEAL + (digest[i] << 8 | digest[i + 1]) % 0xFFFE) for i in range(0, 2 * SEAL, 2))
        try:
            rendered, spans = self.turns.find(messages, tools, seal)
        except RefusedError as error:
            if fault is None:
                raise
            raise RefusedError(f"{error}; {fault}", "no_content") from error
        if fault:
            raise RefusedError(fault, "no_content")
        most = max(LEAST_RENDERED, MAX_EXPANSION * len(given))
        if len(rendered) > most:
            raise RefusedError(f"the chat template makes {len(rendered):,} characters of it; it may make {most:,}")
        if not rendered:
            raise RefusedError("the chat template makes nothing of it", "not_rendered")
        if made := next((one for one in (OPEN, CLOSE) if one in rendered), None):
            raise RefusedError(f"the chat template makes U+{ord(made):X} of it, which is not a character")
        plain = _without_escapes(rendered, given, aside)
        lost = lost_message(messages, plain, self._settings.specials)
        if lost is not None and (plain == rendered or lost_message(messages, rendered) is not None):
            role = str(found[lost].get("role"))[:40]
            raise RefusedError(
                f"the chat template leaves out the content or calls of its message {lost}, of role {role!r}", "not_rendered"
            )
        try:
            in_parts = self._parts(_without_escapes(_with_spans(rendered, spans), given, aside), aside)
        except UnicodeEncodeError as error:
            raise RefusedError("it holds half of a surrogate pair, which is not valid Unicode", "invalid_unicode") from error
        if simple is not None:
            self._learn(simple, messages, rendered, spans)
        return in_parts

    def _simple(self, data: bytes) -> Simple | None:
        """A conversation of messages that have a role and a content alone, without special strings. None if it is another one."""
        if not self._settings.fast:
            return None
        if self._settings.boundary is not None:
            data, _, tools = data.partition(self._settings.boundary.encode())
            if tools:
                return None
        role, content, roles_here = self.names
        try:
            found = self._read(data)
            roles, contents = [message[role] for message in found], [message[content] for message in found]
        except (msgspec.MsgspecError, RecursionError, KeyError):
            return None
        text = "\0".join([*roles, *contents])
        if not found or "" in roles or any(len(message) != 2 for message in found) or any(one in text for one in UNLIKE):
            return None
        # A character is found ten times as fast as a string, and few texts have both ends of one.
        if any(one[0] in text and one[-1] in text and one in text for one in self._begins):
            return None
        if self._settings.messages:
            roles = [roles_here.get(one, one) for one in roles]
            found = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return Simple(tuple(roles), contents, found, text)

    def _formed(self, form: Form, of: Simple) -> RenderedConversation | None:
        """A conversation with the roles of a form. None if it is not of this form, or a special string may begin in a content."""
        ends = [end for one in of.contents for end in (one[-1:], one.rstrip()[-1:])] if of.roles in self._joining else ()
        if not self._firsts.isdisjoint(ends):
            return None
        self.template.prepare(of.text, is_json=False)
        try:
            return form.filled(self.template.render(of.messages, None), of.contents)
        except (RefusedError, UnicodeEncodeError):
            return None

    def _learn(self, of: Simple, messages: list[Message], text: str, spans: list[IntPair]) -> None:
        """Learn the form of conversations with these roles, unless the template looks into contents."""
        roles = of.roles
        is_known = roles in self._forms or len(self._forms) >= MOST_FORMS
        if (
            is_known
            or not all(content == content.strip() != "" for content in of.contents)
            or not all(map(PLAIN_ROLE.fullmatch, roles))
        ):
            return
        places = self.turns.places(messages, text)
        form = None if places is None else Form.of(text, places, spans, self._special, self._numbers)
        if form is not None and any(piece.endswith(one) for piece in form.pieces[:-1] for one in self._begun):
            form = None  # a special string may begin there
        if form is not None:
            # The first character of a special string, at the end of a content, may become that with the piece after it.
            rests, (*inner, last) = [text[1:] for text in self._numbers], form.pieces[1:]
            begun = [*inner, last] if last else inner
            if any(last.startswith(rest) or any(one.startswith(rest) or rest.startswith(one) for one in begun) for rest in rests):
                self._joining.add(roles)
        self._forms[roles] = form

    def _value_aside(self, value: Any, aside: list[str], depth: int) -> Any:
        """A value with the special strings in it put aside, and what a special string could begin with at an end."""
        if isinstance(value, str):
            return self._without_specials(value, aside)
        if not isinstance(value, list | dict):
            return value
        if not depth:
            raise RefusedError(f"it is nested too deep: more than {MAX_DEPTH} lists and objects within each other")
        if isinstance(value, list):
            return [self._value_aside(item, aside, depth - 1) for item in value]
        found = {}
        for name, item in value.items():
            # Templates make special tokens of a role, such as <|user|>.
            is_role = name == "role" and isinstance(item, str) and PLAIN_ROLE.fullmatch(item)
            key = name if name in self._clean else self._without_specials(name, aside)
            if key == name and len(self._clean) < MAX_ASIDE:
                self._clean.add(name)
            found[key] = item if is_role else self._value_aside(item, aside, depth - 1)
        return found

    def _without_specials(self, text: str, aside: list[str]) -> str:
        def keep(found: re.Match[str]) -> str:
            return _reference(found[0], aside)

        text = self._special.sub(keep, text)
        if text[-1:] in self._ends:
            for length in range(min(self._longest, len(text)), 0, -1):
                if text[-length:] in self._begun:
                    return text[:-length] + _reference(text[-length:], aside)
        return text

    def _parts(self, text: str, aside: list[str]) -> RenderedConversation:
        """Rendered text in parts, with what was put aside in its place."""
        parts: list[bytes | int] = []
        spans: list[IntPair] = []
        plain: list[bytes] = []
        length = at = opened = 0
        for found in self._found.finditer(text):
            mark, start = found[0], found.start()
            if start > at:
                plain.append(data := text[at:start].encode())
                length += len(data)
            at = found.end()
            if mark in self._numbers:
                if plain:
                    parts.append(b"".join(plain))
                    plain.clear()
                parts.append(self._numbers[mark])
                length += 2
            elif mark[0] == ASIDE:
                number = ord(mark[1:] or "\0") - FIRST
                if not 0 <= number < len(aside):
                    raise RefusedError("the chat template cuts a string of a special token that is in a message")
                plain.append(data := aside[number].encode())
                length += len(data)
            elif mark == SPECIAL:
                raise RefusedError(f"the chat template makes U+{ord(mark):X} of it, which is not a character")
            elif mark == OPEN:
                opened = length
            else:
                spans.append((opened, length))
        if at < len(text):
            plain.append(text[at:].encode())
        if plain:
            parts.append(b"".join(plain))
        return RenderedConversation.of(parts, spans)


def _with_spans(text: str, spans: list[IntPair]) -> str:
    """A text with marks around the *spans* of it."""
    pieces, at = list[str](), 0
    for start, stop in spans:
        pieces += (text[at : max(start, at)], OPEN, text[max(start, at) : stop], CLOSE)
        at = max(stop, at)
    return "".join([*pieces, text[at:]])


def _without_escapes(rendered: str, given: str, aside: list[str]) -> str:
    """Rendered text with references if a template has written their escapes, as Python does in the text of a list, and JSON
    in ASCII. RefusedError if the conversation itself may have them.
    """
    if not any(escape in rendered for escape in ESCAPES):
        return rendered
    if "U0001fffe" in given or "ud83f\\\\udffe" in given:
        raise RefusedError(f"it spells U+{ord(ASIDE):X}, which is not a character")

    def written(found: re.Match[str]) -> str:
        of_python, high, low = found.groups()
        code = int(of_python or "0", 16)
        if high:
            code = 0x10000 + ((int(high, 16) & 0x3FF) << 10 | int(low, 16) & 0x3FF)
        if not 0 <= code - FIRST < len(aside):
            raise RefusedError("the chat template cuts a string of a special token that is in a message")
        text = aside[code - FIRST]
        text_there = repr(text)[1:-1] if of_python else json.dumps(text)[1:-1]
        return ASIDE + chr(code) if text_there == text else _reference(text_there, aside)

    return ESCAPED.sub(written, rendered)


def _reference(text: str, aside: list[str]) -> str:
    """The reference to a string that is put aside. RefusedError for characters that are none."""
    if text in RESERVED:
        raise RefusedError(f"it holds U+{ord(text):X}, one of four code points which are not characters")
    if len(aside) == MAX_ASIDE:
        raise RefusedError(f"it holds more than {MAX_ASIDE} strings of special tokens")
    aside.append(text)
    return ASIDE + chr(FIRST + len(aside) - 1)
