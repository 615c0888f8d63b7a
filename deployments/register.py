"""Register work pools, deployments and automations with the Prefect server at PREFECT_API_URL, or update them. Deployments
that people have paused stay paused, and schedules that they have added stay. Each dataset gets a deployment of its own that
refreshes it, one run at a time.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect import Flow
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowRunFilter,
)
from prefect.client.schemas.objects import ConcurrencyOptions, DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import SCHEDULE_TYPES, CronSchedule, IntervalSchedule
from prefect.client.schemas.sorting import DeploymentSort, FlowRunSort
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, ParameterTypeError
from prefect.flows import load_flow_from_entrypoint
from prefect.server.schemas.schedules import SCHEDULE_TYPES as SERVERS_SCHEDULES
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.processutils import command_to_string
from pydantic import TypeAdapter, ValidationError

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from deployments.arguments import POOLS, arguments
from flat_tokens.annotations import JsonFacts, JsonObject
from flows.commands.build import read_config
from flows.watch.page import link_to_page
from flows.watch.words import tags_of
from tasks.config import check_names_differ, size_for_people, with_absolute_paths
from tasks.locations import CREDENTIALS

HERE = Path(__file__).parent
CHECKOUT = HERE.parent
SLUG = "register.py"
"""Prefix of our own schedules' names. Those of other people have no name."""
PROCESS, REFRESH = "process", "refresh-dataset"
ENGINE = command_to_string([sys.executable, "-m", "prefect.engine"])
"""How a group begins. Without a command, Prefect first begins a process that prepares a directory for the run and its hooks: a
second more. A group has no hooks.
"""
OF_THE_COMMAND_LINE = "publish_anyway"
"""A parameter that no run of a deployment may have: it is for a person at a terminal."""
SORT, RUNS_AT_ONCE = FlowRunSort.EXPECTED_START_TIME_ASC, 200


def read_deployments() -> list[JsonObject]:
    """The deployments that prefect.yaml lists."""
    listed: list[JsonObject] = yaml.safe_load((HERE / "prefect.yaml").read_text("utf-8"))["deployments"]
    return listed


def load_flow(deployment: JsonObject) -> Flow[..., Any]:
    """The flow of a deployment. A flow that cannot be loaded raises its own error, instead of becoming a placeholder."""
    return load_flow_from_entrypoint(str(CHECKOUT / deployment["entrypoint"]), use_placeholder_flow=False)


def schedule_of(options: Namespace) -> JsonObject | None:
    """The schedule of refreshes, as prefect.yaml writes it. None without one. ValueError if it is not a valid time."""
    if options.cron is None and options.every is None:
        return None
    when = {"interval": options.every} if options.cron is None else {"cron": options.cron}
    made = {**when, "timezone": options.timezone}
    try:
        schedule(made)
        if not options.timezone:  # Prefect takes an empty one for none
            raise ValueError("Invalid timezone: ''")
        # A sixth field would be seconds: sixty runs instead of one.
        if options.cron is not None and len(options.cron.split()) != 5 and not options.cron.startswith("@"):
            raise ValueError(f"Invalid cron string: {options.cron!r}")
    except ValueError as error:
        faults = error.errors() if isinstance(error, ValidationError) else [{"msg": str(error)}]
        wrong = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in faults)
        remedy = "--cron takes five fields, such as '0 3 * * *', --timezone a name such as Europe/Paris"
        raise ValueError(f"{wrong}. {remedy}") from error
    return made


def schedule(listed: JsonFacts) -> CronSchedule | IntervalSchedule:
    """A schedule of prefect.yaml, in the form that the API takes."""
    if "cron" in listed:
        return CronSchedule(cron=listed["cron"], timezone=listed["timezone"])
    return IntervalSchedule(interval=timedelta(seconds=listed["interval"]), timezone=listed["timezone"])


