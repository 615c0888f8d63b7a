"""Commands on object stores, disturbed at the N-th request, and what must hold after each trial.

A trial forks an emulator with a prepared bucket and a proxy before it, and runs a command in another fork. It looks around as a
reader does, runs the same command again, and compares all objects with those of an undisturbed run.
"""

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import json
import mmap
import os
import random
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

import flat_tokens
from flat_tokens.stores.store import Store
from tasks.output.paths import RUNNING, VERSIONS, version_store
from tasks.output.pointer import is_dataset, read_pointer
from tasks.output.versions import names_of
from tests.faults import cases
from tests.faults.cases import BUILD, Command, Words, built, config, words_of
from tests.faults.commands import (
    KNOWN_FILES,
    Facts,
    Flaw,
    command,
    differences,
    fact_of,
    facts_of,
    found_by,
    import_all,
    look_and_run,
    messages,
    named,
    succeed,
)
from tests.faults.inject import KILL, Child, Ended, Fault
from tests.faults.stores import AZURITE, BUCKETS, azurite, hurry, reach
from tests.faults.support import objects, write_notes
from tests.processes import until
from tests.proxy import at_random

OF_READS = ("500", "503", "429", "reset", "half", "stall")
OF_WRITES = (*OF_READS, "half upload", "lost", "twice")
LASTING = ("503", "reset", "403")
SPOILED = {"429": 0.03, "503": 0.03, "reset": 0.02, "half": 0.02, "half upload": 0.02, "lost": 0.03, "twice": 0.03}
"""What happens to requests while two commands run: to some of 5 each."""

IMPORTED = (
    *("moto.server", "moto.s3.responses", "gcp_storage_emulator.server", "s3fs", "gcsfs", "aiobotocore.session"),
    *("adlfs", "azure.storage.blob"),
)
"""Imported before there are forks, or each would take a second."""

SECOND = r"another build published|has just been removed"
"""What a command may say that was not the only one."""

LATEST = "store/out/latest.json"
COMMANDS = "(build|refresh|gc)"
HANGS_AFTER = 400.0
"""Seconds; on a busy machine a command with its emulator takes some dozens."""

PATIENCE_SECONDS = 1.5
"""Stands for the patience of three minutes where a fault stays."""

Content = dict[str, bytes]
Rule = Callable[[int, str, str], str | None]
"""The fault of a request, if any, by its number, method and path."""


class Case(NamedTuple):
    """Commands on a store: ``prepare(here, output, command)`` fills a directory and the bucket."""

    prepare: Callable[[Path, str, Command], None]
    texts: tuple[str, ...]


def in_bucket(here: Path, output: str) -> dict[str, str]:
    """Settings of a configuration for an output in a bucket."""
    return {"output": output, "scratch": str(here / "scratch")}


def prepare_other(prepare: Callable[..., list[Path]], here: Path, output: str, do: Command) -> None:
    """As on a disk, and a second configuration."""
    config(here, "other", *prepare(here, do, **in_bucket(here, output)), **in_bucket(here, output), split_seed=1)


prepare_build, prepare_refresh = (partial(prepare_other, of) for of in (cases.prepare_build, cases.prepare_refresh))


def prepare_gc(here: Path, output: str, do: Command) -> None:
    """A superfluous version, a pinned one, the latest, and remains."""
    cases.prepare_three(here, do, "pin OUTPUT", **in_bucket(here, output))
    do(f"put OUTPUT/{VERSIONS}/unfinished/train/zarr.json")
    do(f"put OUTPUT/_cache/files/{'0' * 64}.raw")


def prepare_approval(here: Path, output: str, do: Command) -> None:
    """A version, and one that waits, since the source lost most of its documents."""
    notes = write_notes(here / "in/a.jsonl", 8)
    built(here, do, "new", notes, **in_bucket(here, output))
    write_notes(notes, 2)
    do("refresh HERE/new.json --no-server")


BUILD_A, BUILD_OTHER = "build HERE/a.json --no-server", "build HERE/other.json --no-server"
REFRESH, REFRESH_OTHER = (f"refresh HERE/{name}.json --no-server --keep 1 --days 0" for name in ("new", "other"))
APPROVE, COLLECT = "approve OUTPUT --reason seen", "gc OUTPUT --keep 1 --days 0 --delete"
SINGLE = {
    "build": Case(prepare_build, (BUILD,)),
    "refresh": Case(prepare_refresh, (REFRESH,)),
    "gc": Case(prepare_gc, (COLLECT,)),
}


