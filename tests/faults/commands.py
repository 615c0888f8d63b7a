"""Trials of commands: how one is made, and what must hold after it.

A trial copies a prepared directory, runs a command of the product over it in a fork, with a fault, looks around as a reader does,
runs the same command again, and compares all files with those that an undisturbed run leaves.
"""

import contextlib
import errno
import gc
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

import flat_tokens
import tasks.tokenize.tokenizers
from flat_tokens.stores import signing
from flat_tokens.stores.store import Store
from flows.commands.main import main
from tasks.output.pointer import MARKERS
from tasks.shards.index import read_index
from tests.calls import before_each_call
from tests.faults.cases import CASES, CORPUS_CASES, Case, Words, words_of
from tests.faults.inject import KILL, KILL_WITHIN, PAUSE, Child, Ended, Fault, Watch
from tests.faults.support import entries
from tests.keys import key_file

ORDINARY_USER = 65534
"""nobody, on every Linux; trials run as this user besides root."""

HANGS_AFTER = 300.0
"""Seconds; a trial takes a fraction of one, and some on a busy machine."""

T = TypeVar("T")
Facts = dict[str, str]
CERTIFICATE = re.compile(r"forgotten/\d{8}T\d{6}-[0-9a-f]{8}(?=\.)")
KNOWN_FILES = re.compile(r"_cache/files(/[0-9a-f]{64}\.(json|table(\.ed25519)?))?$")
"""What is known of files is recorded where these are older than the clock's grain: so by one run, and not by another. A packed
file that cannot be read with others is unpacked alone, and noted.
"""


def facts_of(here: Path) -> Facts:
    """Every file by name: its digest, or what of it is the same in each run. Not the records of runs, locks, what was put aside,
    and what is known of the sources' files.
    """
    facts = {}
    for name, entry in entries(here):
        if {"runs", "_quarantine"} & set(name.split("/")) or name.endswith("lock") or KNOWN_FILES.search(name):
            continue
        if CERTIFICATE.search(name):
            name = CERTIFICATE.sub("forgotten/CERTIFICATE", name)
        if entry.is_symlink():
            facts[name] = os.readlink(entry.path)
        elif entry.is_dir():
            facts[name] = "directory"
        else:
            with open(entry.path, "rb") as file:
                facts[name] = fact_of(name, file.read())
    return facts


def state_of(here: Path) -> bytes:
    """The digest of all that decides what readers and the next command meet: files, their modes, locks, what was put aside."""
    found = [(name, entry.stat(follow_symlinks=False)) for name, entry in entries(here) if "runs" not in name.split("/")]
    modes = [(name, status.st_mode, status.st_size if name.endswith("lock") else 0) for name, status in found]
    return hashlib.sha256(repr((sorted(modes), sorted(facts_of(here).items()))).encode()).digest()


def fact_of(name: str, data: bytes) -> str:
    """The digest of a file or object, or what of it is the same in each run."""
    directories, _, base = name.rpartition("/")
    if base == "latest.json":
        try:
            value = json.loads(data)
        except ValueError:
            return "no JSON"
        lists = ("former", "withdrawn", "rejected", "decisions")
        former = {name: [one["version"] for one in value.get(name, ())] for name in lists}
        value = {**value, **former, "pins": sorted(value.get("pins", ())), "sha256": ""}
        return re.sub(r'"at": "[^"]*"', '"at": ""', json.dumps(value))
    if base == "list.json" and directories.endswith("forgotten"):
        value = json.loads(data)
        requests = [{**one, "id": "", "at": "", "by": ""} for one in value["requests"]]
        return json.dumps({**value, "requests": requests, "pending": bool(value["pending"])})
    if "forgotten/CERTIFICATE" in name:
        return "certificate"
    if base == "latest.json.ed25519" or ("origins" in directories.split("/") and base.endswith(".ed25519")):
        return "signature"  # of times, too: readers check it
    if "origins" in directories.split("/"):
        return re.sub(r'"(at|looked_up|stamp|location)":\s*("[^"]*"|\[(\[[^]]*\]|[^][])*\])', "", data.decode())
    return hashlib.sha256(data).hexdigest()


class Flaw(NamedTuple):
    """Something that does not hold. ``what``: bytes, readers, pointer, reuse, leftovers or message."""

    what: str
    told: str


