"""The checks of the write path find what they are for: changes of it that lose data make them fail."""

import re
from collections import Counter

import pytest

from tests.faults.sabotages import SABOTAGES, found, source_of
from tests.processes import ROOT


def test_every_sabotage_can_still_be_made():
    """The text that it changes is there, once; it has a check, which is there too."""
    assert len(SABOTAGES) >= 12
    assert not [name for name, count in Counter(one.name for one in SABOTAGES).items() if count > 1]
    assert not [one.name for one in SABOTAGES if source_of(one).count(one.old) != 1]
    named = [one.check.partition("::") for one in SABOTAGES if not one.check.startswith("-")]
    assert not [name for file, _, name in named if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.nightly] if k % 4 or one.check.startswith("-") else [])
        for k, one in enumerate(SABOTAGES)
    ],
)
def test_a_sabotage_is_found(sabotage, tmp_path):
    is_found, told = found(sabotage, tmp_path)
    assert is_found, told
