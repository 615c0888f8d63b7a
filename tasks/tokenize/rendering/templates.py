"""Chat templates in Jinja's sandbox, as ``transformers`` renders them, and what in a rendered conversation is whose.

Special strings in messages are replaced by references before the template runs. They are put back in the rendered text, after the
strings that the template wrote have been recognized as special tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from tasks.tokenize.rendering.counted import CALLS, CONTENT, Found, StandIn, divide, names_of_calls, with_stand_ins
from tasks.tokenize.rendering.divided import LAZY, TOOLS, NotDividedError, divided
from tasks.tokenize.rendering.messages import (
    USUAL,
    Message,
    Names,
    RefusedError,
    lost_message,
    read_messages,
    read_tools,
    with_reasoning,
)
from tasks.tokenize.rendering.prefixes import Beginning, Prefixes, Rendering
from tasks.tokenize.rendering.request import Settings
from tasks.tokenize.rendering.traced import MARK, Regions, traced

SPECIAL, ASIDE, OPEN, CLOSE = "\U0001ffff", "\U0001fffe", "\U0010fffe", "\U0010ffff"
"""Characters that no text may have. The tokenizer's name of a special token begins with the first. A string put aside is the
second and the character of its number. The others, with a seal, are around what counts.
"""
RESERVED = f"{SPECIAL}{ASIDE}{OPEN}{CLOSE}"
FIRST = 0xF0000
"""The character of the number 0."""
MAX_ASIDE = 0xFFF0
SEAL, FIRST_OF_SEAL = 4, 0x100000
"""Characters of a seal, a digest of the conversation: no text can have its own. And the first character of its alphabet."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MAX_REPEATED = 1 << 20
"""Items that a template's ``*`` may make."""
MAX_DEPTH = 100
"""Lists and objects within each other in a message."""
LEAST_RENDERED, MAX_EXPANSION = 1 << 16, 16
"""Bytes that any conversation may render to, and how many each of its bytes may."""
FEW = 2
"""Beginnings of so many messages may be rendered alone by any template."""
PLAIN_ROLE = re.compile(r"[A-Za-z0-9_-]+")
REFERENCE = re.compile(f"{ASIDE}.", re.DOTALL)
ESCAPES = ("\\U0001fffe", "\\ud83f\\udffe")
ESCAPED = re.compile(r"\\U0001fffe(?:\\U(000[0-9a-f]{5}))?|\\ud83f\\udffe(?:\\u(d[0-9a-f]{3})\\u(d[0-9a-f]{3}))?")
"""The escapes of a reference, by Python and by JSON."""
NOT_DIVIDED = "which of its text is content, calls and thought is not known. Leave source.count out, so that all of it counts"
ASSISTANT = ("assistant",)
ELSEWHERE = frozenset({"random", "lipsum"})
"""Names of Jinja that give something else each time."""


class NotATemplateError(ValueError):
    """The template of a source cannot be used."""


class _DayError(TemplateError):
    """A template asks for the day, which would make another dataset of the same text every day."""


class Rendered(NamedTuple):
    """A conversation in parts: each an ordinary text in UTF-8, or the number of a special token. ``spans``: the places of what
    counts, in bytes, where a special token is two.
    """

    parts: list[bytes | int]
    spans: list[tuple[int, int]]


