"""Characters on which libraries of different versions of Unicode differ, and those that NFC changes: texts with them are left to
the reference engine.
"""

import functools
import itertools
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from flat_tokens.vocabulary import O200K
from tasks.tokenize.characters import (
    BLOCK_BYTES,
    CHARACTERS_OF_17,
    LETTERS_OF_17,
    UNICODE_17,
    UNICODE_17_SYMBOLS,
    may_change,
)
from tasks.tokenize.engines import Encode, Tokenizer, ids_of, large_string_array, may_use_fast_engine
from tasks.tokenize.fast_json import DEEPSEEK, PATTERNS
from tasks.tokenize.tokenizers import json_tokenizer
from tests.examples import first_fast
from tests.tasks.tokenize.family import ALPHABET, bytes_, definition_of, loaded, sequence, split
from tests.tasks.tokenize.test_tokenizers import DEMO, fast, lists, load, write_ranks


@functools.cache
def all_characters() -> list[str]:
    return [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]


LETTERS = {chr(point) for first, last in UNICODE_17 for point in range(first, last)}
SYMBOLS = {chr(point) for first, last in UNICODE_17_SYMBOLS for point in range(first, last)}


def test_they_are_those_that_unicode_17_added():
    assert len(LETTERS | SYMBOLS) == len(LETTERS) + len(SYMBOLS) == 4803


@pytest.mark.parametrize(("found_by", "those"), [(LETTERS_OF_17, LETTERS), (CHARACTERS_OF_17, LETTERS | SYMBOLS)])
def test_each_of_them_is_found_and_no_other(found_by, those):
    found = found_by.texts(large_string_array(*all_characters())).nonzero()[0]
    assert {all_characters()[i] for i in found} == those


def test_they_are_found_anywhere_in_long_texts_and_in_parts_of_arrays():
    """At the ends, and where blocks end."""
    for lead in range(4):
        filler = "a" * (BLOCK_BYTES - lead)
        texts = large_string_array("", filler + "\U000323b0", "x\u088f", "\u20ac" * 99, "\ua7f1", "")
        assert LETTERS_OF_17.texts(texts).tolist() == [False, True, True, False, True, False]
        assert LETTERS_OF_17.texts(texts[2:5]).tolist() == [True, False, True]
    assert LETTERS_OF_17.texts(large_string_array()).tolist() == []


def pair_tokenizer(pre_tokenizer: dict[str, Any]) -> tuple[Encode, Encode]:
    """A tokenizer whose tokens tell where its pattern splits, for any two bytes make one; its two engines."""
    merges = [list(pair) for pair in itertools.product(ALPHABET, ALPHABET)]
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, *map("".join, merges)])}
    definition = definition_of(None, pre_tokenizer, {"type": "BPE", "vocab": vocabulary, "merges": merges}, [])
    tokenizer = json_tokenizer(loaded(definition))
    assert tokenizer.make_fast is not None
    return tokenizer.make_fast(), tokenizer.reference


def rank_tokenizer(path: Path, pattern: str) -> tuple[Encode, Encode]:
    """The same of ranks."""
    tokens = [bytes([one]) for one in range(256)] + [bytes(pair) for pair in itertools.product(range(256), repeat=2)]
    write_ranks(path, {token: i for i, token in enumerate(tokens)})
    loaded = load(path, pattern=pattern)
    assert loaded.make_fast is not None
    return loaded.make_fast(), loaded.reference


def differing(engines: tuple[Encode, Encode], characters: list[str]) -> Iterator[str]:
    """Characters whose texts have other tokens by one engine than by the other."""
    for around in ("a{}.", "1{}1", "A{}b", "'{}", " {}", "\n {} ", "'s{}a\n"):
        for start in range(0, len(characters), 50_000):
            some = characters[start : start + 50_000]
            texts = large_string_array(*(around.replace("{}", character) for character in some))
            one, other = (encode(texts) for encode in engines)
            if not (np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)):
                yield from (some[i] for i in range(len(some)) if not np.array_equal(ids_of(one, i), ids_of(other, i)))


SOME = [*all_characters()[:0x3000], *all_characters()[0x3000::199], *sorted(LETTERS | SYMBOLS)[::9]]


@pytest.mark.parametrize("patterns", first_fast([DEEPSEEK, *zip(PATTERNS, strict=True)], every=len(PATTERNS)), ids=len)
def test_engines_agree_on_characters_of_all_scripts(patterns):
    assert list(differing(pair_tokenizer(sequence(*map(split, patterns), bytes_())), SOME)) == []


def test_engines_agree_on_characters_of_all_scripts_by_ranks(tmp_path):
    assert list(differing(rank_tokenizer(tmp_path / "pairs.tiktoken", O200K), SOME)) == []


def nfc_tokenizer(path: Path) -> Tokenizer:
    """The demo's tokenizer behind NFC, as Qwen's are."""
    path.write_text(json.dumps({**json.loads(DEMO.read_text()), "normalizer": {"type": "NFC"}}))
    return load(path)


def test_a_tokenizer_behind_nfc_has_a_fast_engine(tmp_path, caplog):
    assert may_use_fast_engine(nfc_tokenizer(tmp_path / "tokenizer.json"), "auto", ["e\u0301", "\u0958", "a\u0308\u0323"])
    assert caplog.records == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return nfc_tokenizer(tmp_path_factory.getbasetemp() / "nfc.json")


@given(
    texts=st.lists(
        st.text(
            st.sampled_from("ae A\u0300\u0301\u0323\u0327\u0345\u0958\u212b\u1100\u1161\u11a8\uac00é中\u0897\U00016121 <>=\u0338")
        )
        | st.text(st.characters(codec="utf-8")),
        max_size=6,
    ),
    first=st.integers(0, 3),
)
def test_texts_that_nfc_changes_have_the_reference_engines_tokens(tokenizer, texts, first):
    array = large_string_array(*texts)[first:]
    assert lists(fast(tokenizer), array) == lists(tokenizer.reference, array)


def test_every_character_that_nfc_might_change_is_told():
    """Those that it changes, or that stand behind others in what it puts together or in order: of two versions of Unicode."""
    characters = all_characters()
    seconds = {chr(point) for first, last in ((0x1161, 0x1176), (0x11A8, 0x11C3)) for point in range(first, last)}
    for character in characters:
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and "<" not in parts[0]:
            seconds.add(chr(int(parts[1], 16)))
    of_engine = normalizers.NFC()
    missed = [
        character
        for character, told in zip(characters, may_change(large_string_array(*characters)).tolist(), strict=True)
        if not told
        and (
            character in seconds
            or unicodedata.combining(character)
            or unicodedata.normalize("NFC", character) != character
            or of_engine.normalize_str(character) != character
        )
    ]
    assert missed == []


def test_what_most_texts_have_is_not_looked_at_twice():
    """In the middle of texts, and in parts of arrays."""
    texts = [
        "e\u0301",
        "plain \u201cquotes\u201d \u2014 \u2022 \u2122 \u20ac \u2192",
        "\u6211\u4eec\u3002 \u306f\u3044 \ud55c\uad6d\uc5b4",
        "\U0001f600\ufe0f",
        "a\u0327",
    ]
    assert may_change(large_string_array(*texts)).tolist() == [True, False, False, False, True]
    assert may_change(large_string_array(*texts)[1:]).tolist() == [False, False, False, True]
