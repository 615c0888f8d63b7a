"""Builds whose slices cross the borders of objects end, and can be run again, whichever operation fails, once and for good."""

from __future__ import annotations

import pytest

from tests.examples import first_fast
from tests.faults.test_harness import campaign

OF_WRITES = r" at (create|write|truncate|fsync|rename|link|space|any) "


@pytest.mark.parametrize(("name", "every"), first_fast([("elsewhere", 200), ("lasting", 20), ("elsewhere", 50)], several=True))
def test_an_operation_fails(name: str, every: int) -> None:
    """Every so many of them; ``make test-slow`` and ``make faults`` try more. A trial that does not end is a flaw."""
    assert campaign(name, "--under", "^build, streamed$", "--match", OF_WRITES, "--every", str(every)) == []
