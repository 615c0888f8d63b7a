"""Merge, subset, shuffle, relayout: datasets in, a published version out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.columns import Kinds
from flat_tokens.manifest import SPLITS, TOKEN_BYTES, read_manifest
from flat_tokens.reader import resolve
from flat_tokens.stores.local import real_path
from flat_tokens.stores.store import Store
from flows.pipelines.publish import Published, check_apart, layout_of, opened, publication, timed
from flows.pipelines.stages import COUNT, EXAMINE, FINALIZE, MAKE_KEYS, SAMPLE, SHUFFLE, WRITE, Runner, in_order
from tasks.derive.inputs import Input, settings_of_sources
from tasks.derive.pieces import DOCUMENT_BYTES, RADIX_BITS, Counted, Listed, Piece, Selection, cut, read_ids, read_keys
from tasks.derive.provenance import Derived, card, derived, kept_columns
from tasks.derive.request import DeriveRequest, Relayout, Shuffle, Subset
from tasks.derive.shuffle import Bucket, shuffling_of
from tasks.derive.write import lay_out, place_pieces
from tasks.finalize.seal import Contents
from tasks.models import Split
from tasks.output.paths import version_store
from tasks.output.pointer import publish, read_pointer
from tasks.output.staging import Place
from tasks.progress import meter

LISTED = "listed.npy"
HASH_DIGITS = 64 // RADIX_BITS


class DerivedResult(Published):
    """Result of a merge, subset, shuffle or relayout. ``not_found``: keys or ids of a list, if any, that no document has."""

    operation: str
    not_found: int | None


def derive(request: DeriveRequest, runner: Runner) -> DerivedResult:
    """Publish a version that is made of other datasets. A version that is there already is left as it is."""
    check_inputs_apart(request)
    with opened(request) as output:
        with timed("examine", output.seconds):
            listed = listed_in(request)
            inputs: list[Input] = list(in_order(runner, request.inputs, EXAMINE.given()))
            made_of, kinds = derived(request, inputs, settings_of(request, listed)), kept_columns(inputs)
            layout = (inputs[0].layout if request.layout == "auto" else None) or layout_of(request, output.root)
        particular: dict[str, Any] = {"operation": request.operation.operation, "not_found": None}
        if done := done_before(output.root, made_of, inputs[0], layout):
            publish(output.root, done, output.pointer.sequence)  # mends what a death behind the publication left
            # Not recorded: its inputs were others then.
            return output.result(DerivedResult, done, output.pointer.sequence, True, **particular)

        with publication(output, made_of, layout) as version:
            if place := version.place:
                with timed("count", output.seconds):
                    plan = plan_of(request, inputs, listed, runner, place)
                    particular["not_found"] = listed.count_unfound(Path(place.staging) / LISTED) if listed else None
                parts: dict[Split, list[Piece | Bucket]] = {split: [*plan.pieces[split]] for split in SPLITS}
                if isinstance(request.operation, Shuffle):
                    with timed("shuffle", output.seconds):
                        parts |= shuffled(request.operation, plan, kinds, runner, place)
                with timed("split", output.seconds):
                    meter.begin("split", TOKEN_BYTES * sum(part.token_count for split in SPLITS for part in parts[split]))
                    spans = lay_out(parts, layout, any(one.masked for one in inputs), kinds)
                    written = list(in_order(runner, spans, WRITE.given(plan.selection, layout, place, version.name)))
                with timed("finalize", output.seconds):
                    documents = partial(documents_of, made_of, request, inputs, plan)
                    contents = Contents(made_of, layout, spans, written, documents, card, columns=kinds)
                    runner.start(version.name, FINALIZE.given(contents, place, request.verify_level)).result()
        return version.finish(DerivedResult, settings_of_sources(inputs), **particular)


def listed_in(request: DeriveRequest) -> Listed | None:
    """The documents that a subset's list names, None where it has none."""
    if not isinstance(request.operation, Subset):
        return None
    if request.operation.key_list is not None:
        return read_keys(request.operation.key_list)
    return None if request.operation.id_list is None else read_ids(request.operation.id_list)


