"""Builds in forks of a process that has everything imported: a fork takes milliseconds where a start takes a second.

``python -m tests.faults.forked kill SETTINGS TEMPLATE WORK FIRST STEP``: build over a copy of TEMPLATE and die at mutation
FIRST, then FIRST + STEP and so on until a build comes to its end; after each death look around and build again.
``python -m tests.faults.forked together SETTINGS [SETTINGS ...]``: all of these builds at once, behind a barrier.

What came of each is a line of JSON. This process starts no thread, so its forks are whole.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flat_tokens
import tasks.shards.write
from tests.faults.support import Settings, build_here, pointer, receipts, staged, version_digests

MUTATIONS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}


def die_at(mutation: int, root: str) -> None:
    """Kill this process right before the store is changed for the *mutation*-th time, counted from 1; a write is done by half."""
    count = itertools.count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        makes_file = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event not in MUTATIONS and not makes_file:
            return
        on_store = isinstance(arguments[0], int) or os.fspath(arguments[0]).startswith(root)
        if on_store and next(count) == mutation:
            die()

    real_write = os.write

    def write(fd: int, data: memoryview) -> int:
        if next(count) == mutation:
            real_write(fd, data[: len(data) // 2])
            die()
        return real_write(fd, data)

    sys.addaudithook(watch)
    os.write = write


def look_and_build(settings: Settings) -> dict[str, Any]:
    """What a reader sees after the death of a build; then build again, and what that came to."""
    root = Path(settings["output"])
    seen = flat_tokens.verify(root, "full")
    finished = receipts(root)
    tokenized = []
    real = tasks.shards.write.tokenize_slice

    def tokenize(part: Any, recipe: Any) -> Any:
        shard = real(part, recipe)
        tokenized.append(shard.key)
        return shard

    tasks.shards.write.tokenize_slice = tokenize
    result = build_here(settings, 1)
    return {
        "seen": Path(seen.path).name,
        "tokenized": sorted(tokenized),
        "finished": sorted(finished),
        "slices": result.slices,
        "slices_reused": result.slices_reused,
        "version": result.version,
        "pointer": pointer(root),
        "link": os.readlink(root / "latest"),
        "digests": version_digests(root, result.version),
        "versions": sorted(os.listdir(root / "versions")),
        "staged": staged(root),
        "beside": sorted(os.listdir(root)),
    }


class Child:
    """A fork that runs *work*; its result, or the error that it raised, as JSON."""

    def __init__(self, work: Callable[[], Any]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            self._result = open(read, "rb")  # noqa: SIM115  closed by result()
            return
        os.close(read)
        try:
            message = {"result": work()}
        except Exception as error:
            message = {"error": str(error), "kind": type(error).__name__, "traceback": traceback.format_exc()}
        with open(write, "w") as out:
            json.dump(message, out)
        os._exit(0)

    def result(self) -> dict[str, Any] | None:
        """None where it was killed."""
        with self._result:
            message = self._result.read()
        _, status = os.waitpid(self.pid, 0)
        return json.loads(message) if os.waitstatus_to_exitcode(status) == 0 else None


def kill(settings: Settings, template: Path, work: Path, first: int, step: int) -> None:
    for mutation in itertools.count(first, step):
        root = work / str(mutation)
        shutil.copytree(template, root, symlinks=True)
        here = {**settings, "output": str(root)}

        def build_and_die(here: Settings = here, mutation: int = mutation) -> None:
            die_at(mutation, here["output"])
            build_here(here, 1)

        died = Child(build_and_die).result() is None
        outcome = Child(lambda here=here: look_and_build(here)).result()
        print(json.dumps({"mutation": mutation, "died": died, **(outcome or {})}), flush=True)
        shutil.rmtree(root)
        if not died:
            return


def together(several: list[Settings]) -> None:
    """All builds wait for the same pipe to be closed."""
    read, write = os.pipe()

    def wait_and_build(settings: Settings) -> dict[str, Any]:
        os.close(write)
        os.read(read, 1)
        result = build_here(settings)
        return {"version": result.version, "sequence": result.sequence}

    children = [Child(lambda settings=settings: wait_and_build(settings)) for settings in several]
    os.close(write)
    for child in children:
        print(json.dumps(child.result()), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["kill", settings, template, work, first, step]:
            kill(json.loads(settings), Path(template), Path(work), int(first), int(step))
        case ["together", *several]:
            together([json.loads(settings) for settings in several])
