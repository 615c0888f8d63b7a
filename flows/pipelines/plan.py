"""A dry run: what a build would do and cost, from a sample of its sources."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import Store
from flows.pipelines.build import check_files, files_of, make_recipe, pin_sources, warn_of_separators
from flows.pipelines.publish import layout_of, scratch_of
from flows.pipelines.room import existing, free_space, lack_of_room
from flows.pipelines.sample import Sample, bytes_of_objects, clock, measure
from tasks.assemble.spans import SPAN_TOKENS
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import cut_files
from tasks.download.slices import MEAN_PART, SMALL_PART, slices_of
from tasks.download.small import packs_of
from tasks.finalize.facts import VersionFacts, facts_before, share_skipped
from tasks.finalize.provenance import build_id, provenance
from tasks.finalize.seal import is_published
from tasks.gates import Facts, Finding, Place, judge
from tasks.models import FoundFile, Model, SourceFile
from tasks.output.pointer import read_pointer
from tasks.output.staging import Workspace
from tasks.output.versions import if_there
from tasks.parts.input import DOCUMENT_ARRAYS
from tasks.parts.stored import document_spec
from tasks.parts.unfinished import may_stream
from tasks.shards.index import indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally
from tasks.tokenize.chat import chats_of
from tasks.tokenize.tokenizers import load_tokenizer

READ_WHOLE_BYTES = 2 << 30
"""Local sources up to this size are looked into file by file, so that what is found is exact."""
SAMPLED_FILES = 2
UNSEEN = 0.25
"""How much files that nobody looked into may differ from those that were, as a share."""
METADATA_BYTES, NOT_RECKONED = 20_000, 0.005
"""Bytes of a version's metadata, manifest and card; and the share of a dataset that is not reckoned, such as its kept columns."""
BESIDE_BYTES = 14
"""Bytes a document takes next to its tokens in its token shard: its start, key and row."""
WRITING_SECONDS = 8e-9
"""Seconds to write a token twice, to its token shard and to the dataset; what compressing takes is measured."""


class Loss(Model):
    """Documents of a sample that a step leaves out, and by which reasons. ``share``: of the documents that were read."""

    step: str
    documents: int
    share: float
    reasons: dict[str, int]


