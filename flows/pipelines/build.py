"""The order of a build, whoever runs its tasks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flat_tokens.arrays.layouts import LayoutName
from flat_tokens.checker import verify
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.retry import brief
from flat_tokens.stores.store import Store
from tasks.config import BuildConfig
from tasks.download.cut import FETCHERS, CutFile, at_hand, cut_file, fetched_ahead, recorded
from tasks.download.sources import CHECK_ACCESS, naming, resolve_source
from tasks.finalize.provenance import Provenance, build_id, provenance
from tasks.finalize.seal import is_published, write_version
from tasks.locations import local_path
from tasks.models import FoundFile, Model, PinnedSource, Slice, SourceFile, TokenShard
from tasks.output.leases import building
from tasks.output.paths import CACHE
from tasks.output.pointer import publish, read_pointer
from tasks.output.staging import Place, attempt
from tasks.output.versions import remember_origin
from tasks.progress import meter
from tasks.shards.receipts import without_receipt
from tasks.shards.recipe import Recipe
from tasks.shards.write import make_shard
from tasks.split.rule import SplitRule
from tasks.split.spans import Counts, ShardPlace, Span, count_documents, lay_out
from tasks.split.write import Written, write_span
from tasks.text.documents import Tally, read_documents
from tasks.tokenize.engines import Tokenizer, may_use_fast_engine
from tasks.tokenize.tokenizers import load_tokenizer

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 100_000
FIRST_CONTACT_SECONDS = 10.0
"""A store that does not answer for so long before any work was done is rather a wrong address than a busy store."""


class Started(Protocol):
    """A task under way."""

    def result(self) -> Any:
        """Wait for it; what it returned, or the error that it raised."""
        ...


@runtime_checkable
class Cancellable(Protocol):
    """A task that can be given up while it has not begun."""

    def cancel(self) -> bool:
        """Whether it was given up."""
        ...


class Runner(Protocol):
    """Runs functions: on threads of this process, or as tasks that an orchestrator shows. ``window``: how many it should be
    given at a time, enough to keep every worker busy, few enough that an error stops the rest. ``tokenizes_here``: this
    process reads the text.
    """

    window: int
    tokenizes_here: bool

    def start(self, function: Callable[..., Any], item: Any, *shared: Any) -> Started:
        """Begin ``function(item, *shared)``."""
        ...


class BuildResult(Model):
    """What a build came to. ``seconds``: of each stage. ``slices_reused``: taken from earlier builds, not tokenized."""

    path: str
    version: str
    sequence: int
    was_published: bool
    layout: LayoutName
    totals: dict[str, Any]
    byte_count: int
    slices: int
    slices_reused: int
    seconds: dict[str, float]


def build(config: BuildConfig, runner: Runner) -> BuildResult:
    """Build a dataset version, publish it, and let ``latest`` point at it. A version that is there already is left as it is."""
    meter.reset()
    seconds: dict[str, float] = {}
    root = check_output(config)
    since = read_pointer(root).sequence
    with building(root, scratch_of(config)):
        with stage("download", seconds), ThreadPoolExecutor(1) as beside:
            loading = beside.submit(load_tokenizer, config.tokenizer)
            pinned = pin_sources(config, root)
            text = Text(pinned, cut_files(config, files_of(pinned), runner))
            tokenizer = loading.result()
        return build_version(config, text, tokenizer, runner, since, seconds)


class Text(NamedTuple):
    """What the sources hold: where they are pinned, and their files in that order, each with its slices."""

    pinned: tuple[PinnedSource, ...]
    cuts: list[CutFile]

    @property
    def files(self) -> list[SourceFile]:
        return [cut.file for cut in self.cuts]


def pin_sources(config: BuildConfig, root: Store) -> tuple[PinnedSource, ...]:
    """Look every source up."""
    pinned = tuple(resolve_source(source, i) for i, source in enumerate(config.sources))
    check_apart(root, pinned)
    return pinned


def files_of(pinned: tuple[PinnedSource, ...]) -> list[FoundFile]:
    return [file for source in pinned for file in source.files]


def cut_files(config: BuildConfig, found: list[FoundFile], runner: Runner, *known_at: Store) -> list[CutFile]:
    """Cut files into slices. What is recorded of a file, at the output or at others, holds as long as its store calls it the
    same: it is fetched when a slice of it has to be tokenized, if that happens at all. The others are fetched now.
    """
    meter.begin("download", sum(file.size or 0 for file in found))
    place = Place(output=config.output, staging="", scratch=os.fspath(scratch_of(config)))
    known = recorded(found, config.sources, config.slice_bytes, [place.root, *known_at])
    meter.add("download", sum(file.size or 0 for file in known))
    fresh = [file for file in found if file not in known]
    cut = dict(zip(fresh, in_order(runner, cut_file, fresh, config.sources, config.slice_bytes, place), strict=True))
    cuts = [known.get(file) or cut[file] for file in found]
    check_one_format(config, [one.file for one in cuts])
    return cuts


def build_version(
    config: BuildConfig, text: Text, tokenizer: Tokenizer, runner: Runner, since: int, seconds: dict[str, float]
) -> BuildResult:
    """The version that a text gives, published. *since*: the pointer's sequence number when it was looked up. To be called
    while ``building``.
    """
    root, layout, files = Store.at(config.output), layout_of(config), text.files
    made_of = provenance(config, text.pinned, files, tokenizer)
    version = build_id(made_of, layout)

    if is_published(root, version, layout):
        with stage("finalize", seconds):
            remember_origin(root, version, config, text.pinned, files)
            verify(root.path(f"versions/{version}") if root.is_local else f"{root.url}/versions/{version}")
            return finish(config, root, version, layout, publish(root, version, since), seconds)

    with attempt(config.output, scratch_of(config), version) as place:
        with stage("tokenize", seconds), contextlib.ExitStack() as ahead:
            slices = [part for cut in text.cuts for part in cut.slices]
            recipe = make_recipe(config, place, tokenizer, slices)
            distinct = {recipe.key(part): part for part in slices}
            missing = [distinct[key] for key in without_receipt(root, distinct)]
            meter.begin("tokenize", sum(part.text_bytes for part in distinct.values()))
            ahead.enter_context(fetched_ahead(missing if runner.tokenizes_here else [], config.sources, place))
            shards = in_order(runner, make_shard, list(distinct.values()), recipe)
            rule = SplitRule(fraction=config.fraction, seed=config.split_seed)
            places: list[ShardPlace] = []
            counted = count_in_order(place_shards(files, slices, recipe, shards), places, rule, place.root)
            # Lazily, from the last line to the first: an object is written as soon as the shards that it takes from are there.
            spans: list[Span] = []
            writing: list[Started] = []
            with settled(writing):
                for span in lay_out(counted, layout):
                    spans.append(span)
                    writing.append(runner.start(write_span, span, rule, layout, place, version))

        with stage("split", seconds), settled(writing):
            meter.begin("split", 4 * sum(at.shard.token_count for at in places))
            written: list[Written] = [task.result() for task in writing]

        with stage("finalize", seconds):
            runner.start(finalize, made_of, layout, spans, written, places, place, version, config.verify_level).result()
            remember_origin(root, version, config, text.pinned, files)
            sequence = publish(root, version, since)

    return finish(config, root, version, layout, sequence, seconds, len(slices), len(slices) - len(missing))


def finalize(
    made_of: Provenance,
    layout: LayoutName,
    spans: list[Span],
    written: list[Written],
    places: list[ShardPlace],
    place: Place,
    version: str,
    verify_level: str,
) -> str:
    """Write what is not tokens, check, commit; the version's name."""
    write_version(made_of, layout, spans, written, places, place, version, verify_level)
    return version


