"""``prefect server start`` for one machine: ``python deployments/server.py server start --port PORT [FD ...]``. The file
descriptors are those of sockets that listen at this port already.

Prefect 3.8 begins transactions that read and then write as readers. If another transaction wrote in between, SQLite refuses the
write at once ("database is locked"). Events are then lost, and clients retry after longer and longer pauses. Here transactions
begin as writers, and wait for each other.

Python's garbage collector frees a cursor in a cycle in any thread, and the cursor waits for its connection. The connection may
wait for the database, its writer for the event loop, and the event loop for the garbage collector. Then the server stands still
until SQLite's timeout of a minute. Here garbage is collected in a thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import hmac
import json
import os
import re
import socket
import sys
import threading
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout is not installed

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


def listen(port: int) -> list[socket.socket]:
    """Sockets at a port of loopback: of IPv4, and of IPv6 if this machine has it. ValueError if the port cannot be had."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"There is no port {port}.")
    sockets = []
    try:
        sockets.append(socket.create_server(("127.0.0.1", port)))
        sockets.append(socket.create_server(("::1", port), family=socket.AF_INET6))
    except OSError as error:
        if not sockets or error.errno == errno.EADDRINUSE:
            for one in sockets:
                one.close()
            remedy = "Stop what listens there, or choose another: --port."
            raise ValueError(f"Port {port} cannot be had ({os.strerror(error.errno or 0)}). {remedy}") from error
    return sockets


def own_address_only(app: Any, port: int) -> Any:
    """*app*, for its own pages alone. A request or websocket is refused if its Host is not a loopback name at *port* (a foreign
    name may resolve to this machine), if its Origin is not that Host, or if it is for a frame, in which another page could hide
    ours.
    """
    from starlette.responses import PlainTextResponse
    from starlette.websockets import WebSocketClose

    at = "" if port == 80 else f":{port}"  # browsers leave out 80
    own = [f"{name}{at}".encode() for name in ("localhost", "127.0.0.1", "[::1]")]
    frames = {(b"sec-fetch-dest", kind) for kind in (b"iframe", b"frame", b"embed", b"object")}
    refusal = PlainTextResponse(f"Only http://127.0.0.1{at} and its own pages are answered.\n", 403)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        given = [(name, value.lower()) for name, value in scope.get("headers", ())]
        hosts = [value for name, value in given if name == b"host"]
        allowed = {b"host": own, b"origin": [b"http://" + host for host in hosts]}
        others = [name for name, value in given if value not in allowed.get(name, [value])]
        is_own = len(hosts) == 1 and not others and frames.isdisjoint(given)
        refusals: dict[str, Any] = {} if is_own else {"http": refusal, "websocket": WebSocketClose(1008)}
        await refusals.get(scope["type"], app)(scope, receive, send)

    return answer


RUN_OF_DEPLOYMENT = re.compile(r"(/api)?/deployments/[0-9a-f-]{36}/create_flow_run")


def fault_of_run(body: bytes) -> str | None:
    """The fault of a request for a run of a build or refresh, as far as it is known before there is a run: a setting, a path, a
    tokenizer's name. None if there is none, or it is a request of another kind.
    """
    from tasks.download.sources import fault_of_config

    try:
        config = json.loads(body)["parameters"]["config"]
    except (ValueError, LookupError, TypeError):
        return None
    return fault_of_config(config) if isinstance(config, dict) else None


def faultless_runs_only(app: Any) -> Any:
    """*app*, whose runs of deployments are refused at once, with status 409 as by Prefect, if they could only fail."""
    from starlette.responses import JSONResponse

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not RUN_OF_DEPLOYMENT.fullmatch(scope["path"]):
            await app(scope, receive, send)
            return
        messages, body, more = [], b"", True
        while more:
            messages.append(message := await receive())
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if is_authorized(scope) and (fault := await asyncio.to_thread(fault_of_run, body)):
            detail = f"Error creating flow run: {fault}"
            await JSONResponse({"detail": detail, "exception_message": detail}, 409)(scope, receive, send)
            return
        before = iter(messages)

        async def receive_again() -> Any:
            return next(before, None) or await receive()

        await app(scope, receive_again, send)

    return answer


def is_authorized(scope: Any) -> bool:
    """Whether a request has the server's secret: nobody else learns which files there are."""
    secret = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "")
    wanted = b"Basic " + base64.b64encode(secret.encode())
    given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
    return bool(secret) and len(given) == 1 and hmac.compare_digest(given[0], wanted)


def run(port: int, sockets: list[socket.socket]) -> None:
    """Run the server until it is interrupted. ``prefect server start`` would ask people which profile to change."""
    import uvicorn
    from prefect.logging.configuration import setup_logging
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    import flows.watch  # noqa: F401  from here on records of logs are printable

    setup_logging()
    begin_as_writers()
    app = own_address_only(faultless_runs_only(create_app(final=True)), port)
    level = get_current_settings().server.logging_level.lower()
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, proxy_headers=False, log_level=level)).run(sockets)


if __name__ == "__main__":
    port, *passed = (int(one) for one in sys.argv[1:] if one.isdecimal())
    gc.disable()
    threading.Thread(target=collect_garbage, args=(threading.Event(),), name="garbage", daemon=True).start()
    run(port, [socket.socket(fileno=one) for one in passed] or listen(port))
