"""The step ``datatrove`` gives what datatrove itself gives."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flat_tokens.steps import open_steps

filters = pytest.importorskip("datatrove.pipeline.filters")
data = pytest.importorskip("datatrove.data")

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
    {"filter": "C4QualityFilter", "min_num_sentences": -1},
    {"filter": "C4QualityFilter", "min_num_sentences": -1, "split_paragraph": True, "filter_curly_bracket": False},
]


def by_datatrove(options: dict[str, Any], texts: list[str]) -> tuple[list[str], Counter[str]]:
    """The texts that datatrove's own pipeline gives, and the reasons for which the others are dropped."""
    own = {name: value for name, value in options.items() if name != "filter"}
    one = getattr(filters, options["filter"])(**own)
    kept = [document.text for document in one.run(data.Document(text=text, id=str(i)) for i, text in enumerate(texts))]
    dropped = Counter({name.removeprefix("dropped_"): int(s.total) for name, s in one.stats.stats.items() if "dropped_" in name})
    return kept, dropped


@pytest.mark.parametrize("options", FILTERS, ids=[f"{k}-{one['filter']}" for k, one in enumerate(FILTERS)])
def test_documents_are_those_of_datatrove(options: dict[str, Any]) -> None:
    kept, dropped = by_datatrove(options, TEXTS)
    found = open_steps([{"use": "datatrove", "options": options}])(
        pa.array(TEXTS, pa.large_string()), np.arange(len(TEXTS), dtype=np.uint64)
    )
    assert found.texts.to_pylist() == kept
    assert 0 < len(kept) < len(TEXTS)
    told = Counter({reason.removeprefix("datatrove."): count for reason, count in found.skipped.items()})
    assert told.total() == len(TEXTS) - len(kept)
    assert dropped == Counter({reason: count for reason, count in told.items() if reason != "dropped"})


def test_each_thread_has_a_filter_of_its_own() -> None:
    steps = open_steps([{"use": "datatrove", "options": {"filter": "C4ParagraphFilter"}}])
    barrier = threading.Barrier(4)

    def take(_: int) -> list[bool]:
        barrier.wait()
        found: list[bool] = steps(pa.array(TEXTS, pa.large_string()), np.arange(len(TEXTS), dtype=np.uint64)).keep.tolist()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(keep) for keep in pool.map(take, range(4))}) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"filter": "SamplerFilter"}, "draws documents in the order in which they come"),
        ({"filter": "LambdaFilter"}, "takes a function"),
        ({"filter": "C4BadWordsFilter", "keep_fraction": 0.5}, "draws documents in the order in which they come"),
        ({"filter": "RegexFilter", "regex_exp": "a", "exclusion_writer": "x"}, "steps write nothing"),
        ({"filter": "NoFilter"}, "datatrove has no filter 'NoFilter'; it has C4BadWordsFilter, C4ParagraphFilter"),
        ({"filter": "os"}, "datatrove has no filter 'os'"),
        ({"filter": "RegexFilter"}, "missing 1 required positional argument: 'regex_exp'"),
        ({"filter": "RegexFilter", "regex_exp": "a", "more": 1}, "unexpected keyword argument 'more'"),
        ({}, "missing 1 required keyword-only argument: 'filter'"),
    ],
)
def test_what_is_no_filter_of_a_document_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"step 'datatrove': .*{told}"):
        open_steps([{"use": "datatrove", "options": options}])


def test_the_version_is_datatroves() -> None:
    described = open_steps([{"use": "datatrove", "options": FILTERS[0]}]).described[0]
    assert described["version"].startswith("datatrove 0.")


def test_kept_columns_are_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter sees each document's own."""

    class ByLanguage(filters.LambdaFilter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(lambda document: document.metadata.get("language") == "en")

    monkeypatch.setattr(filters, "ByLanguage", ByLanguage, raising=False)
    steps = open_steps([{"use": "datatrove", "options": {"filter": "ByLanguage"}}])
    columns = pa.record_batch({"language": ["en", None, "de", "en"]})
    found = steps(pa.array(["a", "b", "c", "d"], pa.large_string()), np.arange(4, dtype=np.uint64), columns)
    assert found.texts.to_pylist() == ["a", "d"]
