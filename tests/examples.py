"""How many examples a property is tried with: a fifth by default, all of them in ``make test-slow``."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

ALL, FEW = "all", "few"
SHARE = 5

_common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.register_profile(ALL, _common, max_examples=100)
settings.register_profile(FEW, _common, max_examples=100 // SHARE)


def examples(count: int) -> settings:
    """Try a property with *count* examples, not with 100."""
    return settings(max_examples=count if settings.get_current_profile_name() == ALL else max(count // SHARE, 3))
