"""One document of many goes through both engines: a difference stops the build, and the reference engine then makes all anew."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flat_tokens
import tasks.tokenize.engines
import tasks.tokenize.tokenizers
from flat_tokens.text.rows import keys_of, with_completions
from tasks.config import DocumentPolicy, Source
from tasks.models import SourceFile
from tasks.output.paths import CACHE, RECEIPT
from tasks.rows import KEY, ROW, as_rows
from tasks.text.documents import Tally, TextBatch
from tasks.tokenize.chat import Completions
from tasks.tokenize.engines import (
    Encode,
    Encoder,
    Engine,
    EnginesDifferError,
    Tokens,
    UnencodableError,
    large_string_array,
    sampled,
    tokens_of,
)
from tests.faults.support import build_here
from tests.refusal import refusal
from tests.slices import range_of_slice
from tests.sources import held, write_rows
from tests.tasks.tokenize.test_tokenizers import DEMO, load


@pytest.fixture(autouse=True)
def _every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """All documents go through both engines."""
    monkeypatch.setattr(tasks.tokenize.engines, "SAMPLED_ONE_IN", 1)


def reference(texts: pa.LargeStringArray) -> Tokens:
    return load("bytes").reference(texts)


def wrong_about(word: str, encode: Encode = reference) -> Encode:
    """An engine that gives the last token of each text with the word another id."""

    def encode_wrongly(texts: pa.LargeStringArray) -> Tokens:
        tokens = encode(texts)
        for i, text in enumerate(texts.to_pylist()):
            tokens.ids[tokens.offsets[i + 1] - 1 : tokens.offsets[i + 1]] += np.uint32(word in text)
        return tokens

    return encode_wrongly


def engine(make_fast: Callable[[], Encode], **changes: Any) -> Engine:
    bytes_ = load("bytes")
    return Engine(dataclasses.replace(bytes_, name="some", make_fast=make_fast, **changes), fast=True)


def tokens(encoder: Encoder, *texts: str, tmp_path: Path) -> Tokens:
    """What ``tokens_of`` makes of the documents of a file; their rows are 10, 11, ..."""
    path = tmp_path / "part.txt"
    path.write_text("unused")
    file = SourceFile(source=0, name="part.txt", location=str(path), format="text", size=6, sha256="0" * 64)
    array = large_string_array(*texts)
    rows = np.arange(10, 10 + len(texts), dtype=np.uint64)
    documents = TextBatch(array, as_rows({KEY: keys_of(array, None), ROW: rows}))
    slice_, source = range_of_slice(file, 0, 6, 6), Source(name="s", path=str(path))
    batch, _ = tokens_of(documents, slice_, source, DocumentPolicy(), encoder, Tally())
    return Tokens(batch.encoded_tokens >> np.uint32(1), batch.seq_starts.astype(np.int64), batch.loss_mask)


def test_one_document_of_ten_thousand_is_chosen_by_its_key(monkeypatch):
    """The same ones in whatever batch they are."""
    monkeypatch.undo()
    keys = np.random.default_rng(1).integers(0, 1 << 64, 1_000_000, np.uint64, endpoint=False)
    chosen = sampled(keys)
    assert 60 < len(chosen) < 140
    assert sampled(keys[chosen]) == list(range(len(chosen)))
    assert sampled(np.arange(1000, dtype=np.uint64)[:0]) == []


def without_last(texts: pa.LargeStringArray) -> Tokens:
    found = reference(texts)
    return Tokens(found.ids[:-1], np.minimum(found.offsets, len(found.ids) - 1))


def right_alone(texts: pa.LargeStringArray) -> Tokens:
    """The sample is to see what the batch got, not what the engine would give the document alone."""
    return (reference if len(texts) == 1 else wrong_about(""))(texts)


@pytest.mark.parametrize(
    ("fast", "texts", "told"),
    [
        (
            wrong_about("yes"),
            ("no", "neither", "yes", "no"),
            "^part.txt, row 12: the fast engine does not give the tokens of some .token 2 is 117, the reference engine's 116.. "
            "Nothing is published. Set tokenizer.engine: reference. Tokens of earlier versions may differ, too.$",
        ),
        (without_last, ("ab", "ab"), "row 11: .*token 1 is missing, the reference engine's 99"),
        (right_alone, ("ab", "cd"), "row 10"),
    ],
)
def test_a_difference_names_the_file_the_row_the_tokenizer_and_what_to_do(tmp_path, fast, texts, told):
    with refusal(told, EnginesDifferError):
        tokens(engine(lambda: fast), *texts, tmp_path=tmp_path)


def test_of_a_long_document_the_beginning_is_compared(tmp_path, monkeypatch):
    """Up to a character's end."""
    monkeypatch.setattr(tasks.tokenize.engines, "SAMPLED_BYTES", 1000)
    one = engine(lambda: wrong_about("yes"))
    early, late = ("é" + "x" * count + "yes" + "é" * 1000 for count in (498, 1498))
    assert len(tokens(one, late, tmp_path=tmp_path).ids) == len(late.encode())
    with pytest.raises(EnginesDifferError):
        tokens(one, early, tmp_path=tmp_path)


def test_prompts_and_completions_are_compared(tmp_path):
    """Each document is two texts of the engine."""
    text = with_completions(large_string_array("ask"), large_string_array("yes")).cast(pa.large_string())[0].as_py()
    right = tokens(Completions(engine(lambda: reference)), text, tmp_path=tmp_path)
    assert right.mask.tolist() == [0, 0, 0, 1, 1, 1]
    with refusal("row 10", EnginesDifferError):
        tokens(Completions(engine(lambda: wrong_about("yes"))), text, tmp_path=tmp_path)


def test_a_text_that_the_reference_does_not_take_is_not_compared(tmp_path):
    def refuse(texts: pa.LargeStringArray) -> Tokens:
        raise UnencodableError("too much")

    one = engine(lambda: reference, reference=refuse)
    assert len(tokens(one, "ab", tmp_path=tmp_path).ids) == 2


def test_a_build_stops_and_the_reference_engine_makes_all_anew(tmp_path, monkeypatch):
    """Also what was stored before the difference was seen."""
    make = tasks.tokenize.tokenizers.gigatoken_encode
    monkeypatch.setattr(tasks.tokenize.tokenizers, "gigatoken_encode", lambda of: wrong_about("zebra", make(of)))
    key = keys_of(large_string_array("a zebra, number 200"), None)
    monkeypatch.setattr(tasks.tokenize.engines, "sampled", lambda keys: np.flatnonzero(keys == key).tolist())
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(DEMO.read_text()), indent=3))
    texts = [f"a zebra, number {i}" for i in range(300)]
    texts[:100] = [f"none {i}" for i in range(100)]  # so that the trial does not see it
    path = write_rows(tmp_path / "in.jsonl", [{"text": text} for text in texts])

    def built(engine: str) -> str:
        chosen, facts = {"name": str(tokenizer), "engine": engine}, {"validation_fraction": 0, "slice_bytes": 3000}
        return build_here({"output": str(tmp_path / "out"), "source": {"path": str(path)}, "tokenizer": chosen, **facts}, 1).path

    with refusal(
        r"in.jsonl, line 201 \(row 200\): the fast engine does not give the tokens of .*tokenizer.json", EnginesDifferError
    ):
        built("auto")
    with pytest.raises(FileNotFoundError):
        flat_tokens.open(str(tmp_path / "out"))
    assert list((tmp_path / "out" / CACHE).glob(f"*/{RECEIPT}"))
    train, loaded = held(built("reference"))["train"], load(tokenizer)
    assert [loaded.decode(one.ids) for one in train] == texts
