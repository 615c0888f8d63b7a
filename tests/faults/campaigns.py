"""Campaigns: which trials there are."""

import functools
import itertools
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tests.faults import store_bench
from tests.faults.cases import CASES, CORPUS, CORPUS_CASES, STREAMED
from tests.faults.chains import Chains
from tests.faults.commands import ORDINARY_USER, Bench, Flaw, command, receipts
from tests.faults.histories import VARIANTS, Decisions, Histories
from tests.faults.inject import KILL, KILL_WITHIN, KINDS, LASTING, Fault
from tests.faults.power_loss import OUTCOMES, Disk, State, write_tree
from tests.faults.readers import KINDS_OF_READERS, read_while_published
from tests.faults.store_bench import StoreBench

BUILD = "build, mmap"
LASTING_POINTS = 40
"""At so many moments of a command a fault begins that stays."""
CORPUS_BUILDS, CORPUS_KILLS = 30, 10
"""Builds of the corpus in each layout, and kills of each."""
HISTORIES = 200
CHAINS = 350
"""Of each build whose slices cross the borders of objects."""
VERSIONS = 200
KILLS_ON_A_STORE, POINTS_ON_A_STORE = 30, 5
"""So many requests of a command on a store are its last one; at so many a fault of each kind happens, or begins."""
ROUNDS = 12
"""Of each two commands on each store."""


class Done(NamedTuple):
    """What did not hold, and how many trials the table counts."""

    flaws: list[Flaw]
    count: int = 1


class Trial(NamedTuple):
    """A trial: the row of the table that counts it, a name to find it again, and what does it. None: it could not be made."""

    fault: str
    under: str
    name: str
    do: Callable[[], Done | None]


def users() -> tuple[int | None, ...]:
    """Root and an ordinary user; whoever runs this where that is not root."""
    return (None, ORDINARY_USER) if os.geteuid() == 0 else (None,)


def trial(row: str, under: str, name: object, play: Callable[[], list[Flaw] | None]) -> Trial:
    """A trial that is counted once. It has the first flaw of each kind, and how many there are."""

    def do() -> Done | None:
        if (flaws := play()) is None:
            return None
        found = {}
        for what, told in flaws:
            found.setdefault(what, []).append(told)
        return Done([Flaw(what, f"{one}{f' (and {len(more)} more)' if more else ''}") for what, (one, *more) in found.items()])

    return Trial(row, under, str(name), do)


def _faulty(bench: Bench, row: str, case: str, fault: Fault, user: int | None = None) -> Trial:
    return trial(row, case, f"{fault}{' as an ordinary user' if user else ''}", partial(bench.trial, case, fault, user))


Campaign = Callable[[Bench, re.Pattern[str], int], Iterator[Trial]]


def sampled(campaign: Callable[[Bench, re.Pattern[str]], Iterator[Trial]]) -> Campaign:
    """Every K-th trial, counted through all commands."""

    @functools.wraps(campaign)
    def some(bench: Bench, under: re.Pattern[str], every: int) -> Iterator[Trial]:
        return itertools.islice(campaign(bench, under), 0, None, every)

    return some


