"""A process that has imported what a group needs, and waits for one: imports take two seconds, which is as long as a small group
works. It is not a run before it is said to be one, so that no run waits here that another machine could take.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from anyio.abc import Process

ENGINE = Path(__file__).with_name("engine.py")
SPARE = "spare"
"""The word of the command that engine.py waits for."""
PACKAGES = ("flows", "tasks", "flat_tokens")
OF_A_RUN = "PREFECT__"
"""How the names of environment variables begin that tell a process which run it is. It reads them when the run begins."""
IDLE_SECONDS = 300.0

Open = Callable[..., AbstractAsyncContextManager[Process]]


class Kind(NamedTuple):
    """The settings that a process is begun with. A spare one is of use to a run that would have begun in the same way."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Without what is of one run."""
    options: Mapping[str, Any]
    """The process's settings, without its environment and directory."""
    changed_ns: int
    """When the newest module of the checkout was changed: what was imported before is not what a group should run."""

    @classmethod
    def of(cls, command: list[str], checkout: Path, *, env: Mapping[str, str], cwd: Any = None, **options: Any) -> Kind:
        environment = {name: value for name, value in env.items() if not name.startswith(OF_A_RUN)}
        return cls(tuple(command), environment, options, newest_change(checkout))


class Spare(NamedTuple):
    """A process that waits."""

    kind: Kind
    process: Process
    opened: AsyncExitStack
    """Ends the process when it is closed."""
    idle: asyncio.Task[None]
    """Ends it as well, when no group has come."""


def checkout_of(command: list[str]) -> Path | None:
    """The checkout that a group's process imports from, which its command names."""
    return Path(command[2]) if command[1:2] == [str(ENGINE)] and len(command) == 3 else None


def newest_change(checkout: Path) -> int:
    """When the newest module of a checkout was changed, in nanoseconds since 1970. A look takes a millisecond or two."""
    newest = 0
    for package in PACKAGES:
        for path in (checkout / package).rglob("*.py"):
            with suppress(FileNotFoundError):  # it has just gone
                newest = max(newest, path.stat().st_mtime_ns)
    return newest


@dataclass
class Spares:
    """At most one spare process of a worker, which *usual* opens: Prefect's own way to begin a process and to end it."""

    usual: Open
    waiting: Spare | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)

    @asynccontextmanager
    async def open(self, command: list[str], **options: Any) -> AsyncIterator[Process]:
        """A process for *command*. ``PYTHON engine.py CHECKOUT`` is the spare one, if it would have begun in the same way."""
        async with AsyncExitStack() as opened:
            checkout = checkout_of(command)
            if checkout is None:
                yield await opened.enter_async_context(self.usual(command, **options))
                return
            kind = Kind.of(command, checkout, **options)
            process = await self._taken(kind, opened, options)
            if process is None:
                process = await opened.enter_async_context(self.usual(command, **options))
            with suppress(OSError):  # the next one begins without
                await self._begin(kind)
            yield process

    async def close(self) -> None:
        """End the process that waits, if there is one."""
        spare, self.waiting = self.waiting, None
        if spare is not None:
            spare.idle.cancel()
            await spare.opened.aclose()

    async def _taken(self, kind: Kind, opened: AsyncExitStack, options: Mapping[str, Any]) -> Process | None:
        spare, self.waiting = self.waiting, None
        if spare is None:
            return None
        spare.idle.cancel()
        group = {"environment": dict(options["env"]), "directory": str(options.get("cwd") or Path.cwd())}
        if spare.kind != kind or spare.process.returncode is not None or spare.process.stdin is None:
            await spare.opened.aclose()
            return None
        opened.push_async_exit(spare.opened)
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):  # it has just died
            await spare.process.stdin.send(json.dumps(group).encode() + b"\n")
            return spare.process
        return None

    async def _begin(self, kind: Kind) -> None:
        async with self.lock:
            if self.waiting is None:
                opened = AsyncExitStack()
                begun = self.usual([*kind.command, SPARE], env=dict(kind.environment), **kind.options)
                process = await opened.enter_async_context(begun)
                self.waiting = Spare(kind, process, opened, asyncio.create_task(self._end_when_idle()))

    async def _end_when_idle(self) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        spare, self.waiting = self.waiting, None
        if spare is not None:
            await spare.opened.aclose()
