"""The stages: what each is called, the function that does its work for one item, and how its items are handed out.

Every runner runs any row of this table, and none knows a stage by name. To add a stage, write its function in ``tasks``,
its row here, and its line in a pipeline.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pkgutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

from flat_tokens.manifest import TOKEN_BYTES
from flat_tokens.tools.terminal import plural
from tasks.download.outlines import bytes_to_cut
from tasks.parts.part import Part, ShardPart
from tasks.progress import Done, meter

if TYPE_CHECKING:
    from tasks.assemble.assembler import AssembledArrays, Assembler, CountedPart
    from tasks.assemble.write import Span
    from tasks.config import BuildConfig
    from tasks.output.target import Target
    from tasks.shards.recipe import Recipe

SPANS_IN_A_GROUP = 8
"""Each is a quarter of a gigabyte of tokens."""
SHOWN_STEPS = 4
"""In the name of a task; the summary has all."""
ITEMS_OF_A_WORKER = 4
"""Results are taken in order: after an item that takes long, workers would soon have done all that was handed out."""


class Pool(NamedTuple):
    """How the items of a stage go to the workers of a pool: in groups, each a run of *deployment*.

    ``group`` and ``threshold`` depend on the configuration: a group is of items that weigh ``group`` together, and items stay
    in the build's own process until they weigh ``threshold``, or until those of the stage ``with_stage`` have gone to the pool.
    """

    deployment: str
    group: Callable[[BuildConfig], int]
    threshold: Callable[[BuildConfig], float]
    weight: Callable[[Any], int] = lambda _: 1
    with_stage: str | None = None
    around: Callable[..., contextlib.AbstractContextManager[object]] = lambda items, *shared: contextlib.nullcontext()
    """Context in which a worker does the *items* of a group, such as fetching files ahead."""
    stored: Callable[..., Iterable[str]] = lambda result, *shared: ()
    """Names below the output of the objects that a result reports: without them the result is worth nothing."""
    done: Callable[[Any, Any], Done] = lambda item, result: Done()
    """Progress that an item and its result stand for, where another person made it."""

    @property
    def path(self) -> str:
        """The deployment, as Prefect's API wants it named."""
        return f"{self.deployment}/{self.deployment}"


class Stage(NamedTuple):
    """A row of the table: ``function(item, *shared)`` does the work for one item."""

    name: str
    function: Callable[..., Any]
    label: Callable[[Any], str] = attrgetter("label")
    """The item, as people see it in the name of a task."""
    label_suffix: Callable[..., str] = lambda *shared: ""
    """Suffix of the task's name, from what its items share, such as `` (length, pattern)``."""
    retries: bool = True
    """Prefect runs the task again when the network or a store failed, never when the input is bad."""
    cache_key: Callable[..., str] | None = None
    """The key of the receipt that Prefect's cache finds for ``(item, *shared)``."""
    size: Callable[[Any], int] = lambda _: 0
    """Bytes that an item counts in the stage's progress."""
    pack_bytes: int = 0
    """Items share a Prefect task until they come to this many bytes: a task costs the server 30 to 50 ms of a core."""
    pool: Pool | None = None
    is_here: Callable[..., bool] = lambda item, *shared: False
    """Whether an item is under way in this process already: no other one is asked."""

    def given(self, *shared: Any) -> Step:
        """The stage with what all its items share."""
        return Step(self, shared)


class Step(NamedTuple):
    """A stage with what all its items share."""

    stage: Stage
    shared: tuple[Any, ...]


Work = Callable[[Step, Any], Any]
"""Does the work of a step for an item."""


def run_step(step: Step, item: Any) -> Any:
    """Do the work of a step for an item, in this thread."""
    return step.stage.function(item, *step.shared)


def run_steps(item: Any, steps: Sequence[Step], work: Work = run_step) -> Any:
    """Take an item through several steps, one after another. *work* does that of each."""
    return functools.reduce(lambda so_far, step: work(step, so_far), steps, item)


def lazy(path: str) -> Callable[..., Any]:
    """A function by its path, imported when it is first called: a process imports only the stages that it runs."""

    def function(*arguments: Any) -> Any:
        return pkgutil.resolve_name(path)(*arguments)

    function.__qualname__ = path
    return function


def steps_of(recipe: Recipe, *_: Any) -> str:
    """The steps that documents take before they are tokenized, by name: such as `` (length, pattern)``."""
    names = [str(step["name"]) for step in recipe.steps]
    more = [f"{len(names) - SHOWN_STEPS} more"] if len(names) > SHOWN_STEPS else []
    return f" ({', '.join(names[:SHOWN_STEPS] + more)})" if names else ""


def _token_bytes(span: Span) -> int:
    return TOKEN_BYTES * (span.stop - span.start) if span.of_tokens else 0


