"""Documents packed into rows: torchtune's packs to the letter, closer ones, masks of attention, and the kept index."""

import dataclasses
import itertools
import json
import pickle
import shutil
import tracemalloc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flat_tokens
from flat_tokens import FillInMiddle, FlatTokens, TokenBatch, write_dataset
from flat_tokens.rows import packing_index
from flat_tokens.rows.packing import PackedDocumentsView
from tests.examples import examples
from tests.flat_tokens.rows.rows_by_number import PACKS
from tests.flat_tokens.rows.test_crop import assert_packs
from tests.made import split_of, write_sequences
from tests.refusal import refusal

NAMES = ("tokens", "labels", "input_pos", "document_ids", "document_range")


def counted(lengths: list[int]) -> list[list[int]]:
    """Tokens count 1, 2, 3, ... through all documents."""
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(size)] for size in lengths]


def write(path: Path, lengths: list[int]) -> FlatTokens:
    return flat_tokens.open(write_sequences(path, counted(lengths))).train


def in_memory(lengths: list[int]) -> FlatTokens:
    return split_of(counted(lengths))


@pytest.fixture
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is true of a few documents is then true of millions: every boundary between two windows is met."""
    monkeypatch.setattr("flat_tokens.rows.views.SEQUENCES_AT_A_TIME", 3)
    monkeypatch.setattr(packing_index, "PARTS_AT_A_TIME", 4)


Piece = tuple[int, int, int]
"""Document, offset, size."""


def greedy_packs(pieces: Iterable[Piece], length: int, max_packs: int | None = None) -> list[list[Piece]]:
    """torchtune's packs: pieces go to the open pack in order; when one is too much for it, the pack is closed. ValueError for one
    that is longer than a pack, unless *max_packs* packs are closed before.
    """
    packs = [[]]
    for piece in pieces:
        if piece[2] > length:
            raise ValueError(piece)
        if filling([*packs[-1], piece]) > length:
            packs.append([])
        packs[-1].append(piece)
        if len(packs) - 1 == max_packs:
            break
    return [pack for pack in packs[:max_packs] if filling(pack)]


def filling(pack: list[Piece]) -> int:
    return sum(size for *_, size in pack)


def pieces_of(lengths: list[int], length: int | None = None) -> Iterator[Piece]:
    """Documents, cut where a pack of *length* ends."""
    before = 0
    for document, size in enumerate(lengths):
        cuts = range(-before % length or length, size, length) if length else ()
        for low, high in itertools.pairwise([0, *cuts, size]):
            yield document, low, high - low
        before += size


def placed(packs: list[list[Piece]]) -> list[list[tuple[int, int]]]:
    """Documents and offsets of the pieces that have a token."""
    return [[piece[:2] for piece in pack if piece[2]] for pack in packs]


def packs_of(view: PackedDocumentsView) -> list[list[Any]]:
    return [[pack[name].tolist() for name in ("tokens", "labels", "input_pos", "seq_lens", "document_ids")] for pack in view]


def test_the_packs_of_the_real_class(reference):
    cases = json.loads((reference / "torchtune/packs.json").read_text())
    for case in cases:
        view = in_memory(case["lengths"]).packed_documents(
            case["max_seq_len"], split_across_pack=case["split_across_pack"], max_packs=case["max_packs"]
        )
        assert [pack[:4] for pack in packs_of(view)] == [[*pack.values()] for pack in case["packs"]]
    assert len(cases) == 40


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int]:
    """(lengths of documents, of packs): many exact fits and empty documents, some documents of several packs."""
    length, longest = draw(st.integers(1, 9)), draw(st.sampled_from([1, 3]))
    some = st.one_of(st.sampled_from([0, 1, length]), st.integers(0, length), st.integers(0, longest * length))
    return draw(st.lists(some, max_size=25)), length


@pytest.mark.usefixtures("_small_windows")
@given(packings(), st.booleans(), st.none() | st.integers(0, 8), st.sampled_from([0, -1, 2**31 - 1]))
@example(([0, 5, 0, 0, 5], 5), True, None, 0)
@example(([2, 2, 0, 4, 9], 4), True, 2, 0)
@example(([0, 0, 5, 0, 0, 5], 5), False, None, 0)
@example(([4, 4, 4, 1, 1, 1, 1, 2, 1], 9), False, None, 0)
@examples(450)
def test_packs_are_torchtunes(sizes, is_split, max_packs, padding_idx):
    lengths, length = sizes
    make = partial(in_memory(lengths).packed_documents, length)
    limits = {"split_across_pack": is_split, "max_packs": max_packs, "padding_idx": padding_idx}
    try:
        packs = greedy_packs(pieces_of(lengths, length if is_split else None), length, max_packs)
    except ValueError:
        with refusal(f"but a pack has {length}"):
            make(**limits)
        return
    view = make(**limits)
    assert_packs(view, counted(lengths), placed(packs), lengths)
    padded = [[*(size for *_, size in pack), length - filling(pack)] for pack in packs]
    assert [pack.seq_lens.tolist() for pack in view] == [its if its[-1] else its[:-1] for its in padded]


@pytest.mark.usefixtures("_small_windows")
@given(packings())
@example(([9, 0, 0, 2, 9, 1], 4))
@examples(100)
def test_cut_documents_are_packed_as_if_they_were_not_longer(sizes):
    lengths, length = sizes
    view = in_memory(lengths).packed_documents(length, too_long="cut")
    assert packs_of(view) == packs_of(split_of([ids[:length] for ids in counted(lengths)]).packed_documents(length))


@pytest.mark.parametrize("options", [{}, {"fit": "best"}])
def test_a_document_longer_than_a_pack_is_named_with_both_numbers(options):
    tokens = in_memory([3, 7, 2])
    with refusal(r"document 1 has 7 tokens, but a pack has 6\. .* too_long='cut'"):
        tokens.packed_documents(6, **options)
    assert [7] in [pack.seq_lens.tolist() for pack in tokens.packed_documents(7, **options)]


# Closer packs


def filled_with_the_longest_that_fit(lengths: list[int], length: int) -> list[list[int]]:
    """Piece by piece: open a pack with the longest, then always add the longest that fits, the first of equal ones."""
    left, packs = sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)), []
    while left:
        room, pack = length, []
        while fitting := [piece for piece in left if lengths[piece] <= room]:
            left.remove(fitting[0])
            pack.append(fitting[0])
            room -= lengths[fitting[0]]
        packs.append(sorted(pack))
    return sorted(packs)


def closest_packs(pieces: list[Piece], length: int, at_a_time: int) -> list[list[Piece]]:
    """Pieces, some at a time; the pack that is filled least waits for more. The same pieces in their order, if that takes fewer
    packs.
    """
    packs, waiting = [], []
    for first in range(0, len(pieces), at_a_time):
        pool = waiting + pieces[first : first + at_a_time]
        filled = [[pool[k] for k in pack] for pack in filled_with_the_longest_that_fit([size for *_, size in pool], length)]
        waiting = min(filled, key=filling)
        filled.remove(waiting)
        packs += filled
    return min(packs + [waiting] * bool(waiting), greedy_packs(pieces, length), key=len)


@pytest.mark.usefixtures("_small_windows")
@given(
    packings(),
    st.sampled_from([{"split_across_pack": True}, {"too_long": "cut"}]),
    st.integers(1, 30),
    st.sampled_from([None, 2]),
)
@example(([4, 3, 3, 4, 3, 3], 10), {"too_long": "cut"}, 4, None)
@example(([2, 1, 1, 2, 1, 2, 1, 1], 3), {"too_long": "cut"}, 30, None)
@examples(400)
def test_closer_packs_hold_what_the_rule_says(monkeypatch, sizes, more, at_a_time, max_packs):
    """Documents whole, or in full packs and a rest."""
    monkeypatch.setattr(packing_index, "PARTS_AT_A_TIME", at_a_time)
    lengths, length = sizes
    kept = [document if "split_across_pack" in more else document[:length] for document in counted(lengths)]
    pieces = [(d, at, min(len(its) - at, length)) for d, its in enumerate(kept) for at in range(0, len(its), length)]
    view = in_memory(lengths).packed_documents(length, fit="best", max_packs=max_packs, **more)
    assert_packs(view, kept, placed(closest_packs(pieces, length, at_a_time))[:max_packs], lengths)


# Packs as a sequence

LENGTHS = [3, 0, 6, 2, 2, 1, 5, 0, 1, 4]


def test_the_types_of_a_pack():
    batch = in_memory(LENGTHS).packed_documents(6).batch([0, 2])
    assert [(name, batch[name].dtype, batch[name].shape) for name in NAMES] == [
        ("tokens", np.int32, (2, 6)),
        ("labels", np.int64, (2, 6)),
        ("input_pos", np.int32, (2, 6)),
        ("document_ids", np.int64, (2, 6)),
        ("document_range", np.int64, (2, 2)),
    ]
    assert [lengths.dtype for lengths in batch.seq_lens] == [np.int64] * 2
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.mask().dtype == np.bool_
    for options in PACKS:
        none = in_memory([0, 0]).packed_documents(6, **options).batch([])
        assert (none.tokens.shape, none.seq_lens, none.cu_seqlens.tolist(), none.max_seqlen) == ((0, 6), [], [0], 0)


def test_the_largest_token_id():
    (pack,) = split_of([[2**31 - 1, 0], [2**31 - 1]]).packed_documents(4, padding_idx=1)
    assert pack.tokens.tolist() == [2**31 - 1, 0, 2**31 - 1, 1]
    assert pack.labels.tolist() == [2**31 - 1, 0, 2**31 - 1, -100]


def test_a_pack_goes_by_names_numbers_and_as_a_dict():
    pack = in_memory(LENGTHS).packed_documents(6)[0]
    tokens, labels, *_ = pack
    assert pack["tokens"] is pack.tokens is pack[0] is tokens
    assert pack["labels"] is labels
    assert tuple(dict(pack)) == NAMES
    assert pack["seq_lens"].tolist() == pack.seq_lens.tolist() == [3, 0, 3]
    assert (pack["cu_seqlens"].tolist(), pack["max_seqlen"]) == ([0, 3, 6], 3)
    with refusal("there is no field 'token'; there are tokens, labels", KeyError):
        pack["token"]
    assert packs_of([pickle.loads(pickle.dumps(pack))]) == packs_of([pack])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length is 0"),
        ({"length": 2**31}, "up to 1073741824 tokens"),
        ({"padding_idx": 2**31}, "padding_idx is 2147483648, but tokens are int32"),
        ({"max_packs": -1}, "max_packs is -1"),
        ({"pad_to": 4}, "pad_to is 4, but it is 1 or more, and packs of 6 are a multiple of it"),
        ({"pad_to": 2, "split_across_pack": True}, "leave out split_across_pack"),
        ({"fit": "crop", "split_across_pack": True}, "fit='crop' cuts documents itself"),
        ({"fit": "crop", "too_long": "cut"}, "fit='crop' cuts documents itself"),
        ({"fit": "crop", "pad_to": 2}, "fit='crop' cuts documents itself"),
        ({"fit": "best", "on_crop": "keep"}, "on_crop is 'keep', but fit='best' crops nothing"),
        ({"fit": "crop", "on_crop": "Keep"}, "on_crop is 'Keep', but it is one of drop, keep"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with refusal(message):
        in_memory(LENGTHS).packed_documents(**{"length": 6, **options})


@pytest.mark.parametrize("options", PACKS)
def test_only_fields_that_are_named_are_computed(options):
    tokens = in_memory(LENGTHS * 20)
    whole = tokens.packed_documents(6, **options).batch([5, 3, 5])
    for field in (*NAMES, "loss_mask"):
        one = tokens.packed_documents(6, **options, fields=[field]).batch([5, 3, 5])
        assert list(one) == [field]
        assert one[field].dtype == whole[field].dtype
        assert np.array_equal(one[field], whole[field])
    without = dataclasses.replace(tokens, encoded_tokens=SimpleNamespace(length=tokens.token_count))  # type: ignore[arg-type]
    assert len(without.packed_documents(6, **options, fields=["input_pos", "document_ids"]).batch([5, 3, 5])) == 2


@pytest.mark.parametrize("length", [6, 7])
@pytest.mark.parametrize("options", PACKS)
def test_a_batch_of_many_rows_is_its_rows(options, length, monkeypatch):
    monkeypatch.setattr("flat_tokens.rows.packing.PLACES_AT_A_TIME", 20)
    monkeypatch.setattr("flat_tokens.rows.packing.FEW_PLACES", 2)
    view = in_memory(LENGTHS * 20).packed_documents(length, **options)
    batch = view.batch(range(len(view)))
    for name, array in batch._asdict().items():
        assert array.tolist() == [getattr(view[i], name).tolist() for i in range(len(view))]


def test_an_index_takes_memory_for_its_result_alone():
    """Eight bytes a pack and a window of seq_starts, be there ever so many documents."""
    tokens, window = in_memory([3] * 500_000), 65_536 * 8 * 10
    tokens.packed_documents(30)  # what is kept of the dataset is kept already
    tracemalloc.start()
    tokens.packed_documents(30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 8 * 50_000 + window


# The kept index


@pytest.fixture
def tokens(tmp_path: Path) -> FlatTokens:
    return write(tmp_path / "dataset", LENGTHS)


def kept(root: Path) -> int:
    """The number of files that are kept."""
    return len(list((root / "kept").iterdir()))


@pytest.fixture
def made_indexes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of index that are made, in order."""
    made = []
    make = packing_index.Packs.make

    def counted(tokens: FlatTokens, plan: Any) -> Any:
        made.append(plan.fit)
        return make(tokens, plan)

    monkeypatch.setattr(packing_index.Packs, "make", counted)
    return made


