"""Killed at any moment, an operation, an export or an import done again gives the same bytes; nobody sees half of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.forked_orders import Order, carry_out
from tests.faults.support import ROOT, digests
from tests.made import docs_of, publish_docs


class Calm(NamedTuple):
    """An order that nobody disturbed: what it is carried out over, what it made."""

    kind: str
    order: Order
    template: Path
    digests: dict[str, str]
    versions: list[str]


def calm(kind: str, work: Path) -> Calm:
    work.mkdir(parents=True)
    old = publish_docs(work / "template", docs_of([1], [2, 3]), docs_of([4], key=5))
    publish_docs(work / "more", docs_of(*[[i, i + 1] * (i % 3) for i in range(12)], key=50), docs_of([7, 8], key=9))
    template = work / "template"
    if kind == "export":
        template = work / "empty"
        template.mkdir()
        order: Order = {"dataset": str(work / "more"), "format": "megatron", "options": {"tokens_per_file": 10}}
        result = carry_out(kind, {**order, "output": str(work / "out")})
        whole = {name: digest for name, digest in digests(work / "out").items() if not name.startswith(".export/")}
        return Calm(kind, order, template, whole, [])
    if kind == "import":
        carry_out("export", {"dataset": str(work / "more"), "format": "datatrove", "options": {}, "output": str(work / "files")})
        order = {"path": str(work / "files")}
        result = carry_out("import", {**order, "output": str(work / "out")})
    else:
        operation = {"operation": kind}
        order = {"operation": operation, "inputs": ["OUTPUT", str(work / "more")] if kind == "merge" else [str(work / "more")]}
        inputs = [str(template) if path == "OUTPUT" else path for path in order["inputs"]]
        result = carry_out("derive", {**order, "inputs": inputs, "output": str(work / "out")})
    kind = "import" if kind == "import" else "derive"
    return Calm(kind, order, template, digests(Path(result["path"])), sorted([old, result["version"]]))


def killed_at(calm: Calm, work: Path, first: int, step: int) -> Iterator[dict[str, Any]]:
    arguments = [calm.kind, json.dumps(calm.order), str(calm.template), str(work), str(first), str(step)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.forked_orders", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        outcome = json.loads(line)
        assert "error" not in outcome, f"killed at mutation {outcome['mutation']}: {outcome['traceback']}"
        yield {**outcome, **outcome["result"]}


def check_kills(calm: Calm, work: Path, first: int, step: int) -> int:
    """The number of deaths, after each of which all is well."""
    work.mkdir()
    deaths = 0
    for outcome in killed_at(calm, work, first, step):
        where = f"killed at mutation {outcome['mutation']}"
        deaths += outcome["died"]
        assert outcome["digests"] == calm.digests, where
        assert outcome["staged"] == [], where
        assert outcome["nothing_left_to_do"], where
        assert outcome["versions"] == calm.versions, where
        if calm.kind == "export":  # what has a name is whole
            assert all(name in calm.digests for name in outcome["seen"]), where
        else:
            assert outcome["seen"] in calm.versions, where
    assert not outcome["died"]
    return deaths


@pytest.mark.parametrize(("kind", "step"), [("merge", 60), ("export", 30)])
def test_a_killed_order_goes_on(kind: str, step: int, tmp_path: Path) -> None:
    """A kill now and then over the whole length, of one kind that publishes a version and one that does not."""
    assert check_kills(calm(kind, tmp_path / "calm"), tmp_path / "work", 11, step) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merge", "shuffle", "import", "export"])
def test_every_mutation_of_the_store_may_be_the_last(kind: str, tmp_path: Path) -> None:
    assert check_kills(calm(kind, tmp_path / "calm"), tmp_path / "work", 1, 1) >= 30
