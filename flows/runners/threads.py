"""Running tasks on threads of this process, where no Prefect server watches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from tasks.config import BuildConfig
from tasks.cores import available_cores
from tasks.shards.write import make_shard, write_shard


class Threads:
    """A thread for every core keeps them all busy: engines and codecs work outside the interpreter's lock."""

    tokenizes_here = True

    def __init__(self, workers: int | None) -> None:
        workers = workers or available_cores()
        self.window = workers + 1
        self._pool = ThreadPoolExecutor(workers, "task")

    def start(self, function: Callable[..., Any], item: Any, *shared: Any) -> Future[Any]:
        if function is make_shard:
            shared = (*shared, write_shard)
        return self._pool.submit(function, item, *shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)


def threads_of(config: BuildConfig) -> Threads:
    """The runner of a build without a server. ValueError where its configuration wants one that needs a server."""
    if config.runner != "threads":
        raise ValueError(
            f"runner: {config.runner} needs a Prefect server. Set PREFECT_API_URL to that of one (make serve starts one), or "
            "stay on this machine alone: the configuration file with --set runner=threads."
        )
    return Threads(config.workers)
