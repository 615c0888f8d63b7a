"""Tokenizers: known ids, engines that agree on awkward texts, engines that lie, and files that are no tokenizers."""

import base64
import dataclasses
import hashlib
import importlib
import logging
import re
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import AddedToken, processors

import tasks.tokenize.engines
from flat_tokens.vocabulary import CL100K, definition_file
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import (
    Encode,
    Engine,
    Tokenizer,
    Tokens,
    UnencodableError,
    large_string_array,
    may_use_fast_engine,
    try_fast_engine,
)
from tasks.tokenize.probes import awkward_texts
from tasks.tokenize.tokenizers import load_tokenizer
from tests.processes import in_threads
from tests.refusal import refusal

DEMO = Path(__file__).parents[3] / "deployments/demo/tokenizer.json"
BESIDE = pytest.mark.needs("shared/vocab")  # packages of the lock have the other two
REAL = [pytest.param("gpt2", marks=BESIDE), "cl100k_base", "o200k_base"]


def load(name: str | Path, **settings: Any) -> Tokenizer:
    """A tokenizer by name."""
    return load_tokenizer(TokenizerConfig(name=str(DEMO if name == "demo" else name), **settings))


def lists(encode: Encode, texts: pa.LargeStringArray) -> list[list[int]]:
    ids, offsets, _ = encode(texts)
    assert ids.dtype == np.uint32
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(ids), len(texts) + 1)
    return [ids[begin:end].tolist() for begin, end in pairwise(offsets)]


def fast(tokenizer: Tokenizer) -> Encode:
    assert tokenizer.make_fast is not None
    return tokenizer.make_fast()


def ranks(**changes: int) -> dict[bytes, int]:
    """A vocabulary of all bytes and a few merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"]
    return {token: rank for rank, token in enumerate(tokens)} | {token.encode(): rank for token, rank in changes.items()}


def write_ranks(path: Path, vocabulary: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in vocabulary.items()))
    return path


@pytest.mark.parametrize(
    ("name", "text", "ids", "highest"),
    [
        ("bytes", "hé\0", [105, 196, 170, 1], 256),
        pytest.param("gpt2", "hello world", [31373, 995], 50255, marks=BESIDE),
        ("cl100k_base", "hello world", [15339, 1917], 100255),
        ("o200k_base", "hello world", [24912, 2375], 199997),
    ],
)
def test_known_texts_have_known_ids(name, text, ids, highest):
    """No text gives a special token, whose id is higher."""
    tokenizer = load(name)
    assert lists(tokenizer.reference, large_string_array(text)) == [ids]
    assert tokenizer.decode(ids) == text
    assert tokenizer.highest_id == highest


@pytest.mark.parametrize("name", ["demo", *REAL])
def test_engines_agree_on_awkward_texts_one_by_one_and_together(name):
    """One of them has the texts of special tokens, which are ordinary text."""
    tokenizer = load(name)
    one, texts = fast(tokenizer), list(awkward_texts())
    together = large_string_array(*texts)
    expected = lists(tokenizer.reference, together)
    assert lists(one, together) == expected
    importlib.import_module("awkward")  # with it the engine is given much text at once
    assert lists(one, together[1:]) == expected[1:]
    assert [lists(one, together.slice(i, 1)) for i in range(len(texts))] == [[ids] for ids in expected]
    assert [tokenizer.decode(ids) for ids in expected] == texts
    assert max(map(max, filter(None, expected))) <= tokenizer.highest_id


def test_special_tokens_of_a_tokenizer_json_are_ordinary_text(tmp_path):
    """Also where its file lists them, pads, cuts, and adds tokens around each text."""
    plain, made = load("demo"), tokenizers.Tokenizer.from_file(str(DEMO))
    made.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True, normalized=False) for text in ("<|endoftext|>", "</s>")])
    made.enable_truncation(3)
    made.enable_padding(length=50, pad_id=made.token_to_id("<|endoftext|>"), pad_token="<|endoftext|>")
    specials = [("</s>", made.token_to_id("</s>"))]
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=specials)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    texts = large_string_array("one two three four five", "a <|endoftext|> b</s>", "")
    expected = lists(plain.reference, texts)
    assert lists(tokenizer.reference, texts) == expected
    assert lists(fast(tokenizer), texts) == expected


@pytest.mark.parametrize("name", ["mine.tiktoken", "tokenizer.model"])
def test_a_file_of_ranks_is_the_encoding_of_its_ranks_and_pattern(tmp_path, name):
    """Whatever its name says: Llama 3's ranks are a tokenizer.model."""
    path = tmp_path / name
    path.write_bytes(definition_file("cl100k_base")[0])
    with refusal(rf"{name} holds ranks, not the pattern .* Set tokenizer.pattern"):
        load(path)
    named = load(path, pattern="cl100k_base")
    spelled = load(path, pattern=CL100K)
    original = load("cl100k_base")
    assert named.digest == spelled.digest == original.digest
    assert may_use_fast_engine(named, "auto", [])
    texts = large_string_array(*awkward_texts())
    assert lists(named.reference, texts) == lists(original.reference, texts)


