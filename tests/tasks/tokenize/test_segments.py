"""Segments: where they end follows from the documents alone, however these come in batches."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.tokenize.segments
from flat_tokens.text.rows import keys_of
from tasks.rows import KEY, ROW, as_rows
from tasks.text.documents import TextBatch
from tasks.tokenize.segments import cut

RECIPE = b"r" * 64


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.tokenize.segments, "MEAN_BYTES", 64)
        patch.setattr(tasks.tokenize.segments, "MOST_BYTES", 256)
        yield


def documents_of(texts: Sequence[str]) -> TextBatch:
    array = pa.array(texts, pa.large_string())
    return TextBatch(array, as_rows({KEY: keys_of(array, None), ROW: np.arange(len(texts), dtype=np.uint64)}))


def segments_of(documents: TextBatch, borders: Sequence[int] = ()) -> list[tuple[bytes, tuple[str, ...]]]:
    """Digest and texts of each segment, of documents that come in batches with these borders."""
    edges = [0, *sorted(borders), len(documents.texts)]
    batches = (documents.part(start, stop) for start, stop in pairwise(edges))
    found = []
    for segments in cut(batches):
        starts = [0, *segments.ends.tolist()]
        for digest, start, stop in zip(segments.digests(RECIPE), starts, segments.ends.tolist(), strict=False):
            found.append((bytes(digest), tuple(segments.documents.texts[start:stop].to_pylist())))
    return found


TEXTS = st.lists(st.integers(0, 40).map(lambda i: f"{i} " * (i % 17)), max_size=80)


@given(texts=TEXTS, borders=st.lists(st.integers(0, 80), max_size=8))
def test_segments_are_the_same_whatever_the_batches(texts, borders):
    found = segments_of(documents_of(texts), [min(border, len(texts)) for border in borders])
    assert found == segments_of(documents_of(texts))
    assert [text for _, mine in found for text in mine] == texts
    assert all(mine for _, mine in found)


def test_a_change_costs_the_segment_in_which_it_is():
    texts = [f"document {i} " * (i % 5 + 1) for i in range(2000)]
    known = {digest for digest, _ in segments_of(documents_of(texts))}
    assert len(known) > 300
    for changed in (
        [*texts[:999], "other", *texts[1000:]],
        [*texts[:999], *texts[1000:]],
        ["at the front", *texts],
        [*texts, "appended"],
    ):
        fresh = [mine for digest, mine in segments_of(documents_of(changed)) if digest not in known]
        assert len(fresh) <= 6  # until the next end that follows from a document, not from a length


def test_lengths_are_part_of_the_digest():
    """The same bytes, divided otherwise."""
    one, other = segments_of(documents_of(["ab", "c"])), segments_of(documents_of(["a", "bc"]))
    assert {digest for digest, _ in one}.isdisjoint(digest for digest, _ in other)


def test_what_decides_the_tokens_besides_is_part_of_the_digest():
    (segments,) = cut([documents_of(["a"])])
    assert bytes(segments.digests(b"1" * 64)[0]) != bytes(segments.digests(b"2" * 64)[0])


def test_segments_come_to_an_end_without_text_too():
    assert max(len(mine) for _, mine in segments_of(documents_of([""] * 1000))) <= 256 // 8
