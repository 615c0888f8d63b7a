"""Groups of a build as Prefect flows, for workers of a pool."""

# No "from __future__ import annotations" here: a deployment loads this file by its path, under no module's name, and could
# not resolve the names of the parameters' types.
import contextlib
import logging

from prefect import flow

from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.pipelines.build import in_order, scratch_of
from flows.runners.prefect_tasks import PrefectTasks
from flows.runners.receipts import results_from_receipts
from flows.watch.progress import flow_run, logged
from tasks.download.cut import cut_file, fetched_ahead
from tasks.groups import (
    Files,
    Slices,
    Spans,
    check_seen,
    check_tokenizer,
    read_group,
    reporting,
)
from tasks.locations import Output
from tasks.output.leases import building
from tasks.output.staging import attempt
from tasks.progress import meter
from tasks.shards.receipts import without_receipt
from tasks.shards.write import make_shard
from tasks.split.write import write_span

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
        work, scratch = group.work, scratch_of(group)
        held.enter_context(building(root, scratch))
        report = held.enter_context(reporting(root, group, str(flow_run().id)))
        held.enter_context(results_from_receipts(output))
        place = group.place(held.enter_context(attempt(output, scratch, digest[:16])))
        runner = held.enter_context(PrefectTasks(group.workers))
        match work:
            case Files():
                meter.begin("download", sum(file.size or 0 for file in work.files))
                results = in_order(runner, cut_file, work.files, work.sources, work.slice_bytes, place)
            case Slices():
                meter.begin("tokenize", sum(part.text_bytes for part in work.slices))
                check_tokenizer(work.recipe)
                distinct = {work.recipe.key(part): part for part in work.slices}
                missing = [distinct[key] for key in without_receipt(root, distinct)]
                held.enter_context(fetched_ahead(missing, work.recipe.sources, place))
                results = in_order(runner, make_shard, work.slices, work.recipe.model_copy(update={"place": place}))
            case Spans():
                meter.begin("split")
                results = in_order(runner, write_span, work.spans, work.rule, work.layout, place, work.version)
        for result in results:
            report.add(result)
