"""Decisions of versions that gates hold, as Prefect flows: who may start a run in the UI approves or rejects there."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from collections.abc import Callable

from prefect import flow

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flows.credentials import credentials
from flows.watch.page import watching
from flows.watch.progress import dataset_name, ended_run, flow_run
from tasks.locations import Output
from tasks.models import Reason
from tasks.output.paths import version_store
from tasks.output.pointer import read_pointer
from tasks.output.versions import DecisionResult, approve, reject


def run(
    decide: Callable[[Store, str | None, str, str], DecisionResult], output: str, reason: str, version: str | None, by: str | None
) -> DecisionResult:
    with credentials():
        root = Store.at(output)
        found = read_pointer(root).candidate
        name = read_manifest(version_store(root, found.version))["provenance"]["name"] if found else dataset_name(output)
        with watching(name, output, [f"dataset:{name}"]):
            decided = decide(root, version, reason, by or f"who started run {flow_run().name}")
    return ended_run(decided, f"{decided.headline}. {decided.decision.by}: {decided.decision.why}")


@flow(name="approve-version", flow_run_name="approve for {output}", persist_result=False)
def approve_version(output: Output, reason: Reason, version: str | None = None, by: str | None = None) -> DecisionResult:
    """Let latest name the version that waits for a person.

    Args:
        output: Where the version waits.
        reason: For whoever looks at the runs later.
        version: The one that waits, or how its name begins: then no other one is approved.
        by: Who decides; this run without it.
    """
    return run(approve, output, reason, version, by)


@flow(name="reject-version", flow_run_name="reject for {output}", persist_result=False)
def reject_version(output: Output, reason: Reason, version: str | None = None, by: str | None = None) -> DecisionResult:
    """Leave latest where it is. Refreshes leave the version that waits alone from now on.

    Args:
        output: Where the version waits.
        reason: For whoever looks at the runs later.
        version: The one that waits, or how its name begins: then no other one is rejected.
        by: Who decides; this run without it.
    """
    return run(reject, output, reason, version, by)
