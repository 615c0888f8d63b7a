"""A dry run: what a build would do and cost, from a sample of its sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pydantic import Field

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.stores.store import Store
from flows.pipelines.publish import OpenOutput
from flows.pipelines.text import Text, check_files, files_of, pin_sets, pin_sources, warn_of_separators
from tasks.assemble.write import SPAN_TOKENS
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import copied_bytes, cut_files, fetching_to, is_by_ranges, scratch_for
from tasks.download.outlines import servers_of_whole
from tasks.download.slices import MEAN_PART, MOST_FILES, SMALL_PART, slices_of
from tasks.download.small import packs_of
from tasks.finalize.facts import VersionFacts, facts_before, reasons_of, share_skipped
from tasks.finalize.provenance import forgotten_digest
from tasks.gates import Facts, FactValues, Finding, Subject, judge
from tasks.models import FoundFile, Model, PinnedSource, Slice, SourceFile
from tasks.output.forgotten import read_record_of
from tasks.output.leases import Workspace
from tasks.output.places import check_writable, layout_of, reading_at, scratch_of
from tasks.output.pointer import is_dataset, read_pointer
from tasks.output.versions import if_there
from tasks.shards.index import indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.shards.sample import Sums, clock, free_space, lack_of_room, measure, room_for
from tasks.shards.stored import with_tried_engine
from tasks.text.documents import Tally
from tasks.tokenize.chat import chats_of
from tasks.tokenize.engines import Tokenizer
from tasks.tokenize.tokenizers import load_tokenizer

READ_WHOLE_BYTES = 2 << 30
READ_WHOLE_FILES = 20_000
"""Local sources of at most these bytes and files are looked into file by file, so that what is found is exact."""
SAMPLED_FILES, SAMPLED_LOCAL_FILES = 2, 1_000
"""Files of other sources that are looked into, where a file has to be fetched, and where it is local."""
NOT_RECKONED = 0.005
"""The share of a dataset that is not reckoned, such as its kept columns."""
WRITING_SECONDS = 8e-9
"""Seconds to write a token twice, to its token shard and to the dataset; what compressing takes is measured."""


class Loss(Model):
    """Documents of a sample that a step leaves out, and by which reasons. ``share``: of the documents that were read. ``found``:
    those in which it found something, by what it was.
    """

    step: str
    documents: int
    share: float
    reasons: dict[str, int]
    found: dict[str, int] = Field({})


class Plan(Model):
    """Forecast of a build. ``exact``: every file was looked into: only documents, tokens, text and what follows are estimates.
    ``scratch_bytes``: most that fetched and unpacked files take in scratch; None: no bound. ``keeps_files``: they stay there, but
    for Parquet. ``whole_files_of``: web servers that send no ranges of Parquet and Arrow files. ``losses``: of each step, in a
    sample of ``sampled_documents``. ``findings``: what the gates of a refresh would find, by these estimates; ``untold``: the
    facts of gates of which a sample says nothing. ``pinned``: sources with a revision, and which.
    """

    version: str | None
    is_published: bool
    exact: bool
    files: int
    file_bytes: int
    documents: int
    tokens: int
    tokens_low: int
    tokens_high: int
    bytes_per_token: float
    engine: str
    text_bytes: int
    slices: int
    slices_stored: int
    layout: LayoutName
    dataset_bytes: int
    dataset_bytes_low: int
    dataset_bytes_high: int
    disk_bytes: int
    disk_free: int | None
    scratch_bytes: int | None
    keeps_files: bool
    whole_files_of: tuple[str, ...] = ()
    warning: str | None = None
    workers: int
    seconds: float
    sampled_documents: int
    losses: tuple[Loss, ...]
    findings: tuple[Finding, ...] = ()
    untold: tuple[str, ...] = ()
    pinned: dict[str, str] = Field({})


def plan(config: BuildConfig) -> Plan:
    """Resolve the sources, look into a few files and slices, and reckon. Writes no dataset, only fetched files.

    ValueError for all that a build would refuse before it starts, as far as the sampled files show it.
    """
    begun = clock()
    root, workers = Store.at(config.output), config.workers or available_cores()
    layout = layout_of(config, root)
    check_writable(root)
    config = pin_sets(config, root, Store.at(scratch_of(config, root)) / "sets")
    config, pinned = pin_sources(config, root)
    tokenizer = load_tokenizer(config.tokenizer)
    output = OpenOutput(config, root, scratch_of(config, root), read_pointer(root), read_record_of(root))
    found = files_of(pinned)
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    with fetching_to(config, reading_at(config, root), found) as workspace:
        looked = look_into(config, pinned, workspace, workers)
        slices = [part for parts in looked.slices for part in parts]
        recipe = Recipe.of(config, tokenizer, chats, forgotten_digest(output.forgotten))
        recipe = with_tried_engine(recipe, config, workspace, tokenizer, slices)
        starting = clock() - begun - looked.seconds  # a build does all of this, too
        whole, of_sources, slice_count = forecast_of(config, pinned, looked, recipe, tokenizer, workspace)

    complete = len(looked.files) == len(found)
    latest = output.pointer.version
    version = Text(pinned, looked.files).makes(config, tokenizer, output).named.version if complete else None
    published = version is not None and is_dataset(root, version)
    # Tokens are compressed by one thread a span.
    packing = whole.packing / min(workers, max(whole.tokens / SPAN_TOKENS, 1))
    making = 0.0 if published else starting + whole.reading / workers + packing + whole.tokens * WRITING_SECONDS
    dataset_bytes, disk_bytes = room_for(config, root, whole, recipe, slices)
    free = free_space(root)
    dataset_error = math.hypot(whole.dataset_error, NOT_RECKONED * dataset_bytes)
    facts = {} if published and version == latest else forecast_facts(config, whole, of_sources)
    findings, untold = gates_forecast(config, root, latest, facts) if facts else ((), ())
    return Plan(
        version=version,
        is_published=published,
        exact=complete,
        files=len(found),
        file_bytes=round(_size(looked.chosen if complete else found)),
        documents=round(whole.documents),
        tokens=round(whole.tokens),
        tokens_low=max(round(whole.tokens - whole.token_error), 0),
        tokens_high=round(whole.tokens + whole.token_error),
        bytes_per_token=round(whole.text_bytes / max(whole.tokens, 1), 3),
        engine="the fast" if recipe.fast and not recipe.by_reference else "the reference",
        text_bytes=round(whole.text_bytes),
        slices=slice_count,
        slices_stored=whole.slices_stored,
        layout=layout,
        dataset_bytes=round(dataset_bytes),
        dataset_bytes_low=max(round(dataset_bytes - dataset_error), 0),
        dataset_bytes_high=round(dataset_bytes + dataset_error),
        disk_bytes=disk_bytes,
        disk_free=free,
        scratch_bytes=workspace.room if any(map(scratch_for, found)) else 0,
        keeps_files=workspace.keeps,
        whole_files_of=servers_of_whole(found),
        warning=None if published else lack_of_room(root, disk_bytes, free),
        workers=workers,
        seconds=round(looked.seconds * _size(found) / max(_size(looked.chosen), 1) + making, 1),
        sampled_documents=whole.counts.read,
        losses=losses_of(recipe, whole.counts),
        findings=findings,
        untold=untold,
        pinned={
            source.name: f"{of.origin} at {of.revision}" for source, of in zip(config.sources, pinned, strict=True) if of.revision
        },
    )


class LookedInto(NamedTuple):
    """The files that were looked into: as they were *chosen*, and cut; the slices of each source; the seconds that it took."""

    chosen: list[FoundFile]
    files: list[SourceFile]
    slices: list[list[Slice]]
    seconds: float


def look_into(config: BuildConfig, pinned: Sequence[PinnedSource], workspace: Workspace, workers: int) -> LookedInto:
    """Cut some files of each source. ValueError for what a build would refuse."""
    begun = clock()
    chosen = [file for source in pinned for file in to_sample(source.files)]
    with ThreadPoolExecutor(workers) as pool:
        packs = pool.map(lambda pack: cut_files(pack, config.sources, config.slice_bytes, workspace), packs_of(chosen))
        cuts = [cut for pack in packs for cut in pack]
    seconds, files = clock() - begun, [cut.file for cut in cuts]
    # Not every server says a file's size before it sends it.
    chosen = [file if file.size else file._replace(size=here.size) for file, here in zip(chosen, files, strict=True)]
    check_files(config, files)
    warn_of_separators(config, files)
    slices = [
        list(slices_of((cut for cut in cuts if cut.file.source == index), config.slice_bytes)) for index in range(len(pinned))
    ]
    return LookedInto(chosen, files, slices, seconds)


def forecast_of(
    config: BuildConfig,
    pinned: Sequence[PinnedSource],
    looked: LookedInto,
    recipe: Recipe,
    tokenizer: Tokenizer,
    workspace: Workspace,
) -> tuple[Sums, dict[str, Sums], int]:
    """Read and tokenize a sample of each source, and reckon what all of it makes: the sums of all sources, and of each by its
    name, and the number of slices.
    """
    root = workspace.root
    indexed, whole, slice_count, of_sources = indexed_versions(root), Sums(), 0, dict[str, Sums]()
    for index, (source, parts) in enumerate(zip(pinned, looked.slices, strict=True)):
        mine = [(found, file) for found, file in zip(looked.chosen, looked.files, strict=True) if file.source == index]
        looked_into = _size(found for found, _ in mine)
        sums = of_sources[config.sources[index].name] = Sums()
        sample = measure(config, recipe, workspace, tokenizer, parts)
        # (sampled files) -> (all files of the source): by their bytes as they are stored
        scale = _size(source.files) / looked_into if len(mine) < len(source.files) else 1.0
        whole.add(sample, scale)
        sums.add(sample, scale)
        unknown = without_tokens(root, indexed, list(map(recipe.key, parts)))
        stored = len(parts) - len(without_receipt(root, unknown))
        whole.slices_stored += stored
        kept = (copied_bytes(*one) for one in mine if workspace.keeps and not is_by_ranges(one[1], workspace))
        whole.copied_bytes += sum(kept) * scale
        text, tokens = sample.of_total(sample.text)[0] * scale, sample.of_total(sample.tokens)[0] * scale
        whole.reading += sample.seconds * text * (1 - stored / max(len(parts), 1))
        whole.packing += sample.packing * tokens
        names = {found.name for found, _ in mine}
        others = [sample.total / looked_into * (file.size or 0) for file in source.files if file.name not in names]
        slice_count += len(parts) + slices_forecast(others, config.slice_bytes)
    return whole, of_sources, slice_count


def forecast_facts(config: BuildConfig, whole: Sums, of_sources: dict[str, Sums]) -> Facts:
    """Facts of the version by the sums of a sample, at all places that gates may name."""
    facts = FactValues()
    places = {Subject(source=source): (sums, 1.0) for source, sums in {"": whole, **of_sources}.items()}
    if not any(source.validation_split or source.split for source in config.sources):
        places |= {Subject(split=split): (whole, share) for split, share in config.shares.items()}
    for place, (sums, share) in places.items():
        estimates = {"documents": sums.documents, "tokens": sums.tokens, "text_bytes": sums.text_bytes}
        facts |= {(fact, place): round(value * share) for fact, value in estimates.items()}
        facts["bytes_per_token", place] = sums.text_bytes / sums.tokens if sums.tokens else 0.0
        for gate in config.publish.gates:
            if gate.of == "skipped_share" and not place.split:
                here = place._replace(step=gate.step or "", reason=gate.reason or "")
                facts[gate.of, here] = share_skipped(sums.counts.skipped, sums.counts.read, here)
    return facts


def gates_forecast(
    config: BuildConfig, root: Store, latest: str | None, facts: Facts
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings of a refresh's gates by the *facts* of a sample, and the facts that it lacks."""
    gates = [gate for gate in config.publish.of_refresh() if gate.of != "split_changes" or gate in config.publish.gates]
    before = if_there(root, latest, lambda _: facts_before(VersionFacts(root, str(latest)), facts))
    there = [gate for gate in gates if any(fact == gate.of and gate.is_at(place) for fact, place in facts)]
    untold = [gate.of for gate in gates if gate not in there]
    return tuple(judge(there, facts, before)), tuple(dict.fromkeys(untold))


