"""``prefect worker start`` which says of an outage of the server that there is one, and no more: ``python deployments/worker.py
worker start --pool POOL``.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

from prefect.cli import app

from flows.watch.outages import outages

if __name__ == "__main__":
    # Its runs have memory in large pages, as builds on the command line do (flows/__main__.py).
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    outages()
    app()
