"""What is registered: flows that load, forms that explain themselves, schedules, configurations of real datasets."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, get_type_hints
from uuid import uuid4

import jsonschema
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.client.schemas.sorting import DeploymentSort, FlowRunSort
from prefect.utilities.schema_tools.validation import validate
from pydantic import TypeAdapter

from deployments.arguments import arguments as command_line
from deployments.register import (
    SLUG,
    command_that_makes,
    create_pools,
    dataset_deployment,
    load_flow,
    process_template,
    read_deployments,
    register,
    register_all,
    remarks,
    replace_waiting,
    run_form,
    schedules_of,
    wanted,
)
from flows.build import build_dataset
from flows.commands.build import read_config
from tasks.config import BuildConfig, with_absolute_paths
from tests.flows.asked import on_prefect_server
from tests.processes import ROOT, python
from tests.refusal import refusal

DATASETS = sorted((ROOT / "deployments/datasets").glob("*.yaml"))
DEPLOYMENTS = {deployment["name"]: deployment for deployment in read_deployments()}

LOAD = """
import json, sys
from prefect.flows import load_flow_from_entrypoint
print(json.dumps([load_flow_from_entrypoint(one, use_placeholder_flow=False).name for one in sys.argv[1:]]))
"""


def options(*datasets: Path, **given: Any) -> argparse.Namespace:
    settings = {"cron": None, "every": None, "timezone": "UTC", "keep": None, "credentials": None, **given}
    return argparse.Namespace(datasets=list(datasets), **settings)


def schema_of(name: str) -> dict[str, Any]:
    return run_form(load_flow(DEPLOYMENTS[name]))


def test_the_deployments_that_there_are():
    assert set(DEPLOYMENTS) == {
        "approve",
        "build",
        "publish",
        "reject",
        "forget",
        "refresh",
        "retokenize",
        "train-tokenizer",
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
    assert not any("schedules" in deployment for deployment in DEPLOYMENTS.values())  # schedules are of people's datasets
    assert DEPLOYMENTS["refresh"]["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_no_file_beside_a_flow_has_the_name_of_a_package():
    """Prefect puts a flow's own directory first on the path: ``flows/datasets.py`` would be what ``import datasets`` finds."""
    there = {path.stem for directory in ("flows", "deployments") for path in (ROOT / directory).glob("*.py")}
    assert "build" in there
    assert not there & (set(packages_distributions()) | set(sys.stdlib_module_names))


