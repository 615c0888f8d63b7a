"""Conversations in JSON lines, read by msgspec and by Python."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text.jsonl import _conversations, _Line, _parse_line
from flat_tokens.text.rows import TextFile

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["\ud800", "\0", "😀\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
LINES = st.fixed_dictionaries({}, optional=dict.fromkeys(("messages", "tools", "id", "kept", "other"), VALUES))


@given(LINES, st.booleans(), st.sampled_from([(",", ":"), (" ,\t", ": ")]))
@example({"messages": [{"role": "user", "content": 'é "\u2028\x7f'}], "other": 0.5, "id": 1 << 70}, False, (",", ":"))
@example({"messages": [1e22], "id": "a"}, False, (",", ":"))
@example({"messages": [], "tools": None, "id": "\ud800"}, True, (",", ":"))
def test_a_conversation_is_the_same_whoever_reads_it(value: dict[str, Any], is_ascii: bool, between: tuple[str, str]) -> None:
    line = json.dumps(value, ensure_ascii=is_ascii, separators=between).encode("utf-8", "surrogatepass")
    for others in ({}, {"tools_column": "tools", "id_column": "id", "kept_columns": ("kept",)}):
        file = TextFile("x", "x.jsonl", 1, "messages", has_messages=True, **others)  # type: ignore[arg-type]
        found = _conversations(file)(line)
        assert found in (None, _parse_line(line, file))


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [1]} {"messages": [2]}',
        b'{"messages": [1], "x": NaN}',
        b'{"messages": [0.5]}',
        b'{"messages": "[]"}',
        b'{"messages": null}',
        b'{"messages": ["\xff"]}',
        b'{"messages": %b}' % (b"[" * 5000),
        b"[]",
    ],
)
def test_what_may_be_a_fault_is_left_to_python(line: bytes) -> None:
    read = _conversations(TextFile("x", "x.jsonl", 1, "messages", has_messages=True))
    assert read(line) is None
    assert read(b'{"messages": [ 1]}') == _Line(b"[1]")