def test_the_digest_is_that_of_what_decides_the_tokens(tmp_path):
    """Not of the name, nor of the order of the lines; but of every rank and of the pattern."""

    def digest(name: str, vocabulary: dict[bytes, int], pattern: str = "gpt2") -> str:
        return load(write_ranks(tmp_path / name, vocabulary), pattern=pattern).digest

    first = digest("a.tiktoken", ranks())
    assert digest("b.tiktoken", dict(reversed(ranks().items()))) == first
    assert len({first, digest("c.tiktoken", ranks(he=300)), digest("d.tiktoken", ranks(), "cl100k_base")}) == 3


def test_digests_are_the_same_for_ever():
    """Another one would have everything tokenized again."""
    bytes_ = "e921f272901f4e674e78db0e4b995ee3a25b2f481cf0848705f7e27ecf5e9b7c"
    assert load("bytes").digest == bytes_
    assert load("demo").digest == hashlib.sha256(DEMO.read_bytes()).hexdigest()


def test_ids_may_have_gaps_and_go_up_to_what_the_format_holds(tmp_path):
    path = write_ranks(tmp_path / "a.tiktoken", ranks(hello=2**31 - 1))
    tokenizer = load(path, pattern="gpt2")
    assert tokenizer.highest_id == 2**31 - 1
    assert lists(tokenizer.reference, large_string_array("hello", "hell"))[0] == [2**31 - 1]
    assert not may_use_fast_engine(tokenizer, "auto", [])


def broken(spoil: Callable[[Tokens], Tokens]) -> Tokenizer:
    """A tokenizer whose fast engine gives something else than the reference."""
    tokenizer = load("bytes")
    facts = {"name": "broken", "digest": f"broken {id(spoil)}"}
    return dataclasses.replace(tokenizer, **facts, make_fast=lambda: lambda texts: spoil(tokenizer.reference(texts)))


def shifted(tokens: Tokens) -> Tokens:
    """The right ids, but one text has a token of its neighbour."""
    offsets = tokens.offsets.copy()
    offsets[3:-1] += 1
    return Tokens(tokens.ids, offsets)


def fails(tokens: Tokens) -> Tokens:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("spoil", [shifted, fails])
def test_a_fast_engine_that_differs_is_not_used_and_a_warning_says_so(spoil, caplog):
    tokenizer = broken(spoil)
    assert may_use_fast_engine(tokenizer, "auto", ["a sample"]) is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "does not give the tokens of broken on " in record.message
    assert "Using the slower reference engine" in record.message
    assert ("RuntimeError: out of luck" in record.message) == (spoil is fails)


SAMPLE = "a sample, long enough that the time that it takes says something " * 2000


@pytest.mark.parametrize(
    ("pattern", "gap", "why"),
    [
        (r"\w+|\W", 0, "its pattern is none of r50k_base, cl100k_base and o200k_base"),
        (CL100K, 7, "its ids have gaps"),
    ],
)
def test_a_build_without_a_fast_engine_is_told_what_that_costs(tmp_path, caplog, pattern, gap, why):
    path = write_ranks(tmp_path / "own.tiktoken", ranks(new=261 + gap))
    tokenizer = load(path, pattern=pattern)
    assert not may_use_fast_engine(tokenizer, "auto", [SAMPLE], text_bytes=60_000_000, processors=2)
    try_fast_engine(tokenizer, "auto", processors=2)  # a first build, before its text is here
    try_fast_engine(tokenizer, "reference", processors=2)
    cost = r"about [\d.]+ MB of text a second and processor, by {}\. .* slower, about [\d:]+ for {} with 2 processors\.$"
    for message, of in zip(caplog.messages, (("the first documents", "60.0 MB"), ("a text in English", "1.0 GB")), strict=True):
        assert message.startswith(f"The fast engine does not know own.tiktoken: {why}. Using the slower reference engine: ")
        assert re.search(cost.format(*of), message)


def test_what_says_nothing_of_the_cost_is_not_taken_for_it(caplog):
    """No text, and little of it."""
    tokenizer = dataclasses.replace(load("bytes"), why_slow="why")
    for samples in ([], ["a"]):
        assert not may_use_fast_engine(tokenizer, "auto", samples, text_bytes=1, processors=1)
    assert all(message.endswith("Using the slower reference engine.") for message in caplog.messages)


def test_the_sample_decides_too(caplog):
    """An engine may differ only on what this source holds; the warning shows the text."""

    tokenizer = broken(lambda tokens: Tokens(tokens.ids * (tokens.ids != ord("Q") + 1), tokens.offsets))
    for text, told in (("Q" * 60, "Q" * 60), ("Q" * 61, "Q" * 57 + "...")):
        assert may_use_fast_engine(tokenizer, "auto", ["a sample", text]) is False
        assert f" on {told!r}. Using the slower" in caplog.messages[-1]


