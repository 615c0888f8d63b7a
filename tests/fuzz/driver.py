"""Fuzzing: mutated bytes go to a target, which must return or raise a documented error that names the thing.

    python -m tests.fuzz --seconds 60 parquet pointer      # or `make fuzz SECONDS=60 TARGETS="parquet pointer"`
    python -m tests.fuzz --replay                          # the corpus, one JSON line an input

Each target runs in a forked process with limits of memory, time and file size. A process that dies, or that has to be killed, is
replaced. The first input of each fault is kept in ``corpus/TARGET/FAULT--DIGEST``; FAULT is the kind of the fault and the
innermost function of the product.
"""

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import itertools
import json
import logging
import mmap
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.inject import Child

CORPUS = Path(__file__).parent / "corpus"
PRODUCT = re.compile(r"/(flat_tokens|tasks|flows)/([a-z0-9_/]+)\.py$")

MEMORY_BYTES = 1 << 30
"""An input may make a process grow by this much."""
DATA_BYTES = 5 << 29
"""No process gets more memory than it began with and this, so that the machine survives."""
FILE_BYTES = 256 << 20
CPU_SECONDS = 2.0
"""An input may take this long. In Python code it is then interrupted; a process that sits in a library dies later."""
WALL_SECONDS = 120
INPUT_BYTES = 1 << 20
ENDLESS = 1e6
POOL = 500
"""Inputs that led to new outcomes and are mutated further."""
UNFIT = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError)
"""Errors of mutations: what one made before is not always fit for the next."""


Mutator = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


class Fuzzed(NamedTuple):
    """A target that is ready. ``run`` takes an input. One of ``names`` must be in the message of every error that it raises."""

    seeds: Sequence[bytes]
    mutate: Mutator
    run: Callable[[bytes], object]
    names: tuple[str, ...]


def portable(fuzzed: Fuzzed, words: Mapping[bytes, bytes]) -> Fuzzed:
    """The same target on inputs in which words stand for names that may change, such as those of versions."""

    def named(data: bytes) -> bytes:
        for name, word in words.items():
            data = data.replace(name, word)
        return data

    def run(data: bytes) -> object:
        for name, word in words.items():
            data = data.replace(word, name)
        return fuzzed.run(data)

    return fuzzed._replace(
        seeds=[named(seed) for seed in fuzzed.seeds],
        mutate=lambda chance, data, pool: named(fuzzed.mutate(chance, data, pool)),
        run=run,
    )


def each(names: Sequence[str], *calls: Callable[[], object]) -> None:
    """Make every call, although some raise documented errors; the last of these is raised then."""
    last = None
    for call in calls:
        try:
            call()
        except (ValueError, OSError) as error:
            if not any(name in str(error) for name in names):
                raise
            last = error
    if last is not None:
        raise last


def of_file(
    path: Path, mutate: Mutator, *calls: Callable[[], object], seeds: Sequence[bytes] = (), names: Sequence[str] = ()
) -> Fuzzed:
    """A target that makes every call with a mutated file. Errors name the file, or one of *names*."""
    names = tuple(names) or (str(path),)

    def run(data: bytes) -> None:
        path.write_bytes(data)
        each(names, *calls)

    return Fuzzed(seeds or [path.read_bytes()], mutate, run, names)


Prepare = Callable[[Path], Fuzzed]
"""Makes a target ready in an empty directory, in the process that runs it."""


class WrongError(Exception):
    """What a target finds wrong by itself, such as a wrong result. ``args[0]`` is the kind of the fault."""


class TookLong(BaseException):
    """An input used more than CPU_SECONDS."""


class Fault(NamedTuple):
    """A fault of one input: its kind and place, and what happened."""

    signature: str
    detail: str


class Outcome(NamedTuple):
    """Result of fuzzing a target: the seconds, how often each fault came, and how often each outcome without one."""

    target: str
    seconds: float
    faults: Counter[str]
    returned: Counter[str]

    @property
    def runs(self) -> int:
        """Number of inputs."""
        return self.faults.total() + self.returned.total()