class Plan(Model):
    """Forecast of a build. ``exact``: every file was looked into: only documents, tokens, text and what follows are estimates.
    ``losses``: of each step, in a sample of ``sampled_documents``. ``findings``: what the gates of a refresh would find, by these
    estimates; ``untold``: the facts of gates of which a sample says nothing.
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
    warning: str | None = None
    workers: int
    seconds: float
    sampled_documents: int
    losses: tuple[Loss, ...]
    findings: tuple[Finding, ...] = ()
    untold: tuple[str, ...] = ()


def plan(config: BuildConfig) -> Plan:
    """Resolve the sources, look into a few files and slices, and reckon. Writes no dataset, only fetched files.

    ValueError for all that a build would refuse before it starts, as far as the sampled files show it.
    """
    begun = clock()
    root = Store.at(config.output)
    layout = layout_of(config, root)
    check_writable(root)
    pinned = pin_sources(config, root)
    tokenizer = load_tokenizer(config.tokenizer)
    found = files_of(pinned)
    chosen = [file for source in pinned for file in to_sample(source.files)]
    workspace = Workspace(root, staging="", scratch=os.fspath(scratch_of(config, root)))
    workers = config.workers or available_cores()
    looking = clock()
    with ThreadPoolExecutor(workers) as pool:
        packs = pool.map(lambda pack: cut_files(pack, config.sources, config.slice_bytes, workspace), packs_of(chosen))
        cuts = [cut for pack in packs for cut in pack]
    looked = clock()
    files = [cut.file for cut in cuts]
    # Not every server says a file's size before it sends it.
    chosen = [file if file.size else file._replace(size=here.size) for file, here in zip(chosen, files, strict=True)]
    check_files(config, files)
    warn_of_separators(config, files)
    slices = [
        list(slices_of((cut for cut in cuts if cut.file.source == index), config.slice_bytes)) for index in range(len(pinned))
    ]
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    recipe = make_recipe(config, workspace, tokenizer, [part for parts in slices for part in parts], chats)

    indexed = indexed_versions(root)
    # A build does all of this, too.
    starting, looking = looking - begun + clock() - looked, looked - looking
    whole, slice_count, sampled = Sums(), 0, Tally()
    of_sources = dict[str, tuple[Sums, Tally]]()
    for index, source in enumerate(pinned):
        mine = [i for i, file in enumerate(files) if file.source == index]
        parts = slices[index]
        sums, counts = of_sources[config.sources[index].name] = Sums(), Tally()
        sample = measure(recipe, workspace, tokenizer, parts, len(pinned), workers, layout, counts)
        sampled.read += counts.read
        sampled.skipped.update(counts.skipped)
        # (sampled files) -> (all files of the source): by their bytes as they are stored
        scale = _size(source.files) / _size(chosen[i] for i in mine) if len(mine) < len(source.files) else 1.0
        whole.add(sample, scale)
        sums.add(sample, scale)
        unknown = without_tokens(root, indexed, list(map(recipe.key, parts)))
        stored = len(parts) - len(without_receipt(root, unknown))
        whole.slices_stored += stored
        whole.copied_bytes += sum(copied_bytes(chosen[i], files[i]) for i in mine) * scale
        text, tokens = sample.of_total(sample.text)[0] * scale, sample.of_total(sample.tokens)[0] * scale
        whole.reading += sample.seconds * text * (1 - stored / max(len(parts), 1))
        whole.packing += sample.packing * tokens
        content = sample.total / _size(chosen[i] for i in mine)
        looked_into = {chosen[i].name for i in mine}
        others = [file.size or 0 for file in source.files if file.name not in looked_into]
        slice_count += len(parts) + slices_forecast([content * size for size in others], config.slice_bytes)

    complete = len(files) == len(found)
    version = build_id(provenance(config, pinned, files, tokenizer, chats), layout) if complete else None
    published = version is not None and is_published(root, version, layout)
    # Tokens are compressed by one thread a span.
    packing = whole.packing / min(workers, max(whole.tokens / SPAN_TOKENS, 1))
    making = 0.0 if published else starting + whole.reading / workers + packing + whole.tokens * WRITING_SECONDS
    dataset_bytes = whole.dataset_bytes + beside_items(layout, whole, config.validation_fraction)
    streamed = may_stream(root, layout, config.documents, here=config.runner == "threads")
    in_shards = 0.0 if streamed else whole.tokens * TOKEN_BYTES + whole.documents * BESIDE_BYTES
    disk_bytes, free = round(dataset_bytes + in_shards + whole.copied_bytes), free_space(root)
    dataset_error = math.hypot(whole.dataset_error, NOT_RECKONED * dataset_bytes)
    latest = read_pointer(root).version
    facts = {} if published and version == latest else forecast_facts(config, whole, sampled, of_sources)
    findings, untold = gates_forecast(config, root, latest, facts) if facts else ((), ())
    return Plan(
        version=version,
        is_published=published,
        exact=complete,
        files=len(found),
        file_bytes=round(_size(chosen if complete else found)),
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
        warning=None if published else lack_of_room(root, disk_bytes, free),
        workers=workers,
        seconds=round(looking * _size(found) / max(_size(chosen), 1) + making, 1),
        sampled_documents=sampled.read,
        losses=losses_of(recipe, sampled),
        findings=findings,
        untold=untold,
    )


def forecast_facts(config: BuildConfig, whole: Sums, sampled: Tally, of_sources: dict[str, tuple[Sums, Tally]]) -> Facts:
    """Facts of the version by a sample, at all places that gates may name."""
    facts: dict[tuple[str, Place], int | float | None] = {}
    for source, (sums, counts) in {"": (whole, sampled), **of_sources}.items():
        place = Place(source=source)
        told = {"documents": sums.documents, "tokens": sums.tokens, "text_bytes": sums.text_bytes}
        facts |= {(fact, place): round(value) for fact, value in told.items()}
        facts["bytes_per_token", place] = sums.text_bytes / sums.tokens if sums.tokens else 0.0
        for gate in config.publish.gates:
            if gate.of == "skipped_share":
                here = place._replace(step=gate.step or "", reason=gate.reason or "")
                facts[gate.of, here] = share_skipped(counts.skipped, counts.read, here)
    if not any(source.validation_split or source.split for source in config.sources):
        for split, share in (("train", 1 - config.fraction), ("validation", config.fraction)):
            facts["documents", Place(split=split)] = round(whole.documents * share)
            facts["tokens", Place(split=split)] = round(whole.tokens * share)
    return facts


def gates_forecast(
    config: BuildConfig, root: Store, latest: str | None, facts: Facts
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings of a refresh's gates by the *facts* of a sample, and the facts that it lacks."""
    gates = config.publish.of_refresh()
    before = if_there(root, latest, lambda _: facts_before(VersionFacts(root, str(latest)), facts))
    there = [gate for gate in gates if any(fact == gate.of and gate.is_at(place) for fact, place in facts)]
    untold = [gate.of for gate in gates if gate not in there]
    return tuple(judge(there, facts, before)), tuple(dict.fromkeys(untold))


