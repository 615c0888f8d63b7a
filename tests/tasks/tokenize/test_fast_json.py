"""What the fast engine is known to do right: everything else is left to the reference engine, with a reason."""

import dataclasses
import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from flat_tokens.vocabulary import TokenizerJson, resolve
from tasks.tokenize.fast_json import LLAMA3, QWEN2, NotKnownError, fast_definition
from tests.refusal import refusal
from tests.tasks.tokenize.family import (
    ALPHABET,
    PIECE,
    PREPEND,
    SPACES,
    added,
    bytes_,
    loaded,
    metaspace,
    numbered,
    sequence,
    split,
    template_processing,
)
from tests.tasks.tokenize.test_tokenizers import DEMO, load


def changed(**changes: Any) -> dict[str, Any]:
    """The demo's definition, with changes of its parts; those of ``model`` are of its options."""
    definition = json.loads(DEMO.read_text())
    model = definition["model"] | changes.pop("model", {})
    return {**definition, "model": model, **changes}


FALLBACK = {f"<0x{value:02X}>": value for value in range(256)}
VOCABULARY = changed()["model"]["vocab"]


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return sequence(*steps, of="normalizers")


def tokens(*added_tokens: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"added_tokens": numbered(added_tokens, VOCABULARY), **others}


def of_characters(vocabulary: dict[str, int], **options: Any) -> dict[str, Any]:
    """A model of characters that falls back to bytes."""
    return {"pre_tokenizer": metaspace(), "model": {"byte_fallback": True, "merges": [], "vocab": vocabulary, **options}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (tokens(added("<tag>", single_word=True)), "its added token '<tag>' has single_word"),
        (tokens(added("<|a", special=True), added("ab")), "special token '<|a' may cover a part of .* 'ab'"),
        (tokens(added("<tag>", special=True), added("tag")), "special token '<tag>' may cover a part of .* 'tag'"),
        (tokens(added("cab", special=True, normalized=True), added("ab", normalized=True)), "'cab' may cover a part of .* 'ab'"),
        (tokens(added("ab"), added("bc", normalized=True)), "'ab' and 'bc' may overlap, and one"),
        (tokens(added("<l>", lstrip=True), added(" ")), "lstrip or rstrip, and ' ' is one that has spaces"),
        (tokens(added("a" * 257)), "its added token 'a{20}'... has 257 characters"),
        (tokens(added(" abc"), pre_tokenizer=bytes_(regex=True, space=True)), "adds a space, and its added token ' abc' begins"),
        (
            tokens(added("\u00e9", normalized=True), added("e\u0301", normalized=True), normalizer={"type": "NFC"}),
            "two of its added tokens are the same when they are normalized",
        ),
        (tokens(added("<x>", special=True), added("<x>")), "added tokens have the same text"),
        ({"pre_tokenizer": bytes_()}, r"its pre-tokenizer is ByteLevel\(add_prefix_space=False, .*use_regex=False\)"),
        *(
            ({"pre_tokenizer": sequence(*steps)}, f"its pre-tokenizer is {steps[0]['type']}")
            for steps in (
                (split(QWEN2, "Removed"), bytes_()),
                (split(LLAMA3), split(QWEN2), bytes_()),
                (split(LLAMA3.replace(r"\s*[\r\n]+", r"\s*[\r\n]")), bytes_()),
            )
        ),
        *(
            ({"normalizer": norm, "pre_tokenizer": pre}, "its normalizer is .*, its pre-tokenizer ")
            for norm, pre in (
                (None, split(QWEN2)),
                (None, metaspace(replacement="_")),
                (normalizers(PREPEND, SPACES), metaspace()),
            )
        ),
        ({"pre_tokenizer": metaspace()}, "its model has no byte_fallback"),
        (of_characters({token: i for token, i in FALLBACK.items() if i != 7}), "its vocabulary has no token for the byte 0x07"),
        (of_characters({**FALLBACK, "<0xe4>": 256}), "its vocabulary has the token '<0xe4>', which is not a byte's"),
        (of_characters({**FALLBACK, "a": 256, "<0xE4>a": 257}, merges=[["<0xE4>", "a"]]), "its model merges '<0xE4>' and 'a'"),
        (of_characters(FALLBACK, ignore_merges=True), "its model has ignore_merges with byte_fallback"),
        ({"normalizer": {"type": "Lowercase"}}, r"its normalizer is Lowercase\(\)"),
        ({"normalizer": normalizers({"type": "NFC"}, {"type": "NFKC"})}, r"its normalizer is NFC\(\) \+ NFKC\(\)"),
        (
            {"model": {"vocab": dict(zip(ALPHABET[1:], count(), strict=False)), "merges": []}},
            "its vocabulary has no token for the byte 0x00",
        ),
        ({"model": {"end_of_word_suffix": "</w>"}}, "its model has end_of_word_suffix '</w>'"),
        ({"model": {"continuing_subword_prefix": "##", "merges": []}}, "its model has continuing_subword_prefix '##'"),
        ({"model": {"type": "WordLevel", "unk_token": "a"}}, "its model is WordLevel, not BPE"),
        ({"model": {"vocab": {"a": 0, "b": 1 << 25}, "merges": []}}, "it has token ids up to 33554432"),
        ({"model": {"vocab": {"a": 0, "b": 0}, "merges": []}}, "its vocabulary has two tokens with the same id"),
        ({"model": {"vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]] * 2}}, "its model has the same merge twice"),
        ({"post_processor": template_processing(PIECE, PIECE)}, "its post-processor is TemplateProcessing"),
    ],
)
def test_options_that_are_not_known_are_left_to_the_reference_engine(changes, why):
    with refusal(why, NotKnownError):
        fast_definition(loaded(changed(**changes)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"dropout": 0.1}, "the model has dropout 0.1, so its tokens are random"),
        ({"vocab": {"a": 2**31}, "merges": []}, "has token ids up to 2147483648, but the format holds 0 to 2147483647"),
    ],
)
def test_a_model_that_no_build_can_use_is_refused(tmp_path, model, words):
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed(model=model)))
    with refusal(words):
        load(tmp_path)


