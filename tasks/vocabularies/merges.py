"""Byte-pair merges: learned from texts, cut to smaller vocabularies, written as a tokenizer.json.

The training library counts the pieces that a pattern splits texts into, and joins the most frequent pair of neighbouring tokens
again and again; of pairs that are equally frequent the one with the smaller ids. Counts are sums, so the order of texts and the
number of threads decide nothing. The merges of a smaller vocabulary are the first ones of a larger.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flat_tokens.extras import extra
from flat_tokens.vocabulary import byte_level_alphabet
from tasks.vocabularies.request import BYTES, VocabularyRequest

WHY = "training a vocabulary"


class Merges(NamedTuple):
    """Learned merges. ``tokens``: by id, as tokenizer.json spells them: bytes first. ``pairs``: in the order of learning. Two
    pairs may give one token.
    """

    tokens: list[str]
    pairs: list[tuple[str, str]]

    def first(self, size: int) -> Merges:
        """The merges of a vocabulary of *size* tokens: those that a training which stops there learns."""
        if size == len(self.tokens):
            return self
        tokens = self.tokens[:size]
        last = tokens[-1]
        # Training stops as soon as the last token is there.
        stop = next(i for i, (a, b) in enumerate(self.pairs, 1) if a + b == last) if size > BYTES else 0
        return Merges(tokens, self.pairs[:stop])


def split_pattern(pattern: str) -> Any:
    """The pattern as the training library has it. ValueError where it is not a pattern."""
    tokenizers = extra("tokenizers", WHY)
    try:
        return tokenizers.Regex(pattern)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"pattern {pattern!r}: {error}. Name one of docs/vocabularies.md, or spell another") from error


def learn(texts: Iterable[str], request: VocabularyRequest) -> Merges:
    """Learn the merges of the request's largest vocabulary from texts. There are fewer where the texts have no more."""
    tokenizers = extra("tokenizers", WHY)
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.trainers import BpeTrainer

    tokenizer = tokenizers.Tokenizer(BPE())
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(split_pattern(request.regex), "isolated"), bytes_of])
    trainer = BpeTrainer(
        vocab_size=request.learned, initial_alphabet=sorted(byte_level_alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return merges_of(json.loads(tokenizer.to_str()))


def merges_of(definition: dict[str, Any]) -> Merges:
    """The merges of a tokenizer.json that was made here, its special tokens left out."""
    model = definition["model"]
    return Merges(sorted(model["vocab"], key=model["vocab"].__getitem__), [(a, b) for a, b in model["merges"]])


def definition_of(merges: Merges, pattern: str, special_tokens: Sequence[str]) -> bytes:
    """A tokenizer.json of these merges. Special tokens have the ids after the last one. ValueError where a special token is
    spelled as a learned one.
    """
    spelled = {token: "".join(byte_level_alphabet()[byte] for byte in token.encode()) for token in special_tokens}
    known = set(merges.tokens)
    if clash := [token for token, spelling in spelled.items() if spelling in known or token in known]:
        raise ValueError(f"special token {clash[0]!r}: the text has it so often that it was learned as text. Choose another")
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **added} for i, token in enumerate(special_tokens, len(merges.tokens))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_of]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(merges.tokens)},
            "merges": [list(pair) for pair in merges.pairs],
        },
    }
    return (json.dumps(definition, ensure_ascii=False, indent=1) + "\n").encode()