def slices_forecast(text_bytes: Sequence[float], slice_bytes: int) -> int:
    """An estimate of the number of slices, from the bytes of text of each file: large files alone, small ones in runs."""
    large = [size for size in text_bytes if SMALL_PART * size > slice_bytes]
    small = (sum(text_bytes) - sum(large)) / slice_bytes + (len(text_bytes) - len(large)) / MOST_FILES
    return sum(max(1, round(size / slice_bytes)) for size in large) + round(MEAN_PART * small)


def losses_of(recipe: Recipe, sampled: Tally) -> tuple[Loss, ...]:
    """The loss of each step: the documents of a sample that it leaves out."""
    losses = []
    for name in (step["name"] for step in recipe.steps):
        reasons, found = (reasons_of(name, dict(sorted(counts.items()))) for counts in (sampled.skipped, sampled.matches))
        count = sum(reasons.values())
        losses.append(
            Loss(step=name, documents=count, share=round(count / max(sampled.read, 1), 6), reasons=reasons, found=found)
        )
    return tuple(losses)


def to_sample(files: tuple[FoundFile, ...]) -> list[FoundFile]:
    """The files of a source that are looked into: all of them where that is quick, else a few, spread over all."""
    is_local = all("://" not in file.uri for file in files)
    if is_local and len(files) <= READ_WHOLE_FILES and _size(files) <= READ_WHOLE_BYTES:
        return list(files)
    is_many = is_local and len(files) > READ_WHOLE_FILES
    return list(files[:: -(-len(files) // (SAMPLED_LOCAL_FILES if is_many else SAMPLED_FILES))])


def _size(files: Iterable[FoundFile]) -> float:
    """Stored bytes of the files. An unknown size counts as the mean of the known ones."""
    sizes = [file.size for file in files]
    known = [size for size in sizes if size is not None]
    return sum(known) * len(sizes) / len(known) if known else float(len(sizes))
