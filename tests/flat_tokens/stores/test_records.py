"""JSON documents of a store: what they are read by, and its limits."""

import pytest

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import MAX_DEPTH, MAX_RECORD_BYTES, Store, json_object, read_json, read_record
from tasks.groups import read_group
from tasks.output import leases
from tasks.shards.receipts import load_shard, receipt_key
from tests.refusal import refusal


def deep(levels: int) -> bytes:
    return b'{"a": ' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (deep(MAX_DEPTH + 1), "is JSON nested deeper than 100 levels"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "is JSON nested deeper than 100 levels"),
        (deep(100_000), "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"a": "\\ud800"}', "is not JSON .*surrogates"),
        (b'{"\\uDFFF": 1}', "is not JSON .*surrogates"),
        (b'{"a": "\xed\xa0\x80"}', "is not JSON .*utf-8"),
        (b'{"a": 1', "is not JSON"),
    ],
)
def test_what_is_none_of_our_documents_is_an_error_with_its_name(data, words):
    with refusal(f"^here: {words}"):
        json_object(data, "here")


def test_documents_that_are_only_unusual_are_read():
    assert json_object(deep(MAX_DEPTH), "here")["a"]
    assert json_object(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}', "here") == {"a": "\U0001f600"}


@pytest.mark.parametrize("place", ["{}/records", "memory://{}"])
def test_a_record_is_read_up_to_a_size(tmp_path, place):
    store = Store.at(place.format(tmp_path))
    store.put("a.json", b'{"a": 1}')
    store.put("empty", b"")
    assert read_json(store, "a.json", 8) == {"a": 1}
    assert read_record(store, "empty") == b""
    with refusal(rf"{store.path('a.json')}: is larger than a thing may be \(7 bytes\)\.$"):
        read_json(store, "a.json", 7, "a thing")
    with pytest.raises(FileNotFoundError):
        read_json(store, "b.json")


def test_the_error_names_the_setting(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)  # a hole
    with refusal(r"larger than a record may be \(\d+ bytes\)\. Set FLAT_TOKENS_MAX_RECORD_BYTES to read"):
        read_manifest(Store.at(tmp_path))


def test_a_record_nested_deep_is_no_group_and_no_shard_and_a_lease_that_is_kept(tmp_path):
    root = Store.at(tmp_path)
    for key in (group := "_groups/0/group.json", receipt_key("0"), lease := "_running/build-0.json"):
        root.put(key, deep(100_000))
    with refusal(f"{tmp_path}/{group}: is not JSON"):
        read_group(root, "0")
    assert load_shard(root, "0") is None
    assert leases._is_live(root, lease)
