"""A store for tests: local files under ``slow:///path``, which counts its requests and answers them as slowly as it is told."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import flat_tokens
from flat_tokens.annotations import UInt32s
from tests.made import write_sequences


class SlowStore(LocalFileSystem):  # type: ignore[misc]
    """Requests for ranges of objects: in ``requests``, and after ``seconds(number, path)`` of waiting."""

    protocol = "slow"
    cachable = False
    requests: ClassVar[list[tuple[str, int, int]]] = []
    seconds: Callable[[int, str], float] = staticmethod(lambda number, path: 0.0)
    most_at_once = at_once = 0
    changing = threading.Lock()

    @classmethod
    def reset(cls, seconds: Callable[[int, str], float] = lambda number, path: 0.0) -> None:
        cls.requests, cls.seconds, cls.most_at_once = [], staticmethod(seconds), 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return "/" + str(path).removeprefix("slow://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path, cls = self._strip_protocol(path), type(self)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, stop = slice(start, end).indices(size)[:2]
            file.seek(start)
            data = file.read(max(stop - start, 0))
        with cls.changing:
            number = len(cls.requests)
            cls.requests.append((path, start, stop))
            cls.at_once += 1
            cls.most_at_once = max(cls.most_at_once, cls.at_once)
        if (wait := cls.seconds(number, path)) > 0:
            time.sleep(wait)
        with cls.changing:
            cls.at_once -= 1
        return data


fsspec.register_implementation("slow", SlowStore, clobber=True)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    yield
    SlowStore.reset()


def in_all_layouts(root: Path, ids: UInt32s) -> Path:
    """Write a dataset in each layout, below *root*."""
    for layout in flat_tokens.LAYOUTS:
        write_sequences(root / layout, ids, layout=layout)
    return root
