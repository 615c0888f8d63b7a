"""The runner that a configuration chooses."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flows.pipelines.stages import Runner
from flows.runners.prefect_tasks import PrefectTasks
from flows.runners.work_pool import Groups
from tasks.config import BuildConfig


def runner_of(config: BuildConfig) -> AbstractContextManager[Runner]:
    """The runner of a build: threads of this process, workers of a pool, or a Ray cluster."""
    match config.runner:
        case "threads":
            return PrefectTasks(config.workers)
        case "groups":
            return Groups(config)
        case "ray":
            from flows.runners.ray_cluster import RayTasks

            return RayTasks(config)
