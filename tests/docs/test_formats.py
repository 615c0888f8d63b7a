"""docs/formats.md: the table says of each format what the registry says."""

import re

from flat_tokens.formats import FORMATS
from tests.docs.programs import ROOT

TEXT = (ROOT / "docs/formats.md").read_text(encoding="utf-8")


def test_every_format_has_a_row():
    assert re.findall(r"^\| `([^`]+)` \|", TEXT.partition("\n## ")[0], re.MULTILINE) == list(FORMATS)


def test_what_is_not_taken_is_said_of_every_format():
    section = TEXT.partition("\n## What is not taken")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`([^`]+)`", row)] == list(FORMATS)
