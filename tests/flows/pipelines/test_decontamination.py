"""Builds whose documents are compared with evaluation sets: the same bytes whoever works, counts and examples in every report."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
import flat_tokens.steps
from flat_tokens.stores.store import Store
from flows.commands.build import plan_text
from flows.commands.build import summary as summary_lines
from flows.pipelines.plan import plan
from flows.watch.summaries import summary
from tasks.config import BuildConfig
from tasks.garbage import Policy, collect
from tests.examples import first_fast
from tests.faults.support import build_here, refresh_here, retokenize_here, same_bytes
from tests.flows.through_json import built
from tests.refusal import refusal
from tests.sources import held, write_rows

pytestmark = pytest.mark.usefixtures("small_segments")

EXAM = [
    "How many little boats are there in the old harbour of the small grey town by the sea?",
    "Who has taken the salt from the upper shelf?",
    "What is it?",
]
LAW = ["Every person has the right to read a book by the light of the lamp in the reading room of the house."]


def documents(count: int) -> list[str]:
    """Every 7th has a question of the exam, every 11th of the law; others have some words of one, or none."""
    texts = []
    for i in range(count):
        text = f"Notes {i}: " + "salt wind and rain over the hills, " * (i % 9)
        text += f" {EXAM[0].upper()} " if i % 7 == 3 else f" -- {EXAM[1]}" if i % 14 == 4 else f" {EXAM[2]}" if i % 5 == 1 else ""
        text += f"({LAW[0].replace(' ', chr(10))})" if i % 11 == 2 else f" {LAW[0][:40]}" if i % 3 == 1 else ""
        texts.append(text + " The end.")
    return texts


FOUND = [["exam"] * (i % 7 == 3 or i % 14 == 4) + ["law"] * (i % 11 == 2) for i in range(60)]
"""The sets of which each document has some. Questions of less than 8 words are not looked for."""


def put(path: Path, texts: Sequence[str]) -> Path:
    return write_rows(path, [{"id": f"{path.stem}{i}", "text": text} for i, text in enumerate(texts)])


def settings(tmp_path: Path, output: str = "out", action: str = "drop", **more: Any) -> dict[str, Any]:
    """A build of what is in ``in``, compared with ``exam`` and ``law``."""
    for name, questions in (("exam", EXAM), ("law", LAW)):
        put(tmp_path / f"{name}.jsonl", questions)
    against = [str(tmp_path / "exam.jsonl"), {"path": str(tmp_path / "law.jsonl"), "text_column": "text"}]
    step = {"use": "decontaminate", "against": against, "action": action}
    source = {"path": str(tmp_path / "in"), "id_column": "id"}
    common = {"tokenizer": "bytes", "validation_fraction": 0.3, "slice_bytes": 600, "verify_level": "full"}
    return {"output": str(tmp_path / output), "source": source, "documents": {"steps": [step]}, **common, **more}


@pytest.mark.parametrize("action", first_fast(["drop", "mark", "span"]))
def test_builds_have_what_a_naive_program_leaves_with_threads_and_through_groups(tmp_path, action):
    texts = documents(60)
    for number in range(3):
        put(tmp_path / f"in/part-{number}.jsonl", texts[number * 20 : number * 20 + 20])
    # Ranges of a file with threads, and runs of files through groups.
    results = [built(settings(tmp_path, f"out{n}", action, slice_bytes=size), n) for n, size in ((4, 1500), (None, 10**6))]
    assert same_bytes(*results)
    totals = results[0].totals["documents"]
    assert totals["matches"] == {f"decontaminate.{name}": sum(name in of for of in FOUND) for name in ("exam", "law")}
    assert totals["by_source"][0]["matches"] == totals["matches"]
    (exam, law) = (totals["examples"][f"decontaminate.{name}"] for name in ("exam", "law"))
    assert exam == [{"file": "part-0.jsonl", "row": row, "question": question} for row, question in ((3, 0), (4, 1), (10, 0))]
    assert len(law) == 3
    docs = [one for docs in held(results[0].path).values() for one in docs]
    written = sorted(one.text for one in docs)
    if action == "drop":
        assert written == sorted(text for text, of in zip(texts, FOUND, strict=True) if not of)
        assert totals["skipped"] == {
            "decontaminate.exam": sum(of[:1] == ["exam"] for of in FOUND),
            "decontaminate.law": sum(of[:1] == ["law"] for of in FOUND),
        }
    if action == "mark":
        assert written == sorted(texts)
        marks = {one.text: one.columns["contaminated"] for one in docs}
        assert marks == {text: ",".join(of) or None for text, of in zip(texts, FOUND, strict=True)}
    if action == "span":
        assert not any(question in one for one in written for question in (EXAM[0].upper(), EXAM[1], LAW[0].replace(" ", "\n")))


def test_a_changed_set_is_another_version_and_an_equal_one_in_another_file_is_not(tmp_path):
    put(tmp_path / "in/a.jsonl", documents(30))
    config = BuildConfig.model_validate(settings(tmp_path))
    first = refresh_here(config)
    assert refresh_here(config).outcome == "unchanged"
    write_rows(tmp_path / "exam.jsonl", [{"other": 1, "text": question} for question in EXAM])
    assert refresh_here(config).outcome == "unchanged"
    put(tmp_path / "exam.jsonl", [*EXAM, "Notes 6: salt wind and rain over the hills, salt wind and rain"])
    with refusal("the step 'decontaminate' are no longer those of version"):
        retokenize_here(str(tmp_path / "out"), "bytes", output=str(tmp_path / "again"))
    second = refresh_here(config)
    assert second.outcome == "published"
    assert second.build.totals["documents"]["written"] < first.build.totals["documents"]["written"]
    (again,) = retokenize_here(str(tmp_path / "out"), "bytes", output=str(tmp_path / "again"))
    assert again.version == second.version


def test_reports_name_the_sets_and_gates_look_at_the_share(tmp_path, tool):
    put(tmp_path / "in/a.jsonl", documents(60))
    put(tmp_path / "none.jsonl", ["None of the documents has so much as one of these eight words"])
    asked = settings(tmp_path, action="mark")
    asked["documents"]["steps"][0]["against"].append(str(tmp_path / "none.jsonl"))
    result = build_here(asked)
    of_exam, matched = sum("exam" in of for of in FOUND), sum(map(bool, FOUND))
    sentence = f"exam: in {of_exam} documents, {of_exam / 60:.2%}"
    assert f"  evaluation {sentence}" in summary_lines(result)
    page = summary(BuildConfig.model_validate(asked), result, "dataset").replace("\\", "")
    assert f"- evaluation set {sentence}" in page
    assert "  - a.jsonl, row 3: question 0" in page
    assert "- evaluation set none: in 0 documents, 0.00%" in page
    assert "against exam " in Path(result.path, "README.md").read_text()
    html = tmp_path / "report.html"
    tool.out("stats", result.path, "--html", html)
    assert f"evaluation  {sentence}, of 3 questions (1 too short)" in tool.out("inspect", result.path)
    assert "Evaluation sets" in html.read_text()
    tool.out("verify", "--sample", "1/2", "--trust-records", result.path)
    made = plan(BuildConfig.model_validate(settings(tmp_path, "planned")))
    assert re.search(rf"decontaminate leaves out {matched}, .* and finds exam in {of_exam}, law in", "\n".join(plan_text(made)))
    gates = [{"of": "skipped_share", "step": "decontaminate", "at_most": 0.01}]
    with refusal("decontaminate"):
        build_here(settings(tmp_path, "gated", publish={"gates": gates}))


def test_stored_sets_are_removed_as_garbage(tmp_path):
    put(tmp_path / "in/a.jsonl", documents(20))
    build_here(settings(tmp_path))
    assert len(list((tmp_path / "out/_cache/sets").iterdir())) == 2
    collect(Store.at(tmp_path / "out"), Policy(grace_days=0), delete=True)
    assert not (tmp_path / "out/_cache/sets").exists()
    flat_tokens.verify(tmp_path / "out", "full")
