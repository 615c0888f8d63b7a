"""The beginnings of a conversation, as a template renders each of them, from one rendering of the whole conversation.

A template is a head, one loop over the messages, and a tail. What it writes for the first *k* messages is what it has written by
the end of message *k*, and its tail. So its loop is given the messages one by one, and after a message the tail is run as if no
message followed. Every access to the messages is watched: text that depends on later messages is not taken for a beginning's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import Environment
from jinja2.utils import Namespace

from tasks.tokenize.rendering.divided import HIDDEN, is_index

NO_END = 1 << 60
Step = tuple[Any, "_Loop", bool, bool]
"""An iteration of the main loop: the message, ``loop``, whether there is a message, and whether its tail writes the prompt."""


class Beginning(NamedTuple):
    """A rendered beginning of a conversation: ``whole[:start] + end``."""

    start: int
    end: str


class Prefixes(NamedTuple):
    """A conversation as it is rendered, and its beginnings, by the number of messages and whether the next one is asked for. A
    beginning that is missing has to be rendered.
    """

    whole: str
    beginnings: dict[tuple[int, bool], Beginning]


class _Loop:
    """Jinja's ``loop`` of a watched loop."""

    depth, depth0 = 1, 0

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def __repr__(self) -> str:
        return "<loop>"

    @property
    def index0(self) -> int:
        return self._rendering.at

    @property
    def index(self) -> int:
        return self._rendering.at + 1

    @property
    def first(self) -> bool:
        return self._rendering.at == 0

    @property
    def last(self) -> bool:
        return not self._rendering.is_followed()

    @property
    def length(self) -> int:
        return self._rendering.full_length()

    @property
    def revindex(self) -> int:
        return self._rendering.full_length() - self._rendering.at

    @property
    def revindex0(self) -> int:
        return self._rendering.full_length() - self._rendering.at - 1

    @property
    def previtem(self) -> Any:
        at = self._rendering.at
        return self._rendering.items[at - 1] if at else self._rendering.undefined("there is no previous item")

    @property
    def nextitem(self) -> Any:
        at = self._rendering.at
        return (
            self._rendering.items[at + 1] if self._rendering.is_followed() else self._rendering.undefined("there is no next item")
        )

    def cycle(self, *args: Any) -> Any:
        if not args:
            raise TypeError("no items for cycling given")
        return args[self._rendering.at % len(args)]


