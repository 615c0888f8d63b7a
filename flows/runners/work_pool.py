"""A runner that spreads a build over the workers of a pool: groups of files, slices and spans are runs of their own, taken by
any worker of any machine. Results are read from the store; Prefect is asked who works on a group, never for its results.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling, Crashed

from flat_tokens.stores.retry import Tries, retry
from flat_tokens.stores.store import Store
from flows.pipelines.stages import OF_A_BUILD, ItemUnderWay, Pool, Stage, Step
from flows.runners.elsewhere import group_of, result_from_json
from flows.runners.prefect_tasks import PrefectTasks
from flows.watch.outages import outages
from flows.watch.progress import flow_run
from flows.watch.words import tags_of
from tasks.config import BuildConfig
from tasks.groups import READERS, Group, Report, are_there, forget, put_group, read_report
from tasks.progress import Done, meter

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_WORKER = "prefect worker start --pool flat-tokens-groups --limit 1"
IDLE = 120.0

RUNS_AT_ONCE = 200
"""Runs that the API reports in one answer."""

WAITING = 4
"""Groups that wait for a worker, at least. Beyond these as many wait as run."""

STARTING = 5
"""A machine or an image may have to come first: how many times as long a run may take to begin as to give a sign of life."""

TRIES = Tries(first_wait=1.0, longest_wait=30.0, patience=900.0)
"""How long a build waits for an API that does not answer."""

NOT_CREATED = UUID(int=0)
ENDED = {StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED}


@dataclass
class _GroupRun:
    """A group that has been handed out, and what is known of its run. Times are this process's own: clocks differ."""

    group: Group
    steps: tuple[Step, ...]
    digest: str
    id: UUID = NOT_CREATED
    attempt: int = 0
    lost: int = 0
    furthest: int = 0
    state: StateType = StateType.SCHEDULED
    report: Report | None = None
    heard: float = 0.0
    counted: Done = field(default_factory=Done)
    results: tuple[Any, ...] | None = None


def has_room(states: Sequence[StateType], at_once: int) -> bool:
    """Whether one more group is handed out next to runs in these *states*, up to *at_once*. No more wait than run, so none waits
    much longer than one takes: if all were handed out at once, the last ones would be Late in a healthy build.
    """
    waiting = sum(state is StateType.SCHEDULED for state in states)
    return len(states) < at_once and waiting < max(WAITING, len(states) - waiting)


@dataclass
class _Queue:
    """Items of a stage that wait to be grouped. They go to the pool (``spread``) once they weigh the stage's threshold."""

    pool: Pool
    size: int
    threshold: float
    steps: tuple[Step, ...] = ()
    spread: bool = False
    waiting: deque[_Item] = field(default_factory=deque)
    weighs: int = 0

    def add(self, item: _Item) -> None:
        self.waiting.append(item)
        self.weighs += self.pool.weight(item.item)
        self.spread = self.spread or self.weighs >= self.threshold

    def take(self, weight: float = math.inf) -> list[_Item]:
        """The first items that wait, as many as weigh so much together; without a weight, all."""
        taken: list[_Item] = []
        while self.waiting and weight > 0:
            taken.append(self.waiting.popleft())
            own = self.pool.weight(taken[-1].item)
            weight, self.weighs = weight - own, self.weighs - own
        return taken


class _Item:
    """An item that was started: it waits to be grouped, or is in a group, or is done here."""

    def __init__(self, groups: Groups, queue: _Queue, item: Any) -> None:
        self._groups, self._queue, self.item = groups, queue, item
        self.run: _GroupRun | None = None
        self.number = 0
        self.here: ItemUnderWay | None = None

    def done(self) -> bool:
        return False  # no item waits there for another to be used

    def result(self) -> Any:
        if self.run is None and self.here is None:
            self._groups.check()
            self._groups.settle(self._queue)
        if self.here is not None:
            return self.here.result()
        assert self.run is not None
        return self._groups.group_results(self.run, self._queue)[self.number]

    def cancel(self) -> bool:
        """Cancel the item. True if this process need not wait for it: it runs in another process."""
        return self.here is None or self.here.cancel()


