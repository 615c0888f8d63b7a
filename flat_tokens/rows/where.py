"""Expressions that choose documents, such as ``source = 'web' and tokens between 100 and 2000``.

They compare columns with values, and are evaluated by Arrow on whole arrays. An expression can do nothing else: it calls no
function and reads no file. Null is as in SQL: a comparison with it is neither true nor false, and only what is true is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache, reduce
from typing import Any, NamedTuple, NoReturn

from flat_tokens.annotations import Bools
from flat_tokens.extras import pa

MAX_LENGTH = 10_000
MAX_DEPTH = 50
"""Parentheses and ``not`` within each other."""

Columns = Callable[[str], Any]
"""A column's name -> its values, an Arrow array. ValueError if there is no such column."""
Test = Callable[[Columns], Any]
"""Columns -> an Arrow array: true, false or null for each row."""

WORDS = re.compile(
    r"""(?P<number>(?:\d{1,38}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    | (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<name>[A-Za-z_]\w*)
    | (?P<sign><=|>=|<>|!=|==|[-=<>(),])""",
    re.VERBOSE | re.ASCII,
)
SIGNS = {
    "=": "equal",
    "==": "equal",
    "!=": "not_equal",
    "<>": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
KEYWORDS = {"and", "or", "not", "in", "is", "null", "like", "between", "true", "false"}


class Where(NamedTuple):
    """An expression. ``names``: the columns that it names."""

    text: str
    names: frozenset[str]
    test: Test

    def holds(self, columns: Columns) -> Bools:
        """The rows for which it is true: bool[n]. ValueError for columns that there are not, or that cannot be compared so."""
        values = dict[str, Any]()
        try:
            for name in sorted(self.names):
                values[name] = found = columns(name)
                # Arrow makes int64 of uint64, and float64 of both, and refuses what these do not have
                bounds = pa.compute.min_max(found).as_py().values() if pa.types.is_integer(found.type) else ()
                if any(abs(bound or 0) > 1 << 53 for bound in bounds):
                    values[name] = found.cast(pa.decimal128(20))
            chosen: Bools = self.test(values.__getitem__).fill_null(False).to_numpy(zero_copy_only=False)
        except (NotImplementedError, ValueError) as error:
            if not type(error).__module__.startswith("pyarrow"):  # such as an unknown column, for which nothing imports Arrow
                raise ValueError(f"where {self.text!r}: {error}") from None
            kinds = ", ".join(f"{name} is {_kind(of.type)}" for name, of in values.items())
            raise ValueError(
                f"where {self.text!r} compares unlike values: {kinds}. Numbers are compared with numbers, texts with '...', "
                "and booleans with true and false. All columns of CSV are text."
            ) from error
        return chosen


@lru_cache(64)
def parse(text: str) -> Where:
    """The expression in a text. ValueError, which shows the place, if it is none."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"where has {len(text):,} characters, but at most {MAX_LENGTH:,} are taken. Give a list of keys or ids.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"where {text[:100]!r} is not Unicode: it has half of a surrogate pair")
    parser = _ExpressionParser(text)
    test = parser.any_of(0)
    if parser.kind != "end":
        parser.fail("'and', 'or' or the end")
    return Where(text, frozenset(parser.names), test)


@dataclass
class _ExpressionParser:
    """The words of an expression, from *at* on. ``kind`` and ``word``: the next one; ``end``: where it ends."""

    text: str
    at: int = 0
    kind: str = ""
    word: str = ""
    end: int = 0
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.step()

    def step(self) -> str:
        """Go to the next word. Return the one before."""
        before, self.at = self.word, len(self.text) - len(self.text[self.end :].lstrip())
        if self.at == len(self.text):
            self.kind, self.word = "end", ""
            return before
        found = WORDS.match(self.text, self.at)
        if found is None:
            self.kind, self.word = "", self.text[self.at]
            self.fail("a name, a value or a comparison" + ' (a name with a dot is in double quotes: "a.b")' * (self.word == "."))
        self.kind, self.word, self.end = str(found.lastgroup), found[str(found.lastgroup)], found.end()
        if self.kind == "name" and self.word.lower() in KEYWORDS:
            self.kind, self.word = "keyword", self.word.lower()
        return before

    def fail(self, expected: str) -> NoReturn:
        found = repr(self.word) if self.kind != "end" else "the end"
        raise ValueError(f"where {self.text!r}: character {self.at + 1} is {found}, but {expected} was expected")

    def take(self, *words: str) -> bool:
        """Whether the next word is one of *words*, which is passed then."""
        if self.kind in ("keyword", "sign") and self.word in words:
            self.step()
            return True
        return False

    def need(self, word: str) -> None:
        if not self.take(word):
            self.fail(repr(word))

    def several(self, separator: str, function: str, read: Callable[[], Test]) -> Test:
        """Tests with a word or sign between them, joined by a function of Arrow."""
        tests = [read()]
        while self.take(separator):
            tests.append(read())
        return lambda columns: reduce(getattr(pa.compute, function), (test(columns) for test in tests))

    def any_of(self, depth: int) -> Test:
        return self.several("or", "or_kleene", lambda: self.several("and", "and_kleene", lambda: self.one(depth)))

    def one(self, depth: int) -> Test:
        if depth > MAX_DEPTH:
            raise ValueError(f"where {self.text[:100]!r}...: parentheses and 'not' stand more than {MAX_DEPTH} deep")
        if self.take("not"):
            return _called("invert", self.one(depth + 1))
        if self.take("("):
            test = self.any_of(depth + 1)
            self.need(")")
            return test
        return self.comparison()

    def comparison(self) -> Test:
        column = self.column()
        if self.take("is"):
            is_negated = self.take("not")
            self.need("null")
            return _called("is_valid" if is_negated else "is_null", column)
        if self.kind == "sign" and self.word in SIGNS:
            return _called(SIGNS[self.step()], column, self.column() if self.kind in ("name", "quoted") else self.value())
        is_negated = self.take("not")
        test = self.membership(column)
        return _called("invert", test) if is_negated else test

    def membership(self, column: Test) -> Test:
        if self.take("in"):
            self.need("(")
            test = self.several(",", "or_kleene", lambda: _called("equal", column, self.value()))
            self.need(")")
            return test
        if self.take("between"):
            low = _called("greater_equal", column, self.value())
            self.need("and")
            return _called("and_kleene", low, _called("less_equal", column, self.value()))
        if not self.take("like"):
            self.fail("a comparison: = <> < <= > >= in between like is")
        if self.kind != "text":
            self.fail("a text in single quotes")
        pattern = _unquoted(self.step())
        return lambda columns: pa.compute.match_like(column(columns), pattern)

    def column(self) -> Test:
        if self.kind not in ("name", "quoted"):
            self.fail("a column's name")
        name = _unquoted(self.word) if self.kind == "quoted" else self.word
        self.names.add(name)
        self.step()
        return lambda columns: columns(name)

    def value(self) -> Test:
        if self.take("true"):
            return lambda _: True
        if self.take("false"):
            return lambda _: False
        if self.kind == "text":
            text = _unquoted(self.step())
            return lambda _: text
        is_negative = self.take("-")
        if self.kind != "number":
            self.fail("a number" if is_negative else "a value: a number, a text in single quotes, true or false")
        written = self.step()
        whole = int if len(written) < 16 else Decimal  # an integer beyond 2**53 is compared with no float64
        number: Any = whole(written) if written.isdigit() else float(written)
        return lambda _: -number if is_negative else number


def _kind(kind: Any) -> str:
    names = {pa.bool_(): "true or false", pa.string(): "a text", pa.large_string(): "a text", pa.null(): "null"}
    return names.get(kind.value_type if pa.types.is_dictionary(kind) else kind, "a number")


def _unquoted(word: str) -> str:
    return word[1:-1].replace(word[0] * 2, word[0])


def _called(function: str, *of: Test) -> Test:
    return lambda columns: getattr(pa.compute, function)(*(one(columns) for one in of))
