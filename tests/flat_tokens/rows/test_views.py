"""Rows for training: packed, one document each, Megatron blocks; of numpy, torch and jax; through their loaders."""

import dataclasses
import importlib
import itertools
import pickle
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import zarr
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import FlatTokens, LayoutName
from flat_tokens.rows import frameworks
from flat_tokens.rows.loader import digest_of
from flat_tokens.rows.views import DocumentTokens, PackedTokens, block_starts
from tests.elsewhere import elsewhere
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import PACKS
from tests.flat_tokens.rows.test_masked_rows import DOCUMENTS
from tests.made import masked_split, write_sequences
from tests.refusal import refusal

NAMES = get_args(LayoutName)
LARGEST = 2**31 - 1
EXAMPLE = [[1, 2], [3, 4, 5], [6, 7, 8]]
FIELDS = ("encoded", "inputs", "targets", "is_seq_start", "segment_ids", "positions")

needs_grain = pytest.mark.needs("grain")

token_ids = st.one_of(st.integers(0, 5), st.just(LARGEST))
ragged = st.lists(st.lists(token_ids, max_size=7), max_size=9)


def split(root: Path, sequences: list[list[int]], layout: LayoutName = "mmap") -> FlatTokens:
    path = root / uuid.uuid4().hex
    return flat_tokens.open(write_sequences(path, sequences, layout=layout)).train


def split_of_lengths(root: Path, lengths: list[int]) -> FlatTokens:
    """Token i is i."""
    tokens = iter(range(sum(lengths)))
    return split(root, [[next(tokens) for _ in range(length)] for length in lengths])


def spread(split: FlatTokens) -> tuple[list[int], list[bool]]:
    """Every token's id, and whether a sequence starts with it, from the sequences."""
    ids, starts = [], []
    for sequence in split:
        ids += sequence.tolist()
        starts += [k == 0 for k in range(len(sequence))]
    return ids, starts


def fields_of(ids: list[int], starts: list[bool]) -> dict[str, list[Any]]:
    """The format's definition of every field, token by token."""
    fields = {name: [] for name in FIELDS}
    for i, (token, start) in enumerate(zip(ids, starts, strict=True)):
        fields["encoded"].append(token * 2 + start)
        fields["inputs"].append(0 if i == 0 or start else ids[i - 1])
        fields["targets"].append(token)
        fields["is_seq_start"].append(start)
        fields["segment_ids"].append(sum(starts[: i + 1]))
        fields["positions"].append(i - max([k for k in range(i + 1) if starts[k]], default=0))
    return fields


def lists(row: Any) -> dict[str, Any]:
    return {name: np.asarray(array).tolist() for name, array in dict(row).items()}


TYPES = {"encoded": "uint32", "is_seq_start": "bool", "loss_mask": "bool"}
"""Of fields that are not int32."""


def assert_rows(view: Any, rows: list[dict[str, Any]]) -> None:
    """The view has these rows, however they are asked for."""
    names = view.row_type.keys()
    assert view.__getitems__([]) == []
    for one in (view.batch([]), *itertools.islice(view, 1)):
        assert {name: str(array.dtype) for name, array in dict(one).items()} == {name: TYPES.get(name, "int32") for name in names}
    assert len(view) == len(rows)
    assert [lists(row) for row in view] == rows
    assert [lists(view[i - len(rows)]) for i in range(len(rows))] == rows
    backwards = list(range(len(rows)))[::-1]
    assert [lists(row) for row in view.__getitems__(backwards)] == rows[::-1]
    assert lists(view.batch(backwards)) == {name: [row[name] for row in rows[::-1]] for name in names}


# Packed


@given(sequences=ragged, length=st.integers(1, 9), overlap=st.integers(0, 8), layout=st.sampled_from(NAMES))
@examples(50)
@example(sequences=[], length=1, overlap=0, layout="mmap")
@example(sequences=[[LARGEST]], length=1, overlap=0, layout="zarr2")
@example(sequences=[[1, 2]], length=2, overlap=1, layout="mmap")
@example(sequences=[[], [0], [], [], [LARGEST, 0]], length=3, overlap=0, layout="compact")
def test_packed_rows_are_what_the_format_says_token_by_token(tmp_path, sequences, length, overlap, layout):
    train = split(tmp_path, sequences, layout)
    ids, starts = spread(train)
    overlap %= length
    if overlap and len(ids) < length:
        with refusal("fewer than one row"):
            train.packed(length, overlap=overlap)
        return
    rows, at = [], 0
    while at + length <= len(ids):
        rows.append(fields_of(ids[at : at + length], starts[at : at + length]))
        at += length - overlap
    assert_rows(train.packed(length, overlap=overlap), rows)


