"""Rows of a dataset with a loss mask, against the mask cut by hand and against torchtune's class."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.made import masked_split

Sample = list[tuple[int, bool]]
"""Token ids, each with whether it counts."""

samples = st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=12), min_size=1, max_size=12)


DOCUMENTS: list[Sample] = [[(5, False), (6, True), (7, True)], [], [(8, False)], [(9, True), (10, False)]]


def test_packs_of_documents():
    rows = masked_split(DOCUMENTS).packed_documents(4).batch([0, 1])
    assert rows.tokens.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert rows.labels.tolist() == [[-100, 6, 7, -100], [9, -100, -100, -100]]
    assert rows["loss_mask"].tolist() == [[False, True, True, False], [True, False, False, False]]


def test_rows_without_a_mask_count_whole():
    """Their fields are what they were; with ``loss_mask=True`` they have the mask of tokens that all count."""
    masked, train = masked_split(DOCUMENTS), masked_split(DOCUMENTS, masked=False)
    names = ("encoded", "inputs", "targets", "is_seq_start", "segment_ids", "positions")
    assert train.packed(3)[0].keys() == names
    assert masked.packed(3)[0].keys() == ("encoded", "loss_mask", *names[1:])
    packed = train.packed(3, loss_mask=True)
    assert packed[0].loss_mask.tolist() == [True, True, True]
    assert packed.described() == {"rows": "packed", "length": 3, "overlap": 0, "loss_mask": True}
    assert train.packed(4, eos=2, loss_mask=True)[0].labels.tolist() == [5, 6, 7, 2]
    assert train.blocks(3, loss_mask=True)[0].loss_mask.tolist() == [True, True, True]
    assert [train.documents(4, loss_mask=mask)[0].labels.tolist() for mask in (False, True)] == [[5, 6, 7, -100]] * 2
    assert train.packed_documents(4)[1].loss_mask.tolist() == [True, True, False, False]


@given(samples, st.integers(1, 9), st.sampled_from(["mmap", "compact", "zarr2"]))
@examples(60)
def test_every_row_has_the_mask_of_its_tokens(sequences, length, layout):
    """One by one and together, of all views. ``labels`` are the targets, -100 where they do not count."""
    train, flat = masked_split(sequences, layout), [pair for one in sequences for pair in one]
    packed, blocks, documents = (getattr(train, name)(length) for name in ("packed", "blocks", "documents"))
    for view, rows in (
        (packed, [flat[i * length :][:length] for i in range(len(packed))]),
        (blocks, [flat[start:][:length] for start in blocks.starts.tolist()]),
        (documents, [(one + [(0, False)] * length)[:length] for one in sequences]),
    ):
        batch = view.batch(range(len(view)))
        masks = [[counts for _, counts in row] for row in rows]
        assert (batch.loss_mask.dtype, batch["labels"].dtype) == (bool, np.int64)
        assert [row.loss_mask.tolist() for row in view] == batch.loss_mask.tolist() == masks
        assert batch["labels"].tolist() == [[token if counts else -100 for token, counts in row] for row in rows]


@pytest.fixture(scope="module")
def packed_dataset() -> Iterator[Any]:
    """torchtune's class, loaded without the rest of torchtune, which wants torchao."""
    pytest.importorskip("torch")
    found = importlib.util.find_spec("torchtune")
    if found is None or found.origin is None:
        pytest.skip("torchtune is not installed: make peers")
    with pytest.MonkeyPatch.context() as patch:
        for package in ("torchtune", "torchtune.data", "torchtune.datasets"):
            patch.setitem(sys.modules, package, types.ModuleType(package))
        for name in ("data._common", "datasets._packed"):
            path = Path(found.origin).parent.joinpath(*name.split(".")).with_suffix(".py")
            spec = importlib.util.spec_from_file_location(f"torchtune.{name}", path)
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, f"torchtune.{name}", module)
            spec.loader.exec_module(module)
        yield sys.modules["torchtune.datasets._packed"].PackedDataset


@pytest.mark.parametrize("split_across_pack", [False, True])
def test_packs_are_those_of_torchtunes_class(packed_dataset, split_across_pack):
    """Tokens, labels with -100, places and masks of attention, on random samples with masked labels."""
    rng = np.random.default_rng(int(split_across_pack))
    for _ in range(10):
        longest = int(rng.integers(1, 30))
        sequences = [
            [(int(token), token % 2 > 0) for token in rng.integers(1, 100, rng.integers(1, longest + 1))]
            for _ in range(rng.integers(1, 12))
        ]
        train = masked_split(sequences)
        labelled = [
            {"tokens": [token for token, _ in one], "labels": [token if counts else -100 for token, counts in one]}
            for one in sequences
        ]
        for max_packs in (None, 1, 3):
            length = int(rng.integers(1, 40)) if split_across_pack else longest + int(rng.integers(20))
            settings = {"padding_idx": 7, "max_packs": max_packs, "split_across_pack": split_across_pack}
            theirs = packed_dataset(labelled, max_seq_len=length, **settings)
            ours = train.packed_documents(length, **settings)
            assert len(ours) == len(theirs)
            for mine, pack in zip(ours, (theirs[i] for i in range(len(theirs))), strict=True):
                for name in ("tokens", "labels", "input_pos", "seq_lens"):
                    assert mine[name].tolist() == pack[name].tolist()
