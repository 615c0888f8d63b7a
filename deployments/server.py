"""``prefect server ...`` for SQLite under load: ``python deployments/server.py server start``. PostgreSQL does not need this.

Prefect 3.8 begins transactions that read and then write as readers. If another transaction wrote in between, SQLite refuses the
write at once ("database is locked"). Events are then lost, and clients retry after longer and longer pauses. Here transactions
begin as writers, and wait for each other.

Python's garbage collector frees a cursor in a cycle in any thread, and the cursor waits for its connection. The connection may
wait for the database, its writer for the event loop, and the event loop for the garbage collector. Then the server stands still
until SQLite's timeout of a minute. Here garbage is collected in a thread that nobody waits for.
"""

from __future__ import annotations

import gc
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

COLLECT_SECONDS = 1.0
ALL_EVERY = 60


def collect_garbage(over: threading.Event) -> None:
    """Collect young objects every second and all objects every minute, until *over* is set."""
    rounds = 0
    while not over.wait(COLLECT_SECONDS):
        rounds += 1
        gc.collect(2 if rounds % ALL_EVERY == 0 else 1)


def begin_as_writers() -> None:
    """Make every SQLite transaction take its lock when it begins."""
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
