"""Vocabularies: the bytes of every id, whoever's tokenizer it is, and the digests that builds write down."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flat_tokens.vocabulary import Vocabulary, load_vocabulary, token_bytes
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import large_string_array
from tasks.tokenize.tokenizers import load_tokenizer
from tests.flat_tokens.demo import TOKENIZER
from tests.refusal import refusal

BYTES = load_vocabulary("bytes")
AWKWARD = ["", " ", "Hello wörld 😀 <|endoftext|>\n\n x", "\ufeffa\r\n\tb", "日本語 العربية e\u0301", "def f(x):\n    return x"]


def rank_file(path: Path) -> Path:
    """A vocabulary of all bytes and a few merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the"]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


def decoded(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return vocabulary.decode(np.array(ids, np.uint32))[0]


def check_same_tokenizer(vocabulary: Vocabulary, config: TokenizerConfig) -> None:
    """The vocabulary gives the ids and has the digest of the tokenizer that a build would use, and gives its text back."""
    tokenizer = load_tokenizer(config)
    assert vocabulary.digest == tokenizer.digest
    assert vocabulary.encode is not None
    for text in AWKWARD:
        ids = vocabulary.encode(text)
        assert ids.tolist() == tokenizer.reference(large_string_array(text)).ids.tolist()
        assert vocabulary.decode(ids)[0].decode() == text


CL100K = pytest.param("cl100k_base", marks=pytest.mark.needs("bpe_openai"))


@pytest.mark.parametrize("name", ["bytes", TOKENIZER, pytest.param("gpt2", marks=pytest.mark.needs("shared/vocab")), CL100K])
def test_ids_and_digests_are_those_of_builds(name):
    check_same_tokenizer(load_vocabulary(name), TokenizerConfig(name=name))


def test_a_rank_file_with_its_pattern_is_the_builds_tokenizer(tmp_path):
    path, pattern = str(rank_file(tmp_path / "small.tiktoken")), r"\s?\w+|\W"
    check_same_tokenizer(load_vocabulary(path, pattern=pattern), TokenizerConfig(name=path, pattern=pattern))


def test_a_rank_file_without_its_pattern_decodes_but_does_not_encode(tmp_path):
    vocabulary = load_vocabulary(str(rank_file(tmp_path / "small.tiktoken")))
    assert decoded(vocabulary, [104, 105, 258]) == b"hi the"
    assert vocabulary.encode is None
    assert vocabulary.digest is None


def test_ids_that_stand_for_nothing_are_replacement_characters():
    """Id 0 of ``bytes``, and ids behind the last, up to the largest that the format holds."""
    data, ends = BYTES.decode(np.array([0, 98, 257, 2**31 - 1], np.uint32))
    assert (data.decode(), ends.tolist()) == ("\ufffda\ufffd\ufffd", [3, 4, 7, 10])
    assert BYTES.piece(0) == BYTES.piece(2**31 - 1) == "\ufffd".encode()
    assert (BYTES.piece(98), BYTES.size) == (b"a", 257)
    assert BYTES.lengths[:3].tolist() == [0, 1, 1]
    assert Vocabulary.of("none", None, {}, None).decode(np.array([5], np.uint32))[0].decode() == "\ufffd"


def added(number: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def tokenizer_json(vocabulary: dict[str, int], decoder: dict[str, Any] | None, **model: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [added(len(vocabulary), "<s>▁")],
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], **model},
    }


LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "model", "text"),
    [
        # The way of Llama and Mistral: a sign for the space, and bytes by their values.
        ({"▁a": 0, "<0xE2>": 1, "b": 2}, LLAMA, {}, b" a\xe2b"),
        ({"▁a": 0, "b▁": 1}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, {}, b" ab "),
        ({"[UNK]": 0, "play": 1, "##ing": 2}, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {}, b" [UNK] playing"),
        ({"lo": 0, "w</w>": 1}, {"type": "BPEDecoder", "suffix": "</w>"}, {}, b"low "),
        # The way of GPT-2: Ġ is the space, Ċ the line's end, Ã© the two bytes of é.
        (
            {"Ġa": 0, "Ċ": 1, "Ã©": 2},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            {},
            " a\né".encode(),
        ),
        ({"a": 0, "b": 1}, None, {}, b"ab"),
    ],
)
def test_tokens_of_a_tokenizer_json_become_bytes_as_its_decoder_says(tmp_path, vocabulary, decoder, model, text):
    """Added tokens stand for what they are called, in any of them."""
    definition = tokenizer_json(vocabulary, decoder, **model)
    if decoder and decoder["type"] == "WordPiece":
        kind = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        definition["model"] = {**kind, "vocab": vocabulary}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    loaded = load_vocabulary(str(tmp_path))
    assert decoded(loaded, [*range(len(vocabulary)), len(vocabulary)]) == text + "<s>▁".encode()