def dataset_deployment(path: Path, when: JsonObject | None, keep: int | None) -> JsonObject:
    """A deployment that refreshes the dataset of a configuration file. ValueError names the mistakes in the file. A worker runs
    it in the checkout's directory: relative paths become absolute, as a build in this directory understands them.
    """
    config = with_absolute_paths(read_config(path, []))
    (refresh,) = (one for one in read_deployments() if one["name"] == "refresh")
    kept = {"keep_versions": keep} if keep else {}
    return {
        **refresh,
        "name": config.name,
        "description": f"Refreshes {config.output}, as {path.name} says.\n\n{link_to_page(config.name)}",
        "tags": [*refresh["tags"], *tags_of(config)],
        "parameters": {"config": config.model_dump(mode="json", exclude_unset=True, exclude_none=True), **kept},
        "schedules": [when] if when else [],
    }


def run_form(flow: Flow[..., Any]) -> JsonObject:
    """The parameters of a flow as a JSON schema. The server refuses any other parameter before it creates a run."""
    schema = parameter_schema(flow).model_dump()
    schema["properties"].pop(OF_THE_COMMAND_LINE, None)
    models = {name: _with_plain_fields(model) for name, model in schema["definitions"].items()}
    return {**_with_plain_fields(schema), "definitions": models, "additionalProperties": False}


def _with_plain_fields(schema: JsonObject) -> JsonObject:
    return {**schema, "properties": {name: _plain(field) for name, field in schema.get("properties", {}).items()}}


def _plain(field: JsonObject) -> JsonObject:
    """The schema of a field as a form shows it: an optional field is left empty instead of switched to None, and the default of
    a size is text. The default of a group of fields is left out: each of its fields has one.
    """
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    default = field.get("default")
    if len(kinds) == 1 and default is None and "$ref" not in kinds[0]:
        return {**kinds[0], **{name: value for name, value in field.items() if name not in ("anyOf", "default")}}
    if [kind.get("type") for kind in kinds] == ["string", "integer"] and isinstance(default, int):
        return {**field, "default": size_for_people(default)}
    return {name: value for name, value in field.items() if not (name == "default" and "$ref" in field)}


def check_parameters(flow: Flow[..., Any], deployment: JsonObject) -> None:
    """ValueError for a deployment's parameters that its flow refuses. Those that prefect.yaml lists are an example for the form,
    and may be outside of the roots.
    """
    disabled = logging.getLogger("prefect.flows")
    was_disabled, disabled.disabled = disabled.disabled, True  # it logs a page about each
    try:
        flow.validate_parameters(deployment["parameters"])
    except ParameterTypeError as error:
        faults = [line.strip() for line in str(error).splitlines()[1:]]
        outside = [line for line in faults if "may not be" in line]
        if deployment not in read_deployments() or not outside:
            raise ValueError(f"{flow.name}/{deployment['name']}: {'; '.join(faults)}") from error
        print(f"{flow.name}/{deployment['name']}: the example in its form is outside of the roots", file=sys.stderr)
    finally:
        disabled.disabled = was_disabled


def register(client: SyncPrefectClient, deployment: JsonObject) -> str:
    """Create a deployment, or update the one of that name. Return FLOW/NAME, with remarks for people.

    Prefect's own command is not used: in this release ``prefect deploy --all`` ends after the first deployment (status 422, as it
    asks for a pool's workers without a limit), and forms that it makes let through parameters that the flow does not have.
    """
    flow, pool, limit = load_flow(deployment), deployment["work_pool"], deployment.get("concurrency_limit")
    parameters = deployment.get("parameters", {})
    if parameters:
        check_parameters(flow, deployment)
    name = f"{flow.name}/{deployment['name']}"
    there = None
    with suppress(ObjectNotFound):
        there = client.read_deployment_by_name(name)
    schedules = schedules_of(deployment.get("schedules", ()), there.schedules if there else ())
    client.create_deployment(
        flow_id=client.create_flow(flow),
        name=deployment["name"],
        description=deployment["description"],
        tags=deployment["tags"],
        entrypoint=deployment["entrypoint"],
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}],
        parameters=parameters,
        parameter_openapi_schema=run_form(flow),
        enforce_parameter_schema=deployment["enforce_parameter_schema"],
        schedules=schedules,
        concurrency_limit=limit["limit"] if limit else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]) if limit else None,
        work_pool_name=pool["name"],
        work_queue_name=pool["work_queue_name"],
        job_variables=pool["job_variables"],
    )
    return name + "".join(f" ({remark})" for remark in remarks(there, parameters, schedules))


