"""The build: text in, a published version out, in five stages; a sixth where
duplicates are dropped.

source -> files -> slices -> token shards -> spans of the final arrays -> version. The functions of the stages are in
``tasks``, a folder a stage; ``stages`` says how each is handed out, ``publish`` what every publication has in common.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from flat_tokens.stores.store import Store
from flows.pipelines.publish import OpenOutput, Published, check_apart, layout_of, opened, publication, scratch_of, timed
from flows.pipelines.stages import (
    DOWNLOAD,
    DUPLICATES,
    FINALIZE,
    SHARD_WRITE,
    SPLIT,
    TOKENIZE,
    Runner,
    Started,
    Step,
    in_order,
    in_turn,
    settled,
)
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import FETCHERS, at_hand, fetched_ahead
from tasks.download.slices import slices_of
from tasks.download.small import packs_of
from tasks.download.sources import naming, resolve_source
from tasks.download.table import CutFile, known_files, remember_files
from tasks.finalize.provenance import Provenance, build_id, card, provenance
from tasks.finalize.seal import Contents, document_totals, is_published, source_totals
from tasks.models import FoundFile, PinnedSource, Slice, SourceFile, TokenShard
from tasks.output.pointer import read_pointer
from tasks.output.staging import Place
from tasks.output.versions import remember_origin
from tasks.progress import meter
from tasks.shards.contents import Opened, open_contents
from tasks.shards.fresh import Fresh
from tasks.shards.index import indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.shards.write import Staged, tokenize_and_keep
from tasks.split.ahead import Ahead
from tasks.split.duplicates import Dropping
from tasks.split.kinds import Kinds
from tasks.split.spans import CountedPlace, ShardPlace, Span, SplitRule, count_documents, lay_out
from tasks.text.documents import Tally, read_documents
from tasks.tokenize.chat import Chat, chats_of
from tasks.tokenize.engines import Tokenizer, forget_what_was_learned, may_use_fast_engine, try_fast_engine
from tasks.tokenize.tokenizers import load_tokenizer

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 100_000
LOOKED_INTO = 256_000_000
"""Bytes of files whose content is looked up, half a second, before it is known whether a build has anything to do."""
REMEMBERED_SECONDS = 30.0
"""What is known of files is recorded this often while they are read."""


class BuildResult(Published):
    """Result of a build. ``slices_reused``: those whose tokens were there."""

    slices: int
    slices_reused: int

    @property
    def headline(self) -> str:
        reused = "" if self.was_published else f", {self.slices_reused:,} of {self.slices:,} slices reused"
        return super().headline + reused


class Text(NamedTuple):
    """The text of a version: where its sources are pinned, their files, and their slices, all in order."""

    pinned: tuple[PinnedSource, ...]
    files: list[SourceFile]
    slices: list[Slice]

    @classmethod
    def of(cls, config: BuildConfig, pinned: tuple[PinnedSource, ...], cuts: Sequence[CutFile]) -> Text:
        return cls(pinned, [cut.file for cut in cuts], list(slices_of(cuts, config.slice_bytes)))

    @property
    def has_runs(self) -> bool:
        """Whether a slice is of several files."""
        return any(len(slice_.ranges) > 1 for slice_ in self.slices)


def build(config: BuildConfig, runner: Runner) -> BuildResult:
    """Publish the version that the sources give now. A version that is there already is left as it is."""
    with ThreadPoolExecutor(1) as beside, opened(config) as output:
        with timed("download", output.seconds):
            loading = beside.submit(tokenizer_of, config, is_first=output.pointer.version is None)
            pinned = pin_sources(config, output.root)
            text = Text.of(config, pinned, download(config, files_of(pinned), runner, output.root))
            tokenizer = loading.result()
        return build_version(config, text, tokenizer, runner, output)


def build_of_nothing(config: BuildConfig, runner: Runner) -> BuildResult | None:
    """The result of a build that has nothing to do, because the version is published; None where it has, or where that cannot be
    told from the names of files and at most LOOKED_INTO bytes of them.
    """
    root = Store.at(config.output)
    if root.is_local and read_pointer(root).version is None:  # before a directory is made for it
        return None
    with opened(config) as output:
        if output.pointer.version is None:
            return None
        with timed("download", output.seconds), ThreadPoolExecutor(1) as beside:
            loading = beside.submit(tokenizer_of, config, is_first=False)
            pinned = pin_sources(config, output.root)
            found = files_of(pinned)
            known = known_files(found, config.sources, config.slice_bytes, [output.root])
            fresh = [file for file, cut in zip(found, known, strict=True) if cut is None]
            if any("://" in file.uri for file in fresh) or sum(file.size or 0 for file in fresh) > LOOKED_INTO:
                return None
            text = Text.of(config, pinned, download(config, found, runner, output.root, known=known))
        tokenizer, layout = loading.result(), layout_of(config, output.root)
        chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
        made_of = provenance(config, pinned, text.files, tokenizer, chats, text.has_runs)
        if not is_published(output.root, build_id(made_of, layout), layout):
            return None
        return build_version(config, text, tokenizer, runner, output)


def download(
    config: BuildConfig,
    found: list[FoundFile],
    runner: Runner,
    root: Store,
    *others: Store,
    known: Sequence[CutFile | None] | None = None,
) -> list[CutFile]:
    """Stage download: files -> ranges. A file that the output or one of the *others* knows is cut without being read, as long as
    its store, or its times, say that it is the same. It is fetched where a slice of it has to be tokenized.
    *known*: what they know, where that has been looked up.
    """
    begun = time.time_ns()
    meter.begin("download", sum(file.size or 0 for file in found))
    if known is None:
        known = known_files(found, config.sources, config.slice_bytes, (root, *others))
    known_bytes = sum(file.size or 0 for file, cut in zip(found, known, strict=True) if cut)
    meter.add("download", known_bytes, stored=known_bytes)
    fresh = [file for file, cut in zip(found, known, strict=True) if cut is None]
    place = Place(root, staging="", scratch=os.fspath(scratch_of(config, root)))
    packs = in_order(
        runner,
        packs_of(fresh),
        DOWNLOAD.given(config.sources, config.slice_bytes, place),  # files -> their digests, and where they are cut
    )
    cuts = list(known)
    with contextlib.closing(packs), remembering(config, root, cuts, begun) as remember:
        left = (number for number, cut in enumerate(known) if cut is None)
        for pack in packs:
            for cut in pack:
                cuts[next(left)] = cut
            remember()
    whole = [cut for cut in cuts if cut is not None]
    assert len(whole) == len(found)
    check_one_format(config, [cut.file for cut in whole])
    return whole


@contextlib.contextmanager
def remembering(config: BuildConfig, root: Store, cuts: Sequence[CutFile | None], begun: int) -> Iterator[Callable[[], None]]:
    """A block in which *cuts* become known. What is known is recorded at its end, and sometimes when the block calls the function
    that it gets: then a build that is killed has not read everything in vain.
    """
    last = time.monotonic()

    def remember(after: float = REMEMBERED_SECONDS) -> None:
        nonlocal last
        if time.monotonic() >= last + after:
            remember_files(root, config.sources, config.slice_bytes, filter(None, cuts), begun)
            last = time.monotonic()

    try:
        yield remember
    except BaseException:
        with contextlib.suppress(Exception):  # the error of the block is the one that is raised
            remember(0)
        raise
    remember(0)


def build_version(config: BuildConfig, text: Text, tokenizer: Tokenizer, runner: Runner, output: OpenOutput) -> BuildResult:
    """The other stages: slices -> the version that they give, published."""
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    made_of = provenance(config, text.pinned, text.files, tokenizer, chats, text.has_runs)
    layout = layout_of(config, output.root)
    remember = partial(remember_origin, output.root, config=config, pinned=text.pinned, files=text.files)
    counted: list[CountedPlace] = []
    stored: set[str] = set()

    with publication(output, made_of, layout, remember) as version, contextlib.ExitStack() as held:
        if place := version.place:
            with timed("tokenize", output.seconds):
                recipe = make_recipe(config, place, tokenizer, text.slices, chats)
                slices = {recipe.key(slice_): slice_ for slice_ in text.slices}
                indexed = indexed_versions(place.root)
                unknown = without_tokens(place.root, indexed, list(slices))
                missing = [slices[key] for key in without_receipt(place.root, unknown)]
                stored = set(unknown) - {recipe.key(slice_) for slice_ in missing}
                rule = SplitRule(fraction=config.fraction, seed=config.split_seed)
                total = sum(map(TOKENIZE.size, slices.values()))
                meter.begin("tokenize", total, stored=total - sum(map(TOKENIZE.size, missing)))
                held.enter_context(fetched_ahead(missing if runner.reads_here else [], config.sources, place))

                tokenizing = TOKENIZE.given(recipe, place, indexed)  # slice -> token shard, staged where it is tokenized
                splitting = SPLIT.given(rule, layout, place, version.name)  # shards -> final objects
                dropping = Dropping(place, version.name) if config.documents.duplicates == "drop" else None
                fresh, ahead = Fresh(), None
                if runner.works_here and not config.masked:
                    ahead = held.enter_context(Ahead(rule, layout, place, version.name, fresh, streams=not dropping))
                    tokenizing = tokenizing._replace(by=tokenizing_ahead(ahead, fresh, text, recipe))
                    splitting = splitting._replace(by=lambda _, span: ahead.write(span))

                # Lazily, from the last line to the first: a span is written as soon as its last shard is stored, while the
                # slices behind are still tokenized.
                shards = in_order(
                    runner,
                    slices.values(),
                    tokenizing,
                    SHARD_WRITE.given(place),  # staged -> stored under its key, the receipt last
                    on_error=ahead.stop_streams if ahead else None,
                )
                held.enter_context(contextlib.closing(shards))  # an error waits for what is under way
                if ahead:
                    held.callback(ahead.stop_streams)
                kinds = Kinds(config.kept_columns, [file.name for file in text.files])
                placed = kinds.of_places(place_shards(text, recipe, shards))
                if dropping:
                    placed = in_turn(runner, placed, DUPLICATES.given(dropping))  # -> without texts of earlier ones
                places = count_in_order(placed, counted, rule, place.root, version.name, fresh.open)
                places = ahead.follow(places) if ahead else places
                spans: list[Span] = []
                writing: list[Started] = []
                with settled(writing):
                    for span in lay_out(places, layout, config.masked, config.kept_columns):
                        spans.append(span)
                        writing.append(runner.start(span, splitting))

            if dropping:
                meter.begin("duplicates", sum(at.shard.text_bytes for at, _ in counted))
                output.seconds["duplicates"] = round(dropping.seconds, 3)
            with timed("split", output.seconds), settled(writing):
                meter.begin("split", 4 * sum(at.kept.token_count for at, _ in counted))
                written = [span_under_way.result() for span_under_way in writing]
            threading.Thread(target=forget_what_was_learned).start()  # of an engine, which takes a while
            with timed("finalize", output.seconds):
                totals = partial(documents_of, made_of, counted)
                contents = Contents(made_of, layout, spans, written, totals, card, counted, kinds.found)
                finalizing = FINALIZE.given(contents, place, config.verify_level)  # final objects -> checked, committed
                runner.start(version.name, finalizing).result()

    made = {at.shard.key: at.shard for at, _ in counted if at.shard.held is None and at.shard.key not in stored}
    return version.finish(
        BuildResult,
        slices=len(text.slices) if version.place else 0,
        slices_reused=len(counted) - len(made),
        text_bytes_tokenized=sum(shard.text_bytes - shard.text_bytes_taken for shard in made.values()),
    )


def tokenizing_ahead(ahead: Ahead, fresh: Fresh, text: Text, recipe: Recipe) -> Callable[[Step, Slice], Staged | TokenShard]:
    """The stage tokenize where this process writes spans ahead: small slices are kept in memory for that, large ones streamed."""
    places = reversed([*enumerate(text.slices)])  # the first one of equal slices counts
    firsts = {recipe.key(slice_): (place, slice_.split) for place, slice_ in places}

    def tokenize(step: Step, slice_: Slice) -> Staged | TokenShard:
        recipe, place, indexed = step.shared
        streams = partial(ahead.stream, *firsts[recipe.key(slice_)])
        return tokenize_and_keep(fresh, slice_, recipe, place, indexed, streams)

    return tokenize


def tokenizer_of(config: BuildConfig, *, is_first: bool) -> Tokenizer:
    """The tokenizer of a build. The first one at an output says before its text is here where it will be a slow one."""
    tokenizer = load_tokenizer(config.tokenizer)
    if is_first:
        try_fast_engine(tokenizer, config.tokenizer.engine, processors_of(config))
    return tokenizer


def processors_of(config: BuildConfig) -> int:
    return min(config.workers or available_cores(), available_cores())


def pin_sources(config: BuildConfig, root: Store) -> tuple[PinnedSource, ...]:
    """Look every source up. ValueError where one lies within the output."""
    pinned = tuple(resolve_source(source, i) for i, source in enumerate(config.sources))
    check_sources_apart(root, pinned)
    return pinned


def check_sources_apart(root: Store, pinned: tuple[PinnedSource, ...]) -> None:
    """Refuse source files within the output."""
    for file in files_of(pinned):
        if file.uri.startswith(root.url):
            check_apart(file.uri, root.url, f"the source file {file.uri} lies within the output {root.url}")


def files_of(pinned: tuple[PinnedSource, ...]) -> list[FoundFile]:
    return [file for source in pinned for file in source.files]


def check_one_format(config: BuildConfig, files: list[SourceFile]) -> None:
    """Refuse a source of several formats: what stands beside the data is hardly meant as text to train on."""
    formats: list[dict[str, str]] = [{} for _ in config.sources]
    for file in files:
        formats[file.source][file.format] = file.name
    for source, of_format in zip(config.sources, formats, strict=True):
        if len(of_format) > 1:
            found = ", ".join(f"{kind} ({name})" for kind, name in sorted(of_format.items()))
            raise ValueError(
                f"source {source.name!r} holds files of several formats: {found}. Set source.path to a glob that takes one of "
                f"them, such as {source.path or source.name}/*.{next(iter(of_format))}; give another format a source of its own."
            )


def make_recipe(
    config: BuildConfig, place: Place, tokenizer: Tokenizer, slices: list[Slice], chats: tuple[Chat | None, ...]
) -> Recipe:
    """The recipe of the build's shards, with the engine that a sample of its own documents allows."""
    samples, text_bytes = sample_texts(config, place, slices), sum(slice_.text_bytes for slice_ in slices)
    fast = may_use_fast_engine(tokenizer, config.tokenizer.engine, samples, text_bytes, processors_of(config))
    may_differ = tokenizer.make_fast is not None and not fast and config.documents.on_bad != "error"
    return Recipe(
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        fast=fast,
        documents=config.documents,
        engine="reference" if may_differ else None,
        chats=chats if any(chats) else (),
        steps=config.documents.opened().described,
    )


