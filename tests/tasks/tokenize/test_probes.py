"""Texts on which engines are compared before a build: those that the tokenizer's definition calls for."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from flat_tokens.vocabulary import Ranks, TokenizerJson
from tasks.tokenize.probes import TOKENS, around, awkward_texts, texts_of_json, texts_of_ranks
from tests.tasks.tokenize.family import ALPHABET, BYTE_LETTERS, added, bytes_, definition_of, model_of, replace


def test_each_added_token_is_alone_glued_spaced_doubled_and_at_both_ends() -> None:
    tokens = ["<tag>", "tea", "<|end|>"]
    texts = list(around(tokens))
    for token in tokens:
        assert token in texts
        mixed = next(text for text in texts if text.startswith(f"{token} ") and text.endswith(token))
        for form in ("a{}b", "1{}2", " {} ", "{}{}", "\n{}\t", ".{}.", "é{}中"):
            assert form.replace("{}", token) in mixed
    assert any("<tag>tea<tag>" in text for text in texts)
    assert any("<|end|<|end|>" in text for text in texts)
    assert list(around([])) == []


def test_a_tokenizer_json_is_tried_on_its_tokens_and_the_strings_of_its_options() -> None:
    tokens = [added("<x>"), added("<s>", special=True)]
    definition = definition_of(
        replace({"String": "qq"}, "zz"), bytes_(regex=True), model_of(ALPHABET, {}, BYTE_LETTERS, "p"), tokens
    )
    loaded = TokenizerJson("name", "digest", definition, Tokenizer.from_str(json.dumps(definition)))
    texts = list(texts_of_json(loaded))
    assert {"<x>", "<s>", "qq", "zz", "a", "é"} <= set(texts)
    assert len(texts) < 2 * TOKENS


def test_ranks_are_tried_on_their_tokens_from_all_over() -> None:
    ranks = {bytes([value]): value for value in range(256)} | {str(i).encode(): i for i in range(256, 10_000)}
    texts = list(texts_of_ranks(Ranks("name", ranks, {"<|end|>": 10_000})))
    assert {"<|end|>", "a<|end|>b"} <= {part for text in texts for part in (text, *text.split())}
    assert sum(text.isdecimal() and int(text) > 9_000 for text in texts) > 50


def test_awkward_texts_have_letters_of_recent_versions_of_unicode() -> None:
    """So that an engine with older tables is not used."""
    assert any("\ua7dc" in text and "\U000105c0" in text for text in awkward_texts())
