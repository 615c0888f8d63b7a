"""What makes a shard the same shard, and which receipts are believed."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.shards.receipts
import tasks.shards.recipe
from flat_tokens.stores.store import Store, is_below
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.models import Slice, SourceFile, TokenShard, digest_of
from tasks.output.paths import CACHE, QUARANTINE
from tasks.shards.receipts import load_shard, put_aside, read_receipt, receipt_json, repairing, without_receipt
from tasks.shards.recipe import Recipe
from tests.refusal import refusal
from tests.slices import changed, range_of_slice
from tests.tasks.test_config import token_shard

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


@pytest.mark.parametrize(
    "of",
    [
        with_file(sha256="ac" * 32),
        with_file(format="arrow"),
        changed(PART, start=1),
        changed(PART, stop=6),
        changed(PART, rows=(0, 10)),
        changed(PART, rows=(10, 20)),
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
    ],
)
def test_every_ingredient_that_changes_a_shards_bytes_changes_its_key(of):
    assert key_of(of) != RECIPE.key(PART)


@pytest.mark.parametrize(
    "steps",
    [
        [{"use": "length", "min_bytes": 2}],
        [{"use": "length", "max_bytes": 1}],
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


def test_keys_without_steps_are_what_they_were():
    """The literals were made by the release before there were steps."""
    assert RECIPE.key(PART) == "fa915e9dfe165c9c6f7f683db4a8084b291be05c83dc96090c111aeb1b8c7241"
    assert RECIPE.of_segments(PART).decode() == "60af61cb2a2f68215e29e77e0d060d0459c84e18f2c34f3056dce734e9928fdb"


def test_the_formats_semantics_are_an_ingredient(monkeypatch):
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


NAMES = st.text(max_size=5).filter(is_below)


@given(
    st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=4), st.integers(), st.none(), st.booleans())),
    st.integers(0, 2**63),
    st.lists(st.tuples(NAMES, st.integers(0, 2**40), st.text(max_size=5)), max_size=3),
)
def test_a_receipt_comes_back_as_it_was_written(inputs, count, objects):
    try:
        json.dumps([inputs, objects], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate: no digest and no name of an object holds one
    shard = shard_of(inputs, token_count=count, objects=objects)
    assert read_receipt(receipt_json(shard)) == shard


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
    believed = 0
    for at in range(8 * len(data)):
        spoiled = bytearray(data)
        spoiled[at // 8] ^= 1 << at % 8
        try:
            found = read_receipt(bytes(spoiled))
        except ValueError:
            continue
        assert found == shard, f"bit {at}: {bytes(spoiled)!r}"
        believed += 1
    assert believed < 0.1 * 8 * len(data)


def test_a_receipt_cut_off_anywhere_is_refused():
    data = receipt_json(shard_of({"file": "ab"}))
    for length in range(len(data) - 1):
        with pytest.raises(ValueError):
            read_receipt(data[:length])


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
    real = tasks.shards.receipts.repairing

    def mended_meanwhile(root: Store) -> Any:
        path.write_bytes(b"tokens")
        return real(root)

    monkeypatch.setattr(tasks.shards.receipts, "repairing", mended_meanwhile)
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
