"""The build: text in, a published version out, in five stages; more where documents are compared with each other.

source -> files -> slices -> token shards -> spans of the final arrays -> version. The functions of the stages are in
``tasks``, a folder a stage; ``stages`` says how each is handed out, ``publish`` what every publication has in common.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from flat_tokens.manifest import CLUSTER, TOKEN_BYTES
from flat_tokens.stores.store import Store
from flat_tokens.text.formats import FileFormat
from flat_tokens.tools.terminal import plural
from flows.pipelines.assembling import assembling, shard_parts
from flows.pipelines.publish import (
    OpenOutput,
    Published,
    check_apart,
    fetching_to,
    layout_of,
    opened,
    publication,
    scratch_of,
    timed,
)
from flows.pipelines.room import warn_of_room
from flows.pipelines.stages import (
    DOWNLOAD,
    DUPLICATES,
    FINALIZE,
    NEAR_DUPLICATES,
    SHARD_WRITE,
    SIGNATURES,
    TOKENIZE,
    Runner,
    Started,
    in_turn,
    settled,
    started_in_order,
)
from tasks.assemble.assembler import Assembler
from tasks.assemble.duplicates import DuplicateFilter
from tasks.assemble.near_duplicates import SignedDocuments
from tasks.config import BuildConfig, available_cores
from tasks.download.cut import FETCHERS, fetched_ahead, lent
from tasks.download.directories import check_one_format
from tasks.download.evaluation import with_pinned_sets
from tasks.download.slices import slices_of
from tasks.download.small import packs_of
from tasks.download.sources import naming, resolve_source
from tasks.download.table import CutFile, known_files, remember_files
from tasks.finalize.equal_texts import equal_texts_apart
from tasks.finalize.naming import keeping, leaving_out, list_left_out, name_of
from tasks.finalize.provenance import Provenance, card, provenance
from tasks.finalize.seal import VersionDraft, document_totals, is_published, match_totals, source_totals
from tasks.gates import Gate
from tasks.models import FoundFile, PinnedSource, Slice, SourceFile, TokenShard
from tasks.output.held import read_held
from tasks.output.paths import SETS
from tasks.output.pointer import read_pointer
from tasks.output.staging import Workspace
from tasks.output.target import SplitRule, Target
from tasks.output.versions import remember_origin
from tasks.parts.part import ShardPart
from tasks.parts.unfinished import may_stream
from tasks.progress import meter
from tasks.shards.index import VersionNames, indexed_versions, without_tokens
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe, signature_of, text_facts
from tasks.shards.stream import Sink
from tasks.text.documents import Tally, TextBatch, read_documents
from tasks.text.separators import unused_separators
from tasks.tokenize.chat import Chat, chats_of
from tasks.tokenize.engines import (
    Tokenizer,
    engine_of,
    forget_what_was_learned,
    import_ahead,
    may_use_fast_engine,
    try_fast_engine,
)
from tasks.tokenize.masks import chats_by_reference
from tasks.tokenize.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 100_000
LOOKED_INTO = 256_000_000
"""Bytes of files whose content is looked up, half a second, before it is known whether a build has anything to do."""
REMEMBERED_SECONDS = 30.0
"""Records of files are written this often while they are read."""


class BuildResult(Published):
    """Result of a build. ``slices_reused``: those whose tokens were there. ``equal_texts_apart``: documents outside train whose
    text another split has, too; None where that was not looked for.
    """

    slices: int
    slices_reused: int
    equal_texts_apart: int | None = None

    @property
    def headline(self) -> str:
        reused = "" if self.was_published or self.held else f", {self.slices_reused:,} of {plural(self.slices, 'slice')} reused"
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
    def file_names(self) -> list[str]:
        """Names of the files, by their numbers."""
        return [file.name for file in self.files]

    @property
    def has_runs(self) -> bool:
        """Whether a slice is of several files."""
        return any(len(slice_.ranges) > 1 for slice_ in self.slices)


def build(config: BuildConfig, runner: Runner, publish_anyway: str | None = None) -> BuildResult:
    """Publish the version that the sources give now, if its gates let it through. A version that is there already is left as it
    is. *publish_anyway*: why a person publishes it whatever they say.
    """
    with ThreadPoolExecutor(1) as beside, opened(config, publish_anyway) as output:
        with timed("download", output.seconds):
            loading = beside.submit(tokenizer_of, config, is_first=output.pointer.version is None)
            config = pin_sets(config, output.root)
            pinned = pin_sources(config, output.root)
            found = files_of(pinned)
            if is_much(found):
                after_trial(loading, output.seconds)  # a wrong tokenizer is an error before so much is fetched
            known = known_files(found, config.sources, config.slice_bytes, [output.root])
            if output.pointer.version is None or is_much(unknown(found, known)):
                beside.submit(import_ahead, loading)
            text = Text.of(config, pinned, download(config, found, runner, output.root, known=known))
            tokenizer = after_trial(loading, output.seconds)
        return build_version(config, text, tokenizer, runner, output)


def result_if_up_to_date(config: BuildConfig, runner: Runner) -> BuildResult | None:
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
            config = pin_sets(config, output.root)
            pinned = pin_sources(config, output.root)
            found = files_of(pinned)
            known = known_files(found, config.sources, config.slice_bytes, [output.root])
            if is_much(unknown(found, known)):
                return None
            text = Text.of(config, pinned, download(config, found, runner, output.root, known=known))
            tokenizer = after_trial(loading, output.seconds)
        layout = layout_of(config, output.root)
        chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
        make = partial(provenance, pinned=pinned, files=text.files, tokenizer=tokenizer, chats=chats, has_runs=text.has_runs)
        config, made_of = keeping(config, output.root, output.pointer.version, output.forgotten, layout, make)
        version = name_of(output.root, output.forgotten, made_of, layout).version
        if not is_published(output.root, version, layout):
            return None
        if version != output.pointer.version and (config.publish.gates or read_held(output.root).names_of_versions & {version}):
            return None
        return build_version(config, text, tokenizer, runner, output)


def unknown(found: Sequence[FoundFile], known: Sequence[CutFile | None]) -> list[FoundFile]:
    """The files that have to be read to know their contents."""
    return [file for file, cut in zip(found, known, strict=True) if cut is None]


def is_much(files: list[FoundFile]) -> bool:
    """Whether it takes a while to fetch files, or to read them."""
    return any("://" in file.uri for file in files) or sum(file.size or 0 for file in files) > LOOKED_INTO


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
    workspace = fetching_to(config, Workspace(root, staging="", scratch=os.fspath(scratch_of(config, root))), found)
    cuts, step = (
        list(known),
        DOWNLOAD.given(config.sources, config.slice_bytes, workspace),
    )  # files -> digests, where they are cut
    if fresh:
        left = (number for number, cut in enumerate(known) if cut is None)
        with settled() as under_way, remembering(config, root, cuts, begun) as remember:
            for pack in started_in_order(runner, under_way, packs_of(fresh), step):
                for cut in pack:
                    cuts[next(left)] = cut
                remember()
    whole = [cut for cut in cuts if cut is not None]
    assert len(whole) == len(found)
    check_files(config, [cut.file for cut in whole])
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


def build_version(
    config: BuildConfig,
    text: Text,
    tokenizer: Tokenizer,
    runner: Runner,
    output: OpenOutput,
    gates: Sequence[Gate] | None = None,
) -> BuildResult:
    """The other stages: slices -> the version that they give, published. *gates*: those of the configuration without it."""
    chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
    layout = layout_of(config, output.root)
    asked = output.request if isinstance(output.request, BuildConfig) else config  # with its sets as people named them
    make = partial(provenance, pinned=text.pinned, files=text.files, tokenizer=tokenizer, chats=chats, has_runs=text.has_runs)
    config, made_of = keeping(config, output.root, output.pointer.version, output.forgotten, layout, make)
    made_of = leaving_out(output.forgotten, made_of)
    remember = partial(remember_origin, output.root, config=asked, pinned=text.pinned, files=text.files)
    reuse: dict[str, Any] = dict.fromkeys(("slices", "slices_reused", "text_bytes_tokenized"), 0)
    to_judge = config.publish.gates if gates is None else gates

    with publication(output, made_of, layout, remember, to_judge, keeps_waiting=gates is None) as version:
        if target := version.target(**settings_of_target(config)):
            with assembling(runner, target, text.file_names) as (assembler, under_way):
                with timed("tokenize", output.seconds):
                    stored = tokenize(config, text, tokenizer, chats, target, runner, output, assembler, under_way)
                    counted = assembler.end()
                with timed("split", output.seconds):
                    meter.begin("split", TOKEN_BYTES * sum(part.counts.token_count for part in shard_parts(counted)))
                    assembled = assembler.finish()
            with timed("finalize", output.seconds):
                documents = partial(built_totals, made_of, shard_parts(counted))
                draft = VersionDraft(made_of, assembled, documents, card, token_bytes=tokenizer.token_bytes)
                reuse.update(finalized(config, target, draft, runner))
            reuse.update(stored.reuse(text.slices, shard_parts(counted)))
    return version.finish(BuildResult, **reuse)


def settings_of_target(config: BuildConfig) -> dict[str, Any]:
    """The settings of the version under way that follow from a configuration."""
    rule = SplitRule.of(config)
    return {
        "rule": rule,
        "splits": rule.splits,
        "facts": config.facts,
        "texts": {name: fact.numbers for name, fact in text_facts(config.documents).items()},
        "token_arrays": config.token_arrays,
        "columns": dict.fromkeys(config.kept_columns, "null") | ({CLUSTER: "uint64"} if config.documents.keeps_clusters else {}),
    }


def tokenize(
    config: BuildConfig,
    text: Text,
    tokenizer: Tokenizer,
    chats: tuple[Chat | None, ...],
    target: Target,
    runner: Runner,
    output: OpenOutput,
    assembler: Assembler,
    under_way: deque[Started],
) -> StoredSlices:
    """Slices -> token shards -> parts, which the assembler gets in the slices' order while later slices are tokenized. Return
    which of them were there.
    """
    workspace = fetching_to(config, target.workspace, files_of(text.pinned))
    warn_of_separators(config, text.files)
    recipe = make_recipe(config, tokenizer, chats, list_left_out(output.forgotten))
    recipe, stored = looked_up(config, workspace, tokenizer, text.slices, recipe)
    if stored.missing:
        warn_of_room(config, workspace, text.slices, recipe, tokenizer)
    duplicates = DuplicateFilter(target) if config.documents.duplicates == "drop" else None
    sink = open_sink(assembler, target, text, stored.keys, recipe, runner, duplicates)
    with fetched_ahead(stored.missing if runner.workers != "machines" else [], config.sources, workspace):
        shards = started_in_order(
            runner,
            under_way,
            stored.slices.values(),
            TOKENIZE.given(recipe, workspace, stored.versions, sink),  # slice -> shard, or tokens in the version
            SHARD_WRITE.given(workspace, sink),  # staged -> stored under its key, the receipt last
        )
        parts = without_duplicates(duplicates, runner, place_shards(text, stored.keys, shards), output)
        for part in with_near_duplicates(config, target, runner, parts, output):
            assembler.add(part)
    return stored


def finalized(config: BuildConfig, target: Target, draft: VersionDraft, runner: Runner) -> dict[str, int]:
    """Finalize the version. Return how many documents another split has, too, if that is to be known and its output is local: a
    store would be read once more. What an engine has learned is forgotten by a thread, which takes a while, and Python's lock.
    """
    counts, forgetting = config.may_part_equal_texts and target.store.is_local, threading.Thread(target=forget_what_was_learned)
    if not counts:
        forgetting.start()
    runner.start(target, FINALIZE.given(draft, config.verify_level)).result()
    if not counts:
        return {}
    found = equal_texts_apart(target.store, target.splits)
    forgetting.start()
    return {"equal_texts_apart": found}


class StoredSlices(NamedTuple):
    """The slices of a build: their keys in receipts; each by its key, as equal slices are tokenized once; the versions whose
    indexes are used; the keys that have receipts, and the slices that are missing.
    """

    keys: list[str]
    slices: dict[str, Slice]
    versions: VersionNames
    receipts: set[str]
    missing: list[Slice]

    @classmethod
    def look_up(cls, root: Store, recipe: Recipe, of_build: list[Slice]) -> StoredSlices:
        """Look the slices up by receipts and indexes, and begin to count progress."""
        keys, versions = list(map(recipe.key, of_build)), indexed_versions(root)
        slices = dict(zip(keys, of_build, strict=True))
        unpublished = without_tokens(root, versions, list(slices))
        missing = without_receipt(root, unpublished)
        total = sum(map(TOKENIZE.size, slices.values()))
        meter.begin("tokenize", total, stored=total - sum(TOKENIZE.size(slices[key]) for key in missing))
        return cls(keys, slices, versions, set(unpublished) - set(missing), [slices[key] for key in missing])

    def reuse(self, slices: list[Slice], parts: list[ShardPart]) -> dict[str, int]:
        """How many slices there are, how many were reused, and the bytes of text that were tokenized."""
        shards = {part.shard.key: part.shard for part in parts if part.shard.published is None}
        made = [shard for key, shard in shards.items() if key not in self.receipts]
        text_bytes = sum(shard.text_bytes - shard.text_bytes_taken for shard in made)
        return {"slices": len(slices), "slices_reused": len(parts) - len(made), "text_bytes_tokenized": text_bytes}


def open_sink(
    assembler: Assembler,
    target: Target,
    text: Text,
    keys: Sequence[str],
    recipe: Recipe,
    runner: Runner,
    duplicates: DuplicateFilter | None,
) -> Sink | None:
    """The sink of a build whose slices, of these *keys*, are tokenized on this machine."""
    here = runner.workers != "machines"
    if not here:
        return None
    numbered = reversed([*enumerate(zip(keys, text.slices, strict=True))])  # the first of equal slices counts
    order = {key: (number, slice_.split) for number, (key, slice_) in numbered}
    streams = may_stream(target.root, recipe.documents, here=here)
    return assembler.open_sink(order, streams=streams, copies=runner.workers == "threads", duplicates=duplicates)


def without_duplicates(
    duplicates: DuplicateFilter | None, runner: Runner, parts: Iterator[ShardPart], output: OpenOutput
) -> Iterator[ShardPart]:
    """The parts, without documents whose texts earlier ones have, if there is a filter."""
    if duplicates is None:
        yield from parts
        return
    text_bytes = 0
    for part in in_turn(runner, parts, DUPLICATES.given(duplicates)):
        text_bytes += part.shard.text_bytes
        yield part
    meter.begin("duplicates", text_bytes)
    output.seconds.setdefault("tokenize", 0.0)  # the stage around this one comes first
    output.seconds["duplicates"] = round(duplicates.seconds, 3)


def with_near_duplicates(
    config: BuildConfig, target: Target, runner: Runner, parts: Iterator[ShardPart], output: OpenOutput
) -> Iterator[ShardPart]:
    """The parts, with their near-duplicates, where the configuration says so: when all of them have arrived."""
    if config.documents.near_duplicates is None:
        yield from parts
        return
    near = config.documents.near_duplicates
    signed = SignedDocuments(target, signature_of(near), near, together=config.splits_clusters)
    waiting = list(in_turn(runner, parts, SIGNATURES.given(signed)))
    meter.begin("near-duplicates", sum(part.shard.text_bytes for part in waiting))
    yield from in_turn(runner, waiting, NEAR_DUPLICATES.given(signed))
    output.seconds.setdefault("tokenize", 0.0)  # the stage around this one comes first
    output.seconds["near-duplicates"] = round(signed.seconds, 3)


def tokenizer_of(config: BuildConfig, *, is_first: bool) -> Tokenizer:
    """The tokenizer of a build. The first one at an output says before its text is here where it will be a slow one."""
    tokenizer = load_tokenizer(config.tokenizer)
    if is_first:
        try_fast_engine(tokenizer, config.tokenizer.engine, processors_of(config))
    return tokenizer


def after_trial(loading: Future[Tokenizer], seconds: dict[str, float]) -> Tokenizer:
    """The tokenizer, whose trial is a stage of its own within the download of a build."""
    seconds.setdefault("download", 0.0)  # the stage around this one comes first
    before = seconds.get("trial", 0.0)
    with timed("trial", seconds):
        tokenizer = loading.result()
    seconds["download"] -= seconds["trial"] - before
    return tokenizer


def processors_of(config: BuildConfig) -> int:
    return min(config.workers or available_cores(), available_cores())


def pin_sets(config: BuildConfig, root: Store, place: Store | None = None) -> BuildConfig:
    """The configuration with its evaluation sets as they are now. They are kept at *place*; without it at the output, where
    every worker reads them.
    """
    workspace = Workspace(root, staging="", scratch=os.fspath(scratch_of(config, root)))
    return with_pinned_sets(config, workspace, root / SETS if place is None else place)


def pin_sources(config: BuildConfig, root: Store) -> tuple[PinnedSource, ...]:
    """Look every source up. ValueError where one is within the output."""
    pinned = tuple(resolve_source(source, i) for i, source in enumerate(config.sources))
    check_sources_apart(root, pinned)
    return pinned


def check_sources_apart(root: Store, pinned: tuple[PinnedSource, ...]) -> None:
    """Refuse source files within the output."""
    output = root.url
    for file in files_of(pinned):
        if file.uri.startswith(output):
            check_apart(file.uri, output, f"the source file {file.uri} is within the output {output}")


def files_of(pinned: tuple[PinnedSource, ...]) -> list[FoundFile]:
    return [file for source in pinned for file in source.files]


def check_files(config: BuildConfig, files: list[SourceFile]) -> None:
    """Refuse a source of several formats."""
    of_source: list[list[tuple[str, FileFormat, int]]] = [[] for _ in config.sources]
    for file in files:
        of_source[file.source].append((file.name, file.format, file.size))
    for source, mine in zip(config.sources, of_source, strict=True):
        check_one_format(source, mine)


def warn_of_separators(config: BuildConfig, files: list[SourceFile]) -> None:
    for warning in unused_separators(config.sources, files):
        logger.warning(warning)


def make_recipe(
    config: BuildConfig, tokenizer: Tokenizer, chats: tuple[Chat | None, ...], forgotten: str, *, is_tried: bool = True
) -> Recipe:
    """The recipe of the build's shards. *forgotten*: the digest of the list of forgotten documents, which it leaves out.
    *is_tried*: whether the fast engine gives the reference's tokens, as far as it was tried.
    """
    has_fast = tokenizer.make_fast is not None
    fast = is_tried and has_fast and not tokenizer.why_slow and config.tokenizer.engine == "auto"
    # Where the engines differ, or may, the shards of one are not those of the other.
    may_differ = config.documents.on_bad != "error" or not tokenizer.why_slow
    return Recipe(
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        fast=fast,
        documents=config.documents,
        engine="reference" if has_fast and not fast and may_differ else None,
        chats=chats if any(chats) else (),
        steps=config.documents.opened().described,
        split_by=config.split.by,
        forgotten=forgotten,
    )


def tried(recipe: Recipe, config: BuildConfig, workspace: Workspace, tokenizer: Tokenizer, slices: list[Slice]) -> Recipe:
    """The recipe with the engine that a sample of the documents of *slices* allows."""
    samples = sample_texts(config, workspace, slices)
    texts, text_bytes = [text for of in samples.values() for text in of], sum(slice_.text_bytes for slice_ in slices)
    is_right = may_use_fast_engine(tokenizer, config.tokenizer.engine, texts, text_bytes, processors_of(config))
    if is_right != recipe.fast:
        recipe = make_recipe(config, tokenizer, recipe.chats, recipe.forgotten, is_tried=is_right)
    if not recipe.chats:
        return recipe
    engine = engine_of(tokenizer, recipe.fast)
    by_reference = chats_by_reference(config.sources, recipe.chats, samples, config.tokenizer, engine)
    return recipe.model_copy(update={"by_reference": by_reference})


def looked_up(
    config: BuildConfig, workspace: Workspace, tokenizer: Tokenizer, slices: list[Slice], recipe: Recipe
) -> tuple[Recipe, StoredSlices]:
    """Which slices are stored, and the recipe for those that are not, whose engine is tried on them."""
    stored = StoredSlices.look_up(workspace.root, recipe, slices)
    if not stored.missing:
        return recipe, stored
    other = tried(recipe, config, workspace, tokenizer, stored.missing)
    return other, stored if other.engine == recipe.engine else StoredSlices.look_up(workspace.root, other, slices)


def sample_texts(config: BuildConfig, workspace: Workspace, slices: list[Slice]) -> dict[int, list[str]]:
    """Some of the first documents of every source, none of them long: the reference engine is slow."""
    texts: dict[int, list[str]] = {}
    first_of = sorted({slice_.source: slice_ for slice_ in reversed(slices)}.items())
    with ThreadPoolExecutor(FETCHERS) as fetchers:
        read = fetchers.map(lambda one: _first_documents(one[1], config, workspace), first_of)
    for (index, _), documents in zip(first_of, read, strict=True):
        left = SAMPLE_BYTES
        for text in documents.texts.slice(0, SAMPLE_DOCUMENTS) if documents else ():
            if len(text.as_buffer()) <= left:
                left -= len(text.as_buffer())
                texts.setdefault(index, []).append(text.as_py())
    return texts


def _first_documents(slice_: Slice, config: BuildConfig, workspace: Workspace) -> TextBatch | None:
    with naming(config.sources, slice_.source), lent(slice_, config.sources, workspace) as here:
        return next(read_documents(here, config.sources[slice_.source], config.documents, Tally(), SAMPLE_BYTES), None)


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


def built_totals(made_of: Provenance, parts: list[ShardPart], repeated: int) -> dict[str, Any]:
    """Totals of the documents of a build."""
    totals = {**document_totals(parts, repeated), **match_totals(made_of, parts)}
    return {**totals, "by_source": source_totals(made_of, parts)}