def settings_of(request: DeriveRequest, listed: Listed | None) -> dict[str, Any]:
    """The settings of an operation that its result depends on: instead of a list's place, its content."""
    settings = request.operation.model_dump(mode="json", exclude_defaults=True, exclude={"key_list", "id_list"})
    return {"operation": request.operation.operation, **settings, **({"listed": listed.facts()} if listed else {})}


def check_inputs_apart(request: DeriveRequest) -> None:
    """Refuse an output within an input: versions are not changed once they are published."""
    root = Store.at(request.output)
    output = real_path(root.root) if root.is_local else root.url
    for path in request.inputs:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # which is told when it is examined
            check_apart(output, resolve(Store.at(path)).url, f"the output {request.output} lies within the dataset {path}")


def done_before(root: Store, made_of: Derived, first: Input, layout: LayoutName) -> str | None:
    """The latest version of an output, where it is the first input, and was made of the version before it just as it would be
    made now: appending the same again, or shuffling again with the same seed, does nothing.
    """
    pointer = read_pointer(root)
    latest = pointer.version
    if latest is None or first.location != version_store(root, latest).url or first.layout != layout:
        return None
    if made_of.operation == {"operation": Relayout().operation}:
        return latest
    before = read_manifest(version_store(root, latest))["provenance"]
    former = [one.version for one in pointer.former[-1:]]
    inputs, now = before.get("inputs") or [{}], made_of.model_dump(mode="json")
    in_place = [inputs[0].get("version")] == former
    same = before.get("operation") == now["operation"] and before.get("name") == now["name"]
    return latest if in_place and same and inputs[1:] == now["inputs"][1:] else None


class Plan(NamedTuple):
    """The pieces that a version is made of, each where it lands, what is taken of them, and what was counted of each."""

    pieces: dict[Split, list[Piece]]
    selection: Selection
    counted: list[tuple[Piece, Counted]]


def plan_of(request: DeriveRequest, inputs: Sequence[Input], listed: Listed | None, runner: Runner, place: Place) -> Plan:
    """Cut the inputs, choose, count, and place what is taken one behind the other."""
    wanted, selection = None, Selection()
    if listed:
        listed.save(Path(place.staging) / LISTED)
    if isinstance(request.operation, Subset):
        wanted = request.operation.sources
        selection = Selection(
            splits=(request.operation.split,) if request.operation.split else SPLITS,
            dropped=request.operation.drop,
            min_tokens=request.operation.min_tokens,
            max_tokens=request.operation.max_tokens,
            where=request.operation.where,
            listed=LISTED if listed else None,
            seed=request.operation.seed,
        )
    pieces = cut(inputs, wanted)
    meter.begin("count", bytes_to_count(request, inputs, pieces))
    list(in_order(runner, [piece for piece in pieces if piece.made_keys is not None], MAKE_KEYS.given(place)))
    if isinstance(request.operation, Subset):
        selection, pieces = sampled(request.operation, selection, pieces, runner, place)
    counted = list(zip(pieces, in_order(runner, pieces, COUNT.given(selection, place)), strict=True))
    taken = [piece.model_copy(update={"seq_count": n.seq_count, "token_count": n.token_count}) for piece, n in counted]
    placed = {split: place_pieces([piece for piece in taken if piece.split == split]) for split in SPLITS}
    return Plan(placed, selection, counted)


def bytes_to_count(request: DeriveRequest, inputs: Sequence[Input], pieces: Sequence[Piece]) -> int:
    """Bytes that are read to count documents, several times for a sample by count, and tokens where keys are made of them."""
    by_count = isinstance(request.operation, Subset) and request.operation.count is not None
    tokens = sum(sum(one.token_counts.values()) for one in inputs if not one.has_documents)
    times = HASH_DIGITS + 2 if by_count else 1
    return times * DOCUMENT_BYTES * sum(piece.stop - piece.start for piece in pieces) + TOKEN_BYTES * tokens