# Documents


@given(sequences=ragged, max_length=st.integers(1, 9), pad_id=st.sampled_from([0, 3, LARGEST]), layout=st.sampled_from(NAMES))
@examples(40)
def test_documents_are_what_the_format_says_token_by_token(tmp_path, sequences, max_length, pad_id, layout):
    rows = []
    for sequence in sequences:
        length = min(len(sequence), max_length)
        ids = sequence[:length] + [pad_id] * (max_length - length)
        row = fields_of(ids, [i == 0 or i >= length for i in range(max_length)])
        rows.append({**row, "length": length, "loss_mask": [i < length for i in range(max_length)]})
    assert_rows(split(tmp_path, sequences, layout).documents(max_length, pad_id), rows)


# Blocks


def megatron(documents: list[tuple[int, int]], block: int) -> list[int]:
    """The rule, word for word: documents are (offset, length)."""
    starts, cur, length = [], 0, 0
    for o, n in documents:
        if length + n < block:
            length += n
        elif length + n == block:
            starts.append(cur)
            cur, length = cur + block, 0
        else:
            starts.append(cur)
            cur, length = (cur + block, 0) if n > block else (o, n)
    return starts


@given(
    lengths=st.one_of(
        st.lists(st.integers(0, 12), max_size=40),
        st.lists(st.sampled_from([0, 1, 4, 5, 6, 11]), max_size=40),
        st.lists(st.sampled_from([0, 0, 0, 1]), max_size=60),
    ),
    block=st.integers(1, 12),
    window=st.integers(1, 9),
)
@examples(120)
def test_blocks_are_modalities_megatron_rule(tmp_path, lengths, block, window):
    """In windows of a few documents as in one: what is open at a window's end goes on in the next."""
    train = split_of_lengths(tmp_path, lengths)
    expected = megatron(list(zip(np.cumsum([0, *lengths]), lengths, strict=False)), block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flat_tokens.rows.views.SEQUENCES_AT_A_TIME", window)
        assert block_starts(train, block).tolist() == expected
    ids, starts = spread(train)
    rows = [fields_of(ids[start : start + block], starts[start : start + block]) for start in expected]
    assert_rows(train.blocks(block), rows)


def test_blocks_of_a_damaged_dataset_are_refused(tmp_path):
    root = zarr.create_group(tmp_path / "dataset")
    for name in ("train", "validation"):
        group = root.create_group(name, attributes={"max_token_id": 3})
        group.create_array("encoded_tokens", data=np.zeros(6, np.uint32))
        group.create_array("seq_starts", data=np.array([0, 4, 2, 6], np.uint64))
    found = "seq_starts says that sequence 1 is tokens 4 to 2, but there are 6 tokens"
    with refusal(f"{tmp_path}/dataset/train: {found}"):
        flat_tokens.open(tmp_path / "dataset").train.blocks(2)


# Sequences of rows


@pytest.fixture
def train(tmp_path: Path) -> FlatTokens:
    return split(tmp_path, EXAMPLE)


def three_views(train: FlatTokens) -> list[Any]:
    return [train.packed(2), train.blocks(2), train.documents(2)]


def all_views(train: FlatTokens) -> list[Any]:
    return [*three_views(train), *(train.packed_documents(30, **options) for options in PACKS)]


def test_rows_are_numbered_as_in_any_sequence(train):
    for view in all_views(train):
        assert lists(view[-1]) == lists(view[len(view) - 1]) == lists(list(view)[-1])
        for i in (len(view), -len(view) - 1, 2**40):
            with refusal(f"{train.store.url}: there is no row {i}; there are {len(view)}", IndexError):
                view[i]
            with refusal(f"there is no row {i}; there are {len(view)}", IndexError):
                view.batch(np.array([0, i]))
        for i in (1.0, "1", None, slice(2)):
            with pytest.raises(TypeError):
                view[i]


def test_numpys_integers_number_rows(tmp_path):
    """A row's number times its length does not fit the small ones."""
    train = split_of_lengths(tmp_path, [300] * 2)
    view = train.packed(2)
    for kind in (np.uint8, np.uint64):
        assert view[kind(200)].targets.tolist() == [400, 401]
        assert view.batch(np.array([200], kind)).targets.tolist() == [[400, 401]]
    assert view.batch(np.array([-100, 3], np.int8)).targets.tolist() == [[400, 401], [6, 7]]


def test_what_numbers_no_rows_is_refused(train):
    for view in all_views(train):
        for indices in ([0.0], [True], [[0]], 0, ["0"]):
            with refusal("row numbers are int64", TypeError):
                view.batch(indices)


def test_batches_start_where_jax_takes_them_over(train):
    """At multiples of 64 bytes, however many rows there are."""
    for view in three_views(train):
        batches = [view.batch([0] * n) for n in range(1, 20)]
        assert [rows.encoded.ctypes.data % 64 for rows in batches] == [0] * len(batches)


def test_threads_share_a_view(tmp_path):
    rng = np.random.default_rng(0)
    train = split(tmp_path, [rng.integers(0, 100, rng.integers(0, 30)).tolist() for _ in range(80)], "compact")
    for view in all_views(train):
        alone = [lists(row) for row in view]
        with ThreadPoolExecutor(8) as pool:
            assert [*map(lists, pool.map(view.__getitem__, [*range(len(view))] * 4))] == alone * 4


# Reads


class Counted:
    """A stored array that counts how often it is asked."""

    def __init__(self, array: Any, asked: list[str], name: str) -> None:
        self._array, self._asked, self._name = array, asked, name

    def __getattr__(self, method: str) -> Any:
        value = getattr(self._array, method)
        if not callable(value):
            return value
        return lambda *arguments: (self._asked.append(self._name), value(*arguments))[1]


def test_the_fewest_reads_that_can_do(tmp_path):
    """One for a packed row or a block, two for a document or a pack (where it is, its tokens), and no more for many at once. No
    view is made of tokens.
    """
    stored = split(tmp_path, [*EXAMPLE, []] * 20)
    asked = []
    arrays = {name: Counted(getattr(stored, name), asked, name) for name in ("encoded_tokens", "seq_starts")}
    train = dataclasses.replace(stored, **arrays)
    document = ["seq_starts", "encoded_tokens"]
    views = [(view, document) for view in (train.documents(2), *(train.packed_documents(6, **options) for options in PACKS))]
    assert set(asked) == {"seq_starts"}
    for view, reads in ((train.packed(2), document[1:]), (train.blocks(2), document[1:]), *views):
        for read, rows in ((view.__getitem__, -1), (view.batch, [0, 2, 0]), (view.__getitems__, [0, 2, 0])):
            asked.clear()
            read(rows)
            assert asked == reads


# The rows themselves


def test_any_axes_may_come_before_the_last(train):
    for view in three_views(train):
        rows = view.batch([0, 1, 1, 0])
        folded = view.row_type(*(array.reshape(2, 2, *array.shape[1:]) for array in rows))
        for name, array in dict(rows).items():
            assert np.array_equal(folded[name].reshape(array.shape), array), name


def test_a_row_is_a_mapping_and_a_named_tuple(train):
    assert repr(train.packed(8)) == f"<PackedView of {train.store.url}: 1 rows>"
    row = train.packed(8)[0]
    assert row.keys() == FIELDS
    assert {**row}.keys() == set(FIELDS)
    assert row["inputs"].tolist() == row.inputs.tolist()
    assert "inputs" in row
    assert "loss_mask" not in row
    with refusal("there is no field 'labels'; there are encoded, inputs, targets", KeyError):
        row["labels"]
    with refusal("_fields", KeyError):
        row["_fields"]
    (encoded,) = row
    assert row[0] is encoded is row.encoded
    assert row._replace(encoded=encoded[:2]).inputs.tolist() == [0, 1]
    document = train.documents(8)[0]
    assert document.keys() == ("encoded", "length", *FIELDS[1:], "loss_mask")
    assert (document[0].tolist(), document[1]) == (document.encoded.tolist(), 2)


@pytest.mark.parametrize("shape", [(100_000,), (2, 600, 512), (700_000, 1), (5, 0), (0, 5)])
def test_inputs_of_many_tokens_are_those_of_each(shape):
    """They are computed piece by piece, across rows; strides make no difference."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, LARGEST, shape, np.uint32, endpoint=True)
    starts = rng.random(shape) < 0.1
    before = np.zeros(shape, np.uint32)
    before[..., 1:] = np.where(starts[..., 1:], 0, ids[..., :-1])
    encoded = ids << 1 | starts
    for rows in (encoded, np.asfortranarray(encoded), np.repeat(encoded, 2, -1)[..., ::2]):
        assert np.array_equal(PackedTokens(rows).inputs, before.view(np.int32))
        assert np.array_equal(PackedTokens(rows).targets, ids.view(np.int32))


def test_memory_is_used_again_when_nothing_refers_to_it():
    """However an array is cut and viewed, what is kept of it stays as it is."""
    rows = PackedTokens(np.arange(1 << 20, dtype=np.uint32).reshape(512, -1))
    kept = [rows.targets[3, 5:9], rows.inputs.reshape(-1)[-4:].view(np.uint8), memoryview(rows.targets)[0:2]]
    before = [np.array(part) for part in kept]
    address, other = rows.targets.ctypes.data, PackedTokens(rows.encoded + 7)
    addresses = []
    for _ in range(10):
        targets, inputs = other.targets, other.inputs
        assert not np.shares_memory(targets, inputs)
        addresses += [targets.ctypes.data, inputs.ctypes.data]
        del targets, inputs
    assert all(np.array_equal(part, was) for part, was in zip(kept, before, strict=True))
    assert len(set(addresses)) == 2
    assert address in addresses


def test_bits_in_int32_are_as_good(train):
    """Collectives and devices that have no uint32 may carry it as int32; other types are a mistake."""
    row = train.packed(8)[0]
    assert lists(PackedTokens(row.encoded.view(np.int32)))["inputs"] == row.inputs.tolist()
    with refusal("uint32, or its bits as int32, but these are int64", TypeError):
        _ = PackedTokens(row.encoded.astype(np.int64)).inputs
    with refusal("an array of numpy, torch or jax, but this is a list", TypeError):
        _ = PackedTokens([3, 4]).positions


def test_fields_make_rows_plain_dicts(train):
    view = train.packed(4, fields=("targets", "inputs"))
    assert type(view[0]) is dict
    assert list(view[0]) == ["targets", "inputs"]
    assert lists(view.batch([1, 0])) == {"targets": [[5, 6, 7, 8], [1, 2, 3, 4]], "inputs": [[0, 0, 6, 7], [0, 1, 0, 3]]}
    assert (
        [lists(row) for row in view.__getitems__([1])] == [lists(view[1])] == [{"targets": [5, 6, 7, 8], "inputs": [0, 0, 6, 7]}]
    )
    assert lists(train.documents(3, fields=["length", "loss_mask"])[0]) == {"length": 2, "loss_mask": [True, True, False]}
    assert lists(train.blocks(3, fields=["encoded"])[1]) == {"encoded": [7, 8, 10]}
    every = [*view.row_type.keys(), *view.row_type._on_request]
    assert list(train.packed(4, fields=every)[0]) == every


# Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda train: train.packed(4, eos=-1), "eos is -1, but token ids are 0 to"),
        (lambda train: train.documents(4, bos=2**31), f"bos is {2**31}"),
        (lambda train: train.packed(0), "length is 0, but a row has at least one token"),
        (lambda train: train.blocks(-3), "length is -3, but"),
        (lambda train: train.documents(0), "max_length is 0, but"),
        (lambda train: train.packed(4, overlap=4), "overlap is 4, but it is from 0 to 3 where length is 4"),
        (lambda train: train.packed(4, overlap=-1), "overlap is -1, but"),
        (lambda train: train.packed(9, overlap=1), "8 tokens are fewer than one row of 9"),
        (lambda train: train.documents(4, -1), "pad_id is -1, but token ids are 0 to 2147483647"),
        (lambda train: train.documents(4, 2**31), "pad_id is 2147483648, but"),
        (
            lambda train: train.packed(4, fields=["inputs", "labels"]),
            "fields is .*'labels'.*one or more of encoded, inputs, targets",
        ),
        (lambda train: train.packed(4, fields=["loss_mask"]), "is_seq_start, segment_ids, positions$"),
        (lambda train: train.documents(4, fields=()), "positions, loss_mask$"),
    ],
)
def test_settings_that_cannot_be_are_refused(train, make, message):
    with refusal(message):
        make(train)


def test_lengths_are_integers(train):
    for make in (train.packed, train.blocks, train.documents):
        with pytest.raises(TypeError):
            make(2.0)  # type: ignore[arg-type]
        assert len(make(np.uint8(2))[0].encoded) == 2


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_that_is_not_there(train, monkeypatch, framework):
    monkeypatch.setitem(sys.modules, framework, None)
    with refusal(f"framework='{framework}' needs .*pip install {framework}", ImportError):
        train.packed(4, framework=framework)


# torch and jax, each in an interpreter of its own: they start threads, and tests in this one fork


@pytest.fixture
def ragged_split(tmp_path: Path) -> FlatTokens:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 2**31, rng.integers(0, 9)).tolist() for _ in range(60)]
    return split(tmp_path, [[LARGEST], *sequences])


def same(rows: Any, expected: Any) -> None:
    """Equal arrays of equal types under equal names, of whatever framework. What is int64 is int32 in jax."""
    rows, expected = dict(rows), dict(expected)
    assert rows.keys() == expected.keys()
    for name, array in expected.items():
        kinds = str(rows[name].dtype).removeprefix("torch."), str(array.dtype)
        assert len({*kinds}) == 1 or kinds == ("int32", "int64"), name
        assert np.array_equal(np.asarray(rows[name]), array), name


def framework_rows(train: FlatTokens, framework: Any) -> None:
    kind = importlib.import_module("torch").Tensor if framework == "torch" else importlib.import_module("jax").Array
    masked = masked_split(DOCUMENTS)
    for tokens, fields in itertools.product(
        (train, masked), (None, ("inputs", "is_seq_start", "positions"), ("loss_mask", "labels"))
    ):
        if fields and "labels" in fields and tokens is train:
            continue
        packs = partial(tokens.packed_documents, 4, too_long="cut")
        for make in (partial(tokens.packed, 3), partial(tokens.blocks, 3), partial(tokens.documents, 5), *[packs] * (not fields)):
            view, made = make(fields=fields), pickle.loads(pickle.dumps(make(fields=fields, framework=framework)))
            indices = [1, 0, 1]
            expected, rows = view.batch(indices), made.batch(indices)
            assert all(isinstance(array, kind) for array in dict(rows).values())
            same(rows, expected)
            same(made[1], view[1])
            for row, wanted in zip(made.__getitems__(indices), view.__getitems__(indices), strict=True):
                same(row, wanted)
            if fields is None:
                assert np.array_equal(np.asarray(rows.mask()), expected.mask())
                assert rows.padded_cu_seqlens(9).tolist() == expected.padded_cu_seqlens(9).tolist()
                assert (rows.cu_seqlens.tolist(), rows.max_seqlen) == (expected.cu_seqlens.tolist(), expected.max_seqlen)
                if framework == "jax":
                    as_trees(rows, expected)
            if make is packs:
                assert [sizes.tolist() for sizes in rows.seq_lens] == [sizes.tolist() for sizes in expected.seq_lens]
    encoded = train.packed(16).batch([1, 2]).encoded
    found: Any = frameworks.converted(encoded, framework)
    address = found.data_ptr() if framework == "torch" else found.unsafe_buffer_pointer()
    assert address == encoded.ctypes.data, "it is the batch, not a copy"


def as_trees(rows: Any, expected: Any) -> None:
    """A row is a pytree: it goes into jit and vmap as it is, four bytes a token, and its fields are computed there."""
    import jax

    assert len(jax.tree.leaves(rows)) == len(rows)
    if type(rows) is DocumentTokens:
        same(jax.vmap(dict)(rows), expected)
    same(jax.jit(dict)(rows), expected)
    assert np.array_equal(jax.jit(lambda its: its.mask())(rows), expected.mask())


@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("torch", "jax")])
def test_arrays_of_frameworks(ragged_split, framework):
    elsewhere(framework_rows, ragged_split, framework)


def rows_through_grain(train: FlatTokens) -> None:
    import grain

    for view in (train.documents(5), train.packed(16, fields=("inputs", "targets"))):
        batches = grain.MapDataset.source(view).batch(4)
        assert len(batches) == -(-len(view) // 4)
        for k in range(len(view) // 4):
            assert type(batches[k]) is type(view[0])
            same(batches[k], view.batch(np.arange(4) + 4 * k))


def loaders_through_grain(train: FlatTokens) -> None:
    import grain

    mixture = flat_tokens.Mixture({"a": (train.packed(16), 2), "b": (train.packed(16), 1)}, 4, 1)
    for loader in (flat_tokens.ShuffledLoader(train.packed(16), 4, 1, epochs=2).shard(1, 2), mixture):
        dataset = loader.map_dataset()
        assert isinstance(dataset, grain.MapDataset)
        steps = sys.maxsize if loader is mixture else len(loader)
        assert len(dataset) == steps
        for step in (0, 3, min(steps, 10**12) - 1):
            assert loader.digest(step) == digest_of(dataset[step])
        one, other = (iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=3))) for _ in range(2))
        for _ in range(4):
            next(one)
        other.set_state(one.get_state())
        assert digest_of(next(other)) == loader.digest(4)


@pytest.mark.slow
@needs_grain
def test_grain_batches_rows_and_takes_loaders_as_datasets_of_batches(ragged_split):
    elsewhere(rows_through_grain, ragged_split)
    elsewhere(loaders_through_grain, ragged_split)


def test_without_grain_the_error_says_what_to_install(ragged_split, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with refusal(r"map_dataset\(\) needs the package 'grain'", ModuleNotFoundError):
        flat_tokens.ShuffledLoader(ragged_split.packed(4), 2).map_dataset()
