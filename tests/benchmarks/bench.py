"""What every table stands on: its sizes, its text, whole processes, and the machine it was measured on."""

import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests import processes
from tests.benchmarks.corpus import Corpus, gather
from tests.processes import ROOT

HERE = Path(__file__).parent
SHARED = ROOT.parent / "shared"
TOKENIZER = "cl100k_base"
REST_SECONDS = 3.0
"""Rest before a timed process, for the disk to finish what the last one left to it."""

T = TypeVar("T")


class Grid(NamedTuple):
    """A Markdown table: a header, rows of as many cells, and the paragraph above it, which may be empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    above: str = ""


class Whole(NamedTuple):
    """A process that ended well: what it printed, wall and processor seconds from start to exit, its largest process in bytes,
    and the bytes that it wrote to the disk, without those of files that were removed before the disk had them.

    Interpreter start and imports count. Processor seconds are user and system, with all its children.
    """

    out: str
    seconds: float
    cpu: float
    peak: int
    written: int


class Runs(list[Whole]):
    """Runs of one command."""

    def median(self, fact: str = "seconds") -> float:
        return float(statistics.median(getattr(run, fact) for run in self))

    @property
    def spread(self) -> str:
        """Seconds, as `spread` has them."""
        return spread([run.seconds for run in self])

    @property
    def megabytes(self) -> str:
        """Of the largest process of all runs."""
        return f"{max(run.peak for run in self) / 1e6:,.0f}"


@dataclass(frozen=True)
class Bench:
    """One run of the command. *gigabytes* of text are gathered below *scratch*, or what there is of them."""

    scratch: Path
    rounds: int
    gigabytes: float
    quick: bool
    vocabulary: Path
    """A directory with gpt2's own tokenizer.json and what else transformers reads of it."""
    roots: Sequence[Path]
    """Directories of text; none of them: what is installed."""
    no_installs: bool
    """Without the peers, which are installed from a package index."""
    made: set[Path] = field(default_factory=set)
    """What goes with the table that is measured."""

    def size(self, full: T, quick: T) -> T:
        """The one of two sizes that this run is made with."""
        return quick if self.quick else full

    @property
    def times(self) -> int:
        """Rounds of what is timed."""
        return self.size(self.rounds, 1)

    @cached_property
    def corpus(self) -> Corpus:
        """All of the text, gathered once a scratch directory."""
        return self._gathered(1)

    @cached_property
    def twice(self) -> Corpus:
        """Twice as much text, or what there is of it."""
        return self._gathered(2)

    def _gathered(self, times: int) -> Corpus:
        wanted = round(times * self.gigabytes * 1e9)
        return gather(self.scratch / f"texts-{wanted}", wanted, self.roots)

    def share(self, part: float) -> Corpus:
        """About *part* of the text, at least a file of it, in a directory of its own."""
        count = max(1, round(len(self.corpus.paths) * part))
        return self.corpus.first(count, self.scratch / f"{self.corpus.directory.name}-of-{count}-files")

    def fresh(self, name: str) -> Path:
        """A path below the scratch directory where nothing is. What comes there goes with the table."""
        path = self.scratch / name
        shutil.rmtree(path, ignore_errors=True)
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.made.add(path)
        return path

    def clear(self) -> None:
        """Remove what a table made."""
        while self.made:
            shutil.rmtree(self.made.pop(), ignore_errors=True)

    def run(self, command: Sequence[object], *clear: Path) -> Whole:
        """Run a program with nothing at the paths of *clear*, after a rest; as *run_whole*."""
        for path in clear:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(self.size(REST_SECONDS, 0))
        return run_whole(command)

    def runs(self, command: Sequence[object], *clear: Path) -> Runs:
        """The rounds of a command, as *run* makes them."""
        return Runs(self.run(command, *clear) for _ in range(self.times))

    def in_turn(
        self,
        commands: Mapping[str, tuple[Sequence[object], Path]],
        first: Callable[[str, Whole], object] = lambda name, run: None,
    ) -> dict[str, Runs]:
        """The rounds of several commands in turn, each with the path that it writes. *first* is called behind each first one."""
        found = {name: Runs() for name in commands}
        for _ in range(self.times):
            for name, (command, output) in commands.items():
                found[name].append(self.run(command, output))
                if len(found[name]) == 1:
                    first(name, found[name][0])
        return found

    def config(self, output: Path, source: Corpus | dict[str, Any], **settings: Any) -> Path:
        """A configuration file for a build of text; it has the name of the output."""
        path = self.scratch / f"{output.name}.yaml"
        chosen = {"path": f"{source.directory}/*.parquet", "id_column": "id"} if isinstance(source, Corpus) else source
        path.write_text(json.dumps({"output": str(output), "source": chosen, "tokenizer": TOKENIZER, **settings}))
        return path

    def peer(self, pins: str, *more: str) -> Path:
        """The interpreter of a peer's environment, by the name of its pins, with *more* packages, installed where it is not.
        RuntimeError where it cannot be, or none is wanted.
        """
        if self.no_installs:
            raise RuntimeError("left out: --no-installs")
        directory = self.scratch / "environments" / "-".join([pins, *(package.partition("==")[0] for package in more)])
        interpreter, done, wanted = directory / "bin/python", directory / "installed.txt", HERE / "peer_programs" / f"{pins}.txt"
        if not done.exists() or done.read_bytes() != wanted.read_bytes():
            shutil.rmtree(directory, ignore_errors=True)
            pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            try:
                run_whole(python("-m", "venv", directory))
                run_whole([*pip, "--no-deps", "--require-hashes", "--requirement", wanted])
                if more:
                    run_whole([*pip, *more])
            except RuntimeError as error:
                raise RuntimeError(f"cannot be installed here: {str(error).strip().splitlines()[-1]}") from error
            shutil.copyfile(wanted, done)
        return interpreter


