"""What the tests of every format do: make splits, export them, read sequences back in all the ways there are."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flat_tokens.formats import FORMATS, Readable, Splits, open_any, source
from flat_tokens.stores.store import Store, StoredObject
from tests.made import in_memory
from tests.refusal import refusal

Sequences = Sequence[Sequence[int]]
LARGEST = 2**31 - 1
EXAMPLE = [[1, 2], [], [3, 4, 5], [LARGEST], list(range(300)), []]


def splits_of(train: Sequences, validation: Sequences = ()) -> Splits:
    """The splits of a dataset in memory."""
    return source(in_memory(train, validation))


def export(name: str, splits: Splits, where: str | os.PathLike[str], options: object) -> list[StoredObject]:
    """Write all of an export; every part twice, in any order, as a build that is resumed may do."""
    chosen, store = FORMATS[name], Store.at(where)
    parts = chosen.plan(splits, options)
    for part in reversed(parts):
        chosen.write(splits, part, store, options)
    written = [stored for part in parts for stored in chosen.write(splits, part, store, options)]
    return written + list(chosen.finish(splits, written, store, options))


def format_of(options: object) -> str:
    """The first format that has such options."""
    return next(name for name, entry in FORMATS.items() if entry.options is type(options))


def put(where: str | os.PathLike[str], options: object, train: Sequences, validation: Sequences = ()) -> list[StoredObject]:
    """Export sequences, as the format has them."""
    return export(format_of(options), splits_of(train, validation), where, options)


def read(where: str | os.PathLike[str], options: Any, max_tokens: int = 5) -> dict[str, list[list[int]]]:
    """The sequences of the splits of files, as the format has them."""
    opened = open_any(where, format_of(options), options)
    return {split: sequences_in(readable, max_tokens) for split, readable in opened.splits.items()}


def index_of(path: Path) -> Any:
    return json.loads((path / "index.json").read_text())


def sequences_in(readable: Readable, max_tokens: int = 5) -> list[list[int]]:
    """Its sequences by ``batches``, after ``sequence`` and the counts have been found to say the same."""
    sequences = []
    marked = []
    for batch in readable.batches(max_tokens=max_tokens):
        assert batch.token_count <= max_tokens
        assert batch.max_token_id == (batch.encoded_tokens >> 1).max(initial=0)
        starts = batch.seq_starts.astype(int).tolist()
        tokens = (batch.encoded_tokens >> 1).tolist()
        marked += (batch.encoded_tokens & 1).astype(bool).tolist()
        assert starts[-1] == len(tokens)
        if starts[0]:
            sequences[-1] += tokens[: starts[0]]
        sequences += [tokens[a:b] for a, b in itertools.pairwise(starts)]
    # The batches one behind the other are the array: a sequence's first token is marked, in whichever batch it is.
    assert marked == [k == 0 for sequence in sequences for k in range(len(sequence))]
    assert readable.seq_count == len(sequences)
    assert readable.token_count == sum(map(len, sequences))
    assert [readable.sequence(i).tolist() for i in range(len(sequences))] == sequences
    for start, stop in itertools.combinations_with_replacement(range(0, len(sequences) + 1, len(sequences) // 4 + 1), 2):
        run = [token for batch in readable.batches(start, stop) for token in (batch.encoded_tokens >> 1).tolist()]
        assert run == [token for sequence in sequences[start:stop] for token in sequence]
    for i in (len(sequences), -len(sequences) - 1):
        with refusal(f"there is no sequence {i}; there are {len(sequences)}", IndexError):
            readable.sequence(i)
    with refusal(f"there (is|are) .*{len(sequences)}", IndexError):
        list(readable.batches(0, len(sequences) + 1))
    return sequences
