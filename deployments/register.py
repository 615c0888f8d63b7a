"""Register work pools, deployments and automations with the Prefect server at PREFECT_API_URL; done again, they are updated.

``register.py [DATASET.yaml ...] [--cron "0 3 * * *" | --every SECONDS] [--timezone UTC] [--keep N] [--notify TYPE/NAME]
[--credentials secret/NAME]``: each dataset gets a deployment of its own that refreshes it, one run at a time; TYPE/NAME is a
notification block that hears of runs that failed or crashed; secret/NAME is a block with the credentials of stores
(flows/credentials.py).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

HERE = Path(__file__).parent
CHECKOUT = HERE.parent
sys.path[:0] = [str(HERE), str(CHECKOUT)]  # a checkout is not installed

from serve import arguments  # noqa: E402

from flows.cli import read_config  # noqa: E402
from flows.credentials import VARIABLE  # noqa: E402
from flows.watching import tags_of  # noqa: E402


def read_deployments() -> list[dict[str, Any]]:
    """What prefect.yaml lists."""
    listed: list[dict[str, Any]] = yaml.safe_load((HERE / "prefect.yaml").read_text("utf-8"))["deployments"]
    return listed


def load_flow(deployment: dict[str, Any]) -> Flow[..., Any]:
    """The flow of a deployment; its own error where it cannot be loaded, instead of a placeholder."""
    return load_flow_from_entrypoint(str(CHECKOUT / deployment["entrypoint"]), use_placeholder_flow=False)


def schedule_of(options: argparse.Namespace) -> dict[str, Any] | None:
    """When datasets are refreshed, as prefect.yaml writes it; None where only when asked to. ValueError where it is no time."""
    if options.cron:
        made = {"cron": options.cron, "timezone": options.timezone}
    elif options.every:
        made = {"interval": options.every, "timezone": options.timezone}
    else:
        return None
    try:
        schedule(made)
    except ValidationError as error:
        wrong = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise ValueError(
            f"{wrong}. --cron takes five fields, such as '0 3 * * *', --timezone a name such as Europe/Paris"
        ) from error
    return made


def schedule(listed: Mapping[str, Any]) -> CronSchedule | IntervalSchedule:
    """A schedule of prefect.yaml's as the API takes it."""
    if "cron" in listed:
        return CronSchedule(cron=listed["cron"], timezone=listed["timezone"])
    return IntervalSchedule(interval=timedelta(seconds=listed["interval"]), timezone=listed["timezone"])


def dataset_deployment(path: Path, when: dict[str, Any] | None, keep: int | None) -> dict[str, Any]:
    """A deployment that refreshes the dataset of a configuration file. ValueError says what is wrong in the file."""
    config = read_config(path, [])
    (refresh,) = (one for one in read_deployments() if one["name"] == "refresh")
    kept = {"keep_versions": keep} if keep else {}
    return {
        **refresh,
        "name": config.name,
        "description": f"Refreshes {config.output}, as {path.name} says; does nothing where nothing changed.",
        "tags": [*refresh["tags"], *tags_of(config)],
        "parameters": {"config": config.model_dump(mode="json", exclude_unset=True), **kept},
        "schedules": [when] if when else [],
    }


def register(client: SyncPrefectClient, deployment: dict[str, Any]) -> str:
    """Create a deployment, or update the one of that name; its name with that of its flow.

    Not by Prefect's own command: the one of this release asks for a pool's workers in a way that its server refuses.
    """
    flow, pool, limit = load_flow(deployment), deployment["work_pool"], deployment.get("concurrency_limit")
    parameters = deployment.get("parameters", {})
    if parameters:
        flow.validate_parameters(parameters)
    client.create_deployment(
        flow_id=client.create_flow(flow),
        name=deployment["name"],
        description=deployment["description"],
        tags=deployment["tags"],
        entrypoint=deployment["entrypoint"],
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}],
        parameters=parameters,
        parameter_openapi_schema=parameter_schema(flow).model_dump(),
        enforce_parameter_schema=deployment["enforce_parameter_schema"],
        schedules=[
            DeploymentScheduleCreate(schedule=schedule(one), active=one.get("active", True))
            for one in deployment.get("schedules", ())
        ],
        concurrency_limit=limit["limit"] if limit else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]) if limit else None,
        work_pool_name=pool["name"],
        work_queue_name=pool["work_queue_name"],
        job_variables=pool["job_variables"],
    )
    return f"{flow.name}/{deployment['name']}"


def create_pools(client: SyncPrefectClient, deployments: list[dict[str, Any]]) -> None:
    """Create the work pools that deployments go to, for workers that start processes; leave those that are there."""
    for name in dict.fromkeys(deployment["work_pool"]["name"] for deployment in deployments):
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def read_automations(client: SyncPrefectClient, notify: str | None) -> Iterator[AutomationCore]:
    """What automations.yaml lists; its notification only where there is a block to send it with, found by its name."""
    for listed in yaml.safe_load((HERE / "automations.yaml").read_text("utf-8"))["automations"]:
        for action in listed["actions"]:
            if action["type"] == "send-notification" and notify:
                action["block_document_id"] = _block_id(client, notify)
        if notify or all(action["type"] != "send-notification" for action in listed["actions"]):
            yield AutomationCore.model_validate(listed)


def _block_id(client: SyncPrefectClient, named: str) -> str:
    kind, _, name = named.partition("/")
    try:
        return str(client.read_block_document_by_name(name, kind, include_secrets=False).id)
    except ObjectNotFound as error:
        raise ValueError(f"There is no block {named}. Create it in the UI under Blocks; it is named TYPE/NAME here.") from error


def automate(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation, or update those of its name. One that is as it should be is left alone: an update forgets whom it
    was waiting for.
    """
    there = client.read_automations_by_name(automation.name)
    for one in there:
        if AutomationCore.model_validate(one.model_dump()) != automation:
            client.update_automation(one.id, automation)
    if not there:
        client.create_automation(automation)


def wanted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What prefect.yaml lists, and a refresh of each dataset. ValueError where a configuration file or a time is wrong."""
    when = schedule_of(options)
    of_datasets = [dataset_deployment(path, when, options.keep) for path in options.datasets]
    names = [one["name"] for one in of_datasets]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two of the datasets are named {repeated[0]!r}; give each a name of its own")
    return [_with_credentials(one, options.credentials) for one in [*read_deployments(), *of_datasets]]


def _with_credentials(deployment: dict[str, Any], name: str | None) -> dict[str, Any]:
    if name is None:
        return deployment
    pool = deployment["work_pool"]
    settings = {**pool["job_variables"], "env": {**pool["job_variables"]["env"], VARIABLE: name}}
    return {**deployment, "work_pool": {**pool, "job_variables": settings}}


def register_all(deployments: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Register deployments, the pools that they go to, and the automations."""
    with get_client(sync_client=True) as client:
        if options.credentials:
            _block_id(client, options.credentials)
        automations = list(read_automations(client, options.notify))
        create_pools(client, deployments)
        for deployment in deployments:
            print(f"registered {register(client, deployment)}", flush=True)
        for automation in automations:
            automate(client, automation)


if __name__ == "__main__":
    options = arguments(str(__doc__)).parse_args()
    try:
        register_all(wanted(options), options)
    except ValueError as error:
        sys.exit(str(error))
