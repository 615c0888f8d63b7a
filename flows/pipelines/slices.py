"""Slices -> parts: those that are stored and those that are tokenized now, compared with each other if a build says so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from flows.pipelines.publish import OpenOutput
from flows.pipelines.stages import (
    DUPLICATES,
    NEAR_DUPLICATES,
    SHARD_WRITE,
    SIGNATURES,
    TOKENIZE,
    ItemUnderWay,
    Runner,
    run_one_by_one,
    started_in_order,
)
from flows.pipelines.text import Made, Text, files_of, warn_of_separators
from tasks.assemble.assembler import Assembler
from tasks.assemble.duplicates import DuplicateFilter, SignedDocuments
from tasks.config import BuildConfig
from tasks.download.cut import fetched_ahead, fetching_to
from tasks.finalize.provenance import forgotten_digest
from tasks.models import TokenShard
from tasks.output.target import Target
from tasks.parts.part import ShardPart
from tasks.parts.stored import may_stream
from tasks.progress import meter
from tasks.shards.recipe import Recipe, signature_of
from tasks.shards.sample import warn_of_room
from tasks.shards.stored import StoredSlices, look_up_slices
from tasks.shards.stream import Sink


def tokenize(
    made: Made, target: Target, runner: Runner, output: OpenOutput, assembler: Assembler, under_way: deque[ItemUnderWay]
) -> StoredSlices:
    """Slices -> token shards -> parts, which the assembler gets in the slices' order while later slices are tokenized. Return
    which of them were there.
    """
    config, text, tokenizer, chats, *_ = made
    with fetching_to(config, target.workspace, files_of(text.pinned)) as workspace:
        warn_of_separators(config, text.files)
        recipe = Recipe.of(config, tokenizer, chats, forgotten_digest(output.forgotten))
        recipe, stored = look_up_slices(config, workspace, tokenizer, text.slices, recipe)
        if stored.unread:
            warn_of_room(config, workspace, text.slices, recipe, tokenizer)
        duplicates = DuplicateFilter(target) if config.documents.duplicates == "drop" else None
        sink: Sink | None = None
        if runner.workers != "machines":
            numbered = reversed([*enumerate(zip(stored.keys, text.slices, strict=True))])  # the first of equal slices counts
            order = {key: (number, slice_.split) for number, (key, slice_) in numbered}
            streams, copies = may_stream(target.root, config), runner.workers == "threads"
            sink = assembler.open_sink(order, streams=streams, copies=copies, duplicates=duplicates)
        with fetched_ahead(stored.unread if runner.workers != "machines" else [], config.sources, workspace):
            shards = started_in_order(
                runner,
                under_way,
                stored.slices.values(),
                TOKENIZE.given(recipe, workspace, stored.versions, sink),  # slice -> shard, or tokens in the version
                SHARD_WRITE.given(workspace, sink),  # staged -> stored under its key, the receipt last
            )
            parts = without_duplicates(duplicates, runner, place_shards(text, stored.keys, shards), output)
            for part in with_near_duplicates(config, target, runner, parts, output, assembler):
                assembler.add(part)
    return stored


def without_duplicates(
    duplicates: DuplicateFilter | None, runner: Runner, parts: Iterator[ShardPart], output: OpenOutput
) -> Iterator[ShardPart]:
    """The parts, without documents whose texts earlier ones have, if there is a filter."""
    if duplicates is None:
        yield from parts
        return
    text_bytes = 0
    for part in run_one_by_one(runner, parts, DUPLICATES.given(duplicates)):
        text_bytes += part.shard.text_bytes
        yield part
    meter.begin("duplicates", text_bytes)
    output.seconds["duplicates"] = round(duplicates.seconds, 3)


def with_near_duplicates(
    config: BuildConfig,
    target: Target,
    runner: Runner,
    parts: Iterator[ShardPart],
    output: OpenOutput,
    assembler: Assembler,
) -> Iterator[ShardPart]:
    """The parts, with their near-duplicates, if the configuration says so: when all of them have arrived. The assembler takes
    their tokens before, unless these wait for clusters.
    """
    if config.documents.near_duplicates is None:
        yield from parts
        return
    near = config.documents.near_duplicates
    signed = SignedDocuments(target, signature_of(near), near, together=config.splits_clusters)
    placed = parts if config.waits_for_clusters else map(assembler.place, parts)
    waiting = list(run_one_by_one(runner, placed, SIGNATURES.given(signed)))
    meter.begin("near-duplicates", sum(part.shard.text_bytes for part in waiting))
    yield from run_one_by_one(runner, waiting, NEAR_DUPLICATES.given(signed))
    output.seconds["near-duplicates"] = round(signed.seconds, 3)


def place_shards(text: Text, keys: Sequence[str], shards: Iterator[TokenShard]) -> Iterator[ShardPart]:
    """Each slice's shard, in order, with its first file's number and the row of that at which it begins. *keys*: of the slices.
    *shards* has each distinct shard once, where it is first needed: equal files share theirs.
    """
    numbers = {(file.source, file.name): i for i, file in enumerate(text.files)}
    known: dict[str, TokenShard] = {}
    rows: Counter[int] = Counter()
    for key, slice_ in zip(keys, text.slices, strict=True):
        first = slice_.ranges[0].file
        number = numbers[first.source, first.name]
        shard = known.get(key) or known.setdefault(key, next(shards))
        yield ShardPart(shard=shard, file=number, first_row=rows[number], all_in=slice_.split)
        rows[number] += shard.rows
