"""Small models of SentencePiece, trained here."""

import io
from pathlib import Path
from typing import Any

import pytest

TEXTS = ["the quick brown fox jumps over the lazy dog", "hello world, hello 0123456789", "déjà vu"]


def trained(**options: Any) -> bytes:
    """A ``.model`` file in which a character without a piece falls back to bytes, and text stays as it is."""
    library = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    settings = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2}
    library.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 5), model_writer=written, **(settings | options))
    return written.getvalue()


def model_file(path: Path, **options: Any) -> Path:
    """The same as a file."""
    path.write_bytes(trained(**options))
    return path