class Rendering:
    """One rendering of a divided template. ``chunks``: its text so far, which the caller appends to. *wanted*: the beginnings to
    make, by their numbers of messages. ``tails``: the text of the tail by whether it has the prompt, if it is known.
    """

    def __init__(
        self,
        environment: Environment,
        messages: Sequence[Any],
        wanted: frozenset[int],
        tails: dict[bool, str] | None = None,
    ) -> None:
        self.chunks: list[str] = []
        self.items: Sequence[Any] = messages
        self.at = 0
        self._environment, self._messages, self._wanted = environment, messages, wanted
        self._known_tails = tails
        self.tails = tails or {}
        self._spaces: list[Namespace] = []
        self._cut = 0  # messages that are left out at the end
        self._seen = 0  # as many messages are needed for the text since the last look
        self._seen_before = 0
        self._has_asked = self._had_asked = False  # whether the prompt was asked for
        self._prompts = False
        self.is_beginning = False
        """Whether it runs for a beginning, and not for the whole."""
        self._ends: dict[tuple[int, bool], tuple[int, str]] = {}

    def names(self) -> dict[str, Callable[..., Any]]:
        """The functions that the template calls."""
        own = (self.drive, self.scan, self.item, self.some, self.length, self.prompt)
        return {"namespace": self.namespace, **{HIDDEN + one.__name__: one for one in own}}

    def prefixes(self) -> Prefixes:
        """The texts, after the rendering."""
        starts = [0, *accumulate(map(len, self.chunks))]
        return Prefixes("".join(self.chunks), {key: Beginning(starts[of], end) for key, (of, end) in self._ends.items()})

    def drive(self, items: Sequence[Any]) -> Iterator[Step]:
        """The messages of the main loop, one by one, and its tail, for which there is no message."""
        before = self._shift(items)
        spaces, loop = self._spaces[:], _Loop(self)
        self._look()
        for at, item in enumerate(items):
            count = before + at + 1
            is_wanted = count in self._wanted
            state = [dict(one._Namespace__attrs) for one in spaces] if is_wanted else []
            self.at, self.items, start = at, items, len(self.chunks)
            yield item, loop, True, False
            if is_wanted and not self._are_known(count):
                yield from self._beginnings(count, item, loop, start, spaces, state)
                self.at, self.items = at, items
            self._look()
        yield None, loop, False, False

    def _are_known(self, count: int) -> bool:
        """Whether the beginnings that end with this message need no rendering: their tails are known, the rest is the same."""
        if (
            not self._known_tails
            or len(self._known_tails) < 2
            or max(self._seen, self._seen_before) > count
            or self._has_asked
            or self._had_asked
        ):
            return False
        end = len(self.chunks)
        self._ends[count, False], self._ends[count, True] = (end, self.tails[False]), (end, self.tails[True])
        return True

    def _beginnings(
        self, count: int, item: Any, loop: _Loop, start: int, spaces: list[Namespace], state: list[dict[str, Any]]
    ) -> Iterator[Step]:
        """Rendition the tail as if no message followed, and before it the message once more, if it was written for one that is
        followed.
        """
        seen, has_asked, end = self._seen, self._has_asked, len(self.chunks)
        after = [dict(one._Namespace__attrs) for one in spaces]
        self._cut, self.is_beginning = len(self._messages) - count, True
        for prompts in (False, True):
            if self._seen_before > count or (prompts and self._had_asked):
                continue
            again = seen > count or (prompts and has_asked)
            self._prompts = prompts
            if again:
                _restore(spaces, state)
                yield item, loop, True, False
            yield None, loop, False, prompts
            text = "".join(self.chunks[end:])
            self._ends[count, prompts] = (start if again else end, text)
            if not again:
                self.tails[prompts] = text
            del self.chunks[end:]
            _restore(spaces, after)
        self._cut, self._prompts, self.is_beginning = 0, False, False
        self._seen, self._has_asked = seen, has_asked

    def scan(self, items: Sequence[Any], unused: tuple[str, ...]) -> Iterator[tuple[Any, _Loop]]:
        """The messages of another loop. Beginnings are the whole's only from the last message on that had an effect there.
        *unused*: attributes of namespaces of which nothing else knows.
        """
        before, loop = self._shift(items), _Loop(self)
        spaces = self._spaces[:]
        self._look()
        for at, item in enumerate(items):
            count = before + at + 1
            state, start = _used(spaces, unused), len(self.chunks)
            self.at, self.items = at, items
            try:
                yield item, loop
            except GeneratorExit:
                self._seen_before = max(self._seen_before, self._seen, count)
                raise
            has_effect = any(self.chunks[start:]) or not _is_same(state, _used(spaces, unused))
            self._seen = NO_END if self._seen > count else count if has_effect else 0
            self._look()

    def item(self, items: Sequence[Any], key: Any) -> Any:
        """An item of a list of messages."""
        length, before = max(len(items) - self._cut, 0), self._shift(items)
        if not is_index(key):
            self._seen = NO_END
        elif key < length:
            self._seen = max(self._seen, before + key + 1)
            return items[key]
        return self._environment.getitem(items[:length] if self._cut else items, key)

    def some(self, items: Sequence[Any]) -> bool:
        """Whether a list of messages has any."""
        return self.length(items, 1) > 0

    def length(self, items: Sequence[Any], most: int) -> int:
        """The length of a list of messages, or *most* where it is longer."""
        length = max(len(items) - self._cut, 0)
        self._seen = max(self._seen, self._shift(items) + most if length >= most else NO_END)
        return min(length, most)

    def prompt(self) -> bool:
        self._has_asked = True
        return self._prompts

    def namespace(self, *args: Any, **kwargs: Any) -> Any:
        made = self._environment.globals["namespace"](*args, **kwargs)  # type: ignore[operator]
        self._spaces.append(made)
        return made

    def is_followed(self) -> bool:
        """Whether another message follows this one."""
        if self.at + 1 >= len(self.items) - self._cut:
            return False
        self._seen = max(self._seen, self._shift(self.items) + self.at + 2)
        return True

    def full_length(self) -> int:
        self._seen = NO_END
        return len(self.items) - self._cut

    def undefined(self, hint: str) -> Any:
        return self._environment.undefined(hint)

    def _shift(self, items: Sequence[Any]) -> int:
        """How many messages are before those of a list."""
        return len(self._messages) - len(items)

    def _look(self) -> None:
        """Begin to watch the next iteration."""
        self._seen_before, self._seen = max(self._seen_before, self._seen), 0
        self._had_asked, self._has_asked = self._had_asked or self._has_asked, False


def _restore(spaces: list[Namespace], state: list[dict[str, Any]]) -> None:
    for one, attributes in zip(spaces, state, strict=True):
        one._Namespace__attrs = dict(attributes)  # type: ignore[attr-defined]


def _used(spaces: list[Namespace], unused: tuple[str, ...]) -> list[dict[str, Any]]:
    all_of = (one._Namespace__attrs for one in spaces)
    return [{name: value for name, value in of.items() if name not in unused} for of in all_of]


def _is_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether namespaces have the same values, of the same types."""
    return all(
        a.keys() == b.keys() and all(a[name] is b[name] or (type(a[name]) is type(b[name]) and a[name] == b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )
