"""Steps: what each shipped one does to documents, what a chain makes of several, and which are refused before work starts."""

import importlib.metadata
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flat_tokens.steps
from flat_tokens.steps import SHIPPED, Outcome, ReadySteps, open_steps
from tests.flat_tokens.steps.taking import taken
from tests.refusal import refusal


def asked(use: str, name: str | None = None, **options: Any) -> dict[str, Any]:
    return {"use": use, "name": name, "options": options}


LENGTHS: list[tuple[dict[str, int], str, str | None]] = [
    ({"min_bytes": 3}, "é", "min_bytes"),
    ({"min_bytes": 3}, "éa", None),
    ({"max_bytes": 2}, "éa", "max_bytes"),
    ({"min_characters": 2}, "é", "min_characters"),
    ({"max_characters": 1}, "é", None),
    ({"max_characters": 0}, "", None),
    ({"min_lines": 1}, "", "min_lines"),
    ({"min_lines": 2}, "a\n", "min_lines"),
    ({"min_lines": 2}, "a\nb", None),
    ({"max_lines": 2}, "a\n\nb\n", "max_lines"),
    ({"max_lines": 1}, "\n", None),
    ({"max_lines": 1}, "a\r\n", None),
    ({"min_bytes": 9, "max_lines": 1}, "a\nb", "min_bytes"),
]


@pytest.mark.parametrize(("limits", "text", "reason"), LENGTHS)
def test_length_counts_bytes_characters_and_lines(limits, text, reason):
    found = taken([asked("length", **limits)], text)
    assert found.keep.tolist() == [reason is None]
    assert dict(found.skipped) == ({f"length.{reason}": 1} if reason else {})


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"drop": "b"}, ["a", "", "A"]),
        ({"keep": "b"}, ["ab"]),
        ({"keep": "a", "ignore_case": True}, ["a", "ab", "A"]),
        ({"drop": "(?i)^A$"}, ["ab", ""]),
        ({"drop": "^$"}, ["a", "ab", "A"]),
    ],
)
def test_pattern_keeps_or_drops_what_it_finds(options, kept):
    found = taken([asked("pattern", **options)], "a", "ab", "", "A")
    assert found.texts.to_pylist() == kept
    assert dict(found.skipped) == {f"pattern.{'drop' if 'drop' in options else 'keep'}": 4 - len(kept)}


COMPOSES = pytest.mark.skipif(int(pa.__version__.partition(".")[0]) < 26, reason="pyarrow gives no NFC before 26")


def test_a_pyarrow_that_gives_no_nfc_is_refused(monkeypatch):
    monkeypatch.setattr("flat_tokens.steps.shipped._nfc", lambda texts: texts)
    with refusal(r"step 'normalize': pyarrow .* gives no NFC: install 26"):
        open_steps([asked("normalize")])
    assert taken([asked("normalize", nfc=False)], "e\u0301\r").texts.to_pylist() == ["e\u0301\n"]


@COMPOSES
def test_normalize_gives_nfc_and_newlines():
    found = taken([asked("normalize")], "e\u0301\r\nx\ry\n", "same\n", "\r\r\n")
    assert found.texts.to_pylist() == ["é\nx\ny\n", "same\n", "\n\n"]
    assert dict(found.changed) == {"normalize.changed": 2}
    assert taken([asked("normalize", line_ends=False)], "e\u0301\r").texts.to_pylist() == ["é\r"]


@COMPOSES
def test_steps_are_taken_one_after_the_other():
    """A later one sees what the earlier ones leave, and each counts its own."""
    steps = [asked("length", max_bytes=4), asked("normalize"), asked("pattern", drop="é"), asked("pattern", keep="x")]
    found = taken(steps, "e\u0301", "too long", "x\r\n", "y", "é")
    assert found.keep.tolist() == [False, False, True, False, False]
    assert found.texts.to_pylist() == ["x\n"]
    assert dict(found.skipped) == {"length.max_bytes": 1, "pattern.drop": 2, "pattern-2.keep": 1}
    assert taken(steps).texts.to_pylist() == []


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            asked("shout"),
            f"there is no step 'shout'. There are {', '.join(SHIPPED)}. Others are in packages",
        ),
        (asked("lenght"), r"there is no step 'lenght'. Did you mean 'length'\?"),
        (asked("length"), "step 'length': it needs a limit: min_bytes, max_bytes, min_characters"),
        (asked("length", least=1), "step 'length' has no option 'least'. There are min_bytes, max_bytes, min_characters,"),
        (asked("length", min_chars=1), r"step 'length' has no option 'min_chars'. Did you mean 'min_characters'\?"),
        (asked("length", min_bytes=-1), "min_bytes should be a whole number, 0 or more"),
        (asked("length", min_bytes=True), "min_bytes should be a whole number"),
        (asked("length", min_bytes=2, max_bytes=1), "min_bytes is larger than max_bytes"),
        (asked("pattern", drop=""), "it needs keep or drop, one of them"),
        (asked("pattern", keep="a", drop="b"), "it needs keep or drop, one of them"),
        (asked("pattern", keep="("), r"'\(' is not a regular expression of RE2"),
        (asked("pattern", keep=r"(a)\1"), "is not a regular expression of RE2"),
        (asked("normalize", nfc=False, line_ends=False), "it would do nothing"),
        (asked("normalize", nfc=float("nan")), "options of steps are texts, numbers"),
        (asked("length", "a.b", min_bytes=1), "'a.b' is not a name of a step"),
        (asked("length", "pattern", min_bytes=1), "'pattern' is the name of two steps"),
        ({**asked("length", min_bytes=1), "version": "0"}, "step 'length' is of version 1 here, and was of version 0"),
    ],
)
def test_what_cannot_be_a_step_is_refused(step, told):
    with refusal(told):
        open_steps([step, asked("pattern", keep="a")])


