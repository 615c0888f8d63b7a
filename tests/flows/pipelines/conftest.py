"""What builds of few documents need."""

from collections.abc import Iterator

import pytest

import flat_tokens.steps


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several segments; and no step of a test is used by the next."""
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 300)
    flat_tokens.steps._opened.cache_clear()
    yield
    flat_tokens.steps._opened.cache_clear()
