"""torchtitan's data loader, against the interface that its trainer, its README and its GrainDataLoader state."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens import FlatTokens, Ledger, Mixture, ShuffledLoader, TokenBatch, write_dataset
from flat_tokens.rows.loader import ByStep
from flat_tokens.torchtitan import Config, DataLoader
from tests.examples import first_fast

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


def built(make: Any, ranks: int, rank: int, rows: int = 2, **changed: Any) -> DataLoader:
    """As the trainer builds it."""
    return Config(batches=make).build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, seq_len=CONTEXT, local_batch_size=rows, **changed
    )


def shuffled(train: FlatTokens, **settings: Any) -> Any:
    def batches(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed(length, overlap=1), batch_size, 7, epochs=None, start=start, **settings)

    return batches


def expected_of(tokens: list[int], counts: list[bool] | None = None) -> tuple[list[int], list[int], list[int]]:
    """Inputs, positions and labels of a row of tokens 100 * document + place."""
    positions, labels = [], []
    for k, token in enumerate(tokens):
        begins = k == 0 or token // 100 != tokens[k - 1] // 100
        positions.append(0 if begins else positions[-1] + 1)
        if k:
            labels.append(-100 if begins or (counts is not None and not counts[k]) else token)
    return tokens[:-1], positions[:-1], labels


def test_rows_are_inputs_positions_and_labels(train: FlatTokens) -> None:
    with_one = built(shuffled(train), 1, 0)
    loader = shuffled(train)(CONTEXT + 1, 2, 0)
    for step in range(30):
        inputs, labels = next(with_one)
        assert inputs.keys() == {"input", "positions"}
        assert {str(tensor.dtype) for tensor in (*inputs.values(), labels)} == {"torch.int64"}
        rows = [expected_of(row) for row in loader[step].targets.tolist()]
        assert [*zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)] == rows
    with_one.close()


def test_packs_and_masks_are_trained_on_where_they_count(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 16, 60).tolist()
    train = written(tmp_path / "masked", lengths, masked=True)
    mask = dict(zip((train.slice(0, train.token_count) >> 1).tolist(), train.mask(0, train.token_count).tolist(), strict=True))

    def packed(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed(length), batch_size, 1, epochs=None, start=start)

    def packs(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed_documents(length, padding_idx=9), batch_size, 1, epochs=None, start=start)

    for make in (packed, packs):
        loader = built(make, 1, 0)
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
        loader.close()


def test_the_trainer_of_0_3_says_how_often_it_saves(train: FlatTokens) -> None:
    """``trainer.py`` of torchtitan 0.3.0 also passes ``snapshot_every_n_steps``. It changes nothing."""
    plain, told = built(shuffled(train), 2, 1), built(shuffled(train), 2, 1, snapshot_every_n_steps=10)
    for _ in range(3):
        (inputs, labels), (others, more) = next(plain), next(told)
        assert inputs["input"].equal(others["input"])
        assert labels.equal(more)
    assert plain.state_dict() == told.state_dict()
    for loader in (plain, told):
        loader.close()


def rows_of(loaders: list[DataLoader]) -> list[list[int]]:
    return [row for loader in loaders for row in next(loader)[0]["input"].tolist()]


RANKS = ((1, 16), (2, 8), (3, 2), (4, 1), (8, 2), (16, 1), (16, 3))


@pytest.mark.parametrize("kind", ["shuffled", "mixture"])
@pytest.mark.parametrize("is_whole", first_fast([False, True]), ids=["some", "all"])
def test_a_run_goes_on_at_every_step_with_1_to_16_ranks_and_other_batch_sizes(
    train: FlatTokens, kind: str, is_whole: bool
) -> None:
    def mixed(length: int, batch_size: int, start: int) -> ByStep:
        sources = {"a": (train.packed(length), 0.7), "b": (train.packed(length, bos=1), 0.3)}
        return Mixture(sources, batch_size, 5, start=start)

    make = shuffled(train) if kind == "shuffled" else mixed
    whole = built(make, 1, 0, rows=16)
    states, stream = [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(whole.state_dict())))
        stream += rows_of([whole])
    whole.close()
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


def test_a_ledger_goes_on_by_its_steps(train: FlatTokens, tmp_path: Path) -> None:
    views = {"a": (train.packed(CONTEXT + 1), 0.5), "b": (train.packed(CONTEXT + 1, bos=1), 0.5)}
    ledger = Ledger.create(tmp_path / "run.json", views, batch_size=4)
    ledger.edit(3, {"a": 0.1, "b": 0.9})

    def batches(length: int, batch_size: int, start: int) -> ByStep:
        return Ledger.open(tmp_path / "run.json").mixture()

    first = built(batches, 1, 0, rows=4)
    for _ in range(5):
        next(first)
    again = built(batches, 2, 1, rows=2)
    again.load_state_dict(first.state_dict())
    assert next(again)[0]["input"].tolist() == next(first)[0]["input"][2:].tolist()
    for loader in (first, again):
        loader.close()


def test_the_end_is_that_of_the_loader(train: FlatTokens) -> None:
    def once(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed(length), batch_size, drop_last=True, start=start)

    loader = built(once, 1, 0)
    count = sum(1 for _ in loader)
    assert count == len(train.packed(CONTEXT + 1)) // 2
    loader.close()


def test_the_words_of_the_newest_trainer_are_understood(train: FlatTokens) -> None:
    loader = Config(batches=shuffled(train)).build(
        dp_world_size=1, dp_rank=0, tokenizer=None, max_context_length=CONTEXT, num_tokens_per_microbatch=4 * CONTEXT
    )
    assert next(loader)[0]["input"].shape == (4, CONTEXT)
    loader.close()
    with pytest.raises(ValueError, match=r"num_tokens_per_microbatch is 31, no multiple of the context, 15"):
        Config(batches=shuffled(train)).build(
            dp_world_size=1, dp_rank=0, max_context_length=CONTEXT, num_tokens_per_microbatch=31
        )
    assert json.loads(json.dumps(Config(batches=shuffled(train)).to_dict()))["batches"].endswith("shuffled.<locals>.batches")


def test_what_does_not_fit_the_trainer_is_refused(train: FlatTokens) -> None:
    def short(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed(length - 1), batch_size, epochs=None, start=start)

    def deaf(length: int, batch_size: int, start: int) -> ByStep:
        return ShuffledLoader(train.packed(length), batch_size, epochs=None)

    loader = built(short, 1, 0)
    with pytest.raises(ValueError, match="a batch has 2 rows of 15 tokens here, but the trainer takes 2 of 16"):
        next(loader)
    loader.close()
    loader = built(deaf, 1, 0, rows=4)
    with pytest.raises(ValueError, match="no step of the loader begins at sample 6, where the run was stopped"):
        loader.load_state_dict({"version": 1, "position": 6})
    with pytest.raises(ValueError, match="version None, but this is version 1"):
        loader.load_state_dict({"dp_rank_0": {}})
    loader.load_state_dict({})
    assert loader.state_dict()["position"] == 0
    loader.close()
    with pytest.raises(ValueError, match="neither seq_len nor max_context_length"):
        Config(batches=deaf).build(dp_world_size=1, dp_rank=0)
