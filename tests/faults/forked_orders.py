"""Operations on datasets, exports and imports in forks that are killed: see ``forked``.

``python -m tests.faults.forked_orders KIND ORDER TEMPLATE WORK FIRST STEP``: carry the order out over a copy of TEMPLATE and
die at mutation FIRST, then FIRST + STEP and so on until it comes to its end; after each death look around and do it again.
What came of each is a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import flat_tokens
from flat_tokens.tools.export import export_of
from flows.pipelines.derive import derive
from flows.pipelines.export import export
from flows.pipelines.import_ import import_files
from flows.runners.threads import Threads
from tasks.derive.request import DeriveRequest, ImportRequest
from tests.faults.forked import Child, die_at
from tests.faults.support import digests, staged

Order = dict[str, Any]


def carry_out(kind: str, order: Order) -> dict[str, Any]:
    with Threads(1) as runner:
        if kind == "derive":
            return derive(DeriveRequest.model_validate(order), runner).model_dump(mode="json")
        if kind == "import":
            return import_files(ImportRequest.model_validate(order), runner).model_dump(mode="json")
        told = export_of(order["dataset"], order["format"], order["options"])
        return export(told, order["output"], runner).model_dump(mode="json")


def look_and_go_on(kind: str, order: Order) -> dict[str, Any]:
    """What a reader sees after a death; then the same order again, and what that came to."""
    root = Path(order["output"])
    if kind == "export":
        names = [path for path in root.rglob("*") if path.is_file() and ".export" not in path.parts]
        seen: Any = {path.relative_to(root).as_posix(): path.stat().st_size for path in names}
    else:
        seen = Path(flat_tokens.verify(root, "full").path).name if (root / "latest.json").exists() else None
    result = carry_out(kind, order)
    path = Path(result["path"])
    again = carry_out(kind, order)
    return {
        "seen": seen,
        "result": {name: fact for name, fact in result.items() if name not in ("totals", "seconds")},
        "digests": {name: digest for name, digest in digests(path).items() if not name.startswith(".export/")},
        "nothing_left_to_do": again.get("was_published", again.get("was_done")),
        "staged": [*staged(root), *map(str, root.glob(".export/staging/*"))],
        "versions": sorted(path.name for path in root.glob("versions/*")),
    }


def main(kind: str, order: Order, template: Path, work: Path, first: int, step: int) -> None:
    for mutation in itertools.count(first, step):
        root = work / str(mutation)
        shutil.copytree(template, root, symlinks=True)
        inputs = [str(root) if path == "OUTPUT" else path for path in order.get("inputs", [])]
        here = {**order, "output": str(root), **({"inputs": inputs} if inputs else {})}

        def go_and_die(here: Order = here, mutation: int = mutation) -> None:
            die_at(mutation, here["output"])
            carry_out(kind, here)

        died = Child(go_and_die).result() is None
        outcome = Child(lambda here=here: look_and_go_on(kind, here)).result()
        print(json.dumps({"mutation": mutation, "died": died, **(outcome or {})}), flush=True)
        shutil.rmtree(root)
        if not died:
            return


if __name__ == "__main__":
    kind, order, template, work, first, step = sys.argv[1:]
    main(kind, json.loads(order), Path(template), Path(work), int(first), int(step))
