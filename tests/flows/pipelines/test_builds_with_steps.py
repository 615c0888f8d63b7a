"""Steps through the whole pipeline: what they leave out is counted, keys and splits stay, and the rest sees what they leave."""

import importlib.metadata
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flat_tokens
import flat_tokens.steps
from flat_tokens.steps import Outcome
from flows.commands.build import plan_text
from flows.commands.build import summary as told_summary
from flows.pipelines.plan import plan
from flows.watch.summaries import summary
from tasks.config import BuildConfig
from tests.faults.support import build_here, derive_here, same_bytes
from tests.flat_tokens.demo import TOKENIZER
from tests.made import read_docs
from tests.refusal import refusal
from tests.sources import held, write_rows

pytestmark = pytest.mark.usefixtures("small_segments")

TEXTS = ["one e\u0301", "two\r\n", "x", "lorem ipsum is here", "three three", "", "four é"]
STEPS = [{"use": "length", "min_bytes": 2}, {"use": "normalize"}, {"use": "pattern", "drop": "lorem"}]


def write_texts(path: Path, texts: list[str]) -> Path:
    return write_rows(path, [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)], group=20)


def settings(output: Path, source: Path, steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    documents = {**more.pop("documents", {}), "steps": steps}
    told = {"source": {"path": str(source), "id_column": "id"}, "tokenizer": "bytes", "documents": documents}
    return {"output": str(output), **told, "validation_fraction": 0.3, **more}


def test_documents_take_the_steps_in_their_order_and_all_reports_tell_of_it(tmp_path, tool):
    told = settings(tmp_path / "out", write_texts(tmp_path / "in/x.jsonl", TEXTS), STEPS)
    result = build_here(told)
    texts = sorted(doc.text for docs in read_docs(tmp_path / "out").values() for doc in docs)
    assert texts == sorted(["one é", "two\n", "three three", "four é"])
    documents = result.totals["documents"]
    assert (documents["read"], documents["written"], documents["text_bytes"]) == (7, 4, len("".join(texts).encode()))
    assert documents["skipped"] == documents["by_source"][0]["skipped"] == {"length.min_bytes": 2, "pattern.drop": 1}
    assert documents["replaced"] == {"normalize.changed": 2}
    assert any("1 skipped: pattern.drop, 2 repaired: normalize.changed" in said for said in told_summary(result))
    page = summary(BuildConfig.model_validate(told), result, "dataset").replace("\\", "")
    assert "- step `length`: 2 left out (2 min_bytes), 0 changed" in page.splitlines()
    card = (Path(result.path) / "README.md").read_text().replace("\\", "")
    assert "Steps: length (version 1, min_bytes 2); normalize (version 1); pattern (version 1, drop lorem)." in card
    assert re.search(r"^\s*steps +length, normalize, pattern$", tool.out("inspect", tmp_path / "out"), re.MULTILINE)


def test_a_text_that_a_step_leaves_empty_is_treated_as_one(tmp_path):
    _install(blanks=lambda documents: Outcome(text=pa.array([""] * len(documents), pa.large_string())))
    source = write_texts(tmp_path / "in/x.jsonl", ["a", "b"])
    found = build_here(settings(tmp_path / "out", source, [{"use": "blanks"}], documents={"empty": "skip"})).totals["documents"]
    assert (found["written"], found["skipped"]) == (0, {"empty": 2})


def _twice(documents: pa.RecordBatch) -> Outcome:
    return Outcome(text=pa.array([2 * text for text in documents.column("text").to_pylist()]))


def _fails(documents: pa.RecordBatch) -> Outcome:
    if "bad" in documents.column("text").to_pylist():
        raise ZeroDivisionError("of nothing")
    return Outcome()


@pytest.mark.parametrize(
    ("step", "texts", "complaint", "skipped"),
    [
        (_twice, ["a", "bbb"], r"line 2 \(row 1\): .* after its steps \[too_long\]", "too_long"),
        (_fails, ["a", "b", "bad"], r"line 3 \(row 2\): step 'here' fails on it: ZeroDivisionError: of", "here.failed"),
    ],
)
def test_a_text_that_a_step_makes_too_long_or_fails_on_is_a_bad_document(tmp_path, step, texts, complaint, skipped):
    _install(here=step)
    source = write_texts(tmp_path / "in/x.jsonl", texts)
    told = settings(tmp_path / "out", source, [{"use": "here"}], documents={"max_bytes": 4})
    with refusal(rf"x.jsonl, {complaint}"):
        build_here(told)
    found = build_here({**told, "documents": {**told["documents"], "on_bad": "skip"}}).totals["documents"]
    assert (found["written"], found["skipped"]) == (len(texts) - 1, {skipped: 1})


def test_the_roots_for_input_hold_for_files_of_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAT_TOKENS_INPUT_ROOTS", str(tmp_path / "in"))
    told = settings(tmp_path / "out", tmp_path / "in", [{"use": "datatrove", "filter": "x", "model_url": "/etc/passwd"}])
    with refusal("INPUT_ROOTS"):
        BuildConfig.model_validate(told)


# Forecasts


def test_plan_tells_what_each_step_leaves_out(tmp_path):
    texts = [f"{i} word" for i in range(100)] + ["lorem ipsum"] * 25 + ["x"] * 75
    config = BuildConfig.model_validate(settings(tmp_path / "out", write_texts(tmp_path / "in/x.jsonl", texts), STEPS))
    made = plan(config)
    assert made.sampled_documents == 200
    assert [(loss.step, loss.documents, loss.share) for loss in made.losses] == [
        ("length", 75, 0.375),
        ("normalize", 0, 0.0),
        ("pattern", 25, 0.125),
    ]
    said = "of 200 documents that were read, length leaves out 75, 37.50% (75 min_bytes); normalize leaves out 0, 0.00%"
    assert said in "\n".join(plan_text(made))
    result = build_here(config)
    assert result.totals["documents"]["written"] == made.documents == 100
    assert sum(result.totals[split]["token_count"] for split in ("train", "validation")) == made.tokens


# Checks


def _without_three(_: object, documents: pa.RecordBatch) -> Outcome:
    return Outcome(np.array(["three" not in text for text in documents.column("text").to_pylist()]), "drop")


def test_verify_takes_documents_through_the_steps_again_and_finds_those_that_do_not_come_through(tmp_path, tool, monkeypatch):
    """In a dataset made of datasets each source keeps its own steps."""
    for name, steps in (("a", STEPS), ("b", [{"use": "length", "min_bytes": 1}])):
        build_here(settings(tmp_path / name, write_texts(tmp_path / f"in/{name}.jsonl", TEXTS), steps))
    derive_here("merge", tmp_path / "a", tmp_path / "b", output=tmp_path / "both")
    verified = partial(tool.json, "verify", tmp_path / "both", "--source", tmp_path / "in", "--sample", "1/1")
    assert verified()["documents"] == {"same": 10, "different": 0, "not_reachable": {}}
    monkeypatch.setattr(flat_tokens.steps.shipped.Pattern, "__call__", _without_three)
    said = verified(status=1)
    assert said["documents"]["different"] == 1
    assert "a.jsonl, row 4, does not come through its steps (pattern.drop)" in said["faults"][0]


@pytest.mark.slow
def test_verify_runs_what_is_installed_only_if_the_record_is_trusted(tmp_path, tool):
    """A dataset may be a stranger's, and so are the options."""
    calls = []

    def upper(documents: pa.RecordBatch) -> Outcome:
        calls.append(len(documents))
        return Outcome(text=pa.array([text.upper() for text in documents.column("text").to_pylist()]))

    _install(upper=upper)
    source = write_texts(tmp_path / "in/x.jsonl", ["a", "b"])
    verified = partial(tool.json, "verify", tmp_path / "out", "--source", source, "--sample", "1/1")
    build_here(settings(tmp_path / "out", source, [{"use": "upper"}]))
    calls.clear()
    said = verified()
    assert calls == []
    (reason,) = said["documents"]["not_reachable"]
    assert "the step 'upper' in the manifest runs what is installed here" in reason
    said = verified("--trust-records")
    assert said["documents"] == {"same": 2, "different": 0, "not_reachable": {}}
    _install("2", upper=upper)
    said = verified("--trust-records")
    (reason,) = said["documents"]["not_reachable"]
    assert reason == "its steps cannot be taken again: step 'upper' is of version house 2 here, and was of version house 1"


# Loss masks


def _answers(documents: pa.RecordBatch) -> Outcome:
    """What stands behind a colon counts; of a text without one, all does."""
    texts = documents.column("text").to_pylist()
    spans = [None if ":" not in text else [[text.find(":") + 1, len(text)]] for text in texts]
    return Outcome(pa.array(["!" not in text for text in texts]), "loud", spans=pa.array(spans, LIST))


_answers.gives_spans = True  # type: ignore[attr-defined]
LIST = pa.list_(pa.list_(pa.int64()))
ANSWERS = ["é? : ja", "all of it", "none:", "loud!", "a:b\0\2c"]


def test_spans_of_a_step_become_a_loss_mask(tmp_path):
    _install(answers=_answers)
    source = write_texts(tmp_path / "in/x.jsonl", ANSWERS)
    steps = [{"use": "answers"}]
    first = build_here(settings(tmp_path / "out", source, steps, validation_fraction=0))
    docs = held(tmp_path / "out")["train"]
    found = [(one.text, bytes(i - 1 for i, counts in zip(one.ids, one.mask, strict=True) if counts).decode()) for one in docs]
    assert found == [("é? : ja", " ja"), ("all of it", "all of it"), ("none:", ""), ("a:b\0\2c", "b\0\2c")]
    again = build_here(settings(tmp_path / "anew", source, steps, validation_fraction=0, slice_bytes=20))
    assert same_bytes(again, first)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["gpt2", TOKENIZER])
