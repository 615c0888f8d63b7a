"""Assembling: the block in which the parts of a version arrive and its spans are written - by a build, a derive, an import."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from flows.pipelines.stages import SPLIT, Runner, Started, settled
from tasks.assemble.assembler import Assembler, CountedPart
from tasks.output.target import Target
from tasks.parts.part import ShardPart


@contextlib.contextmanager
def assembling(runner: Runner, target: Target, files: Sequence[str] = ()) -> Iterator[tuple[Assembler, deque[Started]]]:
    """A block with the assembler of a version, which hands its spans to the runner, and with the items that are under way to
    become parts. *files*: names of the sources' files, for errors.
    """
    # Items under way are waited for last: the assembler first ends the streams that they may wait for.
    with settled() as under_way, Assembler(target, files) as assembler:
        step = SPLIT.given(target, assembler)  # parts -> final objects
        assembler.write_with(lambda span: runner.start(span, step))
        yield assembler, under_way


def shard_parts(parts: Iterable[CountedPart]) -> list[ShardPart]:
    """The parts that are token shards."""
    return [part for part, _ in parts if isinstance(part, ShardPart)]