def sampled(
    request: Subset, selection: Selection, pieces: list[Piece], runner: Runner, place: Place
) -> tuple[Selection, list[Piece]]:
    """The selection with its sample, and the pieces with their shares of the documents whose hash is the last one in it."""
    if request.fraction is not None:
        share = dict.fromkeys(selection.splits, int(request.fraction * 2**64))
        return selection.model_copy(update={"below": share}), pieces
    if request.count is None:
        return selection, pieces
    mine = [piece for piece in pieces if piece.split in selection.splits]
    prefix, missing = dict.fromkeys(selection.splits, 0), dict.fromkeys(selection.splits, request.count)
    below: dict[Split, int] = {}
    # The hash of the count-th document, sixteen bits at a time.
    for digits in range(HASH_DIGITS):
        sums = {split: np.zeros(1 << RADIX_BITS, np.int64) for split in selection.splits}
        for piece, found in zip(mine, in_order(runner, mine, SAMPLE.given(selection, place, prefix, digits)), strict=True):
            sums[piece.split] += found
        for split, counts in sums.items():
            if split not in below and (request.count == 0 or counts.sum() < missing[split]):
                below[split] = (1 << 64) if request.count else 0
            if split in below:
                continue
            value = int(np.searchsorted(np.cumsum(counts), missing[split]))
            missing[split] -= int(counts[:value].sum())
            prefix[split] = prefix[split] << RADIX_BITS | value
    tied = {split: prefix[split] for split in selection.splits if split not in below}
    selection = selection.model_copy(update={"below": {**tied, **below}})
    mine = [piece for piece in pieces if piece.split in tied]
    ties: dict[tuple[Split, int], int] = {}
    before = {split: value >> RADIX_BITS for split, value in tied.items()}
    for piece, found in zip(mine, in_order(runner, mine, SAMPLE.given(selection, place, before, HASH_DIGITS - 1)), strict=True):
        taken = min(int(found[tied[piece.split] % (1 << RADIX_BITS)]), missing[piece.split])
        ties[piece.split, piece.number] = taken
        missing[piece.split] -= taken
    return selection, [piece.model_copy(update={"ties": ties.get((piece.split, piece.number), 0)}) for piece in pieces]


def shuffled(request: Shuffle, plan: Plan, kinds: Kinds, runner: Runner, place: Place) -> dict[Split, list[Piece | Bucket]]:
    """Buckets of the documents of the splits that are shuffled."""
    parts: dict[Split, list[Piece | Bucket]] = {}
    chosen = [split for split in SPLITS if request.split in (None, split) and plan.pieces[split]]
    shufflings = {split: shuffling_of(split, request.seed, plan.pieces[split], kinds) for split in chosen}
    pieces = [piece for split in shufflings for piece in plan.pieces[split]]
    meter.begin("shuffle", TOKEN_BYTES * sum(piece.token_count for piece in pieces))
    scattered = zip(pieces, in_order(runner, pieces, SHUFFLE.given(shufflings, place)), strict=True)
    for split, of_split in groupby(scattered, lambda pair: pair[0].split):
        shuffling = shufflings[split]
        bounds = shuffling.bounds().astype(np.int64)
        tokens = np.zeros(shuffling.buckets, np.int64)
        for _, found in of_split:
            tokens += found
        ends = np.cumsum(tokens)
        parts[split] = [
            Bucket(
                shuffling=shuffling,
                pieces=len(plan.pieces[split]),
                number=b,
                first_seq=int(bounds[b]),
                seq_count=int(bounds[b + 1] - bounds[b]),
                first_token=int(ends[b] - tokens[b]),
                token_count=int(tokens[b]),
            )
            for b in range(shuffling.buckets)
        ]
    return parts


def documents_of(made_of: Derived, request: DeriveRequest, inputs: Sequence[Input], plan: Plan, repeated: int) -> dict[str, Any]:
    """Totals of the documents of a derived dataset."""
    skipped: Counter[str] = Counter()
    by_source = np.zeros((len(made_of.sources), 2), np.int64)
    for piece, count in plan.counted:
        skipped.update(count.skipped)
        by_source[piece.source : piece.source + len(count.sources)] += np.array(count.sources)
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