def protocols() -> tuple[str, ...]:
    """The stores that there is an emulator of: those of Google Cloud Storage and Azure come with the peers."""
    there = {"gs": importlib.util.find_spec("gcp_storage_emulator"), "abfs": AZURITE.exists()}
    return tuple(protocol for protocol in BUCKETS if there.get(protocol, True))


PAIRS = {
    "two equal builds": Case(prepare_build, (BUILD, BUILD)),
    "two different builds": Case(prepare_build, (BUILD, BUILD_OTHER)),
    "two equal refreshes": Case(prepare_refresh, (REFRESH, REFRESH)),
    "two different refreshes": Case(prepare_refresh, (REFRESH, REFRESH_OTHER)),
    "gc and the build of a version that it removes": Case(prepare_gc, (COLLECT, BUILD_A)),
    "gc and the build of a new version": Case(prepare_build, (COLLECT, BUILD)),
    "two collections": Case(prepare_gc, (COLLECT, COLLECT)),
    "two approvals": Case(prepare_approval, (APPROVE, APPROVE)),
    "an approval and a refresh that finds what waits": Case(prepare_approval, (APPROVE, REFRESH)),
}
"""Commands at the same moment."""
CASES = {**SINGLE, **PAIRS}


class _Shared(ctypes.Structure):
    """What the processes of a trial tell each other: the port of the proxy, whose requests are counted and spoiled
    (0: nobody's as yet), and whether the trial is over.
    """

    _fields_ = (("proxy", ctypes.c_int64), ("counted", ctypes.c_int64), ("over", ctypes.c_int64))


Work = Callable[[_Shared], Any]
AZURITE_SECONDS = 300.0
"""After ten minutes Azurite removes what nobody uses, and answers nobody for minutes."""


class Served(NamedTuple):
    """What a bucket was asked, as (method, path), while requests were counted and afterwards, and what was spoiled."""

    counted: list[tuple[str, str]]
    behind: list[tuple[str, str]]
    spoiled: list[str]
    content: Content


def serve(protocol: str, content: Content, rule: Rule, shared: _Shared) -> Served:
    """An emulator and its proxy, until the trial is over. *rule*: the fault of the N-th request that counts."""
    counted = []
    behind = []
    parent = os.getppid()

    def spoil(method: str, path: str) -> str | None:
        (counted if shared.counted else behind).append((method, unquote(path)))
        return rule(len(counted), method, path) if shared.counted else None

    def kill() -> None:
        victim, shared.counted = shared.counted, 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, 9)

    with pytest.MonkeyPatch.context() as patch, BUCKETS[protocol](patch) as bucket:
        hurry(patch)
        store = Store.at(bucket.url)
        for key, data in content.items():
            store.put(key, data)
        bucket.proxy.spoil, bucket.proxy.kill = spoil, kill
        shared.proxy = int(bucket.proxy.url.rpartition(":")[2])
        while not shared.over and os.getppid() == parent:
            time.sleep(0.005)
        bucket.proxy.calm()
        return Served(counted, behind, bucket.proxy.faults, objects(store))


class Calm(NamedTuple):
    """The commands of a case in order, without faults: what was there before them and behind each, the methods of their requests,
    and seconds the first one took.
    """

    name: str
    several: list[Words]
    facts: list[Facts]
    methods: list[str]
    seconds: float

    @property
    def versions(self) -> list[str]:
        """The latest version before the commands and behind each."""
        return [json.loads(one[LATEST])["version"] for one in self.facts]


