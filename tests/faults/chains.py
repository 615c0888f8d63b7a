"""Chains: a command is disturbed several times in a row, each time in another way, before it comes to its end."""

import os
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flat_tokens.stores.store import Store
from tasks.garbage import stored_shards, unneeded_objects
from tasks.shards.receipts import _read_shard
from tests.faults.commands import Bench, Flaw, Ran, command, is_published, named, seen, tried
from tests.faults.inject import INTERRUPT, KILL, KILL_WITHIN, KILLS, KINDS, LASTING, PAUSE, Ended, Fault, Watch
from tests.faults.support import entries

MOST_ATTEMPTS = 4
CRASH_LOOP, KILLS_IN_A_LOOP = 40, 12
"""Every so many chains, one is of so many kills."""
WRITE_PATH = r"/(_cache/unfinished|_cache/[0-9a-f]{64}|_staging|versions)/"
"""Where the objects are, and what leads to them: half of the faults happen there."""
UNDAMAGED = ("runs", "_quarantine", "index")
NOT_COUNTED = re.compile(r"/(runs|_quarantine)/|/_cache/[0-9a-f]{64}/.*\.json$|/collected/")
VERSIONS_KEPT, ROOM = 2, 1 << 14
"""Disturbed attempts leave at most the bytes of so many versions, and so many bytes more."""
UNNAMED = 2
"""Attempts that leave objects which no receipt names, at most: the last one, and one whose receipt was damaged."""


class Link(NamedTuple):
    """An attempt: its fault, and whether files that it leaves are damaged."""

    fault: Fault
    damages: bool

    def __str__(self) -> str:
        return f"{self.fault}{', then damage' if self.damages else ''}"


