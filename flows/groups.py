"""Groups of a build as Prefect flows, for workers of a pool."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
import contextlib
import logging

from prefect import Flow

from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.pipelines.stages import in_order
from flows.runners.elsewhere import result_as_json, work_of
from flows.runners.prefect_tasks import PrefectTasks
from flows.runners.receipts import results_from_receipts
from flows.watch.progress import ended_run, flow_run, logging_to_server, run_heartbeats
from flows.watch.words import what_was_done
from tasks.groups import check_seen, read_group, reporting
from tasks.locations import Output
from tasks.models import Digest
from tasks.output.leases import attempt, build_lease
from tasks.output.places import scratch_of
from tasks.progress import meter

logger = logging.getLogger(__name__)


def work_on(output: Output, group: Digest) -> None:
    """Work on a group of a build.

    Args:
        output: Where the build goes.
        group: The digest of what is to be done, which is stored there.
    """
    meter.reset()
    with contextlib.ExitStack() as held:
        held.enter_context(credentials())
        held.enter_context(logging_to_server())
        held.enter_context(run_heartbeats())
        root = Store.at(output)
        try:
            record = read_group(root, group)
        except FileNotFoundError:
            check_seen(root)
            return ended_run(None, "The build that this was for has ended: there is nothing left to do")
        scratch = scratch_of(record, root)
        held.enter_context(build_lease(root, scratch))
        results = held.enter_context(reporting(root, record, str(flow_run().id)))
        held.enter_context(results_from_receipts(root))
        items, steps = work_of(record, record.place(held.enter_context(attempt(root, scratch, group[:16]))))
        stage = steps[0].stage
        runner = held.enter_context(PrefectTasks(record.workers))
        meter.begin(stage.name, sum(map(stage.size, items)))
        assert stage.pool is not None  # or it would not be work for others
        held.enter_context(stage.pool.around(items, *steps[0].shared))
        for result in in_order(runner, items, *steps):
            results.append(result_as_json(steps, result))
    return ended_run(None, f"{record.label}: {what_was_done(meter.read())}")


def flow_of(name: str, work: str) -> Flow[[Output, str], None]:
    return Flow(work_on, name, description=f"{work} Builds start this by themselves; nobody else need.", persist_result=False)


fetch_group = flow_of("fetch-group", "Fetch files of a build and cut them into slices.")
tokenize_group = flow_of("tokenize-group", "Tokenize a group of slices of a build.")
write_group = flow_of("write-group", "Write some objects of a build's final arrays.")
