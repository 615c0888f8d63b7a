"""Merge, subset, shuffle, relayout: datasets in, a published version out."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np

from flat_tokens.annotations import JsonObject, UInt64s
from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.formats import FLAT_TOKENS
from flat_tokens.manifest import TOKEN_BYTES, VERSIONS, read_manifest
from flat_tokens.reader import resolve
from flat_tokens.stores.local import real_path
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import note_export
from flows.pipelines.publish import PublishResult, opened, publication, timed
from flows.pipelines.stages import COUNT, EXAMINE, FINALIZE, MAKE_KEYS, SAMPLE, SHUFFLE, Runner, assembled, in_order
from tasks.derive.choice import ALL, DOCUMENT_BYTES, RADIX_BITS, PartCounts, Selection, count_unfound, positioned, save_list
from tasks.derive.inputs import (
    Input,
    cut_inputs,
    listed_by,
    settings_of_sources,
    splits_in,
    token_arrays_in,
    token_bytes_of,
)
from tasks.derive.provenance import DerivedProvenance, card, derived, kept_columns
from tasks.derive.request import DeriveRequest, Relayout, Shuffle, Subset
from tasks.derive.shuffle import shuffling_of
from tasks.finalize.provenance import forgotten_digest, without_forgotten
from tasks.finalize.seal import VersionDraft
from tasks.models import Split
from tasks.output.forgotten import check_without_forgotten, read_record_of
from tasks.output.paths import version_store
from tasks.output.places import check_apart, layout_of
from tasks.output.pointer import publish, read_pointer
from tasks.output.target import Target
from tasks.parts.part import BucketPart, InputPart, Part
from tasks.progress import meter

HASH_DIGITS, LAST_DIGIT = 64 // RADIX_BITS, (1 << RADIX_BITS) - 1


class DerivedResult(PublishResult):
    """Result of a merge, subset, shuffle or relayout. ``not_found``: keys or ids of a list, if any, that no document has."""

    operation: str
    not_found: int | None


def derive(request: DeriveRequest, runner: Runner) -> DerivedResult:
    """Publish a version that is made of other datasets. A version that is there already is left as it is."""
    check_inputs_apart(request)
    with opened(request) as output:
        with timed("examine", output.seconds):
            listed = listed_by(request.operation) if isinstance(request.operation, Subset) else None
            inputs: list[Input] = list(in_order(runner, request.inputs, EXAMINE.given()))
            for one in inputs:
                if one.version is not None:
                    above = Store.at(one.location.removesuffix(f"/{VERSIONS}/{one.version}"))
                    check_without_forgotten(above, one.version)
                    if above.url != output.root.url:
                        note_export(one.location, FLAT_TOKENS, request.output)
            made_of = without_forgotten(output.forgotten, derived(request, inputs, settings_of(request, listed)))
            layout = (inputs[0].layout if request.layout == "auto" else None) or layout_of(request, output.root)
        particular: JsonObject = {"operation": request.operation.operation, "not_found": None}
        if done := done_before(output.root, made_of, inputs[0], layout):
            publish(output.root, done, output.pointer.sequence)  # repairs what a death after the publication left
            # Not recorded: its inputs were others then.
            return output.result(DerivedResult, done, output.pointer.sequence, True, **particular)

        with publication(output, made_of, layout) as version:
            arrays, splits = token_arrays_in(inputs), splits_in(inputs)
            if target := version.target(splits=splits, token_arrays=arrays, columns=kept_columns(inputs)):
                with timed("count", output.seconds):
                    counted = counted_parts(request, inputs, listed, forgotten_digest(output.forgotten), runner, target)
                    chosen = {split: positioned(counted, split) for split in target.splits}
                    particular["not_found"] = None if listed is None else count_unfound(target.workspace)
                parts: dict[Split, list[Part]] = {split: [*of_split] for split, of_split in chosen.items()}
                if isinstance(request.operation, Shuffle):
                    with timed("shuffle", output.seconds):
                        parts |= shuffled(request.operation, chosen, runner, target)
                with timed("split", output.seconds):
                    written = assembled(runner, target, [part for of_split in parts.values() for part in of_split])
                with timed("finalize", output.seconds):
                    documents = partial(derived_totals, made_of, request, inputs, counted)
                    bytes_of = partial(token_bytes_of, made_of.tokenizer, inputs)
                    draft = VersionDraft(made_of, written, documents, card, token_bytes=bytes_of)
                    runner.start(target, FINALIZE.given(draft, request.verify_level)).result()
        return version.finish(DerivedResult, settings_of_sources(inputs), **particular)


def settings_of(request: DeriveRequest, listed: UInt64s | None) -> JsonObject:
    """The settings of an operation that its result depends on: instead of a list's place, its content."""
    settings = request.operation.model_dump(mode="json", exclude_defaults=True, exclude={"key_list", "id_list"})
    if listed is not None:
        settings["listed"] = {"count": len(listed), "sha256": hashlib.sha256(listed.astype("<u8").tobytes()).hexdigest()}
    return {"operation": request.operation.operation, **settings}


