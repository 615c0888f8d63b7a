"""Slices into token shards: what a shard holds, that slicing does not change it, and how it gets its name; what makes a shard the
same shard, and which receipts are believed.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tasks.parts.stored
import tasks.shards.receipts
import tasks.shards.recipe
import tasks.shards.write
import tasks.shards.writers
from flat_tokens.arrays.layouts import ArraySpec, Layout
from flat_tokens.columns import Columns, Part
from flat_tokens.stores.store import Store
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.models import Slice, SourceFile, TokenShard, digest_of
from tasks.output.leases import Workspace, attempt
from tasks.output.paths import CACHE, QUARANTINE, STAGING
from tasks.shards.receipts import load_shard, put_aside, read_receipt, receipt_json, repairing, without_receipt, write_shard
from tasks.shards.recipe import Recipe
from tasks.shards.write import fetching_ahead, store_shard, tokenize_or_load, tokenize_slice
from tasks.shards.writers import ShardColumns
from tasks.tokenize.tokenizers import load_tokenizer
from tests.calls import before_each_call
from tests.refusal import refusal
from tests.slices import changed, range_of_slice, slices_of
from tests.sources import write_rows
from tests.tasks.test_config import token_shard

SMALL = Layout("mmap", ArraySpec("uint32", "token", 3, 64, 16, None), ArraySpec("uint64", "sequence", 3, 16, 4, 3))


@pytest.fixture(autouse=True)
def _small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few documents make many stored objects."""
    for module in (tasks.parts.stored, tasks.shards.writers):
        monkeypatch.setattr(module, "SHARD_LAYOUT", SMALL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workspace]:
    with attempt(Store.at(tmp_path / "out"), tmp_path, "build") as place:
        yield place


def facts(shard: TokenShard | None) -> dict[str, Any] | None:
    """A shard as its receipt has it: there a tuple is a list."""
    return None if shard is None else shard.model_dump(mode="json")


@pytest.fixture
def slices(tmp_path: Path, place: Workspace) -> tuple[Slice, Recipe, Workspace]:
    """A slice of five documents, its recipe, and where it is stored."""
    write_rows(tmp_path / "in/a.jsonl", [{"text": f"document {i}", "id": i} for i in range(5)])
    source, tokenizer = Source(path=str(tmp_path / "in"), id_column="id"), TokenizerConfig(name="bytes")
    (found,) = resolve_source(source, 0).files
    (part,) = slices_of(fetch_file(found, (source,), Path(place.staging)), source, 1 << 20)
    digest = load_tokenizer(tokenizer).digest
    recipe = Recipe(sources=(source,), tokenizer=tokenizer, tokenizer_digest=digest, fast=False, documents=DocumentPolicy())
    return part, recipe, place


def make_shard(part: Slice, recipe: Recipe, place: Workspace) -> TokenShard:
    return store_shard(tokenize_or_load(part, recipe, place), place)


def tree(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_shard_survives_a_power_loss_before_it_gets_its_name(slices, monkeypatch):
    """Every file and directory of it: of a shard under its name, each object is whole."""
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))
    part, recipe, place = slices
    draft = tokenize_slice(part, recipe, place)
    staged = Path(place.staging) / draft.key

    def check_synced(*_: object) -> None:
        assert {str(path) for path in (staged, *staged.rglob("*"))} <= synced

    with monkeypatch.context() as patch:
        renamed = before_each_call(patch, "os.rename", check_synced)
        write_shard(draft, place)
    assert renamed
    assert facts(load_shard(place.root, draft.key)) == facts(draft)


GONE = {"receipt.json": None}