# In the process that runs inputs


def judge(fuzzed: Fuzzed, data: bytes) -> tuple[Fault | None, str, str]:
    """The fault of an input, if it has one; its outcome in words without numbers; and the function that raised an error."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 2 * CPU_SECONDS) + 1, resource.RLIM_INFINITY))
    signal.alarm(WALL_SECONDS)
    returned = None
    try:
        returned = fuzzed.run(data)
    except (Exception, TookLong) as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        kind, said = type(error).__name__, str(error)[:2000]
        outcome = f"{kind} {re.sub(r'[0-9]+|0x[0-9a-f]+', '#', said)[:120]}"
        if isinstance(error, TookLong):
            kind = "hang"
        elif isinstance(error, MemoryError):
            kind = "memory"
        elif isinstance(error, WrongError):
            kind = str(error.args[0])
        elif isinstance(error, ValueError | OSError):
            if any(name in said for name in fuzzed.names):
                return None, outcome, _place(error)
            kind = f"nameless-{kind}"
        place = _place(error)
        return Fault(kind if isinstance(error, WrongError) else f"{kind}-{place}", f"{kind}: {said[:300]}"), outcome, place
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None, returned if isinstance(returned, str) else "returned", "nowhere"


def _place(error: BaseException) -> str:
    """The innermost function of the product that an error came through."""
    found = "nowhere"
    seen = error
    while seen is not None:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            if part := PRODUCT.search(frame.f_code.co_filename):
                found = f"{part[2].replace('/', '.')}.{frame.f_code.co_name}"
        seen = seen.__cause__
    return re.sub(r"[^A-Za-z0-9_.]", "", found)


def _inputs(fuzzed: Fuzzed, seed: int, told: list[str]) -> Iterator[bytes]:
    """Seeds, then mutations for ever. An input whose outcome, which is *told* last, is a new one is mutated further."""
    chance, pool, seen, first = random.Random(seed), [*fuzzed.seeds], {"returned"}, len(fuzzed.seeds)

    def mutated() -> Iterator[bytes]:
        while True:
            base = chance.choice(pool if chance.random() < 0.5 else fuzzed.seeds)
            with contextlib.suppress(*UNFIT):
                yield fuzzed.mutate(chance, base, pool)[:INPUT_BYTES]

    for data in itertools.chain(fuzzed.seeds, mutated()):
        yield data
        if told[-1] not in seen:
            seen.add(told[-1])
            pool.append(data)
            del pool[first : max(len(pool) - POOL, first)]


def _work(prepare: Prepare, given: Sequence[bytes] | int, here: Path, seed: int, first: int, until: float) -> None:
    """Run inputs until there is no time, or all that are *given*, or so many mutations, from number *first* on. The input that
    runs is in a file, after the number of those begun, and outcomes are in another one.
    """
    _prepare_process()
    fuzzed = prepare(here / "work")
    for data in fuzzed.seeds[:20] if isinstance(given, int) else fuzzed.seeds[:1]:  # so that the libraries have their memory
        fault, *_ = judge(fuzzed, data)
        if fault:
            raise AssertionError(f"a seed has a fault: {fault}")
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (pages * mmap.PAGESIZE + DATA_BYTES,) * 2)
    told, seen = [""], set()
    inputs = itertools.islice(_inputs(fuzzed, seed, told), given - first) if isinstance(given, int) else given[first:]
    with (here / "outcomes").open("a") as outcomes:
        for number, data in enumerate(inputs, first):
            if time.monotonic() > until:
                return
            (here / "running").write_bytes((number + 1).to_bytes(8, "little") + data)
            fault, told[-1], place = judge(fuzzed, data)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if (fault is None or fault.signature.startswith("hang-")) and grown * 1024 > MEMORY_BYTES:
                fault = Fault(f"memory-{place}", f"the process grew by {grown >> 10} MiB; {told[-1]}")
            is_new = fault is not None and fault.signature not in seen
            outcomes.write(json.dumps([number, told[-1], fault, data.hex() if is_new else ""]) + "\n")
            if fault is not None:
                outcomes.flush()
                seen.add(fault.signature)
            if grown * 1024 > MEMORY_BYTES:
                return  # the maximum does not go down again


def _prepare_process() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with the driver
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    def stop(*_: Any) -> None:
        raise TookLong

    signal.signal(signal.SIGPROF, stop)
    faulthandler.enable(2)
    for late in HANGS:
        faulthandler.register(late, 2, chain=True)  # where it is, before it dies
    os.fsync = lambda fd: None
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


# In the driver

HANGS = (signal.SIGXCPU, signal.SIGALRM)
"""What kills a process by whose input there was no time left, of a processor or any."""


def _death(status: int, stack: str) -> Fault:
    places = re.findall(r'^ *File "(.*)", line \d+ in (\w+)', stack, re.MULTILINE)
    names = (f"{part[2].replace('/', '.')}.{name}" for path, name in places if (part := PRODUCT.search(path)))
    kind = "hang" if -status in HANGS else f"crash-{signal.Signals(-status).name}"
    return Fault(f"{kind}-{next(names, 'nowhere')}", f"{kind}: {stack[:1000]}")


Judged = tuple[int, str, Fault | None, bytes]
"""What came of an input: its number, its outcome, its fault, if any, and the bytes of the first one with that fault."""


def run_all(name: str, prepare: Prepare, given: Sequence[bytes] | int, seconds: float, seed: int) -> Iterator[Judged]:
    """Run a target in processes of its own, on *given* inputs or on so many mutations."""
    until, first = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="flat-tokens-fuzz-") as there:
        here = Path(there)
        outcomes, running = here / "outcomes", here / "running"
        for turn in itertools.count():
            shutil.rmtree(here / "work", ignore_errors=True)
            (here / "work").mkdir()
            running.write_bytes(first.to_bytes(8, "little"))
            child = Child(partial(_work, prepare, given, here, seed + turn, first, until), here / "stack")
            try:
                ended = child.ended(ENDLESS)
            except BaseException:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                raise
            data = running.read_bytes()
            first = int.from_bytes(data[:8], "little")
            for line in outcomes.read_text().split("\n")[:-1] if outcomes.exists() else ():
                number, outcome, fault, kept_data = json.loads(line)
                yield number, outcome, fault and Fault(*fault), bytes.fromhex(kept_data)
            outcomes.unlink(missing_ok=True)
            if ended.status < 0:
                yield first - 1, "death", _death(ended.status, ended.output), data[8:]
            elif ended.error or ended.status:
                raise RuntimeError(f"{name}: the fuzzer failed:\n{ended.error}")
            if time.monotonic() > until or first >= (given if isinstance(given, int) else len(given)):
                return


def fuzz(name: str, prepare: Prepare, seconds: float, seed: int, keep: Path, runs: int) -> Outcome:
    """Fuzz a target, and keep the first input of each fault."""
    faults, returned = Counter(), Counter()
    begin = time.monotonic()
    for _, outcome, fault, data in run_all(name, prepare, runs, seconds, seed):
        if fault is None:
            returned[outcome] += 1
            continue
        faults[fault.signature] += 1
        if faults[fault.signature] == 1:
            print(f"  {name}: {fault.signature} ({' '.join(fault.detail.split())[:300]})", flush=True)
            (keep / name).mkdir(parents=True, exist_ok=True)
            (keep / name / f"{fault.signature}--{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)
    return Outcome(name, time.monotonic() - begin, faults, returned)


def replay(name: str, prepare: Prepare, corpus: Path) -> dict[Path, Fault | None]:
    """The fault of each kept input, as it is now."""
    paths = sorted((corpus / name).glob("*--*"))
    inputs = [path.read_bytes() for path in paths]
    return {paths[number]: fault for number, _, fault, _ in (run_all(name, prepare, inputs, 3600, 0) if paths else ())}
