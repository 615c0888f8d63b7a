"""Expressions that choose documents: what they mean, against sqlite, and what is refused."""

from __future__ import annotations

import sqlite3
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.rows.where import parse
from tests.examples import examples
from tests.refusal import refusal

ROWS: dict[str, list[Any]] = {
    "tokens": [0, 5, 100, 2000, None],
    "score": [0.5, None, 0.25, -1.5, 3.0],
    "source": ["web", "wiki", None, "it's", "web_2"],
    "odd name": ["a", "b", "c", "d", "e"],
    "good": [True, False, None, True, False],
    "hash": [1 << 63, None, 18446744073709551615, 7, 0],
}


def column(name: str) -> Any:
    if name not in ROWS:
        raise ValueError(f"there is no column {name!r}")
    return pa.array(ROWS[name], pa.uint64() if name == "hash" else None)


def chosen(text: str) -> list[int]:
    found = parse(text).holds(column)
    assert found.dtype == bool
    return [i for i, holds in enumerate(found.tolist()) if holds]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tokens>=5 AND tokens <= 100", [1, 2]),
        ("source in ('web', 'it''s')", [0, 3]),
        ("source not in ('web')", [1, 3, 4]),
        ("not (source in ('web'))", [1, 3, 4]),
        ("source like 'we_' or source not like 'w%'", [0, 3]),
        (r"source like 'web\_%'", [4]),
        ("score = -1.5 or score > 1e0", [3, 4]),
        ("\"odd name\" <> 'a' and good = true", [3]),
        ("good != TRUE", [1, 4]),
        ("hash = 18446744073709551615 or hash > tokens and hash < 1e19", [0, 2]),
        ("tokens < 9223372036854775808", [0, 1, 2, 3]),
        ("tokens = 0 or tokens = 5 and score is null", [0, 1]),
        ("(tokens = 0 or tokens = 5) and score is null", [1]),
        (" not not\n tokens = 5 ", [1]),
    ],
)
def test_an_expression_chooses_the_rows_for_which_it_is_true(text, rows):
    """What is null is neither true nor false, as in SQL."""
    assert chosen(text) == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "character 1 is the end, but a column's name was expected"),
        ("tokens", "character 7 is the end, but a comparison"),
        ("tokens >", "character 9 is the end, but a value"),
        ("tokens > 5 5", "character 12 is '5', but 'and', 'or' or the end was expected"),
        ("tokens > 5 and", "character 15 is the end, but a column's name"),
        ("doc.n > 5", 'character 4 is .* double quotes: "a.b"'),
        ("(tokens > 5", "character 12 is the end, but '\\)' was expected"),
        ("5 < tokens", "character 1 is '5', but a column's name"),
        ("tokens = null", "character 10 is 'null', but a value"),
        ("tokens in ()", "character 12 is '\\)', but a value"),
        ("source = web'", 'character 13 is "\'", but a name, a value'),
        ("source like tokens", "character 13 is 'tokens', but a text in single quotes"),
        ("tokens > 5; drop", "character 11 is ';'"),
        ("tokens > 5abc", "character 10 is '5'"),
        ("abs(tokens) > 5", "character 4 is '\\(', but a comparison"),
        ("__import__('os') = 1", "character 11 is '\\(', but a comparison"),
        ("tokens > " + "9" * 39, "character 10 is '9', but a name, a value"),
        ("(" * 60 + "tokens = 1" + ")" * 60, "more than 50 deep"),
        ("not " * 60 + "tokens = 1", "more than 50 deep"),
        ("tokens = 1 or " * 1000 + "tokens = 1", "14,010 characters, but at most 10,000"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(text, told):
    with refusal(told):
        parse(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing = 5", "there is no column 'nothing'"),
        ("tokens = 'five'", "compares unlike values: tokens is a number. Numbers are compared with numbers"),
        ("source > 5", "compares unlike values: source is a text. .* All columns of CSV are text"),
        ("tokens = 5 and source between 1 and 2", "source is a text, tokens is a number"),
        ("good > 1", "good is true or false"),
        ("score like '1%'", "score is a number"),
    ],
)
def test_columns_that_there_are_not_or_of_another_type_are_refused(text, told):
    with refusal(f"^where .*{told}"):
        chosen(text)


def test_many_alternatives_are_no_deep_expression():
    assert chosen(" or ".join(f"tokens = {i}" for i in range(600))) == [0, 1, 2]


values = st.sampled_from(["0", "5", "100", "-3", "2.5", "1e2"])
comparisons = st.one_of(
    st.builds(
        lambda name, sign, value: f"{name} {sign} {value}",
        st.sampled_from(["tokens", "score"]),
        st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">=", "is not null and tokens ="]),
        st.one_of(values, st.sampled_from(["tokens", "score"])),
    ),
    st.builds(
        lambda name, few, negated: f"{name} {'not ' * negated}in ({', '.join(few)})",
        st.sampled_from(["tokens", "score"]),
        st.lists(values, min_size=1, max_size=3),
        st.booleans(),
    ),
    st.builds(lambda low, high, negated: f"tokens {'not ' * negated}between {low} and {high}", values, values, st.booleans()),
    st.sampled_from(["source like 'w%'", "source not like '%i%'", "source = 'it''s'", "source is null", "\"odd name\" > 'b'"]),
)
expressions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds("not ({})".format, inner),
        st.builds("({} and {})".format, inner, inner),
        st.builds("{} or {}".format, inner, inner),
    ),
    max_leaves=6,
)


@given(expressions)
@examples(300)
def test_expressions_mean_what_they_mean_in_sql(text):
    with sqlite3.connect(":memory:") as database:
        database.execute('create table t (n integer, tokens integer, score real, source text, "odd name" text)')
        rows = zip(range(5), *(ROWS[name] for name in ("tokens", "score", "source", "odd name")), strict=True)
        database.executemany("insert into t values (?, ?, ?, ?, ?)", rows)
        expected = [n for (n,) in database.execute(f"select n from t where {text} order by n")]
    database.close()
    assert chosen(text) == expected


@pytest.mark.parametrize("text", ["source = '\ud800'", "a\udfff = 1", "\udc80", "source in ('x', '\ud83d')"])
def test_half_of_a_surrogate_pair_is_refused(text):
    with refusal("is not Unicode"):
        parse(text)
