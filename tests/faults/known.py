"""What the harness found and nobody has mended yet: how to make it happen, and how to tell it from anything new.

Each is a test that is expected to fail (``test_known.py``). Who mends one removes it here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.faults.inject import KILL, Fault


class Known(NamedTuple):
    """A fault of the product. ``what``, ``under`` and ``told``: regular expressions for the lines of trials in which it shows.
    ``case`` and ``fault``: a trial that shows it; None where another test does.
    """

    name: str
    reason: str
    what: str
    under: str
    told: str
    case: str | None
    fault: Fault | None

    def explains(self, what: str, under: str, told: str) -> bool:
        return bool(re.fullmatch(self.what, what) and re.search(self.under, under) and re.search(self.told, told))


KNOWN: tuple[Known, ...] = ()


class Mended(NamedTuple):
    """A trial in which something did not hold before it was mended. ``case`` and ``fault``: as in `Known`."""

    name: str
    case: str
    fault: Fault


MENDED = (
    Mended("half of an unpacked file stays", "build, mmap", Fault("create", 1, KILL, path=r"/_cache/files/_staging/fetch/")),
    Mended("the staging of an export stays", "export", Fault("unlink", 1, "EACCES", lasting=True, path=r"\.export/staging$")),
    Mended("a collection cannot look a file up", "gc", Fault("stat", 2, "EIO", path=r"/_cache/files/0{64}\.raw$")),
    Mended("what is thrown away is named by its last part", "gc", Fault("rename", 1, "EIO", path="/collected/")),
    Mended(
        "a source that cannot be cut is named by its last part", "build, mmap", Fault("read", 1, "EIO", path=r"/in/new\.jsonl$")
    ),
    Mended("a source that cannot be looked up is not there", "build, mmap", Fault("stat", 6, "EIO", path=r"/in(/new\.jsonl)?$")),
    Mended("a configuration that cannot be looked up is a dataset", "refresh", Fault("stat", 1, "EIO", path=r"/new\.json$")),
)


def known_as(what: str, under: str, told: str) -> str | None:
    """The name of the known fault that explains a line; None where nothing does."""
    return next((known.name for known in KNOWN if known.explains(what, under, told)), None)
