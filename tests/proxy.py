"""A reverse HTTP proxy for tests: it delays, counts and spoils what passes between a client and a server on loopback."""

import asyncio
import contextlib
import io
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from yarl import URL

MANY_FAULTS = {"429": 0.045, "503": 0.045, "reset": 0.04, "half": 0.04, "half upload": 0.025, "stall": 0.005, "lost": 0.02}
"""A fifth of all requests spoiled, and of another fiftieth the acknowledgement lost."""


def at_random(seed: int, shares: Mapping[str, float] = MANY_FAULTS) -> Callable[[str, str], str | None]:
    """A rule for ``Proxy.spoil``: each fault with its share of the requests."""
    dice, kinds, weights = random.Random(seed), [*shares, None], [*shares.values(), 1 - sum(shares.values())]
    return lambda method, path: dice.choices(kinds, weights)[0]


@dataclass
class Proxy:
    """What passed, and the rule for what passes next.

    *spoil* is asked about each request (method, path) and says what happens to it: None, or the name of a fault.
    ``"429"``, ``"500"``, ``"503"``, ``"403"``: answered so, ``"reset"``: the connection is cut; the server never sees it.
    ``"lost"``: the server does it, the connection is cut before the answer. ``"half"``: half of the answer, then a cut.
    ``"half upload"``: the server gets half of the body, then a cut. ``"stall"``: nothing for *stall_seconds*, then a cut.
    ``"twice"``: the server does it twice, and answers the second time. ``"kill"``: the server does it, then *kill* is called.
    *conditions*: answer ``ifGenerationMatch`` of Google Cloud Storage here, for an emulator that does not know it.
    """

    url: str = ""
    delay: float = 0.0
    stall_seconds: float = 5.0
    spoil: Callable[[str, str], str | None] = lambda method, path: None
    left: list[str] = field(default_factory=list)
    """Faults of the next requests, from the last on, before *spoil* is asked."""
    kill: Callable[[], None] = lambda: None
    conditions: bool = False
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path with query, ``Range`` header of each request, in order."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes that were answered of each object, by the last part of its path."""
    faults: list[str] = field(default_factory=list)

    def calm(self) -> None:
        """Spoil nothing from now on."""
        self.spoil = lambda method, path: None

    waiting: int = 0
    most_waiting: int = 0
    """The largest number of requests that waited for their answers at one time."""
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by requests with a condition, so that nothing changes between the look and the write."""


@contextlib.contextmanager
def serving_app(app: web.Application) -> Iterator[str]:
    """Let an application answer on loopback, in a thread of its own, until the block ends. Its URL."""
    started, ended, found = threading.Event(), asyncio.Event(), list[Any]()

    async def serve() -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.extend([asyncio.get_running_loop(), runner.addresses[0][1]])
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    if not started.wait(30):
        raise TimeoutError("the application did not start")
    try:
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        found[0].call_soon_threadsafe(ended.set)
        thread.join(30)


@contextlib.contextmanager
def proxy(upstream: str, delay: float = 0.0) -> Iterator[Proxy]:
    """A proxy before *upstream* (``http://127.0.0.1:port``)."""
    state, app = Proxy(delay=delay), web.Application(client_max_size=1 << 34)

    async def connect(_: web.Application) -> AsyncIterator[None]:
        # Answers pass as they are: neither decompressed nor with a ceiling on connections.
        # Nothing is added to requests, either: they may be signed.
        async with aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            skip_auto_headers=("Content-Type", "User-Agent", "Accept"),
        ) as session:
            app.router.add_route("*", "/{path:.*}", partial(_pass_on, state=state, upstream=upstream, session=session))
            yield

    app.cleanup_ctx.append(connect)
    with serving_app(app) as state.url:
        yield state


async def _pass_on(request: web.Request, state: Proxy, upstream: str, session: aiohttp.ClientSession) -> web.StreamResponse:
    state.requests.append((request.method, request.raw_path, request.headers.get("Range", request.headers.get("x-ms-range", ""))))
    state.waiting += 1
    state.most_waiting = max(state.most_waiting, state.waiting)
    try:
        body = await request.read()
        await asyncio.sleep(state.delay)
        fault = state.left.pop() if state.left else state.spoil(request.method, request.raw_path)
        if fault is not None:
            state.faults.append(fault)
        if fault is not None and fault.isdigit():
            code = "AccessDenied" if fault == "403" else "SlowDown"
            return web.Response(
                status=int(fault),
                text=f"<Error><Code>{code}</Code><Message>not now</Message></Error>",
                content_type="application/xml",
            )
        if fault == "stall":
            await asyncio.sleep(state.stall_seconds)
        if fault in ("reset", "stall"):
            return _cut(request)
        if fault == "half upload":
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await _forward(request, _half(body), upstream, session)
            return _cut(request)
        for _ in range(2 if fault == "twice" else 1):
            async with (
                state.one_by_one if state.conditions and "ifGenerationMatch" in request.query else contextlib.nullcontext()
            ):
                if state.conditions and not await _is_met(request, body, upstream, session):
                    status, kept, data = 412, {"Content-Type": "application/json"}, b'{"error": {"message": "conditionNotMet"}}'
                else:
                    status, kept, data = await _forward(request, body, upstream, session)
        state.sent[request.path.rpartition("/")[2]] += len(data)
        if fault == "kill":
            state.kill()
        if fault in ("lost", "kill"):
            return _cut(request)
        if request.method != "HEAD":
            kept["Content-Length"] = str(len(data))
        response = web.StreamResponse(status=status, headers=kept)
        with contextlib.suppress(ConnectionError):  # the client may have seen enough
            await response.prepare(request)
            if request.method != "HEAD":
                await response.write(data[: len(data) // 2] if fault == "half" else data)
                if fault == "half":
                    return _cut(request, response)
                await response.write_eof()
        return response
    finally:
        state.waiting -= 1


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionResetError


async def _forward(
    request: web.Request, body: bytes | AsyncIterator[bytes], upstream: str, session: aiohttp.ClientSession
) -> tuple[int, dict[str, str], bytes]:
    """The server's answer: status, headers, body."""
    headers = {k: v for k, v in request.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
    async with session.request(
        request.method,
        URL(f"{upstream}{request.raw_path}", encoded=True),
        headers=headers,
        data=(io.BytesIO(body) if isinstance(body, bytes) else body) if request.body_exists else None,
        allow_redirects=False,
    ) as answer:
        dropped = ("transfer-encoding", "connection", "server", "date")
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in dropped}
        return answer.status, kept, await answer.read()


async def _is_met(request: web.Request, body: bytes, upstream: str, session: aiohttp.ClientSession) -> bool:
    """Whether an object has the generation that an upload makes a condition; 0 where there must be none."""
    wanted = request.query.get("ifGenerationMatch")
    if wanted is None:
        return True
    # The name stands in the query, or in the first part of the body.
    name = request.query.get("name") or json.loads(body.split(b"\n\n")[1].partition(b"\n--")[0])["name"]
    bucket = request.path.split("/")[-2]
    async with session.get(f"{upstream}/storage/v1/b/{bucket}/o/{quote(name, safe='')}") as answer:
        return wanted == ((await answer.json())["generation"] if answer.status == 200 else "0")


def _cut(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response or web.Response(status=500)
