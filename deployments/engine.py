"""``python -m prefect.engine``, the process of a run, without Prefect's heartbeats: their thread keeps a run from ending for up
to a second, which is much for a small group of slices. Runs send their own (flows/watch/progress.py). worker.py starts it.
"""

import runpy

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

if __name__ == "__main__":
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