@pytest.mark.parametrize("options", PACKS)
def test_a_kept_index_is_mapped_and_not_made_again(tokens, tmp_path, options, made_indexes):
    expected = packs_of(tokens.packed_documents(6, **options))
    for _ in range(2):
        view = tokens.packed_documents(6, cache=tmp_path / "kept", **options)
        assert packs_of(view) == expected
        assert packs_of(pickle.loads(pickle.dumps(view))) == expected
    assert len(made_indexes) == 2
    (file,) = (tmp_path / "kept").iterdir()  # nothing half-written is left
    assert file.read_bytes()[:32].hex().startswith(file.stem.rpartition("-")[2])  # the digest that its name begins


def test_an_index_beside_its_dataset(tokens, tmp_path):
    view = tokens.packed_documents(6, cache="beside")
    assert packs_of(view) == packs_of(tokens.packed_documents(6))
    assert len(list((tmp_path / "dataset.packing").iterdir())) == 1
    flat_tokens.verify(tmp_path / "dataset", "full")


def test_a_moved_dataset_keeps_its_index_and_another_in_its_place_does_not(tmp_path, made_indexes):
    """The content is the identity, with a manifest and without one, as other writers' datasets are."""
    for described in (True, False):
        path, moved, cache = (tmp_path / f"{name} {described}" for name in ("dataset", "moved", "kept"))
        write(path, LENGTHS)
        if not described:
            (path / "manifest.json").unlink()
        flat_tokens.open(path).train.packed_documents(6, cache=cache)
        shutil.move(path, moved)
        flat_tokens.open(moved).train.packed_documents(6, cache=cache)
        assert len(made_indexes) == 1
        write(path, [*LENGTHS[:-2], 2, 3])  # as many tokens and documents
        if not described:
            (path / "manifest.json").unlink()
        other = flat_tokens.open(path).train
        assert packs_of(other.packed_documents(6, cache=cache)) == packs_of(other.packed_documents(6))
        assert len(made_indexes) == 3
        made_indexes.clear()