@sampled
def kills(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """Death behind every change of the disk, and within every write."""
    row = "killed behind every change of the disk, and within every write"
    for case in filter(under.search, CASES):
        counts = bench.calm(case).counts
        for kind, action in (("change", KILL), ("write", KILL_WITHIN)):
            for number in range(1, counts[kind] + 1):
                yield _faulty(bench, row, case, Fault(kind, number, action))


@sampled
def faults(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """One operation fails: every one of a build, in every way, for root and an ordinary user."""
    counts = bench.calm(BUILD).counts
    for kind, actions in KINDS.items():
        row = f"one {kind} fails: {', '.join(actions)}"
        for user, action, number in itertools.product(users(), actions, range(1, counts[kind] + 1)):
            yield _faulty(bench, row, BUILD, Fault(kind, number, action), user)


@sampled
def elsewhere(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """One operation fails: every one of the other commands, each in one way, for root and an ordinary user in turn."""
    for case in filter(under.search, CASES):
        who = users() if CASES[case].is_for_all else (None,)
        counts = bench.calm(case).counts if case != BUILD else {}
        for kind, actions in KINDS.items():
            for number in range(1, counts.get(kind, 0) + 1):
                fault = Fault(kind, number, actions[number % len(actions)])
                user = who[number // len(actions) % len(who)]
                yield _faulty(bench, "one operation of any kind fails, the errors in turn", case, fault, user)


@sampled
def lasting(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """From some operation on, all of a group fail."""
    for case in filter(under.search, CASES):
        counts = bench.calm(case).counts
        for group, action in LASTING:
            for number in range(1, counts[group] + 1, max(counts[group] // LASTING_POINTS, 1)):
                fault = Fault(group, number, action, lasting=True)
                yield _faulty(bench, "all operations of a sort fail from some moment on", case, fault)


def power(bench: Bench, under: re.Pattern[str], every: int) -> Iterator[Trial]:
    """The power is lost behind every operation that a command made."""
    for case in filter(under.search, CASES):
        bench.calm(case)
        bench.lay_out()
        disk, known = Disk(bench.here), set()
        recorded, counted = bench.record(case), itertools.count(1)
        for number, operation in enumerate(recorded, 1):
            disk.apply(operation)
            claimed = number == len(recorded)  # behind the last one, the command says that it is done
            for outcome in OUTCOMES:
                if next(counted) % every and not claimed:
                    continue  # a state that is not tried is not made
                state = disk.state(outcome, number)
                if (state.digest, claimed) not in known:
                    known.add((state.digest, claimed))
                    yield _powerless(bench, case, state, f"{number}, {operation[:3]}", claimed)


def _powerless(bench: Bench, case: str, state: State, where: str, claimed: bool) -> Trial:
    def look() -> list[Flaw]:
        shutil.rmtree(bench.here)
        write_tree(state.tree, bench.here)
        return bench.look(claimed=claimed)

    return trial("power lost behind every operation", case, f"{state.outcome} behind {where}", look)


def readers(bench: Bench, under: re.Pattern[str], every: int) -> Iterator[Trial]:
    """Readers open, read and keep open what is published and collected meanwhile."""
    versions = max(VERSIONS // every, 10)

    @functools.cache
    def found() -> dict[str, Done]:
        read = read_while_published(bench.scratch / "readers", versions)
        return {kind: Done(flaws, count) for kind, count, flaws in read}

    for kind in filter(under.search, KINDS_OF_READERS):
        row = f"reads while {versions} versions are published and collected"
        yield Trial(row, kind, kind, lambda kind=kind: found()[kind])  # type: ignore[misc]


def corpus(bench: Bench, under: re.Pattern[str], every: int) -> Iterator[Trial]:
    """A build of the whole corpus is killed at random times, and run again."""
    for case in filter(under.search, CORPUS_CASES if CORPUS.exists() else ()):
        for number in range(max(CORPUS_BUILDS // every, 1)):
            yield Trial("killed at a random time", case, str(number), partial(_killed_at_times, bench, case, number))


def _killed_at_times(bench: Bench, case: str, seed: int) -> Done:
    """Kill a build several times, or until it was faster, and let it come to its end. A shard that has a receipt stays."""
    calm, chance, flaws = bench.calm(case), random.Random(seed), list[Flaw]()
    bench.lay_out()
    for kills in range(CORPUS_KILLS):
        earlier = receipts(bench.here)
        ended = bench.child(lambda: command(calm.words), kill_after=chance.uniform(0, 2 * calm.seconds / CORPUS_KILLS))
        if not ended.died:
            return Done([*flaws, *bench.messages_of(None, ended), *bench.look(claimed=True)], max(kills, 1))
        later = receipts(bench.here)
        flaws += [Flaw("reuse", name) for name, at in earlier.items() if later.get(name, at) != at]
    return Done(flaws + bench.look(), CORPUS_KILLS)


@sampled
def chains(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """A build is disturbed several times in a row, each time in another way, then comes to its end."""
    playing = Chains(bench)
    for case in filter(under.search, STREAMED):
        for seed in range(CHAINS):
            row = "a chain of kills, errors, pauses, double interrupts and damages"
            yield trial(row, case, seed, partial(playing.play, case, seed))


@sampled
def histories(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """Sources change, refreshes are killed and run again; each version is that of a build from nothing."""
    return _played(Histories(bench), "edits", under)


def _played(playing: Histories, what: str, under: re.Pattern[str]) -> Iterator[Trial]:
    for seed in range(HISTORIES):
        if under.search(variant := list(VARIANTS)[seed % len(VARIANTS)]):
            row = f"a random history of {what}, with kills in between"
            yield trial(row, variant, seed, partial(playing.play, seed, variant))


@sampled
def decisions(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """Refreshes hold versions, people decide of them, pin, roll back and collect garbage; any of it is killed."""
    return _played(Decisions(bench), "decisions", under)


@sampled
def stores(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """On an object store: death behind a request, a request fails in every way, and from some request on all fail."""
    for protocol in store_bench.protocols():
        there = StoreBench(bench.scratch / protocol, protocol)
        for case in store_bench.SINGLE:
            if under.search(f"{case}, {protocol}"):
                yield from _on_requests(there, case, there.calm(case).methods)


def _on_requests(there: StoreBench, case: str, methods: Sequence[str]) -> Iterator[Trial]:
    """Deaths and faults at some of the requests of a command."""
    numbers = range(1, len(methods) + 1)
    writes = [number for number in numbers if methods[number - 1] not in ("GET", "HEAD")]
    reads, lasting = store_bench.OF_READS, store_bench.LASTING
    fails = f"one request to a store fails: {', '.join(store_bench.OF_WRITES)}"
    rows = [("killed behind a request to a store", KILL, False, _some(numbers, KILLS_ON_A_STORE))]
    for way in store_bench.OF_WRITES:
        rows.append((fails, way, False, _some(numbers if way in reads else writes, POINTS_ON_A_STORE)))
    stays = f"all requests to a store fail from some moment on: {', '.join(lasting)}"
    rows += [(stays, way, True, _some(numbers, POINTS_ON_A_STORE)) for way in lasting]
    for row, way, lasts, some in rows:
        for fault in (Fault("request", number, way, lasts) for number in some):
            yield trial(row, f"{case}, {there.protocol}", fault, partial(there.trial, case, fault))


def _some(places: Sequence[int], count: int) -> Sequence[int]:
    """So many of the places, or all, at equal distances."""
    return [places[len(places) * k // count] for k in range(count)] if len(places) > count else places


@sampled
def together(bench: Bench, under: re.Pattern[str]) -> Iterator[Trial]:
    """Two commands at the same moment on an object store, again and again."""
    for protocol in store_bench.protocols():
        there = StoreBench(bench.scratch / protocol, protocol)
        for pair in store_bench.PAIRS:
            for seed in range(ROUNDS) if under.search(f"{pair}, {protocol}") else ():
                row = "two commands at once on a store, undisturbed, spoiled, or one of them killed"
                yield trial(row, f"{pair}, {protocol}", seed, partial(there.round, pair, seed))


MENDED: dict[str, tuple[str, Fault]] = {
    "half of an unpacked file stays": (BUILD, Fault("create", 1, KILL, path=r"/_cache/files/_staging/fetch/")),
    "the staging of an export stays": ("export", Fault("unlink", 1, "EACCES", lasting=True, path=r"\.export/staging$")),
    "a collection cannot look a file up": ("gc", Fault("stat", 2, "EIO", path=r"/_cache/files/0{64}\.raw$")),
    "what is thrown away is named by its last part": ("gc", Fault("rename", 1, "EIO", path="/collected/")),
    "a source that cannot be cut is named by its last part": (BUILD, Fault("read", 1, "EIO", path=r"/in/new\.jsonl$")),
    "a source that cannot be looked up is not there": (BUILD, Fault("stat", 6, "EIO", path=r"/in(/new\.jsonl)?$")),
    "a configuration that cannot be looked up is a dataset": ("refresh", Fault("stat", 1, "EIO", path=r"/new\.json$")),
}
"""Trials in which something did not hold before it was mended."""


def mended(bench: Bench, under: re.Pattern[str], every: int) -> Iterator[Trial]:
    """What did not hold once."""
    for name, (case, fault) in MENDED.items():
        if under.search(case):
            yield _faulty(bench, "mended", case, fault)._replace(name=name)


ALL = (kills, faults, elsewhere, lasting, power, readers, corpus, chains, histories, decisions, stores, together, mended)
CAMPAIGNS: dict[str, Campaign] = {campaign.__name__: campaign for campaign in ALL}  # type: ignore[attr-defined]
