"""Refresh and retokenize as Prefect flows against a real server: what people see, and how deployments load them."""

from pathlib import Path

import pytest
from prefect.exceptions import ParameterTypeError

import flat_tokens
from flows.build import build_dataset
from flows.decide import approve_version, reject_version
from flows.forget import forget_documents
from flows.refresh import refresh_dataset
from flows.retokenize import retokenize_dataset
from flows.train_tokenizer import train_tokenizer
from tasks.config import BuildConfig
from tasks.derive.request import ForgetRequest
from tasks.vocabularies.request import VocabularyRequest
from tests.faults.support import settings_of, write_notes
from tests.flows.asked import artifacts, on_prefect_server


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    write_notes(tmp_path / "in/a.jsonl", 5)
    source = {"name": "notes", "path": str(tmp_path / "in"), "id_column": "id"}
    return BuildConfig.model_validate(
        {"output": str(tmp_path / "out"), "name": "My.Notes", "source": source, "tokenizer": "bytes"}
    )


@on_prefect_server
def test_a_refresh_leaves_a_summary_of_what_came_went_and_changed(config, tmp_path):
    first = refresh_dataset(config)
    write_notes(tmp_path / "in/b.jsonl", 3)
    second = refresh_dataset(config, keep_versions=1, grace_days=0)
    third = refresh_dataset(config)
    assert [result.outcome for result in (first, second, third)] == ["published", "published", "unchanged"]
    assert second.removed == (first.version,)
    seen = artifacts("my-notes-refresh")
    assert [description for description, _ in seen] == [result.headline for result in (first, second, third)]
    summary = seen[1][1]
    assert f"Version `{second.version}`" in summary
    assert "- added: notes, `b.jsonl`, " in summary
    assert f"Removed: `{first.version}`." in summary
    assert "- all documents: 3 added, 0 removed, 0 changed, 0 moved to another source" in summary
    histories = artifacts("my-notes-refreshes")
    assert [description for description, _ in histories] == ["refreshes: 1", "refreshes: 2", "refreshes: 2"]
    assert f"`{second.version}`: 8 documents (3 added, 0 removed, 0 changed, 0 moved), " in histories[2][1]


@on_prefect_server
def test_a_version_that_waits_has_a_page_and_is_decided_of_by_a_flow(config, tmp_path):
    first = refresh_dataset(config)
    write_notes(tmp_path / "in/a.jsonl", 1)
    states = [refresh_dataset(config, return_state=True) for _ in range(2)]
    assert [(state.name, state.is_completed()) for state in states] == [
        ("AwaitingApproval", True),
        ("AwaitingApproval", True),
    ]
    ((description, page),) = artifacts("my-notes-held")
    assert "documents of source notes: 1, -80.0 % from 5" in description
    assert "| notes | 5 | 1 | -80.0 % |" in page
    assert "waits for a person**" in artifacts("dataset-my-notes")[-1][1]
    assert reject_version(config.output, "it lost its files").decision.by.startswith("who started run")
    write_notes(tmp_path / "in/a.jsonl", 2)
    assert refresh_dataset(config, return_state=True).name == "AwaitingApproval"
    decided = approve_version(config.output, "two are enough", by="eve")
    assert decided.pointer.version == flat_tokens.open(config.output).path.rpartition("/")[2] != first.version
    assert "waits for a person**" not in artifacts("dataset-my-notes")[-1][1]
    refresh_dataset(config)
    assert "approved by eve: two are enough" in artifacts("my-notes-refreshes")[-1][1]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "vocabularies")
def test_the_flow_of_a_rerun_gives_what_the_flow_of_a_build_gives(config, tmp_path):
    refresh_dataset(config)
    results = retokenize_dataset(
        str(tmp_path / "out"), ["bytes", {"name": "gpt2", "engine": "reference"}], f"{tmp_path}/{{tokenizer}}"
    )
    assert [result.path.split("/versions/")[0] for result in results] == [f"{tmp_path}/bytes", f"{tmp_path}/gpt2"]
    assert flat_tokens.verify(tmp_path / "gpt2", "full").seq_count == 5


@pytest.mark.parametrize("policy", [{"keep_versions": 0}, {"grace_days": -1}])
def test_a_policy_that_keeps_nothing_is_refused(config, policy):
    with pytest.raises(ParameterTypeError):
        refresh_dataset.validate_parameters({"config": config, **policy})


@on_prefect_server
def test_a_forgetting_is_a_flow(tmp_path):
    """It ends well, and its caller gets what was forgotten."""
    build_dataset(BuildConfig.model_validate(settings_of(tmp_path / "out", write_notes(tmp_path / "in/notes.jsonl", 6))))
    forgotten = forget_documents(ForgetRequest(output=str(tmp_path / "out"), reason="they asked", where="row = 2"))
    assert (forgotten.key_count, forgotten.documents, len(forgotten.versions), forgotten.left) == (1, 1, 1, ())


@on_prefect_server
def test_a_training_is_a_flow_with_a_summary(tmp_path):
    """Of a configuration, and of what it builds."""
    config = BuildConfig.model_validate(settings_of(tmp_path / "out", write_notes(tmp_path / "notes.jsonl", 30), name="notes"))
    request, to = VocabularyRequest(vocab_sizes=(262, 264)), str(tmp_path / "to/{name}-{size}")
    trained = train_tokenizer(config, request, to)
    assert [one.path for one in trained.vocabularies] == [str(tmp_path / f"to/notes-{size}") for size in (262, 264)]
    built = build_dataset(config)
    decoded = train_tokenizer(built.path, request, str(tmp_path / "decoded-{size}"))
    assert [one.sha256 for one in decoded.vocabularies] == [one.sha256 for one in trained.vocabularies]