def check_inputs_apart(request: DeriveRequest) -> None:
    """Refuse an output within an input: versions are not changed once they are published."""
    root = Store.at(request.output)
    output = real_path(root.root) if root.is_local else root.url
    for path in request.inputs:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # which is reported when it is examined
            check_apart(output, resolve(Store.at(path)).url, f"the output {request.output} is within the dataset {path}")


def done_before(root: Store, made_of: DerivedProvenance, first: Input, layout: LayoutName) -> str | None:
    """The latest version of an output, if it is the first input and was made of the version before it in the same way:
    appending the same again, or shuffling again with the same seed, does nothing. Else None.
    """
    pointer = read_pointer(root)
    latest = pointer.version
    if latest is None or first.location != version_store(root, latest).url or first.layout != layout:
        return None
    if made_of.operation == {"operation": Relayout().operation}:
        return latest
    before = read_manifest(version_store(root, latest))["provenance"]
    record = read_record_of(root)
    replaced = record.successors if record else {}
    former = pointer.names("former")[-1:]
    inputs, now = before.get("inputs") or [{}], made_of.model_dump(mode="json")
    was = inputs[0].get("version")
    while was in replaced:
        was = replaced[was]
    in_place = [was] == former
    same = before.get("operation") == now["operation"] and before.get("name") == now["name"]
    return latest if in_place and same and inputs[1:] == now["inputs"][1:] else None


def counted_parts(
    request: DeriveRequest, inputs: Sequence[Input], listed: UInt64s | None, forgotten: str, runner: Runner, target: Target
) -> list[tuple[InputPart, PartCounts]]:
    """Cut the inputs, choose, and count what is taken of each part. *forgotten*: the digest of the output's list."""
    if listed is not None:
        save_list(listed, target.workspace)
    subset = request.operation if isinstance(request.operation, Subset) else ALL
    selection, parts = Selection(subset, forgotten=forgotten), cut_inputs(inputs, subset.sources)
    # A sample by count reads what is known of documents several times. Tokens are read if keys are made of them.
    times = 1 if getattr(request.operation, "count", None) is None else HASH_DIGITS + 2
    tokens = sum(sum(one.token_counts.values()) for one in inputs if not one.has_documents)
    meter.begin("count", times * DOCUMENT_BYTES * sum(part.stop - part.start for part in parts) + TOKEN_BYTES * tokens)
    list(in_order(runner, [part for part in parts if part.made_keys is not None], MAKE_KEYS.given(target)))
    selection, parts = sampled(selection, parts, target, runner)
    return list(zip(parts, in_order(runner, parts, COUNT.given(target, selection)), strict=True))


