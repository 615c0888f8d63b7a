"""Documents between separators."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.text.plain import split
from tests.examples import examples


@given(block=st.text("-a=", max_size=20), separator=st.sampled_from(["-", "--", "-a-", "=-=", "---"]))
@example("-----", "--")
@example("", "-")
@examples(300)
def test_a_block_is_split_as_strings_are(block: str, separator: str) -> None:
    """From left to right, where separators overlap too; behind the last separator is the next document."""
    expected = block.encode().split(separator.encode())
    documents = split(block.encode(), separator.encode())
    documents.validate(full=True)
    assert documents.to_pylist() == (expected if expected[-1] else expected[:-1])
