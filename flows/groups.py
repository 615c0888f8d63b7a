"""Groups of a build as Prefect flows, for workers of a pool."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.
import contextlib
import logging

from prefect import flow

from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.pipelines.publish import scratch_of
from flows.pipelines.stages import in_order
from flows.runners.elsewhere import result_as_json, work_of
from flows.runners.prefect_tasks import PrefectTasks
from flows.runners.receipts import results_from_receipts
from flows.watch.progress import flow_run, logged
from tasks.groups import check_seen, read_group, reporting
from tasks.locations import Output
from tasks.output.leases import building
from tasks.output.staging import attempt
from tasks.progress import meter

logger = logging.getLogger(__name__)


@flow(name="fetch-group", persist_result=False)
def fetch_group(output: Output, group: str) -> None:
    """Fetch files of a build and cut them into slices. Builds start this by themselves; nobody else need.

    Args:
        output: Where the build goes.
        group: The digest of what is to be done, which is stored there.
    """
    _work_on(output, group)


@flow(name="tokenize-group", persist_result=False)
def tokenize_group(output: Output, group: str) -> None:
    """Tokenize a group of slices of a build. Builds start this by themselves; nobody else need.

    Args:
        output: Where the build goes.
        group: The digest of what is to be done, which is stored there.
    """
    _work_on(output, group)


@flow(name="write-group", persist_result=False)
def write_group(output: Output, group: str) -> None:
    """Write some objects of a build's final arrays. Builds start this by themselves; nobody else need.

    Args:
        output: Where the build goes.
        group: The digest of what is to be done, which is stored there.
    """
    _work_on(output, group)


def _work_on(output: str, digest: str) -> None:
    meter.reset()
    with contextlib.ExitStack() as held:
        held.enter_context(credentials())
        held.enter_context(logged())
        root = Store.at(output)
        try:
            group = read_group(root, digest)
        except FileNotFoundError:
            check_seen(root)
            logger.info("The build that this was for has ended: there is nothing left to do")
            return
        scratch = scratch_of(group)
        held.enter_context(building(root, scratch))
        report = held.enter_context(reporting(root, group, str(flow_run().id)))
        held.enter_context(results_from_receipts(output))
        items, steps = work_of(group, group.place(held.enter_context(attempt(output, scratch, digest[:16]))))
        stage = steps[0].stage
        runner = held.enter_context(PrefectTasks(group.workers))
        meter.begin(stage.name, sum(map(stage.size, items)))
        assert stage.pool is not None  # or it would not be work for others
        held.enter_context(stage.pool.around(items, *steps[0].shared))
        for result in in_order(runner, items, *steps):
            report.add(result_as_json(steps, result))
