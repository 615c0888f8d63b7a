"""Errors that a caller reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refusal(words: str, kind: Any = ValueError) -> Iterator[None]:
    """The block raises an error of this kind whose message has *words*, a pattern. A ValueError gives no address of an object."""
    with pytest.raises(kind, match=words) as raised:
        yield
    assert kind is not ValueError or " at 0x" not in str(raised.value)
