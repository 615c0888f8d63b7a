"""A sample of a source: pieces from all over it, read and tokenized as a build does; their counts, and the time they take. And
the room that a build needs on the disk of a local output, by samples of its text, compared with the room that there is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import AnyArray, Floats
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, LayoutName
from flat_tokens.batch import LOSS_MASK, TokenBatch
from flat_tokens.extras import pa
from flat_tokens.forgotten import Forgotten
from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import size
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import local_slice
from tasks.download.sources import naming
from tasks.models import Slice
from tasks.output.forgotten import forgotten_at
from tasks.output.leases import Workspace
from tasks.output.places import layout_of, nearest
from tasks.parts.stored import document_spec, may_stream
from tasks.rows import KEY, ROW, as_rows, fact
from tasks.shards.recipe import Recipe
from tasks.text.documents import Tally, TextBatch, read_documents
from tasks.text.files import plan_ranges
from tasks.tokenize.chat import encoder_of
from tasks.tokenize.engines import Engine, Tokenizer, UnencodableError, engine_of, large_string_array, tokens_of

logger = logging.getLogger(__name__)

PIECES, TURNS, MIN_PIECES, MOST_CUTS = 128, 8, 5, 4096
SAMPLED_BYTES, SHARE = 32_000_000, 0.03
"""Text that is tokenized: of all sources together, and as a share of each, before a batch that goes beyond."""
TIMED_BYTES, TIMED_SHARE = 8_000_000, 0.005
"""Text that is read once more, in stretches, to see how long reading takes: opening pieces takes longer than reading them."""
READ_AS_A_WHOLE = 4 << 20
"""A source with so little text is tokenized as a whole."""
LEAST_BATCH = 1 << 14
BYTES_OF_A_THREAD = 1 << 20
"""Text that is worth another thread, whose engine takes 45 MB of memory before it has seen any."""
SURE = 4.0
"""Half the width of the 99 % interval, in standard errors. Pieces drawn at random, as few as these, would need 2.7. Documents are
in an order, and on the corpus errors were half as large again.
"""
Counts = Floats
clock = time.perf_counter


@dataclass
class Sample:
    """Counts of the pieces that were read of a source with *total* bytes, as ``Slice.text_bytes`` counts them, of which *seen*
    are theirs: float64[n] each. *tallies*: of the pieces. *text*: after all steps, *before* it was more. *sizes*: bytes that the
    dataset takes for them. *seconds*: that a byte of *text* takes a thread. *packing*: that a token takes one to be compressed.
    """

    total: float
    is_whole: bool
    tallies: list[Tally]
    seconds: float
    packing: float
    sizes: Counts
    seen: Counts
    before: Counts
    text: Counts
    rows: Counts
    documents: Counts
    tokens: Counts

    def of_total(self, counts: Counts) -> tuple[float, float]:
        """An estimate of what all of the source has of something, and by how much it may be off, 99 times in 100."""
        known, plain = self.seen, self.before + 4 * self.rows
        share, error = ratio(plain, self.seen)
        # If the total counts only text and four bytes a row, the piece's own count is exact. Its share of the rows is less exact,
        # because documents differ in length.
        if not self.is_whole and abs(share - 1) <= 3 * error + 0.001:
            known = plain
        share, error = ratio(counts, known)
        return share * self.total, 0.0 if self.is_whole else SURE * error * self.total


def ratio(counts: Counts, of: Counts) -> tuple[float, float]:
    """Sum of *counts* over the sum of *of*, and its standard error if both are of pieces drawn at random."""
    share = float(counts.sum() / max(of.sum(), 1))
    n = len(counts)
    if n < MIN_PIECES:
        return share, share
    return share, math.sqrt(n / (n - 1) * float(((counts - share * of) ** 2).sum())) / max(float(of.sum()), 1)


class Piece(NamedTuple):
    """Documents that were read of a part of a source. *seconds*: that reading took, steps left out, for *timed* bytes of it."""

    part: Slice
    tally: Tally
    documents: TextBatch
    seconds: float
    timed: int

    @property
    def text_bytes(self) -> int:
        """Bytes of text after all steps."""
        return self.tally.text_bytes


def text_read(tally: Tally) -> int:
    """Bytes of text before all steps."""
    return tally.before_steps or tally.text_bytes


def measure(config: BuildConfig, recipe: Recipe, workspace: Workspace, tokenizer: Tokenizer, slices: list[Slice]) -> Sample:
    """Read and tokenize a sample of the slices of a source, in pieces that are spread over all of them; little text as a whole.
    As a build does, with several workers.
    """
    workers = config.workers or available_cores()
    pieces, timed, is_whole = _sampled(recipe, workspace, slices, len(config.sources), workers)
    batches, encoding = _tokenized(recipe, tokenizer, pieces, workers)
    sizes, packing = _sizes(batches, pieces, layout_of(config, workspace.root))
    text, before = sum(piece.text_bytes for piece in pieces), sum(text_read(piece.tally) for piece in pieces)
    # Reading and steps take their time for each byte that was read, the tokenizer for each byte that steps leave.
    reading = sum(piece.seconds for piece in timed) / max(sum(piece.timed for piece in timed), 1) * before
    stepping = sum(piece.tally.step_seconds for piece in pieces)
    rows = [
        (min(tally.seen, part.text_bytes), text_read(tally), tally.text_bytes, tally.rows, of.seq_count, of.token_count)
        for (part, tally, *_), of in zip(pieces, batches, strict=True)
    ]
    seen, *others = np.array(rows, np.float64).reshape(len(pieces), 6).T
    seconds = encoding + (reading + stepping) / max(text, 1)
    return Sample(_bytes(slices), is_whole, [piece.tally for piece in pieces], seconds, packing, sizes, seen, *others)


def _sampled(
    recipe: Recipe, workspace: Workspace, slices: list[Slice], shares: int, workers: int
) -> tuple[list[Piece], list[Piece], bool]:
    """The pieces of a sample, those that tell how long reading takes, and whether the sample is all of the source."""
    total, forgotten = _bytes(slices), forgotten_at(workspace.root, recipe.forgotten)
    with ThreadPoolExecutor(workers) as pool, contextlib.ExitStack() as stack:

        def read(parts: list[Slice], most: int, batch_bytes: int | None = None) -> list[Piece]:
            return list(pool.map(lambda part: _read(recipe, part, most, batch_bytes, forgotten), parts))

        is_much = total > READ_AS_A_WHOLE
        if not all(part.ranges[0].file.location for part in slices):
            # A thread that has files does not wait for the room of more.
            is_much, slices = is_much or len(slices) > 1, spread(slices, 1)
        chosen = spread(slices, PIECES) if is_much else slices
        here = [stack.enter_context(local_slice(part, recipe.sources, workspace)) for part in chosen]
        if not is_much:
            pieces = read(here, total)
            return pieces, pieces, True
        limit = min(SAMPLED_BYTES // shares, int(total * SHARE))
        chosen = spread(_pieces(recipe, here, max(limit // PIECES, total // MOST_CUTS)), PIECES)
        most, pieces = limit // len(chosen), []
        # Documents may be larger than pieces should be: so alternately, until enough is read.
        for turn in range(TURNS):
            if sum(text_read(piece.tally) for piece in pieces) < 1.1 * limit:
                pieces += read(chosen[TURNS - 1 - turn :: TURNS], most, max(most // 4, LEAST_BATCH))
        if sum(min(piece.tally.seen, piece.part.text_bytes) for piece in pieces) >= total:
            return pieces, pieces, True
        limit = min(TIMED_BYTES // shares, int(total * TIMED_SHARE))
        long = _pieces(recipe, here, max(limit // workers, 1))
        count = max(workers, limit * len(long) // max(_bytes(long), 1))
        return pieces, read(spread(long, count), limit // count, max(limit // count // 3, LEAST_BATCH)), False


def spread(items: list[Slice], count: int) -> list[Slice]:
    """At most *count* of the items, as far from each other as they can be."""
    return [items[int((k + 0.5) * len(items) / min(count, len(items)))] for k in range(min(count, len(items)))]


def _pieces(recipe: Recipe, slices: list[Slice], size: int) -> list[Slice]:
    """Slices in pieces of about *size* bytes of text, as far as their formats have such."""
    pieces = list[Slice]()
    for slice_ in slices:
        for part in slice_.ranges:
            cuts = [part] if part.rows else plan_ranges(part.file, recipe.source(slice_), size)
            pieces += (Slice((one,)) for one in cuts if part.start <= one.start and one.stop <= part.stop)
    return pieces


def _bytes(slices: list[Slice]) -> int:
    return sum(part.text_bytes for part in slices)


def _read(recipe: Recipe, part: Slice, most: int, batch_bytes: int | None, forgotten: Forgotten) -> Piece:
    """Read a part, until *most* bytes of text are there. The time is that after its first batch, if there are several:
    opening a slice takes a build no time to speak of.
    """
    tally, documents, marks = Tally(forgotten=forgotten), list[TextBatch](), [(0, 0.0)]
    begun = clock()
    with naming(recipe.sources, part.source):
        for some in read_documents(part, recipe.source(part), recipe.documents, tally, batch_bytes):
            documents.append(some)
            marks.append((text_read(tally), clock() - begun - tally.step_seconds))
            if text_read(tally) >= most:
                break
    (first, early), (last, late) = marks[1 if len(marks) > 2 else 0], marks[-1]
    # With a batch that has none, and without kept columns, whose kinds may differ.
    none = TextBatch(large_string_array(), as_rows(dict.fromkeys((KEY, ROW), np.empty(0, np.uint64))))
    texts, rows = zip(*((some.texts, some.rows.select([KEY, ROW])) for some in (none, *documents)), strict=True)
    return Piece(part, tally, TextBatch(pa.concat_arrays(texts), pa.concat_batches(rows)), late - early, last - first)


def _tokenized(recipe: Recipe, tokenizer: Tokenizer, pieces: list[Piece], workers: int) -> tuple[list[TokenBatch], float]:
    """The tokens of each piece, and the seconds that a byte of text takes a thread. Many pieces go to the engine at once, as many
    documents do in a build, and the time is that of the later half: an engine is slow until it has seen the frequent words.
    """
    engine = engine_of(tokenizer, recipe.fast)
    threads = min(workers, 1 + sum(piece.text_bytes for piece in pieces) // BYTES_OF_A_THREAD)
    found, spent = dict[int, TokenBatch](), list[tuple[int, float]]()

    def work(mine: list[int]) -> None:
        engine(large_string_array("a"))  # loads what each thread has of its own
        half = len(mine) // 2
        for batch in filter(None, (mine[:half], mine[half:])):
            begun = clock()
            tokens = list(_tokens([pieces[i] for i in batch], recipe, engine))
            for piece in (pieces[i] for i in batch):
                for made in recipe.facts_of_texts(piece.part).values():  # for the time that it takes
                    made.of(piece.documents.texts)
            took = sum(pieces[i].text_bytes for i in batch), clock() - begun
            found.update(zip(batch, tokens, strict=True))
        spent.append(took)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, filter(None, (list(range(len(pieces)))[k::threads] for k in range(threads)))))
    return [found[i] for i in range(len(pieces))], sum(took for _, took in spent) / max(sum(size for size, _ in spent), 1)


def _tokens(pieces: list[Piece], recipe: Recipe, engine: Engine) -> Iterator[TokenBatch]:
    """The tokens of each of some pieces, which are tokenized together."""
    part = pieces[0].part
    source = recipe.source(part)
    by_reference = part.source in recipe.by_reference
    encoder = encoder_of(engine, source, recipe.chat(part), recipe.tokenizer, recipe.documents, by_reference)
    texts = [piece.documents.texts for piece in pieces]
    try:
        tokens = encoder(pa.concat_arrays(texts))
    except UnencodableError:
        for piece in pieces:
            yield tokens_of(piece.documents, piece.part, source, recipe.documents, encoder, piece.tally)[0]
        return
    ids, offsets = tokens.ids, tokens.offsets
    at = 0
    for end in accumulate(map(len, texts)):
        starts = offsets[at : end + 1]
        batch = TokenBatch.from_flat(ids[starts[0] : starts[-1]].copy(), (starts - starts[0]).astype(np.uint64))
        yield batch._replace(loss_mask=None if tokens.mask is None else tokens.mask[starts[0] : starts[-1]])
        at = end


def _sizes(batches: list[TokenBatch], pieces: list[Piece], layout: LayoutName) -> tuple[Counts, float]:
    """Bytes that a dataset takes for each piece: float64[n]. And the seconds that a token takes a thread to be compressed. Pieces
    are compressed together, as they are in a dataset; alone they tell how much of it each is.
    """
    specs, beside = LAYOUTS[layout], document_spec(LAYOUTS[layout])
    tokens, masks = [of.encoded_tokens for of in batches], [of.loss_mask for of in batches if of.loss_mask is not None]
    begun = clock()
    together = _packed(specs.encoded_tokens, tokens) + _packed(specs.token_array(LOSS_MASK), masks)
    token_count = sum(map(len, tokens))
    packing = 0.0 if specs.encoded_tokens.zstd_level is None else (clock() - begun) / max(token_count, 1)
    lengths = [np.diff(of.seq_starts.astype(np.int64)) for of in batches]
    documents = _packed(specs.seq_starts, [np.cumsum(np.concatenate([[0], *lengths]))])
    documents += sum(_packed(beside, [fact(piece.documents.rows, name) for piece in pieces]) for name in (KEY, ROW))
    alone = np.array([_packed(specs.encoded_tokens, [some]) for some in tokens], np.float64)
    counts = np.array([of.seq_count for of in batches], np.float64)
    return alone * together / max(alone.sum(), 1) + counts * documents / max(counts.sum(), 1), packing


def _packed(spec: ArraySpec, arrays: list[AnyArray]) -> int:
    """Bytes that an array takes, given in parts; 0 if there is none."""
    items = np.concatenate([np.empty(0, spec.numpy_dtype), *arrays]).astype(spec.numpy_dtype)
    if spec.zstd_level is None:
        return items.nbytes
    chunk_count = -(-len(items) // spec.chunk_length)
    full = np.full(chunk_count * spec.chunk_length, spec.fill_value, spec.numpy_dtype)
    full[: len(items)] = items
    return sum(len(spec.encode_chunk(chunk)) for chunk in full.reshape(-1, spec.chunk_length))


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
    chunk, if that is stored as it is.
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
    specs, beside_items = LAYOUTS[layout_of(config, root)], METADATA_BYTES
    held_out = [config.validation_fraction, *([config.test_fraction] if config.test_fraction else [])]
    for share in (*held_out, 1 - sum(held_out)):
        tokens, documents = round(whole.tokens * share), round(whole.documents * share)
        beside_items += bytes_of_objects(specs.encoded_tokens, tokens if documents else 0)
        beside_items += bytes_of_objects(specs.seq_starts, documents + 1)
        beside_items += len(config.facts) * bytes_of_objects(document_spec(specs), documents)
    dataset_bytes = whole.dataset_bytes + beside_items
    streamed = config.runner == "threads" and may_stream(root, config)
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
    """By how much *scale* times an estimate may be off, if the rest is of files that nobody looked into."""
    return error * scale + (estimate * (scale - 1) * UNSEEN if scale > 1 else 0)
