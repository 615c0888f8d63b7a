"""Normalised words: what is in a word, and that texts in a batch have the words that each has alone."""

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flat_tokens.steps.words import words_of
from flat_tokens.text.rows import text_buffers
from tests.examples import examples

WORDS = [
    ("Hello, World!  x", "hello world x"),
    ("don't 1,000.50\r\n", "don t 1 000 50"),
    ("É café e\u0301 ÅÄ ñ", "e cafe e aa n"),
    ("“quoted”—and…so", "quoted and so"),
    ("so\u00adft jo\u2060in zero\u200bwidth", "soft join zero width"),
    ("ＡＢ１ K ﬁ ﬃ Straße STRAẞE", "ab1 k fi ffi strasse strasse"),
    ("日本語a テ。x", "日 本 語 a テ x"),
    ("ไทย กำ 한글 नमस्ते क़", "ไ ท ย ก ํ า 한글 नमस्ते क़"),
    ("Ⱥ 𐐀 😀 𠀀𠀁 丽", "ⱥ 𐐨 𠀀 𠀁 丽"),
    ("שָׁלוֹם مَرْحَبًا", "שלום مرحبا"),
    ("ᾳΣ ½ Ⅷ ㎏ ｶﾞ ﻻ Ꭰ", "αισ 1 2 viii kg ガ لا Ꭰ"),
    ("", ""),
]


def words(*texts: str) -> list[list[str]]:
    data, offsets = text_buffers(pa.array(["", "before", *texts], pa.large_string()).slice(2))
    found = words_of(data, offsets)
    many = [found.data[start:stop].tobytes().decode() for start, stop in zip(found.starts, found.stops, strict=True)]
    return [many[found.bounds[k] : found.bounds[k + 1]] for k in range(len(texts))]


@pytest.mark.parametrize(("text", "expected"), WORDS)
def test_words_have_no_case_accents_or_punctuation(text, expected):
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    for some in (text, *forms, *map(str.upper, forms), *map(str.casefold, forms)):
        assert [" ".join(found) for found in words(some)] == [expected]


@given(st.lists(st.text(st.sampled_from("aB é\u0301日,x9\u00ad“𠀀ßﬁᾳ\u1112\u1161\u11ab"), max_size=30), max_size=6))
@example(["ab", "cd", "", "é", "f"])
@example(["\ud558", "\u11ab", "\u0301\u11ab", "\ud558x\u0301\u11ab"])  # one syllable, if they are in one text
@examples(40)
def test_a_batch_has_the_words_of_each_text(texts):
    assert words(*texts) == [words(text)[0] for text in texts]


def test_the_place_of_a_word_in_its_text_is_known():
    text = "É-e\u0301x 日本 so\u00adft ßa ﬁt ᾳb Ｋend".encode()
    found = words_of(np.frombuffer(text, np.uint8), np.array([0, len(text)]))
    places = found.in_texts(found.starts)
    assert [text[place:].decode()[0] for place in places] == ["É", "e", "日", "本", "s", "ß", "ﬁ", "ᾳ", "Ｋ"]


def test_long_words_differ_by_their_first_64_bytes_and_length():
    texts = ["x" * 70, "x" * 71, "x" * 63 + "y", "y" + "x" * 63, "x" * 64, "x", ""]
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    assert len({*words_of(data, offsets).hashes.tolist()}) == len(texts) - 1
