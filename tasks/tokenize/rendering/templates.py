"""Chat templates as ``transformers`` renders them: by Jinja in its sandbox, and by ``minijinja`` if a template uses only what is
alike in both.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from typing import Any

import jinja2
import minijinja
from jinja2 import TemplateError, Undefined, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import test_iterable as is_iterable
from jinja2.tests import test_sequence as is_sequence
from jinja2.utils import Cycler, Joiner, Namespace

from tasks.tokenize.rendering.messages import Message, RefusedError

GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
HIDDEN = "flat_tokens_"
"""Names that begin with it are this module's, within a template."""
MARK = f"{HIDDEN}mark"
AROUND = f"{{% macro {MARK}() %}}{{{{ {HIDDEN}open }}}}{{{{ caller() }}}}{{{{ {HIDDEN}close }}}}{{% endmacro %}}\n"
"""The macro that ``{% generation %}`` becomes a call of. Jinja trims the line feed."""
MAX_REPEATED = 1 << 20
"""Items that a template's ``*`` may make."""
ELSEWHERE = frozenset({"random", "lipsum"})
"""Names of Jinja that give something else each time."""
LAZY = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "reverse", "items"})
"""Filters whose result can be read once."""
READS_ALL = frozenset({"list", "join", "first", "length", "count", "sort", "sum", "tojson", "dictsort"})
"""Filters that read such a result at once."""

SAME_FILTERS = frozenset(
    {"tojson", "trim", "length", "count", "string", "default", "d", "items", "safe", "join", "list", "map", "replace", "first"}
    | {"selectattr", "rejectattr", "reject", "last", "dictsort", "upper", "lower", "capitalize"}
)
SAME_TESTS = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false", "equalto", "eq"}
)
SAME_METHODS = frozenset(
    {"split", "startswith", "endswith", "strip", "lstrip", "rstrip", "get", "items", "keys", "values", "replace", "join"}
    | {"upper", "lower", "capitalize"}
)
SAME_FUNCTIONS = frozenset({"namespace", "raise_exception", "strftime_now"})
BY_CASE = frozenset({"upper", "lower", "capitalize"})
"""Names by which minijinja and Jinja give the same. The last ones give the same of ASCII alone."""
OTHER_ESCAPE = re.compile(r"""\\(?![\\'"nrtx]|u(?![dD][89a-fA-F]))""")
"""Escapes that the engines may read otherwise."""
OTHER_TEXT = re.compile(r"\\u(?:001[c-fC-F]|[dD][89a-fA-F])")
"""Space that Python strips and minijinja does not, and halves of surrogate pairs, in JSON."""
FUEL, FUEL_OF_A_CHARACTER = 1_000_000, 64
"""Steps that minijinja may take, and how many more for each character of a conversation. Jinja has the word after that."""


class DayError(TemplateError):
    """A template asks for the day, which would make another dataset of the same text every day."""


class Template:
    """A chat template. An error of Jinja if it is not one. *given*: values of names. *day*: the day that it may ask for. *fast*:
    minijinja may render it. ``has_marks``: it says what counts, by ``{% generation %}``.
    """

    def __init__(self, source: str, given: Mapping[str, Any], day: date | None, fast: bool) -> None:
        self._given, self._day = given, day
        self.has_marks = GENERATION.search(source) is not None
        if self.has_marks:
            source = AROUND + GENERATION.sub(
                lambda tag: f"{{%{tag[1]} {'endcall' if tag[2] else f'call {MARK}()'} {tag[3]}%}}", source
            )
        sandbox = _Sandbox()
        sandbox.globals.update(raise_exception=_Function(_raise), strftime_now=_Function(self._now))
        parsed = sandbox.parse(source)
        stored = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
        self.names = {name.name for name in parsed.find_all(nodes.Name)}
        used = {of.name for of in parsed.find_all(nodes.Filter)} | self.names - stored
        if found := sorted(used & ELSEWHERE):
            raise TemplateError(f"it uses {found[0]!r}, which gives something else each time")
        self._jinja = jinja2.Template.from_code(sandbox, sandbox.compile(parsed), sandbox.make_globals(None))
        self._mini: minijinja.Environment | None = None
        self._by_jinja, self._fuel = False, 0
        self._is_by_case = self._reads_null = False
        if fast and not OTHER_ESCAPE.search(source) and _is_alike(parsed):
            filters, methods = parsed.find_all(nodes.Filter), parsed.find_all(nodes.Getattr)
            self._is_by_case = not BY_CASE.isdisjoint([*(of.name for of in filters), *(of.attr for of in methods)])
            # Jinja refuses to loop over null, minijinja does not.
            inner = [loop for outer in parsed.find_all((nodes.For, nodes.Macro)) for loop in outer.find_all(nodes.For)]
            self._reads_null = any(loop.iter.find(nodes.Or) is None and not isinstance(loop.iter, nodes.Or) for loop in inner)
            self._mini = _mini(source.replace("\r\n", "\n").replace("\r", "\n"), self._now)

    def prepare(self, text: str, is_json: bool = True) -> None:
        """Choose the engine for a conversation, and its steps. *text*: its JSON, or the strings of one that has nothing else and
        no space that the engines strip otherwise.
        """
        if self._mini is not None:
            fuel = FUEL << (FUEL_OF_A_CHARACTER * len(text) // FUEL).bit_length()
            if fuel != self._fuel:  # it takes a while to set it
                self._mini.fuel = self._fuel = fuel
        has_escapes = is_json and "\\u" in text
        self._by_jinja = (
            self._mini is None
            or (has_escapes and OTHER_TEXT.search(text) is not None)
            or (self._is_by_case and (has_escapes or not text.isascii()))
            or (is_json and self._reads_null and "null" in text)
        )

    def render(self, messages: list[Message], tools: Any, marks: tuple[str, str] = ("", ""), prompt: bool = False) -> str:
        """A conversation as the template writes it. *marks*: written around what ``{% generation %}`` says. *prompt*: with the
        one that asks for the next message.
        """
        own = {"messages": messages, "add_generation_prompt": prompt, "tools": tools, "documents": None}
        names = {**self._given, **own, f"{HIDDEN}open": marks[0], f"{HIDDEN}close": marks[1]}
        if self._mini is not None and not self._by_jinja:
            try:
                return self._mini.render_template("chat", **names)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001, S110  Jinja says what is wrong, or renders it
                pass
        try:
            return "".join(self._jinja.root_render_func(self._jinja.new_context(names)))
        except MemoryError:
            raise
        except DayError as error:
            raise RefusedError(f"the chat template {error}", "no_day") from error
        except Exception as error:  # whatever a template does with what a message lacks
            raise RefusedError(f"the chat template says: {error}") from error

    def _now(self, form: str) -> str:
        if self._day is None:
            raise DayError("asks for the day. Set source.chat_date, such as 2026-07-31: it is part of the dataset")
        return self._day.strftime(form)


def _mini(source: str, now: Callable[[str], str]) -> minijinja.Environment | None:
    """The template for minijinja; None if it does not parse it."""
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        debug=False,
        filters={"tojson": _to_json, "dictsort": FILTERS["dictsort"]},
        tests={"iterable": is_iterable, "sequence": is_sequence},
        globals={"raise_exception": _raise, "strftime_now": now},
        fuel=FUEL,
    )
    try:
        environment.add_template("chat", source)
    except minijinja.TemplateError:
        return None
    return environment