def slices_forecast(text_bytes: Sequence[float], slice_bytes: int) -> int:
    """How many slices files with so much text each make, about: large ones alone, small ones in runs."""
    large = [size for size in text_bytes if SMALL_PART * size > slice_bytes]
    small = sum(text_bytes) - sum(large)
    return sum(max(1, round(size / slice_bytes)) for size in large) + round(MEAN_PART * small / slice_bytes)


def beside_items(layout: LayoutName, whole: Sums, validation_fraction: float) -> int:
    """Bytes that the objects of both splits have next to their items."""
    specs, total = LAYOUTS[layout], METADATA_BYTES
    for share in (validation_fraction, 1 - validation_fraction):
        tokens, documents = round(whole.tokens * share), round(whole.documents * share)
        total += bytes_of_objects(specs.encoded_tokens, tokens if documents else 0)
        total += bytes_of_objects(specs.seq_starts, documents + 1)
        total += len(DOCUMENT_ARRAYS) * bytes_of_objects(document_spec(specs), documents)
    return total


def losses_of(recipe: Recipe, sampled: Tally) -> tuple[Loss, ...]:
    """The loss of each step: the documents of a sample that it leaves out."""
    found = []
    for name in (step["name"] for step in recipe.steps):
        # Names have no dot in them.
        parts = ((*reason.partition("."), count) for reason, count in sorted(sampled.skipped.items()))
        told = {reason: count for step, _, reason, count in parts if step == name and reason}
        count = sum(told.values())
        found.append(Loss(step=name, documents=count, share=round(count / max(sampled.read, 1), 6), reasons=told))
    return tuple(found)


def to_sample(files: tuple[FoundFile, ...]) -> list[FoundFile]:
    """The files of a source that are looked into: all of them where that is quick, else a few, spread over all."""
    if all("://" not in file.uri for file in files) and _size(files) <= READ_WHOLE_BYTES:
        return list(files)
    return list(files[:: -(-len(files) // SAMPLED_FILES)])


def _size(files: Iterable[FoundFile]) -> float:
    """Stored bytes of the files. An unknown size counts as the mean of the known ones."""
    sizes = [file.size for file in files]
    known = [size for size in sizes if size is not None]
    return sum(known) * len(sizes) / len(known) if known else float(len(sizes))


def copied_bytes(found: FoundFile, file: SourceFile) -> int:
    """Bytes that a build keeps of a file next to what it makes of it: fetched, unpacked."""
    unpacked = 0 if file.location == found.uri else file.size
    return unpacked + (found.size or 0 if "://" in found.uri and found.size != file.size else 0)


@dataclass
class Sums:
    """The totals of the sources, by their samples. Errors: by how much they may be off. ``reading``, ``packing``: seconds of a
    thread, to read and tokenize, and to compress.
    """

    text_bytes: float = 0
    documents: float = 0
    tokens: float = 0
    token_error: float = 0
    dataset_bytes: float = 0
    dataset_error: float = 0
    slices_stored: int = 0
    copied_bytes: float = 0
    reading: float = 0
    packing: float = 0

    def add(self, sample: Sample, scale: float) -> None:
        """Add a source of which *sample* is a part, *scale* times."""
        self.text_bytes += sample.of_total(sample.text)[0] * scale
        self.documents += sample.of_total(sample.documents)[0] * scale
        tokens, error = sample.of_total(sample.tokens)
        self.tokens += tokens * scale
        self.token_error = math.hypot(self.token_error, _error(tokens, error, scale))
        size, error = sample.of_total(sample.sizes)
        self.dataset_bytes += size * scale
        self.dataset_error = math.hypot(self.dataset_error, _error(size, error, scale))


def _error(estimate: float, error: float, scale: float) -> float:
    """By how much *scale* times an estimate may be off, where the rest is of files that nobody looked into."""
    return error * scale + (estimate * (scale - 1) * UNSEEN if scale > 1 else 0)


def check_writable(root: Store) -> None:
    """ValueError where a build could not write to its output, as far as that is known without writing."""
    if not root.is_local:
        return
    path = existing(root)
    problem = errno.ENOTDIR if kind_of(path) != "directory" else 0 if os.access(path, os.W_OK | os.X_OK) else errno.EACCES
    if problem:
        raise ValueError(f"cannot write to output {root.root}: {path}: {os.strerror(problem)}. Choose another output.")
