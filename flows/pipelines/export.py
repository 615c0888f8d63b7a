"""The export: a dataset in, files in a neighbour's format out."""

from __future__ import annotations

from flat_tokens.formats import FORMATS
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.store import StoredObject
from flat_tokens.tools.export import Exported, ExportRequest, done_before, note_export, target, writing
from flat_tokens.tools.terminal import plural, size
from flows.pipelines.publish import timed
from flows.pipelines.stages import EXPORT, FINISH_EXPORT, Runner, in_order
from tasks.models import Model
from tasks.progress import meter


class ExportResult(Model):
    """Result of an export. ``reused``: parts that an earlier run had written. ``was_done``: there was nothing to do.
    ``loses_loss_mask``: the dataset has one, for which the format has no place.
    """

    path: str
    format: str
    objects: tuple[StoredObject, ...]
    parts: int
    reused: int
    was_done: bool
    loses_loss_mask: bool = False
    byte_count: int
    seconds: dict[str, float]

    @property
    def headline(self) -> str:
        """Such as ``3 megatron files, 1.2 GB, 0 of 4 parts reused``."""
        files = f"{plural(len(self.objects), f'{self.format} file')}, {size(self.byte_count)}"
        lost = ", without the loss mask" if self.loses_loss_mask else ""
        reused = "written already" if self.was_done else f"{self.reused:,} of {plural(self.parts, 'part')} reused"
        return f"{files}{lost}, {reused}"


def export(request: ExportRequest, output: str, runner: Runner, *, is_noted: bool = True) -> ExportResult:
    """Write a dataset's files in a format, those that an earlier run has not written, and the record of them. *is_noted*: whether
    the dataset's output knows of it afterwards.
    """
    meter.reset()
    seconds: dict[str, float] = {}
    store = target(output)
    if done := done_before(request, store):
        if is_noted:
            note_export(request.location, request.format, output)
        return export_result(done, seconds)
    parts = FORMATS[request.format].plan(request.source(), request.options)
    with writing(request, store), timed("export", seconds):
        if is_noted:
            note_export(request.location, request.format, output)
        meter.begin("export", TOKEN_BYTES * request.token_count)
        exporting = EXPORT.given(request, output, lambda tokens: meter.add("export", TOKEN_BYTES * tokens, 0, tokens))
        written = list(in_order(runner, parts, exporting))
        done = runner.start(request, FINISH_EXPORT.given(written, output)).result()
    meter.begin("done")
    return export_result(done, seconds)


def export_result(done: Exported, seconds: dict[str, float]) -> ExportResult:
    return ExportResult(**done._asdict(), byte_count=done.byte_count, seconds=seconds)
