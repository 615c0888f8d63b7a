"""Slices into token shards: what a shard holds, that slicing does not change it, and how it gets its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import tasks.parts.stored
import tasks.shards.write
import tasks.shards.writers
from flat_tokens.arrays.layouts import ArraySpec, Layout
from flat_tokens.checker import check_split
from flat_tokens.columns import Columns, Part
from flat_tokens.reader import open_split
from flat_tokens.stores.store import Store
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.models import Slice, TokenShard
from tasks.output.leases import Workspace, attempt
from tasks.output.paths import CACHE, QUARANTINE, STAGING, shard_key
from tasks.parts.opening import open_shard
from tasks.rows import KEY, ROW
from tasks.shards.receipts import load_shard, write_shard
from tasks.shards.recipe import Recipe
from tasks.shards.write import fetching_ahead, store_shard, tokenize_or_load, tokenize_slice
from tasks.shards.writers import ShardColumns
from tasks.tokenize.tokenizers import load_tokenizer
from tests.refusal import refusal
from tests.slices import slices_of

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


class Held(NamedTuple):
    """All that a run of shards holds, by documents; rows counted from the file's first."""

    texts: list[bytes]
    keys: list[int]
    rows: list[int]


def prepared(source: Source, place: Workspace, slice_bytes: int, **policy: Any) -> tuple[list[Slice], Recipe]:
    files = [fetch_file(found, (source,), Path(place.staging)) for found in resolve_source(source, 0).files]
    slices = [part for file in files for part in slices_of(file, source, slice_bytes)]
    tokenizer = TokenizerConfig(name="bytes")
    digest = load_tokenizer(tokenizer).digest
    recipe = Recipe(
        sources=(source,),
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        fast=False,
        documents=DocumentPolicy(**policy),
    )
    return slices, recipe


def held(shards: list[TokenShard], place: Workspace) -> Held:
    """What the shards hold, decoded and checked."""
    all_held, first_row = Held([], [], []), 0
    for shard in shards:
        tokens, documents = open_split(place.root / shard_key(shard.key)), open_shard(place.root, shard)
        assert list(check_split(tokens)) == []
        assert (tokens.seq_count, tokens.token_count) == (shard.written, shard.token_count)
        assert shard.max_token_id == max((int(tokens.sequence(i).max(initial=0)) for i in range(shard.written)), default=0)
        all_held.texts.extend(bytes((tokens.sequence(i) - 1).astype(np.uint8)) for i in range(shard.written))
        all_held.keys.extend(documents.fact(KEY).tolist())
        all_held.rows.extend((documents.fact(ROW) + np.uint64(first_row)).tolist())
        first_row += shard.rows
    return all_held


def facts(shard: TokenShard | None) -> dict[str, Any] | None:
    """A shard as its receipt has it: there a tuple is a list."""
    return None if shard is None else shard.model_dump(mode="json")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": f"document {i}", "id": i}) for i in range(5)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines))
    return Source(path=str(tmp_path / "in"), id_column="id")


@pytest.fixture
def slices(source: Source, place: Workspace) -> tuple[Slice, Recipe, Workspace]:
    parts, recipe = prepared(source, place, 1 << 20)
    return parts[0], recipe, place


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
    staged, real = Path(place.staging) / draft.key, os.rename

    def rename(old: Path, new: Path) -> None:
        assert {str(path) for path in (staged, *staged.rglob("*"))} <= synced
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        write_shard(draft, place)
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
    assert facts(load_shard(root, shard.key)) == facts(shard)
    assert not (Path(place.staging) / shard.key).exists()
    assert bool(list(Path(place.staging).glob(f"{shard.key}.former-*"))) == (moved_to == STAGING)
    assert bool(list(Path(root.path(QUARANTINE)).glob("*-*"))) == (moved_to == QUARANTINE)


def test_an_object_store_gets_the_receipt_last(slices, monkeypatch):
    """And nothing of the staging is left on this machine."""
    part, recipe, here = slices
    place = here._replace(root=Store.at("memory://test-shards", here.staging))
    order = []

    def recorded(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(self: Store, key: str, *arguments: Any) -> Any:
            if not self.is_local:
                order.append(key)
            return real(self, key, *arguments)

        return write

    for way in ("create", "upload"):
        monkeypatch.setattr(Store, way, recorded(getattr(Store, way)))
    try:
        shard = make_shard(part, recipe, place)
        assert order == [*(stored.key for stored in shard.objects), "receipt.json"]
        assert held([shard], place) == held([make_shard(part, recipe, here)], here)
        assert not (Path(place.staging) / shard.key).exists()
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
