"""Groups: parts of a build for other processes. The work of a group is an object in the store, its report another."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field, JsonValue

from flat_tokens.stores.store import Store
from tasks.cores import available_cores
from tasks.models import FORMAT_SEMANTICS, Model, digest_of
from tasks.output.paths import GROUPS
from tasks.output.pointer import read_pointer
from tasks.output.staging import Place
from tasks.progress import Done, meter, repeating

READERS = 16

LASTING = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, ImportError, FileNotFoundError, PermissionError)
"""Errors that another try would meet again: bad input, faults of ours, files and packages that a machine does not have."""


class GroupStep(Model):
    """A stage by its name, and what all items of the group share in it, as JSON."""

    stage: str
    shared: tuple[JsonValue, ...]


class Group(Model):
    """Items to take through some steps, for a process of its own: the same work, the same digest. ``keep_files``: fetched
    files stay in the scratch directory, for others; without it they go with the group. ``labels``: the items, as people see
    them.
    """

    output: str
    scratch: str | None
    keep_files: bool
    workers: int | None
    report_seconds: float
    steps: tuple[GroupStep, ...] = Field(min_length=1)
    items: tuple[JsonValue, ...]
    labels: tuple[str, ...]
    semantics: str = FORMAT_SEMANTICS

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json"))

    @property
    def stage(self) -> str:
        """The name of the first stage."""
        return self.steps[0].stage

    def place(self, attempt: Place) -> Place:
        """The place that an attempt at the group writes to."""
        return attempt if self.keep_files else attempt.model_copy(update={"scratch": attempt.staging})

    @property
    def label(self) -> str:
        first, last = self.labels[0], self.labels[-1]
        return first if len(self.labels) == 1 else f"{first} to {last} ({len(self.labels)})"


class Fault(Model):
    """Why a group failed. ``may_pass``: another try may do better."""

    kind: str
    message: str
    may_pass: bool


class Report(Model):
    """How far a process has come with a group: written again and again, and at the end with results or a fault."""

    host: str
    process: int
    number: int = Field(description="Counts up: a report that stays the same is that of a dead process")
    done: Done
    under_way: tuple[str, ...]
    fault: Fault | None = None
    results: tuple[JsonValue, ...] | None = None


def put_group(root: Store, group: Group) -> str:
    """Store a group under its digest, unless it is there. Return the digest."""
    digest = group.digest
    key = f"{GROUPS}/{digest}/group.json"
    if not root.exists(key):
        root.put(key, group.model_dump_json().encode())
    return digest


def read_group(root: Store, digest: str) -> Group:
    """The group of that digest. FileNotFoundError where there is none (any more), ValueError where it is not what was stored,
    or of another release of this program.
    """
    facts = json.loads(root.read(f"{GROUPS}/{digest}/group.json"))
    if isinstance(facts, dict) and (theirs := facts.get("semantics")) != FORMAT_SEMANTICS:
        raise ValueError(
            f"the build stores tokens by semantics {theirs}, this worker by {FORMAT_SEMANTICS}. Update the older one."
        )
    if isinstance(facts, dict) and "steps" not in facts:
        raise ValueError("the build hands out groups in another form than this worker reads. Update the older one.")
    group = Group.model_validate(facts)
    if group.digest != digest:
        raise ValueError(f"{root.path(f'{GROUPS}/{digest}/group.json')} does not have its own digest. Run the build again.")
    return group


def check_seen(root: Store) -> None:
    """ValueError where this machine sees no dataset at an output, so that a build can hardly have ended there."""
    if read_pointer(root).version is None:
        raise ValueError(
            f"{platform.node()} sees neither the build nor a dataset at {root.url}. Put the output where every worker sees it: "
            "a shared file system or an object store."
        )


def put_report(root: Store, digest: str, run: str, report: Report) -> None:
    facts = report.model_dump(mode="json")
    root.put(f"{GROUPS}/{digest}/{run}.json", json.dumps({"sha256": digest_of(facts), **facts}).encode())


def read_report(root: Store, digest: str, run: str) -> Report | None:
    """The last report of a run on a group; None where there is none yet, or none that can be trusted."""
    try:
        facts: dict[str, Any] = json.loads(root.read(f"{GROUPS}/{digest}/{run}.json"))
        return Report.model_validate(facts) if facts.pop("sha256") == digest_of(facts) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def are_there(root: Store, names: Iterable[str]) -> bool:
    """Whether an output has all objects of these names: garbage may have been collected since a report told of them."""
    with ThreadPoolExecutor(READERS) as readers:
        return all(readers.map(root.exists, names))


def forget(root: Store, digest: str) -> None:
    """Remove a group whose results have been used."""
    root.remove(f"{GROUPS}/{digest}")
    if root.is_local:
        with contextlib.suppress(OSError):  # others are there
            os.rmdir(root.path(GROUPS))


class Reporter:
    """Writes the reports of one run on a group."""

    def __init__(self, root: Store, group: Group, run: str) -> None:
        self._root, self._group, self._run = root, group, run
        self._results: list[JsonValue] = []
        self._number = 0

    def add(self, result: JsonValue) -> None:
        """The next item, in the group's order, is done."""
        self._results.append(result)

    def report(self, fault: Fault | None = None, *, is_done: bool = False) -> None:
        """Write how far the group has come; at the end, its results."""
        self._number += 1
        done = len(self._results)
        report = Report(
            host=platform.node(),
            process=os.getpid(),
            number=self._number,
            done=meter.read().done,
            under_way=self._group.labels[done : done + 2 * (self._group.workers or available_cores())],
            fault=fault,
            results=tuple(self._results) if is_done else None,
        )
        put_report(self._root, self._group.digest, self._run, report)


@contextlib.contextmanager
def reporting(root: Store, group: Group, run: str) -> Iterator[Reporter]:
    """Report on a group every few seconds until the block ends, then how it ended."""
    reporter = Reporter(root, group, run)

    def report() -> None:
        # A report that does not get through is missed by nobody if the next one does.
        with contextlib.suppress(Exception):
            reporter.report()

    reporter.report()
    try:
        with repeating(group.report_seconds, report, "report"):
            yield reporter
    except Exception as error:
        reporter.report(Fault(kind=type(error).__name__, message=str(error), may_pass=not isinstance(error, LASTING)))
        raise
    reporter.report(is_done=True)