def differences(now: Facts, calm: Facts) -> Iterator[Flaw]:
    """What differs from the files of an undisturbed run."""
    for name in sorted({*now, *calm}):
        if now.get(name) == calm.get(name):
            continue
        base = name.rpartition("/")[2]
        if base in ("latest.json", "latest"):
            yield Flaw("pointer", f"{name}: {now.get(name)}, not {calm.get(name)}")
        elif name not in calm:
            yield Flaw("leftovers", name)
        else:
            yield Flaw("bytes", f"{name} {'differs' if name in now else 'is missing'}")


def is_published(version: Path) -> bool:
    return any((version / marker).exists() for marker in MARKERS)


def seen(here: Path) -> dict[str, str]:
    """The version that each output's readers get, after every version that can be opened, and the latest twice, was checked."""
    found = {}
    for root in sorted(path.parent for path in here.glob("*/versions")):
        for version in filter(is_published, sorted((root / "versions").iterdir())):
            flat_tokens.verify(version, "full")
        if (root / "latest.json").exists():
            # Not by the output: its link is one behind between two operations, which ``differences`` tells of.
            found[root.name] = Path(flat_tokens.verify(flat_tokens.open(root).path, "full").path).name
            if (root / "latest").is_symlink():
                flat_tokens.verify(root / "latest", "full")
    return found


def receipts(here: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in here.glob("*/_cache/*/receipt.json")}


def tokens_there(here: Path) -> set[str]:
    """Keys of the slices whose tokens are stored as shards, or that a published version holds."""
    published = set()
    for index in here.glob("*/_cache/index/*.json"):
        if is_published(index.parents[2] / "versions" / index.stem):
            published |= {shard.key for shard in read_index(Store.at(index.parents[2]), index.stem).published}
    return published | {Path(name).parent.name for name in receipts(here)}


def made_from_now_on() -> list[list[str]]:
    """Keys of the token shards that this process begins to make, by what makes them. It is a fork: nothing is undone."""
    return [before_each_call(pytest.MonkeyPatch(), name, lambda key, *_: key) for name in WRITERS]


WRITERS = ("tasks.shards.writers.staging_shard", "tasks.shards.writers.streaming_shard", "tasks.derive.imports.staging_shard")


class Calm(NamedTuple):
    """A case without faults: its name, its command, what it leaves, the versions of its outputs before and behind it, how many
    operations of each kind it has, the bytes of what it leaves, and how long it takes.
    """

    name: str
    case: Case
    words: Words
    facts: Facts
    before: dict[str, str]
    after: dict[str, str]
    counts: Counter[str]
    byte_count: int
    seconds: float


class Ran(NamedTuple):
    """What came of a command: its exit status, what the fault met, the operations that were counted and recorded, and what
    readers found wrong before it.
    """

    status: int
    fired: str
    counts: Counter[str]
    recorded: list[tuple[Any, ...]]
    unreadable: str = ""


class Looked(NamedTuple):
    """What was found behind a trial: the version of each output that readers get, or what is wrong with it, all files, the exit
    status of commands that were run again, then all files, and keys of slices whose tokens were there and were made again.
    """

    seen: dict[str, str]
    unreadable: str
    first: Facts
    status: int
    facts: Facts
    made_again: Collection[str] = ()