def test_every_setting_that_changes_packs_has_an_index_of_its_own(tokens, tmp_path):
    more = [*PACKS, {"max_packs": 2}, {"fit": "best", "split_across_pack": True}, {"too_long": "cut", "eos": 99}]
    more += [{"too_long": "cut", "bos": 98, "eos": 99}, {"pad_to": 3}, {"fit": "crop"}, {"fit": "crop", "on_crop": "keep"}]
    more += [{"too_long": "cut", "fim": FillInMiddle(0.5, 0, 95, 96, 97, seed=seed)} for seed in range(2)]
    cases = [(tokens, {"length": length, **options}) for length, options in itertools.product((6, 9), more)]
    # As many documents and tokens; and the padding, which changes no index
    cases += [(tokens.select(indices=indices), {"length": 6}) for indices in (range(10), [1, 0, *range(2, 10)])]
    for some, options in [*cases, (tokens, {"length": 6, "padding_idx": 9})]:
        view = some.packed_documents(cache=tmp_path / "kept", **options)
        assert packs_of(view) == packs_of(some.packed_documents(**options))
    assert kept(tmp_path) == len(cases) == 28


@pytest.mark.parametrize("options", PACKS)
def test_a_damaged_or_foreign_file_is_made_again(tokens, tmp_path, options, made_indexes):
    expected = packs_of(tokens.packed_documents(6, cache=tmp_path / "kept", **options))
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    other = write(tmp_path / "other", LENGTHS[::-1]).packed_documents(6, cache=tmp_path / "other kept", **options)
    assert len(other)
    (foreign,) = (tmp_path / "other kept").iterdir()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    cut = [whole[:size] for size in (0, 32, 40, 48, len(whole) - 8, len(whole) - 1)]
    for content in [*flipped, *cut, foreign.read_bytes(), bytes(len(whole)), whole + bytes(8), b"PK\3\4" + whole]:
        file.write_bytes(content)
        made_indexes.clear()
        view = tokens.packed_documents(6, cache=tmp_path / "kept", **options)
        assert packs_of(view) == expected
        assert file.read_bytes() == whole
        assert len(made_indexes) == 1


