"""A dry run: what a build would do and cost, from a sample of its sources."""

from __future__ import annotations

import os
import shutil
import time

import pyarrow as pa

from flat_tokens.arrays import LayoutName
from flat_tokens.storage import Store
from flows.order import check_apart, check_one_format, layout_of, scratch_of
from tasks.caching import CACHE, RECEIPT, Place, Recipe
from tasks.documents import Tally, read_documents
from tasks.download import fetch_file
from tasks.finalize import build_id, is_published, provenance
from tasks.models import BuildConfig, Model, Slice
from tasks.slices import plan_slices
from tasks.sources import FoundFile, resolve_source
from tasks.tokenizers import Engine, Tokenizer, load_tokenizer, may_use_fast_engine

SAMPLED_FILES = 2
SAMPLED_SLICES = 4
SAMPLED_BYTES = 8_000_000
LAYOUT_BYTES = {"mmap": 4.0, "compact": 1.35, "zarr2": 1.35}
"""Bytes a token takes; see docs/benchmarks.md."""
BESIDE_BYTES = 14
"""Bytes a document takes beside its tokens: its start, key, file and row."""


class Plan(Model):
    """What a build would do. All but the files' number and bytes are estimates, unless ``exact``."""

    version: str | None
    is_published: bool
    exact: bool
    files: int
    file_bytes: int
    documents: int
    tokens: int
    bytes_per_token: float
    engine: str
    text_bytes: int
    slices: int
    slices_stored: int
    layout: LayoutName
    dataset_bytes: int
    disk_bytes: int
    disk_free: int | None
    workers: int
    seconds: float


def plan(config: BuildConfig) -> Plan:
    """Resolve the sources, look into a few files and slices, and reckon. Writes no dataset, only fetched files.

    ValueError for all that a build would refuse before it starts, as far as the sampled files show it.
    """
    root, layout = Store.at(config.output), layout_of(config)
    pinned = tuple(resolve_source(source, i) for i, source in enumerate(config.sources))
    check_apart(root, pinned)
    found = [file for source in pinned for file in source.files]
    tokenizer = load_tokenizer(config.tokenizer)
    sampled = [fetch_file(file, config.sources, scratch_of(config)) for file in to_sample(found)]
    check_one_format(config, sampled)
    slices = [part for file in sampled for part in plan_slices(file, config.sources[file.source], config.slice_bytes)]
    recipe = Recipe(
        place=Place(output=config.output, staging=""),
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        fast=False,
        documents=config.documents,
    )
    stored = sum(root.exists(f"{CACHE}/{recipe.key(part)}/{RECEIPT}") for part in slices)
    sample = measure(config, tokenizer, slices)

    complete = len(sampled) == len(found)
    version = build_id(provenance(config, pinned, sampled, tokenizer), layout) if complete else None
    file_bytes = sum(file.size or 0 for file in found)
    # (sampled files) -> (all files): by their bytes as they are stored
    scale = 1.0 if complete else file_bytes / max(sum(f.size or 0 for f in to_sample(found)), 1)
    text_bytes = sum(part.text_bytes for part in slices) * scale
    tokens, documents = text_bytes / sample.bytes_per_token, text_bytes / sample.bytes_per_document
    dataset_bytes = tokens * LAYOUT_BYTES[layout] + documents * BESIDE_BYTES
    workers = config.workers or os.cpu_count() or 1
    return Plan(
        version=version,
        is_published=version is not None and is_published(root, version, layout),
        exact=complete,
        files=len(found),
        file_bytes=file_bytes,
        documents=round(documents),
        tokens=round(tokens),
        bytes_per_token=round(sample.bytes_per_token, 3),
        engine="the fast" if sample.fast else "the reference",
        text_bytes=round(text_bytes),
        slices=round(len(slices) * scale),
        slices_stored=stored,
        layout=layout,
        dataset_bytes=round(dataset_bytes),
        disk_bytes=round(dataset_bytes + tokens * 4 + documents * BESIDE_BYTES),
        disk_free=free_space(root),
        workers=workers,
        seconds=round(text_bytes * (1 - stored / max(len(slices), 1)) / sample.bytes_per_second / workers + tokens * 8 / 1e9, 1),
    )


def to_sample(found: list[FoundFile]) -> list[FoundFile]:
    """All local files, which cost no more than reading their heads; of others the first ones of each source."""
    chosen: dict[int, list[FoundFile]] = {}
    for file in found:
        of_source = chosen.setdefault(file.source, [])
        if "://" not in file.uri or len(of_source) < SAMPLED_FILES:
            of_source.append(file)
    return [file for files in chosen.values() for file in files]


class Sample(Model):
    """Ratios of a sample."""

    bytes_per_token: float
    bytes_per_document: float
    bytes_per_second: float
    fast: bool


def measure(config: BuildConfig, tokenizer: Tokenizer, slices: list[Slice]) -> Sample:
    """Read and tokenize the beginning of some slices, spread over all of them."""
    step = max(1, len(slices) // SAMPLED_SLICES)
    chosen = slices[::step][:SAMPLED_SLICES]
    batches = [batch for part in chosen for batch in _beginning(config, part)]
    first = [text.as_py() for batch in batches[:1] for text in batch.slice(0, 32)]
    fast = may_use_fast_engine(tokenizer, config.tokenizer.engine, first)
    engine = Engine(tokenizer, fast)
    text = sum(batch.nbytes - 8 * (len(batch) + 1) for batch in batches)
    for batch in batches[:1]:
        engine(batch.slice(0, 1))  # loading is not tokenizing
    begun = time.monotonic()
    tokens = sum(len(engine(batch).ids) for batch in batches)
    seconds = time.monotonic() - begun
    return Sample(
        bytes_per_token=max(text, 1) / max(tokens, 1),
        bytes_per_document=max(text, 1) / max(sum(len(batch) for batch in batches), 1),
        bytes_per_second=max(text, 1) / max(seconds, 1e-6),
        fast=fast,
    )


def _beginning(config: BuildConfig, part: Slice) -> list[pa.LargeStringArray]:
    """About the first 8 MB of a slice's texts."""
    batches, size = [], 0
    for documents in read_documents(part, config.sources[part.file.source], config.documents, Tally()):
        batches.append(documents.texts)
        size += documents.texts.nbytes
        if size >= SAMPLED_BYTES:
            break
    return batches


def free_space(root: Store) -> int | None:
    """Bytes free where the output goes, if it is a local disk."""
    if not root.is_local:
        return None
    path = root.root
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free
