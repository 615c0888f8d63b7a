"""Forgetting documents as a Prefect flow: who may start a run in the UI has them taken out of all versions there."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from collections.abc import Callable
from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.credentials import credentials
from flows.pipelines.forget import ForgetResult, forget, resume
from flows.watch.page import page_of
from flows.watch.progress import dataset_name, ended, flow_run, showing_progress
from tasks.derive.request import ForgetRequest
from tasks.locations import Location, Output
from tasks.models import Reason


def run(output: str, work: Callable[[], ForgetResult]) -> ForgetResult:
    with credentials():
        name = dataset_name(output)
        with showing_progress(name, tags := [f"dataset:{name}"]), page_of(name, output, tags):
            result = work()
    return ended(result, f"{result.headline}. Certificate: {result.certificate or 'none'}")


@flow(name="forget-documents", flow_run_name="forget documents of {output}", persist_result=False)
def forget_documents(
    output: Output,
    reason: Reason,
    key_list: Location | None = None,
    id_list: Location | None = None,
    where: str | None = None,
    like: Location | None = None,
    source: str | None = None,
    allow_unknown: bool = False,
    runs: tuple[Location, ...] = (),
    before: Annotated[int, Field(ge=0)] | None = None,
    skip_from: Annotated[int, Field(ge=0)] | None = None,
    by: str | None = None,
    scratch: Output | None = None,
) -> ForgetResult:
    """Take documents out of all versions of an output. Later builds leave them out, whatever the sources say.

    Args:
        output: Where the versions are.
        reason: For whoever reads the certificate.
        key_list: A file with the keys of the documents, 16 hexadecimal digits a line, or .npy.
        id_list: A file with their ids, one a line.
        where: An expression that is true for them, such as file = 'a.jsonl' and row = 7.
        like: Another output: all that it has forgotten.
        source: Only documents of this source; without any other name all of it.
        allow_unknown: Keys or ids that no document has are put on the list, for later builds.
        runs: Ledgers of runs; the certificate says which steps saw the documents.
        before: Only steps before this one.
        skip_from: Edit the ledgers, so that the runs leave the documents out from this step on.
        by: Who asks for it; this run without it.
        scratch: Local directory for staging, where the output is remote.
    """
    given = locals()
    request = ForgetRequest(**{**given, "by": by or f"who started run {flow_run().name}"})
    return run(output, lambda: forget(request))


@flow(name="resume-forgetting", flow_run_name="go on forgetting documents of {output}", persist_result=False)
def resume_forgetting(output: Output, scratch: Output | None = None) -> ForgetResult:
    """Bring a forgetting that was begun to its end.

    Args:
        output: Where it was begun.
        scratch: Local directory for staging, where the output is remote.
    """
    return run(output, lambda: resume(output, scratch))
