"""Tokenizers behind NFC: the tokens of the reference engine, by the fast one where it can be."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from tasks.tokenize.characters import may_change
from tasks.tokenize.engines import Tokenizer, large_string_array, may_use_fast_engine
from tests.tasks.tokenize.test_tokenizers import DEMO, fast, lists, load


def nfc_tokenizer(path: Path) -> Tokenizer:
    """The demo's tokenizer behind NFC, as Qwen's are."""
    path.write_text(json.dumps({**json.loads(DEMO.read_text()), "normalizer": {"type": "NFC"}}))
    return load(path)


def test_a_tokenizer_behind_nfc_has_a_fast_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_texts_that_nfc_changes_have_the_reference_engines_tokens(tokenizer: Tokenizer, texts: list[str], first: int) -> None:
    array = large_string_array(*texts)[first:]
    assert lists(fast(tokenizer), array) == lists(tokenizer.reference, array)


def test_every_character_that_nfc_might_change_is_told() -> None:
    """Those that it changes, or that stand behind others in what it puts together or in order: of two versions of Unicode."""
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
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


def test_what_most_texts_have_is_not_looked_at_twice() -> None:
    """In the middle of texts, and in parts of arrays."""
    texts = [
        "e\u0301",
        "plain \u201cquotes\u201d \u2014 \u2022 \u2122 \u20ac \u2192",
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u6211\u4eec\u3002 \u306f\u3044 \ud55c\uad6d\uc5b4",
        "\U0001f600\ufe0f",
        "",
        "a\u0327",
    ]
    assert may_change(large_string_array(*texts)).tolist() == [True, False, False, False, False, False, True]
    assert may_change(large_string_array(*texts)[1:]).tolist() == [False, False, False, False, False, True]