def _is_alike(parsed: nodes.Template) -> bool:
    """Whether a template uses only what both engines are known to render alike."""

    def all_of(*kinds: type[Any]) -> list[Any]:
        return list(parsed.find_all(kinds))

    calls, looked_into = all_of(nodes.Call), all_of(nodes.Getattr, nodes.Getitem)
    functions = SAME_FUNCTIONS | {macro.name for macro in all_of(nodes.Macro)} | {"caller"}
    ranges = {id(loop.iter) for loop in all_of(nodes.For)}
    read = ranges | {id(of.node) for of in all_of(nodes.Filter) if of.name in READS_ALL}
    methods = {id(call.node) for call in calls if isinstance(call.node, nodes.Getattr) and call.node.attr in SAME_METHODS}
    known = {id(call.node) for call in calls if isinstance(call.node, nodes.Name) and call.node.name in functions}
    known |= {id(call.node) for call in calls if id(call) in ranges and isinstance(call.node, nodes.Name)}
    loops = {id(of.node) for of in looked_into}
    return (
        all(id(call.node) in methods | known for call in calls)
        and not any(name.name in OF_JINJA | functions and id(name) not in known | loops for name in all_of(nodes.Name))
        and not any(of.attr.startswith("_") or (of.attr in OF_PYTHON and id(of) not in methods) for of in all_of(nodes.Getattr))
        and not any(isinstance(of.arg, nodes.Const) and of.arg.value in OF_PYTHON for of in all_of(nodes.Getitem))
        and not any(isinstance(of.value, float) or str(of.value).startswith("_") for of in all_of(nodes.Const))
        and all(of.name in SAME_FILTERS and (of.name not in LAZY or id(of) in read) for of in all_of(nodes.Filter))
        and not any(of.name == "map" and of.args for of in all_of(nodes.Filter))
        and all(of.name in SAME_TESTS for of in all_of(nodes.Test))
        and not any(loop.recursive for loop in all_of(nodes.For))
        and not all_of(nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Pow)
    )


class _WithoutText:
    """A value that a template may use, not write: its usual text would have its address, which changes."""

    __slots__ = ()
    kind = "a function where text is wanted"

    def __repr__(self) -> str:
        raise TemplateError(f"it writes {self.kind}")


class _Function(_WithoutText):
    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _ReadOnce(_WithoutText):
    """Items that can be read once."""

    __slots__ = ("_items",)
    kind = "items where text is wanted; put '| list' or '| join' after them"

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def __next__(self) -> Any:
        return next(self._items)


class _Cycler(_WithoutText, Cycler):
    kind = "a cycler where text is wanted"


class _Joiner(_WithoutText, Joiner):
    kind = "a joiner where text is wanted"


def _without_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose items have no text."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return _ReadOnce(found) if hasattr(found, "__next__") else found

    return filtered


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which nothing is repeated without end, and everything follows from the conversation."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
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
OF_PYTHON = frozenset(name for kind in (dict, list, str) for name in dir(kind))
OF_JINJA = frozenset({"range", "dict", "cycler", "joiner", "loop", "caller", "varargs", "kwargs", "self", "super"})
"""Names that have no text."""


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
