"""Chat templates that mark where they begin to write each message, whatever else they look at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import nodes

MESSAGES = "messages"
MARK = "flat_tokens_begin"
"""The function that a template calls when it begins with a message, and, without one, when it has done with all."""


class Region(NamedTuple):
    """The text that a template writes while it looks at a message: ``text[start:stop]``."""

    start: int
    stop: int


class Regions:
    """The text of a template that is traced, and where it began with each of the *messages*."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._numbers = {id(message): i for i, message in enumerate(messages)}
        self._chunks = list[str]()
        self._length = 0
        self._begun = list[tuple[int, int | None]]()

    def add(self, chunk: str) -> None:
        """Add what the template writes next."""
        self._chunks.append(chunk)
        self._length += len(chunk)

    def begin(self, message: Any = None) -> str:
        """Note that the template begins with a message."""
        self._begun.append((self._length, self._numbers.get(id(message))))
        return ""

    @property
    def text(self) -> str:
        return "".join(self._chunks)

    def of_messages(self) -> dict[int, Region]:
        """The regions of messages by their numbers, without those that have none, or several."""
        found = dict[int, list[Region]]()
        for (start, number), (stop, _) in pairwise([*self._begun, (self._length, None)]):
            if number is not None and stop > start:
                found.setdefault(number, []).append(Region(start, stop))
        return {number: regions[0] for number, regions in found.items() if len(regions) == 1}


def traced(template: nodes.Template) -> nodes.Template:
    """The template that calls MARK at the begin of each round of its loops over messages, and after them. Loops within macros,
    captured blocks and filters are left alone: what they write comes later.
    """
    lists = {MESSAGES}
    made = [one for one in template.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)]
    for _ in range(len(made) + 1):
        lists |= {one.target.name for one in made if _of_messages(one.node, lists)}  # type: ignore[attr-defined]
    template.body = _body(template.body, lists)
    for node in template.find_all(nodes.Node):
        node.lineno = node.lineno or 1
    return template


def _body(body: list[nodes.Node], lists: set[str]) -> list[nodes.Node]:
    found = list[nodes.Node]()
    for node in body:
        found.append(node)
        if isinstance(node, nodes.If):
            node.body, node.else_ = _body(node.body, lists), _body(node.else_, lists)
            for other in node.elif_:
                other.body = _body(other.body, lists)
        elif isinstance(node, nodes.For) and isinstance(node.target, nodes.Name) and _of_messages(node.iter, lists):
            node.body = [_mark(nodes.Name(node.target.name, "load")), *node.body]
            found.append(_mark())
    return found


def _of_messages(node: Any, lists: set[str]) -> bool:
    """Whether an expression is a list of messages, or made of one by a slice or a filter."""
    if isinstance(node, nodes.CondExpr):
        return _of_messages(node.expr1, lists) and _of_messages(node.expr2, lists)
    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        return _of_messages(node.node, lists)
    return isinstance(node, nodes.Name) and node.name in lists


def _mark(*message: nodes.Expr) -> nodes.Output:
    return nodes.Output([nodes.Call(nodes.Name(MARK, "load"), list(message), [], None, None)])
