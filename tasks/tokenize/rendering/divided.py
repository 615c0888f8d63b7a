"""Chat templates with a watched loop: a head, one loop over the messages, and a tail that a `Rendering` runs after any message.

Names that begin with ``flat_tokens_`` are this module's, within a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

MESSAGES, PROMPT, TOOLS = "messages", "add_generation_prompt", "tools"
HIDDEN = "flat_tokens_"
LOOP, IS_MESSAGE, IN_TAIL = f"{HIDDEN}loop", f"{HIDDEN}is_message", f"{HIDDEN}with_prompt"
LOOP_FACTS = frozenset(
    {"index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem", "depth", "depth0", "cycle"}
)
LAZY = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "reverse", "items"})
"""Filters whose result can be read once."""
READS_ALL = frozenset({"list", "join", "first", "sort", "sum", "tojson", "dictsort", "groupby", "min", "max"})
"""Filters that read such a result at once."""
SAME_OF_ALL_LISTS = frozenset({"defined", "undefined", "none", "iterable", "sequence", "string", "mapping", "number", "boolean"})


class NotDividedError(ValueError):
    """A template whose beginnings are not known from one rendering, and why."""


class Divided(NamedTuple):
    """A template with a watched loop, to which a `Rendering` gives messages. ``has_same_tail``: whether the text of its tail is
    the same for all conversations, but for the prompt.
    """

    template: nodes.Template
    has_same_tail: bool


def divided(environment: Environment, template: nodes.Template, names: frozenset[str], has_tools: bool = False) -> Divided:
    """The template with a watched loop. *names*: those that have a value from outside. *has_tools*: whether conversations have
    tools. NotDividedError where it is of another form.
    """
    _check(template)
    body = _Fold(template, names, has_tools).folded(template).body
    lists = _list_names(body)
    loops = [i for i, node in enumerate(body) if isinstance(node, nodes.For) and _is_list(node.iter, lists)]
    if not loops:
        raise NotDividedError("it has no loop over the messages at its top level")
    head, loop, tail = body[: loops[-1]], body[loops[-1]], body[loops[-1] + 1 :]
    assert isinstance(loop, nodes.For)
    _check_main(loop, tail)
    _check_macros(head, tail)
    watch = _Watch(lists)
    rewritten = [node for i, part in enumerate(head) for node in watch.top(_scanned(part, lists, [*head[i + 1 :], loop, *tail]))]
    inner = [node for part in _with_own_loop(_unfiltered(loop)) for node in watch.nested(part)]
    is_constant = _is_constant(template, tail, names - {TOOLS} if has_tools else names)
    after = [node for part in tail for node in _Watch(lists, nodes.Name(IN_TAIL, "load")).nested(part)]
    target = nodes.Tuple([loop.target, *(nodes.Name(name, "store") for name in (LOOP, IS_MESSAGE, IN_TAIL))], "store")
    choice = nodes.If(nodes.Name(IS_MESSAGE, "load"), [nodes.Scope(inner)], [], [nodes.Scope(after)])
    main = nodes.For(target, _call("drive", loop.iter), [choice], [], None, False)
    made = nodes.Template([*rewritten, main], lineno=1)
    made.set_environment(environment)
    for node in made.find_all(nodes.Node):
        node.lineno = node.lineno or 1
    return Divided(made, is_constant)


def _is_constant(template: nodes.Template, tail: list[nodes.Node], names: frozenset[str]) -> bool:
    """Whether the tail is the same after all conversations but for the prompt."""
    if any(next(_in(tail, kind), None) is not None for kind in (nodes.Call, nodes.CallBlock, nodes.Macro, nodes.For)):
        return False
    stored = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load"}
    stored |= {macro.name for macro in template.find_all(nodes.Macro)}
    loaded = {name.name for name in _in(tail, nodes.Name)}
    return not loaded & (stored | {MESSAGES}) and loaded <= names


def _check(template: nodes.Template) -> None:
    for kind in (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport):
        if template.find(kind) is not None:
            raise NotDividedError(f"it has {{% {kind.__name__.lower()} %}}")
    for name in template.find_all(nodes.Name):
        if name.name.startswith(HIDDEN):
            raise NotDividedError(f"it has a name that begins with {HIDDEN}")
        if name.name in ("cycler", "joiner") and name.ctx == "load":
            raise NotDividedError(f"line {name.lineno} uses {name.name}, which remembers its calls")
    for node in template.find_all(nodes.Assign):
        eager = {id(of.node) for of in node.find_all(nodes.Filter) if of.name in READS_ALL}
        if any(one.name in LAZY and id(one) not in eager for one in node.find_all(nodes.Filter)):
            raise NotDividedError(f"line {node.lineno} keeps items that can be read once; put '| list' after them")


def _check_main(loop: nodes.For, tail: list[nodes.Node]) -> None:
    """Refuse a main loop of which an iteration cannot be repeated."""
    line = loop.lineno
    if loop.recursive or loop.else_ or not isinstance(loop.target, nodes.Name):
        raise NotDividedError(f"its loop over the messages in line {line} is recursive, has an else, or several targets")
    if any(isinstance(node, nodes.Break) for node in _of_this_loop(loop.body)):
        raise NotDividedError(f"its loop over the messages in line {line} has a break")
    if any(name.name == loop.target.name for name in _in(tail, nodes.Name)):
        raise NotDividedError(f"it uses the name {loop.target.name!r} again after its loop over the messages")
    if any(_is_name(name, "loop") for name in _in(tail, nodes.Name)):
        raise NotDividedError("it uses loop after its loop over the messages")
    parts = loop.body
    own = {id(made.node): made.target.name for made in _in(parts, nodes.Assign) if isinstance(made.target, nodes.Name)}
    made_here = [call for call in _in(parts, nodes.Call) if _is_name(call.node, "namespace")]
    if any(id(call) not in own for call in made_here):
        raise NotDividedError(f"its loop over the messages in line {line} makes namespaces that have no names of their own")
    spaces = {own[id(call)] for call in made_here}
    looked_into = {id(of.node) for of in (*_in(parts, nodes.Getattr), *_in(parts, nodes.Getitem))}
    for name in _in(parts, nodes.Name):
        if name.name in spaces and name.ctx == "load" and id(name) not in looked_into:
            raise NotDividedError(f"line {name.lineno} passes on a namespace that is made for each message")


def _check_macros(head: list[nodes.Node], tail: list[nodes.Node]) -> None:
    """Refuse a tail that sets what a macro before it looks at: the tail's names are its own in a watched loop."""
    names = {name.name for name in _in(tail, nodes.Name) if name.ctx != "load"}
    for macro in _in(head, nodes.Macro):
        if found := sorted(names & {name.name for name in _find(macro, nodes.Name) if name.ctx == "load"}):
            raise NotDividedError(f"it sets {found[0]!r} after its loop over the messages, which a macro before it uses")