DOWNLOAD = Stage(
    "download",
    lazy("tasks.download.cut:cut_files"),
    label=lambda pack: pack[0].name if len(pack) == 1 else f"{pack[0].name} and {plural(len(pack) - 1, 'more file')}",
    retries=False,  # the fetching itself asks busy servers again
    size=lambda pack: sum(found.size or 0 for found in pack),
    pool=Pool(
        "fetch-group",
        group=lambda config: config.groups.fetch_bytes,
        threshold=lambda config: 2 * config.groups.fetch_bytes,
        weight=lambda pack: sum(map(bytes_to_cut, pack)),
        done=lambda pack, _: Done(sum(found.size or 0 for found in pack)),
    ),
)
"""Some source files -> their digests, and where they are cut."""

TOKENIZE = Stage(
    "tokenize",
    lazy("tasks.shards.write:tokenize_or_load"),
    label_suffix=steps_of,
    cache_key=lambda slice_, recipe, *_: recipe.key(slice_),
    size=attrgetter("text_bytes"),
    pack_bytes=8_000_000,
    pool=Pool(
        "tokenize-group",
        group=lambda config: config.groups.slices,
        threshold=lambda config: config.groups.threshold,
        around=lazy("tasks.shards.write:fetching_ahead"),
        stored=lambda shard, *_: [lazy("tasks.shards.index:location_key")(shard)],
        done=lambda slice_, shard: Done(slice_.text_bytes, shard.read, shard.token_count),
    ),
)
"""Slice -> token shard, in the staging of the process that tokenizes it; or the stored one, where there is one."""

SHARD_WRITE = Stage("shard-write", lazy("tasks.shards.write:store_shard"))
"""Staged token shard -> stored under its key, the receipt last. It happens where the shard was tokenized."""

DUPLICATES = Stage(
    "duplicates",
    lazy("tasks.assemble.duplicates:drop_duplicates"),
    retries=False,  # a text that was met would be taken for its own copy
    size=attrgetter("shard.text_bytes"),
)
"""Part -> the same, without documents whose texts earlier ones have. Its items go one at a time, and at once: slices after a part
may wait for it.
"""


SIGNATURES = Stage(
    "signatures",
    lazy("tasks.assemble.duplicates:gather_signatures"),
    retries=False,  # they would be there twice
    size=attrgetter("shard.text_bytes"),
    pack_bytes=256_000_000,
)
"""Part -> the same, when the signatures of its documents have been taken. Its items go one at a time."""

NEAR_DUPLICATES = Stage(
    "near-duplicates",
    lazy("tasks.assemble.duplicates:mark_near_duplicates"),
    retries=False,  # the parts are counted
    size=attrgetter("shard.text_bytes"),
    pack_bytes=256_000_000,
)
"""Part -> the same, with its near-duplicates. Its items go one at a time, after those of all parts before."""


SPLIT = Stage(
    "split",
    lazy("tasks.assemble.write:write_span"),
    size=_token_bytes,
    is_here=lambda span, _, assembler: assembler is not None and assembler.has_begun(span),
    pool=Pool(
        "write-group",
        group=lambda _: SPANS_IN_A_GROUP,
        threshold=lambda _: math.inf,
        with_stage="tokenize",
        stored=lazy("tasks.assemble.write:names_below_output"),
        done=lambda span, _: Done(_token_bytes(span)),
    ),
)
"""Span of the train or the validation arrays -> its stored objects."""

FINALIZE = Stage("finalize", lazy("tasks.finalize.seal:finalize"), attrgetter("name"), retries=False)
"""Target -> metadata, manifest, card, check, commit."""

EXAMINE = Stage("examine", lazy("tasks.derive.inputs:examine"), str)
MAKE_KEYS = Stage("make-keys", lazy("tasks.derive.inputs:make_keys"))
SAMPLE = Stage("sample", lazy("tasks.derive.choice:count_hashes"))
COUNT = Stage("count", lazy("tasks.derive.choice:count_taken"))
SHUFFLE = Stage("shuffle", lazy("tasks.derive.shuffle:scatter"))

DIGEST = Stage("digest", lazy("tasks.derive.imports:digest_file"), str)
IMPORT = Stage("import", lazy("tasks.derive.imports:import_part"))

EXPORT = Stage("export", lazy("flat_tokens.tools.export:write_file"), attrgetter("key"))
FINISH_EXPORT = Stage("finish", lazy("flat_tokens.tools.export:finish"), attrgetter("location"))

OF_A_BUILD = {stage.name: stage for stage in (DOWNLOAD, TOKENIZE, SHARD_WRITE, SPLIT, FINALIZE)}
"""The stages that groups are of, by name."""


