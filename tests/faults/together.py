"""Builds at the same moment: ``python -m tests.faults.together SETTINGS [SETTINGS ...]``. What came of each is a line of JSON."""

import json
import os
import sys
from typing import Any

from tests.faults.inject import Child
from tests.faults.support import Settings, build_here


def together(several: list[Settings]) -> list[dict[str, Any]]:
    """All builds wait for the same pipe to be closed. This process starts no thread, so its forks are whole."""
    read, write = os.pipe()

    def wait_and_build(settings: Settings) -> dict[str, Any]:
        os.close(write)
        os.read(read, 1)
        try:
            result = build_here(settings)
        except (ValueError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"result": {"version": result.version, "sequence": result.sequence}}

    children = [Child(lambda settings=settings: wait_and_build(settings)) for settings in several]  # type: ignore[misc]
    os.close(write)
    return [ended.value or {"traceback": ended.error} for ended in [child.ended() for child in children]]


if __name__ == "__main__":
    for outcome in together([json.loads(settings) for settings in sys.argv[1:]]):
        print(json.dumps(outcome))
