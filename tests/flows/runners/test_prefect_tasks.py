"""Tasks of a run that people watch: none of them waits for the server."""

from typing import Any

import httpx
import pytest
from prefect import flow, tags
from prefect.context import TaskRunContext

from flows.pipelines.stages import Stage, in_order
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.progress import flow_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def tags_of_task(_: int) -> list[str]:
    context = TaskRunContext.get()
    return context.task_run.tags


def test_tasks_of_a_run_with_tags_ask_the_server_for_nothing(monkeypatch):
    """Prefect asks before each task with tags how many such tasks may run at once, and on SQLite is often told to come back."""
    asked = []
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def noted(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return await send(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", noted)

    @flow(persist_result=False)
    def order() -> tuple[list[str], list[Any]]:
        with PrefectTasks(2) as runner:
            return flow_run().tags, list(in_order(runner, range(4), Stage("work", tags_of_task, str, retries=False).given()))

    with tags("of-the-run"):
        of_the_run, of_tasks = order()
    assert of_the_run == ["of-the-run"]
    assert of_tasks == [[]] * 4
    assert not [path for path in asked if "concurrency" in path]
