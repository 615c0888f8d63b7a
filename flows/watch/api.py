"""The REST API of a Prefect server. Within a flow Prefect's own client asks it. A build that has nothing to do asks it without
Prefect: the import would take longer than all else.
"""

from __future__ import annotations

import importlib.metadata
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import httpx

SECONDS = 10.0


class Api(Protocol):
    """A client of the API, Prefect's or that of ``client_of``. Both raise httpx's errors."""

    def request(self, method: Any, path: Any, /, *, json: Any = None) -> httpx.Response: ...


class Run(NamedTuple):
    """A flow run, as the API reports it. ``began``: None if it is not known yet."""

    id: str
    name: str
    began: datetime | None


def ask(api: Api, method: str, path: str, json: Any = None) -> Any:
    """The answer to a request; None if it is empty. httpx.HTTPError if there is none, or it is a refusal."""
    answer = api.request(method, path, json=json).raise_for_status()
    return answer.json() if answer.content else None


def client_of(url: str, login: str) -> httpx.Client:
    """A client of the API at *url*. *login*: NAME:PASSWORD, or nothing."""
    name, _, password = login.partition(":")
    return httpx.Client(base_url=url, auth=(name, password) if login else None, timeout=SECONDS)


def is_of_this_release(api: Api) -> bool:
    """Whether the server answers, and is of the release of Prefect that is installed here. What others answer, Prefect knows."""
    try:
        return bool(ask(api, "GET", "/admin/version") == importlib.metadata.version("prefect"))
    except (httpx.HTTPError, ValueError):
        return False


def complete(api: Api, run_id: str, message: str) -> None:
    """End a run well."""
    ask(api, "POST", f"/flow_runs/{run_id}/set_state", {"state": {"type": "COMPLETED", "message": message}})


def put_artifact(api: Api, run_id: str, key: str, kind: str, data: str | float, description: str) -> str:
    """Leave an artifact of a run; its id."""
    body = {"key": key, "type": kind, "data": data, "description": description, "flow_run_id": run_id}
    return str(ask(api, "POST", "/artifacts/", body)["id"])


def parse_time(text: str | None) -> datetime | None:
    """A time of the API's."""
    return datetime.fromisoformat(text) if text else None
