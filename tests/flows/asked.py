"""What a test's Prefect server has."""

from collections.abc import Callable
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from tests.processes import until


def on_prefect_server(test: Callable[..., None]) -> Callable[..., None]:
    """A slow test that needs the server."""
    return pytest.mark.slow(pytest.mark.usefixtures("prefect_server")(test))


def ask(path: str, **body: Any) -> Any:
    """The answer to a request. The client's own methods send filters that are null, which the server refuses."""
    with get_client(sync_client=True) as client:
        return client._client.post(path, json=body).raise_for_status().json()


def progress_of(run_id: Any) -> dict[str, tuple[float, str]]:
    """The progress that a run shows: shares and descriptions."""
    return {one["key"]: (float(one["data"]), one["description"]) for one in _left_by(run_id) if one["type"] == "progress"}


def _left_by(run_id: Any) -> list[dict[str, Any]]:
    return ask("/artifacts/filter", artifacts={"flow_run_id": {"any_": [str(run_id)]}}, limit=200)


class Seen:
    """What the server has of the one run with some tags, and of a name."""

    def __init__(self, *tags: str, name: str | None = None) -> None:
        some = {"tags": {"all_": list(tags)}} | ({"name": {"any_": [name]}} if name else {})
        (self.run,) = ask("/flow_runs/filter", flow_runs=some, limit=2)
        self.progress = progress_of(self.run["id"])
        self.shares = {key: share for key, (share, _) in self.progress.items()}
        self.texts = {one["key"]: one["data"] for one in _left_by(self.run["id"]) if one["type"] == "markdown"}


def artifacts(key: str) -> list[tuple[str, str]]:
    """Descriptions and texts of the artifacts of that key, in the order in which they were made."""
    found = ask("/artifacts/filter", artifacts={"key": {"any_": [key]}})
    return [(one["description"], one["data"]) for one in sorted(found, key=lambda one: str(one["created"]))]


def task_runs(flow_run: str) -> dict[str, str]:
    """States of the task runs of the flow run of that name, by their names, once the server knows how it ended: it learns
    of tasks some time after they are done."""

    def states() -> dict[str, str]:
        found = ask("/task_runs/filter", flow_runs={"name": {"any_": [flow_run]}}, limit=200)
        return {run["name"]: run["state_name"] or "" for run in found}

    def has_ended() -> bool:
        return any(name.startswith("finalize") and state == "Completed" for name, state in states().items())

    until(has_ended, f"the server does not show the end of {flow_run!r}")
    return states()
