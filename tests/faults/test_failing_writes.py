"""Builds whose slices cross the borders of objects end, and can be run again, whichever operation fails, once and for good."""

from __future__ import annotations

from tests.faults.test_harness import campaign

OF_WRITES = r" at (create|write|truncate|fsync|rename|link|space|any) "


def test_an_operation_fails() -> None:
    """Every 200th; ``make faults`` tries all. A trial that does not end is a flaw."""
    assert campaign("elsewhere", "--under", "^build, streamed$", "--match", OF_WRITES, "--every", "200") == []