def test_the_fast_engine_is_used_where_it_agrees_and_nobody_forbids_it(caplog):
    tokenizer = broken(lambda tokens: tokens)
    assert may_use_fast_engine(tokenizer, "auto", [])
    assert not may_use_fast_engine(tokenizer, "reference", [])
    assert not may_use_fast_engine(load("bytes"), "auto", [])  # it has none
    assert caplog.records == []


def counting(made: list[int], encode: Encode | None = None) -> Tokenizer:
    """A tokenizer that notes the thread of every fast engine that it makes, which encodes as the reference, if not otherwise."""
    tokenizer = load("bytes")

    def make_fast() -> Encode:
        made.append(threading.get_ident())
        return encode or tokenizer.reference

    return dataclasses.replace(tokenizer, name="counting", digest=f"counting {id(made)}", make_fast=make_fast)


def test_a_thread_keeps_its_engine():
    made = []
    engine = Engine(counting(made), fast=True)
    texts = large_string_array("text")

    def work(_: int) -> None:
        for _ in range(3):
            assert lists(engine, texts) == [[117, 102, 121, 117]]

    in_threads(work, range(3))
    assert len(made) == 3


def test_an_engine_that_forgets_begins_anew():
    """But not under the hands of a thread that tokenizes."""
    made, text = [], large_string_array("text")
    engine = Engine(counting(made, lambda texts: engine.forget() or load("bytes").reference(texts)), fast=True)
    engine(text)
    engine(text)
    assert len(made) == 1
    engine.forget()
    engine(text)
    assert len(made) == 2


def test_an_engine_begins_anew_when_memory_is_short(monkeypatch):
    """It remembers words without end: but only after a stretch of text, and never where memory is plenty."""
    made = []
    engine = Engine(counting(made), fast=True)
    texts = large_string_array("x" * 1000)
    monkeypatch.setattr(tasks.tokenize.engines, "RENEW_AFTER_BYTES", 3500)
    monkeypatch.setattr(tasks.tokenize.engines, "available_memory", lambda: 1 << 62)
    for least in (0, 1 << 60):
        monkeypatch.setattr(tasks.tokenize.engines, "THREAD_BYTES", least)
        for _ in range(8):
            engine(texts)
        assert len(made) == 2


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ({token: rank for token, rank in ranks().items() if token != b"\x07"}, "has no token for the byte 0x07"),
        (ranks(more=2**31), r"line 262: token id 2147483648 is not one of 0 to 2147483647"),
        (ranks(more=-5), "line 262: token id -5 is not one of 0 to"),
        (ranks(more=7), r"line 262: token b'more' or its id 7 has been on a line before"),
    ],
)
def test_ranks_that_cannot_be_are_refused(tmp_path, vocabulary, words):
    path = write_ranks(tmp_path / "a.tiktoken", vocabulary)
    with refusal(f"^{path}.*{words}"):
        load(path, pattern="gpt2")


@pytest.mark.parametrize("pattern", ["gpt-2", "[a-z]+", r"\S+", "(?s:.{1,100})(?<=x)"])
def test_a_pattern_that_leaves_out_text_is_refused(tmp_path, pattern):
    """Such as a mistyped name of an encoding, which is a valid pattern that matches nothing."""
    path = write_ranks(tmp_path / "a.tiktoken", ranks())
    with refusal(r"passes over a part of .*text would be lost. Set tokenizer.pattern .*gpt2, r50k_base"):
        load(path, pattern=pattern)


class Panic(BaseException):
    """What the fault of a library in Rust is in Python: no Exception."""


def test_what_makes_the_fast_engine_fail_is_left_to_the_reference():
    """And the instance that failed is not used again."""
    made = []

    def encode(texts: pa.LargeStringArray) -> Tokens:
        if "bad" in texts.to_pylist():
            raise Panic("poisoned")
        return load("bytes").reference(texts)

    engine = Engine(counting(made, encode), fast=True)
    texts = large_string_array("a", "bad", "b")
    with refusal("Panic: poisoned", UnencodableError):
        engine(texts)
    taken = [tokens for tokens in engine.one_by_one(texts) if isinstance(tokens, Tokens)]
    assert [tokens.ids.tolist() for tokens in taken] == [[98], [99, 98, 101], [99]]
    assert len(made) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_no_fault_of_the_text_is_not_taken_for_one(error):
    def encode(texts: pa.LargeStringArray) -> Tokens:
        raise error

    tokenizer = dataclasses.replace(load("bytes"), reference=encode)
    with pytest.raises(error):
        Engine(tokenizer, fast=False)(large_string_array("a"))


def test_loading_again_is_for_nothing():
    assert load("demo") is load("demo")
