"""``forgotten/list.json`` of an output: the documents that must not be found there any more. It has digests of their keys,
digests of their tokens, which find the same text under another key, and hashes of some of their tokens, which show whether
anything is left. It has neither their texts nor their tokens.

A *window* is WINDOW tokens in order. Some windows of each forgotten document are hashed, at most WINDOWS of them at equal
distances. So every long run of its tokens has one of them: any run of 23 tokens if the document has up to 500, else any run of
a 64th of it. A window that another document has, too, is left out: it shows nothing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from flat_tokens.annotations import AnyArray, Bools, ByteStrings, Int64s, JsonFacts, JsonObject, UInt32s, UInt64s
from flat_tokens.keys import mix
from flat_tokens.stores.store import Store, read_json

DIRECTORY = "forgotten"
LIST = f"{DIRECTORY}/list.json"

DIGEST_BYTES = 16
"""Of a key. The first four follow from the key by a hash of whole arrays, so that most keys need no digest of their own."""
HEAD = np.dtype("<u4")
WINDOW = 16
STEP = 8
"""Windows of a document begin at least this many tokens after one another."""
WINDOWS = 64
"""Windows of one document, at most."""
TABLE = 1 << 22
"""Entries of a table by which most hashes are seen to be of no window."""

Digests = ByteStrings
NO_DIGESTS: Digests = np.empty(0, f"S{DIGEST_BYTES}")
NO_KEYS: UInt64s = np.empty(0, np.uint64)


@dataclass(frozen=True)
class Forgotten:
    """The documents that an output has forgotten. ``salt``: 8 bytes. ``digests``: of their keys, in order:
    S16[n]. ``windows``: hashes, in order: uint64[m]. ``texts``: digests of their token keys, in order: S16[k].
    """

    salt: bytes = bytes(8)
    digests: Digests = field(default_factory=lambda: NO_DIGESTS)
    windows: UInt64s = field(default_factory=lambda: NO_KEYS)
    texts: Digests = field(default_factory=lambda: NO_DIGESTS)

    @classmethod
    def of(cls, record: JsonFacts) -> Self:
        """The list in a record. ValueError if it has none."""
        try:
            digests, texts = (
                np.frombuffer(base64.b64decode(of, validate=True), f"S{DIGEST_BYTES}")
                for of in (record["digests"], record.get("texts", ""))
            )
            windows = np.frombuffer(base64.b64decode(record["windows"], validate=True), "<u8").astype(np.uint64)
            return cls(bytes.fromhex(record["salt"]), digests, windows, texts)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{LIST}: is not a list of forgotten documents ({error}). Restore it from a copy.") from error

    @property
    def sha256(self) -> str:
        """A digest of the documents' digests, in hexadecimal; empty if there are none."""
        return hashlib.sha256(self.salt + self.digests.tobytes()).hexdigest() if len(self.digests) else ""

    def those(self, keys: UInt64s) -> Bools:
        """Which of the documents with these *keys*, uint64[n], are forgotten: bool[n]."""
        return self._keys.those(keys)

    def with_text(self, token_keys: UInt64s) -> Bools:
        """Which of the documents with these *token_keys*, uint64[n], have just the tokens of a forgotten one: bool[n]."""
        return self._texts.those(token_keys)

    def those_or_text(self, keys: UInt64s) -> Bools:
        """Which of the documents are forgotten: bool[n]. The *keys* of imported documents may be of their tokens."""
        return self.those(keys) | self.with_text(keys)

    @cached_property
    def _keys(self) -> _KeyDigests:
        return _KeyDigests(self.digests, self.salt)

    @cached_property
    def _texts(self) -> _KeyDigests:
        return _KeyDigests(self.texts, self.salt)

    def with_documents(self, keys: UInt64s, windows: UInt64s, token_keys: UInt64s = NO_KEYS) -> Self:
        """The list with more documents, hashes of their windows, and their token keys."""
        return self._with(digests_of(keys, self.salt), windows, digests_of(token_keys, self.salt))

    def _with(self, digests: Digests, windows: UInt64s, texts: Digests) -> Self:
        """The list with more of each."""
        digests, texts = np.union1d(self.digests, digests), np.union1d(self.texts, texts)
        return replace(self, digests=digests, windows=np.union1d(self.windows, windows), texts=texts)

    def inheriting(self, other: Self) -> Self:
        """The list with all that another output has forgotten. ValueError if that list has another salt."""
        if not len(other.digests):
            return self
        if self.salt != other.salt and len(self.digests):
            raise ValueError(f"{LIST}: is of another release than that of the other output. Forget the same at both: --ids")
        return replace(self._with(other.digests, other.windows, other.texts), salt=other.salt)

    def without_windows(self, windows: UInt64s) -> Self:
        """The list without some windows, uint64[n]."""
        return replace(self, windows=np.setdiff1d(self.windows, windows))

    def described(self) -> JsonObject:
        """The list as a record has it."""
        arrays = {"digests": self.digests, "windows": self.windows.astype("<u8"), "texts": self.texts}
        encoded = {name: base64.b64encode(of.tobytes()).decode() for name, of in arrays.items()}
        return {"salt": self.salt.hex(), **encoded}


