"""Groups.

Slices in groups of 100 as runs of their own, with the server of `make serve`; workers are simulated by eight threads that report
results without tokenizing, so that what is measured is what spreading a build costs: the parent in requests and in time, and the
server.

The second table is of real groups of one slice each, with a worker as `make serve` has it, which takes one at a time. The
reference engine tokenizes, a thread to a slice, so that a group has some seconds of work: "alone" is the time of a slice in a
build on one thread without a server. Seconds of the tokenize stage for each group: the first one's wait and the last one's report
are part of it. What remains is a group's start and its requests; groups should be minutes long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench, Grid, python
from tests.benchmarks.build import TOKENIZER, config_of
from tests.slices import range_of_slice

PACKAGES = ("prefect", "sqlalchemy", "pydantic")
GROUPS, SLICES, WORKERS = (100, 400), 100, 8
REAL_SHARE, REAL_SLICE = 0.5, "34 MB"
TICKS = os.sysconf("SC_CLK_TCK")
MARK = "measured: "


def parent(output: str, groups: int, slices: int) -> None:
    """Hand out slices that only have names, as a build does, and wait for all of them."""
    import httpx
    from prefect import flow

    import flows.runners.work_pool
    from flat_tokens.stores.store import Store
    from flows.pipelines.stages import SHARD_WRITE, TOKENIZE, in_order
    from flows.runners.work_pool import Groups
    from tasks.config import BuildConfig, DocumentPolicy
    from tasks.models import SourceFile
    from tasks.output.staging import Workspace
    from tasks.shards.recipe import Recipe

    spent: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()

    def timed(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[what] += time.perf_counter() - begin
                calls[what] += 1

        setattr(owner, name, call)

    timed(flows.runners.work_pool, "put_group", "put")
    timed(Groups, "_create", "create")
    timed(Groups, "_look", "look")
    timed(httpx.Client, "send", "requests")
    policy = {"threshold": 1, "slices": slices}
    config = BuildConfig.model_validate(
        {
            "output": output,
            "name": f"simulated-{groups}",
            "source": {"path": "/nowhere"},
            "tokenizer": "bytes",
            "runner": "groups",
            "groups": policy,
        }
    )
    place = Workspace(Store.at(output), "")
    recipe = Recipe(
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest="0" * 64,
        fast=True,
        documents=DocumentPolicy(),
    )
    files = [
        SourceFile(
            source=0, name=f"{i:05}.parquet", location=f"/nowhere/{i:05}.parquet", size=1, sha256=f"{i:064x}", format="parquet"
        )
        for i in range(groups)
    ]
    parts = [range_of_slice(file, i, i + 1, 128_000_000) for file in files for i in range(slices)]

    @flow(name="simulated-build", persist_result=False)
    def simulated() -> int:
        with Groups(config) as runner:
            shards = in_order(runner, parts, TOKENIZE.given(recipe, place, ()), SHARD_WRITE.given(place))
            return sum(shard.written for shard in shards)

    before = peak()
    begin = time.perf_counter()
    done = simulated()
    seconds = time.perf_counter() - begin
    if done != groups * slices:
        raise SystemExit(f"{done} documents instead of {groups * slices}")
    print(MARK + json.dumps({"seconds": seconds, "before": before, "peak": peak(), "spent": spent, "calls": calls}))


def peak() -> int:
    """Peak memory of this process in kB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def workers(output: str, count: int) -> None:
    """Take runs from the pool as workers do, and report each group as done."""
    from prefect.client.orchestration import get_client
    from prefect.states import Completed, Pending, Running

    from flat_tokens.stores.store import Store, StoredObject
    from flows.runners.elsewhere import result_as_json, work_of
    from tasks.groups import Report, put_report, read_group
    from tasks.models import TokenShard
    from tasks.output.staging import Workspace
    from tasks.progress import Done

    root = Store.at(output)
    objects = tuple(StoredObject(f"encoded_tokens/c/{i}", 1, "0" * 64) for i in range(9))

    def work(run: Any) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Pending())
            client.set_flow_run_state(run.id, Running())
            group = read_group(root, run.parameters["group"])
            slices, steps = work_of(group, Workspace(root, ""))
            recipe, *_ = steps[0].shared
            shards = [
                TokenShard(
                    key=recipe.key(part),
                    inputs=dict(recipe.key_inputs(part)),
                    objects=objects,
                    text_bytes=1,
                    rows=1,
                    read=1,
                    written=1,
                    skipped={},
                    replaced={},
                    token_count=1,
                    max_token_id=1,
                )
                for part in slices
            ]
            results = tuple(result_as_json(steps, shard) for shard in shards)
            report = Report(host="here", process=1, number=1, done=Done(1, 1, 1), under_way=(), results=results)
            put_report(root, group.digest, str(run.id), report)
            client.set_flow_run_state(run.id, Completed())

    taken = set()
    with ThreadPoolExecutor(count) as pool, get_client(sync_client=True) as client:
        while True:
            found = client.request(
                "POST",
                "/work_pools/{name}/get_scheduled_flow_runs",
                path_params={"name": "flat-tokens-groups"},
                json={"limit": 50},
            ).json()
            fresh = [one["flow_run"] for one in found if one["flow_run"]["id"] not in taken]
            from prefect.client.schemas.objects import FlowRun

            for one in fresh:
                taken.add(one["id"])
            list(pool.map(work, [FlowRun.model_validate(one) for one in fresh]))
            if not fresh:
                time.sleep(0.5)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def words_of(build: subprocess.Popen[str], taking: subprocess.Popen[str]) -> tuple[str, str]:
    """What a build prints, and its errors. RuntimeError where the workers end before it."""
    while True:
        try:
            return build.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            if taking.poll() is not None:
                build.kill()
                raise RuntimeError(f"the workers ended, with {taking.returncode}") from None


