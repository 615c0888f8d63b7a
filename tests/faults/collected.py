"""Collections of garbage in forks: ``python -m tests.faults.collected TEMPLATE WORK STEP``.

Over a copy of TEMPLATE each, a collection dies at the first change of the disk, at the one STEP after it and so on, until one
comes to its end. After each death: what readers see, and what a second collection leaves. A line of JSON for each.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tests.faults.forked import MUTATIONS, Child
from tests.faults.support import digests, pointer, receipts

EVERYTHING = Policy(keep_versions=1, grace_days=0)


def die_at(mutation: int) -> None:
    """Kill this process right before it changes any disk for the *mutation*-th time, counted from 1."""
    count = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        makes_file = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (event in MUTATIONS or makes_file) and next(count) == mutation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def look_and_collect(root: Path) -> dict[str, Any]:
    """Check every version that a reader can open, after a death; then collect again, and say what is left."""
    there = [version.name for version in sorted((root / "versions").iterdir()) if (version / "zarr.json").exists()]
    for version in there:
        flat_tokens.verify(root / "versions" / version, "full")
    before = Path(flat_tokens.verify(root, "full").path).name
    whole = [key for key in sorted(receipts(root)) if (root / "_cache" / key / "encoded_tokens" / "c" / "0").exists()]
    halves = sorted(receipts(root) - set(whole))
    collect(Store.at(root), EVERYTHING, delete=True)
    return {"seen": before, "there": there, "halves": halves, "pointer": pointer(root), "left": digests(root)}


def main(template: Path, work: Path, step: int) -> None:
    for mutation in itertools.count(1, step):
        root = work / str(mutation)
        shutil.copytree(template, root, symlinks=True)

        def collect_and_die(root: Path = root, mutation: int = mutation) -> None:
            store = Store.at(root)
            die_at(mutation)
            collect(store, EVERYTHING, delete=True)

        died = Child(collect_and_die).result() is None
        outcome = Child(lambda root=root: look_and_collect(root)).result()
        print(json.dumps({"mutation": mutation, "died": died, **(outcome or {})}), flush=True)
        shutil.rmtree(root)
        if not died:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