class StoreBench:
    """Trials on a bucket, in a directory below *scratch* and in forks of this process, which must not have threads."""

    def __init__(self, scratch: Path, protocol: str) -> None:
        self.here, self._template, self._log = scratch / "here", scratch / "template", scratch / "log"
        self.protocol, self.output = protocol, f"{protocol}://bucket/out"
        self._content: Content = {}
        self._calm: Calm | None = None
        self._prepared: Any = None
        import_all(IMPORTED)

    def calm(self, name: str) -> Calm:
        """Prepare a case, and run its commands one behind the other, undisturbed."""
        if self._calm is None or self._calm.name != name:
            case = CASES[name]
            self._prepare(case.prepare)
            several = [*map(self._words, case.texts)]

            def run(shared: _Shared) -> tuple[list[Facts], float, list[str]]:
                steps, begun, seconds = [], time.monotonic(), 0.0
                for words in several:
                    succeed(words)
                    seconds = seconds or time.monotonic() - begun
                    steps.append(self._facts(shared))
                    shared.counted = -1
                return steps, seconds, list(sys.modules)

            before, _ = self._on_store(self._facts)
            self.lay_out()
            (steps, seconds, modules), served = self._on_store(run)
            import_all(modules)
            gc.freeze()  # or forks would copy all that their collector looks at
            self._calm = Calm(name, several, [before, *steps], [method for method, _ in served.counted], seconds)
        return self._calm

    def _words(self, text: str) -> Words:
        return words_of(text, self.here, self.output)

    def _prepare(self, prepare: Callable[[Path, str, Command], None]) -> None:
        """Fill the directory and the bucket that trials begin with."""
        if self._prepared is prepare:
            return
        for path in (self.here, self._template):
            shutil.rmtree(path, ignore_errors=True)
        self.here.mkdir(parents=True)
        self._content, self._prepared, self._calm = {}, prepare, None

        def do(text: str) -> None:
            words = self._words(text)
            if words[0] == "put":
                self._content[words[1].partition("bucket/")[2]] = b"{}"
                return
            (_, modules), served = self._on_store(lambda shared: (succeed(words), list(sys.modules)))
            import_all(modules)
            self._content = served.content

        prepare(self.here, self.output, do)
        shutil.copytree(self.here, self._template)

    def lay_out(self) -> None:
        shutil.rmtree(self.here)
        shutil.copytree(self._template, self.here)

    @contextlib.contextmanager
    def _serving(self, rule: Rule) -> Iterator[tuple[_Shared, list[Served]]]:
        """A fresh bucket with what was prepared. What it was asked is in the list behind the block."""
        if self.protocol == "abfs":
            azurite(AZURITE_SECONDS)  # here, so that the forks share it
        shared, served = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared))), []
        child = Child(lambda: serve(self.protocol, self._content, rule, shared))
        try:
            until(lambda: shared.proxy, "the emulator does not start")
            yield shared, served
        finally:
            shared.over = 1
            ended = child.ended(HANGS_AFTER)
        served.append(ended.must())

    def _client(self, shared: _Shared, work: Work, patience: float | None = None, wait: float | None = None) -> Child:
        """A process that reaches the bucket through the proxy. *wait*: seconds from when requests are counted until it begins."""

        def do() -> Any:
            patch = pytest.MonkeyPatch()  # for good: this is a fork
            hurry(patch)
            reach(patch, self.protocol, f"http://127.0.0.1:{shared.proxy}")
            if patience is not None:
                given = {one.name: one.default for one in dataclasses.fields(Store) if one.default is not dataclasses.MISSING}
                patch.setattr(Store.__init__, "__defaults__", tuple({**given, "patience": patience}.values()))
                patch.setattr("tasks.output.leases.LEAVING_SECONDS", patience / 10)
                patch.setattr("tasks.output.places.FIRST_CONTACT_SECONDS", patience / 10)
            while wait is not None and not shared.counted:
                time.sleep(0.001)
            time.sleep(wait or 0)
            return work(shared)

        return Child(do, f"{self._log}.{uuid.uuid4().hex}")

    def _on_store(self, work: Work) -> tuple[Any, Served]:
        """Do something with the bucket that was prepared, undisturbed; all requests are counted."""
        with self._serving(lambda number, method, path: None) as (shared, served):
            shared.counted = -1
            ended = self._client(shared, work).ended(HANGS_AFTER)
        return ended.must(), served[0]

    def _facts(self, shared: _Shared) -> Facts:
        """Every object and file, by name."""
        shared.counted = 0
        content = objects(Store.at(f"{self.protocol}://bucket"))
        there = {
            f"store/{key}": fact_of(key, data)
            for key, data in content.items()
            if "/runs/" not in key and not KNOWN_FILES.search(key)
        }
        return {**there, **facts_of(self.here)}

    def trial(self, name: str, fault: Fault) -> list[Flaw] | None:
        """Run a case with a fault: all that did not hold. None: there was no such request."""
        calm = self.calm(name)
        (words,), after = calm.several, calm.facts[-1]
        self.lay_out()

        def rule(number: int, method: str, path: str) -> str | None:
            return fault.action if fault.meets(number) else None

        def run(shared: _Shared) -> Any:
            shared.counted = os.getpid()
            return command(words)

        with self._serving(rule) as (shared, served):
            ended = self._client(shared, run, PATIENCE_SECONDS if fault.lasting else None).ended(HANGS_AFTER)
            looking = self._look_and_run([words], shared)
        if not served[0].spoiled:
            return None
        # Only a fault that lasts may be noticed.
        is_killed = fault.action == KILL
        flaws = [*messages(ended, COMMANDS, self.output, is_killed=is_killed, may_fail=fault.lasting)]
        claimed = after if ended.value is not None and ended.value.status == 0 else None
        flaws += found_by(looking, {"out": calm.versions}, claimed)
        if (looked := looking.value) is not None:
            written = [path for method, path in served[0].behind if method in ("PUT", "POST")]
            receipts = [name for name in looked.first if name.endswith("/receipt.json")]
            flaws += [Flaw("reuse", name) for name in receipts if any(name[6:] in path for path in written)]
            # Whoever dies, or finds the store gone, leaves its lease, which expires.
            leases = f"store/out/{RUNNING}/" if is_killed or fault.lasting else "none"
            unlike = differences(looked.facts, after)
            flaws += [flaw for flaw in unlike if not (flaw.what == "leftovers" and flaw.told.startswith(leases))]
        return named(flaws, fault)

    def _look_and_run(self, several: list[Words], shared: _Shared) -> Ended:
        """How a process ends that looks around, undisturbed, and runs commands again."""
        shared.counted = 0
        see = partial(seen, self.output)
        return self._client(shared, lambda shared: look_and_run(see, partial(self._facts, shared), *several)).ended(HANGS_AFTER)

    def round(self, name: str, seed: int) -> list[Flaw]:
        """Two commands at the same moment: all that did not hold. In every third round they are undisturbed, in every third some
        of all requests are spoiled, and in the others one of the commands is killed besides.
        """
        calm = self.calm(name)
        self.lay_out()
        chance, dice = random.Random(f"{name} {seed}"), at_random(seed, SPOILED)
        kill_at = chance.randrange(1, len(calm.methods)) if seed % 3 == 2 else 0

        def rule(number: int, method: str, path: str) -> str | None:
            return KILL if number == kill_at else dice(method, path) if seed % 3 else None

        with self._serving(rule) as (shared, _):
            waits = (0.0, chance.uniform(0, calm.seconds))
            clients = [
                self._client(shared, lambda _, words=words: command(words), wait=wait)  # type: ignore[misc]
                for words, wait in zip(calm.several, waits, strict=True)
            ]
            shared.counted = clients[seed % 2].pid
            ended = [client.ended(HANGS_AFTER) for client in clients]
            looking = self._look_and_run(calm.several, shared)
        flaws = []
        for one in ended:
            said = messages(one, COMMANDS, self.output, is_killed=one.died and bool(kill_at))
            flaws += [flaw for flaw in said if not re.search(SECOND, flaw.told)]
            if one.value is not None and one.value.status and not re.search(SECOND, one.output):
                flaws.append(Flaw("message", f"it fails: {one.output}"))
        flaws += found_by(looking, {"out": calm.versions}, None)
        if (looked := looking.value) is None:
            return flaws
        if name.endswith("builds"):
            # Equal builds publish one version; of different ones, each that says so has moved the pointer once.
            moved, before = (json.loads(facts[LATEST])["sequence"] for facts in (looked.first, calm.facts[0]))
            published = len(
                {words[1] for words, one in zip(calm.several, ended, strict=True) if one.value and not one.value.status}
            )
            if not published <= moved - before <= published + bool(kill_at):
                told = f"{published} versions were published, and latest.json moved {moved - before} times"
                flaws.append(Flaw("pointer", told))
        return flaws + list(_unlike(calm, looked.facts, leases=bool(kill_at)))


