"""The size of a pattern's program: what takes long is seen before it is run."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.steps.patterns import program_size
from flat_tokens.tools.verify import MOST_STEPS, MOST_WORK, _steps_of, work_of

SLOW = {
    "optional": "(?:a?){1000}b",
    "optional, nested": "(?:(?:a?){30}){30}b",
    "alternation": "|".join(f"{i:020b}".replace("0", "a").replace("1", "b") + "c" for i in range(1000)),
    "tail": "(?:a|b)*a(?:a|b){900}c",
    "classes": r"(?:\pL?){300}7",
    "case": "(?i)(?:[a-z]?){900}7",
    "ranges": "(?:[ab]?){1000}c",
    "between": "(?:a{0,30}){30}b",
    "named": "(?P<x>a?){1000}b",
    "lazy": "(?:a??){1000}b",
    "quoted": r"(?:\Qaaaaaaaa\E?){900}b",
}
PLAIN = [
    "licence",
    r"^\s*(copyright|licen[cs]e)\b",
    r"https?://[^\s]{1,200}",
    r"\d{4}-\d{2}-\d{2}",
    "(?i)lorem ipsum",
    r"[\[\]]",
    "a|b|c",
]


@pytest.mark.parametrize("name", SLOW)
def test_a_pattern_that_takes_long_is_large(name: str) -> None:
    """Of a megabyte of text none of them is tried without trust."""
    step = {"use": "pattern", "options": {"drop": SLOW[name]}}
    assert program_size(SLOW[name]) >= 900
    assert work_of([step], ["a" * 3_000_000]) > MOST_WORK


@pytest.mark.parametrize("pattern", PLAIN)
def test_usual_patterns_are_small(pattern: str) -> None:
    step: dict[str, Any] = {"use": "pattern", "options": {"keep": pattern}}
    assert work_of([step, {"use": "length", "options": {}}], ["a" * 1_000_000]) < MOST_WORK


def test_a_stranger_names_some_steps() -> None:
    """Each takes time for every file, whatever it does. With trust, as many as there are."""
    step = {"use": "length", "options": {"min_bytes": 1}, "version": "1"}
    steps, why = _steps_of({"steps": [step] * (MOST_STEPS + 1)}, trusted=False)
    assert steps is None
    assert why == "the manifest has 101 steps, which take long: --trust-records takes them"
    for count, trusted in ((MOST_STEPS, False), (MOST_STEPS + 1, True)):
        steps, why = _steps_of({"steps": [step] * count}, trusted)
        assert steps is not None, why
        assert len(steps.described) == count


ATOMS = st.sampled_from(["a", "b", ".", r"\w", "[ab]", "[^x]", r"\pL", "é", r"\d"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("(?:{}){}".format, inner, st.sampled_from(["?", "*", "+", "{2,9}", "{30}", "{0,20}"])),
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(PATTERNS)
def test_time_is_bounded_by_the_size(pattern: str) -> None:
    text = pa.array(["ab" * 10_000], pa.large_string())
    size = program_size(pattern)
    begun = time.process_time()
    try:
        pa.compute.match_substring_regex(text, pattern + "7")
    except pa.ArrowInvalid:
        return  # too large for RE2
    assert time.process_time() - begun < 0.5 + size * 20_000 * 2e-7