@pytest.mark.slow
def test_a_worker_loads_every_entrypoint():
    """By its path, in the checkout, with nothing of it installed; and no placeholder where that fails."""
    entrypoints = [deployment["entrypoint"] for deployment in DEPLOYMENTS.values()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    loaded = python("-c", LOAD, *entrypoints, env=environment)
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
def test_no_result_of_a_flow_has_a_field_named_keys(name):
    """Prefect looks for futures in ``dict(result)``, which takes anything with ``keys`` for a mapping: the run would fail."""
    result = TypeAdapter(get_type_hints(load_flow(DEPLOYMENTS[name]).fn)["return"])
    assert '"keys": ' not in json.dumps(result.json_schema())


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_field_of_a_run_form_has_help_and_there_are_no_others(name):
    """In words, without marks of reStructuredText, which the form would show as they are."""
    schema = schema_of(name)
    fields = dict(properties(schema))
    assert [path for path, field in fields.items() if len(field.get("description", "")) < 10] == []
    shown = [
        *(field["description"] for field in fields.values()),
        *(kind["description"] for kind in schema["definitions"].values()),
    ]
    assert [text for text in shown if "``" in text] == []
    faults = jsonschema.Draft202012Validator(schema).iter_errors({"grace": 1})
    assert ["'grace' was unexpected" in fault.message for fault in faults if fault.validator == "additionalProperties"] == [True]


def test_the_form_of_a_build_shows_choices_defaults_and_bounds():
    schema = schema_of("build")
    fields = dict(properties(schema))
    assert schema["required"] == ["config"]
    config = schema["definitions"]["BuildConfig"]
    assert config["required"] == ["output", "sources", "tokenizer"]
    assert fields["BuildConfig.layout"]["enum"] == ["auto", "mmap", "compact", "zarr2"]
    workers = {"minimum": 1, "maximum": 256, "type": "integer", "title": "Workers"}  # empty, not switched to None
    assert {name: value for name, value in fields["BuildConfig.workers"].items() if name != "description"} == workers
    assert fields["BuildConfig.slice_bytes"]["default"] == "128 MB"
    assert fields["BuildConfig.tokenizer"]["anyOf"][0]["type"] == "string"  # a name, before all settings
    assert list(config["properties"])[:4] == ["output", "name", "sources", "tokenizer"]
    assert list(schema["definitions"]["Source"]["properties"])[:3] == ["path", "hub", "text_column"]
    assert fields["BuildConfig.documents"]["title"] == "Documents"  # not the name of a class, which one of the two UIs would show


@pytest.mark.parametrize("path", DATASETS, ids=[path.stem for path in DATASETS])
def test_dataset_configurations_are_valid(path):
    """As they are in the file, and as the parameters of a deployment."""
    config = read_config(path, [])
    assert config.name == path.stem
    deployment = dataset_deployment(path, None, None)
    load_flow(deployment).validate_parameters(deployment["parameters"])
    assert BuildConfig.model_validate(json.loads(json.dumps(deployment["parameters"]["config"]))) == with_absolute_paths(config)


@on_prefect_server
def test_a_dataset_that_is_not_named_goes_on_or_is_taken_off(tmp_path):
    """The deployments of prefect.yaml and those that people have made stay."""
    names = [f"{letter}-{uuid4().hex[:8]}" for letter in "ab"]
    first, second = (tmp_path / name for name in names)
    for path in (first, second):
        path.write_text(f"name: {path.name}\noutput: {path}-out\nsource: {{path: {tmp_path}/in}}\ntokenizer: bytes\n")
    with get_client(sync_client=True) as client:

        def registered(*paths: Path, only: bool = False) -> list[str]:
            lines = register_all(client, wanted(options(*paths)), None, only=only)
            return [line for line in lines if any(name in line for name in names)]

        def there() -> set[str]:
            return {one.name for one in client.read_deployments(sort=DeploymentSort.NAME_ASC, limit=200)}

        assert registered(first, second) == [f"refresh-dataset/{name}" for name in names]
        own = {**dataset_deployment(first, None, None), "name": f"own-{names[0]}"}
        register(client, own)
        goes_on = f"refresh-dataset/{names[1]} (not named here, goes on as before; --only takes it off)"
        assert registered(first) == [f"refresh-dataset/{names[0]}", goes_on]
        assert registered(first, only=True) == [f"refresh-dataset/{names[0]}"]
        assert there() >= {names[0], own["name"], *DEPLOYMENTS}
        assert names[1] not in there()


@on_prefect_server
def test_a_run_that_waits_has_the_settings_of_the_last_registration(tmp_path):
    """Also where it was due already; those that people have started keep theirs."""
    name = f"refresh-dataset/waiting-{uuid4().hex[:8]}"

    def told(output: str) -> dict[str, Any]:
        path = tmp_path / "waiting.yaml"
        path.write_text(f"name: {name.partition('/')[2]}\noutput: {output}\nsource: {{path: {tmp_path}/in}}\ntokenizer: bytes\n")
        return dataset_deployment(path, {"interval": 600, "timezone": "UTC"}, None)

    with get_client(sync_client=True) as client:
        create_pools(client, read_deployments())

        def outputs() -> list[tuple[str, bool]]:
            """The output of each run that waits, and whether a schedule has made it."""
            found = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id])),
                sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                limit=200,
            )
            return [(Path(run.parameters["config"]["output"]).name, run.auto_scheduled) for run in found]

        register(client, told(f"{tmp_path}/wrong"))
        deployment = client.read_deployment_by_name(name)
        now = datetime.now(UTC)
        times = {"start_time": (now - timedelta(hours=1)).isoformat(), "end_time": (now + timedelta(hours=1)).isoformat()}
        client.request("POST", f"/deployments/{deployment.id}/schedule", json={**times, "max_runs": 12}).raise_for_status()
        client.create_flow_run_from_deployment(deployment.id)
        assert outputs().count(("wrong", True)) > 2
        register(client, told(f"{tmp_path}/right"))
        deployment = client.read_deployment_by_name(name)
        assert replace_waiting(client, deployment) > 2
        assert sorted(outputs()) == [("right", False), ("wrong", False)]  # one for those that were due, and the one of people
        assert replace_waiting(client, deployment) == 0


