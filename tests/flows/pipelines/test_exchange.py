"""Exports and imports in the order of a flow, on threads: what comes back, what is recorded, what is not done twice."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens import TokenBatch
from flat_tokens.formats import FORMATS
from flat_tokens.keys import token_keys
from tasks.output.target import SplitRule
from tests.calls import before_each_call
from tests.examples import first_fast
from tests.faults.support import digests, export_here, import_here
from tests.made import read_docs, write_sequences
from tests.refusal import refusal

MARKED = {"nanogpt", "build-nanogpt", "jaxformer", "llm.c", "llm.c-llama-3"}
END = 300


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few bytes."""
    monkeypatch.setattr("tasks.derive.imports.PART_BYTES", 40)


def keys(sequences: list[list[int]]) -> list[int]:
    return [key for some in token_keys([TokenBatch.from_sequences(sequences)]) for key in some.tolist()]


@pytest.mark.parametrize(
    "format", first_fast(sorted(FORMATS, key=lambda name: name not in ("megatron", "llm.c", "mds")), 3, every=3)
)
@pytest.mark.parametrize(
    ("train", "validation"), [([[1, 2], [], [299] * 12, [5, 0], []], [[7], []]), ([[], [3]], []), ([], [[*range(11)]])]
)
def test_an_import_gives_back_what_was_exported(tmp_path, format, train, validation):
    """In the files' own splits; a document's key is made of its tokens, its row counts the sequences of its split."""
    options = {"end_of_text": END} if format in MARKED else {}
    export_here(write_sequences(tmp_path / "dataset", train, validation), tmp_path / "out", format, **options)
    result = import_here(tmp_path / "out", tmp_path / "back", format=format, options=options)
    found = read_docs(tmp_path / "back")
    for name, sequences in (("train", train), ("validation", validation)):
        assert [list(doc.ids) for doc in found[name]] == sequences
        assert [doc.key for doc in found[name]] == keys(sequences)
        assert [doc.row for doc in found[name]] == list(range(len(sequences)))
        assert {doc.file for doc in found[name]} <= {0 if name == "train" or not train else 1}
    assert result.totals["documents"]["read"] == len(train) + len(validation)


def test_a_second_import_does_nothing_and_a_third_reads_only_what_is_new_to_it(tmp_path):
    """That one draws validation by key, whatever splits the files have."""
    sequences = [[i, i + 1] for i in range(60)]
    export_here(write_sequences(tmp_path / "dataset", sequences[:50], sequences[50:]), tmp_path / "web")
    first = import_here(tmp_path / "web", tmp_path / "back", workers=1)
    assert first.parts > 3
    again = import_here(tmp_path / "web", tmp_path / "back")
    assert (again.was_published, again.version, again.sequence) == (True, first.version, 1)
    third = import_here(tmp_path / "web", tmp_path / "back", validation_fraction=0.3, split_seed=2)
    assert (third.parts_reused, third.sequence) == (third.parts, 2)
    elsewhere = import_here(tmp_path / "web", tmp_path / "elsewhere", workers=4)
    assert digests(Path(elsewhere.path)) == digests(Path(first.path))
    found = {name: [list(doc.ids) for doc in docs] for name, docs in read_docs(tmp_path / "back").items()}
    drawn = SplitRule(fraction=0.3, seed=2).numbers(np.array(keys(sequences), np.uint64))
    assert found["validation"] == [ids for ids, is_drawn in zip(sequences, drawn, strict=True) if is_drawn]
    assert found["train"] == [ids for ids in sequences if ids not in found["validation"]]


def test_imports_that_cannot_be_meant_are_refused(tmp_path):
    export_here(write_sequences(tmp_path / "dataset", [[1, 2], [300]]), tmp_path / "web")
    with refusal("are within each other"):
        import_here(tmp_path / "web", tmp_path / "web/back")
    with refusal("holds token id 300, but those of bytes end at 256"):
        import_here(tmp_path / "web", tmp_path / "back", tokenizer={"name": "bytes"})
    with refusal("there is no format 'tfrecord'"):
        import_here(tmp_path / "web", tmp_path / "back", format="tfrecord")
    with pytest.raises(FileNotFoundError):
        import_here(tmp_path / "nothing", tmp_path / "back")
    assert not (tmp_path / "back/versions").exists()


def test_a_change_while_files_are_read_is_an_error(tmp_path, monkeypatch):
    export_here(write_sequences(tmp_path / "dataset", [[1, 2], [3]]), tmp_path / "web")

    def change(*_: Any) -> None:
        # In one step: a thread beside this one must not find the file empty.
        path, other = tmp_path / "web/train.bin", tmp_path / f"other-{threading.get_ident()}"
        other.write_bytes(path.read_bytes()[::-1])
        other.replace(path)

    before_each_call(monkeypatch, "tasks.derive.imports._make_shard", change)
    with refusal(r"web: was changed while it was read"):
        import_here(tmp_path / "web", tmp_path / "back")
    assert not (tmp_path / "back/latest.json").exists()
