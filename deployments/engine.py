"""``python -m prefect.engine``, the process of a group, which begins and ends sooner. worker.py starts ``engine.py CHECKOUT``, or
``engine.py CHECKOUT spare`` before there is a group (spare.py).

- It has no Prefect heartbeats, whose thread keeps a run from ending for up to a second. Runs send their own
  (flows/watch/progress.py).
- Python looks for cycles less often, which takes a tenth of the time of imports.
- The interpreter is not taken apart at the end, which takes half a second.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from contextlib import suppress

NEW_OBJECTS = 100_000
"""As in flows/__main__.py."""
OF_A_GROUP = (
    "prefect._internal.metrics",
    "prefect.deployments.steps.core",
    "prefect.flow_engine",
    "prefect.task_engine",
    "flows.groups",
    "pyarrow.parquet",
    "gigatoken",
    "tiktoken",
)
"""Modules that a group imports, directly or not."""

ended_well = False


def end_at_once() -> None:
    """End the process, if its run has ended well. This is the last of what is done at the end, as it was registered first."""
    if ended_well:
        with suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def wait_for_a_group(checkout: str) -> None:
    """Import what groups of *checkout* need, and wait until the worker says which one it is.

    The worker sends one line of JSON. If none comes, it has ended or has no use for this process, which ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    sys.path.insert(0, checkout)
    for name in OF_A_GROUP:
        with suppress(ImportError):  # the group will say so, if it needs it
            importlib.import_module(name)
    sys.path.remove(checkout)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit()
    group = json.loads(line)
    os.environ.update(group["environment"])
    os.chdir(group["directory"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    atexit.register(end_at_once)
    gc.set_threshold(NEW_OBJECTS)
    if sys.argv[2:] == ["spare"]:
        wait_for_a_group(checkout=sys.argv[1])
    del sys.argv[1:]  # which run it is is in the environment
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    sys.modules.pop("prefect.engine", None)  # it begins as the main module
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    ended_well = True
