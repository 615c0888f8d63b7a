"""The pages that people read say what the tables beside them say."""

import re
from collections import Counter

import pytest

from tests.benchmarks.page import sections_of
from tests.docs.programs import ROOT
from tests.docs.test_links import anchor_of

DOCS = ROOT / "docs"


def rows(page: str) -> list[list[str]]:
    """Cells of a page's tables, without their heads."""
    lines = [line for line in (DOCS / page).read_text("utf-8").splitlines() if line.startswith("| ")]
    return [re.split(r" *(?<!\\)\| *", line.strip("| ")) for line in lines]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_trials_are_the_sums_of_the_table():
    trials, wrong = Counter(), Counter()
    for row in rows("measured/faults.md"):
        if len(row) == 10 and (campaign := re.match(r"`--only (\w+)", row[9])):
            trials[campaign[1]] += number(row[2])
            wrong[campaign[1]] += sum(map(number, row[3:9]))
    told = [row for row in rows("reliability.md") if len(row) == 4 and row[0].startswith("`")]
    assert {row[0].strip("`"): (number(row[2]), number(row[3])) for row in told} == {
        campaign: (count, wrong[campaign]) for campaign, count in trials.items()
    }


SECTIONS = {
    anchor_of(title): text for title, text in sections_of((DOCS / "measured" / "benchmarks.md").read_text("utf-8")).items()
}
FIGURES = [row for row in rows("benchmarks.md") if "measured/benchmarks.md#" in row[-1]]


@pytest.mark.parametrize("row", FIGURES, ids=[row[0] for row in FIGURES])
def test_figures_are_those_of_the_measured_section(row):
    section = SECTIONS[row[-1].partition("#")[2].rstrip(")")]
    for figure in re.findall(r"\d[\d,.]*\d|\d", re.sub("`[^`]*`", "", row[1])):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", section), figure
