"""What runs the tasks of a flow, as its configuration says."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flows.groups import Groups
from flows.order import Runner
from flows.stages import PrefectTasks
from tasks.models import BuildConfig


def runner_of(config: BuildConfig) -> AbstractContextManager[Runner]:
    """The runner of a build: threads of this process, workers of a pool, or a Ray cluster."""
    match config.runner:
        case "threads":
            return PrefectTasks(config.workers)
        case "groups":
            return Groups(config)
        case "ray":
            from flows.on_ray import RayTasks

            return RayTasks(config)