def replace_waiting(client: SyncPrefectClient, deployment: DeploymentResponse) -> int:
    """Replace the runs that schedules have made and no worker has begun, if their deployment has other parameters by now. Prefect
    itself replaces only those that are not due yet. One run is made for all that were due. Return how many were replaced.
    """
    right = [{**deployment.parameters, **(one.parameters or {})} for one in deployment.schedules] or [deployment.parameters]
    scheduled = {"deployment_id": {"any_": [deployment.id]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    waiting = FlowRunFilter.model_validate(scheduled)
    replaced, was_due, seen = 0, False, 0
    while runs := client.read_flow_runs(flow_run_filter=waiting, sort=SORT, limit=RUNS_AT_ONCE, offset=seen):
        for run in runs:
            if not run.auto_scheduled or run.run_count or run.parameters in right:
                seen += 1
                continue
            with suppress(ObjectNotFound):
                client.delete_flow_run(run.id)
            replaced += 1
            was_due |= run.expected_start_time is not None and run.expected_start_time <= datetime.now(UTC)
    if was_due and not deployment.paused:
        client.create_flow_run_from_deployment(deployment.id)
    return replaced


def remarks(
    there: DeploymentResponse | None, parameters: JsonFacts, schedules: Sequence[DeploymentScheduleCreate]
) -> Iterator[str]:
    """Remarks for people on the deployment that is *there*, before it is updated."""
    before, now = ((each.get("config") or {}).get("output") for each in (there.parameters if there else {}, parameters))
    if before != now and before is not None:
        yield f"it refreshed {before} until now: two datasets of one name share a deployment"
    if (there is not None and there.paused) or any(not one.active for one in schedules):
        yield "paused"
    else:
        for one in schedules:
            soon = asyncio.run(TypeAdapter(SERVERS_SCHEDULES).validate_python(one.schedule.model_dump()).get_dates(1))
            yield from (f"next run {date:%Y-%m-%d %H:%M %Z}" for date in soon)


def schedules_of(listed: Sequence[JsonFacts], there: Sequence[DeploymentSchedule]) -> list[DeploymentScheduleCreate]:
    """The schedules of a deployment: those *listed* by prefect.yaml or the command line, and of those that are *there* the ones
    that people have added. A paused schedule stays paused. An interval keeps its anchor date.
    """
    others = [one for one in there if not (one.slug or "").startswith(SLUG)]
    made = []
    for number, one in enumerate(listed):
        slug, when = f"{SLUG}-{number}", schedule(one)
        former = next((each for each in there if each.slug == slug), None)
        is_same = former is not None and _times(former.schedule) == _times(when)
        active = former.active if former else one.get("active", True)
        made.append(DeploymentScheduleCreate(slug=slug, schedule=former.schedule if former and is_same else when, active=active))
    return made + [
        DeploymentScheduleCreate(slug=one.slug, schedule=one.schedule, active=one.active, parameters=one.parameters)
        for one in others
    ]


def _times(when: SCHEDULE_TYPES) -> JsonObject:
    return when.model_dump(exclude={"anchor_date"})


def create_pools(client: SyncPrefectClient, deployments: list[JsonObject]) -> None:
    """Create the work pools of the deployments, of type process, or update them. Pools of other types are left alone."""
    for pool in {deployment["work_pool"]["name"]: deployment["work_pool"] for deployment in deployments}.values():
        template = process_template(pool["job_variables"]["env"], ENGINE if pool["name"] == POOLS["groups"] else None)
        try:
            client.create_work_pool(WorkPoolCreate(name=pool["name"], type=PROCESS, base_job_template=template))
        except ObjectAlreadyExists:
            if client.read_work_pool(pool["name"]).type == PROCESS:
                client.update_work_pool(pool["name"], WorkPoolUpdate(base_job_template=template))


def process_template(env: Mapping[str, str], command: str | None = None) -> JsonObject:
    """The base job template of a process pool. It has no variables for command and directory, and allows one environment only.
    So people who may create a run of a deployment cannot make the worker run something else, or read and write outside the
    operator's roots. Runs do not write to their worker's output: a pipe to a worker that was killed would end them.
    """
    fixed = {name: {"type": "string", "enum": [value]} for name, value in env.items()}
    about_env = "Of the pool: register.py sets it, and workers have theirs"
    variables = {
        "name": {"title": "Name", "description": "Of the process; the run's without it", "type": "string"},
        "env": {"title": "Environment", "description": about_env, **_object_of(fixed)},
    }
    return {
        "job_configuration": {"name": "{{ name }}", "command": command, "stream_output": False, "env": dict(env)},
        "variables": _object_of(variables),
    }


def _object_of(properties: JsonObject) -> JsonObject:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def read_automations(client: SyncPrefectClient, notify: str | None) -> Iterator[AutomationCore]:
    """The automations of automations.yaml. The notification is left out if *notify* names no block to send it with."""
    for listed in yaml.safe_load((HERE / "automations.yaml").read_text("utf-8"))["automations"]:
        for action in listed["actions"]:
            if action["type"] == "send-notification" and notify:
                action["block_document_id"] = block_id(client, notify)
        if notify or all(action["type"] != "send-notification" for action in listed["actions"]):
            yield AutomationCore.model_validate(listed)


def block_id(client: SyncPrefectClient, named: str) -> str:
    """The id of the block TYPE/NAME. LookupError, with the page that makes it, if there is none. ValueError if none could be."""
    kind, _, name = named.partition("/")
    try:
        client.read_block_type_by_slug(kind)
    except ObjectNotFound as error:
        types = ", ".join(sorted(one.slug for one in client.read_block_types()))
        raise ValueError(f"{named} names no block, which is TYPE/NAME. There is no type {kind!r}; there are {types}.") from error
    try:
        return str(client.read_block_document_by_name(name, kind, include_secrets=False).id)
    except ObjectNotFound as error:
        page = f"{get_current_settings().ui_url}/blocks/catalog/{kind}/create"
        by_command = f", or by a command: {command}" if (command := command_that_makes(kind, name)) else ""
        raise LookupError(f"There is no block {named}. Create one named {name} at {page}{by_command}") from error


def command_that_makes(kind: str, name: str) -> str | None:
    """A shell command that makes a block, with ... where people put its secrets. None for types of other packages."""
    from prefect.blocks import notifications, system  # they define the types that Prefect has by itself

    blocks = [one for module in (notifications, system) for one in vars(module).values() if isinstance(one, type)]
    block = next((one for one in blocks if issubclass(one, Block) and one.get_block_type_slug() == kind), None)
    if block is None:
        return None
    fields = ", ".join(f'{field}="..."' for field in block.model_json_schema().get("required", ()))
    program = f'from {block.__module__} import {block.__name__}; {block.__name__}({fields}).save("{name}")'
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"


def automate(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation, or update those of its name. An equal one is left alone: an update forgets the runs that it was
    waiting for.
    """
    there = client.read_automations_by_name(automation.name)
    for one in there:
        if AutomationCore.model_validate(one.model_dump()) != automation:
            client.update_automation(one.id, automation)
    if not there:
        client.create_automation(automation)


def wanted(options: Namespace) -> list[JsonObject]:
    """The deployments of prefect.yaml, and one for each dataset. ValueError if a configuration file or a time is wrong."""
    when = schedule_of(options)
    of_datasets = [dataset_deployment(path, when, options.keep) for path in options.datasets]
    if not of_datasets and (when or options.keep):
        raise ValueError("--cron, --every and --keep are about datasets: name one, DATASET.yaml")
    listed, names = read_deployments(), [one["name"] for one in of_datasets]
    check_names_differ("of the datasets", names)
    if taken := sorted({one["name"] for one in listed} & set(names)):
        raise ValueError(f"a dataset is named {taken[0]!r}, as a deployment of prefect.yaml is; give it another name")
    if options.credentials:
        for one in (*listed, *of_datasets):
            one["work_pool"]["job_variables"]["env"][CREDENTIALS] = options.credentials
    return [*listed, *of_datasets]


@contextmanager
def connected() -> Iterator[SyncPrefectClient]:
    """A client of the server at PREFECT_API_URL. ValueError if there is none."""
    url = get_current_settings().api.url
    if url is None:  # Prefect would start a temporary server of its own
        raise ValueError("Which server? Set PREFECT_API_URL, such as http://127.0.0.1:4200/api.")
    with get_client(sync_client=True) as client:
        if error := client.api_healthcheck():
            raise ValueError(f"The Prefect server at PREFECT_API_URL={url} does not answer ({error}). Start it, or set another.")
        yield client


def missing_blocks(client: SyncPrefectClient, options: Namespace) -> dict[str, str]:
    """The blocks that the options name and the server does not have, each with what to do about it."""
    missing = {}
    for named in filter(None, (options.credentials, options.notify)):
        try:
            block_id(client, named)
        except LookupError as error:
            missing[named] = str(error)
    return missing


def register_all(client: SyncPrefectClient, deployments: list[JsonObject], notify: str | None, *, only: bool) -> list[str]:
    """Register deployments, their pools and the automations. *only*: take other datasets off. Return a line for each dataset, its
    next run in it.
    """
    automations = list(read_automations(client, notify))
    create_pools(client, deployments)
    of_datasets = []
    for deployment in deployments:
        registered = register(client, deployment)
        print(f"registered {registered}", flush=True)
        if is_of_a_dataset(deployment["name"], deployment["tags"]):
            of_datasets.append(registered)
    for automation in automations:
        automate(client, automation)
    names = {deployment["name"] for deployment in deployments}
    refreshes = FlowFilter.model_validate({"name": {"any_": [REFRESH]}})
    for there in client.read_deployments(flow_filter=refreshes, sort=DeploymentSort.NAME_ASC, limit=200):
        if there.name in names:
            if replaced := replace_waiting(client, there):
                print(f"{REFRESH}/{there.name}: {replaced} waiting runs had former settings and are replaced", flush=True)
        elif not is_of_a_dataset(there.name, there.tags):
            continue
        elif only:
            client.delete_deployment(there.id)
            print(f"taken off: {REFRESH}/{there.name}", flush=True)
        else:
            of_datasets.append(f"{REFRESH}/{there.name} (not named here, goes on as before; --only takes it off)")
            print(of_datasets[-1], flush=True)
    return of_datasets


def is_of_a_dataset(name: str, tags: Sequence[str]) -> bool:
    """Whether a deployment is one that ``dataset_deployment`` makes."""
    return f"dataset:{name}" in tags


if __name__ == "__main__":
    options = arguments(str(__doc__)).parse_args()
    try:
        deployments = wanted(options)
        with connected() as client:
            if missing := missing_blocks(client, options):
                raise ValueError("; ".join(missing.values()))
            register_all(client, deployments, options.notify, only=options.only)
    except (ValueError, httpx.HTTPError) as error:
        sys.exit(str(error))