def _unlike(calm: Calm, now: Facts, *, leases: bool) -> Iterator[Flaw]:
    """What differs from what the same commands left one behind the other. Which versions are left, and in which order they were
    the latest, depends on who was faster; the last one is the same. *leases*: one was killed, and its lease has not expired.
    """
    last = calm.facts[-1]
    if (version := json.loads(now[LATEST])["version"]) != calm.versions[-1]:
        yield Flaw("pointer", f"latest is {version}, not {calm.versions[-1]}")
    for name in sorted({*now, *last}):
        allowed = {facts[name] for facts in calm.facts if name in facts}
        if name not in now and name.startswith(f"store/out/{VERSIONS}/{calm.versions[-1]}/"):
            yield Flaw("bytes", f"{name} is missing")
        elif name in now and not allowed and not (leases and name.startswith(f"store/out/{RUNNING}/")):
            yield Flaw("leftovers", name)
        elif name in now and allowed and name != LATEST and now[name] not in allowed:
            yield Flaw("bytes", f"{name} differs")


def seen(output: str) -> dict[str, str]:
    """The version that the output's readers get, after every version that can be opened was checked."""
    root = Store.at(output)
    for version in names_of(root, VERSIONS):
        if is_dataset(root, version):
            flat_tokens.verify(version_store(root, version).url, "full")
    # The latest was checked above; here it is opened as readers do.
    return {} if read_pointer(root).version is None else {"out": flat_tokens.open(output).path.rpartition("/")[2]}
