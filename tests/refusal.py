"""Errors that a caller reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refusal(words: str) -> Iterator[None]:
    """The block raises a ValueError whose message has *words*, a pattern, and no address of an object, which says nothing."""
    with pytest.raises(ValueError, match=words) as raised:
        yield
    assert " at 0x" not in str(raised.value)
