"""Register work pools, deployments and automations with the Prefect server at PREFECT_API_URL; done again, they are updated.

``register.py [DATASET.yaml ...] [--cron "0 3 * * *"] [--timezone UTC] [--notify TYPE/NAME]``: each dataset gets a deployment
of its own that refreshes it, one run at a time; TYPE/NAME is a notification block that hears of runs that failed or crashed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

HERE = Path(__file__).parent
CHECKOUT = HERE.parent
sys.path[:0] = [str(HERE), str(CHECKOUT)]  # a checkout is not installed

from serve import arguments  # noqa: E402

from flows.cli import read_config  # noqa: E402


def read_deployments() -> list[dict[str, Any]]:
    """What prefect.yaml lists."""
    listed: list[dict[str, Any]] = yaml.safe_load((HERE / "prefect.yaml").read_text("utf-8"))["deployments"]
    return listed


def load_flow(deployment: dict[str, Any]) -> Flow[..., Any]:
    """The flow of a deployment; its own error where it cannot be loaded, instead of a placeholder."""
    return load_flow_from_entrypoint(str(CHECKOUT / deployment["entrypoint"]), use_placeholder_flow=False)


def dataset_deployment(path: Path, cron: str | None, timezone: str) -> dict[str, Any]:
    """A deployment that refreshes the dataset of a configuration file, on a schedule if one is given."""
    config = read_config(path, [])
    (refresh,) = (one for one in read_deployments() if one["name"] == "refresh")
    return {
        **refresh,
        "name": config.name,
        "description": f"Refreshes {config.output}, as {path.name} says; does nothing where nothing changed.",
        "tags": [*refresh["tags"], f"dataset:{config.name}"],
        "parameters": {"config": config.model_dump(mode="json", exclude_unset=True)},
        "schedules": [{"cron": cron, "timezone": timezone}] if cron else [],
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
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=one["cron"], timezone=one["timezone"]), active=one.get("active", True)
            )
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


def _block_id(client: SyncPrefectClient, notify: str) -> str:
    kind, _, name = notify.partition("/")
    try:
        return str(client.read_block_document_by_name(name, kind, include_secrets=False).id)
    except ObjectNotFound as error:
        raise SystemExit(f"There is no block {notify}. Create it in the UI under Blocks; --notify takes TYPE/NAME.") from error


def automate(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create an automation, or update those of its name."""
    there = client.read_automations_by_name(automation.name)
    for one in there:
        client.update_automation(one.id, automation)
    if not there:
        client.create_automation(automation)


def register_all(datasets: list[Path], cron: str | None, timezone: str, notify: str | None) -> None:
    """Register everything that this directory describes, and a refresh of each dataset."""
    listed = [*read_deployments(), *(dataset_deployment(path, cron, timezone) for path in datasets)]
    with get_client(sync_client=True) as client:
        automations = list(read_automations(client, notify))
        create_pools(client, listed)
        for deployment in listed:
            print(f"registered {register(client, deployment)}", flush=True)
        for automation in automations:
            automate(client, automation)


if __name__ == "__main__":
    options = arguments(str(__doc__)).parse_args()
    register_all(options.datasets, options.cron, options.timezone, options.notify)
