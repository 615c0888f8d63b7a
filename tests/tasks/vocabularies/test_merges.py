"""Learned merges: those of a naive trainer, whatever the order of texts; smaller vocabularies are their beginnings."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flat_tokens.vocabulary import byte_level_alphabet, resolve
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import first_difference
from tasks.tokenize.tokenizers import load_tokenizer
from tasks.vocabularies.request import PATTERNS, VocabularyRequest
from tasks.vocabularies.training import Merges, definition_of, learn
from tests.examples import first_fast
from tests.refusal import refusal

ALPHABET = sorted(byte_level_alphabet())
SIMPLE = " ?[a-zé]+| "
TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "été été", "low low new"] * 2


def request_of(size: int, pattern: str = SIMPLE, specials: tuple[str, ...] = ()) -> VocabularyRequest:
    return VocabularyRequest(vocab_sizes=(size,), pattern=pattern, special_tokens=specials)


def naive(texts: list[str], size: int) -> Merges:
    """Byte pairs by the book: count all pairs, join the most frequent one, of several the one with the smallest ids, again."""
    spelled = byte_level_alphabet()
    words = Counter()
    for text in texts:
        words.update(tuple(spelled[byte] for byte in piece.encode()) for piece in re.findall(SIMPLE, text))
    tokens, pairs = list(ALPHABET), []
    while len(tokens) < size:
        counts = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                counts[pair] += count
        if not counts:
            break
        one, other = min(counts, key=lambda pair: (-counts[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        pairs.append((one, other))
        if one + other not in tokens:
            tokens.append(one + other)
        words = Counter({joined(word, one, other): count for word, count in words.items()})
    return Merges(tokens, pairs)


def joined(word: tuple[str, ...], one: str, other: str) -> tuple[str, ...]:
    made = []
    for token in word:
        if made and made[-1] == one and token == other:
            made[-1] = one + other
        else:
            made.append(token)
    return tuple(made)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abcé ", max_size=30), max_size=6), st.integers(257, 300))
@example(TEXTS, 280)
def test_merges_are_those_of_a_naive_trainer_whatever_the_text(texts, size):
    assert learn(texts, request_of(size)) == naive(texts, size)


def test_two_pairs_may_give_one_token():
    """The smaller vocabulary ends with the first of both."""
    merges = Merges([*ALPHABET, "ab", "bc", "abc", "x!"], [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("x", "!")])
    assert merges.first(259).pairs == merges.pairs[:3]
    assert merges.first(260) == merges
    assert merges.first(256) == Merges(ALPHABET, [])


@pytest.mark.parametrize("pattern", first_fast(sorted(PATTERNS), every=4))
def test_the_fast_engine_takes_what_is_trained_with_a_published_pattern(tmp_path, pattern):
    """Special tokens are the last ids, and text stays text."""
    request = request_of(300, pattern, ("<|endoftext|>", "<|pad|>"))
    texts = ["Hello wörld, it's 12345 times\n\n  nicer: don't!", "日本語 and <|endoftext|> " * 3]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(definition_of(learn(texts, request), request.regex, request.special_tokens))
    assert json.loads(path.read_bytes())["model"]["vocab"]["!"] == 0  # ids of bytes are GPT-2's
    tokenizer = load_tokenizer(TokenizerConfig(name=str(path)))
    assert tokenizer.make_fast is not None
    assert first_difference([*texts, "été <|pad|>"], tokenizer.make_fast(), tokenizer.reference) is None
    assert tokenizer.highest_id == 299
    library = resolve(str(path)).tokenizer
    assert [library.token_to_id(token) for token in request.special_tokens] == [298, 299]


def test_a_special_token_that_was_learned_as_text_is_refused():
    merges = learn(["lowlow"] * 3, request_of(258, "[a-z]+"))
    with refusal("special token 'low': the text has it so often that it was learned as text"):
        definition_of(merges, "[a-z]+", ("low",))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_sizes": [256]}, "greater than 256"),
        ({"vocab_sizes": [257], "special_tokens": ["<a>", "<b>"]}, "256 bytes and 2 special tokens are 258 ids"),
        ({"vocab_sizes": []}, "at least 1 item"),
        ({"vocab_sizes": [300], "special_tokens": ["<a>", "<a>"]}, "names a token twice"),
        ({"vocab_sizes": [300], "fraction": 0}, "greater than 0"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(wrong, message):
    with refusal(message, ValidationError):
        VocabularyRequest.model_validate(wrong)
