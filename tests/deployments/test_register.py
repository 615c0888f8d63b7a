"""What is registered: flows that load, forms that explain themselves, schedules, configurations of real datasets."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema

from deployments.register import dataset_deployment, load_flow, read_deployments, wanted
from flows.cli import read_config
from tasks.models import BuildConfig

CHECKOUT = Path(__file__).parents[2]
DATASETS = sorted((CHECKOUT / "deployments/datasets").glob("*.yaml"))
DEPLOYMENTS = {deployment["name"]: deployment for deployment in read_deployments()}

LOAD = """
import json, sys
from prefect.flows import load_flow_from_entrypoint
print(json.dumps([load_flow_from_entrypoint(one, use_placeholder_flow=False).name for one in sys.argv[1:]]))
"""


def options(*datasets: Path, **given: Any) -> argparse.Namespace:
    settings: dict[str, Any] = {"cron": None, "every": None, "timezone": "UTC", "keep": None, "credentials": None, **given}
    return argparse.Namespace(datasets=list(datasets), **settings)


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = parameter_schema(load_flow(DEPLOYMENTS[name])).model_dump()
    return schema


def test_the_deployments_that_there_are() -> None:
    assert set(DEPLOYMENTS) == {
        "build",
        "refresh",
        "retokenize",
        "export",
        "verify",
        "fetch-group",
        "tokenize-group",
        "write-group",
    }
    for deployment in DEPLOYMENTS.values():
        assert deployment["enforce_parameter_schema"]
        assert len(deployment["description"]) > 60
        assert "flat-tokens" in deployment["tags"]
    (schedule,) = DEPLOYMENTS["refresh"]["schedules"]
    assert schedule["timezone"] == "Europe/Paris"
    assert DEPLOYMENTS["refresh"]["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_no_file_beside_a_flow_has_the_name_of_a_package() -> None:
    """Prefect puts a flow's own directory first on the path: ``flows/datasets.py`` would be what ``import datasets`` finds."""
    there = {path.stem for directory in ("flows", "deployments") for path in (CHECKOUT / directory).glob("*.py")}
    assert "build" in there
    assert not there & (set(packages_distributions()) | set(sys.stdlib_module_names))


