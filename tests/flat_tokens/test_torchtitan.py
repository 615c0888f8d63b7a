"""torchtitan's data loader, against the interface that its trainer, its README and its GrainDataLoader state."""

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import FlatTokens, Ledger, Mixture, ShuffledLoader, TokenBatch, write_dataset
from flat_tokens.rows.loader import ByStep
from flat_tokens.torchtitan import Config, DataLoader
from tests.examples import SOME_OR_ALL
from tests.refusal import refusal

pytestmark = pytest.mark.needs("torch")

CONTEXT = 15


def written(path: Path, lengths: list[int], *, masked: bool = False) -> FlatTokens:
    batch = TokenBatch.from_sequences([[100 * (d + 1) + k for k in range(size)] for d, size in enumerate(lengths)])
    mask = (np.arange(batch.token_count) % 3 > 0).astype(np.uint8)
    write_dataset(path, [batch._replace(loss_mask=mask) if masked else batch])
    return flat_tokens.open(path).train


@pytest.fixture
def train(tmp_path: Path) -> FlatTokens:
    return written(tmp_path / "d", np.random.default_rng(0).integers(1, 30, 60).tolist())


Built = Callable[..., DataLoader]


@pytest.fixture
def built() -> Iterator[Built]:
    """Makes loaders as the trainer builds them."""
    with ExitStack() as stack:

        def build(make: Any, ranks: int = 1, rank: int = 0, rows: int = 2) -> DataLoader:
            told = {"dp_world_size": ranks, "dp_rank": rank, "tokenizer": None, "seq_len": CONTEXT, "local_batch_size": rows}
            return stack.enter_context(closing(Config(batches=make).build(**told)))

        yield build


def shuffled(train: FlatTokens) -> Callable[[int, int, int], ByStep]:
    return lambda length, rows, start: ShuffledLoader(train.packed(length, overlap=1), rows, 7, epochs=None, start=start)


