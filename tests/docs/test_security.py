"""SECURITY.md names tests and checks that are there."""

from __future__ import annotations

import re

from tests.docs.programs import ROOT

PAGE = (ROOT / "SECURITY.md").read_text("utf-8")


def functions() -> set[str]:
    """The names of all test functions."""
    texts = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}


def test_every_named_file_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_named_function_and_command_is_there() -> None:
    names = re.findall(r"`(test_\w+)`", PAGE)
    assert names
    assert set(names) <= functions()
    modules = re.findall(r"`python -m (tests\.[\w.]+)`", PAGE)
    assert modules
    assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)
    assert not re.findall(r"`test_\w+\.py`", PAGE), "name a test file with its directories"


def test_every_role_says_what_shows_its_bound() -> None:
    """Each row of the table of roles but the first one has a test, by its file."""
    rows = re.findall(r"^\| (?!role |who runs|-)(.+?) \|(.+)\|$", PAGE.partition("## What holds")[0], re.MULTILINE)
    assert len(rows) >= 6
    for role, rest in rows:
        assert "`tests/" in rest, role
