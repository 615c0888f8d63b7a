"""Faults of the product that are known. Who mends one removes its row: the tests of its inputs then have to pass."""

from __future__ import annotations

import fnmatch

KNOWN: dict[str, str] = {}
"""By target and fault, as patterns such as ``parquet/memory-*``: what is wrong."""


def reason(fault: str) -> str | None:
    """What is wrong, where a fault such as ``parquet/hang-pages._value`` is known."""
    return next((why for pattern, why in KNOWN.items() if fnmatch.fnmatchcase(fault, pattern)), None)
