"""Groups: parts of a build for other processes. The work of a group is an object in the store, its report another."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from pydantic import Field, JsonValue, ValidationError

from flat_tokens.stores import signing
from flat_tokens.stores.store import Store, read_json
from flat_tokens.tools.terminal import plain
from tasks.config import available_cores
from tasks.faults import faults_of
from tasks.locations import Output
from tasks.models import FORMAT_SEMANTICS, Model, digest_of
from tasks.output.leases import Workspace
from tasks.output.paths import GROUPS
from tasks.output.pointer import read_pointer
from tasks.progress import Done, meter, repeating

READERS = 16
LASTING = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, ImportError, FileNotFoundError, PermissionError)
"""Errors that another try would meet again: bad input, faults of ours, files and packages that a machine does not have."""


class GroupStep(Model):
    """A stage by its name, and what all items of the group share in it, as JSON."""

    stage: str
    shared: tuple[JsonValue, ...]


class Group(Model):
    """Items to take through some steps, for a process of its own: the same work, the same digest. ``keeps``, ``room``: as of the
    workspace of the build. ``labels``: the items, as people see them.
    """

    output: Output
    scratch: str | None
    keeps: bool
    room: int | None
    workers: int | None
    report_seconds: float
    steps: tuple[GroupStep, ...] = Field(min_length=1)
    items: tuple[JsonValue, ...]
    labels: tuple[str, ...] = Field(min_length=1)
    semantics: str = FORMAT_SEMANTICS

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json", exclude={"keeps", "room"}))  # which change from run to run, and no result

    @property
    def stage(self) -> str:
        """The name of the first stage."""
        return self.steps[0].stage

    def place(self, attempt: Workspace) -> Workspace:
        """The place that an attempt at the group writes to."""
        return attempt._replace(keeps=self.keeps, room=self.room)

    @property
    def label(self) -> str:
        first, last = self.labels[0], self.labels[-1]
        return first if len(self.labels) == 1 else f"{first} to {last} ({len(self.labels)})"


class GroupFault(Model):
    """Why a group failed. ``may_pass``: another try may do better."""

    kind: str
    message: str
    may_pass: bool


class Report(Model):
    """The progress of a process with a group: rewritten every few seconds, and at the end with results or a fault."""

    host: str
    process: int
    number: int
    """Counts up: a report that stays the same is that of a dead process."""
    done: Done
    under_way: tuple[str, ...]
    fault: GroupFault | None = None
    results: tuple[JsonValue, ...] | None = None


def put_group(root: Store, group: Group) -> str:
    """Store a group under its digest, unless it is there. Return the digest."""
    digest = group.digest
    here = root / GROUPS / digest
    if signing.keys() or not here.exists("group.json"):
        here.put("group.json", group.model_dump_json().encode())
    return digest


def read_group(root: Store, digest: str) -> Group:
    """The group of that digest. FileNotFoundError if it is not there; ValueError if it is damaged or of another release."""
    key = f"{GROUPS}/{digest}/group.json"
    facts = read_json(root, key)
    if not signing.keys() and root.exists(key + signing.SIGNATURE):
        raise ValueError(f"the build signs, but {platform.node()} has no key. Set {signing.KEY_FILE} on every worker.")
    if (theirs := facts.get("semantics")) != FORMAT_SEMANTICS:
        raise ValueError(
            f"the build stores tokens by semantics {theirs}, this worker by {FORMAT_SEMANTICS}. Update the older one."
        )
    if "steps" not in facts:
        raise ValueError("the build hands out groups in another form than this worker reads. Update the older one.")
    try:
        group = Group.model_validate(facts)
    except ValidationError as error:
        raise ValueError(f"{root.path(key)} is damaged: {faults_of(error, Group)[0]}. Run the build again.") from error
    if group.digest != digest:
        raise ValueError(f"{root.path(key)} does not have its own digest. Run the build again.")
    return group


def check_seen(root: Store) -> None:
    """ValueError if this machine sees no dataset at an output, so that a build can hardly have ended there."""
    if read_pointer(root).version is None:
        raise ValueError(
            f"{platform.node()} sees neither the build nor a dataset at {root.url}. Put the output where every worker sees it: "
            "a shared file system or an object store."
        )


def read_report(root: Store, digest: str, run: str) -> Report | None:
    """The last report of a run on a group; None if there is none yet, or none that can be trusted."""
    try:
        facts = read_json(root, f"{GROUPS}/{digest}/{run}.json")
        return Report.model_validate(facts) if facts.pop("sha256") == digest_of(facts) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def are_there(root: Store, names: Iterable[str]) -> bool:
    """Whether an output has all objects of these names: garbage may have been collected since a report of them."""
    with ThreadPoolExecutor(READERS) as readers:
        return all(readers.map(root.exists, names))


def forget(root: Store, digest: str) -> None:
    """Remove a group whose results have been used."""
    root.remove(f"{GROUPS}/{digest}")
    if root.is_local:
        with suppress(OSError):  # others are there
            os.rmdir(root.path(GROUPS))


@contextmanager
def reporting(root: Store, group: Group, run: str) -> Iterator[list[JsonValue]]:
    """Report on a group every few seconds until the block ends, then how it ended. The block appends to the list the result of
    each item, in the group's order.
    """
    results: list[JsonValue] = []
    digest, numbers = group.digest, itertools.count(1)

    def report(fault: GroupFault | None = None, *, is_done: bool = False) -> None:
        done = len(results)
        progress = Report(
            host=platform.node(),
            process=os.getpid(),
            number=next(numbers),
            done=meter.read().done,
            under_way=group.labels[done : done + 2 * (group.workers or available_cores())],
            fault=fault,
            results=tuple(results) if is_done else None,
        )
        facts = progress.model_dump(mode="json")
        (root / GROUPS / digest).put(f"{run}.json", json.dumps({"sha256": digest_of(facts), **facts}).encode())

    def report_again() -> None:
        # A report that does not get through is missed by nobody if the next one does.
        with suppress(Exception):
            report()

    report()
    try:
        with repeating(group.report_seconds, report_again, "report"):
            yield results
    except Exception as error:
        report(GroupFault(kind=type(error).__name__, message=plain(str(error)), may_pass=not isinstance(error, LASTING)))
        raise
    report(is_done=True)