def test_a_file_that_is_nearly_there_is_refused_with_the_one_that_is(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for wrong in ("tokeniser.json", "tokenzer.json"):
        with refusal(rf"No such file or directory. Did you mean {tmp_path}/tokenizer.json\?"):
            load_vocabulary(str(tmp_path / wrong))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt-2", "gpt2"),
        ("cl100k", "cl100k_base"),
        ("gpt-4o", "o200k_base"),  # a model
        ("BYTES", "bytes"),
        ("/nowhere/gpt2x", None),
    ],
)
def test_a_name_that_is_nearly_one_is_refused_with_that(name, near):
    question = rf" Did you mean '{near}'\?" if near else ""
    with refusal(rf"^there is no tokenizer '{name}'\.{question} Set tokenizer to one of"):
        load_vocabulary(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("vocab.json", {"a": 0, "b": 1}),
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
        ("config.json", {"model_type": "gpt2", "vocab_size": 9}),
        ("merges.txt", ["a b"]),
    ],
)
def test_a_tokenizer_of_another_form_is_refused_with_the_way_to_one_that_is_read(tmp_path, file, content):
    """By its content, whatever it is called; by its name within a directory; with the tokenizer.json where there is one."""
    (tmp_path / file).write_text(json.dumps(content))
    advice = (
        rf"transformers makes a tokenizer.json of many others: AutoTokenizer.from_pretrained\('{tmp_path}'\)\.save_pretrained"
    )
    with refusal(rf"the tokenizer {tmp_path} has no tokenizer.json, only {file}. {advice}"):
        load_vocabulary(str(tmp_path))
    other = tmp_path / (f"other{Path(file).suffix}")
    (tmp_path / file).rename(other)
    words = f"is a {file}, not a tokenizer.json" if file.endswith(".json") else "is none of tokenizer.json, tekken.json"
    with refusal(rf"{other} {words}.* {advice}"):
        load_vocabulary(str(other))
    (tmp_path / "tokenizer.json").write_text("{}")
    with refusal(rf"{words}.* Name {tmp_path}/tokenizer.json$"):
        load_vocabulary(str(other))


def tekken(**changes: Any) -> dict[str, Any]:
    """A tekken.json of all bytes and two merges, of which the second is not used."""
    tokens = [*(bytes([value]) for value in range(256)), b"th", b"he"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [{"rank": 1, "token_str": "<s>", "is_control": True}]
    config = {"pattern": r"\w+|\W", "default_vocab_size": 260, "default_num_special_tokens": 3, "version": "v3"}
    return {"vocab": vocab, "special_tokens": special, "config": config | changes}


def test_a_tekken_has_its_special_tokens_first_and_as_many_others_as_it_says(tmp_path):
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(tekken()))
    vocabulary = load_vocabulary(str(tmp_path))
    assert vocabulary.digest == load_vocabulary(str(path)).digest
    assert vocabulary.encode is not None
    assert vocabulary.encode("the <s>").tolist() == [259, 3 + ord("e"), *(3 + byte for byte in b" <s>")]
    assert [vocabulary.piece(i) for i in (0, 1, 2, 3, 259)] == [b"<SPECIAL_0>", b"<s>", b"<SPECIAL_2>", b"\0", b"th"]
    assert vocabulary.size == 260
    found = token_bytes(str(path))
    assert found.lengths[[0, 1, 2, 3, 259]].tolist() == [0, 0, 0, 1, 2]


def test_an_id_far_too_large_is_refused_before_a_table_is_made(tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(b"YQ== 2147483647\n")
    with refusal("up to 67108863 are decoded"):
        load_vocabulary(str(tmp_path / "x.tiktoken"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
IS_POINTER = "is a pointer of Git LFS, not the file itself. Fetch the file: git lfs pull"


def tekken_file(rank: int = 0, change: dict[str, Any] | None = None, **changes: Any) -> bytes:
    definition = tekken(**changes)
    definition["vocab"][rank] |= change or {}
    return json.dumps(definition).encode()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(
            ("x.tiktoken", b"YQ== 0\n" + line + b"\n", ", line 2: ")
            for line in (b"!!!! 0", b"YQ== x", b"YQ==", b"YQ== -1", b"YQ== 2147483648")
        ),
        ("x.tiktoken", POINTER, IS_POINTER),
        ("tokenizer.json", POINTER, IS_POINTER),
        ("tokenizer.json", b"[1]", r"is not a tokenizer\.json"),
        ("x.json", tekken_file(default_vocab_size=262), "258 tokens and 3 special ones are not 262 ids"),
        ("x.json", tekken_file(default_vocab_size=200), "has no token for the byte 0xc5"),
        (
            "x.json",
            tekken_file(default_num_special_tokens=1, default_vocab_size=258),
            "the special token '<s>' has id 1, of 1",
        ),
        ("x.json", tekken_file(pattern="("), r"cannot be used with pattern '\('"),
        ("x.json", tekken_file(default_vocab_size=None), "int"),
        ("x.json", tekken_file(9, {"rank": 8}), "the token of rank 9 has rank 8"),
        ("x.json", tekken_file(9, {"token_bytes": "AA=="}), "been there"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_its_name(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with refusal(f"{path}.*{words}"):
        load_vocabulary(str(path))


def test_a_hub_that_cannot_be_reached_is_no_fault_of_the_tokenizer(monkeypatch):
    """Whatever its client raises: it has errors that are none of Python's own for the network."""
    hub, client = pytest.importorskip("huggingface_hub"), pytest.importorskip("httpx")

    def fail(*_: Any, **__: Any) -> None:
        raise client.ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with refusal(r"the tokenizer 'org/name' cannot be had from the hub \(ConnectError: .*Check the name and"):
        load_vocabulary("org/name")


@pytest.mark.parametrize(("name", "package"), [("gpt2", "tiktoken"), (TOKENIZER, "tokenizers"), ("org/name", "huggingface_hub")])
def test_a_package_that_is_not_installed_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refusal(f"needs the package '{package}'.*pip install {package}", ModuleNotFoundError):
        load_vocabulary(name)
