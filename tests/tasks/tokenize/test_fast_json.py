"""What the fast engine is known to do right: everything else is left to the reference engine, with a reason."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from flat_tokens.vocabulary import TokenizerJson, resolve
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import ids_of, large_string_array, may_use_fast_engine
from tasks.tokenize.fast_json import NotKnownError, fast_definition
from tasks.tokenize.tokenizers import load_tokenizer
from tests.refusal import refusal
from tests.tasks.tokenize.family import LLAMA3, added, bytes_, metaspace, sequence, split

DEMO = Path(__file__).parents[3] / "deployments/demo/tokenizer.json"


def changed(**changes: Any) -> dict[str, Any]:
    """The demo's definition, with changes of its parts; those of ``model`` are of its options."""
    definition = json.loads(DEMO.read_text())
    model = definition["model"] | changes.pop("model", {})
    return {**definition, "model": model, **changes}


def loaded(definition: dict[str, Any]) -> TokenizerJson:
    return TokenizerJson("tokenizer.json", "digest", definition, Tokenizer.from_str(json.dumps(definition)))


def numbered(*tokens: dict[str, Any]) -> list[dict[str, Any]]:
    size = len(json.loads(DEMO.read_text())["model"]["vocab"])
    return [{**token, "id": size + i} for i, token in enumerate(tokens)]


LACKING = {"byte_fallback": True, "merges": [], "vocab": {f"<0x{value:02X}>": value for value in range(256) if value != 7}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"added_tokens": numbered(added("<tag>", single_word=True))}, "its added token '<tag>' has single_word"),
        ({"added_tokens": numbered(added("<|a", special=True), added("ab"))}, "special token '<|a' may cover a part of .* 'ab'"),
        ({"added_tokens": numbered(added("ab"), added("bc", normalized=True))}, "'ab' and 'bc' may overlap, and one"),
        ({"added_tokens": numbered(added("<l>", lstrip=True), added(" "))}, "lstrip or rstrip, and ' ' is one that has spaces"),
        ({"added_tokens": numbered(added("a" * 257))}, "its added token 'a{20}'... has 257 characters"),
        ({"pre_tokenizer": bytes_()}, r"its pre-tokenizer is ByteLevel\(add_prefix_space=False, .*use_regex=False\)"),
        ({"pre_tokenizer": sequence(split(LLAMA3), bytes_(regex=True))}, "its pre-tokenizer is Split"),
        ({"pre_tokenizer": sequence(split(r"\w+|\W"), bytes_())}, "its pre-tokenizer is Split"),
        ({"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, bytes_())}, "its pre-tokenizer is Digits"),
        ({"pre_tokenizer": None}, "its normalizer is none, its pre-tokenizer none"),
        ({"pre_tokenizer": metaspace()}, "its model has no byte_fallback"),
        ({"pre_tokenizer": metaspace(), "model": LACKING}, "its vocabulary has no token for the byte 0x07"),
        ({"normalizer": {"type": "Lowercase"}}, r"its normalizer is Lowercase\(\)"),
        ({"normalizer": sequence({"type": "NFC"}, {"type": "NFKC"}, of="normalizers")}, r"its normalizer is NFC\(\) \+ NFKC\(\)"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "its model has end_of_word_suffix '</w>'"),
        ({"model": {"continuing_subword_prefix": "##", "merges": []}}, "its model has continuing_subword_prefix '##'"),
        ({"model": {"type": "WordLevel", "unk_token": "a"}}, "its model is WordLevel, not BPE"),
    ],
)
def test_options_that_are_not_known_are_left_to_the_reference_engine(changes: dict[str, Any], why: str) -> None:
    with refusal(why, NotKnownError):
        fast_definition(loaded(changed(**changes)))


