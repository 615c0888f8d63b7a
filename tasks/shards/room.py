"""The room that a build needs on the disk of a local output, by a sample of its text, compared with the room that there is."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, LayoutName
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.disk_cache import logger
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import size
from tasks.config import BuildConfig
from tasks.models import Slice
from tasks.output.leases import Workspace
from tasks.output.places import layout_of, nearest
from tasks.parts.stored import document_spec, may_stream
from tasks.shards.recipe import Recipe
from tasks.shards.sample import Sample, measure
from tasks.text.documents import Tally
from tasks.tokenize.engines import Tokenizer

METADATA_BYTES = 20_000
"""Bytes of a version's metadata, manifest and card."""
BESIDE_BYTES = 14
"""Bytes a document takes next to its tokens in its token shard: its start, key and row."""
UNSEEN = 0.25
"""How much files that nobody looked into may differ from those that were, as a share."""
MOST_BYTES = 3 * TOKEN_BYTES
"""A build needs at most this many bytes for one of text."""


def bytes_of_objects(spec: ArraySpec, length: int) -> int:
    """Bytes that the objects of an array of *length* items have next to its items: indexes, checksums and what fills the last
    chunk, where that is stored as it is.
    """
    chunk_count, object_count = -(-length // spec.chunk_length), -(-length // spec.object_length)
    filling = (chunk_count * spec.chunk_length - length) * spec.numpy_dtype.itemsize + 4 * chunk_count
    index = object_count * (16 * spec.chunks_per_object + 4)
    return (filling if spec.zstd_level is None else 0) + (index if spec.zarr_format == 3 else 0)


def free_space(root: Store) -> int | None:
    """Bytes free where the output is written, if it is a local disk."""
    return shutil.disk_usage(nearest(Path(root.root))).free if root.is_local else None


def lack_of_room(root: Store, needed: int, free: int | None) -> str | None:
    """A warning with both figures if a build needs more bytes than are free. None if there is room, or nobody knows."""
    if free is None or needed <= free:
        return None
    return (
        f"{root.url}: the build needs about {size(needed)}, and {size(free)} are free on its disk. Make room (python -m flows gc "
        f"{root.url} lists what may be removed), or choose another output."
    )


def room_for(config: BuildConfig, root: Store, whole: Sums, recipe: Recipe, slices: Sequence[Slice]) -> tuple[float, int]:
    """Bytes of the dataset, and bytes that its build needs at the output."""
    dataset_bytes = whole.dataset_bytes + beside_items(layout_of(config, root), whole, config)
    streamed = may_stream(root, config, here=config.runner == "threads")
    of_texts = recipe.facts_of_texts(slices[0]) if slices else {}
    beside = BESIDE_BYTES + 8 * sum(made.numbers for made in of_texts.values())
    in_shards = 0.0 if streamed else whole.tokens * TOKEN_BYTES + whole.documents * beside
    return dataset_bytes, round(dataset_bytes + in_shards + whole.copied_bytes)


def warn_of_room(
    config: BuildConfig, workspace: Workspace, slices: Sequence[Slice], recipe: Recipe, tokenizer: Tokenizer
) -> None:
    """Warn if a build needs more room than there is, by the sample and the sums of a plan. The files that it copies are there.
    The sample is read only if the text could be too many tokens.
    """
    root, whole = workspace.root, Sums()
    free = free_space(root)
    if free is None or MOST_BYTES * sum(slice_.text_bytes for slice_ in slices) <= free:
        return
    for index in range(len(config.sources)):
        parts = [slice_ for slice_ in slices if slice_.source == index]
        whole.add(measure(config, recipe, workspace, tokenizer, parts), 1.0)
    if warning := lack_of_room(root, room_for(config, root, whole, recipe, slices)[1], free):
        logger.warning(warning)


@dataclass
class Sums:
    """The totals of the sources, by their samples. Errors: by how much they may be off. ``reading``, ``packing``: seconds of a
    thread, to read and tokenize, and to compress. ``counts``: of the documents of the samples alone.
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
    counts: Tally = field(default_factory=Tally)

    def add(self, sample: Sample, scale: float) -> None:
        """Add a source of which *sample* is a part, *scale* times."""
        for tally in sample.tallies:
            self.counts.read += tally.read
            self.counts.skipped.update(tally.skipped)
            self.counts.matches.update(tally.matches)
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


def beside_items(layout: LayoutName, whole: Sums, config: BuildConfig) -> int:
    """Bytes that the objects of all splits have next to their items."""
    specs, total, arrays = LAYOUTS[layout], METADATA_BYTES, len(config.facts)
    held_out = [config.validation_fraction, *([config.test_fraction] if config.test_fraction else [])]
    for share in (*held_out, 1 - sum(held_out)):
        tokens, documents = round(whole.tokens * share), round(whole.documents * share)
        total += bytes_of_objects(specs.encoded_tokens, tokens if documents else 0)
        total += bytes_of_objects(specs.seq_starts, documents + 1)
        total += arrays * bytes_of_objects(document_spec(specs), documents)
    return total
