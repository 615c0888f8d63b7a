"""Functions run in an interpreter of their own.

jax has threads as soon as it is imported and warns of every fork from then on, and torch's loaders fork themselves. What
imports jax or starts workers goes elsewhere, so that it disturbs no other test and none disturbs it.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

FRAMEWORKS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.needs("torch")),
    pytest.param("jax", marks=[pytest.mark.needs("jax"), pytest.mark.slow]),
]


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or the error that it raises there. Warnings are errors."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=warnings.simplefilter, initargs=("error",)) as pool:
        return pool.submit(function, *arguments).result(timeout=300)


def in_framework(framework: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call the function with *arguments* and the framework's name. jax is elsewhere."""
    (elsewhere if framework == "jax" else lambda of, *rest: of(*rest))(function, *arguments, framework)