class ItemUnderWay(Protocol):
    """An item under way."""

    def result(self) -> Any:
        """Wait for its result, or raise its error."""
        ...

    def done(self) -> bool:
        """Whether its result is there, as far as this process knows."""
        ...

    def cancel(self) -> bool:
        """Give it up. False if its work has begun, and has to be waited for."""
        ...


class Runner(Protocol):
    """Takes items through stages, here or elsewhere. ``workers``: what works on slices and spans: threads of this process,
    processes of this machine, or other machines.
    """

    @property
    def workers(self) -> Literal["threads", "processes", "machines"]: ...

    def window(self, stage: Stage) -> int:
        """Items that are handed out at a time: enough for every worker, few enough that an error stops the rest."""
        ...

    def start(self, item: Any, *steps: Step) -> ItemUnderWay:
        """Begin to take an item through steps, in order on the same worker."""
        ...

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        """Take items through a step in this thread, in order."""
        ...


class ThreadRunner:
    """Takes items through stages on *threads* of this process, which is enough for this number of *workers*."""

    def __init__(self, workers: int, threads: int) -> None:
        self._workers, self._pool = workers, ThreadPoolExecutor(threads, "task")
        self._work: Work = run_step

    @property
    def workers(self) -> Literal["threads", "processes"]:
        return "threads" if self._work is run_step else "processes"

    def window(self, stage: Stage) -> int:
        return ITEMS_OF_A_WORKER * self._workers

    def start(self, item: Any, *steps: Step) -> Future[Any]:
        return self._pool.submit(run_steps, item, steps, self._work)

    def here(self, items: Sequence[Any], step: Step) -> list[Any]:
        return [run_step(step, item) for item in items]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def in_order(runner: Runner, items: Iterable[Any], *steps: Step) -> Iterator[Any]:
    """Take every item through the steps, a window at a time. Yield results in the items' order. Raise the first error, when the
    items that are under way have ended.
    """
    with items_under_way() as under_way:
        yield from started_in_order(runner, under_way, items, *steps)


def started_in_order(runner: Runner, under_way: deque[ItemUnderWay], items: Iterable[Any], *steps: Step) -> Iterator[Any]:
    """Take every item through the steps, a window at a time, and yield results in the items' order. The caller waits for the
    items *under_way* itself, in a block of ``items_under_way``.
    """
    window = runner.window(steps[0].stage)
    for item in items:
        # To start an item may mean to wait for another, and that one for the results of earlier ones to be used.
        while under_way and under_way[0].done():
            yield under_way.popleft().result()
        under_way.append(runner.start(item, *steps))
        if len(under_way) >= window:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def run_one_by_one(runner: Runner, items: Iterable[Any], step: Step) -> Generator[Any, None, None]:
    """Take items through a step in which what becomes of one depends on those before it: in this thread, some at a time."""
    stage, pack = step.stage, list[Any]()
    for item in items:
        pack.append(item)
        if sum(map(stage.size, pack)) >= stage.pack_bytes:
            yield from runner.here(pack, step)
            pack = []
    if pack:
        yield from runner.here(pack, step)


@contextlib.contextmanager
def items_under_way() -> Iterator[deque[ItemUnderWay]]:
    """A block with items under way. After an error, wait for those that are left: they write to a staging directory that is about
    to be removed.
    """
    items: deque[ItemUnderWay] = deque()
    try:
        yield items
    except BaseException:
        # All are given up before any is waited for: a thread that ends one would begin the next meanwhile.
        for item in [item for item in items if not item.cancel()]:
            with contextlib.suppress(Exception):  # the first error is the one that is raised
                item.result()
        raise


@contextlib.contextmanager
def assembling(runner: Runner, target: Target, files: Sequence[str] = ()) -> Iterator[tuple[Assembler, deque[ItemUnderWay]]]:
    """A block with the assembler of a version, which hands its spans to the runner, and with the items that are under way to
    become parts. *files*: names of the sources' files, for errors.
    """
    from tasks.assemble.assembler import Assembler  # what has nothing to do does without

    # Items under way are waited for last: the assembler first ends the streams that they may wait for.
    with items_under_way() as under_way, Assembler(target, files) as assembler:
        step = SPLIT.given(target, assembler)  # parts -> final objects
        assembler.write_with(lambda span: runner.start(span, step))
        yield assembler, under_way


def assembled(runner: Runner, target: Target, parts: Sequence[Part]) -> AssembledArrays:
    """Assemble a version from *parts* that have their positions."""
    meter.begin("split", TOKEN_BYTES * sum(part.token_count for part in parts))
    with assembling(runner, target) as (assembler, _):
        for part in parts:
            assembler.add(part)
        assembler.end()
        return assembler.finish()


def shard_parts(parts: Iterable[CountedPart]) -> list[ShardPart]:
    """The parts that are token shards."""
    return [part for part, _ in parts if isinstance(part, ShardPart)]
