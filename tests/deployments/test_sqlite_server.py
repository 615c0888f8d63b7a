"""The server that make serve starts: transactions on SQLite wait for each other, garbage goes without stopping anybody."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from deployments.server import collect_garbage

ROOT = Path(__file__).parents[2]

COUNT = """
import asyncio, sys
import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration
from deployments.server import begin_as_writers

ours = sys.argv[2] == "ours"

async def main():
    all_have_read = asyncio.Barrier(4)
    database = AioSqliteConfiguration(connection_url=f"sqlite+aiosqlite:///{sys.argv[1]}")
    engine = await database.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("create table counter as select 0 as n"))

    async def count():
        async with await database.session(engine) as session, database.begin_transaction(session):
            n = (await session.execute(sa.text("select n from counter"))).scalar()
            await (asyncio.sleep(0.05) if ours else all_have_read.wait())
            await session.execute(sa.text("update counter set n = :n"), {"n": n + 1})

    done = await asyncio.gather(*(count() for _ in range(4)), return_exceptions=True)
    print(sum(isinstance(one, Exception) for one in done))

if ours:
    begin_as_writers()
asyncio.run(main())
"""


def failures(database: Path, whose: str) -> int:
    """How many of four transactions fail that read, and then write."""
    command = [sys.executable, "-W", "ignore", "-c", COUNT, str(database), whose]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_transactions_that_read_and_then_write_wait_for_each_other(tmp_path):
    assert failures(tmp_path / "ours.db", "ours") == 0


@pytest.mark.slow
def test_prefects_own_still_fail_so_that_this_is_needed(tmp_path):
    """When this fails, Prefect has mended it, and deployments/server.py may go."""
    assert failures(tmp_path / "prefects.db", "Prefect's") > 0


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_beside_the_work():
    enabled, over = gc.isenabled(), threading.Event()
    gc.disable()
    thread = threading.Thread(target=collect_garbage, args=(over,))
    try:
        thread.start()
        gone = weakref.ref(_Cycle())
        until = time.monotonic() + 60
        while gone() is not None:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        over.set()
        thread.join()
        if enabled:
            gc.enable()