def sampled(selection: Selection, parts: list[InputPart], target: Target, runner: Runner) -> tuple[Selection, list[InputPart]]:
    """The selection with its sample, and the parts with their shares of the documents that have the last hash in it."""
    request = selection.of
    splits = (request.split,) if request.split else target.splits
    if request.fraction is not None:
        share = dict.fromkeys(splits, int(request.fraction * 2**64))
        return selection._replace(below=share), parts
    if request.count is None:
        return selection, parts
    mine = [part for part in parts if part.split in splits]
    prefix, missing = dict.fromkeys(splits, 0), dict.fromkeys(splits, request.count)
    # The hash of the count-th document, sixteen bits at a time; the largest one of all if there are fewer.
    for digits in range(HASH_DIGITS):
        sums = {split: np.zeros(1 << RADIX_BITS, np.int64) for split in splits}
        for part, found in zip(mine, in_order(runner, mine, SAMPLE.given(target, selection, prefix, digits)), strict=True):
            sums[part.split] += found
        for split, counts in sums.items():
            value = min(int(np.searchsorted(np.cumsum(counts), missing[split])), LAST_DIGIT)
            missing[split] -= int(counts[:value].sum())
            prefix[split] = prefix[split] << RADIX_BITS | value
    ties: dict[tuple[Split, int], int] = {}
    before = {split: value >> RADIX_BITS for split, value in prefix.items()}
    step = SAMPLE.given(target, selection, before, HASH_DIGITS - 1)
    for part, found in zip(mine, in_order(runner, mine, step), strict=True):
        ties[part.split, part.number] = taken = min(int(found[prefix[part.split] & LAST_DIGIT]), missing[part.split])
        missing[part.split] -= taken
    tied = [part.model_copy(update={"ties": ties.get((part.split, part.number), 0)}) for part in parts]
    return selection._replace(below=prefix), tied


def shuffled(request: Shuffle, chosen: dict[Split, list[InputPart]], runner: Runner, target: Target) -> dict[Split, list[Part]]:
    """Buckets of the documents of the splits that are shuffled. *chosen*: the parts that are taken of the inputs, by split."""
    buckets: dict[Split, list[Part]] = {}
    of_splits = {split: parts for split, parts in chosen.items() if request.split in (None, split) and parts}
    shufflings = {split: shuffling_of(split, request.seed, parts, target.columns) for split, parts in of_splits.items()}
    parts = [part for of_split in of_splits.values() for part in of_split]
    meter.begin("shuffle", TOKEN_BYTES * sum(part.token_count for part in parts))
    scattered = zip(parts, in_order(runner, parts, SHUFFLE.given(target, shufflings)), strict=True)
    for split, of_split in groupby(scattered, lambda pair: pair[0].split):
        shuffling = shufflings[split]
        bounds = shuffling.bounds().astype(np.int64)
        tokens = np.zeros(shuffling.buckets, np.int64)
        for _, found in of_split:
            tokens += found
        ends = np.cumsum(tokens)
        buckets[split] = [
            BucketPart(
                shuffling=shuffling,
                stored_parts=len(of_splits[split]),
                number=b,
                first_seq=int(bounds[b]),
                seq_count=int(bounds[b + 1] - bounds[b]),
                first_token=int(ends[b] - tokens[b]),
                token_count=int(tokens[b]),
            )
            for b in range(shuffling.buckets)
        ]
    return buckets


def derived_totals(
    made_of: DerivedProvenance,
    request: DeriveRequest,
    inputs: Sequence[Input],
    counted: Sequence[tuple[InputPart, PartCounts]],
    repeated: int,
) -> JsonObject:
    """Totals of the documents of a derived dataset."""
    skipped: Counter[str] = Counter()
    by_source = np.zeros((len(made_of.sources), 2), np.int64)
    for part, count in counted:
        skipped.update(count.skipped)
        by_source[part.source : part.source + len(count.sources)] += np.array(count.sources)
    texts = [one.text_bytes for one in inputs]
    known = sum(filter(None, texts)) if None not in texts and not isinstance(request.operation, Subset) else None
    read, written = sum(sum(one.seq_counts.values()) for one in inputs), int(by_source[:, 0].sum())
    if read != written + skipped.total():
        raise AssertionError(f"documents read {read}, written {written}, skipped {skipped}")
    return {
        "read": read,
        "written": written,
        "skipped": dict(sorted(skipped.items())),
        "replaced": {},
        **({} if known is None else {"text_bytes": known}),
        "by_source": [
            {"name": source["name"], "written": documents, "token_count": tokens}
            for source, (documents, tokens) in zip(made_of.sources, by_source.tolist(), strict=True)
        ],
        "repeated_keys": repeated,
    }
