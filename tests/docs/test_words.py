"""The page of words names what is in the code, and the API page names every public name."""

import importlib
import re

import flat_tokens
from tests.docs.programs import ROOT


def found(path: str) -> object:
    """What a dotted path names: a module, or an attribute of what is before its last dot."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        above, _, name = path.rpartition(".")
        return getattr(found(above), name)


def test_each_word_is_in_the_code():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([\w.]+)` \|$", (ROOT / "docs/words.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 30
    assert len({word for word, _, _ in rows}) == len(rows)
    for _, _, path in rows:
        found(path)  # AttributeError if it is not there


def test_the_api_page_has_every_public_name():
    named = re.findall(r"^::: (flat_tokens\.[\w.]+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE)
    assert {name.removeprefix("flat_tokens.") for name in named if name.count(".") == 1} == set(flat_tokens.__all__)
    assert all(found(name) is not None for name in named)
