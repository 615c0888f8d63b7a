"""The step ``decontaminate``: which documents have some of a question, and what is done with them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.steps import decontaminate, open_steps
from flat_tokens.steps.decontaminate import Decontaminate, QuestionIndex, Questions
from flat_tokens.text.rows import text_buffers
from tests.examples import examples
from tests.flat_tokens.steps.taking import taken
from tests.refusal import refusal

Q = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
NEAR = Q.replace("seven", "7")


def as_set(texts: Sequence[str]) -> Questions:
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    return Questions(data, offsets.astype(np.int64))


def step(directory: Path, sets: dict[str, list[str]], **options: Any) -> dict[str, Any]:
    """The step as a build asks for it, its sets stored."""
    against = []
    for name, texts in sets.items():
        stored = as_set(texts).stored()
        digest = hashlib.sha256(stored).hexdigest()
        (directory / digest).write_bytes(stored)
        against.append({"name": name, "digest": digest})
    return {"use": "decontaminate", "options": {"against": against, "sets_url": str(directory), **options}}


@pytest.mark.parametrize(
    ("words", "options", "text", "is_found"),
    [
        (14, {}, Q, True),
        (14, {}, ", ".join(Q.split()[1:]), True),  # 13 of its words
        (14, {}, ", ".join(Q.split()[2:]), False),  # 12
        (14, {}, NEAR, False),
        (12, {}, Q, True),
        (8, {}, Q, True),
        (8, {}, " ".join(Q.split()[:7]), False),
        (7, {}, Q, False),
        (7, {"min_words": 2}, Q, True),
    ],
)
def test_thirteen_consecutive_words_are_a_match_or_all_of_a_question_from_8_on(tmp_path, words, options, text, is_found):
    question = " ".join(Q.split()[:words])
    found = taken([step(tmp_path, {"exam": ["another", question]}, **options)], "x", text, "y")
    assert found.keep.tolist() == [True, not is_found, True]
    assert dict(found.skipped) == ({"decontaminate.exam": 1} if is_found else {})


def test_each_set_counts_a_document_once_and_the_first_is_the_reason(tmp_path):
    found = taken([step(tmp_path, {"a": ["nothing of it", Q], "b": [Q, f"{Q} {Q}"]})], f"{Q} {Q}", "x", f"{NEAR} {Q}")
    assert [(match.document, match.name) for match in found.matches] == [
        (0, "decontaminate.a"),
        (0, "decontaminate.b"),
        (2, "decontaminate.a"),
        (2, "decontaminate.b"),
    ]
    assert found.matches[0].example == {"question": 1}
    assert dict(found.skipped) == {"decontaminate.a": 2}


def test_each_of_many_sets_is_a_reason(tmp_path):
    """More than a step of somebody else may have."""
    questions = [f"{Q} {i}" for i in range(100)]
    found = taken([step(tmp_path, {f"set-{i}": [text] for i, text in enumerate(questions)}, ngram=15)], *questions)
    assert dict(found.skipped) == {f"decontaminate.set-{i}": 1 for i in range(100)}


def test_equal_hashes_of_other_words_are_not_a_match(tmp_path, monkeypatch):
    monkeypatch.setattr(decontaminate, "run_hashes", lambda hashes, count: np.zeros(max(len(hashes) - count + 1, 0), np.uint64))
    found = taken([step(tmp_path, {"exam": [Q, "a b c d e f g h", Q]})], NEAR, f"x {Q}", "a b c d e f g i", "z")
    assert found.keep.tolist() == [True, False, True, True]


def test_mark_writes_the_names_of_the_sets(tmp_path):
    asked = step(tmp_path, {"a": [Q], "b": [NEAR], "c": ["some other words than these are in it"]}, action="mark", column="in")
    found = taken([asked], f"{NEAR} {Q}", "x", Q)
    assert found.keep.all()
    assert found.columns.column("in").to_pylist() == ["a,b", None, "a"]
    assert taken([asked], "x").kinds == {"in": "text"}


@pytest.mark.parametrize(
    ("context", "text", "left"),
    [
        (0, f"Before it. {Q}! After it.", "Before it. \n! After it."),
        (3, f"Before it. {Q}! After it.", "Before i\nfter it."),
        (3, f"{Q}, é", ""),
        (0, f"é「{Q.upper()}」日本", "é「\n」日本"),
        (2, f"{Q} ab {Q} and the rest", "nd the rest"),
        (99, Q, ""),
        (9, f"{Q} a longer text between them {Q}", " text betw"),
    ],
)
def test_span_cuts_the_words_and_their_context_out(tmp_path, context, text, left):
    found = taken([step(tmp_path, {"exam": [Q]}, action="span", context=context)], "x", text)
    assert found.texts.to_pylist() == (["x", left] if left else ["x"])
    assert dict(found.skipped) == ({} if left else {"decontaminate.exam": 1})
    assert len(found.matches) == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"against": []}, "a list of evaluation sets"),
    ({"against": "a.jsonl"}, "a list of evaluation sets"),
    ({"ngram": 0}, "ngram should be a whole number, 1 or more"),
    ({"ngram": True}, "ngram should be a whole number"),
    ({"context": -1}, "context should be a whole number, 0 or more"),
    ({"action": "flag"}, "drop, mark, span"),
    ({"ngrams": 13}, "Did you mean 'ngram'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_refused(options, message):
    with refusal(message):
        open_steps([{"use": "decontaminate", "options": {"against": ["a.jsonl"], **options}}])


def test_sets_that_are_not_here_or_damaged_are_no_documents_fault(tmp_path):
    asked = step(tmp_path, {"exam": [f"{Q} damaged"]})
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() + b"x")
    with refusal(r"is not the evaluation set 'exam'\. Run the build again", OSError):
        taken([asked], "x")
    with refusal("only a build reads them", OSError):
        Decontaminate(against=["a.jsonl"])(pa.record_batch({"text": pa.array(["x"], pa.large_string())}))


def runs(words: list[str], count: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + count]) for i in range(len(words) - count + 1)}


def grams(texts: Sequence[str], sets: Sequence[Sequence[str]], size: int, least: int) -> set[tuple[int, int]]:
    """Which text has some of which set, by tuples of words."""
    return {
        (text, number)
        for number, of_set in enumerate(sets)
        for question in map(str.split, of_set)
        for text, words in enumerate(map(str.split, texts))
        if len(question) >= min(least, size) and runs(question, n := min(size, len(question))) & runs(words, n)
    }


SOME = st.lists(st.sampled_from(["a", "b", "cc", "日", "x" * 9]), max_size=12).map(" ".join)


@given(st.lists(SOME, max_size=6), st.lists(st.lists(SOME, max_size=4), min_size=1, max_size=3), *[st.integers(1, 5)] * 2)
@examples(60)
def test_it_finds_what_tuples_of_words_find(texts, sets, size, least):
    """In windows of any length, too."""
    index = QuestionIndex([as_set(one) for one in sets], size, least)
    for window in (decontaminate.WINDOW_BYTES, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decontaminate, "WINDOW_BYTES", window)
            found = index.find(*text_buffers(pa.array(texts, pa.large_string())))
        assert {*zip(found.text.tolist(), found.set.tolist(), strict=True)} == grams(texts, sets, size, least)
        for text, start, stop, word, length in zip(found.text, found.start, found.stop, found.word, found.length, strict=True):
            assert texts[text].encode()[start:stop].decode() == index.words.text(int(word), int(word + length))
