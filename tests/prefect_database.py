"""An empty database of Prefect's server, made once for an environment: its migrations take half of a server's start."""

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

MAKE = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


def put_empty_database(path: Path) -> None:
    """Put it at *path*, unless something is there. Processes that need the first one wait for who makes it."""
    if path.exists():
        return
    kept = Path(sys.prefix, f"prefect-{version('prefect')}.db")
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            part = kept.with_suffix(".part")
            part.unlink(missing_ok=True)
            environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{part}"}
            subprocess.run([sys.executable, "-c", MAKE], env=environment, check=True)
            part.rename(kept)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(kept, path)
    path.chmod(0o600)
