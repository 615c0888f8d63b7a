"""How much is tried: a tenth of the examples of a property, all in ``make test-nightly``; the first of a long list of cases, all
in ``make test-slow``.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ALL, FEW = "all", "few"
SHARE = 10
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
"""Marks of what is left to ``make test-nightly``."""
SOME_OR_ALL = pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=NIGHTLY)], ids=["some", "all"])
"""Some of the cases of a test, which is given ``is_whole``; ``make test-nightly`` tries all."""

# Not the profile that hypothesis takes where the variable CI is set: it keeps no examples and chooses the same ones each time.
_common = settings(
    settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(ALL, _common, max_examples=100)
settings.register_profile(FEW, _common, max_examples=100 // SHARE)


def examples(count: int) -> settings:
    """Try a property with *count* examples, not with 100."""
    return settings(max_examples=count if settings.get_current_profile_name() == ALL else max(count // SHARE, 2))


def first_fast(cases: Iterable[Any], fast: int = 1, *, several: bool = False, every: int = 1) -> list[Any]:
    """Cases for ``parametrize``, of which those after the first *fast* are slow tests; each of these but every K-th is left to
    ``make test-nightly``. Names are given by ``ids``. *several*: each case has the values of several names.
    """
    return [
        pytest.param(*(case if several else [case]), marks=NIGHTLY[: 0 if k < fast else 1 + ((k - fast) % every > 0)])
        for k, case in enumerate(cases)
    ]
