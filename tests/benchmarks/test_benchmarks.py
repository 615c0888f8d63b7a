"""The command of the benchmarks runs, and its page keeps what it does not measure."""

import os
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import TABLES, about_of
from tests.benchmarks.bench import Grid
from tests.benchmarks.page import page, rendered, sections_of, title_of
from tests.processes import ROOT, python


def test_what_is_not_measured_stays_on_the_page() -> None:
    old = page(["A", "B"], {"A": "## A\n\nold\n", "B": "## B\n\nold\n"}, "")
    new = rendered("B.\n\nProse.", "command", "today", [Grid(["", "s"], [["row", "1.5 s"]])])
    assert sections_of(page(["A", "B", "C"], {"B": new}, old)) == {
        "A": "## A\n\nold\n",
        "B": "## B\n\nProse.\n\n```\ncommand\n```\n\ntoday\n\n|  | s |\n| --- | ---: |\n| row | 1.5 s |\n",
    }


def test_every_section_of_the_page_is_a_table_of_the_command() -> None:
    """So that --only replaces it, and a whole run leaves nothing out."""
    sections = sections_of((ROOT / "docs" / "measured" / "benchmarks.md").read_text("utf-8"))
    assert set(sections) <= {title_of(about_of(name)) for name in TABLES}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere")).is_dir(), reason="no vocabularies here")
@pytest.mark.parametrize(
    "tables", [("build", "duplicates"), pytest.param(TABLES, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_the_command_runs(tmp_path: Path, tables: tuple[str, ...]) -> None:
    """Every table but the peers, which are installed from a package index."""
    page = tmp_path / "page.md"
    options = ("--quick", "--no-installs", "--scratch", str(tmp_path), "--page", str(page), "--only", *tables)
    done = python("-m", "tests.benchmarks", *options, timeout=None)
    sections = sections_of(page.read_text("utf-8"))
    assert done.returncode == 0, done.stderr
    assert list(sections) == [title_of(about_of(name)) for name in tables]
    assert all("\n| ---" in section for section in sections.values())