class Renderer:
    """Renders conversations with a template. NotATemplateError where it is not one. ``why_slow``: why each beginning of a
    conversation is rendered alone; None where that is not needed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.why_slow: str | None = None
        self.names = USUAL if settings.names is None else Names(**settings.names)
        self._roles, specials = settings.roles, settings.specials
        self._marks = tuple(settings.roles) == ASSISTANT and GENERATION.search(settings.template) is not None
        self._numbers = {text: number for number, text in enumerate(specials)}
        # Alternatives that begin with a literal each: the expression then passes over other characters fast.
        longest_first = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        among = f"|{longest_first}" if specials else ""
        self._special = re.compile("|".join(RESERVED) + among)
        seal = f".{{0,{SEAL}}}"
        self._found = re.compile(f"{SPECIAL}|{ASIDE}.?|{OPEN}{seal}|{CLOSE}{seal}{among}", re.DOTALL)
        self._borders = re.compile(f"\\s|{longest_first or '(?!)'}")
        self._last = re.compile(f"(?:{longest_first or '(?!)'})(\\s+)\\Z")
        self._begun = frozenset(text[:i] for text in specials for i in range(1, len(text)))
        self._ends = frozenset(text[-1] for text in self._begun)
        self._longest = max(map(len, self._begun), default=0)
        self._clean: set[str] = set()
        environment = self._environment = _Sandbox(self._marks)
        environment.globals.update(raise_exception=_Function(_raise), strftime_now=_Function(self._now))
        self._given: dict[str, Any] = {TOOLS: None, "documents": None, **settings.tokens}
        self._has_tools = settings.boundary is not None
        try:
            parsed = environment.parse(settings.template)
            _check_functions(parsed)
            if self._has_tools and not any(name.name == TOOLS for name in parsed.find_all(nodes.Name)):
                raise TemplateError("it has no use for tools; leave source.tools_column out")
            self._template = _compiled(environment, parsed)
            self._tracing: Template | None = None
            self._tails: dict[bool, str] | None = None
            self._divided = self._divide() if settings.divides and not self._marks else None
        except MemoryError:
            raise
        except Exception as error:  # whatever Jinja and Python make of it
            raise NotATemplateError(f"it is not one: {error}") from error

    def _divide(self) -> Template | None:
        parsed = self._environment.parse(self._settings.template)
        names = frozenset({"messages", "add_generation_prompt", *self._given, *self._environment.globals})
        try:
            template, self._has_same_tail = divided(self._environment, parsed, names, self._has_tools)
        except NotDividedError as error:
            self.why_slow = str(error)
            return None
        return _compiled(self._environment, template)

    def __call__(self, text: str) -> Rendered:
        """Render a conversation, which is JSON. RefusedError where that is not possible, or where text of it is lost."""
        given = text
        text, tools = self._with_tools(text)
        found = read_messages(text)
        fault = self.names.fault_of(found)
        if fault and self.names is not USUAL:
            raise RefusedError(fault, "no_content")
        if self.names is not USUAL:
            found = [self.names.applied(message) for message in found]
        aside: list[str] = []
        self._given[TOOLS] = None if tools is None else self._value_aside(tools, aside, MAX_DEPTH)
        messages = [with_reasoning(self._put_aside(message, aside)) for message in found]
        digest = hashlib.blake2b(text.encode(), digest_size=2 * SEAL).digest()
        seal = "".join(chr(FIRST_OF_SEAL + (digest[i] << 8 | digest[i + 1]) % 0xFFFE) for i in range(0, 2 * SEAL, 2))
        self._environment.open, self._environment.close = OPEN + seal, CLOSE + seal
        try:
            narrowed = self._settings.counted is not None
            rendered = self._narrowed(messages, aside) if narrowed else self._marked(messages)
        except RefusedError as error:
            if fault is None:
                raise
            raise RefusedError(f"{error}; {fault}", "no_content") from error
        if fault:
            raise RefusedError(fault, "no_content")
        most = max(LEAST_RENDERED, MAX_EXPANSION * len(given))
        if len(rendered) > most:
            raise RefusedError(f"the chat template makes {len(rendered):,} characters of it; it may make {most:,}")
        escaped, rendered = rendered, _without_escapes(rendered, given, aside)
        if not rendered:
            raise RefusedError("the chat template makes nothing of it", "not_rendered")
        lost = lost_message(messages, self._plain(rendered), self._settings.specials)
        if lost is not None and (rendered == escaped or lost_message(messages, self._plain(escaped)) is not None):
            role = str(found[lost].get("role"))[:40]
            raise RefusedError(
                f"the chat template leaves out the content of its message {lost}, of role {role!r}", "not_rendered"
            )
        try:
            return self._parts(rendered, aside, seal)
        except UnicodeEncodeError as error:
            raise RefusedError("it holds half of a surrogate pair, which is not valid Unicode", "invalid_unicode") from error

    def _with_tools(self, text: str) -> tuple[str, list[dict[str, Any]] | None]:
        """A conversation without its tools, and these."""
        if self._settings.boundary is None:
            return text, None
        text, _, tools = text.partition(self._settings.boundary)
        return text, read_tools(tools)

    def _plain(self, rendered: str) -> str:
        """A rendered conversation without the marks of single parts, which are between those of a message."""
        if self._settings.counted is None:
            return rendered
        return rendered.replace(self._environment.open, "").replace(self._environment.close, "")

    def _narrowed(self, messages: list[Message], aside: list[str]) -> str:
        """The conversation as the template writes it, with marks around the parts that count."""
        count, texts, owners = frozenset(self._settings.counted or ()), [*aside], dict[str, StandIn]()

        def replace(stand_in: StandIn) -> str:
            reference = _reference(stand_in.text, texts)
            owners[reference] = stand_in
            return reference

        counted = {i for i, message in enumerate(messages) if message.get("role") in self._roles}
        changed = [with_stand_ins(one, i, replace) if i in counted else one for i, one in enumerate(messages)]
        calls = {i: names for i in counted if (names := names_of_calls(messages[i])) is not None}
        empty = counted - {one.message for one in owners.values()} - calls.keys()  # their ends are those of a content
        found = {one.part for one in owners.values()} | ({CALLS} if calls else set()) | ({CONTENT} if empty else set())
        if found <= count:
            return self._marked(messages)
        marked = self._marked(changed)
        open_, close = self._environment.open, self._environment.close
        regions = len(marked.split(open_)) - 1
        numbers = iter(sorted(counted) if regions == len(counted) else [None] * regions)

        def put_back(text: str) -> str:
            return REFERENCE.sub(lambda found: owners[found[0]].text if found[0] in owners else found[0], text)

        def narrow(region: re.Match[str]) -> str:
            text, number = region[1], next(numbers)
            found = [(one, owners[one[0]]) for one in REFERENCE.finditer(text) if one[0] in owners]
            number = found[0][1].message if number is None and found else number
            places = [Found(*one.span(), of.part) for one, of in found if of.message == number]
            names = calls.get(number) if number is not None else [] if calls else None
            parts = divide(text, places, names, self._special)
            return "".join(
                f"{open_}{put_back(text[start:stop])}{close}" if part in count else put_back(text[start:stop])
                for start, stop, part in parts
            )

        inner = re.compile(f"{re.escape(open_)}(.*?){re.escape(close)}", re.DOTALL)
        pieces, at = list[str](), 0
        for region in inner.finditer(marked):
            pieces += (put_back(marked[at : region.start()]), narrow(region))
            at = region.end()
        narrowed = "".join([*pieces, put_back(marked[at:])])
        if self._plain(narrowed) != self._plain(self._render(messages)):
            raise RefusedError(f"the chat template looks into its messages: {NOT_DIVIDED}")
        return narrowed

    def _marked(self, messages: list[Message]) -> str:
        """The conversation as the template writes it, with marks around what counts."""
        if self._marks:
            return self._render(messages)
        counted = [i for i, message in enumerate(messages) if message.get("role") in self._roles]
        if not counted:
            return self._render(messages)
        try:
            beginnings = _Beginnings(self, messages, counted)
            return self._with_marks(beginnings.whole, {i: self._span(messages, i, beginnings) for i in counted})
        except RefusedError:
            # Datasets without these settings are what they were.
            if self._settings.boundary is None and self._settings.counted is None:
                raise
            whole, places = self._traced_places(messages, counted)
            if places is None:
                raise
            return self._with_marks(whole, places)

    def _with_marks(self, whole: str, places: dict[int, tuple[int, int]]) -> str:
        """A rendered conversation with marks around the *places* of messages."""
        pieces, at = list[str](), 0
        for i, (start, stop) in places.items():
            if start < at:
                raise RefusedError(f"its message {i} is rendered before the end of an earlier one that counts")
            pieces += (whole[at:start], self._environment.open, whole[start:stop], self._environment.close)
            at = stop
        return "".join([*pieces, whole[at:]])

    def _traced_places(self, messages: list[Message], counted: list[int]) -> tuple[str, dict[int, tuple[int, int]] | None]:
        """The conversation, and the place of each message that counts: what the template writes for it, from after the prompt
        that asks for an answer. None where its loops do not tell.
        """
        regions = Regions(messages)
        template = self._tracing = self._tracing or _compiled(
            self._environment, traced(self._environment.parse(self._settings.template))
        )
        context = template.new_context(
            {**self._given, "messages": messages, "add_generation_prompt": False, MARK: _Function(regions.begin)}
        )
        try:
            for chunk in template.root_render_func(context):
                regions.add(chunk)
        except MemoryError:
            raise
        except Exception as error:  # as in `_render`
            raise RefusedError(f"the chat template says: {error}") from error
        whole, found = regions.text, regions.of_messages()
        if not found.keys() >= {*counted}:
            return whole, None
        prompt, places = self._prompt(messages, whole, counted[0]), {}
        for i in counted:
            start, stop = found[i].start, len(whole) if i == len(messages) - 1 else found[i].stop
            if messages[i].get("role") in ASSISTANT:
                start += self._shared(prompt, whole[start:stop])
            blank = self._last.search(whole, start, stop) if whole[stop - 1 : stop].isspace() else None
            places[i] = start, stop - (len(blank[1]) if blank else 0)
        return whole, places

    def _prompt(self, messages: list[Message], whole: str, first: int) -> str:
        """The prompt that asks for the next answer; empty if there is none."""
        for count, before in ((len(messages), whole), (first, None)):
            try:
                before = self._render(messages[:count]) if before is None else before
                asked = self._render(messages[:count], prompt=True)
            except RefusedError:
                continue
            if asked.startswith(before) and len(asked) > len(before):
                return asked[len(before) :]
        return ""

    def _shared(self, prompt: str, text: str) -> int:
        """The characters of a prompt with which a text begins: all, or up to a special token or space."""
        if text.startswith(prompt):
            return len(prompt)
        same = next((i for i, pair in enumerate(zip(prompt, text, strict=False)) if len({*pair}) > 1), 0)
        return max((one.end() for one in self._borders.finditer(prompt) if one.end() <= same), default=0)

    def _span(self, messages: list[Message], i: int, beginnings: _Beginnings) -> tuple[int, int]:
        """The place of message *i* in the whole: from the prompt that the template writes to ask for it, to its end."""
        whole, upto = beginnings.whole, beginnings.find(i + 1, False)
        stop, start = upto.start + len(upto.end), None
        if whole.startswith(upto.end, upto.start):
            prompts = (True, False) if messages[i].get("role") in ASSISTANT else (False,)
            start = next((end for prompt in prompts if (end := beginnings.end_of(i, prompt, stop)) is not None), None)
        if start is None:
            raise RefusedError(
                f"its message {i} is rendered otherwise when others follow, so that it cannot be found: put "
                "{% generation %} and {% endgeneration %} around what counts in the template"
            )
        blank = self._last.search(whole, start, stop) if whole[stop - 1 : stop].isspace() else None
        return start, stop - (len(blank[1]) if blank else 0)

    def prefixes(self, messages: list[Message], wanted: frozenset[int]) -> Prefixes:
        """The conversation with its *wanted* beginnings, as far as one rendering shows them."""
        if self._divided is not None:
            rendering = Rendering(self._environment, messages, wanted, self._tails)
            functions = {name: _Function(function) for name, function in rendering.names().items()}
            context = self._divided.new_context(
                {**self._given, "messages": messages, "add_generation_prompt": False, **functions}
            )
            try:
                for chunk in self._divided.root_render_func(context):
                    rendering.chunks.append(chunk)
                self._tails = rendering.tails if self._has_same_tail else None
                return rendering.prefixes()
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001, S110  of a beginning, which may not be needed; else it is raised again below
                pass
        return Prefixes(self._render(messages), {})

    def note(self, count: int) -> None:
        """Note that the beginning of *count* messages has to be rendered alone."""
        if self.why_slow is None and count > FEW:
            self.why_slow = "what it writes for a message depends on later ones"

    def render(self, messages: list[Message], prompt: bool) -> str:
        """A conversation as the template writes it, with the prompt that asks for the next message."""
        return self._render(messages, prompt)

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        context = self._template.new_context({**self._given, "messages": messages, "add_generation_prompt": prompt})
        try:
            return "".join(self._template.root_render_func(context))
        except MemoryError:
            raise
        except _DayError as error:
            raise RefusedError(f"the chat template {error}", "no_day") from error
        except Exception as error:  # whatever a template does with what a message lacks
            raise RefusedError(f"the chat template says: {error}") from error

    def _put_aside(self, message: Message, aside: list[str]) -> Message:
        """A message with the special strings in it put aside, and what a special string could begin with at an end."""
        found = {}
        for name, value in message.items():
            if name not in self._clean:
                if (changed := self._without_specials(name, aside)) == name and len(self._clean) < MAX_ASIDE:
                    self._clean.add(name)
                name = changed
            # Templates make special tokens of a role, such as <|user|>.
            is_role = name == "role" and isinstance(value, str) and PLAIN_ROLE.fullmatch(value)
            found[name] = value if is_role else self._value_aside(value, aside, MAX_DEPTH)
        return found

    def _value_aside(self, value: Any, aside: list[str], depth: int) -> Any:
        if isinstance(value, str):
            return self._without_specials(value, aside)
        if not isinstance(value, list | dict):
            return value
        if not depth:
            raise RefusedError(f"it is nested too deep: more than {MAX_DEPTH} lists and objects within each other")
        if isinstance(value, list):
            return [self._value_aside(item, aside, depth - 1) for item in value]
        return {
            self._without_specials(name, aside): self._role_aside(name, item, aside, depth - 1) for name, item in value.items()
        }

    def _role_aside(self, name: str, value: Any, aside: list[str], depth: int) -> Any:
        is_role = name == "role" and isinstance(value, str) and PLAIN_ROLE.fullmatch(value)
        return value if is_role else self._value_aside(value, aside, depth)

    def _without_specials(self, text: str, aside: list[str]) -> str:
        def keep(found: re.Match[str]) -> str:
            return _reference(found[0], aside)

        text = self._special.sub(keep, text)
        if text[-1:] in self._ends:
            for length in range(min(self._longest, len(text)), 0, -1):
                if text[-length:] in self._begun:
                    return text[:-length] + _reference(text[-length:], aside)
        return text

    def _parts(self, text: str, aside: list[str], seal: str) -> Rendered:
        """Rendered text in parts, with what was put aside in its place."""
        parts: list[bytes | int] = []
        spans: list[tuple[int, int]] = []
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
            elif mark[1:] != seal:
                raise RefusedError(f"the chat template makes U+{ord(mark[0]):X} of it, which is not a character")
            elif mark[0] == OPEN:
                opened = length
            else:
                spans.append((opened, length))
        if at < len(text):
            plain.append(text[at:].encode())
        if plain:
            parts.append(b"".join(plain))
        return Rendered(parts, spans)

    def _now(self, form: str) -> str:
        if self._settings.day is None:
            raise _DayError("asks for the day. Set source.chat_date, such as 2026-07-31: it is part of the dataset")
        return date.fromisoformat(self._settings.day).strftime(form)


class _Beginnings:
    """A rendered conversation and its beginnings. Those that its rendering does not show are rendered when they are asked for."""

    def __init__(self, renderer: Renderer, messages: list[Message], counted: list[int]) -> None:
        self._renderer, self._messages = renderer, messages
        wanted = frozenset(count for i in counted for count in (i, i + 1))
        self.whole, self._known = renderer.prefixes(messages, wanted)
        self._known[0, False] = Beginning(0, "")
        self._known.setdefault((len(messages), False), Beginning(0, self.whole))

    def find(self, count: int, prompt: bool) -> Beginning:
        """The beginning of *count* messages, with the *prompt* for the next one."""
        if (count, prompt) not in self._known:
            self._renderer.note(count)
            self._known[count, prompt] = Beginning(0, self._renderer.render(self._messages[:count], prompt))
        return self._known[count, prompt]

    def end_of(self, count: int, prompt: bool, most: int) -> int | None:
        """The end of a beginning within the first *most* characters of the whole. None where the whole does not begin with it."""
        try:
            start, text = self.find(count, prompt)
        except RefusedError:
            return None  # some templates take no conversation that ends there
        end = start + len(text)
        return end if end <= most and self.whole.startswith(text, start) else None


def _without_escapes(rendered: str, given: str, aside: list[str]) -> str:
    """Rendered text with references where a template has written their escapes, as Python does in the text of a list, and JSON
    in ASCII. RefusedError where the conversation itself may have them.
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


