"""What the harness found: each fault that nobody has mended is expected to fail, in the way that is known; none comes back."""

from __future__ import annotations

import pytest

from tests.faults.known import KNOWN, MENDED, Known
from tests.faults.test_harness import Flaws, campaign


@pytest.fixture(scope="module")
def found() -> Flaws:
    """What comes of the trials that are known to go wrong."""
    return campaign("known")


@pytest.mark.parametrize(
    "known",
    [pytest.param(one, marks=pytest.mark.xfail(strict=True, reason=one.reason), id=one.name) for one in KNOWN if one.case],
)
def test_known(known, found):
    flaws = [flaw for flaw in found if flaw["name"] == known.name]
    assert all(known.explains(flaw["what"], flaw["under"], flaw["told"]) for flaw in flaws), "this is something else"
    assert flaws == []


@pytest.mark.slow
def test_what_was_mended_stays_so():
    """All of these trials can still be made."""
    assert campaign("mended", trials=len(MENDED)) == []


def test_a_known_fault_explains_its_own_lines_alone():
    known = Known("a file stays", "nobody removes it", "leftovers", "^build", r"/staging/\S+$", None, None)
    assert known.explains("leftovers", "build, mmap", "killed: out/staging/half")
    assert not known.explains("bytes", "build, mmap", "killed: out/staging/half")
    assert not known.explains("leftovers", "rebuild", "killed: out/staging/half")
    assert not known.explains("leftovers", "build, mmap", "killed: out/half")
