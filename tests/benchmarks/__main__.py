"""All benchmarks: ``python -m tests.benchmarks`` measures every table and writes docs/measured/benchmarks.md, so that no row is
older than another. ``--only TABLE`` measures that one and leaves the others as they are, each with its own date.
"""

import argparse
import ast
import datetime
import importlib
import os
import shlex
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bench import HERE, SHARED, Bench, commit, greatest, machine, seconds_elsewhere, versions
from tests.benchmarks.page import page, rendered, title_of
from tests.processes import ROOT

TABLES = (
    "build",
    "shapes",
    "tables",
    "features",
    "peers",
    "refresh",
    "duplicates",
    "near_duplicates",
    "decontamination",
    "startup",
    "layouts",
    "sources",
    "engines",
    "orchestration",
    "groups",
    "object_stores",
    "reading",
    "mixtures",
    "from_store",
    "exports",
    "second_versions",
)
"""Modules of this package in the order of the page. The docstring of each is its title and prose. ``measure(bench)`` returns the
tables; ``PACKAGES`` are those whose versions matter.
"""
ROUNDS = 3
GIGABYTES = 1.0
QUICK_GIGABYTES = 0.004
PAGE = ROOT / "docs" / "measured" / "benchmarks.md"


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.quick and options.page == PAGE:
        parser.error("the figures of --quick are not for docs/measured/benchmarks.md: name another file with --page")
    vocabularies = SHARED / "vocab" / "tiktoken_cache"
    if vocabularies.is_dir():
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(vocabularies))
    os.environ.update(PREFECT_SERVER_ANALYTICS_ENABLED="false", DO_NOT_TRACK="1", PREFECT_LOGGING_LEVEL="WARNING")
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as temporary:
        scratch = (options.scratch or Path(temporary)).absolute()
        os.environ["PREFECT_HOME"] = str(scratch / "prefect")
        bench = Bench(
            scratch=scratch,
            rounds=options.rounds,
            gigabytes=QUICK_GIGABYTES if options.quick else options.gigabytes,
            quick=options.quick,
            vocabulary=options.vocabulary.absolute(),
            roots=quick_text() if options.quick else [],
            no_installs=options.no_installs,
        )
        return measure(bench, options.only or TABLES, options.page, command_of(options))


def measure(bench: Bench, names: Sequence[str], path: Path, command: str) -> int:
    """Measure tables, and write the page after each, so that a run that is cut off keeps what it has; 1 if a table failed."""
    titles = {name: title_of(about_of(name)) for name in TABLES}
    before = path.read_text("utf-8") if path.exists() else ""
    measured: dict[str, str] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            measured[titles[name]] = measured_section(bench, name, command)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            continue
        finally:
            bench.clear()
        path.write_text(page(list(titles.values()), measured, before), "utf-8")
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if set(names) == set(TABLES):  # a table that failed leaves no older figures behind
        path.write_text(page(list(titles.values()), measured, ""), "utf-8")
    return int(len(measured) < len(names))


def measured_section(bench: Bench, name: str, command: str) -> str:
    """Measure a table."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    begin, busy, load = time.perf_counter(), seconds_elsewhere(), os.getloadavg()[0]
    with greatest(lambda: os.getloadavg()[0], 2) as during:
        grids = module.measure(bench)
    seconds = time.perf_counter() - begin
    others = max(0.0, seconds_elsewhere() - busy) / seconds
    stamp = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {commit()}; {machine()}; {versions(module.PACKAGES)}."
        f" Load {load:.1f} before, {during[0]:.1f} during; other processes took {others:.2f} cores."
        f" {seconds:,.0f} s{', quick sizes: no figures to quote' if bench.quick else ''}."
    )
    return rendered(about_of(name), f"{command} --only {name}", textwrap.fill(stamp, 130), grids)


def about_of(name: str) -> str:
    """Title and prose of a table."""
    about = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text("utf-8")))
    assert about
    return about


def quick_text() -> list[Path]:
    """Some directories that every installation has: enough for the quick sizes, without a walk through the machine."""
    return [Path(sysconfig.get_path("stdlib")) / name for name in ("asyncio", "email")] + [
        Path(sysconfig.get_path("purelib")) / "numpy"
    ]


def command_of(options: argparse.Namespace) -> str:
    """This run's command, but for what no figure depends on, and for --only."""
    words = [".venv/bin/python", "-m", "tests.benchmarks", "--scratch", "SCRATCH"]
    for name, default in (("rounds", ROUNDS), ("gigabytes", GIGABYTES)):
        if getattr(options, name) != default:
            words += [f"--{name}", f"{getattr(options, name):g}"]
    return shlex.join(words + ["--quick"] * options.quick)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=f"of {', '.join(TABLES)}")
    scratch = "a directory for texts, outputs and the peers' environments; kept, so that the next run finds them"
    parser.add_argument("--scratch", type=Path, metavar="DIR", help=f"{scratch} (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of what is timed in turn ({ROUNDS})")
    about = f"text, or as much as is found; tables take a quarter, a half and all of it ({GIGABYTES:g})"
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, metavar="G", help=about)
    gpt2 = SHARED / "vocab" / "gpt2"
    parser.add_argument("--vocabulary", type=Path, default=gpt2, metavar="DIR", help="of gpt2's tokenizer.json, for the peers")
    parser.add_argument("--no-installs", action="store_true", help="without the peers' environments, which need a package index")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE.md", help="docs/measured/benchmarks.md")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round, to see that everything runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
