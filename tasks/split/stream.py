"""The tokens of a slice that go straight into a version while it is tokenized."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from flat_tokens.batch import TokenBatch
from flat_tokens.stores.store import BLAKE3
from tasks.models import Split, TokenRange, Within
from tasks.output.staging import Place
from tasks.shards.runs import runs_in_memory
from tasks.shards.streamed import BrokenStreamError
from tasks.split.span_writer import Coming, SpanWriter
from tasks.split.spans import SplitRule, chosen


class _Side:
    """The tokens of a slice that go to one split, while they come."""

    def __init__(self, writer: SpanWriter) -> None:
        self._writer, self._first, self._count = writer, writer.end_of_tokens, 0
        self._digest = blake3()
        self._spans: dict[int, Coming] = {}

    def append(self, tokens: npt.NDArray[np.uint32], highest: int) -> None:
        self._digest.update(tokens.view(np.uint8).data)
        self._count += len(tokens)
        for coming in self._writer.stream(tokens, highest):
            self._spans[id(coming)] = coming

    def begin_to_settle(self) -> list[tuple[Future[None], Coming]]:
        marks = [(Future[None](), coming) for coming in self._spans.values()]
        for mark, coming in marks:
            coming.items.put(mark)  # behind the END of a span that is whole, it is never reached
        return marks

    @property
    def told(self) -> TokenRange:
        return TokenRange(first=self._first, count=self._count, digest=f"{BLAKE3}{self._digest.hexdigest()}")


class SplitStream:
    """The tokens of a slice on their way into both splits. *pass_on* is called when all have come."""

    def __init__(
        self,
        writers: Mapping[Split, SpanWriter],
        rule: SplitRule,
        all_in: Split | None,
        place: Place,
        version: str,
        pass_on: Callable[[], object],
    ) -> None:
        self._rule, self._all_in, self._place, self._version, self._pass_on = rule, all_in, place, version, pass_on
        self._train, self._validation = _Side(writers["train"]), _Side(writers["validation"])
        self.within: Within | None = None

    def append(self, batch: TokenBatch, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Take the next documents, with their keys, uint64[n]. Return which of them go to validation: bool[n]."""
        in_validation = chosen("validation", self._all_in, self._rule, keys)
        # Documents side by side that go to one split are one run of tokens.
        borders = np.flatnonzero(in_validation[1:] != in_validation[:-1]) + 1
        starts = np.concatenate([[0], borders, [len(keys)]])
        begins, ends = (batch.seq_starts[at].astype(np.int64) for at in (starts[:-1], starts[1:]))
        for side, first in ((self._train, 0), (self._validation, 1)):
            mine = slice(first ^ int(len(keys) > 0 and in_validation[0]), None, 2)
            some = begins[mine] < ends[mine]
            for part in runs_in_memory([batch.encoded_tokens], begins[mine][some], ends[mine][some]):
                side.append(part, 2 * batch.max_token_id + 1)
        return in_validation

    def end(self) -> Within:
        """Wait until all tokens would survive the end of this process. Return where they are."""
        marks = [*self._train.begin_to_settle(), *self._validation.begin_to_settle()]
        self._pass_on()
        for mark, coming in marks:
            either: list[Future[Any]] = [mark, coming.written]
            wait(either, return_when=FIRST_COMPLETED)
            if coming.written.done():
                with contextlib.suppress(CancelledError):
                    coming.written.result()
                    continue
                raise BrokenStreamError
        attempt = self._place.attempt
        self.within = Within(version=self._version, attempt=attempt, train=self._train.told, validation=self._validation.told)
        return self.within
