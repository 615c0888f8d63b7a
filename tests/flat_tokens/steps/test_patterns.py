"""The size of a pattern's program: what takes long is seen before it is run."""

import pytest

from flat_tokens.steps import ReadySteps
from flat_tokens.steps.patterns import program_size
from flat_tokens.tools.sources import MOST_PATTERN_BYTES, MOST_STEPS, MOST_WORK, _steps_of

SLOW = {
    "optional": "(?:a?){1000}b",
    "optional, nested": "(?:(?:a?){30}){30}b",
    "alternation": "|".join(f"{i:09b}".replace("0", "a").replace("1", "b") + "c" for i in range(800)),
    "tail": "(?:a|b)*a(?:a|b){900}c",
    "classes": r"(?:\pL?){300}7",
    "case": "(?i)(?:[a-z]?){900}7",
    "ranges": "(?:[ab]?){1000}c",
    "between": "(?:a{0,30}){30}b",
    "named": "(?P<x>a?){1000}b",
    "lazy": "(?:a??){1000}b",
    "quoted": r"(?:\Qaaaaaaaa\E?){900}b",
    "members": f"(?:[{''.join(chr(i) for i in range(0x3400, 0x3FB8, 2))}]?){{3}}z",
    "escaped": "(?:[" + "".join(rf"\x{{{i:x}}}" for i in range(0x3400, 0x3600, 2)) + "]?){3}z",
    "named class": "(?:[[:alpha:]]?){900}7",
    "named members": f"[[:alpha:]{''.join(chr(i) for i in range(0x3400, 0x3600, 2))}]{{30}}z",
}
LENGTH = {"use": "length", "options": {"min_bytes": 1}, "version": "1"}
PLAIN = [
    "licence",
    r"^\s*(copyright|licen[cs]e)\b",
    r"https?://[^\s]{1,200}",
    r"\d{4}-\d{2}-\d{2}",
    "(?i)lorem ipsum",
    r"[\[\]]",
    "a|b|c",
]


def opened(pattern: str, *texts: str, spent: list[int] | None = None, trusted: bool = False) -> ReadySteps | str:
    """The step of a pattern and one of a length, opened for some texts, or why not."""
    step = {"use": "pattern", "options": {"keep": pattern}, "version": "1"}
    return _steps_of({"steps": [step, LENGTH]}, trusted, texts, [] if spent is None else spent)


@pytest.mark.parametrize("name", SLOW)
def test_a_pattern_that_takes_long_is_large(name):
    """Of some megabytes of text none of them is tried without trust, whatever characters these are of."""
    assert program_size(SLOW[name]) >= 900
    for text in ("a" * 5_000_000, "\u3400" * 1_700_000):
        assert opened(SLOW[name], text) == "a pattern in the manifest would take long: --trust-records waits for it"


@pytest.mark.parametrize("pattern", PLAIN)
def test_usual_patterns_are_small(pattern):
    assert not isinstance(opened(pattern, "a" * 1_000_000), str)


def test_work_of_files_adds_up():
    spent = []
    opened("a{100}", "b" * 1_000_000, spent=spent)
    for before, is_refused in ((MOST_WORK - spent[0], False), (MOST_WORK - spent[0] + 1, True)):
        assert isinstance(opened("a{100}", "b" * 1_000_000, spent=[before]), str) is is_refused


def test_a_long_pattern_of_a_stranger_is_not_compiled():
    pattern = "é" * (MOST_PATTERN_BYTES // 2 + 1)
    assert opened(pattern) == "a pattern in the manifest has 10,002 bytes: --trust-records takes it"
    assert not isinstance(opened(pattern, trusted=True), str)


def test_a_stranger_names_some_steps():
    """Each takes time for every file, whatever it does. With trust, as many as there are."""
    why = _steps_of({"steps": [LENGTH] * (MOST_STEPS + 1)}, False, (), [])
    assert why == "the manifest has 101 steps, which take long: --trust-records takes them"
    for count, trusted in ((MOST_STEPS, False), (MOST_STEPS + 1, True)):
        steps = _steps_of({"steps": [LENGTH] * count}, trusted, (), [])
        assert not isinstance(steps, str), steps
        assert len(steps.described) == count