def test_tokens_are_the_same_with_spans_and_without(tmp_path, tokenizer):
    _install(answers=_answers)
    texts = [*ANSWERS, "<|endoftext|> is text: it is", "e\u0301 中文: 😀😀", "", ": "]
    source = write_texts(tmp_path / "in/x.jsonl", texts)
    for output, steps in (("out", [{"use": "answers"}]), ("plain", [{"use": "pattern", "drop": "!"}])):
        build_here(settings(tmp_path / output, source, steps, tokenizer=tokenizer))
    assert read_docs(tmp_path / "out") == read_docs(tmp_path / "plain")


def test_a_source_with_a_mask_of_its_own_takes_no_spans(tmp_path):
    _install(answers=_answers)
    told = settings(tmp_path / "out", tmp_path / "x.jsonl", [{"use": "answers"}])
    told["source"] = {"path": str(tmp_path / "x.jsonl"), "messages_column": "messages"}
    with refusal("so do the columns of the source"):
        BuildConfig.model_validate(told)


@pytest.mark.slow
def test_steps_leave_prompts_and_completions_out_but_do_not_change_them(tmp_path):
    path = write_rows(tmp_path / "in/x.jsonl", [{"q": q, "a": a} for q, a in [("a?", "b"), ("c?", "lorem")]])
    columns = {"path": str(path), "prompt_column": "q", "completion_column": "a"}
    told = settings(tmp_path / "out", path, STEPS[2:])
    assert build_here({**told, "source": columns}).totals["documents"]["skipped"] == {"pattern.drop": 1}
    with refusal("step 'normalize' gives other texts, but a text of the source is several in one"):
        build_here({**told, "source": columns, "documents": {"steps": STEPS[1:]}})


# Steps of packages, and datatrove


PACKAGES: dict[str, Any] = {}


def _install(version: str = "1", **steps: Any) -> None:
    """Let steps be found as those of an installed package are. Options are passed over."""
    dist = type("Package", (), {"name": "house", "version": version})
    PACKAGES.clear()
    for name, step in steps.items():
        facts = {"name": name, "value": f"house:{name}", "dist": dist, "load": staticmethod(lambda step=step: lambda **_: step)}
        PACKAGES[name] = type("Entry", (), facts)
    flat_tokens.steps._opened.cache_clear()


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    PACKAGES.clear()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(PACKAGES.values()))
