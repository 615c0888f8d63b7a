"""The family of tokenizer.json files: each has the tokens of ``tokenizers`` by the fast engine. Texts on which engines are
compared before a build are those that the tokenizer's definition calls for.
"""

import numpy as np
import pytest

from flat_tokens.vocabulary import Ranks
from tasks.tokenize.engines import Engine, ids_of, large_string_array
from tasks.tokenize.probes import TOKENS, around, awkward_texts, texts_of_json, texts_of_ranks
from tasks.tokenize.tokenizers import json_tokenizer
from tests.tasks.tokenize.family import (
    ALPHABET,
    BYTE_LETTERS,
    Member,
    added,
    bytes_,
    definition_of,
    family,
    loaded,
    model_of,
    replace,
    texts,
)

MEMBERS = family()


def check(member: Member, characters: int) -> None:
    """Compare the engine that a build uses with ``tokenizers``, which takes special tokens' text for text."""
    of = loaded(member.definition)
    tokenizer = json_tokenizer(of)
    assert tokenizer.why_slow is None, (member.name, tokenizer.why_slow)
    some = [*texts(member, characters), *tokenizer.probes()]
    tokens = Engine(tokenizer, True)(large_string_array(*some))
    for i, encoding in enumerate(of.tokenizer.encode_batch_fast(some, add_special_tokens=False)):
        assert np.array_equal(ids_of(tokens, i), encoding.ids), (member.name, some[i])


def test_the_family_is_large():
    """Options that published tokenizers use must not fall to the slow engine."""
    assert len({member.name for member in MEMBERS}) == len(MEMBERS) > 360


@pytest.mark.parametrize("first", range(4))
def test_a_member_has_the_tokens_of_the_library(first):
    """A sample of the family, from all of its parts."""
    for member in (*MEMBERS[first::43], MEMBERS[-1 - first]):
        check(member, 2_000)


NIGHTLY = [pytest.param(member, 1_000_000, marks=pytest.mark.nightly) for member in MEMBERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("member", "characters"),
    [*((member, 250_000) for member in MEMBERS[::12]), *NIGHTLY],
    ids=lambda value: value.name if isinstance(value, Member) else str(value),
)
def test_a_member_has_the_tokens_of_the_library_on_long_texts(member, characters):
    check(member, characters)


def test_each_added_token_is_alone_glued_spaced_doubled_and_at_both_ends():
    texts = list(around(["<tag>", "<|end|>"]))
    assert "<tag>" in texts
    (mixed,) = (text for text in texts if text.startswith("<tag> ") and text.endswith("<tag>"))
    assert all(form in mixed for form in ("a<tag>b", "1<tag>2", " <tag> ", "<tag><tag>", "\n<tag>\t", ".<tag>.", "é<tag>中"))
    assert any("<tag><|end|><tag>" in text for text in texts)
    assert any("<|end|<|end|>" in text for text in texts)


def test_a_tokenizer_json_is_tried_on_its_tokens_and_the_strings_of_its_options():
    tokens = [added("<x>"), added("<s>", special=True)]
    definition = definition_of(
        replace({"String": "qq"}, "zz"), bytes_(regex=True), model_of(ALPHABET, {}, BYTE_LETTERS, "p"), tokens
    )
    texts = list(texts_of_json(loaded(definition)))
    assert {"<x>", "<s>", "qq", "zz", "a", "é"} <= set(texts)
    assert len(texts) < 2 * TOKENS


def test_ranks_are_tried_on_their_tokens_from_all_over():
    ranks = {bytes([value]): value for value in range(256)} | {str(i).encode(): i for i in range(256, 10_000)}
    texts = list(texts_of_ranks(Ranks("name", ranks, {"<|end|>": 10_000})))
    assert "<|end|>" in texts
    assert sum(text.isdecimal() and int(text) > 9_000 for text in texts) > 50


def test_awkward_texts_have_letters_of_recent_versions_of_unicode():
    """So that an engine with older tables is not used."""
    assert any("\ua7dc" in text and "\U000105c0" in text for text in awkward_texts())
