"""Texts of any Arrow type as the one type that the project works on."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.text.rows import to_large

TEXTS = st.lists(st.none() | st.text(max_size=6), max_size=12)


@given(TEXTS, st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]), st.integers(0, 12), st.integers(0, 12))
def test_texts_stay_the_same_wherever_they_lie_in_an_array(
    texts: list[str | None], kind: pa.DataType, start: int, length: int
) -> None:
    values = pa.array(texts, kind)[start : start + length]
    large = to_large(values)
    large.validate(full=True)
    assert large.type == pa.large_string()
    assert large.to_pylist() == values.to_pylist()


@pytest.mark.slow
def test_common_texts_need_no_compute_functions() -> None:
    """Their import takes longer than the first batch."""
    program = """
import sys
import pyarrow as pa
from flat_tokens.text.rows import as_unicode
offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 2)))
assert as_unicode(pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab")))[0].to_pylist() == ["a", "b"]
assert "pyarrow.compute" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
