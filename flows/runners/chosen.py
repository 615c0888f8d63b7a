"""The runner that a configuration chooses, with a Prefect server and without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flat_tokens.stores.store import Store
from flows.pipelines.stages import Runner
from flows.runners.processes import Threads
from tasks.config import BuildConfig


def runner_of(config: BuildConfig) -> AbstractContextManager[Runner]:
    """The runner of a build that a server watches: threads of this process, workers of a pool, or a Ray cluster."""
    from flows.runners.prefect_tasks import PrefectTasks  # here: a build without a server does not wait for Prefect
    from flows.runners.work_pool import Groups

    match config.runner:
        case "threads":
            return PrefectTasks(config.workers)
        case "groups":
            return Groups(config)
        case "ray":
            from flows.runners.ray_cluster import RayTasks  # an optional package

            return RayTasks(config)


@contextmanager
def watched_runner(config: BuildConfig) -> Iterator[Runner]:
    """Within a flow run: the runner of a build. People see its progress, and the page of the dataset at its end."""
    from flows.runners.receipts import results_from_receipts  # as above
    from flows.watch.page import watching
    from flows.watch.words import tags_of

    with (
        watching(config.name, config.output, tags_of(config)),
        results_from_receipts(Store.at(config.output)),
        runner_of(config) as runner,
    ):
        yield runner


@contextmanager
def runner_without_server(config: BuildConfig) -> Iterator[Runner]:
    """The runner of a build without a server. ValueError if its configuration wants one that needs a server."""
    if config.runner != "threads":
        raise ValueError(
            f"runner: {config.runner} needs a Prefect server. Set PREFECT_API_URL to that of one (make serve starts one), or "
            "stay on this machine alone: the configuration file with --set runner=threads."
        )
    with Threads(config.workers) as threads:
        yield threads
