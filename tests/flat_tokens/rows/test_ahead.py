"""Reading ahead: what the next steps read is fetched before they are due, up to a budget, in every view and loader."""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import BucketedLoader, LayoutName, Mixture, ShuffledLoader
from flat_tokens.rows.loader import ByStep
from tests.processes import until
from tests.slow_store import SlowStore, in_all_layouts, quick  # noqa: F401  a fixture

UNIT = 4 * (65_536 * 4 + 4)
IDS = np.random.default_rng(0).integers(0, 60_000, (6_000, 300)).astype(np.uint32)
"""Seven units."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_all_layouts(tmp_path_factory.mktemp("datasets"), IDS)


def train_of(root: Path, cache: Path, layout: LayoutName = "mmap", read_ahead: int = 256 << 20) -> Any:
    return flat_tokens.open(f"slow://{root}/{layout}", cache=cache, cache_bytes=1 << 30, read_ahead=read_ahead).train


def tokens_asked_for() -> set[tuple[str, int, int]]:
    return {request for request in SlowStore.requests if "/encoded_tokens/" in request[0]}


VIEWS: dict[str, Callable[[Any], Any]] = {
    "packed": lambda train: train.packed(2048),
    "documents": lambda train: train.documents(300),
    "packs": lambda train: train.packed_documents(2048),
    "best packs": lambda train: train.packed_documents(2048, fit="best"),
    "with ends": lambda train: train.packed(2048, bos=1, eos=2),
}


@pytest.mark.parametrize(("name", "layout"), [*((name, "mmap") for name in VIEWS), ("packed", "compact"), ("packed", "zarr2")])
def test_all_that_the_next_steps_read_is_here_before_they_are_asked_for(root, tmp_path, name, layout):
    train = train_of(root, tmp_path, layout)
    view, local = VIEWS[name](train), VIEWS[name](flat_tokens.open(root / layout).train)
    loader, expected = ShuffledLoader(view, 64, 7), ShuffledLoader(local, 64, 7)
    with loader.steps(3) as steps:
        assert until(lambda: has_all(train, loader, 3))
        before = tokens_asked_for()
        for step, batch in enumerate(steps, 3):
            for mine, other in zip(batch, expected[step], strict=True):
                assert np.array_equal(mine, other)
        assert tokens_asked_for() == before


def has_all(train: Any, loader: ByStep, first: int) -> bool:
    """Whether all units that the steps read from *first* on, of views in a store, are in the cache."""
    reads = [(view, rows) for step in range(first, len(loader)) for view, rows in loader.reads(step)]
    return all(
        train.encoded_tokens.store.units._remembered(unit) is not None
        for view, rows in reads
        if view.tokens.store is train.store
        for unit in view.tokens.encoded_tokens.units_of(*view.token_ranges(rows))
    )


def test_no_more_is_fetched_than_the_budget_before_steps_are_loaded(root, tmp_path):
    """A unit may go beyond it. Each loaded step gives its bytes free."""
    train = train_of(root, tmp_path, read_ahead=3 * UNIT)
    loader = ShuffledLoader(train.packed(2048), 64, order="sequential")  # 2 steps a unit
    SlowStore.reset()
    with loader.steps() as steps:
        until(lambda: len(SlowStore.requests) == 3)
        time.sleep(0.05)  # nothing tells that there is nothing more to come
        assert [start for _, start, _ in sorted(SlowStore.requests)] == [0, UNIT, 2 * UNIT]
        for _ in range(5):
            next(steps)
        until(lambda: len(SlowStore.requests) == 6)  # steps 0 to 4 had three units, which were given free
    assert len(set(SlowStore.requests)) == len(SlowStore.requests)


@pytest.mark.parametrize("kind", ["mixture", "buckets"])
def test_mixtures_and_buckets_are_read_ahead(root, tmp_path, kind):
    train = train_of(root, tmp_path)
    local = flat_tokens.open(root / "compact").train.packed(2048)
    loader = BucketedLoader(train, [128, 300], 9_600, 7)
    if kind == "mixture":
        loader = Mixture({"store": (train.packed(2048), 0.5), "disk": (local, 0.5)}, 32, 7, steps=40)
    with loader.steps(prefetch=1) as steps:
        next(steps)
        assert until(lambda: has_all(train, loader, 0))


def test_the_threads_end_with_the_steps(root, tmp_path):
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("flat-tokens-ahead")]

    until(lambda: not running())
    loader = ShuffledLoader(train_of(root, tmp_path, read_ahead=UNIT).packed(2048), 16, epochs=None)
    with loader.steps(prefetch=2) as steps:
        next(steps)
        assert running()
    until(lambda: not running())
    dropped = loader.steps()
    next(dropped)
    del dropped
    gc.collect()
    until(lambda: not running())


def test_an_error_is_raised_where_its_step_is_due(root, tmp_path):
    def broken(number: int, path: str) -> float:
        if "/encoded_tokens/c/" in path:
            raise PermissionError(path)
        return 0

    view = train_of(root, tmp_path).packed(2048)
    SlowStore.reset(broken)
    steps = ShuffledLoader(view, 16).steps()
    for _ in range(2):
        with pytest.raises(PermissionError, match="encoded_tokens"):
            next(steps)
    SlowStore.reset()
    assert np.array_equal(next(steps).targets, ShuffledLoader(view, 16)[0].targets)
