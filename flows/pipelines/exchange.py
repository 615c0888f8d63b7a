"""The order of an export to a neighbour's format, and of an import from one, whoever runs their tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.checker import verify
from flat_tokens.formats import FORMATS, Files
from flat_tokens.manifest import TOKEN_BYTES, read_manifest
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.export import Export, Exported, Written, done_before, finish, target, write_part, writing
from flows.pipelines.build import Runner, check_output, count_in_order, in_order, record_run, scratch_of, stage
from tasks.derive.imports import ImportPart, digest_file, import_part, open_import, parts_of, provenance, stamps
from tasks.derive.request import ImportRequest
from tasks.finalize.card import card
from tasks.finalize.provenance import Provenance, build_id
from tasks.finalize.seal import is_published, seal
from tasks.finalize.totals import document_totals, repeated_keys, source_totals, split_totals
from tasks.models import Model, TokenShard, digest_of
from tasks.output.leases import building
from tasks.output.paths import VERSIONS
from tasks.output.pointer import publish, read_pointer
from tasks.output.staging import Place, attempt
from tasks.progress import meter
from tasks.shards.receipts import without_receipt
from tasks.split.rule import SplitRule
from tasks.split.spans import ShardPlace, Span, lay_out
from tasks.split.write import Written as WrittenSpan
from tasks.split.write import write_span
from tasks.tokenize.engines import Tokenizer
from tasks.tokenize.tokenizers import load_tokenizer


class ExportResult(Model):
    """What an export came to. ``reused``: parts that an earlier run had written. ``was_done``: there was nothing to do."""

    path: str
    format: str
    objects: tuple[StoredObject, ...]
    parts: int
    reused: int
    was_done: bool
    byte_count: int
    seconds: dict[str, float]


def export(request: Export, output: str, runner: Runner) -> ExportResult:
    """Write a dataset's files in a format, those that an earlier run has not written, and the record of them."""
    meter.reset()
    seconds: dict[str, float] = {}
    store = target(output)
    if done := done_before(request, store):
        return export_result(done, seconds)
    parts = FORMATS[request.format].plan(request.source(), request.options)
    with writing(request, store), stage("export", seconds):
        meter.begin("export", TOKEN_BYTES * request.token_count)
        written: list[Written] = list(in_order(runner, write_part, parts, request, output, count_exported))
        done = runner.start(finish, request, written, output).result()
    meter.begin("done")
    return export_result(done, seconds)


def count_exported(tokens: int) -> None:
    meter.add("export", TOKEN_BYTES * tokens, 0, tokens)


def export_result(done: Exported, seconds: dict[str, float]) -> ExportResult:
    return ExportResult(**done._asdict(), byte_count=done.byte_count, seconds=seconds)


class ImportResult(Model):
    """What an import came to. ``parts_reused``: taken from an earlier run, not read again."""

    path: str
    version: str
    sequence: int
    was_published: bool
    format: str
    layout: LayoutName
    totals: dict[str, Any]
    byte_count: int
    parts: int
    parts_reused: int
    seconds: dict[str, float]


def import_files(request: ImportRequest, runner: Runner) -> ImportResult:
    """Publish what files in a format hold as a version, and let ``latest`` point at it. A version that is there is left."""
    meter.reset()
    seconds: dict[str, float] = {}
    root = check_output(request)
    check_apart(request, root)
    since = read_pointer(root).sequence
    with building(root, scratch_of(request)):
        with stage("examine", seconds):
            tokenizer = load_tokenizer(request.tokenizer) if request.tokenizer else None
            opened = open_import(request.path, request.format, request.options)
            files = Files.at(request.path)
            before = stamps(files.store, files.keys)
            meter.begin("examine", sum(size for size, *_ in before))
            stored: list[StoredObject] = list(in_order(runner, digest_file, files.keys, files.store.url))
            layout = layout_of(request, root)
            made_of = provenance(request, opened, stored, tokenizer)
            version = build_id(made_of, layout)
        if is_published(root, version, layout):
            with stage("finalize", seconds):
                verify(root.path(f"{VERSIONS}/{version}") if root.is_local else f"{root.url}/{VERSIONS}/{version}")
                sequence = publish(root, version, since)
            return import_result(request, opened.format, root, version, sequence, seconds, None)

        with attempt(request.output, scratch_of(request), version) as place:
            with stage("import", seconds):
                parts = parts_of(request, opened, stored, tokenizer.digest if tokenizer else None)
                reused = len(parts) - len(without_receipt(root, [digest_of(part.inputs()) for part in parts]))
                meter.begin("import", TOKEN_BYTES * sum(split.token_count for split in opened.splits.values()))
                places: list[ShardPlace] = []
                rule = SplitRule(fraction=request.validation_fraction or 0.0, seed=request.split_seed)
                shards = in_order(runner, import_part, parts, place)
                counted = count_in_order(place_parts(request, parts, shards), places, rule, place.root)
                spans = list(lay_out(counted, layout))
                check_unchanged(request, files, before)
                check_vocabulary(request, tokenizer, places)
            with stage("split", seconds):
                meter.begin("split", TOKEN_BYTES * sum(at.shard.token_count for at in places))
                written: list[WrittenSpan] = list(in_order(runner, write_span, spans, rule, layout, place, version))
            with stage("finalize", seconds):
                runner.start(
                    conclude_import, made_of, layout, spans, written, places, place, version, request.verify_level
                ).result()
                sequence = publish(root, version, since)
    return import_result(request, opened.format, root, version, sequence, seconds, (len(parts), reused))


