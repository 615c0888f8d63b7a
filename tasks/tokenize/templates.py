"""Chat templates in Jinja's sandbox, as ``transformers`` renders them, and what in a rendered conversation is whose.

Special strings in messages are put aside before the template runs, and put back behind it, when what the template wrote has been
told from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tasks.tokenize.engines import UnencodableError

if TYPE_CHECKING:
    from tasks.tokenize.chat import Chat

ASIDE, OPEN, CLOSE = "\U0001fffe", "\U0010fffe", "\U0010ffff"
"""Of no text: a string put aside is the first of them and a number, the others are around what counts."""
FIRST = 0xF0000
"""The character of the number 0."""
RESERVED = re.compile(f"[{ASIDE}{OPEN}{CLOSE}]")
RESERVED_MARKS = re.compile(f"[{OPEN}{CLOSE}]")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MAX_ASIDE = 0xFFF0
MAX_REPEATED = 1 << 20
"""Items that a template's ``*`` may make."""
PLAIN_ROLE = re.compile(r"[A-Za-z0-9_-]+")
ASSISTANT = ("assistant",)


class DayError(ValueError):
    """A template asks for the day, which would make another dataset of the same text every day."""


class Rendered(NamedTuple):
    """A conversation in parts: each an ordinary text, or the number of a special token. ``spans``: what counts, in characters,
    where a special token is two.
    """

    parts: list[str | int]
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with a template. *specials*: the strings of the special tokens, by their numbers."""

    def __init__(self, chat: Chat, specials: Sequence[str]) -> None:
        self._chat = chat
        self._numbers = {text: number for number, text in enumerate(specials)}
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        beginnings = {text[:i] for text in specials for i in range(1, len(text))}
        self._begun = re.compile(
            f"(?:{'|'.join(map(re.escape, sorted(beginnings, key=len, reverse=True)))})\\Z" if beginnings else r"(?!)"
        )
        self._found = re.compile(f"{ASIDE}(.)|([{OPEN}{CLOSE}])|({self._special.pattern})", re.DOTALL)
        self._last = re.compile(f"(?:{self._special.pattern})(\\s+)\\Z")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=self._now, namespace=_Namespace)
        try:
            self._template = environment.from_string(chat.template)
        except TemplateError as error:
            raise ValueError(f"the chat template is not one: {error}") from error
        self._marks = chat.roles == ASSISTANT and GENERATION.search(chat.template) is not None

    def __call__(self, text: str) -> Rendered:
        """Render a conversation, which is JSON. UnencodableError where that is not possible."""
        if RESERVED.search(text):
            raise UnencodableError("it holds U+1FFFE, U+10FFFE or U+10FFFF, which are no characters")
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnencodableError(f"its messages are not JSON ({error})") from error
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise UnencodableError("its messages are not a list of objects")
        aside: list[str] = []
        given = [_with_reasoning(self._put_aside(message, aside)) for message in messages]
        return self._told_apart(self._marked(given), aside)

    def _marked(self, messages: list[Any]) -> str:
        """The conversation as the template writes it, with marks around what counts."""
        whole = self._render(messages)
        if self._marks:
            return whole
        whole, at, marked = RESERVED_MARKS.sub("", whole), 0, ""
        for i, message in enumerate(messages):
            if message.get("role") in self._chat.roles:
                start, stop = self._span(messages, i, whole)
                marked += whole[at:start] + OPEN + whole[start:stop] + CLOSE
                at = stop
        return marked + whole[at:]

    def _span(self, messages: list[Any], i: int, whole: str) -> tuple[int, int]:
        """Where message *i* stands: from what the template writes to ask for it, to its end."""
        behind = self._without_marks(messages[: i + 1])
        befores = []
        for prompt in (True, False) if messages[i].get("role") in ASSISTANT else (False,):
            try:
                befores.append(self._without_marks(messages[:i], prompt) if i or prompt else "")
            except UnencodableError:
                continue  # some templates take no conversation that ends there
        before = next((text for text in befores if behind.startswith(text)), None)
        if before is None or not whole.startswith(behind):
            raise UnencodableError(
                f"its message {i} is rendered otherwise when others follow, so that it cannot be found: put "
                "{% generation %} and {% endgeneration %} around what counts in the template"
            )
        blank = self._last.search(behind, len(before))
        return len(before), len(behind) - (len(blank[1]) if blank else 0)

    def _without_marks(self, messages: list[Any], prompt: bool = False) -> str:
        return RESERVED_MARKS.sub("", self._render(messages, prompt))

    def _render(self, messages: list[Any], prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self._chat.tokens
            )
        except (DayError, MemoryError):
            raise
        except Exception as error:  # whatever a template does with what a message lacks
            raise UnencodableError(f"the chat template says: {error}") from error

    def _put_aside(self, value: Any, aside: list[str], key: str = "") -> Any:
        """A message with the special strings in it put aside, and what a special string could begin with at an end."""
        if isinstance(value, str):
            if key == "role" and PLAIN_ROLE.fullmatch(value):  # templates make special tokens of it, such as <|user|>
                return value
            return self._begun.sub(_kept_in(aside), self._special.sub(_kept_in(aside), value))
        if isinstance(value, list):
            return [self._put_aside(item, aside) for item in value]
        if isinstance(value, dict):
            return {self._put_aside(name, aside): self._put_aside(item, aside, name) for name, item in value.items()}
        return value

    def _told_apart(self, text: str, aside: list[str]) -> Rendered:
        """Rendered text in parts, with what was put aside in its place."""
        parts: list[str | int] = []
        spans: list[tuple[int, int]] = []
        length = at = opened = 0
        plain = ""

        def end_plain() -> None:
            nonlocal plain
            if plain:
                parts.append(plain)
                plain = ""

        for found in self._found.finditer(text):
            ordinary = text[at : found.start()] + (aside[ord(found[1]) - FIRST] if found[1] else "")
            plain, length, at = plain + ordinary, length + len(ordinary), found.end()
            if found[2] == OPEN:
                opened = length
            elif found[2] == CLOSE:
                spans.append((opened, length))
            elif found[3]:
                end_plain()
                parts.append(self._numbers[found[3]])
                length += 2
        plain += text[at:]
        end_plain()
        return Rendered(parts, spans)

    def _now(self, form: str) -> str:
        if self._chat.day is None:
            raise DayError(
                "the chat template asks for the day. Set source.chat_date, such as 2026-07-31: it is part of the dataset."
            )
        return self._chat.day.strftime(form)


def _kept_in(aside: list[str]) -> Callable[[re.Match[str]], str]:
    def keep(found: re.Match[str]) -> str:
        if len(aside) == MAX_ASIDE:
            raise UnencodableError(f"it holds more than {MAX_ASIDE} strings of special tokens")
        aside.append(found[0])
        return ASIDE + chr(FIRST + len(aside) - 1)

    return keep


def _with_reasoning(message: Any) -> Any:
    """A message whose reasoning has all names by which templates ask for it."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which nothing is repeated without end."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, times in ((left, right), (right, left)):
            if (
                operator == "*"
                and isinstance(one, str | list | tuple)
                and isinstance(times, int)
                and len(one) * times > MAX_REPEATED
            ):
                raise TemplateError(f"it repeats {len(one)} items {times} times; up to {MAX_REPEATED} come of it")
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise TemplateError("it raises to a power above 64")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %}`` puts marks around what stands up to ``{% endgeneration %}``."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


class _Namespace(Namespace):
    """Jinja's namespace, without names that Python keeps for itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace takes no name that begins with an underscore, but there is {name!r}")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
