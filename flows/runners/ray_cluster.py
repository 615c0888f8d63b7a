"""A runner on a Ray cluster that is there: items of the stages that go to a pool are tasks of it, wherever there is room."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any, Literal, Self

from prefect import task

from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.pipelines.stages import ItemUnderWay, Stage, Step, run_steps
from flows.runners.elsewhere import group_of, work_of
from flows.runners.prefect_tasks import RETRIES, UNCACHED, PrefectTasks
from tasks.config import BuildConfig
from tasks.groups import Group
from tasks.output.leases import attempt
from tasks.output.places import scratch_of
from tasks.progress import meter

PACKAGES = {name.partition(".")[0] for name in (Store.__module__, Group.__module__, __name__)}
"""Packages that the cluster's machines need not have installed."""
FORWARDED = (
    "PREFECT_API_URL",
    "PREFECT_API_AUTH_STRING",
    "FLAT_TOKENS_CREDENTIALS",
    "FLAT_TOKENS_SIGNING_KEY_FILE",
    "FLAT_TOKENS_INPUT_ROOTS",
    "FLAT_TOKENS_OUTPUT_ROOTS",
    "TIKTOKEN_CACHE_DIR",
    "DO_NOT_TRACK",
)


@task(**RETRIES, **UNCACHED)
def work_there(label: str, group_json: str) -> Any:
    """Take an item through its steps wherever this runs. *group_json*: its group: Prefect looks for no futures in it."""
    group = Group.model_validate_json(group_json)
    root = Store.at(group.output)
    with credentials(), attempt(root, scratch_of(group, root), group.digest[:16]) as place:
        items, steps = work_of(group, group.place(place))
        pool = steps[0].stage.pool
        assert pool is not None  # or it would not be work for others
        with pool.around(items, *steps[0].shared):
            (item,) = items
            return run_steps(item, steps)


class _There:
    """An item on the cluster; its progress counts when it is done."""

    def __init__(self, future: Any, item: Any, stage: Stage) -> None:
        self._future, self._item, self._stage = future, item, stage

    def done(self) -> bool:
        return False  # no item waits there for another to be used

    def result(self) -> Any:
        result = self._future.result()
        assert self._stage.pool is not None
        meter.add(self._stage.name, *self._stage.pool.done(self._item, result))
        return result

    def cancel(self) -> bool:
        return False


class RayTasks(PrefectTasks):
    """Runs the stages that go to a pool on this machine's Ray cluster, all else here. ValueError without it or prefect-ray."""

    workers: Literal["machines"] = "machines"

    def __init__(self, config: BuildConfig) -> None:
        super().__init__(config.workers)
        self._config = config
        self._window = 0

    def window(self, stage: Stage) -> int:
        return self._window if stage.pool else super().window(stage)

    def start(self, item: Any, *steps: Step) -> ItemUnderWay:
        stage = steps[0].stage
        if stage.pool is None:
            return super().start(item, *steps)
        group = group_of(self._config, [item], steps)
        there = work_there.with_options(name=stage.name, task_run_name=f"{stage.name} {{label}}")
        return _There(self._ray.submit(there, {"label": group.label, "group_json": group.model_dump_json()}), item, stage)

    def __enter__(self) -> Self:
        try:
            # Optional packages: only builds on Ray need them.
            self._module: Any = importlib.import_module("ray")
            runner: Any = importlib.import_module("prefect_ray").RayTaskRunner
        except ImportError as error:
            raise ValueError(
                f"runner: ray needs prefect-ray ({error}). Install it: pip install prefect-ray, or set runner to threads."
            ) from error
        variables = {name: os.environ[name] for name in FORWARDED if name in os.environ}
        there = {
            "py_modules": [str(Path(str(sys.modules[name].__file__)).parent) for name in sorted(PACKAGES)],
            "env_vars": variables,
        }
        try:
            self._module.init(
                address="auto", namespace="prefect", log_to_driver=False, logging_level=logging.WARNING, runtime_env=there
            )
        except ConnectionError as error:
            raise ValueError(
                "runner: ray needs a Ray cluster that this machine is part of. Start one: ray start --head"
            ) from error
        self._window = 2 * int(self._module.cluster_resources().get("CPU", 1))
        self._ray: Any = runner(address="auto")
        self._ray.logger.setLevel(logging.WARNING)
        self._ray.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._ray.__exit__(*error)
        self._module.shutdown()