class Bench:
    """Trials in a directory below *scratch*. They run in forks of this process, which must not have threads."""

    current: Calm
    """The case that was prepared last."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.here, self._log = scratch, scratch / "here", scratch / "log"
        self._prepared: dict[str, Calm] = {}
        self._flawless: set[tuple[str, bytes, int | None, bool]] = set()

    @property
    def template(self) -> Path:
        """What the current case prepared."""
        return self.scratch / "templates" / self.current.name

    def calm(self, name: str) -> Calm:
        """Make a case the current one. It is prepared and run undisturbed once, for all campaigns of this process."""
        case = {**CASES, **CORPUS_CASES}[name]
        os.environ.pop(signing.KEY_FILE, None)
        if case.signed:
            os.environ[signing.KEY_FILE] = str(self.here / "keys")
        if name not in self._prepared:
            self._prepared[name] = self._prepare(name, case)
        self.current = self._prepared[name]
        return self.current

    def _prepare(self, name: str, case: Case) -> Calm:
        """Run a case undisturbed, and import here what it imported: an ordinary user may not be able to."""
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        if case.signed:
            key_file(self.here / "keys")
        case.prepare(self.here, lambda text: self.child(lambda: succeed(words_of(text, self.here)), case).must())
        shutil.copytree(self.here, self.scratch / "templates" / name, symlinks=True)
        words = words_of(case.text, self.here)
        before, begun = self.child(lambda: seen(self.here), case).must(), time.monotonic()
        ran, modules = self.child(lambda: (succeed(words, Watch(self.here)), list(sys.modules)), case).must()
        seconds = time.monotonic() - begun
        facts, after = self.child(lambda: (facts_of(self.here), seen(self.here)), case).must()
        import_all(modules)
        stored = sum(entry.stat().st_size for _, entry in entries(self.here) if entry.is_file(follow_symlinks=False))
        gc.freeze()  # or forks would copy all that their collector looks at
        return Calm(name, case, words, facts, before, after, ran.counts, stored, seconds)

    def child(
        self, work: Callable[[], Any], case: Case | None = None, user: int | None = None, kill_after: float | None = None
    ) -> Ended:
        """How a fork ends that does this for a case, by default the current one."""
        chosen = case or self.current.case

        def patched() -> Any:
            chosen.patch()
            return work()

        return Child(patched, self._log, user).ended(HANGS_AFTER, kill_after)

    def lay_out(self, user: int | None = None) -> None:
        """A fresh copy of what the case prepared."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.template, self.here, symlinks=True)
        if user is not None:
            for path in (self.here, *self.here.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)

    def record(self, name: str) -> list[tuple[Any, ...]]:
        """Run a case undisturbed, where it is laid out; all that it changed on the disk."""
        calm = self.calm(name)
        return self.child(lambda: succeed(calm.words, Watch(self.here, record=True))).must().recorded

    def trial(self, name: str, fault: Fault, user: int | None = None) -> list[Flaw] | None:
        """Run a case with a fault: all that did not hold, with the operation that it met. None: there is no such operation."""
        calm = self.calm(name)
        self.lay_out(user)
        ended = self.child(lambda: command(calm.words, Watch(self.here, fault)), user=user)
        ran = ended.value
        if ran is not None and not ran.fired and not ended.died:
            return None
        flaws = [*self.messages_of(fault, ended), *self.look(user, claimed=ran is not None and ran.status == 0)]
        return named(flaws, (ran and ran.fired) or "killed")

    def messages_of(self, fault: Fault | None, ended: Ended) -> Iterator[Flaw]:
        """What is wrong with what a command said, and how it ended. None: no fault happened, so it must have succeeded."""
        action = "" if fault is None else fault.action
        return messages(
            ended,
            self.current.words[0],
            str(self.here),
            is_killed=action in (KILL, KILL_WITHIN),
            may_fail=bool(action) and not action.startswith(PAUSE),
            cause="" if action == "short" else os.strerror(getattr(errno, action.partition(" ")[0], 0)),
        )

    def look(self, user: int | None = None, claimed: bool = False) -> list[Flaw]:
        """Look around as readers do, run the command again, and say what does not hold. *claimed*: it said that it was done.

        A state in which all held is not looked at twice: most faults leave what others have left.
        """
        calm = self.current
        state = (calm.name, state_of(self.here), user, claimed)
        if state in self._flawless:
            return []

        def again() -> Looked:
            earlier, made = tokens_there(self.here), made_from_now_on()
            looked = look_and_run(partial(seen, self.here), partial(facts_of, self.here), calm.words)
            return looked._replace(made_again=earlier.intersection(itertools.chain(*made)))

        ended = self.child(again, user=user)
        allowed = {name: {calm.before.get(name), calm.after.get(name)} for name in {*calm.before, *calm.after}}
        is_done = calm.name == "rollback" and "is the latest version already" in ended.output
        flaws = [*found_by(ended, allowed, calm.facts if claimed else None, may_fail=is_done)]
        if ended.value is not None:
            for name, fact in ended.value.first.items():
                is_exported = name.startswith("exported/") and ".export" not in name.split("/") and fact != "directory"
                if is_exported and calm.facts.get(name) != fact:
                    flaws.append(Flaw("readers", f"{name} is not whole"))
            flaws += differences(ended.value.facts, calm.facts)
        if not flaws:
            self._flawless.add(state)
        return flaws


