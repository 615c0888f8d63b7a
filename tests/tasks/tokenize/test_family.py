"""The family of tokenizer.json files: each has the tokens of ``tokenizers`` by the fast engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from flat_tokens.vocabulary import TokenizerJson
from tasks.tokenize.engines import Engine, ids_of, large_string_array
from tasks.tokenize.tokenizers import json_tokenizer
from tests.tasks.tokenize.family import Member, family, texts

MEMBERS = family()


def check(member: Member, characters: int) -> None:
    """Compare the engine that a build uses with ``tokenizers``, which takes special tokens' text for text."""
    data = json.dumps(member.definition)
    expected = Tokenizer.from_str(data)
    expected.encode_special_tokens = True
    loaded = json_tokenizer(TokenizerJson(member.name, member.name, json.loads(data), expected))
    assert loaded.why_slow is None, (member.name, loaded.why_slow)
    some = [*texts(member, characters), *loaded.probes()]
    tokens = Engine(loaded, True)(large_string_array(*some))
    for i, encoding in enumerate(expected.encode_batch_fast(some, add_special_tokens=False)):
        assert np.array_equal(ids_of(tokens, i), encoding.ids), (member.name, some[i])


def test_the_family_is_large() -> None:
    """Options that published tokenizers use must not fall to the slow engine."""
    assert len({member.name for member in MEMBERS}) == len(MEMBERS) > 360


@pytest.mark.parametrize("first", range(4))
def test_a_member_has_the_tokens_of_the_library(first: int) -> None:
    """A sample of the family, from all of its parts."""
    for member in MEMBERS[first::43]:
        check(member, 2_000)


NIGHTLY = [pytest.param(member, 1_000_000, marks=pytest.mark.nightly) for member in MEMBERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("member", "characters"),
    [*((member, 250_000) for member in MEMBERS[::12]), *NIGHTLY],
    ids=lambda value: value.name if isinstance(value, Member) else str(value),
)
def test_a_member_has_the_tokens_of_the_library_on_long_texts(member: Member, characters: int) -> None:
    check(member, characters)
