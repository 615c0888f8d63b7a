"""The bytes of every token id of a dataset, in a record next to its manifest: with them a loss is reported in bits per byte."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from flat_tokens.annotations import Int32s, JsonFacts
from flat_tokens.arrays.layouts import to_json
from flat_tokens.manifest import check, check_format, splits_of
from flat_tokens.stores.store import Store, read_json

BYTES_RECORD = "token_bytes.json"
FORMAT, FORMAT_VERSION = "flat-tokens-token-bytes", 1
SHAPE = {"tokenizer": str, "sha256": str, "token_bytes": list}
MOST_BYTES = 1 << 16
"""Bytes of a token, at most."""


class TokenBytes(NamedTuple):
    """Bytes that each id of a tokenizer stands for: int32[highest id + 1]. Special tokens, and ids without a token, have 0.

    ``tokenizer``: its digest. ``is_exact``: the bytes of a text's tokens are those of the text. Without it a tokenizer changes
    text first, such as to small letters, or puts a space before it.
    """

    lengths: Int32s
    tokenizer: str
    is_exact: bool

    def record(self) -> bytes:
        """The record's bytes."""
        facts = {"format": FORMAT, "format_version": FORMAT_VERSION, "tokenizer": self.tokenizer, "exact": self.is_exact}
        return to_json({**facts, "sha256": self.sha256, "token_bytes": self.lengths.tolist()}, indent=None)

    @property
    def sha256(self) -> str:
        """A digest of all of it."""
        facts = f"{self.tokenizer} {self.is_exact}".encode()
        return hashlib.sha256(facts + b"\0" + self.lengths.astype("<i4").tobytes()).hexdigest()


def read_token_bytes(store: Store, manifest: JsonFacts) -> TokenBytes:
    """The record next to a dataset's manifest. FileNotFoundError if there is none; ValueError, naming it, if it is not one, or is
    of another tokenizer than the manifest's.
    """
    found = read_json(store, BYTES_RECORD)
    try:
        check_format(found, FORMAT, FORMAT_VERSION)
        check(found, SHAPE, "it")
        lengths = np.array(found["token_bytes"] or [0])
        if type(found.get("exact")) is not bool or lengths.dtype != np.int64 or lengths.ndim != 1:
            raise ValueError("it is not a number of bytes for each id")
        if lengths.min() < 0 or lengths.max() > MOST_BYTES:
            raise ValueError(f"a token has {lengths.min()} bytes, another one {lengths.max()}")
        tokenizer = (manifest.get("provenance", {}).get("tokenizer") or {}).get("digest")
        if found["tokenizer"] != tokenizer:
            raise ValueError(f"it is of the tokenizer {found['tokenizer'][:12]}, but the manifest names {str(tokenizer)[:12]}")
        totals = manifest.get("totals", {})
        largest = max((totals[split]["max_token_id"] for split in splits_of(totals) if split in totals), default=0)
        if largest >= len(lengths):
            raise ValueError(f"it ends with id {len(lengths) - 1}, but the dataset has id {largest}")
        read = TokenBytes(lengths.astype(np.int32), found["tokenizer"], found["exact"])
        if found["sha256"] != read.sha256:
            raise ValueError("it has another digest than it says")
    except (ValueError, OverflowError) as error:
        remedy = "Restore it from a copy, or remove it."
        raise ValueError(
            f"{store.path(BYTES_RECORD)}: does not tell the bytes of the dataset's tokens ({error}). {remedy}"
        ) from error
    return read
