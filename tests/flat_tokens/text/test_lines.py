"""Documents between separators; conversations in lines of JSON, read by msgspec and by Python."""

import json
import re

from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text.jsonl import _conversations, _fault_of, _parse_line
from flat_tokens.text.plain import split
from flat_tokens.text.rows import TextFile
from tests.examples import examples


@given(block=st.text("-a=", max_size=20), separator=st.sampled_from(["-", "--", "-a-", "=-=", "---"]))
@example("-----", "--")
@example("", "-")
@example("---", "-----")  # shorter than the separator, of which it is the beginning
@examples(300)
def test_a_block_is_split_as_strings_are(block, separator):
    """From left to right, where separators overlap too; behind the last separator is the next document."""
    expected = block.encode().split(separator.encode())
    documents = split(block.encode(), separator.encode())
    documents.validate(full=True)
    assert documents.to_pylist() == (expected if expected[-1] else expected[:-1])


def split_by_lines(data: bytes, separator: bytes) -> list[bytes]:
    """The documents between separators whose line feeds may be CR LF."""
    found = re.split(rb"\r?\n".join(map(re.escape, separator.split(b"\n"))), data)
    return found if found[-1] else found[:-1]


@given(block=st.text("-\r\n", max_size=24), separator=st.sampled_from(["\n", "\n\n", "-\n", "\n-", "\n-\n", "\n-\n\n", "-"]))
@example("\r\n", "\n")
@example("\n-\r\n", "\n-\n\n")
@example("\r\n\n\r\n", "\n\n")
@example("-\r\r\n-", "\n")
@examples(400)
def test_a_line_feed_of_a_separator_may_be_crlf(block, separator):
    """At each place by itself; a carriage return that is no part of a separator stays."""
    documents = split(block.encode(), separator.encode(), crlf=True)
    documents.validate(full=True)
    assert documents.to_pylist() == split_by_lines(block.encode(), separator.encode())


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