class _KeyDigests:
    """Digests by which 64-bit keys are recognised."""

    def __init__(self, digests: Digests, salt: bytes) -> None:
        self._digests, self._salt = digests, salt
        heads = digests.view(np.uint8).reshape(-1, DIGEST_BYTES)[:, : HEAD.itemsize]
        self._heads = np.sort(np.ascontiguousarray(heads).view(HEAD).reshape(-1))

    def those(self, keys: UInt64s) -> Bools:
        """Which *keys*, uint64[n], have one of the digests: bool[n]."""
        found = np.zeros(len(keys), bool)
        if len(self._digests):
            likely = np.flatnonzero(_among(_heads(keys, self._salt), self._heads))
            found[likely] = _among(digests_of(keys[likely], self._salt), self._digests)
        return found


def _among(values: AnyArray, known: AnyArray) -> Bools:
    """Which *values* are among those that are *known*, in order, at least one: bool[n]."""
    return np.asarray(known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values)


def read_forgotten(root: Store) -> Forgotten:
    """The documents that an output has forgotten; none if it has no list. ValueError, naming it, if it is damaged."""
    try:
        return Forgotten.of(read_json(root, LIST))
    except FileNotFoundError:
        return Forgotten()


def check_list(root: Store, known: JsonFacts | None, found: Forgotten) -> None:
    """ValueError if the list that was *found* is neither the one that ``latest.json`` knew when it was moved, nor a later one.
    *known*: how many documents that has, and its digest.
    """
    if (
        known
        and (len(found.digests), found.sha256) != (known["documents"], known["sha256"])
        and len(found.digests) <= known["documents"]
    ):
        raise ValueError(
            f"{root.path(LIST)}: has {len(found.digests):,} documents, but latest.json knows of {known['documents']:,} (list "
            f"{known['sha256'][:12]}): it was removed, or an earlier one was put back, and forgotten documents would return. "
            "Restore it from a copy"
        )


def check_certificates(root: Store, found: Forgotten) -> None:
    """ValueError if the list that was *found* is not that of the last certificate, and no forgetting is under way."""
    names = list[str]()
    with contextlib.suppress(FileNotFoundError):
        names = sorted(name for name, _ in (root / DIRECTORY).listing() if name.endswith(".json") and name != "list.json")
    # Their names have the second.
    latest = (read_json(root, f"{DIRECTORY}/{name}") for name in names if name[:15] == names[-1][:15])
    said = max(latest, key=lambda one: str(one.get("at")), default={"list_sha256": found.sha256}).get("list_sha256")
    if said != found.sha256:
        raise ValueError(
            f"{root.path(LIST)}: has list {found.sha256[:12] or 'of nothing'}, but its last certificate is of "
            f"{str(said)[:12]}: it was removed, or another one was put back, and forgotten documents would return. "
            "Restore it from a copy"
        )


def _heads(keys: UInt64s, salt: bytes) -> UInt32s:
    return mix(keys ^ np.frombuffer(salt, "<u8")[0]).astype(HEAD)


def digests_of(keys: UInt64s, salt: bytes) -> ByteStrings:
    """Digests of keys, uint64[n]: S16[n]. One call a key, so only for few."""
    found = np.empty((len(keys), DIGEST_BYTES), np.uint8)
    found[:, : HEAD.itemsize] = _heads(keys, salt).reshape(-1, 1).view(np.uint8)
    for i, key in enumerate(keys.astype("<u8")):
        rest = hashlib.blake2b(key.tobytes(), digest_size=DIGEST_BYTES - HEAD.itemsize, key=salt, person=b"forgotten").digest()
        found[i, HEAD.itemsize :] = np.frombuffer(rest, np.uint8)
    return found.reshape(-1).view(f"S{DIGEST_BYTES}")


def hashes(ids: UInt32s, salt: bytes) -> UInt64s:
    """The hash of each window of consecutive token *ids*, uint32[n]: uint64[n - WINDOW + 1]."""
    if len(ids) < WINDOW:
        return np.empty(0, np.uint64)
    found = mix(ids.astype(np.uint64) ^ np.frombuffer(salt, "<u8")[0])
    length, factor = 1, np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        while length < WINDOW:
            # The hash of a window twice as long: that of its first half times a number of its own, and that of its second.
            found = found[:-length] * factor + found[length:]
            length, factor = 2 * length, factor * factor + np.uint64(2)
    return found ^ (found >> np.uint64(29))


def windows_of(ids: UInt32s, salt: bytes) -> UInt64s:
    """Hashes of some windows of a document, uint64[up to WINDOWS]; none of one that is shorter than a window."""
    found = hashes(ids, salt)
    count = min(WINDOWS, -(-(len(found) - 1) // STEP) + 1) if len(found) else 0
    return found[np.unique(np.linspace(0, max(len(found) - 1, 0), count).astype(np.int64))] if count else found


class Scan:
    """Looks for windows in tokens."""

    def __init__(self, forgotten: Forgotten) -> None:
        self._windows, self._salt = forgotten.windows, forgotten.salt
        self._table = np.zeros(TABLE, bool)
        self._table[(self._windows % np.uint64(TABLE)).astype(np.int64)] = True

    def of(self, parts: Iterable[UInt32s]) -> Iterator[tuple[Int64s, UInt64s]]:
        """Windows that consecutive arrays of token ids have: the numbers of the tokens with which they begin, int64[n], and their
        hashes. An array without any is left out.
        """
        before, at = np.empty(0, np.uint32), 0
        for part in parts:
            ids = np.concatenate([before, part])
            found = hashes(ids, self._salt)
            likely = np.flatnonzero(self._table[(found % np.uint64(TABLE)).astype(np.int64)])
            if len(likely) and len(there := likely[_among(found[likely], self._windows)]):
                yield there + (at - len(before)), found[there]
            before, at = ids[max(len(ids) - WINDOW + 1, 0) :].copy(), at + len(part)
