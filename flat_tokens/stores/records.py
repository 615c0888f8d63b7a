"""JSON documents of a store: manifests, receipts, metadata. Who may write there must not be able to stop those who read."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from flat_tokens.stores import signing
from flat_tokens.stores.retry import status_of
from flat_tokens.stores.store import Store

LIMIT = "FLAT_TOKENS_MAX_RECORD_BYTES"
MAX_RECORD_BYTES = int(os.environ.get(LIMIT, 1 << 28))
"""More than a manifest of a million objects has."""

MAX_DEPTH = 100
CONTAINERS = (dict, list)
HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def read_record(store: Store, key: str, most: int = MAX_RECORD_BYTES, what: str = "a record") -> bytes:
    """A whole object of *most* bytes at most. FileNotFoundError if there is none; ValueError if it is larger, or not signed."""
    data, size = b"", store.size(key) if store.is_local else 0
    try:
        if size <= most:
            data = store.read(key) if store.is_local else _beginning(store, key, most + 1)
    except Exception as error:
        if status_of(error) != 416:  # no byte is there
            raise
    if max(size, len(data)) > most:
        remedy = f" Set {LIMIT} to read larger ones." if most == MAX_RECORD_BYTES else ""
        raise ValueError(f"{store.path(key)}: is larger than {what} may be ({most} bytes).{remedy}")
    if place := signing.place_of(store.path(key)):
        lines = store.signatures(key)  # after the record, whose signature was there before it
        if not signing.is_signed(lines, place, data):
            wrong = "the signature next to it is of something else, or by another key" if lines else "is not signed"
            remedy = "Restore it, or have it rebuilt. If you trust it: flat-tokens verify PATH --full --sign"
            raise ValueError(f"{store.path(key)}: {wrong}. {remedy}")
    return data


def _beginning(store: Store, key: str, length: int) -> bytes:
    (found,) = store.read_ranges([key], [0], [length])  # a store that keeps what it has read answers this itself
    if isinstance(found, FileNotFoundError):
        raise found
    return found


def read_json(store: Store, key: str, most: int = MAX_RECORD_BYTES, what: str = "a record") -> dict[str, Any]:
    """A JSON object, in one request. FileNotFoundError if there is none; ValueError, naming it, if it is none or too large."""
    return json_object(read_record(store, key, most, what), store.path(key))


def json_object(data: bytes, path: str) -> dict[str, Any]:
    """The JSON object in *data*. ValueError, naming the file at *path*, if it is none, nested deeper than any of ours, or has
    strings that are not Unicode.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if HALF_OF_A_PAIR.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [item for items in inner for item in items if type(item) in CONTAINERS]
        if not level:
            return value
    raise ValueError(f"{path}: is JSON nested deeper than {MAX_DEPTH} levels")
