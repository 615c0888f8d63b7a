"""Items are started in order, and a result that is there is used before another item is started."""

from __future__ import annotations

from collections import deque
from typing import Any

from flows.pipelines.stages import TOKENIZE, Started, started_in_order


class Immediate:
    """A runner that starts an item only when the results of all before it were used: waiting for that is a deadlock."""

    workers = "threads"

    def __init__(self) -> None:
        self.used = 0

    def window(self, _: Any) -> int:
        return 8

    def start(self, item: int, *_: Any) -> Started:
        assert self.used == item, "the runner waits for an item that waits for a result that nobody uses"
        return Result(item)


class Result:
    def __init__(self, item: int) -> None:
        self.item = item

    def result(self) -> int:
        return self.item

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


def test_no_item_is_started_while_a_result_waits_to_be_used():
    """A build with one worker that went on with stored slices hung: the slice under way waited for parts that nobody added."""
    runner, under_way = Immediate(), deque()
    for result in started_in_order(runner, under_way, range(5), TOKENIZE.given()):  # type: ignore[arg-type]
        assert result == runner.used
        runner.used += 1
    assert runner.used == 5
