"""A runner that hands everything over as groups do, within this process."""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from flows.pipelines.build import BuildResult, build
from flows.pipelines.stages import Stage, Step, run_step, run_steps
from flows.runners.elsewhere import group_of, result_as_json, result_from_json, work_of
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.groups import Group
from tasks.output.leases import Workspace
from tasks.output.target import Target


class Elsewhere:
    """A runner that takes every item and every result through JSON, as groups do, and each by another thread."""

    workers: Literal["machines"] = "machines"

    def __init__(self, config: BuildConfig) -> None:
        self._config, self._pool = config, ThreadPoolExecutor(3)

    def window(self, stage: Stage) -> int:
        return 4

    def start(self, item: Any, *steps: Step) -> Future[Any]:
        if steps[0].stage.pool is None:
            return self._pool.submit(run_steps, item, steps)
        group = Group.model_validate_json(group_of(self._config, [item], steps).model_dump_json())
        (place,) = {getattr(one, "workspace", one) for one in steps[0].shared if isinstance(one, Workspace | Target)}
        return self._pool.submit(self._through, group, place)

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        return [run_step(step, item) for item in items]

    def _through(self, group: Group, place: Workspace) -> Any:
        (item,), steps = work_of(group, place)
        return result_from_json(steps, json.loads(json.dumps(result_as_json(steps, run_steps(item, steps)))))


def built(settings: dict[str, Any], workers: int | None = 1) -> BuildResult:
    """What settings give with threads, or, without a number of these, elsewhere."""
    config = BuildConfig.model_validate(settings)
    with Threads(workers or 1) as threads:
        return build(config, threads if workers else Elsewhere(config))
