"""The step ``datatrove`` gives what datatrove itself gives."""

from collections import Counter
from importlib import import_module
from typing import Any

import pyarrow as pa
import pytest

from flat_tokens.steps import open_steps
from tests.flat_tokens.steps.taking import taken
from tests.refusal import refusal

pytestmark = pytest.mark.needs("datatrove")

LINE = "This line has words enough and it ends as a sentence does. "
TEXTS = [
    "",
    "short",
    "A line with a [12] citation that goes away.\nno end\nThe cookie policy is not kept at all.\nTwo words.",
    f"{LINE * 4}\n{LINE * 5}\n{LINE * 6}",
    f"{LINE * 4}\n{LINE * 5}\nshort",
    "lorem ipsum dolor sit amet.",
    "A brace { is of a program.",
    "digits 123",
]
FILTERS: list[dict[str, Any]] = [
    {"filter": "RegexFilter", "regex_exp": r"\d"},
    {"filter": "C4ParagraphFilter"},
    {"filter": "C4QualityFilter", "min_num_sentences": -1, "split_paragraph": True, "filter_curly_bracket": False},
]


def by_datatrove(options: dict[str, Any], texts: list[str]) -> tuple[list[str], Counter[str]]:
    """The texts that datatrove's own pipeline gives, and the reasons for which the others are dropped."""
    own = {name: value for name, value in options.items() if name != "filter"}
    one = getattr(import_module("datatrove.pipeline.filters"), options["filter"])(**own)
    document_of = import_module("datatrove.data").Document
    kept = [document.text for document in one.run(document_of(text=text, id=str(i)) for i, text in enumerate(texts))]
    dropped = Counter({name.removeprefix("dropped_"): int(s.total) for name, s in one.stats.stats.items() if "dropped_" in name})
    return kept, dropped


@pytest.mark.parametrize("options", FILTERS, ids=[f"{k}-{one['filter']}" for k, one in enumerate(FILTERS)])
def test_documents_are_those_of_datatrove(options):
    kept, dropped = by_datatrove(options, TEXTS)
    found = taken([{"use": "datatrove", "options": options}], *TEXTS)
    assert found.texts.to_pylist() == kept
    assert 0 < len(kept) < len(TEXTS)
    told = Counter({reason.removeprefix("datatrove."): count for reason, count in found.skipped.items()})
    assert told.total() == len(TEXTS) - len(kept)
    assert dropped == Counter({reason: count for reason, count in told.items() if reason != "dropped"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"filter": "SamplerFilter"}, "draws documents in the order in which they come"),
        ({"filter": "LambdaFilter"}, "takes a function"),
        ({"filter": "C4BadWordsFilter", "keep_fraction": 0.5}, "draws documents in the order in which they come"),
        ({"filter": "RegexFilter", "regex_exp": "a", "exclusion_writer": "x"}, "steps write nothing"),
        ({"filter": "NoFilter"}, "datatrove has no filter 'NoFilter'; it has C4BadWordsFilter, C4ParagraphFilter"),
        ({"filter": "RegexFilter"}, "missing 1 required positional argument: 'regex_exp'"),
        *(
            (named, "it needs the name of a filter or of a formatter, one of the two")
            for named in ({}, {"filter": "RegexFilter", "formatter": "PIIFormatter"})
        ),
        ({"formatter": "Nothing"}, "datatrove has no formatter 'Nothing'; it has FTFYFormatter, PIIFormatter"),
    ],
)
def test_what_is_no_filter_of_a_document_is_refused(options, told):
    with refusal(f"step 'datatrove': .*{told}"):
        open_steps([{"use": "datatrove", "options": options}])


def test_the_version_is_datatroves():
    described = open_steps([{"use": "datatrove", "options": FILTERS[0]}]).described[0]
    assert described["version"].startswith("datatrove 0.")


def test_kept_columns_are_metadata(monkeypatch):
    """A filter sees each document's own."""
    filters = import_module("datatrove.pipeline.filters")

    class ByLanguage(filters.LambdaFilter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(lambda document: document.metadata.get("language") == "en")

    monkeypatch.setattr(filters, "ByLanguage", ByLanguage, raising=False)
    steps = open_steps([{"use": "datatrove", "options": {"filter": "ByLanguage"}}])
    columns = pa.record_batch({"language": ["en", None, "de", "en"]})
    found = taken(steps, *"abcd", columns=columns)
    assert found.texts.to_pylist() == ["a", "d"]


FORMATTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"formatter": "PIIFormatter"}, ["a@b.org and c@d.org", "write to e@f.org", "192.168.0.1 and 8.8.8.8", "nothing"]),
    ({"formatter": "PIIFormatter", "remove_ips": False, "email_replacement": "<mail>"}, ["a@b.org and 8.8.8.8", "x"]),
]


@pytest.mark.parametrize(("options", "texts"), FORMATTERS, ids=["pii", "mails"])
def test_texts_are_those_of_a_formatter_of_each_document(options, texts):
    """Whatever came before: the address that takes another's place would be another one."""
    formatters = pytest.importorskip("datatrove.pipeline.formatters")
    own = {name: value for name, value in options.items() if name != "formatter"}
    wanted = [getattr(formatters, options["formatter"])(**own).format(text) for text in texts]
    steps = open_steps([{"use": "datatrove", "options": options}])
    for order in (texts, texts[::-1]):
        found = taken(steps, *order)
        assert found.texts.to_pylist() == (wanted if order is texts else wanted[::-1])
    assert wanted != texts
