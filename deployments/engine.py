"""``python -m prefect.engine``, the process of a run, without Prefect's heartbeats: their thread keeps a run from ending for up
to a second, which is much for a small group of slices. Runs send their own (flows/watch/progress.py). Nor does Python look for
cycles as often as usual, which takes a tenth of the time of imports. worker.py starts it.
"""

import gc
import runpy

NEW_OBJECTS = 100_000
"""As in flows/__main__.py."""

if __name__ == "__main__":
    gc.set_threshold(NEW_OBJECTS)
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
