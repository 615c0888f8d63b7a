"""SentencePiece's files as they are read here, against the library's own reader, and files that are damaged."""

import contextlib
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.manifest import TokenBytes
from flat_tokens.vocabulary import (
    PieceKind,
    Pieces,
    SentencePieceModel,
    Vocabulary,
    load_vocabulary,
    resolve,
    token_bytes_of,
)
from tests.flat_tokens.sentence_pieces import model_file, trained
from tests.refusal import refusal

pytestmark = pytest.mark.needs("sentencepiece")

SMALL = (
    b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02"  # a piece: text, score, kind
    b"\x0a\x0a\x0a\x06\xe2\x96\x81the\x18\x04"
    b"\x0a\x0a\x0a\x06<0x41>\x18\x06"
    b"\x12\x02\x18\x02"  # how it was trained
)


def test_pieces_are_those_of_the_bytes():
    found = Pieces.of_file(SMALL)
    assert found == (
        (b"<unk>", "▁the".encode(), b"<0x41>"),
        (PieceKind.UNKNOWN, PieceKind.USER_DEFINED, PieceKind.BYTE),
        True,
    )
    assert [found.bytes_of(i) for i in range(3)] == [b"<unk>", b" the", b"A"]
    assert found.of_kind(PieceKind.UNKNOWN) == {"<unk>": 0}
    assert not Pieces.of_file(SMALL + b"\x1a\x02\x28\x00").has_lone_spaces


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
def test_pieces_are_those_that_the_library_has(kind):
    data = trained(model_type=kind, control_symbols=["<c>"], byte_fallback=kind != "word")
    model = SentencePieceModel("x", data, Pieces.of_file(data))
    processor, found = model.processor, model.pieces
    assert [piece.decode() for piece in found.pieces] == [processor.id_to_piece(i) for i in range(len(found.pieces))]
    for kind_of, is_it in ((PieceKind.CONTROL, "is_control"), (PieceKind.UNKNOWN, "is_unknown"), (PieceKind.BYTE, "is_byte")):
        assert [of is kind_of for of in found.kinds] == [getattr(processor, is_it)(i) for i in range(len(found.kinds))]


@given(st.binary(max_size=60))
def test_any_bytes_are_pieces_or_refused(data):
    for begin in (b"", SMALL[:18], SMALL):
        with contextlib.suppress(ValueError):
            assert Pieces.of_file(begin + data).pieces


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it has 0 pieces"),
        (SMALL[:-1], "it ends 1 bytes before its field at byte"),
        (b"\x0a\x04\x0a\x02ab" + b"\x0f", "byte 7 begins no field"),
        (b"\x0a\x02\x18\x09", "piece 0 has b'' for text and 9 for its kind"),
        (b"[1, 2]\n", "is not a model of SentencePiece"),
        (b"\xff" * 20, "byte 0 begins no number"),
    ],
)
def test_what_is_not_a_model_is_refused_with_the_place(tmp_path, data, words):
    (tmp_path / "tokenizer.model").write_bytes(data)
    for name in (tmp_path, tmp_path / "tokenizer.model"):
        with refusal(f"is not a model of SentencePiece: .*{words}|{words}"):
            resolve(str(name))


@functools.cache
def vocabulary() -> Vocabulary:
    with tempfile.TemporaryDirectory() as directory:
        return load_vocabulary(str(model_file(Path(directory, "x.model"))))


@given(st.text(max_size=40))
def test_a_vocabulary_gives_back_what_was_encoded(text):
    encode = vocabulary().encode
    assert encode is not None
    decoded = vocabulary().decode(encode(text))[0].decode()
    assert decoded == (f" {text}".replace("▁", " ") if text else "")


def test_a_directory_with_the_file_alone_is_it_and_a_tokenizer_json_is_first(tmp_path):
    model_file(tmp_path / "tokenizer.model.v3").rename(tmp_path / "tokenizer.model")
    assert load_vocabulary(str(tmp_path)).digest == load_vocabulary(str(tmp_path / "tokenizer.model")).digest
    (tmp_path / "tokenizer.json").write_text("{}")
    with refusal(r"is not a tokenizer\.json"):
        load_vocabulary(str(tmp_path))


def test_bytes_of_ids_are_those_of_text_and_none_of_control_pieces(tmp_path):
    found = token_bytes_of(model := resolve(str(model_file(tmp_path / "x.model", user_defined_symbols=["<u>▁"]))))
    assert isinstance(model, SentencePieceModel)
    assert isinstance(found, TokenBytes)
    assert not found.is_exact
    assert found.lengths[:4].tolist() == [0, 0, 0, 4]  # unknown, <s>, </s>, the defined one
    byte = model.pieces.of_kind(PieceKind.BYTE)
    assert set(found.lengths[np.array(list(byte.values()))].tolist()) == {1}