def test_where_an_index_cannot_be_kept_it_is_in_memory(tokens, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    view = tokens.packed_documents(6, cache=tmp_path / "file/kept")
    assert packs_of(view) == packs_of(pickle.loads(pickle.dumps(view))) == packs_of(tokens.packed_documents(6))
    assert "can't be kept" in caplog.text


def test_an_index_that_is_gone_is_made_again_by_who_needs_it(tokens, tmp_path):
    view = tokens.packed_documents(6, cache=tmp_path / "kept")
    assert view.__getstate__()["_index"] is None, "it is not copied to other processes"
    shutil.rmtree(tmp_path / "kept")
    assert packs_of(pickle.loads(pickle.dumps(view))) == packs_of(view)
    assert kept(tmp_path) == 1


def test_many_make_an_index_at_once(tmp_path):
    tokens = write(tmp_path / "dataset", LENGTHS * 5)
    expected = packs_of(tokens.packed_documents(6))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: tokens.packed_documents(6, cache=tmp_path / "kept"), range(16)))
    assert all(packs_of(view) == expected for view in made)
    assert kept(tmp_path) == 1


@pytest.mark.parametrize("cache", ["beside", "memory://kept"])
def test_an_index_is_kept_on_a_local_disk(cache):
    with refusal(r"memory://.*Set cache to a directory"):
        in_memory(LENGTHS).packed_documents(6, cache=cache)


