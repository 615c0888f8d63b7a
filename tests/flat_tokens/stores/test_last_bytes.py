"""Stores whose clients read no last bytes of an object, such as Azure's: sizes are those of the manifest, or are asked for."""

import pickle
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import flat_tokens
from flat_tokens.stores.store import Store
from tests.made import write_sequences

SEQUENCES = [[100 * i + k for k in range(i % 50)] for i in range(900)]


class NoLastBytes(MemoryFileSystem):  # type: ignore[misc]
    """Its requests begin at a byte of the object, as adlfs's do. It notes whose sizes it was asked for."""

    protocol = "nolast"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("nolast://").replace("//", "/")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if (start or 0) < 0:
            raise ValueError("offset must be non-negative")
        if (file := self.store.get(self._strip_protocol(path))) is None:
            raise FileNotFoundError(path)
        return bytes(file.getvalue()[start or 0 : end])

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.asked.append(path)
        return dict(super().info(path, **options))


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    fsspec.register_implementation("nolast", NoLastBytes, clobber=True)
    yield
    NoLastBytes.store.clear()


@pytest.mark.parametrize("layout", flat_tokens.LAYOUTS)
def test_a_dataset_is_read_by_the_sizes_of_its_manifest(layout, tmp_path):
    """Through a cache, too."""
    url = f"nolast://{uuid.uuid4().hex}"
    write_sequences(url, SEQUENCES, layout=layout)
    for _ in range(2):
        train = flat_tokens.open(url, cache=tmp_path, cache_bytes=10**8).train
        assert train.sequence(77).tolist() == SEQUENCES[77]
    NoLastBytes.asked.clear()
    train = flat_tokens.open(url).train
    rows = train.packed(64).batch([3, 200])
    expected = np.concatenate([np.array(one, np.int64) for one in SEQUENCES])
    assert rows.targets.tolist() == [expected[64 * i : 64 * i + 64].tolist() for i in (3, 200)]
    assert pickle.loads(pickle.dumps(train)).sequence(77).tolist() == SEQUENCES[77]
    assert not [path for path in NoLastBytes.asked if "/c/" in path or path.rsplit("/", 1)[-1].isdigit()]
    assert flat_tokens.verify(url, "full").token_count == len(expected)


def test_ranges_of_missing_and_empty_objects():
    store = Store.at(f"nolast://{uuid.uuid4().hex}")
    store.put("some", b"0123456789")
    store.put("empty", b"")
    found = store.read_ranges(["some", "missing", "empty", "some", "some"], [-4, -4, -4, 2, -40], [None, None, None, 5, None])
    assert isinstance(found[1], FileNotFoundError)
    assert [found[k] for k in (0, 2, 3, 4)] == [b"6789", b"", b"234", b"0123456789"]
