"""The table of formats says of each what the registry says, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

from flat_tokens.formats import FORMATS

TABLE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def test_every_format_has_a_row() -> None:
    assert re.findall(r"^\| `([^`]+)` \|", TABLE, re.MULTILINE) == list(FORMATS)
