"""The exchange with a neighbour's format: a dataset in, its files out; its files in, a published version out."""

from __future__ import annotations

from collections import deque
from functools import partial

from flat_tokens.annotations import JsonObject
from flat_tokens.formats import ExportFile, Files
from flat_tokens.manifest import TOKEN_BYTES, splits_of
from flat_tokens.stores.local import real_path
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.export import ExportRequest, ExportResult
from flat_tokens.tools.export import export as exported
from flat_tokens.tools.terminal import plural
from flows.pipelines.publish import PublishResult, opened, publication, timed
from flows.pipelines.stages import (
    DIGEST,
    EXPORT,
    FINALIZE,
    FINISH_EXPORT,
    IMPORT,
    ItemUnderWay,
    Runner,
    assembling,
    in_order,
    shard_parts,
    started_in_order,
)
from tasks.assemble.assembler import Assembler
from tasks.derive.imports import ImportPart, open_import, parts_of, provenance, stamps, token_arrays_of
from tasks.derive.request import ImportRequest
from tasks.finalize.card import card
from tasks.finalize.provenance import Provenance, forgotten_digest, without_forgotten
from tasks.finalize.seal import VersionDraft, built_totals
from tasks.models import digest_of
from tasks.output.places import check_apart, layout_of
from tasks.output.target import SplitRule, Target
from tasks.parts.part import ShardPart
from tasks.progress import meter
from tasks.shards.index import indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.tokenize.engines import Tokenizer
from tasks.tokenize.tokenizers import load_tokenizer


def export(request: ExportRequest, output: str, runner: Runner, *, is_noted: bool = True) -> ExportResult:
    """Write a dataset's files in a format, those that an earlier run has not written, and the record of them. *is_noted*: whether
    the dataset's output knows of it afterwards.
    """
    meter.reset()

    def work(files: list[ExportFile]) -> ExportResult:
        meter.begin("export", TOKEN_BYTES * request.token_count)
        exporting = EXPORT.given(request, output, lambda tokens: meter.add("export", TOKEN_BYTES * tokens, 0, tokens))
        written = list(in_order(runner, files, exporting))
        done: ExportResult = runner.start(request, FINISH_EXPORT.given(written, output)).result()
        meter.begin("done")
        return done

    return exported(request, output, work, is_noted=is_noted)


class ImportResult(PublishResult):
    """Result of an import. ``parts_reused``: token shards that an earlier import had stored."""

    format: str
    parts: int
    parts_reused: int

    @property
    def headline(self) -> str:
        reused = "" if self.was_published else f", {self.parts_reused:,} of {plural(self.parts, 'part')} reused"
        return super().headline + reused


def import_files(request: ImportRequest, runner: Runner) -> ImportResult:
    """Publish the tokens of files in a format as a version. A version that is there already is left as it is."""
    with opened(request) as output:
        check_files_apart(request, output.root)
        with timed("examine", output.seconds):
            tokenizer = load_tokenizer(request.tokenizer) if request.tokenizer else None
            found = open_import(request.path, request.format, request.options)
            files = Files.at(request.path)
            before = stamps(files.store, files.keys)
            meter.begin("examine", sum(size for size, *_ in before))
            stored: list[StoredObject] = list(in_order(runner, files.keys, DIGEST.given(files.store.url)))
            made_of = without_forgotten(output.forgotten, provenance(request, found, stored, tokenizer))
            layout, forgotten = layout_of(request, output.root), forgotten_digest(output.forgotten)

        rule = SplitRule(fraction=request.validation_fraction or 0.0, seed=request.split_seed)
        reuse: JsonObject = {"parts": 0, "parts_reused": 0}
        with publication(output, made_of, layout) as version:
            if target := version.target(
                rule=rule, splits=splits_of(found.splits), token_arrays=token_arrays_of(found.splits.values())
            ):
                with assembling(runner, target) as (assembler, under_way):
                    with timed("import", output.seconds):
                        parts = parts_of(request, found, stored, tokenizer.digest if tokenizer else None, forgotten)
                        meter.begin("import", TOKEN_BYTES * sum(split.token_count for split in found.splits.values()))
                        reused = add_parts(request, parts, target, runner, assembler, under_way)
                        reuse.update(parts=len(parts), parts_reused=reused)
                        check_unchanged(request, files, before)
                        counted = shard_parts(assembler.end())
                        check_vocabulary(request, tokenizer, counted)
                    with timed("split", output.seconds):
                        meter.begin("split", TOKEN_BYTES * sum(part.shard.token_count for part in counted))
                        assembled = assembler.finish()
                with timed("finalize", output.seconds):
                    bytes_of = tokenizer.token_bytes if tokenizer else None
                    draft = VersionDraft(
                        made_of, assembled, partial(imported_totals, made_of, counted), card, token_bytes=bytes_of
                    )
                    runner.start(target, FINALIZE.given(draft, request.verify_level)).result()
        return version.finish(ImportResult, format=found.format, **reuse)


def add_parts(
    request: ImportRequest,
    parts: list[ImportPart],
    target: Target,
    runner: Runner,
    assembler: Assembler,
    under_way: deque[ItemUnderWay],
) -> int:
    """Import the parts that have no shard yet, and add all of them to the version. Return how many had one."""
    versions, keys = indexed_versions(target.root), [digest_of(part.inputs()) for part in parts]
    missing = without_receipt(target.root, without_tokens(target.root, versions, keys))
    shards = started_in_order(runner, under_way, parts, IMPORT.given(target.workspace, versions))
    numbers = {split: i for i, split in enumerate(dict.fromkeys(part.split for part in parts))}
    for part, shard in zip(parts, shards, strict=True):
        all_in = part.split if request.validation_fraction is None else None
        assembler.add(ShardPart(shard=shard, all_in=all_in, file=numbers[part.split], first_row=part.start))
    return len(parts) - len(missing)


def check_unchanged(request: ImportRequest, files: Files, before: list[tuple[int, ...]]) -> None:
    """Refuse files that were written while they were read."""
    if stamps(files.store, files.keys) != before:
        raise ValueError(f"{request.path}: was changed while it was read. Import it again when nobody writes to it.")


def check_files_apart(request: ImportRequest, root: Store) -> None:
    """Refuse an output among the files, and files within the output."""
    files = Store.at(request.path)
    if root.is_local and files.is_local:
        output, path = real_path(root.root), real_path(files.root)
        message = f"the output {request.output} and {request.path} are within each other"
        check_apart(output, path, message)
        check_apart(path, output, message)


def check_vocabulary(request: ImportRequest, tokenizer: Tokenizer | None, parts: list[ShardPart]) -> None:
    """Refuse tokens that the tokenizer that is said to have made them does not have."""
    largest = max((part.shard.max_token_id for part in parts), default=0)
    if tokenizer is not None and largest > tokenizer.highest_id:
        raise ValueError(
            f"{request.path}: holds token id {largest}, but those of {tokenizer.name} end at {tokenizer.highest_id}. Name the "
            "tokenizer that made the tokens, or none."
        )


def imported_totals(made_of: Provenance, parts: list[ShardPart], repeated: int) -> JsonObject:
    """Totals of the documents of an import: how much text they were made of, nobody knows."""

    def without_text(facts: JsonObject) -> JsonObject:
        return {name: fact for name, fact in facts.items() if name != "text_bytes"}

    found = built_totals(made_of, parts, repeated)
    return {**without_text(found), "by_source": [*map(without_text, found["by_source"])]}