LAUNCHER = """
import ctypes, json, os, resource, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
begin = time.perf_counter()
_, status = os.waitpid(os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ), 0)
seconds = time.perf_counter() - begin
try:
    while time.perf_counter() < begin + seconds + 5:
        if os.waitpid(-1, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
except ChildProcessError:
    pass
used = resource.getrusage(resource.RUSAGE_CHILDREN)
# The kernel adds the counts of children that have been waited for to their parent's.
io = {name: int(count) for name, count in (line.split(": ") for line in open("/proc/self/io"))}
told = {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}
told["written"] = io["write_bytes"] - io["cancelled_write_bytes"]
os.write(int(sys.argv[1]), json.dumps(told).encode())
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""
"""A small process between the benchmarks and what they time, for a process's peak memory is never below that of who started it.
It waits for those whom the process left behind, too: a pool's processes are children of a server that outlives it a little.
"""


def run_whole(command: Sequence[object], environment: Mapping[str, str] | None = None, status: int = 0) -> Whole:
    """Run a program from the root of the repository. RuntimeError, with its last words, where it ends with another *status*."""
    words = [str(word) for word in command]
    # A process that may not keep bytecode compiles every module anew, which none does that users start.
    left_out = ("PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE")
    settings = {name: value for name, value in os.environ.items() if name not in left_out} | dict(environment or {})
    read, write = os.pipe()
    with os.fdopen(read) as report:
        done = processes.python("-ISc", LAUNCHER, str(write), *words, env=settings, pass_fds=[write], timeout=None)
        os.close(write)
        if done.returncode != status:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        return Whole(done.stdout, **json.loads(report.read()))


def python(*words: object) -> list[str]:
    """A command of the interpreter that runs this one."""
    return [sys.executable, *map(str, words)]


def flows(command: str, config: Path, *more: object) -> list[str]:
    """A command of the service, which prints its result as JSON."""
    return python("-m", "flows", command, config, "--no-server", "--quiet", "--json", *more)


def spread(figures: Sequence[float], unit: str = " s") -> str:
    """The median, with the least and the greatest where there are several."""
    text = f"{statistics.median(figures):.1f}{unit}"
    return text if len(figures) == 1 else f"{text} ({min(figures):.1f} to {max(figures):.1f})"


def bytes_below(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def warm(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    for path in paths:
        shutil.copyfile(path, os.devnull)


@contextmanager
def greatest(look: Callable[[], float], seconds: float) -> Iterator[list[float]]:
    """The greatest value of several looks while the block runs, one in so many seconds and one at its end: the item of a list.
    Where something went away meanwhile, that look does not count.
    """
    found, ended = [0.0], threading.Event()

    def watch() -> None:
        over = False
        while not over:
            over = ended.wait(seconds)
            with suppress(OSError):
                found[0] = max(found[0], look())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


def seconds_elsewhere() -> float:
    """Processor seconds of the whole machine since it started, idle and waiting not counted, without those of this process and
    of all its children that ended.
    """
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def best(sides: Mapping[str, tuple[Callable[[], object], int]], passes: int) -> dict[str, float]:
    """Least seconds a call of each side, the sides in turn: {name: (pass over all calls, number of calls)}."""
    found = dict.fromkeys(sides, math.inf)
    for _ in range(passes):
        for name, (run, calls) in sides.items():
            begin = time.perf_counter()
            run()
            found[name] = min(found[name], (time.perf_counter() - begin) / calls)
    return found


def machine() -> str:
    """CPU model, cores and memory."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    name = model[1] if model else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory, Linux {platform.release().split('-')[0]}"


def versions(packages: Iterable[str]) -> str:
    """Python's version and those of installed packages."""
    named = []
    for name in packages:
        try:
            named.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            named.append(f"no {name}")
    return ", ".join([f"Python {platform.python_version()}", *named])


def commit() -> str:
    """The commit that was measured, and whether files differed from it."""
    try:
        head = run_whole(["git", "rev-parse", "--short=7", "HEAD"]).out.strip()
        changed = run_whole(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"]).out
    except RuntimeError:
        return "no commit"
    return f"commit {head}" + (" with changes" if changed else "")