def test_options_that_do_not_exist_yet_are_not_known() -> None:
    """A later version of the library may have an option more: in a part that is known, in the model, or in added tokens."""

    def later(name: str, state: dict[str, Any]) -> TokenizerJson:
        known = loaded(changed())
        parts = {part: getattr(known.tokenizer, part) for part in ("normalizer", "pre_tokenizer", "post_processor", "model")}
        parts[name] = SimpleNamespace(__getstate__=lambda: json.dumps(state).encode())
        decoder = known.tokenizer.get_added_tokens_decoder
        return TokenizerJson("name", "digest", known.definition, SimpleNamespace(**parts, get_added_tokens_decoder=decoder))

    assert fast_definition(later("pre_tokenizer", bytes_(regex=True)))
    with refusal("its model has the option twist", NotKnownError):
        fast_definition(dataclasses.replace(loaded(changed()), definition=changed(model={"twist": False})))
    with refusal(r"its pre-tokenizer is ByteLevel.*twist=True", NotKnownError):
        fast_definition(later("pre_tokenizer", {**bytes_(regex=True), "twist": True}))
    with refusal(r"its post-processor is Twist\(\)", NotKnownError):
        fast_definition(later("post_processor", {"type": "Twist"}))
    with refusal("its added tokens have the option twist", NotKnownError):
        fast_definition(loaded(changed(added_tokens=[{**token, "twist": 1} for token in numbered(added("<x>"))])))


def test_a_single_word_is_not_matched_within_a_word_and_a_warning_says_why_it_takes_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    definition = changed(added_tokens=numbered(added("<tag>", single_word=True)))
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    texts, number = ["hello<tag>world", "see <tag> here", "x<tag>", "<tag>"], definition["added_tokens"][0]["id"]
    assert not may_use_fast_engine(tokenizer, "reference", texts)
    assert caplog.records == []
    assert not may_use_fast_engine(tokenizer, "auto", texts)
    (record,) = caplog.records
    why = f"The fast engine does not know {tmp_path}: its added token '<tag>' has single_word. Using the slower reference engine"
    assert record.message.startswith(why)
    tokens = tokenizer.reference(large_string_array(*texts))
    assert [number in ids_of(tokens, i) for i in range(4)] == [False, True, False, True]


def test_tokens_that_no_text_gives_do_not_reach_the_fast_engine() -> None:
    """Characters that are no bytes are in no text, though the bytes that spell them may be."""
    definition = changed()
    model = definition["model"]
    model["vocab"] |= {"中": len(model["vocab"]), "文": len(model["vocab"]) + 1, "中文": len(model["vocab"]) + 2}
    model["merges"] = [*model["merges"], ["中", "文"]]
    kept = json.loads(fast_definition(loaded(definition)).json)["model"]
    assert {"中", "文", "中文"}.isdisjoint(kept["vocab"])
    assert len(kept["merges"]) == len(model["merges"]) - 1


def test_the_order_of_merges_counts_where_two_make_the_same_token() -> None:
    definition = changed()
    model = definition["model"]
    size = len(model["vocab"])
    model["vocab"] |= {"zq": size, "qz": size + 1, "zqz": size + 2}
    added_merges = [["z", "q"], ["q", "z"], ["zq", "z"], ["z", "qz"]]
    spelled = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [*copy.deepcopy(spelled), *added_merges]
    kept = json.loads(fast_definition(loaded(definition)).json)["model"]["merges"]
    assert kept[:-1] == [*spelled, *added_merges]
    assert kept[-1] == kept[0]


def test_ids_of_added_tokens_are_those_of_the_loaded_tokenizer() -> None:
    """A file may list others, which the library passes over."""
    listed = [{**token, "id": token["id"] + 100} for token in numbered(added("<x>"), added("<y>"))]
    definition = loaded(changed(added_tokens=listed))
    kept = json.loads(fast_definition(definition).json)["added_tokens"]
    assert {token["content"]: token["id"] for token in kept} == {
        text: definition.tokenizer.token_to_id(text) for text in ("<x>", "<y>")
    }


def test_a_published_tokenizer_has_the_fast_engine(vocabularies: Path) -> None:
    resolved = resolve(str(vocabularies / "gpt2/tokenizer.json"))
    assert isinstance(resolved, TokenizerJson)
    assert json.loads(fast_definition(resolved).json)["added_tokens"] == []
