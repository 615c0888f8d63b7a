"""Forgetting documents as a Prefect flow: who may start a run in the UI has them taken out of all versions there."""

# No "from __future__ import annotations": a deployment loads this file under no module's name, and could not resolve types.
from collections.abc import Callable

from prefect import flow

from flows.credentials import credentials
from flows.pipelines.forget import ForgetResult, forget, resume
from flows.watch.page import watching
from flows.watch.progress import dataset_name, ended_run, flow_run
from tasks.derive.request import ForgetRequest
from tasks.locations import Output


def run(output: str, work: Callable[[], ForgetResult]) -> ForgetResult:
    with credentials():
        name = dataset_name(output)
        with watching(name, output, [f"dataset:{name}"]):
            result = work()
    return ended_run(result, f"{result.headline}. Certificate: {result.certificate or 'none'}")


@flow(name="forget-documents", flow_run_name="forget documents of {request.output}", persist_result=False)
def forget_documents(request: ForgetRequest) -> ForgetResult:
    """Take documents out of all versions of an output. Later builds leave them out, whatever the sources say.

    Args:
        request: The documents, and where they are.
    """
    asked = request.model_copy(update={"by": request.by or f"who started run {flow_run().name}"})
    return run(request.output, lambda: forget(asked))


@flow(name="resume-forgetting", flow_run_name="go on forgetting documents of {output}", persist_result=False)
def resume_forgetting(output: Output, scratch: Output | None = None) -> ForgetResult:
    """Bring a forgetting that was begun to its end.

    Args:
        output: Where it was begun.
        scratch: Local directory for staging, if the output is remote.
    """
    return run(output, lambda: resume(output, scratch))