def expected_of(tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Inputs, positions and labels of a row of tokens 100 * document + place."""
    positions, labels = [], []
    for k, token in enumerate(tokens):
        begins = k == 0 or token // 100 != tokens[k - 1] // 100
        positions.append(0 if begins else positions[-1] + 1)
        if k:
            labels.append(-100 if begins else token)
    return tokens[:-1], positions[:-1], labels


def test_rows_are_inputs_positions_and_labels(train, built):
    with_one = built(shuffled(train))
    loader = shuffled(train)(CONTEXT + 1, 2, 0)
    for step in range(30):
        inputs, labels = next(with_one)
        assert inputs.keys() == {"input", "positions"}
        assert {str(tensor.dtype) for tensor in (*inputs.values(), labels)} == {"torch.int64"}
        rows = [expected_of(row) for row in loader[step].targets.tolist()]
        assert [*zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)] == rows


def test_packs_and_masks_are_trained_on_where_they_count(tmp_path, built):
    lengths = np.random.default_rng(1).integers(1, 16, 60).tolist()
    train = written(tmp_path / "masked", lengths, masked=True)
    mask = dict(zip((train.slice(0, train.token_count) >> 1).tolist(), train.mask(0, train.token_count).tolist(), strict=True))

    for view in (train.packed, partial(train.packed_documents, padding_idx=9)):
        loader = built(lambda length, rows, start, view=view: ShuffledLoader(view(length), rows, 1, epochs=None, start=start))
        for _ in range(20):
            inputs, labels = next(loader)
            for tokens, positions, targets in zip(
                inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True
            ):
                for k, target in enumerate(targets):
                    if target != -100:
                        assert target == tokens[k] + 1, "the next token of the same document"
                        assert mask[target]
                        assert positions[k] <= tokens[k] % 100
                    elif k + 1 < len(tokens) and tokens[k + 1] != 9 and tokens[k + 1] == tokens[k] + 1:
                        assert not mask[tokens[k + 1]]


def rows_of(loaders: list[DataLoader]) -> list[list[int]]:
    return [row for loader in loaders for row in next(loader)[0]["input"].tolist()]


RANKS = ((1, 16), (2, 8), (3, 2), (4, 1), (8, 2), (16, 1), (16, 3))


@pytest.mark.parametrize("kind", ["shuffled", "mixture"])
@SOME_OR_ALL
def test_a_run_goes_on_at_every_step_with_1_to_16_ranks_and_other_batch_sizes(train, built, kind, is_whole):
    def mixed(length: int, batch_size: int, start: int) -> ByStep:
        sources = {"a": (train.packed(length), 0.7), "b": (train.packed(length, bos=1), 0.3)}
        return Mixture(sources, batch_size, 5, start=start)

    make = shuffled(train) if kind == "shuffled" else mixed
    whole = built(make, rows=16)
    states, stream = [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(whole.state_dict())))
        stream += rows_of([whole])
    for step, state in enumerate(states):
        at = state["position"]
        some = ((1, 16), (3, 2), (16, 3)) if step % 2 else ((2, 8), (4, 1), (8, 2))
        for ranks, rows in RANKS if is_whole else some:
            loaders = [built(make, ranks, rank, rows) for rank in range(ranks)]
            for loader in loaders:
                loader.load_state_dict(pickle.loads(pickle.dumps(state)))
            wanted = stream[at : at + ranks * rows]
            assert rows_of(loaders)[: len(wanted)] == wanted
            assert {loader.state_dict()["position"] for loader in loaders} == {at + ranks * rows}
            for loader in loaders:
                loader.close()


def test_a_ledger_goes_on_by_its_steps(train, built, tmp_path):
    views = {"a": (train.packed(CONTEXT + 1), 0.5), "b": (train.packed(CONTEXT + 1, bos=1), 0.5)}
    ledger = Ledger.create(tmp_path / "run.json", views, batch_size=4)
    ledger.edit(3, {"a": 0.1, "b": 0.9})

    def batches(*_: int) -> ByStep:
        return Ledger.open(tmp_path / "run.json").mixture()

    first = built(batches, rows=4)
    for _ in range(5):
        next(first)
    again = built(batches, 2, 1, rows=2)
    again.load_state_dict(first.state_dict())
    assert next(again)[0]["input"].tolist() == next(first)[0]["input"][2:].tolist()


def test_the_end_is_that_of_the_loader(train, built):
    loader = built(lambda length, rows, start: ShuffledLoader(train.packed(length), rows, drop_last=True, start=start))
    assert sum(1 for _ in loader) == len(train.packed(CONTEXT + 1)) // 2


OLD = {"seq_len": CONTEXT, "local_batch_size": 4}
NEW = {"max_context_length": CONTEXT, "num_tokens_per_batch": 4 * CONTEXT}
"""The sizes that ``trainer.py`` passes: of torchtitan 0.3.0, and of its main branch on 21 August 2026."""


def test_each_trainer_gets_the_dimensions_that_it_takes(train):
    """Main's model takes one dimension: a row of four contexts is not four rows."""
    config, others = Config(batches=shuffled(train)), {"dp_world_size": 2, "dp_rank": 1, "tokenizer": None}
    old, new = config.build(**others, **OLD, snapshot_every_n_steps=10), config.build(**others, **NEW)
    for _ in range(3):
        (inputs, labels), (flat, flat_labels) = next(old), next(new)
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, CONTEXT)
        assert flat_labels.equal(labels.flatten())
        assert {name: tensor.tolist() for name, tensor in flat.items()} == {k: v.flatten().tolist() for k, v in inputs.items()}
    assert old.state_dict() == new.state_dict()
    for loader in (old, new):
        loader.close()
    assert json.loads(json.dumps(config.to_dict()))["batches"].endswith("shuffled.<locals>.<lambda>")


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({**NEW, "num_tokens_per_batch": 31}, ValueError, "31, which is not a multiple of max_context_length, 15. Set it to 30"),
        ({**NEW, "num_tokens_per_shard": 9}, TypeError, "num_tokens_per_shard = 9. This loader knows"),
        ({**OLD, **NEW}, TypeError, "(15, 4, 15, 60)"),
        ({}, TypeError, "(None, None, None, None)"),
    ],
)
def test_sizes_that_are_not_known_are_refused(train, sizes, error, words):
    with pytest.raises(error, match=re.escape(words)):
        Config(batches=shuffled(train)).build(dp_world_size=1, dp_rank=0, **sizes)


def test_what_does_not_fit_the_trainer_is_refused(train, built):
    short = built(lambda length, rows, start: ShuffledLoader(train.packed(length - 1), rows, epochs=None, start=start))
    with refusal("a batch has 2 rows of 15 tokens here, but the trainer takes 2 of 16"):
        next(short)
    loader = built(lambda length, rows, start: ShuffledLoader(train.packed(length), rows, epochs=None), rows=4)
    with refusal("no step of the loader begins at sample 6, where the run was stopped"):
        loader.load_state_dict({"version": 1, "position": 6})
    with refusal("version None, but this is version 1"):
        loader.load_state_dict({"dp_rank_0": {}})
    loader.load_state_dict({})
    assert loader.state_dict()["position"] == 0
