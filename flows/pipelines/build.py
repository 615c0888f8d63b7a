"""The build: text in, a published version out, in five stages; a sixth where
duplicates are dropped.

source -> files -> slices -> token shards -> spans of the final arrays -> version. The functions of the stages are in
``tasks``, a folder a stage; ``stages`` says how each is handed out, ``publish`` what every publication has in common.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from tasks.download.cut import FETCHERS, CutFile, at_hand, fetched_ahead, recorded
from tasks.download.sources import naming, resolve_source
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
from tasks.tokenize.engines import Tokenizer, engine_of, forget_what_was_learned, may_use_fast_engine, try_fast_engine
from tasks.tokenize.masks import chats_by_reference
from tasks.tokenize.tokenizers import load_tokenizer

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 100_000
LOOKED_INTO = 256_000_000
"""Bytes of files whose content is looked up, half a second, before it is known whether a build has anything to do."""


class BuildResult(Published):
    """Result of a build. ``slices_reused``: those whose tokens were there."""

    slices: int
    slices_reused: int

    @property
    def headline(self) -> str:
        reused = "" if self.was_published else f", {self.slices_reused:,} of {self.slices:,} slices reused"
        return super().headline + reused


class Text(NamedTuple):
    """The text of a version: where its sources are pinned, and their files in that order, each with its slices."""

    pinned: tuple[PinnedSource, ...]
    cuts: list[CutFile]

    @property
    def files(self) -> list[SourceFile]:
        return [cut.file for cut in self.cuts]

    @property
    def slices(self) -> list[Slice]:
        return [slice_ for cut in self.cuts for slice_ in cut.slices]


def build(config: BuildConfig, runner: Runner) -> BuildResult:
    """Publish the version that the sources give now. A version that is there already is left as it is."""
    with ThreadPoolExecutor(1) as beside, opened(config) as output:
        with timed("download", output.seconds):
            loading = beside.submit(tokenizer_of, config, is_first=output.pointer.version is None)
            pinned = pin_sources(config, output.root)
            text = Text(pinned, download(config, files_of(pinned), runner, output.root))
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
            known = recorded(found, config.sources, config.slice_bytes, [output.root])
            fresh = [file for file in found if file not in known]
            if any("://" in file.uri for file in fresh) or sum(file.size or 0 for file in fresh) > LOOKED_INTO:
                return None
            text = Text(pinned, download(config, found, runner, output.root))
        tokenizer, layout = loading.result(), layout_of(config, output.root)
        chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
        made_of = provenance(config, pinned, text.files, tokenizer, chats)
        if not is_published(output.root, build_id(made_of, layout), layout):
            return None
        return build_version(config, text, tokenizer, runner, output)


def download(config: BuildConfig, found: list[FoundFile], runner: Runner, root: Store, *others: Store) -> list[CutFile]:
    """Stage download: files -> slices. A file with a record at the output or one of the *others* is cut without being fetched,
    as long as its store calls it the same; it is fetched when a slice of it has to be tokenized, if that happens at all.
    """
    meter.begin("download", sum(file.size or 0 for file in found))
    known = recorded(found, config.sources, config.slice_bytes, (root, *others))
    at_hand_already = sum(file.size or 0 for file in known)
    meter.add("download", at_hand_already, stored=at_hand_already)
    fresh = [file for file in found if file not in known]
    place = Place(root, staging="", scratch=os.fspath(scratch_of(config, root)))
    cuts = in_order(
        runner,
        fresh,
        DOWNLOAD.given(config.sources, config.slice_bytes, place),  # file -> on a local disk, its slices known
    )
    cut = dict(zip(fresh, cuts, strict=True))
    cut_files = [known.get(file) or cut[file] for file in found]
    check_one_format(config, [cut.file for cut in cut_files])
    return cut_files


def build_version(config: BuildConfig, text: Text, tokenizer: Tokenizer, runner: Runner, output: OpenOutput) -> BuildResult:
    """The other stages: slices -> the version that they give, published."""
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    made_of, layout = provenance(config, text.pinned, text.files, tokenizer, chats), layout_of(config, output.root)
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
    firsts = {recipe.key(slice_): (place, slice_.file.split) for place, slice_ in places}

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
        check_apart(file.uri, root.url, f"the source file {file.uri} lies within the output {root.url}")


def files_of(pinned: tuple[PinnedSource, ...]) -> list[FoundFile]:
    return [file for source in pinned for file in source.files]


def check_one_format(config: BuildConfig, files: list[SourceFile]) -> None:
    """Refuse a source of several formats: what stands beside the data is hardly meant as text to train on."""
    for index, source in enumerate(config.sources):
        of_format = {file.format: file.name for file in files if file.source == index}
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
    texts = [text for of in samples.values() for text in of]
    fast = may_use_fast_engine(tokenizer, config.tokenizer.engine, texts, text_bytes, processors_of(config))
    by_reference = chats_by_reference(config.sources, chats, samples, config.tokenizer, engine_of(tokenizer, fast))
    may_differ = tokenizer.make_fast is not None and not fast and config.documents.on_bad != "error"
    return Recipe(
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        fast=fast,
        documents=config.documents,
        engine="reference" if may_differ else None,
        chats=chats if any(chats) else (),
        by_reference=by_reference,
        steps=config.documents.opened().described,
    )


def sample_texts(config: BuildConfig, place: Place, slices: list[Slice]) -> dict[int, list[str]]:
    """Some of the first documents of every source, none of them long: the reference engine is slow."""
    texts: dict[int, list[str]] = {}
    first_of = sorted({slice_.file.source: slice_ for slice_ in reversed(slices)}.items())
    with ThreadPoolExecutor(FETCHERS) as fetchers:
        here = fetchers.map(lambda one: at_hand(one[1], config.sources, place), first_of)
    for (index, _), slice_ in zip(first_of, here, strict=True):
        with naming(config.sources, index):
            documents = next(read_documents(slice_, config.sources[index], config.documents, Tally(), SAMPLE_BYTES), None)
        left = SAMPLE_BYTES
        for text in documents.texts.slice(0, SAMPLE_DOCUMENTS) if documents else ():
            if len(text.as_buffer()) <= left:
                left -= len(text.as_buffer())
                texts.setdefault(index, []).append(text.as_py())
    return texts


def place_shards(text: Text, recipe: Recipe, shards: Iterator[TokenShard]) -> Iterator[ShardPlace]:
    """Each slice's shard, in order, with its file's number and the row of the file at which it begins. *shards* has each
    distinct shard once, where it is first needed: equal files share theirs.
    """
    numbers = {(file.source, file.name): i for i, file in enumerate(text.files)}
    known: dict[str, TokenShard] = {}
    rows: Counter[int] = Counter()
    for slice_ in text.slices:
        number, key = numbers[slice_.file.source, slice_.file.name], recipe.key(slice_)
        shard = known.get(key) or known.setdefault(key, next(shards))
        yield ShardPlace(shard=shard, file=number, first_row=rows[number], all_in=slice_.file.split)
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