def _fault(chance: random.Random, counts: Counter[str]) -> Fault:
    path = WRITE_PATH if chance.random() < 0.5 else ""
    match chance.choices(["kill", "one", "lasting", PAUSE, INTERRUPT], [35, 20, 15, 10, 20])[0]:
        case "kill":
            kind, action = chance.choice(KILLS)
        case "one":
            kind = chance.choice(["create", "write", "write", "truncate", "fsync", "fsync", "rename", "link", "mkdir", *KINDS])
            action = chance.choice(KINDS[kind])
        case "lasting":
            kind, action = chance.choice(LASTING)
            return Fault(kind, chance.randrange(1, counts[kind] + 1), action, lasting=True)
        case name:
            kind, action = "any", f"{name} {chance.choice([0, 2, 10, 50, 200])}"
    return Fault(kind, chance.randrange(1, max(counts[kind] // (2 if path else 1), 1) + 1), action, path=path)


class Chains:
    """Plays chains over the cases of a bench, in forks of this process, which must not have threads."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def play(self, case: str, seed: int) -> list[Flaw]:
        """Play a chain; what did not hold. All of it follows from the seed, but for what threads do at the same time."""
        calm, here, chance = self._bench.calm(case), self._bench.here, random.Random(f"{case} {seed}")
        if seed % CRASH_LOOP == CRASH_LOOP - 1:  # nothing but kills
            kills = (Fault("change", chance.randrange(1, calm.counts["change"] + 1), KILL) for _ in range(KILLS_IN_A_LOOP))
            links = [Link(kill, False) for kill in kills]
        else:
            attempts = range(chance.randrange(2, MOST_ATTEMPTS + 1))
            links = [Link(_fault(chance, calm.counts), chance.random() < 0.3) for _ in attempts]
        flaws, damaged, claimed = [], False, False
        self._bench.lay_out()
        before = bytes_of(here)
        most = before + VERSIONS_KEPT * (calm.byte_count - before) + ROOM
        for number, link in enumerate(links, 1):
            ended = self._bench.child(lambda link=link, damaged=damaged: self._attempt(link.fault, damaged=damaged))  # type: ignore[misc]
            attempt = ended.value
            found = list(self._messages(link.fault, ended))
            if attempt is not None and attempt.unreadable:
                found.append(Flaw("readers", attempt.unreadable))
            if (there := bytes_of(here)) > most:
                found.append(Flaw("leftovers", f"{there:,} bytes, where {most:,} are the most"))
            root = Store.at(here / "out")
            if len(unnamed := unneeded_objects(root, stored_shards(root))) > UNNAMED:
                found.append(Flaw("leftovers", f"{len(unnamed)} attempts have left objects that no receipt names"))
            flaws += named(found, f"{number} of {'; '.join(map(str, links))}")
            claimed = attempt is not None and attempt.status == 0
            if claimed or ended.hung:
                break
            if link.damages:
                damaged |= damage(here, self._bench.template, chance)
        # What is damaged is made again.
        looked = [flaw for flaw in self._bench.look(claimed=claimed) if not (damaged and flaw.what == "reuse")]
        return flaws + named(looked, f"behind {'; '.join(map(str, links))}")

    def _attempt(self, fault: Fault, *, damaged: bool) -> Ran:
        calm, here = self._bench.current, self._bench.here
        root = Store.at(here / "out")

        def look() -> None:
            seen(here)
            for key in [] if damaged else stored_shards(root):
                _read_shard(root, key)  # whatever a receipt names is there, as it was written

        _, unreadable = tried(look)
        watch = Watch(here, fault)
        try:
            ran = command(calm.words, watch)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end: threads may wait for ever
        except KeyboardInterrupt:  # the second Ctrl-C came when the command had just ended
            ran = Ran(130, watch.fired, watch.counts, [])
        return ran._replace(unreadable=unreadable)

    def _messages(self, fault: Fault, ended: Ended) -> Iterator[Flaw]:
        fired = ended.value and ended.value.fired
        status = ended.value.status if ended.value else ended.status
        if ended.hung:
            yield Flaw("message", f"it did not end: {ended.output}")
        elif fault.action.startswith(INTERRUPT) and (status == 130 or not ended.value):
            if status != 130 or "Traceback" in ended.output or "run the same command again" not in ended.output:
                yield Flaw("message", f"interrupted, it ended with status {status}: {ended.output}")
        elif fault.action in (KILL, KILL_WITHIN) and ended.value and not fired:
            yield from self._bench.messages_of(None, ended)  # it was done before
        else:
            yield from self._bench.messages_of(fault if fired or ended.died else None, ended)


def bytes_of(here: Path) -> int:
    """Bytes of all files, each of them once whatever names it has. Not of those that were put aside, of records of runs, and of
    the metadata of shards, of which small ones have more than tokens.
    """
    sizes = {}
    for name, entry in entries(here):
        if not NOT_COUNTED.search(name) and entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def damage(here: Path, template: Path, chance: random.Random) -> bool:
    """Damage one or two of the files that attempts have left, none that was there before. False where there are none, or the
    version is published: what is kept next to it is looked at by the next build of another one.
    """
    if any(is_published(path) and not (template / "out/versions" / path.name).exists() for path in here.glob("out/versions/*")):
        return False
    left = sorted(name for name, entry in entries(here) if entry.is_file(follow_symlinks=False) and _is_left(name, template))
    for name in chance.sample(left, min(chance.randrange(1, 3), len(left))):
        way = chance.choice(DAMAGES)
        if (here / name).exists():  # the first one may have taken its directory away
            way(here / name, chance)
    return bool(left)


def _is_left(name: str, template: Path) -> bool:
    parts = name.split("/")
    if (template / name).exists() or set(UNDAMAGED) & set(parts) or name.endswith("lock") or parts[0] != "out":
        return False
    return parts[1] == "versions" or parts[1] == "_staging" or (parts[1] == "_cache" and parts[2] != "origins")


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


DAMAGES: tuple[Callable[[Path, random.Random], object], ...] = (
    flip,
    flip,
    lambda path, chance: os.truncate(path, chance.randrange(path.stat().st_size + 1)),
    lambda path, chance: path.write_bytes(path.read_bytes() + chance.randbytes(9)),
    lambda path, _: path.unlink(),
    lambda path, _: shutil.rmtree(path.parent),
)
