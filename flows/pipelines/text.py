"""The text of a build: its sources pinned, their files found, and cut where they are read - stage download."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.stores.store import Store
from flat_tokens.text.formats import FileFormat
from flows.pipelines.publish import OpenOutput, timed
from flows.pipelines.stages import DOWNLOAD, Runner, items_under_way, started_in_order
from tasks.config import BuildConfig
from tasks.download.cut import fetching_to
from tasks.download.directories import check_one_format, table_in
from tasks.download.evaluation import with_pinned_sets
from tasks.download.slices import slices_of
from tasks.download.small import packs_of
from tasks.download.sources import resolve_source
from tasks.download.table import CutFile, known_files, remember_files
from tasks.finalize.provenance import Provenance, VersionName, name_of, provenance, with_kept_version
from tasks.models import FoundFile, PinnedSource, Slice, SourceFile
from tasks.output.paths import SETS
from tasks.output.places import check_apart, layout_of, reading_at
from tasks.output.versions import read_origin_files
from tasks.progress import meter
from tasks.text.files import unused_separators
from tasks.tokenize.chat import Chat, chats_of
from tasks.tokenize.engines import Tokenizer, import_ahead, try_fast_engine
from tasks.tokenize.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

LOOKED_INTO = 256_000_000
"""Bytes of files whose content is looked up, half a second, before it is known whether a build has anything to do."""
REMEMBERED_SECONDS = 30.0
"""Records of files are written this often while they are read."""


class Made(NamedTuple):
    """The version that a text makes: the configuration with the version whose splits it keeps, the text, the tokenizer, how
    conversations become tokens, its provenance, and its name.
    """

    config: BuildConfig
    text: Text
    tokenizer: Tokenizer
    chats: tuple[Chat | None, ...]
    of: Provenance
    named: VersionName


@dataclass(frozen=True)
class Text:
    """The text of a version: where its sources are pinned, their files, where these are cut, and their slices, all in order.
    Nothing is cut if a file was not read because its store's name for the content was known.
    """

    pinned: tuple[PinnedSource, ...]
    files: list[SourceFile]
    cuts: Sequence[CutFile] = ()
    slice_bytes: int = 0

    @classmethod
    def read(cls, config: BuildConfig, pinned: tuple[PinnedSource, ...], runner: Runner, root: Store, *others: Store) -> Text:
        """The text of all files, as far as the output or one of the *others* does not know them already."""
        found = files_of(pinned)
        known = known_files(found, config.sources, config.slice_bytes, (root, *others))
        cuts = download(config, found, known, runner, root)
        return cls(pinned, [cut.file for cut in cuts], cuts, config.slice_bytes)

    @cached_property
    def slices(self) -> list[Slice]:
        return list(slices_of(self.cuts, self.slice_bytes))  # which takes a while, and a build that has nothing to do needs none

    @property
    def file_names(self) -> list[str]:
        """Names of the files, by their numbers; those of a table with its version."""
        of = [f" of {pin.origin}, version {pin.revision}" if pin.origin.endswith(" table)") else "" for pin in self.pinned]
        return [file.name + of[file.source] for file in self.files]

    def makes(self, config: BuildConfig, tokenizer: Tokenizer, output: OpenOutput) -> Made:
        chats = chats_of(config.sources, config.tokenizer, tokenizer.revision)
        make = partial(provenance, pinned=self.pinned, files=self.files, tokenizer=tokenizer, chats=chats)
        layout = layout_of(config, output.root)
        config, made_of = with_kept_version(config, output.root, output.pointer.version, output.forgotten, layout, make)
        return Made(config, self, tokenizer, chats, made_of, name_of(output.root, output.forgotten, made_of, layout))


def tokenizer_of(config: BuildConfig, *, is_first: bool) -> Tokenizer:
    """The tokenizer of a build. The first one at an output says before its text is here where it will be a slow one."""
    tokenizer = load_tokenizer(config.tokenizer)
    if is_first:
        try_fast_engine(tokenizer, config.tokenizer.engine, config.processors)
    return tokenizer


def after_trial(loading: Future[Tokenizer], seconds: dict[str, float]) -> Tokenizer:
    """The tokenizer, whose trial is a stage of its own within the download of a build."""
    before = seconds.get("trial", 0.0)
    with timed("trial", seconds):
        tokenizer = loading.result()
    seconds["download"] -= seconds["trial"] - before
    return tokenizer


def look_up(config: BuildConfig, runner: Runner, output: OpenOutput, *, reads_much: bool = True) -> Made | None:
    """Look the sources up, read the files whose content neither the output nor their store knows, and return the text that they
    make, with a tokenizer that a thread loads. None if there is much to read, or no version yet, unless *reads_much*.
    """
    root, latest, beside = output.root, output.pointer.version, ThreadPoolExecutor(1)
    with timed("download", output.seconds):
        loading = beside.submit(tokenizer_of, config, is_first=latest is None)
        config, pinned = pin_sources(pin_sets(config, root), root)
        found = files_of(pinned)
        known = known_files(found, config.sources, config.slice_bytes, [root])
        # Files whose content is known from the latest version's origin: their store names it as it did then.
        origin = read_origin_files(root, latest) if latest and any(file.immutable for file in unknown(found, known)) else None
        pairs = zip(origin.found, origin.files, strict=False) if origin else ()
        uncut = {here: file for here, file in pairs if here.immutable}
        needed = [number for number, cut in enumerate(known) if cut or found[number] not in uncut]
        fresh, cuts = [found[number] for number in needed], [known[number] for number in needed]
        much = is_much(unknown(fresh, cuts))
        if latest is None or much:
            if not reads_much:
                loading.exception()
                return None
            beside.submit(import_ahead, loading)
        beside.shutdown(wait=False)
        if much:
            after_trial(loading, output.seconds)  # a wrong tokenizer is an error before so much is fetched
        cut = dict(zip(needed, download(config, fresh, cuts, runner, root), strict=True))
        files = [cut[number].file if number in cut else uncut[file] for number, file in enumerate(found)]
        text = Text(pinned, files, [*cut.values()] if len(cut) == len(found) else (), config.slice_bytes)
        return text.makes(config, after_trial(loading, output.seconds), output)


def unknown(found: Sequence[FoundFile], known: Sequence[CutFile | None]) -> list[FoundFile]:
    """The files that have to be read to know their contents."""
    return [file for file, cut in zip(found, known, strict=True) if cut is None]


def is_much(files: list[FoundFile]) -> bool:
    """Whether it takes a while to fetch files, or to read them."""
    return any("://" in file.uri for file in files) or sum(file.size or 0 for file in files) > LOOKED_INTO


def download(
    config: BuildConfig, found: list[FoundFile], known: Sequence[CutFile | None], runner: Runner, root: Store
) -> list[CutFile]:
    """Stage download: files -> ranges. A file that is *known* at an output is cut without being read. It is fetched if a slice
    of it has to be tokenized.
    """
    begun = time.time_ns()
    meter.begin("download", sum(file.size or 0 for file in found))
    known_bytes = sum(file.size or 0 for file, cut in zip(found, known, strict=True) if cut)
    meter.add("download", known_bytes, stored=known_bytes)
    cuts = list(known)
    if fresh := unknown(found, known):
        left = (number for number, cut in enumerate(known) if cut is None)
        with (
            fetching_to(config, reading_at(config, root), found) as workspace,
            items_under_way() as under_way,
            remembering(config, root, cuts, begun) as remember,
        ):
            step = DOWNLOAD.given(config.sources, config.slice_bytes, workspace)  # files -> digests, where they are cut
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


def pin_sets(config: BuildConfig, root: Store, place: Store | None = None) -> BuildConfig:
    """The configuration with its evaluation sets as they are now. They are kept at *place*; without it at the output, where
    every worker reads them.
    """
    return with_pinned_sets(config, reading_at(config, root), root / SETS if place is None else place)


def pin_sources(config: BuildConfig, root: Store) -> tuple[BuildConfig, tuple[PinnedSource, ...]]:
    """Look every source up. Also return the configuration with the versions of its tables, for errors. ValueError if a source
    is within the output.
    """
    tables = cache(table_in)  # sources share directories
    pinned = tuple(resolve_source(source, i, tables) for i, source in enumerate(config.sources))
    check_sources_apart(root, pinned)
    return at_revisions(config, [pin.revision for pin in pinned]), pinned


def at_revisions(config: BuildConfig, revisions: Iterable[str | None]) -> BuildConfig:
    """The configuration with these revisions of its tables and hub datasets, in the sources' order. None: as it is."""
    sources = []
    for source, revision in zip(config.sources, revisions, strict=False):
        changed: JsonObject = {}
        if revision is not None and source.table is not None:
            changed = {"version": revision}
        elif revision is not None and source.hub is not None:
            changed = {"hub": source.hub.model_copy(update={"revision": revision})}
        sources.append(source.model_copy(update=changed))
    return config.model_copy(update={"sources": tuple(sources)})


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