def sample_texts(config: BuildConfig, place: Place, slices: list[Slice]) -> list[str]:
    """Some of the first documents of every source, none of them long: the reference engine is slow."""
    texts: list[str] = []
    first_of = sorted({slice_.source: slice_ for slice_ in reversed(slices)}.items())
    with ThreadPoolExecutor(FETCHERS) as fetchers:
        here = fetchers.map(lambda one: at_hand(one[1], config.sources, place), first_of)
    for (index, _), slice_ in zip(first_of, here, strict=True):
        with naming(config.sources, index):
            documents = next(read_documents(slice_, config.sources[index], config.documents, Tally(), SAMPLE_BYTES), None)
        left = SAMPLE_BYTES
        for text in documents.texts.slice(0, SAMPLE_DOCUMENTS) if documents else ():
            if len(text.as_buffer()) <= left:
                left -= len(text.as_buffer())
                texts.append(text.as_py())
    return texts


def place_shards(text: Text, recipe: Recipe, shards: Iterator[TokenShard]) -> Iterator[ShardPlace]:
    """Each slice's shard, in order, with its file's number and the row of the file at which it begins. *shards* has each
    distinct shard once, where it is first needed: equal files share theirs.
    """
    numbers = {(file.source, file.name): i for i, file in enumerate(text.files)}
    known: dict[str, TokenShard] = {}
    rows: Counter[int] = Counter()
    for slice_ in text.slices:
        first, key = slice_.ranges[0].file, recipe.key(slice_)
        number = numbers[first.source, first.name]
        shard = known.get(key) or known.setdefault(key, next(shards))
        yield ShardPlace(shard=shard, file=number, first_row=rows[number], all_in=slice_.split)
        rows[number] += shard.rows


def count_in_order(
    places: Iterable[ShardPlace],
    seen: list[CountedPlace],
    rule: SplitRule,
    root: Store,
    version: str,
    opened: Opened = open_contents,
) -> Iterator[CountedPlace]:
    """Places as they come, with their counts; *seen* keeps them all."""
    for at in places:
        seen.append((at, count_documents(at, rule, root, version, opened)))
        yield seen[-1]


def documents_of(made_of: Provenance, counted: list[CountedPlace], repeated: int) -> dict[str, Any]:
    """Totals of the documents of a build."""
    places = [at for at, _ in counted]
    return {**document_totals(places, repeated), "by_source": source_totals(made_of, places)}
