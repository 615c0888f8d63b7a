"""Groups: parts of a build for other processes. What is to be done is an object in the store, what became of it another."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.stores.store import Store
from tasks.config import Source
from tasks.cores import available_cores
from tasks.download.cut import CutFile
from tasks.models import FORMAT_SEMANTICS, FoundFile, Model, Slice, TokenShard, digest_of
from tasks.output.paths import GROUPS, receipt_key, version_key
from tasks.output.pointer import read_pointer
from tasks.output.staging import Place
from tasks.progress import Done, meter
from tasks.shards.recipe import Recipe
from tasks.split.rule import SplitRule
from tasks.split.spans import Span
from tasks.split.write import Written
from tasks.tokenize.tokenizers import load_tokenizer

READERS = 16

LASTING = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, ImportError, FileNotFoundError, PermissionError)
"""Errors that another try would meet again: bad input, faults of ours, files and packages that a machine does not have."""


class Files(Model):
    """Files to fetch, to take the digest of and to cut into slices."""

    kind: Literal["fetch"] = "fetch"
    files: tuple[FoundFile, ...]
    sources: tuple[Source, ...]
    slice_bytes: int


class Slices(Model):
    """Slices to tokenize."""

    kind: Literal["tokenize"] = "tokenize"
    recipe: Recipe
    slices: tuple[Slice, ...]


class Spans(Model):
    """Spans of the final arrays to write below ``versions/<version>``."""

    kind: Literal["write"] = "write"
    spans: tuple[Span, ...]
    rule: SplitRule
    layout: LayoutName
    version: str


class Group(Model):
    """Work for a process of its own, and where: the same work, the same digest. ``keep_files``: fetched files stay in the scratch
    directory, for others; without it they go with the group.
    """

    output: str
    scratch: str | None
    keep_files: bool
    workers: int | None
    report_seconds: float
    work: Annotated[Files | Slices | Spans, Field(discriminator="kind")]
    semantics: str = FORMAT_SEMANTICS

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json"))

    @property
    def items(self) -> tuple[FoundFile, ...] | tuple[Slice, ...] | tuple[Span, ...]:
        match self.work:
            case Files():
                return self.work.files
            case Slices():
                return self.work.slices
            case Spans():
                return self.work.spans

    def place(self, attempt: Place) -> Place:
        """Where an attempt at the group writes."""
        return attempt if self.keep_files else attempt.model_copy(update={"scratch": attempt.staging})

    @property
    def label(self) -> str:
        labels = [item.label for item in self.items]
        return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]} ({len(labels)})"


class Fault(Model):
    """Why a group failed. ``may_pass``: another try may do better."""

    kind: str
    message: str
    may_pass: bool


class Report(Model):
    """What a process says of a group while it works on it, again and again, and at the end: results or a fault."""

    host: str
    process: int
    number: int = Field(description="Counts up: a report that stays the same is that of a dead process")
    done: Done
    under_way: tuple[str, ...]
    fault: Fault | None = None
    cuts: tuple[CutFile, ...] | None = None
    shards: tuple[TokenShard, ...] | None = None
    written: tuple[Written, ...] | None = None

    @property
    def results(self) -> tuple[CutFile, ...] | tuple[TokenShard, ...] | tuple[Written, ...] | None:
        return next((results for results in (self.cuts, self.shards, self.written) if results is not None), None)


def put_group(root: Store, group: Group) -> str:
    """Store a group under its digest, unless it is there; the digest."""
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
    """What a run last said of a group; None where it said nothing yet, or nothing that can be trusted."""
    try:
        facts: dict[str, Any] = json.loads(root.read(f"{GROUPS}/{digest}/{run}.json"))
        return Report.model_validate(facts) if facts.pop("sha256") == digest_of(facts) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_kept(root: Store, group: Group, report: Report) -> bool:
    """Whether the store has what a report says was made: garbage may have been collected since."""
    keys = [receipt_key(shard.key) for shard in report.shards or ()]
    if isinstance(group.work, Spans):
        keys += [f"{version_key(group.work.version)}/{stored.key}" for one in report.written or () for stored in one.objects]
    with ThreadPoolExecutor(READERS) as readers:
        return all(readers.map(root.exists, keys))


def forget(root: Store, digest: str) -> None:
    """Remove a group whose results have been used."""
    root.remove(f"{GROUPS}/{digest}")
    if root.is_local:
        with contextlib.suppress(OSError):  # others are there
            os.rmdir(root.path(GROUPS))


class Reporter:
    """Tells how far a group has come."""

    def __init__(self, root: Store, group: Group, run: str) -> None:
        self._root, self._group, self._run = root, group, run
        self._results: list[Any] = []
        self._number = 0

    def add(self, result: CutFile | TokenShard | Written) -> None:
        """The next item, in the group's order, is done."""
        self._results.append(result)

    def tell(self, **outcome: Any) -> None:
        self._number += 1
        done = len(self._results)
        report = Report(
            host=platform.node(),
            process=os.getpid(),
            number=self._number,
            done=meter.read().done,
            under_way=tuple(
                item.label for item in self._group.items[done : done + 2 * (self._group.workers or available_cores())]
            ),
            **outcome,
        )
        put_report(self._root, self._group.digest, self._run, report)

    def conclude(self) -> None:
        name = {"fetch": "cuts", "tokenize": "shards", "write": "written"}[self._group.work.kind]
        self.tell(**{name: tuple(self._results)})


@contextlib.contextmanager
def reporting(root: Store, group: Group, run: str) -> Iterator[Reporter]:
    """Report on a group every few seconds until the block ends, then how it ended."""
    reporter = Reporter(root, group, run)
    over = threading.Event()

    def report() -> None:
        while not over.wait(group.report_seconds):
            # A report that does not get through is missed by nobody if the next one does.
            with contextlib.suppress(Exception):
                reporter.tell()

    reporter.tell()
    thread = threading.Thread(target=report, name="report", daemon=True)
    thread.start()
    try:
        yield reporter
    except Exception as error:
        over.set()
        thread.join()
        fault = Fault(kind=type(error).__name__, message=str(error), may_pass=not isinstance(error, LASTING))
        reporter.tell(fault=fault)
        raise
    finally:
        over.set()
        thread.join()
    reporter.conclude()


def check_tokenizer(recipe: Recipe) -> None:
    """ValueError where this machine's tokenizer is not the one that the shards are to be named after."""
    digest = load_tokenizer(recipe.tokenizer).digest
    if digest != recipe.tokenizer_digest:
        raise ValueError(
            f"tokenizer {recipe.tokenizer.name!r} on {platform.node()} has digest {digest[:12]}, the build's has "
            f"{recipe.tokenizer_digest[:12]}. Give every machine the same file."
        )