def _check_functions(parsed: nodes.Template) -> None:
    """Refuse functions that give something else each time."""
    stored = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
    used = {of.name for of in parsed.find_all(nodes.Filter)} | {name.name for name in parsed.find_all(nodes.Name)} - stored
    if found := sorted(used & ELSEWHERE):
        raise TemplateError(f"it uses {found[0]!r}, which gives something else each time")


def _compiled(environment: _Sandbox, parsed: nodes.Template) -> Template:
    return Template.from_code(environment, environment.compile(parsed), environment.make_globals(None))


class _Function:
    """A function that has no text: the usual one would be its address, which changes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        raise TemplateError("it writes a function where text is wanted")


class _Items:
    """Items that can be read once. They have no text, as functions have none."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def __next__(self) -> Any:
        return next(self._items)

    def __repr__(self) -> str:
        raise TemplateError("it writes items where text is wanted; put '| list' or '| join' after them")


class _Cycler(Cycler):
    def __repr__(self) -> str:
        raise TemplateError("it writes a cycler where text is wanted")


class _Joiner(Joiner):
    def __repr__(self) -> str:
        raise TemplateError("it writes a joiner where text is wanted")


def _without_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose items have no text."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return _Items(found) if hasattr(found, "__next__") else found

    return filtered


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which nothing is repeated without end, and everything follows from the conversation. *marks*: whether
    marks are put around what ``{% generation %}`` says.
    """

    intercepted_binops = frozenset({"*", "**"})
    open, close = OPEN, CLOSE
    """The marks of the conversation that is rendered."""

    def __init__(self, marks: bool) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.marks = marks
        self.filters.update({name: _without_text(FILTERS[name]) for name in LAZY}, tojson=_to_json)
        self.globals.update(
            namespace=_Namespace, range=_Function(safe_range), cycler=_Function(_Cycler), joiner=_Function(_Joiner)
        )
        for name in ELSEWHERE:
            self.filters.pop(name, None)
            self.globals.pop(name, None)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return self._without_address(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self._without_address(super().getitem(obj, argument))

    def _without_address(self, value: Any) -> Any:
        if type(value) in PLAIN or isinstance(value, HAVE_TEXT) or not callable(value) or not self.is_safe_callable(value):
            return value
        return _Function(value)

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
    """``{% generation %}`` puts marks around the text up to ``{% endgeneration %}``."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it
    environment: _Sandbox

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        text, environment = caller(), self.environment
        return environment.open + text + environment.close if environment.marks else text


class _Namespace(Namespace):
    """Jinja's namespace, without names that Python keeps for itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace takes no name that begins with an underscore, but there is {name!r}")
        super().__setitem__(name, value)


PLAIN = frozenset({str, int, float, bool, type(None), list, dict, tuple})
HAVE_TEXT = (Undefined, Macro, Namespace, type, _Function)
"""Kinds of values that can be called, and whose text is the same each time."""
OF_DICT = frozenset(dir(dict))


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
