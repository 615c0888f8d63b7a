"""Trained vocabularies on the disk: a directory with tokenizer.json, and what it was trained on in training.json.

training.json is written first, with the digest of tokenizer.json: without tokenizer.json nothing is there, and with it all is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.arrays.layouts import to_json
from flat_tokens.manifest import check
from flat_tokens.stores.local import directory_below, make_directory
from flat_tokens.stores.reading import OUTPUT_ROOTS
from flat_tokens.stores.records import read_json
from flat_tokens.stores.store import NO_OBJECT, Store
from tasks.vocabularies.merges import Merges, definition_of, merges_of
from tasks.vocabularies.request import VocabularyRequest

TOKENIZER, TRAINING = "tokenizer.json", "training.json"
HALF_WRITTEN = re.compile(r"\.(tokenizer|training)\.json\.\w+\.part")
FORMAT, FORMAT_VERSION = "flat-tokens-vocabulary", 1
MADE = {"vocab_size": int, "merges": int, "special_tokens": [str], "pattern": str, "sha256": str}
SHAPE: dict[str, Any] = {"trained_on": {}, "read": {"documents": int, "text_bytes": int}, "by": str, "tokenizer": MADE}


class Training(NamedTuple):
    """The facts of a training: ``trained_on`` decides the merges; ``read``: documents and bytes of text; ``by``: the library."""

    trained_on: JsonObject
    read: dict[str, int]
    by: str


class Trained(NamedTuple):
    """A vocabulary that was written: its directory, the digest of its tokenizer.json, its ids and merges."""

    path: str
    sha256: str
    vocab_size: int
    merges: int
    training: Training


def write(directory: str, merges: Merges, training: Training, request: VocabularyRequest) -> Trained:
    """Write a vocabulary, training.json before tokenizer.json. ValueError where another one is there."""
    data = definition_of(merges, request.regex, request.special_tokens)
    made = Trained(
        directory,
        hashlib.sha256(data).hexdigest(),
        len(merges.tokens) + len(request.special_tokens),
        len(merges.pairs),
        training,
    )
    store = Store.at(directory)
    with _alone(store):
        _write(store, data, made, request)
    return made


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[None]:
    """A block in which no other process writes to a local directory. Files that a killed one left half written are removed.

    Not where roots bind what may be written: the store alone knows its way there.
    """
    with contextlib.ExitStack() as held:
        if store.is_local and not os.environ.get(OUTPUT_ROOTS):
            make_directory(Path(store.root))
            above, name = os.path.split(store.root)
            with contextlib.suppress(OSError):  # a link, or a file system without locks
                descriptor = held.enter_context(directory_below(above, name))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                for left in filter(HALF_WRITTEN.fullmatch, os.listdir(descriptor)):
                    os.unlink(left, dir_fd=descriptor)
        yield


def _write(store: Store, data: bytes, made: Trained, request: VocabularyRequest) -> None:
    if store.exists(TOKENIZER) and hashlib.sha256(store.read(TOKENIZER)).hexdigest() != made.sha256:
        raise ValueError(f"{store.path(TOKENIZER)}: is another tokenizer. Name another directory: --to")
    described = {
        "vocab_size": made.vocab_size,
        "merges": made.merges,
        "special_tokens": list(request.special_tokens),
        "pattern": request.regex,
        "sha256": made.sha256,
    }
    facts = {"format": FORMAT, "format_version": FORMAT_VERSION, **made.training._asdict()}
    store.put(TRAINING, to_json({**facts, "tokenizer": described}))
    store.put(TOKENIZER, data)


def read(directory: str) -> tuple[Trained, Merges, VocabularyRequest]:
    """A vocabulary that was trained here, its merges, and the request for it. ValueError if it is not there, or if
    tokenizer.json is not the one that training.json names.
    """
    store = Store.at(directory.removesuffix(f"/{TOKENIZER}"))
    try:
        record, data = read_json(store, TRAINING), store.read(TOKENIZER)
    except NO_OBJECT as error:
        raise ValueError(
            f"{directory}: is not a vocabulary of train-tokenizer, which has {TOKENIZER} and {TRAINING}. Only its merges are "
            "known to be in the order of learning"
        ) from error
    try:
        if record.get("format") != FORMAT or record.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format {record.get('format')!r}, version {record.get('format_version')!r}")
        check(record, SHAPE, "it")
        if (made := record["tokenizer"])["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError(f"{TOKENIZER} has another digest")
        training = Training(*(record[name] for name in Training._fields))
        request = VocabularyRequest(
            vocab_sizes=(made["vocab_size"],), pattern=made["pattern"], special_tokens=tuple(made["special_tokens"])
        )
    except ValueError as error:
        raise ValueError(
            f"{store.path(TRAINING)}: does not describe the vocabulary next to it ({error}). Train it again"
        ) from error
    merges = merges_of(json.loads(data))
    return Trained(directory, made["sha256"], made["vocab_size"], made["merges"], training), merges, request


def done_before(directory: str, size: int, trained_on: JsonObject, request: VocabularyRequest) -> Trained | None:
    """The vocabulary of *size* ids at a place, if it is there. ValueError where one of other text or settings is."""
    store = Store.at(directory)
    if not store.exists(TOKENIZER):
        return None
    made, _, its = read(directory)
    asked = (size, request.regex, request.special_tokens, json.loads(to_json(trained_on)))
    if (made.vocab_size, its.regex, its.special_tokens, made.training.trained_on) != asked:
        raise ValueError(
            f"{store.path(TOKENIZER)}: was trained on other text, or with other settings. Name another directory: --to"
        )
    return made


def place_of(to: str, name: str, size: int) -> str:
    """The directory of a vocabulary. ``{name}`` and ``{size}`` are replaced in *to*."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "tokenizer"
    return to.replace("{name}", plain).replace("{size}", str(size))