# Damaged datasets


@pytest.mark.parametrize("seq_starts", [[0, 5, 3, 8], [0, 9, 9, 8], [0, 2**63, 2**64 - 1, 8], [0, 0, 99, 8]])
@pytest.mark.parametrize("options", [*PACKS, {"cache": "kept"}])
def test_entries_out_of_order_are_refused(tmp_path, monkeypatch, seq_starts, options):
    monkeypatch.chdir(tmp_path)
    batch = TokenBatch(np.arange(8, dtype=np.uint32) * 2, np.array(seq_starts, np.uint64), 7)
    write_dataset(tmp_path / "dataset", [batch])
    with refusal("seq_starts"):
        flat_tokens.open(tmp_path / "dataset").train.packed_documents(100, **options)


@pytest.mark.parametrize("options", [*PACKS, {"fit": "crop"}])
@pytest.mark.parametrize("lengths", [[1, 9, 0, 0], [10, 0, 0, 0], [0, 0, 0, 10]])
def test_entries_that_change_under_an_index_are_noticed(tmp_path, options, lengths):
    """An index of other entries gives an error or whole rows, never what memory happened to hold."""
    view = write(tmp_path / "dataset", [1, 2, 3, 4]).packed_documents(4, **options)
    other = write(tmp_path / "other", lengths)
    state = view.__dict__ | {"tokens": other, "_index": view._index._replace(tokens=other)}
    changed = PackedDocumentsView.__new__(PackedDocumentsView)
    changed.__dict__.update(state)
    for i in range(len(changed)):
        try:
            pack = changed[i]
        except ValueError as error:
            assert "seq_starts" in str(error)  # noqa: PT017
        else:
            used = pack.document_ids >= 0
            assert used.all() or options != {"fit": "crop"}
            firsts = np.concatenate([[1], 1 + np.cumsum(lengths)])
            assert (np.searchsorted(firsts, pack.tokens[used], side="right") - 1 == pack.document_ids[used]).all()


def test_labels_that_somebody_has_a_part_of_stay_as_they_are():
    packs = in_memory([1021] * 307).packed_documents(1021)
    kept = packs.batch(np.arange(307)).labels[7]
    before = kept.tolist()
    packs.batch(np.arange(307)[::-1])
    assert kept.tolist() == before
