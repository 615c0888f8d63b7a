"""Slices of files: large ones in ranges, small ones in runs that a change leaves as they are, but for the one that it is in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.text.rows import Range
from tasks.download.slices import MEAN_PART, SMALL_PART, _draw, slices_of
from tasks.download.table import CutFile
from tasks.models import Slice, SourceFile
from tests.examples import examples

SLICE_BYTES = 4000


class Made(NamedTuple):
    """A file: its content as a number, its size, its source, split and format, and its ranges."""

    content: int
    size: int
    source: int = 0
    split: Literal["train", "validation"] | None = None
    format: Literal["text", "jsonl"] = "text"
    ranges: int = 1


def digest_of_content(made: Made) -> str:
    return hashlib.sha256(f"{made.content}".encode()).hexdigest()


def cut(files: Sequence[Made]) -> list[Slice]:
    cuts = []
    for number, made in enumerate(files):
        file = SourceFile(made.source, f"{number}", made.size, digest_of_content(made), made.format, split=made.split)
        cuts.append(CutFile(file, tuple(Range(i, i + 1, None, made.size // made.ranges) for i in range(made.ranges))))
    return list(slices_of(cuts, SLICE_BYTES))


def contents(slices: Sequence[Slice]) -> list[tuple[str, ...]]:
    """The digests of the files of each slice."""
    return [tuple(part.file.sha256 for part in slice_.ranges) for slice_ in slices]


SIZES = st.integers(1, SLICE_BYTES // SMALL_PART)
SMALL = st.lists(st.builds(Made, st.integers(0, 1 << 40), SIZES), min_size=1, max_size=120, unique_by=lambda made: made.content)
ANY = st.lists(
    st.builds(
        Made,
        st.integers(0, 9),
        st.integers(0, SLICE_BYTES),
        st.integers(0, 1),
        st.sampled_from([None, "train", "validation"]),
        st.sampled_from(["text", "jsonl"]),
        st.integers(0, 3),
    ),
    max_size=40,
).map(lambda files: sorted(files, key=lambda made: made.source))


@examples(300)
@given(ANY)
def test_every_range_is_in_one_slice_in_order(files: list[Made]) -> None:
    slices = cut(files)
    ranges = [part for slice_ in slices for part in slice_.ranges]
    assert [(part.file.name, part.start) for part in ranges] == [
        (f"{i}", k) for i, made in enumerate(files) for k in range(made.ranges)
    ]
    for slice_ in slices:
        if len(slice_.ranges) == 1:
            continue
        assert len({(part.file.source, part.file.split, part.file.format) for part in slice_.ranges}) == 1
        numbers = [int(part.file.name) for part in slice_.ranges]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "the numbers of its files are consecutive"
        assert all(files[number].ranges == 1 and SMALL_PART * files[number].size <= SLICE_BYTES for number in numbers)
        assert slice_.text_bytes <= SLICE_BYTES


def runs_of(files: Sequence[Made]) -> list[list[Made]]:
    """The files between those that end a run by themselves: where a run ends besides, it was too long."""
    runs: list[list[Made]] = [[]]
    for made in files:
        runs[-1].append(made)
        if _draw(digest_of_content(made)) < MEAN_PART * made.size / SLICE_BYTES:
            runs.append([])
    return [run for run in runs if run]


@examples(500)
@given(SMALL, st.integers(0, 1 << 30), st.sampled_from(["added", "removed", "changed"]), SIZES)
def test_a_change_costs_its_run_and_no_other(files: list[Made], place: int, change: str, size: int) -> None:
    place %= len(files)
    new = [] if change == "removed" else [Made(-1, size)]
    after = [*files[:place], *new, *files[place + (change != "added") :]]
    for some in (files, after):
        assert contents(cut(some)) == [slice_ for run in runs_of(some) for slice_ in contents(cut(run))]
    # So the slices of all runs but those with the change are the same; it may join two runs, or divide one.
    were, are = (Counter(map(tuple, runs_of(some))) for some in (files, after))
    assert (were - are).total() <= 2
    assert (are - were).total() <= 2


def test_a_change_costs_few_slices() -> None:
    """Most often one; where runs were too long, all of theirs."""
    costs, many = Counter[int](), [Made(i, 1 + i * i % 500) for i in range(600)]
    before = Counter(contents(cut(many)))
    for place in range(600):
        costs[(Counter(contents(cut([*many[:place], Made(-1 - place, 250), *many[place + 1 :]]))) - before).total()] += 1
    assert costs[1] > 0.8 * costs.total()
    assert max(costs) <= 4


def test_runs_are_of_the_wanted_size() -> None:
    """A quarter of a slice on average; equal files make no slice each."""
    many = [Made(i, 20) for i in range(20_000)]
    slices = cut(many)
    assert 0.5 < SLICE_BYTES / 4 / (20 * 20_000 / len(slices)) < 2
    equal = [Made(k, 20) for k in range(40) for _ in range(500)]
    assert len(cut(equal)) < 2 * 20 * 20_000 / SLICE_BYTES + 40


def test_a_file_alone_is_a_slice_as_before() -> None:
    (slice_,) = cut([Made(1, 10)])
    assert slice_.label == "0[0:1]"