def make_recipe(config: BuildConfig, place: Place, tokenizer: Tokenizer, slices: list[Slice]) -> Recipe:
    """The recipe of the build's shards, with the engine that a sample of its own documents allows."""
    fast = may_use_fast_engine(tokenizer, config.tokenizer.engine, sample_texts(config, place, slices))
    may_differ = tokenizer.make_fast is not None and not fast and config.documents.on_bad != "error"
    return Recipe(
        place=place,
        sources=config.sources,
        tokenizer=config.tokenizer,
        tokenizer_digest=tokenizer.digest,
        fast=fast,
        documents=config.documents,
        engine="reference" if may_differ else None,
    )


def sample_texts(config: BuildConfig, place: Place, slices: list[Slice]) -> list[str]:
    """Some of the first documents of every source, none of them long: the reference engine is slow."""
    texts: list[str] = []
    first_of = sorted({part.file.source: part for part in reversed(slices)}.items())
    with ThreadPoolExecutor(FETCHERS) as fetchers:
        here = fetchers.map(lambda one: at_hand(one[1], config.sources, place), first_of)
    for (index, _), part in zip(first_of, here, strict=True):
        with naming(config.sources, index):
            documents = next(read_documents(part, config.sources[index], config.documents, Tally()), None)
        left = SAMPLE_BYTES
        for text in documents.texts.slice(0, SAMPLE_DOCUMENTS) if documents else ():
            if len(text.as_buffer()) <= left:
                left -= len(text.as_buffer())
                texts.append(text.as_py())
    return texts


def place_shards(
    files: list[SourceFile], slices: list[Slice], recipe: Recipe, shards: Iterator[TokenShard]
) -> Iterator[ShardPlace]:
    """Each slice's shard, in order, with its file's number and the row of the file at which it begins. *shards* has each
    distinct shard once, where it is first needed: equal files share theirs.
    """
    numbers = {(file.source, file.name): i for i, file in enumerate(files)}
    known: dict[str, TokenShard] = {}
    rows: Counter[int] = Counter()
    for part in slices:
        number, key = numbers[part.file.source, part.file.name], recipe.key(part)
        shard = known.get(key) or known.setdefault(key, next(shards))
        yield ShardPlace(shard=shard, file=number, first_row=rows[number], all_in=part.file.split)
        rows[number] += shard.rows


