"""The step ``language``."""

import tempfile
from typing import Any

import pytest

from flat_tokens.steps import StepsOutcome
from tests.flat_tokens.steps.taking import taken
from tests.refusal import refusal

pytest.importorskip("py3langid")

TEXTS = [
    "The rain fell in torrents, and the wind swept up the streets of the old harbour.",
    "Der Regen fiel in Strömen, und der Wind fegte durch die Straßen des alten Hafens.",
    "La pluie tombait à torrents, et le vent balayait les rues du vieux port.",
    "1999 - 42 !",
    "",
]


def found_in(*texts: str, **options: Any) -> StepsOutcome:
    return taken([{"use": "language", "options": options}], *texts)


def test_each_document_has_the_language_that_the_package_tells(monkeypatch):
    """Its model is unpacked in memory."""
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    found = found_in(*TEXTS)
    assert found.columns.column("language").to_pylist() == ["en", "de", "fr", None, None]
    assert found.keep.all()
    assert found.kinds == {"language": "text"}


def test_others_are_left_out_by_their_language():
    found = found_in(*TEXTS, keep=["en", "fr"], column="tongue", probability="sure")
    assert found.keep.tolist() == [True, False, True, False, False]
    assert dict(found.skipped) == {"language.de": 1, "language.unknown": 2}
    assert found.columns.column("tongue").to_pylist() == ["en", "fr"]
    assert found.columns.column("sure").to_pylist() == pytest.approx([0.9918, 0.9985], abs=1e-4)


def test_only_the_beginning_is_looked_at():
    found = found_in(TEXTS[0] + 40 * TEXTS[1], max_characters=len(TEXTS[0]))
    assert found.columns.column("language").to_pylist() == ["en"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ["english"]}, "keep has 'english'; languages are ace, af, am, "),
        ({"keep": "en"}, "keep should be a list"),
        ({"max_characters": 0}, "max_characters should be a whole number above 0"),
        ({"probability": "language"}, "column and probability are both 'language'"),
        ({"column": "row"}, "which every document has already"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with refusal(message):
        found_in(*TEXTS, **options)
