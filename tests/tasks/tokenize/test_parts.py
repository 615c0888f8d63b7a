"""Texts in parts: an engine on the ordinary ones gives the tokens and masks of the reference on the whole text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flat_tokens.vocabulary import resolve
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Engine, Tokens, UnencodableError, large_string_array
from tasks.tokenize.parts import PartEncoder
from tasks.tokenize.rendering.processes import TextParts
from tasks.tokenize.rendering.request import ORDINARY
from tasks.tokenize.tokenizers import json_tokenizer, load_tokenizer
from tests.examples import examples

SPECIALS = ("<s>", "</s>")
TEXTS = ["What is the answer? It is 4, é 😀 中.", "user assistant\nsystem  thanks, a b c 12"] * 4
SPACES = normalizers.Replace(" ", "▁")
BYTES = [f"<0x{value:02X}>" for value in range(256)]

Part = str | int
Text = tuple[list[Part], list[tuple[int, int]]]
"""Parts, and the places of what counts, in characters, where a special token has two."""


def byte_level(normalizer: Any = None, **options: Any) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    return made


def spaced(normalizer: Any = None, splits: Any = None, fallback: bool = True) -> Tokenizer:
    """As SentencePiece has it: a space is a character of its own, and unknown characters are bytes, or unknown."""
    made = Tokenizer(models.BPE(byte_fallback=fallback, fuse_unk=True, unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    if splits is not None:
        made.pre_tokenizer = splits
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *(BYTES if fallback else [])], initial_alphabet=["▁", "e"], show_progress=False
    )
    made.train_from_iterator([text.replace("é", "e").replace("😀", "").replace("中", "") for text in TEXTS], trainer)
    definition = json.loads(made.to_str())
    definition["added_tokens"] = definition["added_tokens"][:1]  # bytes are the model's
    return Tokenizer.from_str(json.dumps(definition))


MAKE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes after a space": lambda: byte_level(add_prefix_space=True),
    "bytes after lower case": lambda: byte_level(normalizers.Lowercase()),
    "bytes after NFC": lambda: byte_level(normalizers.NFC()),
    "bytes of words": lambda: byte_level(use_regex=False),
    "spaces before": lambda: spaced(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])),
    "spaces": lambda: spaced(SPACES),
    "spaces, unknown characters": lambda: spaced(SPACES, fallback=False),
    "metaspace": lambda: spaced(splits=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace, never": lambda: spaced(splits=pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "metaspace, first": lambda: spaced(splits=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "words": lambda: spaced(splits=pre_tokenizers.Whitespace()),
}
KNOWN = ("bytes", "bytes after a space", "bytes of words", "spaces before", "spaces", "metaspace", "metaspace, never")
"""Tokenizers whose tokens tell their places in all text, but for characters that they do not know."""


def engine_of(config: TokenizerConfig) -> Engine:
    """The engine of a file, which tokenizes each text alone, takes special strings for text, and may leave out text."""
    loaded = json_tokenizer(resolve(config.name))
    return Engine(loaded, loaded.why_slow is None)


def refusing(config: TokenizerConfig) -> Callable[[pa.LargeStringArray], Tokens]:
    """An engine that takes no text."""

    def encode(texts: pa.LargeStringArray) -> Tokens:
        raise UnencodableError("no")

    return encode


def saved(tokenizer: Tokenizer, path: Path, **options: bool) -> TokenizerConfig:
    """The tokenizer with special tokens, and one that is not special, as a file."""
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, **options) for text in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    return TokenizerConfig(name=str(path / "tokenizer.json"))


def parted(texts: list[Text]) -> TextParts:
    """Texts in parts, with places in bytes."""
    kinds, ordinary, spans, at = [], [], [], 0
    for parts, own in texts:
        places = [at]  # character -> byte
        for part in parts:
            kinds.append(part if isinstance(part, int) else ORDINARY)
            if isinstance(part, str):
                ordinary.append(part)
            for size in [1, 1] if isinstance(part, int) else [len(character.encode()) for character in part]:
                at += size
                places.append(at)
        spans += [(places[start], places[stop]) for start, stop in own]
    counts = np.array([len(parts) for parts, _ in texts], np.int64)
    array = large_string_array(*ordinary)
    return TextParts(counts, np.array(kinds, np.int64), array, np.array(spans, np.int64).reshape(-1, 2), {})


def places_of(parts: list[Part]) -> list[int]:
    """Places between characters that are no halves of special tokens."""
    places = [0]
    for part in parts:
        at = places[-1]
        places += [at + 2] if isinstance(part, int) else range(at + 1, at + len(part) + 1)
    return places


characters = st.sampled_from([*"ab \n12.tshe", "é", "e\u0301", "😀", "中", "▁", "<s>", "<think>", "It is", "answer "])
ordinary_parts = st.lists(characters, min_size=1, max_size=8).map("".join)


@st.composite
def texts_in_parts(draw: st.DrawFn) -> Text:
    """Ordinary parts, never two in a row, and spans between places that are no halves of special tokens."""
    parts = []
    for is_special, text in draw(st.lists(st.tuples(st.booleans(), ordinary_parts), max_size=6)):
        parts += [0 if len(text) % 2 else 1] if is_special or (parts and isinstance(parts[-1], str)) else [text]
    borders = sorted(draw(st.lists(st.sampled_from(places_of(parts)), max_size=6)))
    return parts, list(zip(borders[::2], borders[1::2], strict=False))


@pytest.mark.parametrize("name", MAKE)
def test_an_engine_gives_the_tokens_and_masks_of_the_reference(name, tmp_path):
    """Of many texts together. Where the tokens do not tell their places, the reference tokenizes the text."""
    config = saved(MAKE[name](), tmp_path).model_copy(update={"lossy": True})
    fast, reference = PartEncoder(config, engine_of(config)), PartEncoder(config, None)

    @given(st.lists(texts_in_parts(), max_size=5))
    @examples(100)
    def same(texts: list[Text]) -> None:
        assert check_same(fast, reference, texts).faults == {}

    same()
    if name in KNOWN:
        fast.by_reference = 0
        fast(parted([(["It is ", 0, "thé answer.", 1, " thanks"], [(3, 10), (12, 22)])]))
        assert fast.by_reference == 0


AROUND: list[Text] = [(["a ", 0, " b"], [(0, 3)]), (["a b"], [(1, 2)])]


@pytest.mark.parametrize(
    ("name", "options", "engine", "texts", "count"),
    [
        # Its neighbours keep their masks.
        (
            "spaces, unknown characters",
            (),
            engine_of,
            [([0, 1], []), (["a中e b"], [(1, 2), (3, 4)]), ([0, 1], []), (["e e"], [(1, 2)])],
            1,
        ),
        # Special tokens that have the space around them, which their neighbours then do not have.
        *(("bytes", (option,), engine_of, AROUND, 1) for option in ("lstrip", "rstrip", "single_word")),
        ("bytes", (), refusing, AROUND, 2),
    ],
)
def test_some_texts_are_left_to_the_reference(tmp_path, name, options, engine, texts, count):
    """Those whose tokens do not tell their places, and those that the engine does not take."""
    config = saved(MAKE[name](), tmp_path, **dict.fromkeys(options, True))
    fast = PartEncoder(config, engine(config))
    check_same(fast, PartEncoder(config, None), texts)
    assert fast.by_reference == count


def test_texts_that_lose_everything_are_refused(tmp_path):
    """Those that people can see, unless the tokenizer may be lossy. The others keep their tokens."""
    definition = json.loads(spaced(SPACES, fallback=False).to_str())
    definition["model"]["unk_token"] = None
    config = saved(Tokenizer.from_str(json.dumps(definition)), tmp_path)
    texts = [(["e"], [(0, 1)]), (["中"], []), ([0], [(0, 2)])]
    for engine in (engine_of(config), None):
        strict = PartEncoder(config, engine)(parted(texts))
        assert {i: fault.reason for i, fault in strict.faults.items()} == {1: "unencodable"}
        assert np.diff(strict.tokens.offsets).tolist() == [1, 0, 1]
        assert strict.tokens.mask.tolist() == [1, 1]
        assert not PartEncoder(config.model_copy(update={"lossy": True}), engine)(parted(texts)).faults


def test_a_tokenizer_without_a_definition():
    """tiktoken's."""
    config = TokenizerConfig(name="cl100k_base")
    fast, reference = PartEncoder(config, Engine(load_tokenizer(config), fast=True)), PartEncoder(config, None)

    @given(st.lists(texts_in_parts(), max_size=5))
    @examples(60)
    def same(texts: list[Text]) -> None:
        check_same(fast, reference, texts)

    same()
    assert fast.by_reference == 0


def check_same(fast: PartEncoder, reference: PartEncoder, texts: list[Text]) -> Any:
    """What both give."""
    one, other = fast(parted(texts)), reference(parted(texts))
    assert one.faults == other.faults
    assert one.tokens.ids.tolist() == other.tokens.ids.tolist()
    assert one.tokens.offsets.tolist() == other.tokens.offsets.tolist()
    assert one.tokens.mask.tolist() == other.tokens.mask.tolist()
    return one
