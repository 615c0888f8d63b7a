"""``prefect server ...`` for SQLite under load: ``python deployments/server.py server start``. PostgreSQL needs none of this.

Prefect 3.8 begins transactions that read and then write as readers. Where another one wrote in between, SQLite refuses the
write at once ("database is locked"): events are lost, and clients try again after longer and longer pauses. Here they begin
as writers, and wait for each other.

A cursor in a cycle is freed by Python's garbage collector, in whichever thread that runs, and waits for its connection. Where
that one waits for the database, whose writer waits for the event loop, which is collecting garbage, all stand still until
SQLite's patience of a minute ends. Here garbage is collected in a thread that nobody waits for.
"""

from __future__ import annotations

import gc
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

COLLECT_SECONDS = 1.0
ALL_EVERY = 60


def collect_garbage(over: threading.Event) -> None:
    """Young objects every second, all of them every minute, until it is over."""
    rounds = 0
    while not over.wait(COLLECT_SECONDS):
        rounds += 1
        gc.collect(2 if rounds % ALL_EVERY == 0 else 1)


def begin_as_writers() -> None:
    """Have every transaction of SQLite's begin with its lock."""
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(self: Any, session: Any, with_for_update: bool = False) -> AbstractAsyncContextManager[Any]:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    gc.disable()
    threading.Thread(target=collect_garbage, args=(threading.Event(),), name="garbage", daemon=True).start()
    begin_as_writers()
    from prefect.cli import app

    app()