def spread_out(scratch: Path, groups: int, slices: int) -> Sequence[object]:
    """A row: a build of so many groups."""
    from tests.flows.pool import pool  # the two processes below need no server of their own

    home = scratch / f"home-{groups}"
    home.mkdir(parents=True)
    output = str(scratch / f"out-{groups}")
    sizes = ("--scratch", output, "--groups", str(groups), "--slices", str(slices))
    with pool(home) as started:
        server = started.running[0]
        here = ("-m", "tests.benchmarks.groups")
        taking = started.start(*here, "--as", "workers", *sizes)
        before = cpu_seconds(server.pid)
        build = started.start(*here, "--as", "parent", *sizes, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, told = words_of(build, taking)
        used = cpu_seconds(server.pid) - before
        database = sum(path.stat().st_size for path in home.glob("prefect.db*")) / 1e6
        started.stop([taking])
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"the build failed:\n{(out + told)[-3000:]}")
    facts = json.loads(lines[0].removeprefix(MARK))
    spent, calls = facts["spent"], facts["calls"]
    return [
        f"{groups * slices:,}",
        f"{groups:,}",
        f"{facts['seconds']:,.0f}",
        f"{spent['put'] / groups * 1e3:.1f}",
        f"{spent['create'] / groups * 1e3:.0f}",
        f"{spent.get('look', 0):.1f}",
        f"{calls['requests'] / groups:.1f}",
        f"{facts['peak'] / 1e3:.0f} ({facts['before'] / 1e3:.0f})",
        f"{used / groups * 1e3:.0f}",
        f"{database:.0f}",
    ]


def of_real_groups(bench: Bench, scratch: Path) -> Sequence[object]:
    """A row: a build whose every slice is a group, on one worker, beside one that spreads nothing."""
    from tests.flows.pool import finished, pool

    slow = {"name": TOKENIZER, "engine": "reference"}
    text, output = bench.share(REAL_SHARE), scratch / "real"
    settings = {"slice_bytes": REAL_SLICE, "tokenizer": slow}
    config = config_of(bench, text, output, workers=1, **settings)
    alone = json.loads(bench.run(python("-m", "flows", "build", config, "--no-server", "--json", "--quiet"), clear=[output]).out)
    shutil.rmtree(output)
    home = scratch / "home-real"
    home.mkdir(parents=True)
    with pool(home) as started, (home / "worker.log").open("w") as log:
        worker = ("worker", "start", "--pool", "flat-tokens-groups", "--name", "groups", "--limit", "1")
        started.start("deployments/worker.py", *worker, stdout=log, stderr=log)
        config = config_of(bench, text, output, runner="groups", groups={"threshold": 1, "slices": 1}, **settings)
        spread_out = finished(started.build(config))
    seconds = [build["seconds"]["tokenize"] / build["slices"] for build in (alone, spread_out)]
    return [spread_out["slices"], *(f"{of_each:.1f}" for of_each in seconds), f"{seconds[1] - seconds[0]:.1f}"]


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("groups")
    counts, slices = bench.size((GROUPS, SLICES), ((3,), 2))
    rows = [spread_out(scratch, count, slices) for count in counts]
    real = of_real_groups(bench, scratch)
    bench.fresh("groups")
    columns = ["slices", "groups", "s", "storing a group, ms", "creating its run, ms", "looking at all, s"]
    more = ["requests of the parent a group", "parent's memory, MB (before)", "server's processor, ms a group", "database, MB"]
    of_real = ["groups", "alone, s a slice", "as groups, s each", "more, s"]
    return [Grid([*columns, *more], rows), Grid(of_real, [real], "Real groups.")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--as", dest="part", choices=["parent", "workers"], required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--slices", type=int, required=True)
    options = parser.parse_args()
    if options.part == "parent":
        parent(options.scratch, options.groups, options.slices)
    else:
        workers(options.scratch, WORKERS)
