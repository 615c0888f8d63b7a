"""Who may only start runs reads and writes where the operator of the workers allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.derive import merge_datasets, subset_dataset
from flows.export import export_dataset
from flows.groups import tokenize_group
from flows.retokenize import retokenize_dataset
from flows.verify import verify_dataset
from tasks.config import BuildConfig
from tasks.derive.request import ImportRequest
from tasks.locations import INPUT_ROOTS, OUTPUT_ROOTS, Location, Output

READ, WRITE = TypeAdapter(Location).validate_python, TypeAdapter(Output).validate_python


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Text may be read in one directory and one bucket, datasets may be written in others, and read there."""
    for name in ("text", "tokens", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(INPUT_ROOTS, f"{tmp_path}/text, gs://texts/raw ,hf://datasets/HuggingFaceFW")
    monkeypatch.setenv(OUTPUT_ROOTS, f"{tmp_path}/tokens,s3://tokens")
    return tmp_path


def config(roots: Path, **settings: Any) -> BuildConfig:
    given = {"output": f"{roots}/tokens/out", "sources": [{"path": f"{roots}/text"}], "tokenizer": "bytes", **settings}
    return BuildConfig.model_validate(given)


@pytest.mark.parametrize("path", ["text", "text/a/*.jsonl", "tokens/versions/x"])
def test_what_lies_within_the_roots_is_let_through(roots: Path, path: str) -> None:
    config(roots)
    assert READ(f"{roots}/{path}") == f"{roots}/{path}"
    assert READ(f"file://{roots}/{path}") == f"file://{roots}/{path}"
    for url in (
        "gs://texts/raw",
        "gs://texts/raw/a.parquet",
        "gcs://texts/raw/a",
        "s3://tokens/a",
        "hf://datasets/HuggingFaceFW/x",
    ):
        assert READ(url) == url
    assert WRITE("s3a://tokens/out") == "s3a://tokens/out"


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "{roots}/elsewhere",
        "{roots}/text-of-others",  # begins like a root, but is not in it
        "{roots}",
        "gs://texts",
        "gs://texts/rawer/a",
        "gs://others/raw",
        "s3://texts/raw",  # another store
        "https://texts/raw",
        "memory://texts/raw",
        "hf://datasets/allenai/c4",
    ],
)
def test_what_lies_outside_is_refused_with_the_roots_there_are(roots: Path, location: str) -> None:
    with pytest.raises(ValidationError, match=r"may not be read here: FLAT_TOKENS_INPUT_ROOTS allows .*gs://texts/raw"):
        READ(location.format(roots=roots))


def test_what_may_be_read_may_not_be_written_for_that(roots: Path) -> None:
    with pytest.raises(ValidationError, match=r"may not be written here: FLAT_TOKENS_OUTPUT_ROOTS allows .*s3://tokens"):
        WRITE(f"{roots}/text/out")


def test_a_link_leads_nowhere_else(roots: Path) -> None:
    (roots / "text/link").symlink_to(roots / "elsewhere")
    with pytest.raises(ValidationError, match="may not be read here"):
        READ(f"{roots}/text/link/a.jsonl")


@pytest.mark.parametrize(
    "settings",
    [
        {"output": "/etc/out"},
        {"scratch": "/etc/scratch"},
        {"sources": [{"path": "/etc/passwd"}]},
        {"sources": [{"hub": {"path": "allenai/c4", "name": "en"}}]},
        {"tokenizer": {"name": "/etc/tokenizer.json"}},
        {"tokenizer": {"name": "../tokenizer.tiktoken"}},
    ],
    ids=str,
)
def test_every_place_of_a_configuration_is_looked_at(roots: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"may not be (read|written) here"):
        config(roots, **settings)


def test_every_deployment_is_bound(roots: Path) -> None:
    """Prefect checks a run's parameters by these before the flow begins."""
    inside, outside = f"{roots}/tokens/a", "/srv/a"
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (verify_dataset, {"dataset": outside}),
        (export_dataset, {"dataset": outside, "output": inside, "format": "megatron"}),
        (export_dataset, {"dataset": inside, "output": outside, "format": "megatron"}),
        (retokenize_dataset, {"dataset": outside, "tokenizers": ["gpt2"]}),
        (merge_datasets, {"datasets": [inside, outside], "output": inside}),
        (merge_datasets, {"datasets": [inside], "output": inside, "scratch": outside}),
        (subset_dataset, {"dataset": inside, "output": inside, "filters": {"id_list": outside}}),
        (tokenize_group, {"output": outside, "group": "0"}),
    ]
    for flow, parameters in wrong:
        with pytest.raises(Exception, match=r"may not be (read|written) here"):
            flow.validate_parameters(parameters)
    with pytest.raises(ValidationError, match="may not be read here"):
        ImportRequest.model_validate({"path": outside, "output": inside})


def test_without_roots_there_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (INPUT_ROOTS, OUTPUT_ROOTS):
        monkeypatch.delenv(variable, raising=False)
    assert READ("/etc/passwd") == WRITE("/etc/passwd") == "/etc/passwd"
    monkeypatch.setenv(INPUT_ROOTS, "/data")
    assert WRITE("/srv/out") == "/srv/out"  # each of them bounds its own
