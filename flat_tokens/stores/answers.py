"""Answers of web servers: how much of one is read, in which encoding, and how slowly it may arrive.

A server within the roots may be faulty or taken over. So an answer is read up to the size that was said or asked for, and a
packed one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

MOST_BYTES = 1 << 30
"""Size of an answer that is read into memory, if the request names no range: a listing, an object, a reply of an API."""
LEAST_BYTES, WINDOW_SECONDS = 1000, 60.0
"""The least speed: bytes a second, over this many seconds."""


class SlowError(ConnectionError):
    """A server sends slower than the least speed."""


class AnswerPace:
    """The speed of one answer."""

    def __init__(self) -> None:
        self._begun, self._bytes = time.monotonic(), 0

    def add(self, size: int) -> None:
        """Count received bytes. SlowError if a window had fewer than the least speed gives."""
        self._bytes += size
        if (seconds := time.monotonic() - self._begun) >= WINDOW_SECONDS:
            if self._bytes < LEAST_BYTES * seconds:
                raise SlowError(
                    f"the server sent {self._bytes:,} bytes in {seconds:.0f} s; the least speed is {LEAST_BYTES:,} bytes a second"
                )
            self._begun, self._bytes = time.monotonic(), 0


def check_encoding(url: object, headers: Any) -> None:
    """ValueError if an answer is packed: its size says nothing about the file, and a few bytes may unpack to any number."""
    if (packed := headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise ValueError(f"{url}: the server sends it packed (Content-Encoding {packed[:40]!r}), which was not asked for")


def bounded(url: object, blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Received blocks, up to *most* bytes. ValueError if there are more, SlowError if they arrive too slowly."""
    seen, pace = 0, AnswerPace()
    for block in blocks:
        pace.add(len(block))
        seen += len(block)
        if seen > most:
            raise ValueError(f"{url}: the server sends more than {most:,} bytes")
        yield block
