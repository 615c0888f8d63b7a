"""Rows for today's kernels: padding of documents, first and end-of-text tokens that are not stored, batches by length, hosts with
equal costs of attention.
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BlockOrder, BucketedLoader, FillInMiddle, FlatTokens, ShuffledLoader
from flat_tokens.rows.loader import hosts_of_rows
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import Numbers, places_of
from tests.flat_tokens.rows.test_crop import written
from tests.made import split_of, write_sequences
from tests.refusal import refusal

EOS, PAD = 9002, 9003


def documents_of(lengths: list[int]) -> list[list[int]]:
    return [[10 * d + k % 10 for k in range(length)] for d, length in enumerate(lengths)]


# First tokens and ends of text


def test_ends_are_read_from_long_datasets_in_many_places(tmp_path):
    """More documents than one sample of the index has, empty ones in a row, and a document of many rows."""
    lengths = np.random.default_rng(1).integers(0, 4, 5000).tolist() + [0] * 300 + [3000] + [0] * 200 + [2] * 400
    documents = documents_of(lengths)
    plain = flat_tokens.open(write_sequences(tmp_path / "plain", documents)).train.packed(128, bos=0, eos=EOS)
    expected = split_of([[0, *document, EOS] for document in documents]).packed(128)
    rows = np.random.default_rng(2).permutation(len(expected))
    assert np.array_equal(plain.batch(rows).encoded, expected.batch(rows).encoded)


# Padding of documents


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=120),
    pad_to=st.sampled_from([2, 4, 8]),
    settings=st.sampled_from([{}, {"fit": "best"}, {"too_long": "cut"}, {"too_long": "cut", "fit": "best"}]),
)
@examples(60)
def test_documents_are_padded_as_if_the_padding_were_theirs(lengths, pad_to, settings):
    documents, length = documents_of(lengths), 24 if "too_long" in settings else 48
    plain = split_of(documents).packed_documents(length, pad_to=pad_to, padding_idx=PAD, **settings)
    longer = [[*document, *[PAD] * (-len(document) % pad_to)] for document in documents]
    expected = split_of(longer).packed_documents(length, padding_idx=PAD, **settings)
    assert len(plain) == len(expected)
    found, other = (view.batch(np.arange(len(view))) for view in (plain, expected))
    for name in ("tokens", "input_pos", "document_ids", "document_range"):
        assert np.array_equal(found[name], other[name])
    assert np.array_equal(found.labels, np.where(found.tokens == PAD, -100, found.tokens))


# Batches by length


def visits_one_by_one(loader: BucketedLoader) -> list[tuple[int, int, int]]:
    """The document, the step and the row of the batch of each visit, by looking at every batch."""
    batches = enumerate(map(loader.indices, range(len(loader))))
    return sorted((document, step, row) for step, batch in batches for row, document in enumerate(batch.tolist()))


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=200).filter(any),
    buckets=st.lists(st.integers(1, 45), min_size=1, max_size=5, unique=True).map(sorted),
    epochs=st.integers(1, 3),
    hosts=st.integers(1, 3),
    data=st.data(),
)
@examples(60)
def test_batches_have_one_bucket_and_keep_their_budget(lengths, buckets, epochs, hosts, data):
    train = split_of(documents_of(lengths))
    budget = data.draw(st.integers(buckets[-1] * hosts, 400 + buckets[-1] * hosts))
    make = partial(BucketedLoader, train, buckets, budget, 3, epochs=epochs, multiple_of=hosts, pad_id=PAD)
    loader = make()
    for step in range(len(loader)):
        batch, documents = loader[step], loader.indices(step).tolist()
        rows, length = batch.encoded.shape
        assert rows * length <= budget
        shorter = [bucket for bucket in buckets if bucket < length]
        for row, document in enumerate(documents):
            assert batch.targets[row].tolist() == (documents_of(lengths)[document] + [PAD] * length)[:length]
            assert lengths[document] > (shorter[-1] if shorter else 0)
            assert lengths[document] <= length or length == buckets[-1]
        parts = [loader.shard(host, hosts).indices(step).tolist() for host in range(hosts)]
        assert [document for part in parts for document in part] == documents
    filled = [document for document, length in enumerate(lengths) if length]
    seen = visits_one_by_one(loader)
    for epoch in range(epochs):
        assert sorted(document for document, step, _ in seen if step // loader.epoch_steps == epoch) == filled
    assert loader.left_out == lengths.count(0)
    assert places_of(loader.seen(np.arange(len(lengths)))) == seen
    start = data.draw(st.integers(0, len(loader)))
    later = make(start=start)
    assert [*map(later.digest, range(len(later)))] == [*map(loader.digest, range(start, len(loader)))]
    assert loader.position(start) == start
    if (loader._counts >= loader._sizes).any():
        whole = make(drop_last=True)
        sizes = {whole[step].encoded.shape for step in range(len(whole))}
        assert all(rows == budget // length // hosts * hosts for rows, length in sizes)
        seen = visits_one_by_one(whole)
        assert whole.left_out == len(lengths) - sum(step < whole.epoch_steps for _, step, _ in seen)
        assert places_of(whole.visits(np.arange(len(lengths)))) == seen


def test_epochs_by_length_differ_and_go_on_without_end():
    train = split_of(documents_of(np.random.default_rng(0).integers(1, 60, 400).tolist()))
    loader = BucketedLoader(train, [16, 32, 64], 512, 1, epochs=None, eos=EOS)
    epochs = [
        [loader.indices(step).tolist() for step in range(k * loader.epoch_steps, (k + 1) * loader.epoch_steps)] for k in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert len({len(loader[step].encoded[0]) for step in range(6)}) > 1, "buckets take turns"
    assert loader[10**9].targets.max() == EOS


def test_batches_by_length_that_cannot_be_are_refused():
    train = split_of(documents_of([5, 9]))
    for lengths, budget, settings, complaint in (
        ([], 64, {}, "each larger than the last"),
        ([8, 8], 64, {}, "each larger than the last"),
        ([0, 8], 64, {}, "each larger than the last"),
        ([8, 16], 15, {}, "1 rows of 16 tokens are more"),
        ([8, 16], 64, {"multiple_of": 8}, "8 rows of 16 tokens are more"),
        ([8, 16], 640, {"drop_last": True}, "no batch to load"),
    ):
        with refusal(complaint):
            BucketedLoader(train, lengths, budget, **settings)  # type: ignore[arg-type]
    with refusal(r"batches of 6, 3 rows do not divide evenly among 2 processes. Set multiple_of=2"):
        BucketedLoader(train, [8, 16], 48).shard(0, 2)


@pytest.fixture
def train() -> FlatTokens:
    return written(np.minimum(np.random.default_rng(0).lognormal(2.5, 1.2, 250).astype(int) + 1, 64).tolist())


@pytest.mark.parametrize(
    ("costs", "counts", "hosts"),
    [
        ([5, 9, 1, 7, 3, 9], [3, 3], [1, 0, 0, 0, 1, 1]),
        ([4, 4, 4, 4, 0], [1, 2, 2], [0, 1, 2, 1, 2]),
        ([100, 1, 2, 3], [2, 2], [0, 0, 1, 1]),
        ([3], [0, 1], [1]),
    ],
)
def test_the_dearest_row_goes_to_the_host_with_the_least_cost(costs, counts, hosts):
    assert hosts_of_rows(np.array(costs, np.int64), np.array(counts)).tolist() == hosts


@pytest.mark.parametrize("settings", [{}, {"fit": "best"}, {"fit": "crop"}, {"split_across_pack": True}, {"pad_to": 4}], ids=str)
def test_costs_are_the_squares_of_the_segments(train, settings):
    view = train.packed_documents(64, **settings)
    rows = np.arange(len(view))[::-1]
    expected = [int((np.diff(view[row].cu_seqlens).astype(int) ** 2).sum()) for row in rows.tolist()]
    assert view.attention_costs(rows).tolist() == expected


@pytest.mark.parametrize(("order", "drop_last"), [("shuffled", True), (BlockOrder(8, 4, 2), False)], ids=str)
def test_hosts_share_the_same_rows_of_every_step(train, order, drop_last):
    view = train.packed_documents(64, fim=FillInMiddle(0.5, 0.5, 901, 902, 903), too_long="cut")
    settings = {"epochs": 2, "order": order, "drop_last": drop_last}
    plain, balanced = (ShuffledLoader(view, 16, 3, balance=balance, **settings) for balance in (False, True))
    worse = better = 0.0
    for step in range(len(plain)):
        batch = plain[step].tokens.tolist()
        assert balanced[step].tokens.tolist() == batch
        for hosts in ((4, 1, 4, 2, 4, 8, 4, 16)[step % 8],):
            parts = [balanced.shard(host, hosts) for host in range(hosts)]
            rows = [part.indices(step).tolist() for part in parts]
            later = ShuffledLoader(view, 16, 3, balance=True, start=plain.position(step), **settings)
            assert rows[-1] == later.shard(hosts - 1, hosts).indices(0).tolist()
            assert [len(its) for its in rows] == [len(plain.shard(host, hosts).indices(step)) for host in range(hosts)]
            assert sorted(row for its in rows for row in its) == sorted(plain.indices(step).tolist())
            if hosts == 4:
                assert sorted(row for part in parts for row in part[step].tokens.tolist()) == sorted(batch)
                worse += max(view.attention_costs(plain.shard(host, hosts).indices(step)).sum() for host in range(hosts))
                better += max(view.attention_costs(part.indices(step)).sum() for part in parts)
    assert better < worse
    visits = balanced.shard(0, 2).visits(np.arange(len(view)))
    assert all(plain.indices(step)[row] == of for step, row, of in zip(visits.step, visits.batch_row, visits.row, strict=True))


def test_views_without_documents_are_refused(train):
    for view in (train.packed(64), Numbers(8)):
        with pytest.raises(TypeError, match="balance is for packed_documents"):
            ShuffledLoader(view, 2, balance=True)
