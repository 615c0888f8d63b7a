"""Links within the repository lead to files and headings that are there, and the index names every page."""

import functools
import re
from pathlib import Path

import pytest

from tests.docs.programs import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deployments").rglob("*.md")])


def prose(page: Path) -> str:
    """A page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S))


def links(page: Path) -> list[str]:
    """Targets of links and pictures, both those in place and those at the end of the page, but for other sites'."""
    text = prose(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    """Headings of a page, as GitHub names them in a link."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page():
    told = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    assert {page for page in DOCS.rglob("*.md") if page.name != "README.md"} <= told