def named(flaws: Iterable[Flaw], what: object) -> list[Flaw]:
    """Flaws that say where they were found."""
    return [flaw._replace(told=f"{what}: {flaw.told}") for flaw in flaws]


def found_by(
    ended: Ended, allowed: Mapping[str, Collection[str | None]], claimed: Facts | None, *, may_fail: bool = False
) -> Iterator[Flaw]:
    """What does not hold by a look around and another run. *allowed*: versions that each output may be at. *claimed*: files of an
    undisturbed run, if the command said that it was done.
    """
    looked = ended.value
    if looked is None:
        yield Flaw("bytes", f"again: {'it did not end' if ended.hung else ended.error}")
        return
    if looked.unreadable:
        yield Flaw("readers", looked.unreadable)
    else:
        for name in sorted({*allowed, *looked.seen}):
            if (version := looked.seen.get(name)) not in allowed.get(name, {None}):
                yield Flaw("readers", f"{name} is at {version}")
    if claimed is not None:
        yield from named((one for one in differences(looked.first, claimed) if one.what != "leftovers"), "claimed as done")
    if looked.status and not may_fail:
        yield Flaw("bytes", f"run again, it fails: {ended.output}")
    yield from (Flaw("reuse", key) for key in sorted(looked.made_again))


def messages(
    ended: Ended, command: str, place: str, *, is_killed: bool = False, may_fail: bool = True, cause: str = ""
) -> Iterator[Flaw]:
    """What is wrong with what a command said about a place, and how it ended."""
    if ended.hung:
        yield Flaw("message", f"it did not end: {ended.output}")
    elif ended.died != is_killed:
        yield Flaw("message", f"it {'was killed' if ended.died else 'was not killed'}: {ended.output}")
    if is_killed or ended.hung or ended.died:
        return
    status = 1 if ended.value is None else ended.value.status
    # It may log before it fails, tell what it goes by, and its progress where that is slow.
    logs = rf"\d{{4}}-\d\d-\d\d |{command}: |\S+  [a-z-]+  "
    lines = [line for line in ended.output.splitlines() if not re.match(logs, line)]
    if ended.error or "Traceback" in ended.output:
        yield Flaw("message", f"traceback: {ended.error or ended.output}")
    elif status and not may_fail:
        yield Flaw("message", f"undisturbed, it failed with status {status}: {ended.output}")
    elif status and len(lines) != 1:
        yield Flaw("message", f"not in one line: {ended.output}")
    elif status and place not in lines[0]:
        yield Flaw("message", f"no path: {lines[0]}")
    elif status and cause not in lines[0]:
        yield Flaw("message", f"no cause: {lines[0]}")


def succeed(words: Iterable[str], watch: Watch | None = None) -> Ran:
    """Run a command that must not fail."""
    ran = command([*words], watch)
    assert ran.status == 0
    return ran


def tried(look: Callable[[], T]) -> tuple[T | None, str]:
    """What a look around gives, or its error."""
    try:
        return look(), ""
    except Exception:
        return None, traceback.format_exc()


def command(words: Words, watch: Watch | None = None) -> Ran:
    """Run a command of the product in this process, a child. The process in which a file's tokenizer is tried sees no fault and
    takes seconds: it is left out.
    """
    tasks.tokenize.tokenizers.try_out = lambda _: None
    if watch is not None:
        watch.install()
    try:
        status = main(words)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return Ran(status, watch.fired, watch.counts, watch.recorded) if watch else Ran(status, "", Counter(), [])


def look_and_run(see: Callable[[], dict[str, str]], facts: Callable[[], Facts], *several: Words) -> Looked:
    """Look around as readers do, and run commands again."""
    there, unreadable = tried(see)
    first = facts()
    status = max(command(words).status for words in several)
    return Looked(there or {}, unreadable, first, status, facts())


def import_all(modules: Iterable[str]) -> None:
    """Import here what a child imported."""
    for module in modules:
        if module not in sys.modules and not module.startswith("__"):
            with contextlib.suppress(Exception):  # some can only be imported by others
                importlib.import_module(module)
