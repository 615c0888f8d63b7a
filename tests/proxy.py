"""A reverse HTTP proxy for tests: it delays, counts and spoils what passes between a client and a server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web


@dataclass
class Proxy:
    """What passed, and the rule for what passes next.

    *spoil* is asked about each request (method, path) and says what happens to it: None, or the name of a fault.
    ``"429"``, ``"503"``: answered so, the server never sees it. ``"reset"``: the connection is cut, the server never sees it.
    ``"lost"``: the server does it, the connection is cut before the answer. ``"half"``: half of the answer, then a cut.
    ``"half upload"``: the server gets half of the body, then a cut. ``"stall"``: nothing for *stall_seconds*, then a cut.
    """

    url: str = ""
    delay: float = 0.0
    stall_seconds: float = 5.0
    spoil: Callable[[str, str], str | None] = lambda method, path: None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path with query, ``Range`` header of each request, in order."""
    faults: list[str] = field(default_factory=list)
    waiting: int = 0
    most_waiting: int = 0
    """The largest number of requests that waited for their answers at one time."""


@contextlib.contextmanager
def proxy(upstream: str, delay: float = 0.0) -> Iterator[Proxy]:
    """A proxy before *upstream* (``http://127.0.0.1:port``), on a port of its own, in a thread of its own."""
    state = Proxy(delay=delay)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    thread = threading.Thread(target=_run, args=(loop, state, upstream, started), daemon=True)
    thread.start()
    if not started.wait(30):
        raise TimeoutError("the proxy did not start")
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def _run(loop: asyncio.AbstractEventLoop, state: Proxy, upstream: str, started: threading.Event) -> None:
    asyncio.set_event_loop(loop)

    async def start() -> tuple[web.AppRunner, aiohttp.ClientSession]:
        # Answers pass as they are: neither decompressed nor with a ceiling on connections.
        session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=1 << 34)

        async def pass_on(request: web.Request) -> web.StreamResponse:
            return await _pass_on(request, state, upstream, session)

        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = runner.addresses[0]
        state.url = f"http://{address[0]}:{address[1]}"
        return runner, session

    runner, session = loop.run_until_complete(start())
    started.set()
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(session.close())
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _pass_on(request: web.Request, state: Proxy, upstream: str, session: aiohttp.ClientSession) -> web.StreamResponse:
    state.requests.append((request.method, request.raw_path, request.headers.get("Range", "")))
    state.waiting += 1
    state.most_waiting = max(state.most_waiting, state.waiting)
    try:
        body = await request.read()
        await asyncio.sleep(state.delay)
        fault = state.spoil(request.method, request.raw_path)
        if fault is not None:
            state.faults.append(fault)
        if fault in ("429", "503"):
            return web.Response(status=int(fault), text="<Error><Code>SlowDown</Code></Error>", content_type="application/xml")
        if fault == "stall":
            await asyncio.sleep(state.stall_seconds)
        if fault in ("reset", "stall"):
            return _cut(request)
        if fault == "half upload":
            await _send_half(request, upstream, body)
            return _cut(request)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
        async with session.request(
            request.method, f"{upstream}{request.raw_path}", headers=headers, data=body, allow_redirects=False
        ) as answer:
            data = await answer.read()
            if fault == "lost":
                return _cut(request)
            kept = {
                k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "connection", "server", "date")
            }
            if request.method != "HEAD":
                kept["Content-Length"] = str(len(data))
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            if request.method != "HEAD":
                await response.write(data[: len(data) // 2] if fault == "half" else data)
                if fault == "half":
                    return _cut(request, response)
                await response.write_eof()
            return response
    finally:
        state.waiting -= 1


def _cut(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=500)


async def _send_half(request: web.Request, upstream: str, body: bytes) -> None:
    host, _, port = upstream.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"{request.method} {request.raw_path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    writer.write(head.encode() + b"\r\n" + body[: len(body) // 2])
    await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