def test_each_dataset_gets_a_refresh_of_its_own():
    """Every run knows the name of the credentials."""
    when = {"cron": "30 4 * * 1", "timezone": "Europe/Paris"}
    registered = wanted(options(*DATASETS, **when, keep=3, credentials="secret/buckets"))
    variables = [one["work_pool"]["job_variables"]["env"]["FLAT_TOKENS_CREDENTIALS"] for one in registered]
    assert set(variables) == {"secret/buckets"}
    assert "FLAT_TOKENS_CREDENTIALS" not in str(wanted(options()))
    made = registered[len(DEPLOYMENTS) :]
    assert [one["name"] for one in made] == [path.stem for path in DATASETS]
    for one in made:
        assert one["entrypoint"] == "flows/refresh.py:refresh_dataset"
        assert one["schedules"] == [when]
        assert one["concurrency_limit"]["limit"] == 1
        assert one["parameters"]["keep_versions"] == 3
        assert f"dataset:{one['name']}" in one["tags"]


ONE = DATASETS[:1]


@pytest.mark.parametrize(
    ("datasets", "given", "message"),
    [
        (ONE, {"cron": "nonsense"}, "Invalid cron string"),
        (ONE, {"cron": ""}, "Invalid cron string"),
        (ONE, {"cron": "0 3 * * *", "timezone": "Mars/Base"}, "Invalid timezone"),
        (ONE, {"every": 60, "timezone": "Mars/Base"}, "Invalid timezone"),
        (ONE, {"cron": "0 3 * * * *"}, "Invalid cron string.*five fields"),  # a sixth one is seconds: sixty runs
        ([], {"cron": "0 3 * * *"}, "are about datasets: name one"),
        ([], {"keep": 3}, "are about datasets: name one"),
        (ONE * 2, {}, "two of the datasets are named 'c4-en'"),  # they would be one deployment
        ([Path("refresh.yaml")], {}, "a dataset is named 'refresh', as a deployment"),  # it would take its place
    ],
)
def test_what_cannot_be_registered_is_refused(tmp_path, monkeypatch, datasets, given, message):
    monkeypatch.chdir(tmp_path)
    Path("refresh.yaml").write_text("name: refresh\noutput: out\nsource: {path: in}\ntokenizer: bytes\n")
    with refusal(message):
        wanted(options(*datasets, **given))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "0"], "'0' is not a whole number above 0"),
        (["--every", "5", "--cron", "0 3 * * *"], "not allowed with argument"),
    ],
)
def test_numbers_and_contradictions_are_told_by_the_command_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line("").parse_args(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "Set PREFECT_API_URL, such as"),
        ("http://127.0.0.1:9/api", "PREFECT_API_URL=http://127.0.0.1:9/api does not answer"),
    ],
)
def test_a_server_that_is_not_there_is_told_in_one_line(tmp_path, url, words):
    """Where none is named, Prefect would start one for itself, register everything with it, and stop it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path), **({"PREFECT_API_URL": url} if url else {})}
    told = python("deployments/register.py", env=environment)
    assert (told.returncode, told.stdout) == (1, "")
    assert len(told.stderr.splitlines()) == 1
    assert words in told.stderr


def there(when: CronSchedule | IntervalSchedule, **given: Any) -> DeploymentSchedule:
    return DeploymentSchedule(schedule=when, **given)


NIGHTLY = {"cron": "0 3 * * *", "timezone": "Europe/Paris"}
AT_THREE = CronSchedule(cron="0 3 * * *", timezone="Europe/Paris")
AT_FOUR = CronSchedule(cron="0 4 * * *", timezone="Europe/Paris")


def test_schedules_are_registered_once_and_what_people_did_with_them_stays():
    (first,) = schedules_of([NIGHTLY], [])
    assert (first.schedule, first.active, first.slug) == (AT_THREE, True, f"{SLUG}-0")

    paused, added = there(AT_THREE, slug=f"{SLUG}-0", active=False), there(AT_FOUR, active=True, parameters={"grace_days": 1})
    again = schedules_of([NIGHTLY], [added, paused])
    assert [(one.schedule, one.active, one.slug, one.parameters) for one in again] == [
        (AT_THREE, False, f"{SLUG}-0", {}),
        (AT_FOUR, True, None, {"grace_days": 1}),
    ]
    (moved,) = schedules_of([{**NIGHTLY, "cron": "0 4 * * *"}], [paused])
    assert (moved.schedule, moved.active) == (AT_FOUR, False)
    assert [one.schedule for one in schedules_of([], [added, paused])] == [AT_FOUR]


def test_an_interval_goes_on_from_where_it_began():
    """A service that is started anew each day would never come to a refresh that is due every two."""
    every, longer = ({"interval": seconds, "timezone": "UTC"} for seconds in (172_800, 604_800))
    began = datetime(2026, 1, 1, tzinfo=UTC)
    before = there(IntervalSchedule(interval=timedelta(days=2), anchor_date=began), slug=f"{SLUG}-0")
    assert [one.schedule for one in schedules_of([every], [before])] == [before.schedule]
    (other,) = schedules_of([longer], [before])
    assert isinstance(other.schedule, IntervalSchedule)
    assert (other.schedule.interval, other.schedule.anchor_date > began) == (timedelta(days=7), True)


def test_what_is_paused_and_a_name_that_two_datasets_share_is_told():
    before = DeploymentResponse(name="d", flow_id=uuid4(), parameters={"config": {"output": "/out/a"}})
    (told,) = remarks(before, {"config": {"output": "/out/b"}}, [])
    assert told == "it refreshed /out/a until now: two datasets of one name share a deployment"
    (paused,) = schedules_of([NIGHTLY], [there(AT_THREE, slug=f"{SLUG}-0", active=False)])
    assert list(remarks(before, before.parameters, [paused])) == ["paused"]
    assert list(remarks(before.model_copy(update={"paused": True}), before.parameters, [])) == ["paused"]


@pytest.mark.parametrize(
    "variables", [{"env": {"A": "2"}}, {"env.A": "2"}, {"command": "x"}, {"working_dir": "x"}, {"stream_output": True}]
)
def test_environment_command_and_directory_are_the_pools_own(variables):
    """What the deployments say of the environment is what the pool says."""
    template = process_template({"A": "1"})
    assert template["job_configuration"] == {"name": "{{ name }}", "command": None, "stream_output": False, "env": {"A": "1"}}
    closed = jsonschema.Draft202012Validator(template["variables"])
    assert closed.is_valid({"name": "x", "env": {"A": "1"}})
    assert not closed.is_valid(variables)


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("secret", 'from prefect.blocks.system import Secret; Secret(value="...").save("alerts")'),
        ("of-another-package", None),
    ],
)
def test_a_block_that_is_missing_can_be_made_by_a_command(kind, program):
    """No page of a running UI is needed."""
    made = command_that_makes(kind, "alerts")
    assert (made and shlex.split(made)) == (program and [sys.executable, "-c", program])


def test_the_next_run_is_told_in_the_time_zone_of_its_schedule():
    for when, words in (
        ({"cron": "30 4 1 2 *", "timezone": "Asia/Tokyo"}, r"next run \d{4}-02-01 04:30 JST"),
        ({"interval": 3600, "timezone": "UTC"}, r"next run \d{4}-\d\d-\d\d \d\d:\d\d UTC"),
    ):
        (told,) = remarks(None, {}, schedules_of([when], []))
        assert re.fullmatch(words, told)


@pytest.mark.parametrize(
    ("source", "tokenizer", "is_right"),
    [
        ({}, "bytes", False),
        ({"path": "/in"}, {"name": "bytes"}, True),
        ({"hub": {"path": "a/b"}}, "bytes", True),
        ({"path": "/in"}, {"name": "x.tiktoken", "pattern": "cl100k_base"}, True),
        ({"path": "/in"}, "", False),
    ],
)
def test_the_form_takes_a_source_with_a_place_and_a_tokenizer_by_name_or_with_settings(source, tokenizer, is_right):
    """When it is submitted, as the server does by the schema alone."""
    config = {"output": "/out", "sources": [source], "tokenizer": tokenizer, "slice_bytes": "128 MB"}
    faults = validate({"config": config}, run_form(build_dataset), preprocess=True)
    assert (not faults) is is_right
