"""The table of counts in docs/measured/faults.md."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BEGIN, END = "<!-- counts: written by python -m tests.faults -->\n", "<!-- end of counts -->\n"
COLUMNS = ("bytes", "readers", "pointer", "reuse", "leftovers", "message")


@dataclass
class Row:
    """Counts of one fault under one command: trials, and how often something did not hold."""

    fault: str
    under: str
    trials: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, trials: int, wrong: Sequence[str]) -> None:
        self.trials += trials
        self.wrong.update(wrong)

    def line(self, options: str) -> str:
        counts = " | ".join(f"{self.wrong[column]:,}" for column in COLUMNS)
        options = options.replace("|", r"\|")
        return f"| {self.fault} | {self.under} | {self.trials:,} | {counts} | {f'`{options}`' if options else 'all'} |"


def write_table(page: Path, rows: Sequence[Row], options: str) -> None:
    """Put these rows, of a run with these options, into the page's table: in the place of those of the same fault and command, or
    of all where there were no options.
    """
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    lines = {}
    if options:
        told = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
        lines = {tuple(re.split(r" *\| *", line.strip("| "))[:2]): line for line in told}
    lines |= {(row.fault, row.under): row.line(options) for row in rows}
    head = f"| fault | under | trials | {' | '.join(COLUMNS)} | options |\n|---|---|---:|{'---:|' * len(COLUMNS)}---|\n"
    page.write_text(before + BEGIN + head + "".join(f"{line}\n" for line in lines.values()) + END + after)
