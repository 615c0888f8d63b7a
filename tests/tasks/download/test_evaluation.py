"""Evaluation sets: what a configuration may name, how they are read and pinned, and what is refused before work starts."""

import hashlib
import itertools
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flat_tokens.steps.decontaminate import Questions
from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig, DocumentStep, evaluation_sets
from tasks.download.evaluation import with_pinned_sets
from tasks.output.leases import Workspace
from tests.processes import serving
from tests.refusal import refusal
from tests.sources import write_rows
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401
from tests.tasks.download.test_fetch import Server

QUESTIONS = ["How many little boats are there in the old harbour of the town?", "What is it?"]


def config(output: Path | str, *against: Any, **options: Any) -> BuildConfig:
    step = {"use": "decontaminate", "against": list(against), **options}
    settings = {"source": {"path": "/nowhere/*.jsonl"}, "tokenizer": "bytes", "documents": {"steps": [step]}}
    return BuildConfig.model_validate({"output": str(output), **settings})


def pinned(tmp_path: Path, *against: Any, **options: Any) -> list[dict[str, Any]]:
    """The sets as keys know them."""
    place = Store.at(tmp_path / "sets")
    workspace = Workspace(Store.at(tmp_path / "out"), staging="", scratch=str(tmp_path / "scratch"))
    made = with_pinned_sets(config(tmp_path / "out", *against, **options), workspace, place)
    (step,) = made.documents.opened().described
    for one in step["options"]["against"]:
        assert hashlib.sha256(place.read(one["digest"])).hexdigest() == one["digest"]
    assert "sets_url" not in step["options"]
    return step["options"]["against"]


def put(path: Path, questions: Sequence[str], column: str = "text") -> Path:
    return write_rows(path, [{"id": f"q{i}", column: question} for i, question in enumerate(questions)])


def test_a_set_is_named_by_a_path_or_by_settings():
    names = [
        ("/data/gsm8k.jsonl", "gsm8k"),
        ("s3://bucket/sets/mmlu-pro.test.parquet", "mmlu-pro"),
        ({"path": "/data/a b*.jsonl", "text_column": "question"}, "a-b"),
        ({"hub": {"path": "openai/gsm8k"}}, "gsm8k"),
        ({"path": "/data/x.jsonl", "name": "own"}, "own"),
    ]
    for given, name in names:
        (found,) = evaluation_sets(DocumentStep.model_validate({"use": "decontaminate", "against": [given]}))
        assert found.name == name


@pytest.mark.parametrize(
    ("against", "message"),
    [
        (["/a/x.jsonl", "/b/x.jsonl"], "two evaluation sets are named 'x'; give each a name of its own"),
        ([{"text_column": "q"}], "neither of 'path', 'hub' and 'table'; give one"),
        ([{"path": "/a", "column": "q"}], "against.0.column: Extra inputs are not permitted"),
        (["https://user:secret@host/x.jsonl"], "against.0.path: the URL of host carries credentials"),
        ([7], "against.0"),
        ([], "a list of evaluation sets"),
    ],
)
def test_wrong_sets_are_refused_with_the_configuration(tmp_path, against, message):
    with refusal(message, ValidationError):
        config(tmp_path, *against)


def test_sets_are_within_the_roots(tmp_path, monkeypatch):
    monkeypatch.setenv(INPUT_ROOTS, f"{tmp_path}/in:/nowhere".replace(":", ","))
    monkeypatch.setenv(OUTPUT_ROOTS, f"{tmp_path}/out")
    for against in (f"{tmp_path}/x.jsonl", "s3://bucket/x.jsonl", {"hub": {"path": "a/b"}}):
        with refusal("may not be read here", ValidationError):
            config(tmp_path / "out", against)
    with refusal("may not be read here", ValidationError):
        config(tmp_path / "out", {"name": "x", "digest": "00"}, sets_url=f"{tmp_path}/sets")
    (tmp_path / "in").mkdir()
    put(tmp_path / "x.jsonl", QUESTIONS)
    (tmp_path / "in/x.jsonl").symlink_to(tmp_path / "x.jsonl")
    with refusal("may not be read here"):
        pinned(tmp_path, str(tmp_path / "in/x.jsonl"))


def test_sets_are_read_as_sources_are(tmp_path, stand_in_hub):
    """In any format, from any place, and from several files. Questions without text are none."""
    local = put(tmp_path / "x.jsonl", QUESTIONS)
    place = Store.at(f"memory://{uuid.uuid4().hex}")
    place.put("x.jsonl", local.read_bytes())
    stand_in_hub.commit("org/name", {"data/test-00000-of-00001.jsonl": local.read_bytes()})
    put(tmp_path / "in/b.jsonl", QUESTIONS[1:])
    write_rows(tmp_path / "in/a.jsonl", [{"text": QUESTIONS[0]}, {"text": None}])
    sets = [{"path": str(tmp_path / "in"), "name": "x"}, str(local), f"{place.url}/x.jsonl"]
    sets.append({"hub": {"path": "org/name", "split": "test"}, "name": "x"})
    for name in ("x.parquet", "x.csv", "x.arrow"):
        sets.append({"path": str(put(tmp_path / name, QUESTIONS, "question")), "text_column": "question"})
    with serving(server := Server()) as url:
        server.body = local.read_bytes()
        (told,) = {json.dumps(pinned(tmp_path, one)) for one in (*sets, f"{url}/x.jsonl")}
    (found,) = json.loads(told)
    assert (found["name"], found["questions"], found["too_short"]) == ("x", 2, 1)
    data, offsets = Questions.of_stored((tmp_path / "sets" / found["digest"]).read_bytes(), found["digest"])
    assert [data[a:b].tobytes().decode() for a, b in itertools.pairwise(offsets)] == QUESTIONS


@pytest.mark.parametrize(
    ("questions", "settings", "message"),
    [
        (QUESTIONS, {"text_column": "question"}, "evaluation set 'x': x.jsonl has no column 'question'; it has 'id', 'text'"),
        (["too short"], {}, "none of its 1 questions has 8 words. Set min_words of the step decontaminate to fewer"),
        ([], {}, "evaluation set 'x': "),
    ],
)
def test_a_set_without_what_is_looked_for_is_refused(tmp_path, questions, settings, message):
    with refusal(message):
        pinned(tmp_path, {"path": str(put(tmp_path / "x.jsonl", questions)), **settings})


def test_a_set_that_is_not_there_or_within_the_output_is_refused(tmp_path):
    with refusal(r"evaluation set 'x': there is nothing at .*x.jsonl"):
        pinned(tmp_path, str(tmp_path / "x.jsonl"))
    with refusal(r"x.jsonl is within the output .*out. Keep them apart"):
        pinned(tmp_path, str(put(tmp_path / "out/x.jsonl", QUESTIONS)))
    assert pinned(tmp_path, str(put(tmp_path / "outside.jsonl", QUESTIONS)))
    with refusal("sets_url is not for configurations"):
        pinned(tmp_path, "x.jsonl", sets_url=str(tmp_path))