class Groups(PrefectTasks):
    """Runs the stages that go to a pool in groups on its workers once there are enough items, all else as tasks of this run.

    A run that fell silent is begun again; what it had stored is not rebuilt. A run of a dead build is adopted by the next
    one. No more groups are begun when one has failed for good, and those under way are cancelled.
    """

    workers: Literal["machines"] = "machines"

    def __init__(self, config: BuildConfig) -> None:
        super().__init__(config.workers)
        self._config, self._policy, self._root = config, config.groups, Store.at(config.output)
        self._here: deque[ItemUnderWay] = deque()
        self._queues = {
            stage.name: _Queue(stage.pool, stage.pool.group(config), stage.pool.threshold(config))
            for stage in OF_A_BUILD.values()
            if stage.pool is not None
        }
        self._queued: deque[_GroupRun] = deque()
        self._out: list[_GroupRun] = []
        self._done: list[str] = []
        self._told: set[UUID] = set()
        self._looked = 0.0
        self._moved = time.monotonic()
        self._failure: BaseException | None = None
        self._warned: set[str] = set()
        self._spread: set[str] = set()

    def window(self, stage: Stage) -> int:
        return max(super().window(stage), self._policy.threshold, self._policy.slices * self._policy.at_once)

    def start(self, item: Any, *steps: Step) -> ItemUnderWay:
        queue = self._queues.get(steps[0].stage.name)
        if queue is None:
            return self._start_here(item, steps)
        with_stage = queue.pool.with_stage
        if steps != queue.steps:  # another build: whether its items are enough is another question
            self.settle(queue)
            queue.steps, queue.spread = steps, with_stage is not None and self._queues[with_stage].spread
        mine = _Item(self, queue, item)
        queue.add(mine)
        if with_stage is not None and not queue.spread:
            self.settle(queue)
        while queue.spread and queue.weighs >= queue.size:
            self._hand_out(queue, queue.take(queue.size))
        return mine

    def _start_here(self, item: Any, steps: tuple[Step, ...]) -> ItemUnderWay:
        while len(self._here) >= super().window(steps[0].stage):
            with suppress(Exception):  # whoever started it asks for its result, too
                self._here.popleft().result()
        self._here.append(super().start(item, *steps))
        return self._here[-1]

    def settle(self, queue: _Queue) -> None:
        """Hand out the items that wait to be grouped, or do them here: no more will be added soon."""
        waiting = queue.take()
        if queue.spread and waiting:
            self._hand_out(queue, waiting)
            return
        for mine in waiting:
            mine.here = self._start_here(mine.item, queue.steps)

    def _hand_out(self, queue: _Queue, items: list[_Item]) -> None:
        group = group_of(self._config, [mine.item for mine in items], queue.steps)
        run = _GroupRun(group, queue.steps, put_group(self._root, group))
        for number, mine in enumerate(items):
            mine.run, mine.number = run, number
        if group.stage not in self._spread:
            self._spread.add(group.stage)
            logger.info("%s: in groups, each a run of its own, by the workers of the pool flat-tokens-groups", group.stage)
        self._queued.append(run)
        self._begin_runs()

    def check(self) -> None:
        """Raise the error that stopped the groups, if there is one: then no caller waits for another group."""
        if self._failure is not None:
            raise self._failure

    def group_results(self, run: _GroupRun, queue: _Queue) -> tuple[Any, ...]:
        """Wait for a group's results. A permanent failure, or a wait that ends early, is raised to every waiter."""
        self.check()
        try:
            while run.results is None:
                if queue.waiting and not self._queued and self._has_room:
                    self.settle(queue)  # no more comes to it while this waits, and there is room
                self._look()
                if run.results is None:
                    time.sleep(max(0.0, self._looked + self._interval - time.monotonic()))
        except BaseException as error:
            self._failure = error
            raise
        return run.results

    @property
    def _has_room(self) -> bool:
        return has_room([run.state for run in self._out], self._policy.at_once)

    @property
    def _interval(self) -> float:
        """Seconds between two looks at the runs: not so often that the API or the store would notice."""
        return min(2.0 + len(self._out) / 50, self._policy.lost_after / 4)

    def _look(self) -> None:
        """Read the states and reports of the groups that are out."""
        if time.monotonic() < self._looked + self._interval:
            return
        states = self._states()
        self._looked = now = time.monotonic()
        for run in self._out:
            state = states.get(run.id)
            if state is not None and state.type is not run.state:
                run.state, run.heard = state.type, now
        begun = [run for run in self._out if run.state is not StateType.SCHEDULED]
        with ThreadPoolExecutor(READERS) as readers:
            reports = list(readers.map(lambda run: read_report(self._root, run.digest, str(run.id)), begun))
        for run, report in zip(begun, reports, strict=True):
            self._hear(run, report, states.get(run.id))
        self._out = [run for run in self._out if run.results is None]
        self._begin_runs()
        if begun:
            self._moved = now
        elif self._out and states and now > self._moved + IDLE:
            self._warn("idle", "No worker has taken a group for %.0f s. Start one: %s", IDLE, START_WORKER)

    def _hear(self, run: _GroupRun, report: Report | None, state: State[Any] | None) -> None:
        """Take the progress of a group from its report. If there is none, or it is stale, its run's state says whether the
        process is alive.
        """
        now = time.monotonic()
        if report is not None and report != run.report:
            run.report, run.heard = report, now
            self._count(run, report.done)
            if report.fault is not None or report.results is not None:
                self._told.add(run.id)
            if self._take(run, report):
                return
            if fault := report.fault:
                if not fault.may_pass:
                    known = _RAISED.get(fault.kind)
                    raise known(fault.message) if known else RuntimeError(f"{fault.kind}: {fault.message}")
                self._lose(run, f"{fault.kind}: {fault.message}")
                return
        if run.state is StateType.CANCELLED:
            raise RuntimeError(f"{run.group.label} was cancelled. Run the build again to resume after the last stored shard.")
        if run.state in ENDED:
            self._lose(run, f"its run ended as {state.name}: {state.message}" if state else "its run has ended")
            return
        patience = self._policy.lost_after * (STARTING if run.state is StateType.PENDING else 1)
        if now > run.heard + patience:
            why = f"nothing was heard of it for {patience} s"
            state = Crashed(message=f"The build: {why}.")
            self._ask(lambda client: client.set_flow_run_state(run.id, state, force=True))
            self._lose(run, why)

    def _take(self, run: _GroupRun, report: Report) -> bool:
        """Whether a report has a group's results."""
        if report.results is None or len(report.results) != len(run.group.items):
            return False
        run.results, run.report = tuple(result_from_json(run.steps, value) for value in report.results), None
        self._done.append(run.digest)
        return True

    def _lose(self, run: _GroupRun, why: str) -> None:
        """Begin a group again. RuntimeError if that was done often enough without getting any further."""
        done = run.report.done.bytes if run.report else 0
        run.lost, run.furthest = (1, done) if done > run.furthest else (run.lost + 1, run.furthest)
        where = f" on {run.report.host}, at {', '.join(run.report.under_way) or 'its end'}" if run.report else ""
        if run.lost >= self._policy.attempts:
            raise RuntimeError(
                f"{run.group.label} was lost {run.lost} times, the last time{where}: {why}. Where a worker runs out of memory, "
                "set smaller workers or slice_bytes; finished slices are kept."
            )
        logger.warning("%s is begun again (it was lost%s): %s", run.group.label, where, why)
        self._count(run, Done())
        run.attempt += 1
        self._begin(run)

    def _count(self, run: _GroupRun, done: Done) -> None:
        meter.add(run.group.stage, *(now - before for now, before in zip(done, run.counted, strict=True)))
        run.counted = done

    def _begin_runs(self) -> None:
        while self._queued and self._has_room:
            run = self._queued.popleft()
            self._begin(run)
            if run.results is None:
                self._out.append(run)

    def _begin(self, run: _GroupRun) -> None:
        """Have a group's run created. One of a dead build is adopted, or its results taken if it has ended."""
        mine, pool = _own_tag(), self._queues[run.group.stage].pool
        run.report, run.state = None, StateType.SCHEDULED
        while True:
            put_group(self._root, run.group)
            created = self._ask(
                lambda _: run_deployment(
                    pool.path,
                    parameters={"output": run.group.output, "group": run.digest},
                    flow_run_name=f"{pool.deployment.removesuffix('-group')} {run.group.label} of {self._config.name}",
                    tags=[*tags_of(self._config), mine],
                    idempotency_key=f"{run.digest}-{run.attempt}",
                    timeout=0,
                )
            )
            assert isinstance(created, FlowRun)  # as this is not a coroutine
            state = created.state
            if state is None or state.type not in ENDED | {StateType.CANCELLING}:
                break
            report = read_report(self._root, run.digest, str(created.id)) if state.type is StateType.COMPLETED else None
            if report is not None:
                # The store has the objects that a report reports, or they are made again.
                results = [result_from_json(run.steps, value) for value in report.results or ()]
                names = [name for one in results for name in pool.stored(one, *run.steps[0].shared)]
                if are_there(self._root, names) and self._take(run, report):
                    self._count(run, report.done)
                    return
            run.attempt += 1
        run.id, run.heard = created.id, time.monotonic()
        if mine not in created.tags:
            logger.info("%s is under way already: adopted", run.group.label)
            self._ask(lambda client: client.update_flow_run(created.id, tags=[*created.tags, mine]))

    def _states(self) -> dict[UUID, State[Any]]:
        """States of the runs that are out, as far as the API says them now."""
        ids = [run.id for run in self._out]
        found: dict[UUID, State[Any]] = {}
        try:
            with get_client(sync_client=True) as client:
                for start in range(0, len(ids), RUNS_AT_ONCE):
                    some = FlowRunFilter.model_validate({"id": {"any_": ids[start : start + RUNS_AT_ONCE]}})
                    runs = client.read_flow_runs(flow_run_filter=some, sort=FlowRunSort.ID_DESC, limit=RUNS_AT_ONCE)
                    found |= {run.id: run.state for run in runs if run.state is not None}
        except _AWAY as error:
            if not _may_pass(error):
                raise
            if not outages().is_on():
                self._warn("away", "The Prefect API does not answer (%s); the groups go on without it", error)
        return found

    def _ask(self, question: Callable[[SyncPrefectClient], T]) -> T:
        """The API's answer. While it is away it is waited for: nothing that asks it twice does harm."""

        def ask() -> T:
            try:
                with get_client(sync_client=True) as client:
                    return question(client)
            except ObjectNotFound as error:
                names = " and ".join(queue.pool.path for queue in self._queues.values())
                raise ValueError(
                    f"the Prefect server knows no deployment {names}. Register them: make serve, or python "
                    "deployments/register.py"
                ) from error

        def tell(error: Exception, _: float) -> None:
            if not outages().is_on():
                self._warn("away", "The Prefect API does not answer (%s); waiting for it", error)

        return retry(ask, TRIES, tell, passes=_may_pass)

    def _warn(self, what: str, message: str, *arguments: Any) -> None:
        """Warn once of each thing."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(message, *arguments)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A termination may be that of a worker that makes place for another: the next build adopts what is under way. If it
        # was a cancellation, the hook below follows.
        if isinstance(error, Exception | KeyboardInterrupt):
            with suppress(*_AWAY), get_client(sync_client=True) as client:
                cancel_runs(client, _own_tag(), self._told)  # what has said how it ended, ends so
        if error is None:
            with ThreadPoolExecutor(READERS) as cleaners:
                list(cleaners.map(partial(forget, self._root), self._done))
        super().__exit__(kind, error, trace)


_AWAY = (httpx.TransportError, PrefectHTTPStatusError)
_RAISED = {"ValueError": ValueError, "ValidationError": ValueError, "FileNotFoundError": OSError, "PermissionError": OSError}
"""Faults of groups that a build raises as they are; others are named in its message."""


def _may_pass(error: Exception) -> bool:
    """Whether asking the API later may repair it."""
    status = error.response.status_code if isinstance(error, PrefectHTTPStatusError) else None
    return isinstance(error, _AWAY) and (status is None or status >= 500 or status == 429)


def _own_tag() -> str:
    """Tag of the runs of this run's groups. A run that was adopted has another parent, so the parent does not tell."""
    return f"for:{flow_run().id}"


def cancel_runs(client: SyncPrefectClient, tag: str, but: Collection[UUID] = ()) -> None:
    """Cancel the runs with a tag that have not ended, *but* for some, each once: a run that just ends may refuse."""
    known = set(but)
    alive = [kind for kind in StateType if kind not in {*ENDED, StateType.CANCELLING}]
    some = FlowRunFilter.model_validate({"tags": {"all_": [tag]}, "state": {"type": {"any_": alive}}})
    while True:
        found = client.read_flow_runs(flow_run_filter=some, sort=FlowRunSort.ID_DESC, limit=RUNS_AT_ONCE)
        runs = {run.id for run in found} - known
        if not runs:
            return
        for run in runs:
            client.set_flow_run_state(run, Cancelling(message="The build that it belongs to has ended."))
        known |= runs


def cancel_groups(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """For a flow's ``on_cancellation``: its groups are cancelled, too."""
    with get_client(sync_client=True) as client:
        cancel_runs(client, f"for:{flow_run.id}")
