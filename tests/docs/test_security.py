"""SECURITY.md names tests and checks that are there."""

import re

from tests.docs.programs import ROOT

PAGE = (ROOT / "SECURITY.md").read_text("utf-8")


def test_every_named_test_is_there():
    """By its file and its name."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", PAGE)
    assert len([name for _, name in named if name]) > 30
    assert not [one for one in named if f"def {one[1]}" not in (ROOT / one[0]).read_text("utf-8")]


def test_every_named_function_and_command_is_there():
    texts = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", PAGE)
    assert names
    assert not [name for name in names if f"def {name}(" not in texts]
    modules = re.findall(r"`python -m (tests\.[\w.]+)`", PAGE)
    assert modules
    assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)


def test_every_role_has_a_test_and_a_limit():
    """But who runs the service."""
    rows = re.findall(r"^\| (?!who \||who runs|-)(.+?) \|.*\| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 9
    assert not [role for role, holds, not_held in rows if "::test_" not in holds or len(not_held) < 10]


def test_actions_are_pinned_by_commit():
    used = [one for path in (ROOT / ".github/workflows").iterdir() for one in re.findall("uses: (.*)", path.read_text())]
    assert used
    assert not [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one)]
