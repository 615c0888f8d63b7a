"""Nothing to do.

Start-up, and builds that find everything done: wall time and processor time (user and system) of whole processes, each the least
and the median. `/nonexistent.yaml` is a configuration that is not there; `demo` is `deployments/demo/demo.yaml`; `text` is the
smallest text of the first table. The first batch is eight rows of 128 tokens. With a server, the build reports to a Prefect
server on the same machine.
"""

from collections.abc import Mapping, Sequence

from tests.benchmarks.bench import Bench, Grid, Runs, python, run_whole
from tests.benchmarks.build import SHARES
from tests.benchmarks.orchestration import server

PACKAGES = ("prefect", "pydantic", "numpy", "pyarrow")
ROUNDS = 10
FIRST_BATCH = """
import flat_tokens, sys

train = flat_tokens.open(sys.argv[1]).train
flat_tokens.ShuffledLoader(train.packed(128), batch_size=8, seed=0)[0]
"""
MISSING = 2
"""Exit status of a command whose configuration is not there."""


def row(bench: Bench, name: str, words: Sequence[object], environment: Mapping[str, str] = {}, status: int = 0) -> list[str]:
    """A command, after a first time that makes what the others find."""
    run_whole(python(*words), environment, status)
    runs = Runs(run_whole(python(*words), environment, status) for _ in range(bench.size(ROUNDS, 1)))
    return [name, *(f"{min(getattr(run, fact) for run in runs):.2f} ({runs.median(fact):.2f})" for fact in ("seconds", "cpu"))]


def measure(bench: Bench) -> list[Grid]:
    text = bench.config(bench.fresh("again"), bench.share(SHARES[0]))
    demo = ("deployments/demo/demo.yaml", "--set", f"output={bench.fresh('demo')}")
    build = ("-m", "flows", "build", "--quiet")
    rows = [
        row(bench, "an interpreter that does nothing", ["-c", ""]),
        row(bench, "`import flat_tokens`", ["-c", "import flat_tokens"]),
        row(bench, "`flat-tokens --help`", ["-m", "flat_tokens", "--help"]),
        row(bench, "`flat-tokens-service --help`", ["-m", "flows", "--help"]),
        row(bench, "`build /nonexistent.yaml`", [*build, "/nonexistent.yaml"], status=MISSING),
        row(bench, "`build` of demo", [*build, "--no-server", *demo]),
        row(bench, "`status` of demo", ["-m", "flows", "status", bench.scratch / "demo"]),
        row(bench, "first batch of demo", ["-c", FIRST_BATCH, bench.scratch / "demo"]),
    ]
    if not bench.quick:
        rows.append(row(bench, "`build` of text", [*build, "--no-server", text]))
        with server(bench.fresh("startup")) as (_, reporting):
            rows.append(row(bench, "`build` of text, with a server", [*build, text], reporting))
    return [Grid(["command", "s", "processor, s"], rows)]
