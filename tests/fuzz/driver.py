"""Fuzzing: mutated bytes go to a target, which must return or raise a documented error that names the thing.

    python -m tests.fuzz --seconds 60 parquet pointer      # or `make fuzz SECONDS=60 TARGETS="parquet pointer"`
    python -m tests.fuzz --replay                          # the corpus, one JSON line an input

Each target runs in a forked process with limits of memory, time and file size. A process that dies, or that has to be killed, is
replaced. The first input of each fault is kept in ``corpus/TARGET/FAULT--DIGEST``; FAULT is the kind of the fault and the
innermost function of the product.
"""

from __future__ import annotations

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
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.known import reason

CORPUS = Path(__file__).parent / "corpus"
PRODUCT = re.compile(r"/(flat_tokens|tasks|flows)/([a-z0-9_/]+)\.py$")

MEMORY_BYTES = 1 << 30
"""An input may make a process grow by this much."""
DATA_BYTES = 5 << 29
"""No process gets more memory than it began with and this, so that the machine survives."""
FILE_BYTES = 256 << 20
CPU_SECONDS = 2.0
"""An input may take this long. In Python code it is then interrupted; a process that sits in a library is killed later."""
WALL_SECONDS = 120.0
INPUT_BYTES = 1 << 20
POOL = 500
"""Inputs that led to new outcomes and are mutated further."""


class Fuzzed(NamedTuple):
    """A target that is ready. ``run`` takes an input. One of ``names`` must be in the message of every error that it raises."""

    seeds: Sequence[bytes]
    mutate: Callable[[random.Random, bytes, Sequence[bytes]], bytes]
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


class Target(NamedTuple):
    """``prepare`` makes the target ready in an empty directory, in the process that runs it."""

    name: str
    prepare: Callable[[Path], Fuzzed]


class WrongError(Exception):
    """What a target finds wrong by itself, such as a wrong result. ``args[0]`` is the kind of the fault."""


class TookLong(BaseException):
    """An input used more than CPU_SECONDS."""


class Fault(NamedTuple):
    """A fault of one input: its kind and place, and what happened."""

    signature: str
    detail: str


class Outcome(NamedTuple):
    """Result of fuzzing a target: the number of inputs, the seconds, how often each fault came, and how often ``run`` returned
    each text.
    """

    target: str
    runs: int
    seconds: float
    faults: Counter[str]
    returned: Counter[str]


# In the process that runs inputs


def judge(fuzzed: Fuzzed, data: bytes) -> tuple[Fault | None, str, str]:
    """The fault of an input, if it has one; its outcome in words without numbers; and the function that raised an error."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
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


class Shared:
    """Memory that the driver and a process share: how many inputs were run, and the one that is running."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 24 + INPUT_BYTES)

    def begin(self, number: int, data: bytes) -> None:
        self._map[24 : 24 + len(data)] = data
        self._map[8:16] = len(data).to_bytes(8, "little")
        self._map[:8] = number.to_bytes(8, "little")

    @property
    def number(self) -> int:
        return int.from_bytes(self._map[:8], "little")

    @property
    def data(self) -> bytes:
        return self._map[24 : 24 + int.from_bytes(self._map[8:16], "little")]


def _inputs(fuzzed: Fuzzed, seed: int) -> Iterator[tuple[bytes, Callable[[str], None]]]:
    """Seeds, then mutations for ever, each with the function that is told of its outcome."""
    chance, pool, seen = random.Random(seed), list(fuzzed.seeds), {"returned"}

    def unseen(data: bytes) -> Callable[[str], None]:
        def told(outcome: str) -> None:
            if outcome not in seen:
                seen.add(outcome)
                pool.append(data)
                if len(pool) > POOL + len(fuzzed.seeds):
                    del pool[len(fuzzed.seeds)]

        return told

    for data in fuzzed.seeds:
        yield data, unseen(data)
    while True:
        base = chance.choice(pool if chance.random() < 0.5 else fuzzed.seeds)
        try:
            data = fuzzed.mutate(chance, base, pool)[:INPUT_BYTES]
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError):
            continue  # what a mutation made before is not always fit for the next
        yield data, unseen(data)


def _work(
    target: Target, given: Sequence[bytes] | int, shared: Shared, log: Path, seed: int, first: int, until: float, work: Path
) -> None:
    """Run inputs until there is no time, or all that are *given*, or so many mutations, from number *first* on. Faults are
    appended to *log*.
    """
    _prepare_process()
    fuzzed = target.prepare(work)
    for data in fuzzed.seeds[:20] if isinstance(given, int) else fuzzed.seeds[:1]:  # so that the libraries have their memory
        fault, *_ = judge(fuzzed, data)
        if fault:
            raise AssertionError(f"{target.name}: a seed has a fault: {fault}")
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (pages * mmap.PAGESIZE + DATA_BYTES,) * 2)
    if isinstance(given, int):
        inputs = itertools.islice(_inputs(fuzzed, seed), given - first)
    else:
        inputs = ((data, lambda outcome: None) for data in given[first:])
    told_of = set()
    with log.open("a") as faults:
        for number, (data, told) in enumerate(inputs, first):
            if time.monotonic() > until:
                return
            shared.begin(number + 1, data)
            fault, outcome, place = judge(fuzzed, data)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if (fault is None or fault.signature.startswith("hang-")) and grown * 1024 > MEMORY_BYTES:
                fault = Fault(f"memory-{place}", f"the process grew by {grown >> 10} MiB; {outcome}")
            if fault:
                is_first = fault.signature not in told_of or not isinstance(given, int)
                faults.write(json.dumps([number, *fault, data.hex() if is_first else ""]) + "\n")
                faults.flush()
                told_of.add(fault.signature)
            elif isinstance(given, int):
                faults.write(json.dumps([outcome]) + "\n")
            if grown * 1024 > MEMORY_BYTES:
                os._exit(3)  # the maximum does not go down again
            told(outcome)


