"""Full rows: against the rule, piece by piece; and what views leave out, against looking at every row."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import FlatTokens
from flat_tokens.rows import packing_index
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import VIEWS, same_arrays
from tests.made import docs_of, publish_docs, split_of


def rows_by_rule(lengths: list[int], length: int, *, keep: bool, at_a_time: int) -> list[list[tuple[int, int]]]:
    """The pieces of each row, (document, offset). Ties go to documents before rests, then to what was there first."""
    documents = [(number, 0, size) for number, size in enumerate(lengths) if size]
    rows = []
    waiting = []
    for first in range(0, len(documents), at_a_time):
        pool = waiting + documents[first : first + at_a_time]
        waiting = []
        while pool and not waiting:
            row = []
            room = length
            while room and pool:
                begins = [piece for piece in pool if not piece[1]]
                allowed = begins if begins and not row else pool
                fitting = [piece for piece in allowed if piece[2] <= room]
                if fitting:
                    most = max(size for _, _, size in fitting)
                    chosen = min((piece for piece in fitting if piece[2] == most), key=lambda piece: piece[1] > 0)
                else:
                    least = min(size for _, _, size in allowed)
                    chosen = min((piece for piece in allowed if piece[2] == least), key=lambda piece: piece[1] > 0)
                pool.remove(chosen)
                row.append(chosen)
                if chosen[2] > room and keep:
                    pool.append((chosen[0], chosen[1] + room, chosen[2] - room))
                room -= min(chosen[2], room)
            if room:
                waiting = row
            else:
                rows.append([piece[:2] for piece in row])
    return rows


def written(lengths: list[int]) -> FlatTokens:
    """Document d is d + 1, again and again."""
    return split_of([[d + 1] * size for d, size in enumerate(lengths)])


def assert_packs(view: Any, documents: Sequence[Sequence[int]], rows: list[list[tuple[int, int]]], sizes: Sequence[int]) -> None:
    """The view has these packs of pieces, (document, offset), each up to the end of its document or of the pack. *sizes*: of all
    documents, whole.
    """
    assert len(view) == len(rows)
    batch, length = view.batch(np.arange(len(rows))), view.length
    holding, kept = [set() for _ in documents], Counter()
    for number, row in enumerate(rows):
        tokens, positions, ids = [], [], []
        for document, offset in row:
            part = documents[document][offset:][: length - len(tokens)]
            tokens += part
            positions += [(offset + k) % length for k in range(len(part))]
            ids += [document] * len(part)
            holding[document].add(number)
            kept[document] += len(part)
        padding = range(length - len(tokens))
        assert batch.tokens[number].tolist() == tokens + [view.padding_idx for _ in padding]
        assert batch.labels[number].tolist() == tokens + [-100 for _ in padding]
        assert batch.input_pos[number].tolist() == positions + [min(positions[-1] + 1 + k, length - 1) for k in padding]
        assert batch.document_ids[number].tolist() == ids + [-1 for _ in padding]
    of, found = view.rows_of(np.arange(len(documents)))
    assert [(d, row) for d, its in enumerate(holding) for row in sorted(its)] == sorted(
        zip(of.tolist(), found.tolist(), strict=True)
    )
    cut = sum(size - kept[d] for d, size in enumerate(sizes) if kept[d])
    dropped = sum(size for d, size in enumerate(sizes) if not kept[d])
    share = pytest.approx(kept.total() / (len(rows) * length)) if rows else 0
    assert view.fill == (share, sum(sizes), cut, dropped, {})


@given(
    lengths=st.lists(st.integers(0, 60) | st.integers(0, 5), min_size=1, max_size=80),
    length=st.integers(1, 40),
    keep=st.booleans(),
    at_a_time=st.integers(1, 40) | st.just(1 << 18),
    most=st.none() | st.integers(0, 9),
    ends=st.sampled_from([{}, {"bos": 7000}, {"bos": 7000, "eos": 7001}]),
)
@examples(400)
def test_packs_hold_what_the_rule_says(monkeypatch, tmp_path_factory, lengths, length, keep, at_a_time, most, ends):
    monkeypatch.setattr(packing_index, "PARTS_AT_A_TIME", at_a_time)
    train, cache = written(lengths), tmp_path_factory.mktemp("crop")
    settings = {"fit": "crop", "on_crop": "keep" if keep else "drop", "max_packs": most, **ends}
    view = train.packed_documents(length, **settings)
    bos, eos = ([ends[name]] if name in ends else [] for name in ("bos", "eos"))
    documents = [[*bos, *[d + 1] * size, *eos] for d, size in enumerate(lengths)]
    sizes = [len(document) for document in documents]
    assert_packs(view, documents, rows_by_rule(sizes, length, keep=keep, at_a_time=at_a_time)[:most], sizes)
    batch = view.batch(np.arange(len(view)))
    for _ in range(2):  # made, and mapped
        again = train.packed_documents(length, cache=cache, **settings)
        assert same_arrays(again.batch(np.arange(len(again))), batch)


# What views leave out


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    files=st.lists(st.integers(0, 2), min_size=60, max_size=60),
    length=st.integers(2, 20),
    ends=st.sampled_from([{}, {"eos": 9001}, {"bos": 9002, "eos": 9001}]),
    picks=st.lists(st.integers(0, 59), max_size=30) | st.none(),
)
@examples(40)
def test_fill_is_what_looking_at_every_row_finds(
    tmp_path_factory,
    lengths,
    files,
    length,
    ends,
    picks,
):
    root = tmp_path_factory.mktemp("fill")
    docs = [docs_of([d + 1] * size, file=files[d], key=d)[0] for d, size in enumerate(lengths)]
    publish_docs(root, docs, sources=[("web", 2), ("code", 1)])
    train = flat_tokens.open(root).train
    numbers = list(range(len(lengths)))
    if picks is not None:
        numbers = [pick for pick in dict.fromkeys(picks) if pick < len(lengths)]
        train = train.select(indices=np.array(numbers, np.int64))
    for kind, settings in VIEWS:
        if "overlap" in settings and train.token_count + len(ends) * train.seq_count < length:
            continue
        view = getattr(train, kind)(length, **settings, **ends)
        batch = view.batch(np.arange(len(view)))
        covered = np.zeros(view.tokens.token_count, bool)
        for start, count in zip(*view.token_ranges(np.arange(len(view))), strict=True):
            covered[start : start + count] = True
        filled = (batch.document_ids >= 0).sum() if hasattr(batch, "document_ids") else batch.encoded.size
        filled = batch.length.sum() if hasattr(batch, "length") else filled
        expected = {"web": [0, 0, 0], "code": [0, 0, 0]}
        starts = view.tokens.seq_starts.read(0, view.tokens.seq_count + 1).astype(int)
        for k, d in enumerate(numbers):
            size, kept = int(starts[k + 1] - starts[k]), int(covered[starts[k] : starts[k + 1]].sum())
            fact = expected["code" if files[d] == 2 else "web"]
            fact[0] += size
            fact[1 if kept else 2] += size - kept
        fill = view.fill
        assert {name: list(source) for name, source in fill.sources.items()} == expected
        assert list(fill[1:4]) == [sum(fact[k] for fact in expected.values()) for k in range(3)]
        assert fill.share == pytest.approx(filled / (len(view) * length) if len(view) else 0)
        assert fill.used == pytest.approx(covered.mean() if len(covered) else 0)