def test_a_manifest_has_names_versions_and_options():
    described = open_steps([asked("length", min_bytes=1), asked("length", max_lines=2)]).described
    assert list(described) == [
        {"use": "length", "name": "length", "version": "1", "options": {"min_bytes": 1}},
        {"use": "length", "name": "length-2", "version": "1", "options": {"max_lines": 2}},
    ]
    assert open_steps(described).described == described


# Steps of packages


Entries = Callable[..., ReadySteps]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Entries:
    """Opens the step ``house`` of packages that are as good as installed, each with the function that loads it."""

    def install(**packages: Callable[[], Any]) -> ReadySteps:
        found = [
            SimpleNamespace(name="house", dist=SimpleNamespace(name=name, version="3.1"), load=load)
            for name, load in packages.items()
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: {"flat_tokens.steps": found}[group])
        flat_tokens.steps._opened.cache_clear()
        return open_steps([asked("house")])

    return install


@pytest.fixture
def package(entries: Entries) -> Callable[[Any], ReadySteps]:
    """Opens a step of a package that is as good as installed."""
    return lambda step: entries(house=lambda: lambda **options: step)


@pytest.fixture(autouse=True)
def _no_step_stays() -> Any:
    yield
    flat_tokens.steps._opened.cache_clear()


def test_a_step_without_a_version_has_its_packages(package):
    assert package(lambda documents: Outcome()).described[0]["version"] == "house 3.1"


def test_two_packages_with_one_name_are_refused(entries):
    with refusal("several packages have a step 'house': one 3.1, two 3.1"):
        entries(one=dict, two=dict)


def test_a_package_that_lacks_another_one_is_refused_by_their_names(entries):
    with refusal("step 'house' of one 3.1 cannot be imported: No module named 'absent'. Install what it needs"):
        entries(one=lambda: importlib.import_module("absent"))


def test_a_step_gets_texts_and_keys(package):
    seen = []
    steps = package(lambda documents: seen.append(documents) or Outcome())  # type: ignore[func-returns-value]
    assert taken(steps, "a", "b").texts.to_pylist() == ["a", "b"]
    assert seen[0].schema == pa.schema([("text", pa.large_string()), ("key", pa.uint64())])
    assert seen[0].to_pydict() == {"text": ["a", "b"], "key": [0, 1]}


def test_reasons_are_counted_apart(package):
    outcome = Outcome(np.array([False, True, False, False]), pa.array(["x", "y", None, "x"]))
    assert dict(taken(package(lambda documents: outcome), *"abcd").skipped) == {"house.x": 2, "house.dropped": 1}


WRONG: list[tuple[Any, str]] = [
    (lambda documents: None, "gives NoneType, not an Outcome"),
    (lambda documents: Outcome(pa.array([True])), "gives 1 of keep for 2 documents"),
    (lambda documents: Outcome(pa.array([True, None])), "gives object for keep, not booleans without nulls"),
    (lambda documents: Outcome(pa.array([1, 0])), "gives int64 for keep"),
    (lambda documents: Outcome(text=pa.array(["a", None])), "gives null for the text of a document that stays"),
    (lambda documents: Outcome(spans=pa.array([None, None], pa.list_(pa.list_(pa.int64())))), "it needs gives_spans = True"),
]


@pytest.mark.parametrize(("step", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_is_no_outcome_is_an_error(package, step, told):
    with refusal(re.escape(told)):
        taken(package(step), "a", "b")


def test_endless_reasons_are_an_error(package):
    steps = package(lambda documents: Outcome(np.zeros(len(documents), bool), documents.column("text").cast(pa.string())))
    with refusal("gives 100 reasons; a reason is a kind of documents"):
        taken(steps, *map(str, range(100)))


def upper_but_fails(documents: pa.RecordBatch) -> Outcome:
    texts = documents.column("text").to_pylist()
    if any("!" in text for text in texts):
        raise ZeroDivisionError("no letters")
    return Outcome(np.array([text != "b" for text in texts], bool), "b", pa.array([text.upper() for text in texts], pa.string()))


def test_a_step_that_fails_fails_on_a_document(package):
    found = taken(package(upper_but_fails), "a", "!", "b", "c", "!")
    assert found.texts.to_pylist() == ["A", "C"]
    assert found.keep.tolist() == [True, False, False, True, False]
    detail = "step 'house' fails on it: ZeroDivisionError: no letters"
    assert found.failed == [(1, "house.failed", detail), (4, "house.failed", detail)]
    assert dict(found.skipped) == {"house.b": 1}


def test_a_store_that_fails_is_no_documents_fault(package):
    def step(documents: pa.RecordBatch) -> Outcome:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        taken(package(step), "a")
