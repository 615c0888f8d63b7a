"""The assembler: takes the parts of a version in order, and has every span of its final arrays written as soon as it is complete.

A build that has tokenized its last slice then has little left to write, and its workers tokenize meanwhile: a thread that writes
mostly waits for the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from flat_tokens.columns import in_manifest
from flat_tokens.stores.local import remove_empty
from tasks.assemble.duplicates import DuplicateFilter
from tasks.assemble.sink import VersionSink
from tasks.assemble.write import Span, SpanLayout, SpanWriter, SplitCounts, Written, count_part
from tasks.models import Split
from tasks.output.paths import UNFINISHED
from tasks.output.target import Target
from tasks.parts.part import Part, ShardPart
from tasks.rows import JoinedKinds


class Writing(Protocol):
    """A span in progress."""

    def result(self) -> Written: ...

    def cancel(self) -> bool: ...


CountedPart = tuple[Part, SplitCounts]
T = TypeVar("T", bound=Part)


class Assembled(NamedTuple):
    """The spans of a version's arrays, what was written of each, its parts with their counts, the kinds of its columns."""

    spans: list[Span]
    written: list[Written]
    parts: list[CountedPart]
    columns: dict[str, str]


class Assembler:
    """Assembles a version from parts, within a block. *files*: names of the files of the sources, for errors."""

    def __init__(self, target: Target, files: Sequence[str] = ()) -> None:
        self._target = target
        self._write: Callable[[Span], Writing] | None = None
        self._kinds, self._files = JoinedKinds(target.columns), files
        self._layout = SpanLayout(target)
        self._spans: list[Span] = []
        self._writing: list[Writing] = []
        self._parts: list[CountedPart] = []
        self._counts: list[SplitCounts] = []  # of parts whose tokens have been taken
        self._writers: dict[Split, SpanWriter] = {}
        self._sink: VersionSink | None = None

    def write_with(self, write: Callable[[Span], Writing]) -> None:
        """Have the spans written by *write*, which starts the writing of one on a worker."""
        self._write = write

    def open_sink(
        self,
        order: Mapping[str, tuple[int, Split | None]],
        *,
        streams: bool,
        copies: bool = True,
        duplicates: DuplicateFilter | None = None,
    ) -> VersionSink | None:
        """The sink of the slices that this machine tokenizes, in this *order*. From now on spans of tokens are written by threads
        of this process while parts arrive. *streams*: the slices need no shards of their own. *copies*: these threads copy the
        tokens of stored parts, too; where they do not, and nothing is streamed, there is no sink. *duplicates*: what leaves
        documents out of what is streamed.
        """
        if not (streams or copies):
            return None
        self._writers = {split: SpanWriter(split, self._target, streams) for split in self._target.every_split}
        self._sink = VersionSink(self._writers, self._target, order, duplicates)
        if not streams:
            self._sink.stop()
        return self._sink

    def place(self, part: T) -> T:
        """Take the tokens of the next part. It is added later, when nothing of its tokens has changed. Return the part."""
        if isinstance(part, ShardPart) and part.shard.columns:
            self._kinds.add(part.shard.columns, self._files[part.file])
        counts = count_part(part, self._target)
        self._counts.append(counts)
        if self._sink is not None and isinstance(part, ShardPart):
            self._sink.add(part, {split: counts[split][1] for split in self._target.every_split})
        return part

    def add(self, part: Part) -> None:
        """The next part. Spans that end within it are handed out."""
        if len(self._counts) == len(self._parts):
            self.place(part)
        counts = self._counts[len(self._parts)]
        self._parts.append((part, counts))
        for span in self._layout.add(part, counts):
            self._hand_out(span)

    def end(self) -> list[CountedPart]:
        """There are no more parts: hand out the last spans. Return the parts with their counts."""
        for writer in self._writers.values():
            writer.end()
        for span in self._layout.rest(self.columns):
            self._hand_out(span)
        return self._parts

    def finish(self) -> Assembled:
        """Wait until all spans are written."""
        return Assembled(self._spans, [one.result() for one in self._writing], self._parts, self.columns)

    @property
    def columns(self) -> dict[str, str]:
        """The kind of each column, as the dataset has it."""
        return {name: in_manifest(kind) for name, kind in self._kinds.now.items()}

    def _hand_out(self, span: Span) -> None:
        self._spans.append(span)
        assert self._write is not None
        self._writing.append(self._write(span))

    def has_begun(self, span: Span) -> bool:
        """Whether a thread of this process writes the tokens of a span, or has written them."""
        writer = self._writers.get(span.split)
        return span.of_tokens and writer is not None and writer.has_begun(span)

    def take(self, span: Span) -> Written | None:
        """The objects of a span of tokens that was written while its parts arrived. None where it has to be written."""
        writer = self._writers.get(span.split)
        return None if writer is None else writer.take(span)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Another process has none: it writes what it is given."""
        return type(None), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sink is not None:
            self._sink.stop()
        for writer in self._writers.values():
            writer.close()
        if kind is not None:
            # All are given up before any is waited for: a thread that ends one would begin the next meanwhile.
            for one in [one for one in self._writing if not one.cancel()]:
                with contextlib.suppress(Exception):  # the first error is the one that is raised
                    one.result()
        if self._writers and self._target.root.is_local:
            remove_empty(self._target.root.root, f"{UNFINISHED}/{self._target.workspace.attempt}", UNFINISHED)