def count_in_order(
    places: Iterable[ShardPlace], seen: list[ShardPlace], rule: SplitRule, root: Store
) -> Iterator[tuple[ShardPlace, Counts]]:
    """Places as they come, with their counts; *seen* keeps them all."""
    for at in places:
        seen.append(at)
        yield at, count_documents(at, rule, root)


def in_order(runner: Runner, function: Callable[..., Any], items: Iterable[Any], *shared: Any) -> Iterator[Any]:
    """Run *function* for every item, a window at a time; results in the items' order. The first error is raised."""
    under_way: deque[Started] = deque()
    with settled(under_way):
        for item in items:
            under_way.append(runner.start(function, item, *shared))
            if len(under_way) >= runner.window:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


@contextlib.contextmanager
def settled(tasks: Collection[Started]) -> Iterator[None]:
    """After an error, wait for what is still under way: it writes to a staging directory that is about to go."""
    try:
        yield
    except BaseException:
        # All are asked before any is waited for: a thread that ends one would begin the next meanwhile.
        for task in [task for task in tasks if not (isinstance(task, Cancellable) and task.cancel())]:
            with contextlib.suppress(Exception):  # the first error is the one that is raised
                task.result()
        raise


def layout_of(config: BuildConfig) -> LayoutName:
    if config.layout == "auto":
        return "mmap" if Store.at(config.output).is_local else "compact"
    return config.layout


class Destination(Protocol):
    """What orders that write to an output are told of it."""

    @property
    def output(self) -> str: ...

    @property
    def scratch(self) -> str | None: ...


def scratch_of(config: Destination) -> Path:
    """The local directory for downloads, and for staging where the output is remote."""
    if config.scratch is not None:
        return Path(local_path(config.scratch) or config.scratch)
    root = Store.at(config.output)
    if root.is_local:
        return Path(root.root) / CACHE
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flat-tokens"


def check_output(config: Destination) -> Store:
    """The output's root. ValueError, before any work, where nothing can be written there, or to the scratch directory."""
    root = Store.at(config.output)
    if root.is_local:
        _check_directory(Path(root.root), f"output {config.output}")
    else:
        probe, store = f".probe-{uuid.uuid4().hex}", replace(root, patience=FIRST_CONTACT_SECONDS)
        try:
            store.put(probe, b"")
            store.remove(probe)
        except Exception as error:
            # Every store has errors of its own, and few of them are an OSError.
            raise ValueError(f"cannot write to output {config.output} ({brief(error)}). {CHECK_ACCESS}") from error
    if config.scratch is not None:
        _check_directory(scratch_of(config), f"scratch {config.scratch}")
    return root


def _check_directory(directory: Path, what: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {what}: {error.strerror}. Choose another {what.split()[0]}.") from error


def check_apart(root: Store, pinned: tuple[PinnedSource, ...]) -> None:
    """Refuse an output among the inputs: the next build would read what this one wrote."""
    within = root.url.rstrip("/") + "/"
    for source in pinned:
        for file in source.files:
            if file.uri.startswith(within):
                raise ValueError(f"the source file {file.uri} lies within the output {root.url}. Keep them apart.")


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


@contextlib.contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time a stage and show that it has begun."""
    meter.begin(name)
    begun = time.monotonic()
    yield
    seconds[name] = round(seconds.get(name, 0) + time.monotonic() - begun, 3)


def finish(
    config: BuildConfig,
    root: Store,
    version: str,
    layout: LayoutName,
    sequence: int,
    seconds: dict[str, float],
    slices: int = 0,
    reused: int | None = None,
) -> BuildResult:
    """The result, and a record of the run beside the versions: when, where, how long."""
    manifest = read_manifest(root / "versions" / version)
    result = BuildResult(
        path=f"{root.url}/versions/{version}",
        version=version,
        sequence=sequence,
        was_published=reused is None,
        layout=layout,
        totals=manifest["totals"],
        byte_count=sum(stored["size"] for stored in manifest["objects"]),
        slices=slices,
        slices_reused=reused or 0,
        seconds=seconds,
    )
    record_run(root, version, config.model_dump(mode="json"), result)
    return result


def record_run(root: Store, version: str, config: dict[str, Any], result: Model) -> None:
    """Keep what a run was told and what it came to, beside the versions."""
    now = datetime.now(UTC)
    record = {"at": now.isoformat(), "host": platform.node(), "config": config, **result.model_dump()}
    root.put(f"runs/{now:%Y%m%dT%H%M%S%f}-{version}.json", (json.dumps(record, indent=2) + "\n").encode())
    meter.begin("done")
