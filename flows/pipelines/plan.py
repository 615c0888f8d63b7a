"""A dry run: what a build would do and cost, from a sample of its sources."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.extras import pa
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import Store
from flows.pipelines.build import check_one_format, files_of, make_recipe, pin_sources
from flows.pipelines.publish import layout_of, scratch_of
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import at_hand, look_into
from tasks.download.sources import naming
from tasks.finalize.provenance import build_id, provenance
from tasks.finalize.seal import is_published
from tasks.models import FoundFile, Model, Slice, SourceFile
from tasks.output.staging import Place
from tasks.shards.index import indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally, plan_slices
from tasks.tokenize.chat import chats_of
from tasks.tokenize.engines import Engine, Tokenizer, Tokens, large_string_array, token_batches
from tasks.tokenize.masks import encoder_of
from tasks.tokenize.tokenizers import load_tokenizer

READ_WHOLE_BYTES = 2 << 30
"""Local sources up to this size are looked into file by file, so that what is found is exact."""
SAMPLED_FILES = 2
PIECES, MIN_PIECES, MOST_CUTS = 64, 5, 4096
SAMPLED_BYTES, SHARE = 32_000_000, 0.035
"""Text that is tokenized: of all sources together, and as a share of each, before a batch that goes beyond."""
READ_AS_A_WHOLE = 4 << 20
"""A source with so little text is tokenized as a whole."""
LEAST_BATCH = 1 << 14
SURE = 2.7
"""Standard errors that an estimate is off by at most, 99 times in 100, with pieces as few as these."""
UNSEEN = 0.25
"""How much files that nobody looked into may differ from those that were, as a share."""
Counts = npt.NDArray[np.float64]
RAW_BYTES, ZSTD_BYTES = 4.0, 1.35
"""Bytes a token takes in raw and in compressed layouts; see docs/benchmarks.md."""
BESIDE_BYTES = 14
"""Bytes a document takes beside its tokens: its start, key, file and row."""


class Loss(Model):
    """Documents of a sample that a step leaves out, and by which reasons. ``share``: of the documents that were read."""

    step: str
    documents: int
    share: float
    reasons: dict[str, int]


class Plan(Model):
    """Forecast of a build. ``exact``: every file was looked into: only documents, tokens, text and what follows are estimates.
    ``losses``: of each step, in a sample of ``sampled_documents``.
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
    disk_bytes: int
    disk_free: int | None
    workers: int
    seconds: float
    sampled_documents: int
    losses: tuple[Loss, ...]


