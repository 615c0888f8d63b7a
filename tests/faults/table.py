"""The table of counts in docs/measured/faults.md."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- counts: written by python -m tests.faults -->\n", "<!-- end of counts -->\n"
COLUMNS = ("bytes", "readers", "pointer", "reuse", "leftovers", "message")


def write_table(page: Path, rows: Mapping[tuple[str, str], Counter[str]], options: str) -> None:
    """Put the counts of each fault under each command, of a run with these options, into the page's table: in the place of those
    of the same fault and command, or of all where there were no options.
    """
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    lines = {}
    if options:
        former = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
        lines = {tuple(re.split(r" *\| *", line.strip("| "))[:2]): line for line in former}
    told = "`" + options.replace("|", r"\|") + "`" if options else "all"
    for names, counts in rows.items():
        cells = [*names, *(f"{counts[column]:,}" for column in ("trials", *COLUMNS)), told]
        lines[names] = f"| {' | '.join(cells)} |"
    head = f"| fault | under | trials | {' | '.join(COLUMNS)} | options |\n|---|---|---:|{'---:|' * len(COLUMNS)}---|\n"
    page.write_text(before + BEGIN + head + "".join(f"{line}\n" for line in lines.values()) + END + after)