def test_options_that_do_not_exist_yet_are_not_known():
    """A later version of the library may have an option more: in a part that is known, in the model, or in added tokens."""

    def later(name: str, state: dict[str, Any]) -> TokenizerJson:
        known = loaded(changed())
        parts = {part: getattr(known.tokenizer, part) for part in ("normalizer", "pre_tokenizer", "post_processor", "model")}
        parts[name] = SimpleNamespace(__getstate__=lambda: json.dumps(state).encode())
        decoder = known.tokenizer.get_added_tokens_decoder
        return TokenizerJson("name", "digest", known.definition, SimpleNamespace(**parts, get_added_tokens_decoder=decoder))

    with refusal("its model has the option twist", NotKnownError):
        fast_definition(dataclasses.replace(loaded(changed()), definition=changed(model={"twist": False})))
    with refusal(r"its pre-tokenizer is ByteLevel.*twist=True", NotKnownError):
        fast_definition(later("pre_tokenizer", {**bytes_(regex=True), "twist": True}))
    with refusal(r"its post-processor is Twist\(\)", NotKnownError):
        fast_definition(later("post_processor", {"type": "Twist"}))
    with refusal("its added tokens have the option twist", NotKnownError):
        fast_definition(loaded(changed(**tokens(added("<x>", twist=True)))))


def test_the_fast_engine_goes_by_the_order_of_merges_and_has_no_tokens_that_no_text_gives():
    """Where two merges make the same token, one is repeated. Characters that are no bytes are in no text."""
    definition = changed()
    model = definition["model"]
    model["vocab"] |= {token: i for i, token in enumerate(("zq", "qz", "zqz", "中", "文", "中文"), len(model["vocab"]))}
    model["merges"] += [["z", "q"], ["q", "z"], ["zq", "z"], ["z", "qz"], ["中", "文"]]
    kept = json.loads(fast_definition(loaded(definition)).json)["model"]
    assert {"中", "文", "中文"}.isdisjoint(kept["vocab"])
    assert kept["merges"] == [*model["merges"][:-1], kept["merges"][0]]


def test_a_published_tokenizer_has_the_fast_engine(vocabularies):
    resolved = resolve(str(vocabularies / "gpt2/tokenizer.json"))
    assert isinstance(resolved, TokenizerJson)
    assert json.loads(fast_definition(resolved).json)["added_tokens"] == []
