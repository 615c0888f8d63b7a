"""Rows for today's kernels: padding of documents, first and end-of-text tokens that are not stored, batches by length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import BucketedLoader, FlatTokens
from tests.examples import examples
from tests.made import write_sequences
from tests.refusal import refusal

EOS, PAD = 9002, 9003


def written(path: Path, documents: list[list[int]]) -> FlatTokens:
    return flat_tokens.open(write_sequences(path, documents)).train


def documents_of(lengths: list[int]) -> list[list[int]]:
    return [[10 * d + k % 10 for k in range(length)] for d, length in enumerate(lengths)]


# First tokens and ends of text


def test_ends_are_read_from_long_datasets_in_many_places(tmp_path):
    """More documents than one sample of the index has, empty ones in a row, and a document of many rows."""
    lengths = np.random.default_rng(1).integers(0, 4, 5000).tolist() + [0] * 300 + [3000] + [0] * 200 + [2] * 400
    documents = documents_of(lengths)
    plain = written(tmp_path / "plain", documents).packed(128, bos=0, eos=EOS)
    expected = written(tmp_path / "stored", [[0, *document, EOS] for document in documents]).packed(128)
    rows = np.random.default_rng(2).permutation(len(expected))
    assert np.array_equal(plain.batch(rows).encoded, expected.batch(rows).encoded)


# Padding of documents


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=120),
    pad_to=st.sampled_from([2, 4, 8]),
    settings=st.sampled_from([{}, {"fit": "best"}, {"too_long": "cut"}, {"too_long": "cut", "fit": "best"}]),
)
@examples(60)
def test_documents_are_padded_as_if_the_padding_were_theirs(tmp_path_factory, lengths, pad_to, settings):
    root, documents = tmp_path_factory.mktemp("padded"), documents_of(lengths)
    length = 24 if "too_long" in settings else 48
    plain = written(root / "plain", documents).packed_documents(length, pad_to=pad_to, padding_idx=PAD, **settings)
    longer = [[*document, *[PAD] * (-len(document) % pad_to)] for document in documents]
    expected = written(root / "longer", longer).packed_documents(length, padding_idx=PAD, **settings)
    assert len(plain) == len(expected)
    found, other = (view.batch(np.arange(len(view))) for view in (plain, expected))
    for name in ("tokens", "input_pos", "document_ids", "document_range"):
        assert np.array_equal(found[name], other[name])
    assert np.array_equal(found.labels, np.where(found.tokens == PAD, -100, found.tokens))
    assert (found.cu_seqlens % pad_to == 0).all()
    assert all((sizes % pad_to == 0).all() for sizes in found.seq_lens)


# Batches by length


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=200).filter(any),
    buckets=st.lists(st.integers(1, 45), min_size=1, max_size=5, unique=True).map(sorted),
    epochs=st.integers(1, 3),
    hosts=st.integers(1, 3),
    data=st.data(),
)
@examples(60)
def test_batches_have_one_bucket_and_keep_their_budget(tmp_path_factory, lengths, buckets, epochs, hosts, data):
    train = written(tmp_path_factory.mktemp("buckets") / "d", documents_of(lengths))
    budget = data.draw(st.integers(buckets[-1] * hosts, 400 + buckets[-1] * hosts))
    loader = BucketedLoader(train, buckets, budget, 3, epochs=epochs, multiple_of=hosts, pad_id=PAD)
    seen = []
    for step in range(len(loader)):
        batch, documents = loader[step], loader.indices(step).tolist()
        rows, length = batch.encoded.shape
        assert rows * length <= budget
        shorter = [bucket for bucket in buckets if bucket < length]
        for row, document in enumerate(documents):
            assert batch.targets[row].tolist() == (documents_of(lengths)[document] + [PAD] * length)[:length]
            assert lengths[document] > (shorter[-1] if shorter else 0)
            assert lengths[document] <= length or length == buckets[-1]
            seen.append((document, step, row))
        parts = [loader.shard(host, hosts).indices(step).tolist() for host in range(hosts)]
        assert [document for part in parts for document in part] == documents
    filled = [document for document, length in enumerate(lengths) if length]
    assert sorted(document for document, _, _ in seen) == sorted(filled * epochs)
    per_epoch = [document for document, step, _ in seen if step < loader.epoch_steps]
    assert sorted(per_epoch) == filled
    assert loader.left_out == lengths.count(0)
    found = loader.seen(np.arange(len(lengths)))
    assert list(zip(*(f.tolist() for f in (found.asked, found.step, found.batch_row)), strict=True)) == sorted(seen)
    start = data.draw(st.integers(0, len(loader)))
    later = BucketedLoader(train, buckets, budget, 3, epochs=epochs, multiple_of=hosts, pad_id=PAD, start=start)
    assert [later.indices(step).tolist() for step in range(len(later))] == [
        loader.indices(step).tolist() for step in range(start, len(loader))
    ]
    assert loader.position(start) == start
    if (loader._counts >= loader._sizes).any():
        whole = BucketedLoader(train, buckets, budget, 3, epochs=epochs, multiple_of=hosts, drop_last=True)
        sizes = {whole[step].encoded.shape for step in range(len(whole))}
        assert all(rows == budget // length // hosts * hosts for rows, length in sizes)
        assert whole.left_out == len(lengths) - sum(len(whole.indices(step)) for step in range(whole.epoch_steps))
        found = whole.visits(np.arange(len(lengths)))
        assert all(found.row[k] == whole.indices(found.step[k])[found.batch_row[k]] for k in range(len(found.step)))
        assert len(found.step) == sum(len(whole.indices(step)) for step in range(len(whole)))


def test_epochs_by_length_differ_and_go_on_without_end(tmp_path):
    train = written(tmp_path / "d", documents_of(np.random.default_rng(0).integers(1, 60, 400).tolist()))
    loader = BucketedLoader(train, [16, 32, 64], 512, 1, epochs=None, eos=EOS)
    epochs = [
        [loader.indices(step).tolist() for step in range(k * loader.epoch_steps, (k + 1) * loader.epoch_steps)] for k in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert len({len(loader[step].encoded[0]) for step in range(6)}) > 1, "buckets take turns"
    assert loader[10**9].targets.max() == EOS
    with loader.steps(5, 9, prefetch=2) as steps:
        assert [batch.length.tolist() for batch in steps] == [loader[step].length.tolist() for step in range(5, 9)]


def test_batches_by_length_that_cannot_be_are_refused(tmp_path):
    train = written(tmp_path / "d", documents_of([5, 9]))
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