@pytest.mark.slow
def test_a_worker_loads_every_entrypoint() -> None:
    """By its path, in the checkout, with nothing of it installed; and no placeholder where that fails."""
    entrypoints = [deployment["entrypoint"] for deployment in DEPLOYMENTS.values()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, *entrypoints],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == [load_flow(deployment).name for deployment in DEPLOYMENTS.values()]


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a form, with its path."""
    for name, field in schema["properties"].items():
        yield name, field
    for kind, model in schema["definitions"].items():
        for name, field in model["properties"].items():
            yield f"{kind}.{name}", field


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_field_of_a_run_form_has_help(name: str) -> None:
    """In words, without marks of reStructuredText, which the form would show as they are."""
    schema = schema_of(name)
    fields = dict(properties(schema))
    assert [path for path, field in fields.items() if len(field.get("description", "")) < 10] == []
    shown = [
        *(field["description"] for field in fields.values()),
        *(kind["description"] for kind in schema["definitions"].values()),
    ]
    assert [text for text in shown if "``" in text] == []


def test_the_form_of_a_build_shows_choices_defaults_and_bounds() -> None:
    schema = schema_of("build")
    fields = dict(properties(schema))

    assert schema["required"] == ["config"]
    config = schema["definitions"]["BuildConfig"]
    assert config["required"] == ["output", "sources", "tokenizer"]
    assert not config["additionalProperties"]
    assert fields["BuildConfig.layout"]["enum"] == ["auto", "mmap", "compact", "zarr2"]
    assert fields["BuildConfig.runner"]["enum"] == ["threads", "groups", "ray"]
    assert fields["BuildConfig.verify_level"]["enum"] == ["quick", "full"]
    assert fields["DocumentPolicy.on_bad"]["enum"] == ["error", "skip", "replace"]
    assert fields["Source.format"]["enum"] == ["auto", "parquet", "jsonl", "text", "arrow", "csv"]
    assert (fields["BuildConfig.validation_fraction"]["minimum"], fields["BuildConfig.validation_fraction"]["maximum"]) == (0, 1)
    assert fields["BuildConfig.workers"]["anyOf"][0] == {"minimum": 1, "maximum": 256, "type": "integer"}
    without_default = [path for path, field in fields.items() if path.count(".") and "default" not in field]
    assert without_default == [
        "BuildConfig.output",
        "BuildConfig.sources",
        "BuildConfig.tokenizer",
        "HubDataset.path",
        "TokenizerConfig.name",
    ]


def test_the_form_of_an_export_lists_the_formats() -> None:
    formats = dict(properties(schema_of("export")))["format"]["enum"]
    assert {"megatron", "modalities", "nanogpt", "mds"} <= set(formats)


@pytest.mark.parametrize("path", DATASETS, ids=[path.stem for path in DATASETS])
def test_dataset_configurations_are_valid(path: Path) -> None:
    """As they are in the file, and as the parameters of a deployment."""
    config = read_config(path, [])
    assert config.name == path.stem
    deployment = dataset_deployment(path, None, None)
    load_flow(deployment).validate_parameters(deployment["parameters"])
    assert BuildConfig.model_validate(json.loads(json.dumps(deployment["parameters"]["config"]))) == config


def test_large_datasets_are_spread_over_workers() -> None:
    hub = {path.stem: yaml.safe_load(path.read_text()) for path in DATASETS}
    assert {
        name: (one["source"]["hub"]["path"], one["source"]["hub"]["name"]) for name, one in hub.items() if "hub" in one["source"]
    } == {
        "fineweb-edu-10bt": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
        "fineweb-edu-350bt": ("HuggingFaceFW/fineweb-edu", "sample-350BT"),
        "c4-en": ("allenai/c4", "en"),
    }
    assert [name for name, one in hub.items() if one.get("runner") == "groups"] == ["c4-en", "fineweb-edu-350bt"]


def test_each_dataset_gets_a_refresh_of_its_own() -> None:
    when = {"cron": "30 4 * * 1", "timezone": "Europe/Paris"}
    made = wanted(options(*DATASETS, cron=when["cron"], timezone=when["timezone"], keep=3))[len(DEPLOYMENTS) :]
    assert [one["name"] for one in made] == [path.stem for path in DATASETS]
    for one in made:
        assert one["entrypoint"] == "flows/refresh.py:refresh_dataset"
        assert one["schedules"] == [when]
        assert one["concurrency_limit"]["limit"] == 1
        assert one["parameters"]["keep_versions"] == 3
        assert f"dataset:{one['name']}" in one["tags"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cron": "nonsense"}, "Invalid cron string"),
        ({"cron": "0 3 * * *", "timezone": "Mars/Base"}, "Invalid timezone"),
        ({"every": 60, "timezone": "Mars/Base"}, "Invalid timezone"),
    ],
)
def test_what_is_no_time_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wanted(options(DATASETS[0], **given))


def test_every_run_knows_the_name_of_the_credentials() -> None:
    for deployment in wanted(options(DATASETS[0], credentials="secret/buckets")):
        variables = deployment["work_pool"]["job_variables"]["env"]
        assert variables["FLAT_TOKENS_CREDENTIALS"] == "secret/buckets"
        assert variables["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert all("FLAT_TOKENS_CREDENTIALS" not in str(deployment) for deployment in wanted(options()))


def test_two_datasets_of_one_name_are_refused() -> None:
    """They would be one deployment."""
    with pytest.raises(ValueError, match="two of the datasets are named 'c4-en'"):
        wanted(options(DATASETS[0], DATASETS[0]))


def test_fields_that_hold_settings_of_their_own_are_titled_by_what_they_are() -> None:
    """Not by the names of classes, which one of the two UIs would show."""
    config = schema_of("build")["definitions"]["BuildConfig"]["properties"]
    assert [config[name]["title"] for name in ("tokenizer", "documents", "groups")] == ["Tokenizer", "Documents", "Groups"]
