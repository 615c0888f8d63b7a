"""Import is export's inverse, in every format: the same sequences come back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.formats import FORMATS, open_any
from flat_tokens.formats.datatrove import Datatrove
from flat_tokens.formats.megatron import Megatron
from flat_tokens.formats.modalities import Modalities
from flat_tokens.formats.nanogpt import NamedShards, Shards, Stream
from flat_tokens.formats.olmo import Olmo
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of

LARGEST = 2**31 - 1
EXPORTS = [
    ("modalities", Modalities(), LARGEST),
    ("modalities", Modalities(end_of_text=0, closing="always", tokens_per_file=9), LARGEST),
    ("modalities", Modalities(end_of_text=65_535), 65_534),
    ("modalities", Modalities(end_of_text=255), 254),
    *(("modalities", Modalities(end_of_text=256, closing="always", generation=g), 255) for g in (0, 1, 2, 3)),
    ("megatron", Megatron(), LARGEST),
    ("megatron", Megatron(end_of_text=7, tokens_per_file=9), LARGEST),
    ("megatron", Megatron(end_of_text=65_498), 65_497),
    ("nanogpt", Stream(end_of_text=65_535), 65_534),
    ("build-nanogpt", NamedShards(end_of_text=65_535, tokens_per_shard=7), 65_534),
    ("build-nanogpt", NamedShards(end_of_text=65_535, tokens_per_shard=1), 65_534),
    ("jaxformer", Shards(end_of_text=LARGEST, tokens_per_shard=7), LARGEST - 1),
    ("jaxformer", Shards(end_of_text=LARGEST), LARGEST - 1),
    ("llm.c", NamedShards(end_of_text=65_535, tokens_per_shard=7, name="fineweb"), 65_534),
    ("llm.c-llama-3", NamedShards(end_of_text=LARGEST, tokens_per_shard=7), LARGEST - 1),
    ("datatrove", Datatrove(), LARGEST),
    ("datatrove", Datatrove(end_of_text=7, tokens_per_file=9), LARGEST),
    ("datatrove", Datatrove(end_of_text=65_535), 65_534),
    ("olmo-core", Olmo(), LARGEST),
    ("olmo-core", Olmo(end_of_text=7, tokens_per_file=9), LARGEST),
    ("olmo-core", Olmo(end_of_text=65_535), 65_534),
]
_numbers = itertools.count()


def ragged(largest: int) -> st.SearchStrategy[list[list[int]]]:
    """Sequences of random lengths, empty and long ones among them, with the smallest and the largest ids."""
    ids = st.one_of(st.integers(0, largest), st.sampled_from([0, 1, largest]))
    return st.lists(st.lists(ids, max_size=25), max_size=8)


@pytest.mark.parametrize(("name", "options", "largest"), EXPORTS)
@examples(20)
@given(data=st.data())
def test_a_round_trip_gives_the_same_sequences(name: str, options: object, largest: int, data: st.DataObject) -> None:
    """Empty ones, one token, the largest ids, and documents longer than a shard or a batch."""
    train, validation = data.draw(ragged(largest)), data.draw(ragged(largest))
    if not train and not validation:
        train = [[1]]
    path = f"memory://round-trip-{next(_numbers)}"
    export(name, splits_of(train, validation), path, options)
    opened = open_any(path, None if name not in ("nanogpt", "build-nanogpt", "llm.c") else name, options)
    assert opened.format == name
    assert {split: sequences_in(readable) for split, readable in opened.splits.items()} == {
        split: sequences for split, sequences in (("train", train), ("validation", validation)) if sequences
    }


@pytest.mark.parametrize(("name", "options", "largest"), EXPORTS)
def test_nothing_to_export_is_no_error(name: str, options: object, largest: int) -> None:
    """An empty shard stops no pipeline."""
    assert FORMATS[name].plan(splits_of([]), options) == []
    export(name, splits_of([]), f"memory://round-trip-{next(_numbers)}", options)