@pytest.mark.parametrize(
    ("happens", "moved_to"),
    [
        # files of the shard, or all of it, that are gone, or others
        ({}, None),  # another process has just stored the same
        (GONE, None),
        ({"": None}, None),
        ({**GONE, "zarr.json": None}, STAGING),
        ({**GONE, "documents/key/zarr.json": b"{}"}, STAGING),
        ({"": b"in the way"}, QUARANTINE),
    ],
)
def test_what_is_there_already_is_taken_if_it_is_whole_else_moved_away(slices, happens, moved_to):
    """A shard without a receipt is not damaged, and goes with the staging: nobody counts on it."""
    part, recipe, place = slices
    root = place.root
    shard = make_shard(part, recipe, place)
    before = tree(Path(root.path(CACHE)))
    draft = tokenize_slice(part, recipe, place)
    for name, content in happens.items():
        path = Path(root.path(f"{CACHE}/{shard.key}"), name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if content is not None:
            path.write_bytes(content)
        elif not name:
            path.mkdir()
    assert write_shard(draft, place) == shard
    assert tree(Path(root.path(CACHE))) == before
    assert not (Path(place.staging) / shard.key).exists()
    assert bool(list(Path(place.staging).glob(f"{shard.key}.former-*"))) == (moved_to == STAGING)
    assert bool(list(Path(root.path(QUARANTINE)).glob("*-*"))) == (moved_to == QUARANTINE)


def test_an_object_store_gets_the_receipt_last(slices, monkeypatch):
    """And nothing of the staging is left on this machine."""
    part, recipe, here = slices
    place = here._replace(root=Store.at("memory://test-shards", here.staging))
    order = []
    for way in ("create", "upload"):
        before_each_call(
            monkeypatch, f"flat_tokens.stores.store.Store.{way}", lambda store, key, *_: store.is_local or order.append(key)
        )
    try:
        shard = make_shard(part, recipe, place)
        assert order == [*(stored.key for stored in shard.objects), "receipt.json"]
        assert not list(Path(here.root.root).glob(f"{STAGING}/*/*/{shard.key}"))
    finally:
        place.root.remove("")


def test_a_worker_whose_step_is_of_another_version_takes_no_work(slices):
    part, recipe, place = slices
    documents = DocumentPolicy.model_validate({"steps": [{"use": "length", "min_bytes": 1}]})
    (described,) = documents.opened().described
    there = recipe.model_copy(update={"documents": documents, "steps": ({**described, "version": "0"},)})
    with (
        refusal(r"step 'length' on .* is of version 1, the build's of 0. Give every machine the same"),
        fetching_ahead([part], there, place, ()),
    ):
        pass


def test_kept_columns_are_rewritten_if_a_later_row_is_of_another_kind(tmp_path):
    store, values = Store.at(tmp_path), [1, None, 0.5]
    with ShardColumns(store) as columns:
        for value, kind in zip(values, ("int64", "int64", "float64"), strict=True):
            columns.append(pa.record_batch({"n": [value]}), {"n": kind})
    assert [stored.key for stored in columns.objects] == [tasks.parts.stored.COLUMNS]
    part = Part(tasks.parts.stored.COLUMNS, 0, 3)
    assert Columns(store, {"n": "float64"}, (part,)).take(np.arange(3), ["n"]).column(0).to_pylist() == values


FILE = SourceFile(source=0, name="a.parquet", location="/data/a.parquet", size=100, sha256="ab" * 32, format="parquet")
PART = range_of_slice(FILE, 2, 5, 1000)
SOURCE = Source(name="one", path="/data", text_column="text")
RECIPE = Recipe(
    sources=(SOURCE,),
    tokenizer=TokenizerConfig(name="bytes"),
    tokenizer_digest="cd" * 32,
    fast=False,
    documents=DocumentPolicy(),
)


def with_file(**changes: Any) -> Slice:
    return changed(PART, file=FILE._replace(**changes))


def with_recipe(**changes: Any) -> Recipe:
    return RECIPE.model_copy(update=changes)


def with_source(**changes: Any) -> Recipe:
    return with_recipe(sources=(SOURCE.model_copy(update=changes),))


def with_steps(*steps: dict[str, Any]) -> Recipe:
    documents = DocumentPolicy.model_validate({"steps": steps})
    facts = {"documents": documents, "steps": documents.opened().described}
    return checked(RECIPE, **facts)


def checked(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe.model_validate({**{name: getattr(recipe, name) for name in Recipe.model_fields}, **changes})


def key_of(of: Any) -> str:
    """The key of another slice, of one by another recipe, or of both."""
    part, recipe = of if type(of) is tuple else (of, RECIPE) if isinstance(of, Slice) else (PART, of)
    return recipe.key(part)


def test_every_ingredient_that_changes_a_shards_bytes_changes_its_key():
    """No two of these have the same."""
    ways = [
        PART,
        with_file(sha256="ac" * 32),
        with_file(format="arrow"),
        changed(PART, start=1),
        changed(PART, stop=6),
        changed(PART, rows=(0, 10)),
        with_source(text_column="body"),
        with_source(id_column="id"),
        with_source(document_separator="\n"),
        with_source(delimiter=";"),
        with_source(quotes="none"),
        with_file(line_ends="crlf"),
        with_recipe(tokenizer_digest="ce" * 32),
        with_recipe(documents=DocumentPolicy(on_bad="skip")),
        with_recipe(documents=DocumentPolicy(on_bad="replace")),
        with_recipe(documents=DocumentPolicy(empty="skip")),
        with_recipe(documents=DocumentPolicy(max_bytes=1000)),
        with_recipe(engine="reference"),
        with_steps({"use": "length", "min_bytes": 1}),
    ]
    assert len({*map(key_of, ways)}) == len(ways)


@pytest.mark.parametrize(
    "steps",
    [
        [{"use": "length", "min_bytes": 1, "name": "short"}],
        [{"use": "pattern", "drop": "a"}],
        [{"use": "length", "min_bytes": 1}, {"use": "normalize"}],
    ],
)
def test_steps_are_an_ingredient_of_slices_and_segments(steps):
    """So is the version, of which nobody can be without."""
    one = with_steps({"use": "length", "min_bytes": 1})
    assert len({recipe.key(PART) for recipe in (RECIPE, one, with_steps(*steps))}) == 3
    assert len({recipe.of_segments(PART) for recipe in (RECIPE, one, with_steps(*steps))}) == 3
    newer = one.model_copy(update={"steps": ({**one.steps[0], "version": "2"},)})
    assert newer.key(PART) != one.key(PART)
    assert newer.of_segments(PART) != one.of_segments(PART)
    with refusal("there are 1 steps, and versions of 0"):
        checked(one, steps=())


def test_keys_are_what_they_were_while_the_formats_semantics_are(monkeypatch):
    """The literals were made by the release before there were steps."""
    assert RECIPE.key(PART) == "fa915e9dfe165c9c6f7f683db4a8084b291be05c83dc96090c111aeb1b8c7241"
    assert RECIPE.of_segments(PART).decode() == "60af61cb2a2f68215e29e77e0d060d0459c84e18f2c34f3056dce734e9928fdb"
    before = RECIPE.key(PART)
    monkeypatch.setattr(tasks.shards.recipe, "FORMAT_SEMANTICS", "next")
    assert RECIPE.key(PART) != before


@pytest.mark.parametrize(
    "of",
    [
        with_file(name="b.parquet"),
        with_file(location="/elsewhere/a.parquet"),
        with_file(stamp=(1, 2, 3, 4)),
        with_file(split="validation"),
        (with_file(source=1), RECIPE.model_copy(update={"sources": (with_source(text_column="x").sources[0], SOURCE)})),
        changed(PART, text_bytes=999),
        with_source(name="two", path="/moved", format="parquet"),
        with_source(validation_split="test"),
        (PART, RECIPE.model_copy(update={"tokenizer": TokenizerConfig(name="the same by another name", engine="reference")})),
        with_recipe(fast=True),
    ],
)
def test_nothing_else_is_an_ingredient(of):
    """No path, name, time, engine or split."""
    assert key_of(of) == RECIPE.key(PART)


def shard_of(key_inputs: dict[str, Any], **changes: Any) -> TokenShard:
    return token_shard(key=digest_of(key_inputs), inputs=key_inputs, **changes)


def stored(root: Store, shard: TokenShard) -> TokenShard:
    """A shard with one object, stored with its receipt."""
    store = root / CACHE / shard.key
    whole = shard.model_copy(update={"objects": (store.put("tokens/c/0", b"tokens"),)})
    store.put("receipt.json", receipt_json(whole))
    return whole


def test_no_bit_of_a_receipt_can_flip_into_another_shard():
    """Every single one: the receipt is refused, or it says the same (a space that became another is no harm)."""
    shard = shard_of({"file": ["ab", "jsonl"], "range": [0, 9, None]}, objects=[("tokens/c/0", 6, "ab" * 32)])
    data = receipt_json(shard)
    assert read_receipt(data) == shard
    for at in range(8 * len(data)):
        spoiled = bytearray(data)
        spoiled[at // 8] ^= 1 << at % 8
        try:
            found = read_receipt(bytes(spoiled))
        except ValueError:
            continue
        assert found == shard, f"bit {at}: {bytes(spoiled)!r}"


def test_a_stored_shard_is_found_and_an_absent_or_damaged_one_is_not(root):
    shard = stored(root, shard_of({"file": "ab"}))
    assert load_shard(root, shard.key) == shard
    assert load_shard(root, "0" * 64) is None
    assert not list((root / QUARANTINE).listing())
    store = root / CACHE / shard.key
    store.put("tokens/c/0", b"tokenz")
    assert load_shard(root, shard.key) is None
    assert not store.exists("receipt.json")


def test_shards_without_receipts_are_told_in_order(root, monkeypatch):
    monkeypatch.setattr(tasks.shards.receipts, "RECEIPTS_AT_ONCE", 3)
    keys = [digest_of(i) for i in range(10)]
    assert without_receipt(root, keys) == keys
    for key in keys[::2]:
        (root / CACHE / key).put("receipt.json", b"{}")
    (root / CACHE / keys[1]).put("encoded_tokens/c/0", b"tokens")
    assert without_receipt(root, keys) == keys[1::2]
    assert without_receipt(root, []) == []


def test_what_another_process_has_just_mended_is_not_put_aside(tmp_path, monkeypatch):
    """Between seeing the damage and putting it aside, it is looked at again."""
    shard = stored(Store.at(tmp_path), shard_of({"file": "ab"}))
    path = tmp_path / CACHE / shard.key / "tokens/c/0"
    path.write_bytes(b"damage")
    before_each_call(monkeypatch, "tasks.shards.receipts.repairing", lambda _: path.write_bytes(b"tokens"))
    assert load_shard(Store.at(tmp_path), shard.key) == shard
    assert path.read_bytes() == b"tokens"


def test_one_repairs_at_a_time(tmp_path):
    root = Store.at(tmp_path)
    entered = threading.Event()

    def repair() -> None:
        with repairing(root):
            entered.set()

    other = threading.Thread(target=repair)
    with repairing(root):
        other.start()
        assert not entered.wait(0.2)
    other.join()
    assert entered.is_set()


def test_every_damaged_shard_is_kept(tmp_path):
    """Damage may come again; and what is not there cannot be put aside."""
    root = Store.at(tmp_path)
    key = "ab" * 32
    for content in (b"1", b"2"):
        (root / CACHE / key).put("object", content)
        with repairing(root):
            put_aside(root, key)
            put_aside(root, key)
    kept = sorted(path.read_bytes() for path in (tmp_path / QUARANTINE).glob(f"{key}-*/object"))
    assert kept == [b"1", b"2"]