def _find(node: nodes.Node, kind: type[Any]) -> Iterator[Any]:
    """The node and all nodes below it that are of a kind."""
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _in(parts: Iterable[nodes.Node], kind: type[Any]) -> Iterator[Any]:
    """The nodes of a kind of which the parts are made."""
    return (found for part in parts for found in _find(part, kind))


def _of_this_loop(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """The nodes of a loop's body without those of loops within it."""
    for node in body:
        yield node
        if not isinstance(node, nodes.For):
            yield from _of_this_loop(node.iter_child_nodes())


def _is_name(node: Any, *names: str) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _call(name: str, *args: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(HIDDEN + name, "load"), list(args), [], None, None)


class _Fold(NodeTransformer):
    """Decide what is the same for all conversations, such as ``documents``, which is none. *names*: those with a value."""

    def __init__(self, template: nodes.Template, names: frozenset[str], has_tools: bool) -> None:
        stored = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load"}
        stored |= {macro.name for macro in template.find_all(nodes.Macro)}
        special = {"loop", "self", "super", "caller", "varargs", "kwargs"}
        self._stored, self._special, self._names = stored, special, names
        self._none = {"documents"} if has_tools else {"documents", TOOLS}

    def folded(self, template: nodes.Template) -> nodes.Template:
        found: nodes.Template = self.visit(template)
        return found

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802  Jinja's names
        is_none = node.ctx == "load" and node.name in self._none and node.name not in self._stored
        return nodes.Const(None, lineno=node.lineno) if is_none else node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        inner = node.node
        if isinstance(inner, nodes.Name) and node.name in ("defined", "undefined") and not self._varies(inner.name):
            return nodes.Const((inner.name in self._names) == (node.name == "defined"), lineno=node.lineno)
        self.generic_visit(node)
        if isinstance(node.node, nodes.Const) and node.name == "none":
            return nodes.Const(node.node.value is None, lineno=node.lineno)
        return node

    def _varies(self, name: str) -> bool:
        """Whether it depends on where it is asked if a name is defined."""
        return name in self._special or (name in self._stored and name not in self._names)

    def visit_Not(self, node: nodes.Not) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        known = _truth(node.node)
        return node if known is None else nodes.Const(not known, lineno=node.lineno)

    def visit_And(self, node: nodes.And) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        known = _truth(node.left)
        return node if known is None else node.right if known else node.left

    def visit_Or(self, node: nodes.Or) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        known = _truth(node.left)
        return node if known is None else node.left if known else node.right

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node | None:  # noqa: N802
        self.generic_visit(node)
        node.test = _as_test(node.test)
        known = _truth(node.test)
        if known is None or node.expr2 is None:
            return node
        return node.expr1 if known else node.expr2

    def visit_If(self, node: nodes.If) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        branches = [(node.test, node.body), *((one.test, one.body) for one in node.elif_)]
        kept: list[tuple[nodes.Expr, list[nodes.Node]]] = []
        otherwise = node.else_
        for test, body in branches:
            test = _as_test(self.visit(test))
            known = _truth(test)
            if known:
                otherwise = body
                break
            if known is None:
                kept.append((test, self._all(body)))
        otherwise = self._all(otherwise)
        if not kept:
            return otherwise
        (test, body), *rest = kept
        others = [nodes.If(test, body, [], [], lineno=node.lineno) for test, body in rest]
        return nodes.If(test, body, others, otherwise, lineno=node.lineno)

    def _all(self, body: Iterable[nodes.Node]) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for part in body:
            made = self.visit(part)
            found += made if isinstance(made, list) else [made]
        return found


def _truth(node: Any) -> bool | None:
    return bool(node.value) if isinstance(node, nodes.Const) else None


def _as_test(node: nodes.Expr) -> nodes.Expr:
    """The same truth, with what is false anyway decided, and with the prompt asked for last."""
    if isinstance(node, nodes.And | nodes.Or):
        left, right, decides = _as_test(node.left), _as_test(node.right), isinstance(node, nodes.Or)
        if _truth(right) is decides and _is_plain(left):
            return right
        if _is_name(left, PROMPT) and _is_plain(right):
            left, right = right, left
        return type(node)(left, right, lineno=node.lineno)
    if isinstance(node, nodes.Not):
        return nodes.Not(_as_test(node.node), lineno=node.lineno)
    return node


def _is_plain(node: Any) -> bool:
    """Whether an expression has no effect and cannot fail."""
    if isinstance(node, nodes.Getattr):
        return _is_name(node.node, "loop") and node.attr in LOOP_FACTS
    if isinstance(node, nodes.Test):
        return not node.args and node.name in SAME_OF_ALL_LISTS and _is_plain(node.node)
    if isinstance(node, nodes.Not | nodes.And | nodes.Or):
        return all(map(_is_plain, node.iter_child_nodes()))
    return isinstance(node, nodes.Name | nodes.Const)


def _list_names(body: list[nodes.Node]) -> frozenset[str]:
    """The names of the messages, and of lists of all but the first of them."""
    made = [node for node in _in(body, nodes.Assign) if isinstance(node.target, nodes.Name)]
    names = {MESSAGES}
    for _ in range(len(made) + 1):
        names |= {node.target.name for node in made if _is_list(node.node, names)}
    for node in made:
        if node.target.name in names and not _is_list(node.node, names):
            raise NotDividedError(f"line {node.lineno} gives {node.target.name!r} another value than a list of messages")
    targets = {id(node.target) for node in made}
    for name in _in(body, nodes.Name):
        if name.ctx != "load" and (name.name == PROMPT or (name.name in names and id(name) not in targets)):
            raise NotDividedError(f"line {name.lineno} gives {name.name!r} another value")
    return frozenset(names)


def _is_list(node: Any, names: Iterable[str]) -> bool:
    """Whether an expression is a list of all messages but some first ones."""
    if isinstance(node, nodes.CondExpr):
        return _is_list(node.expr1, names) and _is_list(node.expr2, names)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        cut = node.arg
        begins = cut.start is None or (
            isinstance(cut.start, nodes.Const) and type(cut.start.value) is int and cut.start.value >= 0
        )
        return begins and cut.stop is None and cut.step is None and _is_list(node.node, names)
    return _is_name(node, *names)


def _unfiltered(loop: nodes.For) -> nodes.For:
    """The same loop, with its condition in its body."""
    if loop.test is None:
        return loop
    if any(_is_name(name, "loop") for node in loop.body for name in _find(node, nodes.Name)):
        raise NotDividedError(f"its loop over the messages in line {loop.lineno} has a condition, and uses loop")
    inner = nodes.If(loop.test, loop.body, [], [], lineno=loop.lineno)
    return nodes.For(loop.target, loop.iter, [inner], [], None, False, lineno=loop.lineno)


class _LoopNames(NodeTransformer):
    """Replace ``loop`` of a loop by its watched form, but not that of the loops within it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(part) for part in node.else_]
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        if _is_name(node.node, "loop") and node.attr in LOOP_FACTS:
            return nodes.Getattr(nodes.Name(LOOP, "load"), node.attr, "load", lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if _is_name(node.node, "loop") and isinstance(node.arg, nodes.Const) and node.arg.value in LOOP_FACTS:
            return nodes.Getattr(nodes.Name(LOOP, "load"), str(node.arg.value), "load", lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name == "loop":
            raise NotDividedError(f"line {node.lineno} uses loop otherwise than for {', '.join(sorted(LOOP_FACTS))}")
        return node


def _with_own_loop(loop: nodes.For) -> list[nodes.Node]:
    return [_LoopNames().visit(part) for part in loop.body]


def _scanned(node: nodes.Node, lists: frozenset[str], after: list[nodes.Node]) -> nodes.Node:
    """A loop over the messages before the main one, as a watched loop. Other nodes are returned unchanged. *after*: all nodes
    after it, which tell the attributes of namespaces that are of any use.
    """
    if not isinstance(node, nodes.For) or not _is_list(node.iter, lists):
        return node
    if node.recursive or node.else_ or not isinstance(node.target, nodes.Name):
        raise NotDividedError(f"its loop over the messages in line {node.lineno} is recursive, has an else, or several targets")
    loop = _unfiltered(node)
    by_name = [of for of in _in(after, nodes.Getitem) if isinstance(of.arg, nodes.Const)]
    used = {*(of.attr for of in _in(after, nodes.Getattr)), *(of.arg.value for of in by_name)}
    looked_into = {id(of.node) for of in (*_in(after, nodes.Getattr), *by_name)}
    assigned = {of.attr for of in _in(loop.body, nodes.NSRef)}
    spaces = {of.name for of in _in(loop.body, nodes.NSRef)}
    if any(_is_name(name, *spaces) and id(name) not in looked_into for name in _in(after, nodes.Name)):
        used |= assigned
    unused = nodes.Tuple([nodes.Const(name) for name in sorted(assigned - used)], "load")
    target = nodes.Tuple([loop.target, nodes.Name(LOOP, "store")], "store")
    return nodes.For(target, _call("scan", loop.iter, unused), _with_own_loop(loop), [], None, False, lineno=loop.lineno)


class _Watch(NodeTransformer):
    """Watch every access to the messages and to the prompt. NotDividedError where one cannot be watched. *prompt*: what says
    whether it is wanted, where nobody has to watch that.
    """

    def __init__(self, lists: frozenset[str], prompt: nodes.Expr | None = None) -> None:
        self._lists, self._prompt = lists, prompt

    def top(self, node: nodes.Node) -> list[nodes.Node]:
        """A node of the top level, where lists of messages may get names."""
        if isinstance(node, nodes.Assign) and _is_list(node.node, self._lists):
            node.node = self._list(node.node)
            return [node]
        if isinstance(node, nodes.If):
            node.test = self._test(node.test)
            node.body, node.else_ = ([made for part in body for made in self.top(part)] for body in (node.body, node.else_))
            node.elif_ = [made for part in node.elif_ for made in self.top(part)]  # type: ignore[misc]
            return [node]
        if isinstance(node, nodes.For) and isinstance(node.iter, nodes.Call) and _is_name(node.iter.node, f"{HIDDEN}scan"):
            node.iter.args[0] = self._list(node.iter.args[0])
            node.body = [made for part in node.body for made in self.nested(part)]
            return [node]
        return self.nested(node)

    def nested(self, node: nodes.Node) -> list[nodes.Node]:
        made = self.visit(node)
        return made if isinstance(made, list) else [made]

    def _list(self, node: Any) -> Any:
        if isinstance(node, nodes.CondExpr):
            node.test, node.expr1, node.expr2 = self._test(node.test), self._list(node.expr1), self._list(node.expr2)
        return node

    def _test(self, node: Any) -> Any:
        if _is_name(node, *self._lists):
            return _call("some", node)
        if isinstance(node, nodes.And | nodes.Or):
            node.left, node.right = self._test(node.left), self._test(node.right)
            return node
        return self.visit(node)

    def visit_If(self, node: nodes.If) -> nodes.Node:  # noqa: N802
        node.test = self._test(node.test)
        node.body, node.else_ = ([made for part in body for made in self.nested(part)] for body in (node.body, node.else_))
        node.elif_ = [self.visit(part) for part in node.elif_]
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:  # noqa: N802
        node.test, node.expr1 = self._test(node.test), self.visit(node.expr1)
        node.expr2 = None if node.expr2 is None else self.visit(node.expr2)
        return node

    def visit_Not(self, node: nodes.Not) -> nodes.Node:  # noqa: N802
        node.node = self._test(node.node)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        is_same = _is_name(node.node, *self._lists) and node.name in SAME_OF_ALL_LISTS
        return node if is_same else self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        one = node.expr
        most = node.ops[0].expr.value if len(node.ops) == 1 and isinstance(node.ops[0].expr, nodes.Const) else None
        if _is_length(one, self._lists) and type(most) is int and most >= 0:
            node.expr = _call("length", one.node, nodes.Const(most + 1))  # type: ignore[attr-defined]
            return node
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        if node.name == "first" and _is_name(node.node, *self._lists):
            return _call("item", node.node, nodes.Const(0))
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if not _is_name(node.node, *self._lists):
            return self.generic_visit(node)
        is_last = isinstance(node.arg, nodes.Neg) or (isinstance(node.arg, nodes.Const) and not is_index(node.arg.value))
        if is_last or isinstance(node.arg, nodes.Slice):
            raise NotDividedError(f"line {node.lineno} looks at the messages from their end, or at some of them")
        return _call("item", node.node, self.visit(node.arg))

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name in self._lists:
            raise NotDividedError(f"line {node.lineno} uses {node.name!r} as a whole, other than in a loop")
        return (self._prompt or _call("prompt")) if node.name == PROMPT and node.ctx == "load" else node


def is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_length(node: Any, lists: frozenset[str]) -> bool:
    return isinstance(node, nodes.Filter) and node.name in ("length", "count") and _is_name(node.node, *lists)
