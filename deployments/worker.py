"""``prefect worker start`` with memory as builds on the command line have it, and an outage of the server as one line:
``python deployments/worker.py worker start --pool POOL``.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from prefect.cli import app

from flows.__main__ import ARROW_MEMORY, C_MEMORY, TUNABLES, numpy_settings
from flows.watch.outages import TOLD_ELSEWHERE, outages
from tasks.locations import unbound

if __name__ == "__main__":
    if sys.platform == "linux":  # for its runs
        for name, value in {TUNABLES: C_MEMORY, **ARROW_MEMORY, **numpy_settings()}.items():
            os.environ.setdefault(name, value)
    if TOLD_ELSEWHERE not in os.environ and (warning := unbound()):  # make serve says it of its workers
        print(warning, file=sys.stderr, flush=True)
    outages()
    app()