def check_apart(request: ImportRequest, root: Store) -> None:
    """Refuse an output among the files: the next import would read what this one wrote."""
    files = Store.at(request.path)
    if not root.is_local or not files.is_local:
        return
    output, path = os.path.realpath(root.root), os.path.realpath(files.root)
    if os.path.commonpath([output, path]) in (output, path):
        raise ValueError(f"the output {request.output} and {request.path} lie within each other. Keep them apart.")


def layout_of(request: ImportRequest, root: Store) -> LayoutName:
    if request.layout != "auto":
        return request.layout
    return "mmap" if root.is_local else "compact"


def place_parts(request: ImportRequest, parts: list[ImportPart], shards: Iterator[TokenShard]) -> Iterator[ShardPlace]:
    """Each part's shard, in order, with the number of its split among those there are, and its first row of it."""
    numbers = {split: i for i, split in enumerate(dict.fromkeys(part.split for part in parts))}
    for part, shard in zip(parts, shards, strict=True):
        all_in = part.split if request.validation_fraction is None else None
        yield ShardPlace(shard=shard, file=numbers[part.split], first_row=part.start, all_in=all_in)


def check_unchanged(request: ImportRequest, files: Files, before: list[tuple[int, ...]]) -> None:
    if stamps(files.store, files.keys) != before:
        raise ValueError(f"{request.path}: was changed while it was read. Import it again when nobody writes to it.")


def check_vocabulary(request: ImportRequest, tokenizer: Tokenizer | None, places: list[ShardPlace]) -> None:
    """Refuse tokens that the tokenizer that is said to have made them does not have."""
    largest = max((at.shard.max_token_id for at in places), default=0)
    if tokenizer is not None and largest > tokenizer.highest_id:
        raise ValueError(
            f"{request.path}: holds token id {largest}, but those of {tokenizer.name} end at {tokenizer.highest_id}. Name the "
            "tokenizer that made the tokens, or none."
        )


def conclude_import(
    made_of: Provenance,
    layout: LayoutName,
    spans: list[Span],
    written: list[WrittenSpan],
    places: list[ShardPlace],
    place: Place,
    version: str,
    verify_level: str,
) -> str:
    """Write what is not tokens, check, commit; the version's name."""
    store, totals = place.root / VERSIONS / version, split_totals(spans, written)
    repeated = repeated_keys(store, layout, totals, Path(place.staging))
    # How much text it was, nobody knows.
    documents = {name: fact for name, fact in document_totals(places, repeated).items() if name != "text_bytes"}
    by_source = [{name: fact for name, fact in one.items() if name != "text_bytes"} for one in source_totals(made_of, places)]
    totals["documents"] = {**documents, "by_source": by_source}
    described = card(made_of, layout, totals, version)
    seal(store, layout, made_of.model_dump(), totals, written, described, verify_level)
    return version


def import_result(
    request: ImportRequest,
    format: str,
    root: Store,
    version: str,
    sequence: int,
    seconds: dict[str, float],
    parts: tuple[int, int] | None,
) -> ImportResult:
    """The result, and a record of the run. *parts*: how many there were, and how many were there before."""
    manifest = read_manifest(root / VERSIONS / version)
    result = ImportResult(
        path=f"{root.url}/{VERSIONS}/{version}",
        version=version,
        sequence=sequence,
        was_published=parts is None,
        format=format,
        layout=manifest["layout"],
        totals=manifest["totals"],
        byte_count=sum(stored["size"] for stored in manifest["objects"]),
        parts=parts[0] if parts else 0,
        parts_reused=parts[1] if parts else 0,
        seconds=seconds,
    )
    record_run(root, version, request.model_dump(mode="json"), result)
    return result
