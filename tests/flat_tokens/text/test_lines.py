"""Conversations in lines of JSON, read by msgspec and by Python."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text.jsonl import _conversations, _fault_of, _parse_line
from flat_tokens.text.rows import TextFile

JSON = st.recursive(
    st.sampled_from([None, True, -7, 1 << 70, 1e22, float("nan"), "", "\ud800", '"\0é\u2028\n']),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
LINES = st.fixed_dictionaries({"messages": JSON}, optional=dict.fromkeys(("tools", "id", "kept", "other"), JSON)).map(json.dumps)
FILE = TextFile("x", "x.jsonl", 1, "messages", has_messages=True)
FILES = (FILE, FILE._replace(tools_column="tools", id_column="id", kept_columns=("kept",)))


@given(LINES)
@example('{"messages": [1]} {"messages": [2]}')
@example('{"messages": [0.5]}')
@example('{"messages": ["\ud800"]}')
@example('{"messages": ' + "[" * 5000)
def test_a_conversation_is_the_same_whoever_reads_it(text):
    line = text.encode("utf-8", "surrogatepass")
    assert all(_conversations(file)(line) in (None, _parse_line(line, file)) for file in FILES if _fault_of(line, file) is None)
    assert all(_conversations(file)(line) is None for file in FILES if _fault_of(line, file))
    assert _conversations(FILE)(b'{"messages": [ 1], "other": 0.5}') == (b"[1]", None, ())
