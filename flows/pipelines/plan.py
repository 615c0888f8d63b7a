"""A dry run: what a build would do and cost, from a sample of its sources."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.stores.store import Store
from flows.pipelines.build import check_one_format, check_sources_apart, make_recipe
from flows.pipelines.publish import layout_of, scratch_of
from tasks.config import BuildConfig
from tasks.cores import available_cores
from tasks.download.cut import at_hand, look_into
from tasks.download.sources import naming, resolve_source
from tasks.finalize.provenance import build_id, provenance
from tasks.finalize.seal import is_published
from tasks.models import FoundFile, Model, Slice, SourceFile
from tasks.output.staging import Place
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally
from tasks.tokenize.engines import Tokenizer, engine_of, large_string_array
from tasks.tokenize.tokenize_slice import token_batches
from tasks.tokenize.tokenizers import load_tokenizer

READ_WHOLE_BYTES = 2 << 30
"""Local sources up to this size are looked into file by file, so that what is found is exact."""
SAMPLED_FILES = 2
SAMPLED_SLICES = 4
SAMPLED_BYTES = 32_000_000
"""Text that is tokenized, of all sources together."""
LAYOUT_BYTES = {"mmap": 4.0, "compact": 1.35, "zarr2": 1.35}
"""Bytes a token takes; see docs/benchmarks.md."""
BESIDE_BYTES = 14
"""Bytes a document takes beside its tokens: its start, key, file and row."""


class Plan(Model):
    """Forecast of a build. ``exact``: every file was looked into, so that only documents, tokens, text and what follows from
    them are estimates.
    """

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
    root = Store.at(config.output)
    layout = layout_of(config, root)
    check_writable(root)
    pinned = tuple(resolve_source(source, i) for i, source in enumerate(config.sources))
    check_sources_apart(root, pinned)
    tokenizer = load_tokenizer(config.tokenizer)
    found = [file for source in pinned for file in source.files]
    chosen = [file for source in pinned for file in to_sample(source.files)]
    place = Place(output=config.output, staging="", scratch=os.fspath(scratch_of(config)))
    cuts = [look_into(file, config.sources, config.slice_bytes, place) for file in chosen]
    files = [cut.file for cut in cuts]
    # Not every server tells a file's size before it sends it.
    chosen = [file.model_copy(update={"size": file.size or here.size}) for file, here in zip(chosen, files, strict=True)]
    check_one_format(config, files)
    slices = [cut.slices for cut in cuts]
    recipe = make_recipe(config, place, tokenizer, [part for parts in slices for part in parts])

    whole, slice_count = Estimate(), sum(map(len, slices))
    for index, source in enumerate(pinned):
        mine = [i for i, file in enumerate(files) if file.source == index]
        sample = measure(recipe, tokenizer, [part for i in mine for part in slices[i]], SAMPLED_BYTES // len(pinned))
        # (sampled files) -> (all files of the source): by their bytes as they are stored
        scale = _size(source.files) / _size(chosen[i] for i in mine) if len(mine) < len(source.files) else 1.0
        for i in mine:
            stored = len(slices[i]) - len(without_receipt(root, map(recipe.key, slices[i])))
            whole = whole.plus(sample, slices[i], stored, copied_bytes(chosen[i], files[i]), scale)
        content = sum(part.text_bytes for i in mine for part in slices[i]) / _size(chosen[i] for i in mine)
        looked_into = {chosen[i].name for i in mine}
        for file in source.files:
            if file.name not in looked_into:
                slice_count += max(1, round(content * (file.size or 0) / config.slice_bytes))

    complete = len(files) == len(found)
    version = build_id(provenance(config, pinned, files, tokenizer), layout) if complete else None
    workers = config.workers or available_cores()
    dataset_bytes = whole.tokens * LAYOUT_BYTES[layout] + whole.documents * BESIDE_BYTES
    return Plan(
        version=version,
        is_published=version is not None and is_published(root, version, layout),
        exact=complete,
        files=len(found),
        file_bytes=round(_size(chosen if complete else found)),
        documents=round(whole.documents),
        tokens=round(whole.tokens),
        bytes_per_token=round(whole.text_bytes / max(whole.tokens, 1), 3),
        engine="the fast" if recipe.fast else "the reference",
        text_bytes=round(whole.text_bytes),
        slices=slice_count,
        slices_stored=whole.slices_stored,
        layout=layout,
        dataset_bytes=round(dataset_bytes),
        disk_bytes=round(dataset_bytes + whole.tokens * 4 + whole.documents * BESIDE_BYTES + whole.copied_bytes),
        disk_free=free_space(root),
        workers=workers,
        seconds=round(whole.seconds / workers + whole.tokens * 8 / 1e9, 1),
    )


def to_sample(files: tuple[FoundFile, ...]) -> list[FoundFile]:
    """The files of a source that are looked into: all of them where that is quick, else a few, spread over all."""
    if all("://" not in file.uri for file in files) and _size(files) <= READ_WHOLE_BYTES:
        return list(files)
    return list(files[:: -(-len(files) // SAMPLED_FILES)])


def _size(files: Iterable[FoundFile]) -> float:
    """Bytes of files as they are stored; of one that nobody knows as much as of the others."""
    sizes = [file.size for file in files]
    known = [size for size in sizes if size is not None]
    return sum(known) * len(sizes) / len(known) if known else float(len(sizes))


def copied_bytes(found: FoundFile, file: SourceFile) -> int:
    """Bytes that a build keeps of a file beside what it makes of it: fetched, unpacked."""
    unpacked = 0 if file.location == found.uri else file.size
    return unpacked + (found.size or 0 if "://" in found.uri and found.size != file.size else 0)


class Sample(Model):
    """Measurements of a sample of slices. ``seen_bytes``: as ``Slice.text_bytes`` counts them."""

    seen_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0


def measure(recipe: Recipe, tokenizer: Tokenizer, slices: list[Slice], limit: int) -> Sample:
    """Read and tokenize the beginnings of some slices of a source, spread over all of them: about *limit* bytes of text."""
    sampled = slices[:: -(-len(slices) // SAMPLED_SLICES)] if slices else []
    chosen = [at_hand(part, recipe.sources, recipe.place) for part in sampled]
    engine = engine_of(tokenizer, recipe.fast)
    engine(large_string_array("a"))  # loading is not tokenizing
    seen = text = documents = tokens = 0
    begun = time.monotonic()
    for part in chosen:
        tally = Tally()
        with naming(recipe.sources, part.file.source):
            for batch, _ in token_batches(part, recipe.source(part), recipe.documents, engine, tally):
                documents += batch.seq_count
                tokens += batch.token_count
                if tally.text_bytes >= limit // len(chosen):
                    break
        seen += min(tally.seen, part.text_bytes)
        text += tally.text_bytes
    return Sample(seen_bytes=seen, text_bytes=text, documents=documents, tokens=tokens, seconds=time.monotonic() - begun)


class Estimate(Model):
    """Estimated sums over all files."""

    text_bytes: float = 0
    documents: float = 0
    tokens: float = 0
    slices_stored: int = 0
    copied_bytes: float = 0
    seconds: float = 0

    def plus(self, sample: Sample, slices: list[Slice], stored: int, copied: int, scale: float) -> Estimate:
        """With a file's slices, of which *sample* tells what becomes of them, *scale* times."""
        times = scale * sum(part.text_bytes for part in slices) / max(sample.seen_bytes, 1)
        to_do = 1 - stored / max(len(slices), 1)
        return Estimate(
            text_bytes=self.text_bytes + sample.text_bytes * times,
            documents=self.documents + sample.documents * times,
            tokens=self.tokens + sample.tokens * times,
            slices_stored=self.slices_stored + stored,
            copied_bytes=self.copied_bytes + copied * scale,
            seconds=self.seconds + sample.seconds * times * to_do,
        )


def check_writable(root: Store) -> None:
    """ValueError where a build could not write to its output, as far as that can be told without writing."""
    if not root.is_local:
        return
    path = _existing(root)
    problem = errno.ENOTDIR if not path.is_dir() else 0 if os.access(path, os.W_OK | os.X_OK) else errno.EACCES
    if problem:
        raise ValueError(f"cannot write to output {root.root}: {path}: {os.strerror(problem)}. Choose another output.")


def _existing(root: Store) -> Path:
    """The output's directory, or the nearest above it that is there."""
    path = Path(root.root)
    while not path.exists():
        path = path.parent
    return path


def free_space(root: Store) -> int | None:
    """Bytes free where the output goes, if it is a local disk."""
    return shutil.disk_usage(_existing(root)).free if root.is_local else None
