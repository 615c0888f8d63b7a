"""The table of counts keeps the rows of other runs, and a run of everything replaces them all."""

from collections import Counter
from pathlib import Path

from tests.faults.table import BEGIN, END, write_table


def rows_of(page: Path) -> list[str]:
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}| fault |")
    assert text.endswith(f"{END}behind\n")
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def test_rows_are_replaced_by_those_of_the_same_fault_and_command(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{END}behind\n")
    one, other = ("kills", "build"), ("kills", "gc")
    counts = {one: Counter(trials=1, bytes=1), other: Counter(trials=1000)}
    write_table(page, counts, "--only kills")
    assert rows_of(page) == [
        "| kills | build | 1 | 1 | 0 | 0 | 0 | 0 | 0 | `--only kills` |",
        "| kills | gc | 1,000 | 0 | 0 | 0 | 0 | 0 | 0 | `--only kills` |",
    ]
    write_table(page, {one: Counter(trials=2, bytes=2, message=1)}, "--under build")
    assert rows_of(page) == [
        "| kills | build | 2 | 2 | 0 | 0 | 0 | 0 | 1 | `--under build` |",
        "| kills | gc | 1,000 | 0 | 0 | 0 | 0 | 0 | 0 | `--only kills` |",
    ]
    del counts[one]
    write_table(page, counts, "")
    assert rows_of(page) == ["| kills | gc | 1,000 | 0 | 0 | 0 | 0 | 0 | 0 | all |"]