def _prepare_process() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with the driver
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    def stop(*_: Any) -> None:
        raise TookLong

    signal.signal(signal.SIGPROF, stop)
    os.fsync = lambda fd: None
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


# In the driver


def _child(target: Target, arguments: tuple[Any, ...], log: Path, work: Path) -> int:
    """Fork a process that works. Its errors go beside *log*, with the stack where it dies."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        stack = os.open(log.with_suffix(".stack"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stack, 2)
        faulthandler.enable(stack)
        _work(target, *arguments, work)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(pid: int, shared: Shared) -> tuple[int, str | None]:
    """Wait for a process. Return its status, and why it was killed, if it was: one input took too long, or it grew."""
    number, since_cpu, since, killed = -1, 0.0, time.monotonic(), None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, killed
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if shared.number != number:
                number, since_cpu, since = shared.number, cpu, time.monotonic()
            elif cpu - since_cpu > 2 * CPU_SECONDS or time.monotonic() - since > WALL_SECONDS:
                peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                os.kill(pid, signal.SIGKILL if killed else signal.SIGABRT)  # first for its stack
                killed = killed or ("memory" if peak and int(peak[1]) << 10 > MEMORY_BYTES else "hang")
                since_cpu, since = cpu, time.monotonic()


def _death(status: int, killed: str | None, stack: str) -> Fault:
    place = next((part for line in stack.splitlines() if (part := _stack_place(line))), "nowhere")
    kind = killed or f"crash-{signal.Signals(os.WTERMSIG(status)).name}"
    return Fault(f"{kind}-{place}", f"{kind}: {stack[:1000]}")


def _stack_place(line: str) -> str | None:
    if not (part := re.match(r'\s*File "(.*)", line \d+ in (\w+)', line)) or not (product := PRODUCT.search(part[1])):
        return None
    return f"{product[2].replace('/', '.')}.{part[2]}"


LEFT = "flat-tokens-fuzz-"


def clear(place: Path) -> None:
    """Remove what drivers left that were killed. Their number is in the name."""
    for left in place.glob(f"{LEFT}*-*"):
        try:
            os.kill(int(left.name.removeprefix(LEFT).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except PermissionError:
            pass  # another user's, which lives


def run_all(
    target: Target,
    given: Sequence[bytes] | int,
    seconds: float,
    seed: int,
    tell: Callable[[int, Fault, bytes], None],
    returned: Counter[str],
) -> int:
    """Run a target in processes of its own, on *given* inputs or on so many mutations. Return the number of inputs. *tell* is
    called with each fault, and *returned* counts the outcomes of the other mutations.
    """
    until, shared, first = time.monotonic() + seconds, Shared(), 0
    place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    clear(place)
    with tempfile.TemporaryDirectory(prefix=f"{LEFT}{os.getpid()}-", dir=place) as there:
        log, work = Path(there) / "faults", Path(there) / "work"
        for turn in itertools.count():
            shared.begin(first, b"")
            pid = _child(target, (given, shared, log, seed + turn, first, until), log, work)
            try:
                status, killed = _watch(pid, shared)
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            stack = log.with_suffix(".stack").read_text()
            first = max(shared.number, first)
            for line in log.read_text().split("\n")[:-1] if log.exists() else ():
                if len(told := json.loads(line)) == 1:
                    returned[told[0]] += 1
                else:
                    number, signature, detail, data = told
                    tell(number, Fault(signature, detail), bytes.fromhex(data))
            log.unlink(missing_ok=True)
            if os.WIFSIGNALED(status):
                tell(first - 1, _death(status, killed, stack), shared.data)
            elif os.WEXITSTATUS(status) not in (0, 3):
                raise RuntimeError(f"{target.name}: the fuzzer failed:\n{stack}")
            if time.monotonic() > until or first >= (given if isinstance(given, int) else len(given)):
                return first
    raise AssertionError


def fuzz(target: Target, seconds: float, seed: int, keep: Path = CORPUS, runs: int = 1 << 60) -> Outcome:
    """Fuzz a target, and keep the first input of each fault, unless it is known and the corpus has one."""
    faults, returned = Counter(), Counter()
    begin = time.monotonic()

    def tell(number: int, fault: Fault, data: bytes) -> None:
        faults[fault.signature] += 1
        if faults[fault.signature] == 1:
            print(f"  {target.name}: {fault.signature} ({' '.join(fault.detail.split())[:300]})", flush=True)
            known = reason(f"{target.name}/{fault.signature}") is not None
            if not known or not list((keep / target.name).glob(f"{fault.signature}--*")):
                (keep / target.name).mkdir(parents=True, exist_ok=True)
                (keep / target.name / f"{fault.signature}--{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)

    done = run_all(target, runs, seconds, seed, tell, returned)
    return Outcome(target.name, done, time.monotonic() - begin, faults, returned)


def replay(target: Target, paths: Sequence[Path]) -> dict[Path, Fault | None]:
    """The fault of each kept input, as it is now."""
    found = dict.fromkeys(paths)

    def tell(number: int, fault: Fault, data: bytes) -> None:
        found[paths[number]] = fault

    if paths:
        run_all(target, [path.read_bytes() for path in paths], 3600, 0, tell, Counter())
    return found


def kept(name: str, corpus: Path = CORPUS) -> list[Path]:
    return sorted(path for path in (corpus / name).glob("*--*"))