def plan(config: BuildConfig) -> Plan:
    """Resolve the sources, look into a few files and slices, and reckon. Writes no dataset, only fetched files.

    ValueError for all that a build would refuse before it starts, as far as the sampled files show it.
    """
    root = Store.at(config.output)
    layout = layout_of(config, root)
    check_writable(root)
    pinned = pin_sources(config, root)
    tokenizer = load_tokenizer(config.tokenizer)
    found = files_of(pinned)
    chosen = [file for source in pinned for file in to_sample(source.files)]
    place = Place(root, staging="", scratch=os.fspath(scratch_of(config, root)))
    begun = time.monotonic()
    cuts = [look_into(file, config.sources, config.slice_bytes, place) for file in chosen]
    looking = time.monotonic() - begun
    files = [cut.file for cut in cuts]
    # Not every server tells a file's size before it sends it.
    chosen = [file.model_copy(update={"size": file.size or here.size}) for file, here in zip(chosen, files, strict=True)]
    check_one_format(config, files)
    slices = [cut.slices for cut in cuts]
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    recipe = make_recipe(config, place, tokenizer, [part for parts in slices for part in parts], chats)

    workers = config.workers or available_cores()
    indexed = indexed_versions(root)
    whole, slice_count, sampled = Sums(), sum(map(len, slices)), Tally()
    for index, source in enumerate(pinned):
        mine = [i for i, file in enumerate(files) if file.source == index]
        parts = [part for i in mine for part in slices[i]]
        sample = measure(recipe, place, tokenizer, parts, SAMPLED_BYTES // len(pinned), workers, sampled)
        # (sampled files) -> (all files of the source): by their bytes as they are stored
        scale = _size(source.files) / _size(chosen[i] for i in mine) if len(mine) < len(source.files) else 1.0
        whole.add(sample, scale)
        unknown = without_tokens(root, indexed, list(map(recipe.key, parts)))
        stored = len(parts) - len(without_receipt(root, unknown))
        whole.slices_stored += stored
        whole.copied_bytes += sum(copied_bytes(chosen[i], files[i]) for i in mine) * scale
        whole.seconds += sample.rate * sample.of_total(sample.text)[0] * scale * (1 - stored / max(len(parts), 1))
        content = sample.total / _size(chosen[i] for i in mine)
        looked_into = {chosen[i].name for i in mine}
        others = [file.size or 0 for file in source.files if file.name not in looked_into]
        slice_count += sum(max(1, round(content * size / config.slice_bytes)) for size in others)

    complete = len(files) == len(found)
    version = build_id(provenance(config, pinned, files, tokenizer, chats), layout) if complete else None
    token_bytes = RAW_BYTES if LAYOUTS[layout].encoded_tokens.zstd_level is None else ZSTD_BYTES
    dataset_bytes = whole.tokens * token_bytes + whole.documents * BESIDE_BYTES
    return Plan(
        version=version,
        is_published=version is not None and is_published(root, version, layout),
        exact=complete,
        files=len(found),
        file_bytes=round(_size(chosen if complete else found)),
        documents=round(whole.documents),
        tokens=round(whole.tokens),
        tokens_low=max(round(whole.tokens - whole.token_error), 0),
        tokens_high=round(whole.tokens + whole.token_error),
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
        seconds=round(whole.seconds + looking * _size(found) / max(_size(chosen), 1) + whole.tokens * 8 / 1e9, 1),
        sampled_documents=sampled.read,
        losses=losses_of(recipe, sampled),
    )


def losses_of(recipe: Recipe, sampled: Tally) -> tuple[Loss, ...]:
    """What each step leaves out of a sample."""
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
    """Bytes of files as they are stored; of one that nobody knows as much as of the others."""
    sizes = [file.size for file in files]
    known = [size for size in sizes if size is not None]
    return sum(known) * len(sizes) / len(known) if known else float(len(sizes))


def copied_bytes(found: FoundFile, file: SourceFile) -> int:
    """Bytes that a build keeps of a file beside what it makes of it: fetched, unpacked."""
    unpacked = 0 if file.location == found.uri else file.size
    return unpacked + (found.size or 0 if "://" in found.uri and found.size != file.size else 0)


def measure(
    recipe: Recipe, place: Place, tokenizer: Tokenizer, slices: list[Slice], limit: int, workers: int, counts_of_all: Tally
) -> Sample:
    """Read and tokenize about *limit* bytes of the slices of a source, in pieces that are spread over all of them; little text as
    a whole. As a build does, with several *workers*. *counts_of_all* counts documents along.
    """
    total = sum(part.text_bytes for part in slices)
    engine = TimedEngine(tokenizer, recipe.fast)
    if total <= READ_AS_A_WHOLE:
        chosen, most = [at_hand(part, recipe.sources, place) for part in slices], total
    else:
        limit = min(limit, int(total * SHARE))
        sampled = [at_hand(part, recipe.sources, place) for part in spread(slices, PIECES)]
        cut = [piece for part in sampled for piece in _pieces(recipe, part, max(limit // PIECES, total // MOST_CUTS))]
        chosen = spread(cut, PIECES)
        most = limit // len(chosen)

    def read(part: Slice) -> tuple[Tally, tuple[float, ...]]:
        tally, tokens, written = Tally(), 0, 0
        with naming(recipe.sources, part.file.source):
            source = recipe.source(part)
            encoder = encoder_of(engine, source, recipe.chat(part), recipe.tokenizer, recipe.documents)
            for batch, _ in token_batches(part, source, recipe.documents, encoder, tally, max(most // 4, LEAST_BATCH)):
                tokens, written = tokens + batch.token_count, written + batch.seq_count
                if text_read(tally) >= most:
                    break
        return tally, (min(tally.seen, part.text_bytes), text_read(tally), tally.text_bytes, tally.rows, written, tokens)

    with ThreadPoolExecutor(workers, initializer=engine.load) as pool:
        found = list(pool.map(read, chosen))
    tallies, counts = [tally for tally, _ in found], np.array([row for _, row in found], np.float64).reshape(len(chosen), 6)
    seen, before, text, rows, written, tokens = counts.T
    for tally in tallies:
        counts_of_all.read += tally.read
        counts_of_all.skipped.update(tally.skipped)
    # Steps take their time for each byte that was read, the tokenizer for each byte that they leave.
    stepping = sum(tally.step_seconds for tally in tallies) / max(float(text.sum()), 1)
    rate = (engine.rate() + stepping) / workers
    return Sample(total, seen, before, text, rows, written, tokens, rate, is_whole=total <= READ_AS_A_WHOLE)


def text_read(tally: Tally) -> int:
    """Bytes of text before all steps."""
    return tally.before_steps or tally.text_bytes


class TimedEngine(Engine):
    """An engine that times itself: of so little text, opening files takes longer than tokenizing."""

    def __init__(self, tokenizer: Tokenizer, fast: bool) -> None:
        super().__init__(tokenizer, fast)
        self._spent: list[tuple[int, float]] = []

    def load(self) -> None:
        """Load what each thread has of its own."""
        super().__call__(large_string_array("a"))

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        begun = time.perf_counter()
        tokens = super().__call__(texts)
        self._spent.append((texts.nbytes, time.perf_counter() - begun))
        return tokens

    def rate(self) -> float:
        """Seconds a byte takes a thread, by the later half: an engine is slow until it has seen the frequent words."""
        later = self._spent[len(self._spent) // 2 :]
        return sum(took for _, took in later) / max(sum(size for size, _ in later), 1)


def spread(items: list[Slice], count: int) -> list[Slice]:
    """At most *count* of the items, as far from each other as they can be."""
    return [items[int((k + 0.5) * len(items) / min(count, len(items)))] for k in range(min(count, len(items)))]


def _pieces(recipe: Recipe, part: Slice, size: int) -> list[Slice]:
    """A slice in pieces of about *size* bytes of text, as far as its format has such."""
    if part.rows:
        return [part]
    return [one for one in plan_slices(part.file, recipe.source(part), size) if part.start <= one.start and one.stop <= part.stop]


@dataclass
class Sample:
    """Counts of the pieces that were read of a source with *total* bytes, as ``Slice.text_bytes`` counts them, of which *seen*
    are theirs: float64[n] each. *text*: behind all steps, *before* it was more. *rate*: seconds that a byte of *text* takes all
    workers together.
    """

    total: float
    seen: Counts
    before: Counts
    text: Counts
    rows: Counts
    documents: Counts
    tokens: Counts
    rate: float
    is_whole: bool

    def _known(self) -> Counts:
        """How much of the total each piece is. Where that counts text alone, with four bytes a row, the piece tells it exactly;
        its share of the rows is less exact, because documents differ in length.
        """
        plain = self.before + 4 * self.rows
        share, error = ratio(plain, self.seen)
        return plain if abs(share - 1) <= 3 * error + 0.001 else self.seen

    def of_total(self, counts: Counts) -> tuple[float, float]:
        """An estimate of what all of the source has of something, and by how much it may be off, 99 times in 100."""
        known = self.seen if self.is_whole else self._known()
        share, error = ratio(counts, known)
        return share * self.total, 0.0 if self.is_whole else SURE * error * self.total


def ratio(counts: Counts, of: Counts) -> tuple[float, float]:
    """Sum of *counts* over the sum of *of*, and its standard error where both are of pieces drawn at random."""
    share = float(counts.sum() / max(of.sum(), 1))
    n = len(counts)
    if n < MIN_PIECES:
        return share, share
    return share, math.sqrt(n / (n - 1) * float(((counts - share * of) ** 2).sum())) / max(float(of.sum()), 1)


@dataclass
class Sums:
    """The totals of the sources, by their samples. ``token_error``: by how much the number of tokens may be off."""

    text_bytes: float = 0
    documents: float = 0
    tokens: float = 0
    token_error: float = 0
    slices_stored: int = 0
    copied_bytes: float = 0
    seconds: float = 0

    def add(self, sample: Sample, scale: float) -> None:
        """Add a source of which *sample* is a part, *scale* times."""
        self.text_bytes += sample.of_total(sample.text)[0] * scale
        self.documents += sample.of_total(sample.documents)[0] * scale
        tokens, error = sample.of_total(sample.tokens)
        self.tokens += tokens * scale
        self.token_error = math.hypot(self.token_error, error * scale + (tokens * (scale - 1) * UNSEEN if scale > 1 else 0))


def check_writable(root: Store) -> None:
    """ValueError where a build could not write to its output, as far as that can be told without writing."""
    if not root.is_local:
        return
    path = _existing(root)
    problem = errno.ENOTDIR if kind_of(path) != "directory" else 0 if os.access(path, os.W_OK | os.X_OK) else errno.EACCES
    if problem:
        raise ValueError(f"cannot write to output {root.root}: {path}: {os.strerror(problem)}. Choose another output.")


def _existing(root: Store) -> Path:
    """The output's directory, or the nearest above it that is there."""
    output = Path(root.root)
    return next(path for path in (output, *output.parents) if kind_of(path) is not None)


def free_space(root: Store) -> int | None:
    """Bytes free where the output goes, if it is a local disk."""
    return shutil.disk_usage(_existing(root)).free if root.is_local else None
