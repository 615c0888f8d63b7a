"""The harness: ``python -m tests.faults`` makes all trials of all campaigns, or a sample of them.

A line is printed for each thing that did not hold. ``--only CAMPAIGN --under COMMAND --match NAME`` makes that trial again. The
exit status is 1 if there is one.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.faults.campaigns import CAMPAIGNS
from tests.faults.commands import Bench
from tests.faults.table import write_table

ROOT = Path(__file__).parents[2]
NAMES = [name for name in CAMPAIGNS if name != "mended"]
MEMORY, ROOM = "/dev/shm", 2 << 30


def main() -> int:
    options = arguments().parse_args()
    if options.share:
        make_share(options)
        return 0
    begun, rows, flaws = time.monotonic(), defaultdict(Counter), 0
    for line in lines_of_all(options.jobs, options.results):
        done = json.loads(line)
        # A file of results may have trials of other runs.
        chosen = done["campaign"] in (options.only or NAMES) and re.search(options.under, done["under"])
        if not chosen or not re.search(options.match, done["name"]):
            continue
        rows[done["fault"], done["under"]].update([what for what, _ in done["flaws"]], trials=done["count"])
        for what, told in done["flaws"]:
            flaws += 1
            print(json.dumps({"what": what, **{name: done[name] for name in ("campaign", "under", "name")}, "told": told}))
    seconds, trials = time.monotonic() - begun, sum(counts["trials"] for counts in rows.values())
    print(f"{trials:,} trials in {seconds:,.0f} s; {flaws:,} flaws", file=sys.stderr)
    if options.table:
        write_table(options.table, rows, options_that_matter(options))
    return int(flaws > 0)


def options_that_matter(options: argparse.Namespace) -> str:
    """Those that say which trials were made."""
    words = [word for name in options.only or () for word in ("--only", name)]
    for name, default in (("under", ""), ("match", ""), ("every", 1)):
        if (value := getattr(options, name)) != default:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, metavar="CAMPAIGN", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--under", default="", metavar="REGEX", help="only under commands of such names")
    parser.add_argument("--match", default="", metavar="REGEX", help="only trials of such names")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th trial, for a sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the counts into the table of this page")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="a line of JSON for each trial; those that are there are not made again"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser


def lines_of_all(jobs: int, results: Path | None) -> list[str]:
    """What came of each trial, from as many processes as are wanted. RuntimeError where one of them failed."""
    command = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
    # A process with threads cannot be forked; and what it imports late, an ordinary user may not be able to read.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PREFECT_API_URL": ""}
    with contextlib.ExitStack() as held:
        path = results or Path(held.enter_context(tempfile.NamedTemporaryFile()).name)
        out = held.enter_context(path.open("a+"))
        command += ["--results", str(path.absolute())]
        running = [
            subprocess.Popen([*command, "--share", f"{number}/{jobs}"], cwd=ROOT, env=environment, stdout=out)
            for number in range(jobs)
        ]
        if failed := [process.args for process in running if process.wait()]:
            raise RuntimeError(f"a process of the harness failed: {failed[0]}")
        out.seek(0)
        return out.readlines()


def make_share(options: argparse.Namespace) -> None:
    """Make the trials of one process; a line of JSON for each."""
    number, jobs = map(int, options.share.split("/"))
    made = {told_of(json.loads(line)) for line in options.results.read_text().splitlines()}
    is_roomy = Path(MEMORY).is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    scratch = Path(tempfile.mkdtemp(prefix="faults-", dir=MEMORY if is_roomy else None))
    scratch.chmod(0o755)  # an ordinary user passes through
    try:
        bench = Bench(scratch)
        for campaign in options.only or NAMES:
            trials = CAMPAIGNS[campaign](bench, re.compile(options.under), options.every)
            for place, trial in enumerate(trial for trial in trials if re.search(options.match, trial.name)):
                told = {"campaign": campaign, **trial._asdict()}
                del told["do"]
                if place % jobs == number and told_of(told) not in made and (done := trial.do()) is not None:
                    told |= done._asdict()
                    os.write(1, f"{json.dumps(told)}\n".encode())  # one write: others write to the same file
    finally:
        shutil.rmtree(scratch)


def told_of(trial: dict[str, Any]) -> tuple[str, ...]:
    """The names that tell a trial from others."""
    return tuple(trial[name] for name in ("campaign", "fault", "under", "name"))


if __name__ == "__main__":
    sys.exit(main())
