"""What every format does: the same sequences come back, objects are listed and the same again, wrong options are named."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens.formats import FORMATS, Files, open_any
from flat_tokens.formats.datatrove import Datatrove
from flat_tokens.formats.litdata import Litdata
from flat_tokens.formats.mds import Mds
from flat_tokens.formats.megatron import Megatron
from flat_tokens.formats.modalities import Modalities
from flat_tokens.formats.nanogpt import NamedShards, Shards, Stream
from flat_tokens.formats.olmo import Olmo
from flat_tokens.formats.parquet import Arrow, Parquet
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import export_of, import_dataset, write
from tests.examples import examples
from tests.flat_tokens.formats.exporting import export, sequences_in, splits_of
from tests.refusal import refusal
from tests.terminal import Terminal

LARGEST = 2**31 - 1
OF_PYARROW = [
    ("parquet", Parquet()),
    ("parquet", Parquet(tokens_per_file=7, tokens_per_row_group=3, compression="none")),
    ("arrow", Arrow()),
    ("arrow", Arrow(tokens_per_file=7, tokens_per_batch=3)),
]
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
    ("litdata", Litdata(), LARGEST),
    ("litdata", Litdata(size_limit=60), LARGEST),
    ("litdata", Litdata(size_limit=1), LARGEST),
    ("litdata", Litdata(end_of_text=LARGEST, size_limit=60), LARGEST - 1),
    ("mds", Mds(), LARGEST),
    ("mds", Mds(size_limit=300), LARGEST),
    ("mds", Mds(size_limit=1), LARGEST),
    ("mds", Mds(end_of_text=LARGEST, size_limit=300, column="input_ids"), LARGEST - 1),
    ("mds", Mds(end_of_text=LARGEST, length=4, size_limit=300), LARGEST - 1),
    ("mds", Mds(end_of_text=LARGEST, length=1000), LARGEST - 1),
    ("mds", Mds(end_of_text=LARGEST, length=1, size_limit=1), LARGEST - 1),
    *(pytest.param(*of, LARGEST, marks=pytest.mark.needs("pyarrow")) for of in OF_PYARROW),
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
def test_what_was_written_is_listed_and_written_again_it_is_the_same(
    tmp_path: Path, name: str, options: object, largest: int
) -> None:
    splits = splits_of([[1, 2], [], [3, 4, 5], [largest], [0] * 40, []], [[7]])
    objects = export(name, splits, tmp_path / "a", options)
    assert export(name, splits, tmp_path / "b", options) == objects
    for root in ("a", "b"):
        assert {key for key, _ in Store.at(tmp_path / root).listing()} == {item.key for item in objects}
        assert [Store.at(tmp_path / root).now(item) for item in objects] == objects


SEQUENCES = [[1, 2], [], [3, 4, 5], [70], [6] * 40, [], list(range(1, 60))]
HOSTILE: dict[str, Any] = {
    "modalities": Modalities(),
    "megatron": Megatron(),
    "nanogpt": Stream(end_of_text=99),
    "build-nanogpt": NamedShards(end_of_text=99, tokens_per_shard=50),
    "jaxformer": Shards(end_of_text=99, tokens_per_shard=50),
    "llm.c": NamedShards(end_of_text=99),
    "llm.c-llama-3": NamedShards(end_of_text=99),
    "datatrove": Datatrove(),
    "olmo-core": Olmo(),
    "litdata": Litdata(size_limit=200),
    "mds": Mds(size_limit=400),
    "parquet": Parquet(tokens_per_row_group=20),
    "arrow": Arrow(tokens_per_batch=20),
}


@pytest.mark.parametrize(
    ("name", "size", "width"),
    [
        ("megatron", 65_499, 2),
        ("megatron", 65_500, 4),
        ("megatron", 2**31, 4),
        ("datatrove", 65_536, 2),
        ("datatrove", 65_537, 4),
        ("olmo-core", 65_536, 2),
        ("olmo-core", 65_537, 4),
    ],
)
def test_the_vocabulary_decides_the_width(tmp_path: Path, name: str, size: int, width: int) -> None:
    tokens, *_ = export(name, splits_of([[1, 2, 3]]), tmp_path, FORMATS[name].options(vocabulary_size=size))
    assert tokens.size == 3 * width
    assert sequences_in(open_any(tmp_path, name).splits["train"]) == [[1, 2, 3]]


def test_every_format_has_a_row() -> None:
    assert set(HOSTILE) == set(FORMATS)


def read_or_refusal(path: Path, name: str) -> list[list[int]] | str:
    try:
        return sequences_in(open_any(path, name, HOSTILE[name]).splits["train"], 100)
    except (ValueError, FileNotFoundError, MemoryError) as error:
        return str(error)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_cut_anywhere_is_refused_by_name_or_gives_whole_sequences(tmp_path: Path, name: str) -> None:
    """Streams may end after any of their batches or tokens. Indexes are cut, too."""
    for item in export(name, splits_of(SEQUENCES), tmp_path, HOSTILE[name]):
        path = tmp_path / item.key
        whole = path.read_bytes()
        for size in [*range(0, len(whole), 1 + len(whole) // 20), len(whole) - 1]:
            path.write_bytes(whole[:size])
            found = read_or_refusal(tmp_path, name)
            if isinstance(found, str):
                assert str(tmp_path) in found
            elif ".metadata" not in item.key:
                assert name in ("arrow", "nanogpt")
                assert [token for ids in SEQUENCES for token in ids][: sum(map(len, found))] == [
                    token for ids in found for token in ids
                ]
        path.write_bytes(whole)
    assert read_or_refusal(tmp_path, name) == SEQUENCES


@pytest.mark.parametrize(
    ("name", "missing", "complaint"),
    [
        ("mds", "train/index.json", r"has no index.json, and is not an MDS shard itself\."),
        ("mds", "train/shard.00001.mds", r"train/shard\.00001\.mds"),
        ("litdata", "train/index.json", r"has no index.json. An export writes it when it is finished."),
        ("datatrove", "train/00000_train.ds.index", r"00000_train\.ds: has no train/00000_train\.ds\.index next to it"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, missing: str, complaint: str) -> None:
    export(name, splits_of(SEQUENCES), tmp_path, HOSTILE[name])
    (tmp_path / missing).unlink()
    assert FORMATS[name].recognise(Files.at(tmp_path)) == ("shard" in missing)
    with refusal(complaint, (ValueError, FileNotFoundError)):
        sequences_in(open_any(tmp_path, name).splits["train"])


TOO_LARGE = r"max_token_id is 65536, but .* uint16 holds ids up to 65535"
NO_ID = "end_of_text is 70000, but it is a token id from 0 to 65535"


@pytest.mark.parametrize(
    ("name", "largest", "options", "complaint"),
    [
        *((name, 65_536, {"end_of_text": 0}, TOO_LARGE) for name in ("nanogpt", "build-nanogpt", "llm.c")),
        *((name, 1, {"end_of_text": 70_000}, NO_ID) for name in ("nanogpt", "build-nanogpt", "llm.c")),
        ("modalities", 300, {"vocabulary_size": 256}, "vocabulary_size is 256, but max_token_id or end_of_text is 300"),
        ("modalities", 3, {"end_of_text": 256, "vocabulary_size": 256}, "max_token_id or end_of_text is 256"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_work(
    tmp_path: Path, name: str, largest: int, options: dict[str, int], complaint: str
) -> None:
    with refusal(complaint):
        export(name, splits_of([[1]], [[largest]]), tmp_path / "out", FORMATS[name].options(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_changed_bytes_are_refused_by_name_or_give_token_ids(tmp_path: Path, name: str) -> None:
    """There is no other error."""
    chooser = random.Random(name)
    for item in export(name, splits_of(SEQUENCES), tmp_path, HOSTILE[name]):
        path = tmp_path / item.key
        whole = path.read_bytes()
        for _ in range(20):
            content = bytearray(whole)
            for _ in range(chooser.choice([1, 1, 3])):
                content[chooser.randrange(len(content))] = chooser.choice([0, 1, 127, 128, 255, chooser.randrange(256)])
            path.write_bytes(content)
            found = read_or_refusal(tmp_path, name)
            if isinstance(found, str):
                assert str(tmp_path) in found
            else:
                assert all(0 <= token < 2**31 for ids in found for token in ids)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (Modalities, {"end_of_text": -1}),
        (Modalities, {"closing": "never"}),
        (Modalities, {"generation": 4}),
        (Modalities, {"tokens_per_file": 0}),
        (Stream, {"end_of_text": 2**31}),
        (Stream, {"end_of_text": True}),
        (Stream, {"inner_end_of_text": "drop"}),
        (Shards, {"tokens_per_shard": 0}),
        (Shards, {"tokens_per_shard": 2**31}),
        (NamedShards, {"name": "a/b"}),
        (NamedShards, {"name": "fineweb_test"}),
        (Mds, {"length": 0}),
        (Mds, {"length": 2**30}),
        (Mds, {"size_limit": 0}),
        (Mds, {"size_limit": 2**32}),
        (Mds, {"size_limit": 2**30, "compression": "gz"}),
        (Mds, {"compression": "lzma"}),
        (Mds, {"end_of_text": -1}),
        (Mds, {"end_of_text": 2**31}),
        (Mds, {"drop_last": True}),
        (Mds, {"bytes_type": "float32"}),
        (Mds, {"column": ""}),
        (Parquet, {"column": ""}),
        (Parquet, {"tokens_per_file": 0}),
        (Parquet, {"tokens_per_row_group": 2**31}),
        (Parquet, {"compression": "brotli"}),
        (Arrow, {"tokens_per_batch": -1}),
        (Arrow, {"tokens_per_file": 2**31}),
    ],
    ids=lambda of: of.__name__ if isinstance(of, type) else None,
)
def test_wrong_options_are_named(options: type[Any], values: dict[str, object]) -> None:
    with refusal(f"{next(iter(values))} is "):
        options(**values)


@pytest.mark.parametrize("name", FORMATS)
def test_a_dataset_without_documents_comes_back(name: str, tmp_path: Path, tool: Terminal) -> None:
    """The record of the export says that there is nothing, and in which format. So does it where one split is asked for."""
    flat_tokens.write_dataset(tmp_path / "made", [])
    for splits in (SPLITS, ("train",)):
        out, back = tmp_path / f"out {len(splits)}", tmp_path / f"back {len(splits)}"
        write(export_of(tmp_path / "made", name, {}, splits), str(out))
        opened = open_any(out)
        assert opened.format == name
        assert {split: (readable.seq_count, readable.token_count) for split, readable in opened.splits.items()} == dict.fromkeys(
            splits, (0, 0)
        )
        for format in (None, name):
            dataset = import_dataset(out, back / str(format), format)
            assert (dataset.train.seq_count, dataset.validation.seq_count) == (0, 0)
            assert dataset.manifest["provenance"]["imported"]["format"] == name
        tool.out("stats", out)
        tool.out("verify", out, "--full")


def test_what_is_no_record_of_an_empty_export_is_passed_over(tmp_path: Path) -> None:
    for content in ("{", "{}", "[]", '{"parts": 0}', '{"parts": 0, "format": "none", "splits": []}', '{"parts": 1}'):
        (tmp_path / ".export").mkdir(exist_ok=True)
        (tmp_path / ".export/export.json").write_text(content)
        with refusal("in none of the formats that are known by their content"):
            open_any(tmp_path)
