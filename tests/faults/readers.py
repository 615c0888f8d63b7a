"""Readers open, read and keep open datasets while versions are published and collected: none sees two versions, or a wrong token.

Every document of version n says nothing but n, so that a reader can tell whose tokens it got. A version that is collected while
somebody reads it goes as a whole: the reader is told so by an error, and opens the next one.
"""

import json
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tests.faults.commands import Flaw
from tests.faults.inject import Child
from tests.faults.support import build_here, settings_of

DOCUMENTS = 6
REPEATS = 40
GONE = (FileNotFoundError, NotADirectoryError, KeyError)  # zarr raises KeyError for an array that is not there


def text_of(version: int) -> str:
    return f"<{version:06d}>" * REPEATS


def said(ids: Any) -> set[int]:
    """The versions that the decoded tokens of whole documents name. ValueError where they are of no version at all."""
    text = bytes((np.asarray(ids, np.int64) - 1).clip(0, 255).astype(np.uint8)).decode("latin-1")  # the id of a byte is one more
    if not re.fullmatch(r"(<\d{6}>)*", text):
        raise ValueError(f"tokens of no version: {text[:80]!r}")
    return {int(one) for one in re.findall(r"\d{6}", text)}


def publish(root: Path, versions: int) -> None:
    """Publish versions of all layouts in turn; after each, remove all but the latest."""
    source = root.parent / "in" / "source.jsonl"
    source.parent.mkdir(parents=True, exist_ok=True)
    for version in range(versions):
        lines = [json.dumps({"id": f"{i}", "text": text_of(version)}) for i in range(DOCUMENTS)]
        source.write_text("\n".join(lines) + "\n")
        layout = list(LAYOUTS)[version % len(LAYOUTS)]
        build_here(settings_of(root, source, layout=layout), 1)
        collect(Store.at(root), Policy(keep_versions=1, grace_days=0), delete=True)


def all_of(dataset: flat_tokens.Dataset) -> set[int]:
    """Read everything: the versions that it names. ValueError where a document is missing."""
    splits = (dataset.train, dataset.validation)
    found = set().union(*(said(split.slice(0, split.token_count) >> 1) for split in splits))
    if (count := sum(split.seq_count for split in splits)) != DOCUMENTS:
        raise ValueError(f"{count} documents")
    return found


def keep_open(path: Path, chance: random.Random) -> Iterator[set[int]]:
    """Open a dataset once and read a random document again and again, until it is gone: always of the same version."""
    dataset = flat_tokens.open(path)
    first = all_of(dataset)
    yield first
    for _ in range(200):
        split = chance.choice([split for split in (dataset.train, dataset.validation) if split.seq_count])
        ids = split.sequence(chance.randrange(split.seq_count))
        if len(ids) != len(text_of(0)):
            raise ValueError(f"{len(ids)} tokens of a document")
        yield first | said(ids)
        time.sleep(chance.uniform(0, 0.02))


def plain_zarr(link: Path, _: random.Random) -> Iterator[set[int]]:
    """Read with zarr alone. The link is followed once: zarr would follow it with every read."""
    import zarr  # starts threads, which the parent must not have

    group = zarr.open_group(os.path.realpath(link), mode="r")
    found = set()
    for split in ("train", "validation"):
        tokens = np.asarray(group[f"{split}/encoded_tokens"])
        # What was removed meanwhile reads as the fill value, which is no token.
        if (tokens == np.iinfo(np.uint32).max).any():
            raise FileNotFoundError(f"{split} is gone")
        found |= said(tokens >> 1)
    yield found


def all_at(path: Path, _: random.Random) -> Iterator[set[int]]:
    yield all_of(flat_tokens.open(path))


KINDS_OF_READERS: dict[str, tuple[Callable[[Path, random.Random], Iterator[set[int]]], str]] = {
    "readers that open the output, read all, and open it again": (all_at, ""),
    "readers that open the link `latest`, read all, and open it again": (all_at, "latest"),
    "readers that keep open what they opened": (keep_open, ""),
    "readers with zarr alone, of the directory that `latest` leads to": (plain_zarr, "latest"),
}


def read_on(root: Path, kind: str, stop: Path) -> tuple[int, list[Flaw]]:
    """How many reads were right, and all that was wrong."""
    (read, place), chance, right, flaws = KINDS_OF_READERS[kind], random.Random(kind), 0, []
    while not stop.exists():
        try:
            for found in read(root / place, chance):
                right += len(found) == 1
                if len(found) != 1:
                    flaws.append(Flaw("readers", f"a reader got the versions {sorted(found)}"))
        except GONE:
            continue
        except Exception:
            flaws.append(Flaw("readers", traceback.format_exc()))
    return right, flaws


def read_while_published(scratch: Path, versions: int) -> Iterator[tuple[str, int, list[Flaw]]]:
    """Each kind of reader, how many of its reads were right, and what was wrong. This process must have no threads."""
    shutil.rmtree(scratch, ignore_errors=True)
    root, stop = scratch / "out", scratch / "stop"
    publish_in_child(root, 1)
    running = {kind: Child(lambda kind=kind: read_on(root, kind, stop)) for kind in KINDS_OF_READERS}  # type: ignore[misc]
    try:
        publish_in_child(root, versions)
    finally:
        stop.touch()
        ended = {kind: child.ended() for kind, child in running.items()}
    for kind, one in ended.items():
        yield kind, *one.must()


def publish_in_child(root: Path, versions: int) -> None:
    Child(lambda: publish(root, versions)).ended(seconds=6000).must()
