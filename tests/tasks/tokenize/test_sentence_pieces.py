"""Tokenizers of SentencePiece's and Mistral's files as builds use them."""

from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.vocabulary import PieceKind, SentencePieceModel, load_vocabulary, resolve
from flows.pipelines.build import build
from flows.runners.processes import Threads
from tasks.config import BuildConfig, TokenizerConfig
from tasks.tokenize.engines import all_errors_as_unencodable, large_string_array
from tasks.tokenize.parts import PartEncoder
from tasks.tokenize.probes import awkward_texts
from tasks.tokenize.tokenizers import load_tokenizer, pieces_tokenizer, ranks_tokenizer
from tasks.tokenize.trial import _fault_of_pieces
from tests.flat_tokens.sentence_pieces import model_file, trained
from tests.refusal import refusal
from tests.sources import write_rows
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401
from tests.tasks.tokenize.test_parts import parted

pytestmark = pytest.mark.needs("sentencepiece")

MISTRAL = pytest.mark.needs("mistral_common")


def model(path: Path, **options: Any) -> SentencePieceModel:
    found = resolve(str(model_file(path / "tokenizer.model", **options)))
    assert isinstance(found, SentencePieceModel)
    return found


def test_tokens_are_the_librarys_and_the_text_of_control_pieces_is_text(tmp_path):
    of = model(tmp_path, control_symbols=["<c>"], user_defined_symbols=["<u>"])
    texts = [*awkward_texts(), "a<c>b<u>c </s>"]
    tokens = pieces_tokenizer(of).reference(large_string_array(*texts))
    for text, start, stop in zip(texts, tokens.offsets, tokens.offsets[1:], strict=False):
        assert tokens.ids[start:stop].tolist() == of.processor.encode(text)
    control, defined = of.pieces.of_kind(PieceKind.CONTROL), of.pieces.of_kind(PieceKind.USER_DEFINED)
    assert not set(tokens.ids.tolist()) & set(control.values())
    assert set(tokens.ids.tolist()) & set(defined.values())


def with_rules(path: Path, rules: str) -> SentencePieceModel:
    """A model that replaces characters. *rules*: hexadecimal code points, a tab, those that replace them."""
    (path / "rules.tsv").write_text(rules)
    return model(path, normalization_rule_name="", normalization_rule_tsv=str(path / "rules.tsv"))


def test_a_model_that_leaves_out_letters_is_refused_unless_that_is_wanted(tmp_path):
    lossy = with_rules(tmp_path, "".join(f"{ord(one):X}\t\n" for one in "fox"))
    config = TokenizerConfig(name=lossy.name)
    assert "has no tokens for 'f' in 'f', so that text would be lost" in str(_fault_of_pieces(lossy, config))


@pytest.mark.slow
def test_models_as_people_have_them_are_taken_and_one_that_makes_much_of_little_is_not(tmp_path):
    config = TokenizerConfig(name=str(tmp_path / "tokenizer.model"))
    unknown = {"byte_fallback": False, "normalization_rule_name": "nmt_nfkc", "model_type": "unigram", "vocab_size": 60}
    assert _fault_of_pieces(model(tmp_path, **unknown), config) is None
    lossy = with_rules(tmp_path, f"{ord('f'):X}\t\n")
    assert _fault_of_pieces(lossy, config.model_copy(update={"lossy": True})) is None
    large = with_rules(tmp_path, f"{ord('a'):X}\t{' '.join(['62'] * 600)}\n")
    assert "its normalizer makes 601 characters of 'a'" in str(_fault_of_pieces(large, config))


def test_a_build_takes_a_model_and_its_tokens_are_decoded(tmp_path):
    """Through the trial in a process of its own."""
    path = model_file(tmp_path / "tokenizer.model.v1")
    texts = ["hello world", "the \U00013000 dog", ""]
    write_rows(tmp_path / "in/a.jsonl", [{"text": text} for text in texts])
    settings = {"output": str(tmp_path / "out"), "source": {"path": str(tmp_path / "in")}, "tokenizer": str(path)}
    with Threads(1) as runner:
        done = build(BuildConfig.model_validate(settings | {"validation_fraction": 0}), runner)
    flat_tokens.verify(done.path, "full")
    split = flat_tokens.open(done.path).train
    vocabulary = load_vocabulary(str(path))
    assert [vocabulary.decode(split.sequence(i))[0].decode().removeprefix(" ") for i in range(3)] == texts


@pytest.mark.parametrize("data", [b"\x0a\x05abc", trained()[:-700], b""], ids=["not a message", "cut", "empty"])
def test_a_damaged_model_is_refused_by_its_name(tmp_path, data):
    (tmp_path / "x.model").write_bytes(data)
    with refusal(r"x\.model"):
        pieces_tokenizer(resolve(str(tmp_path / "x.model")))  # type: ignore[arg-type]


def test_places_in_text_are_those_of_characters(tmp_path):
    """Of what falls back to bytes, too: a step or a message that counts says so by its characters."""
    of = model(tmp_path, control_symbols=["<c>"])
    encoder = PartEncoder(TokenizerConfig(name=of.name), None)
    found = encoder(parted([([0, "hello \U00013000 dog", 1], [(8, 9)]), (["hello"], [(0, 5)])]))
    ids, mask = found.tokens.ids.tolist(), found.tokens.mask
    assert list(encoder.specials)[:2] == ["<s>", "</s>"]
    assert ids[0] == encoder.specials["<s>"]
    counted = [i for i, counts in zip(ids, mask.tolist(), strict=True) if counts]
    assert [of.pieces.bytes_of(i) for i in counted[:4]] == [bytes([byte]) for byte in "\U00013000".encode()]
    assert b"".join(map(of.pieces.bytes_of, counted[4:])) == b" hello"


@MISTRAL
@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3", "tekken_240911.json"])
def test_mistrals_files_have_the_tokens_of_its_own_library(name):
    import mistral_common
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = str(Path(mistral_common.__file__).parent / "data" / name)
    definition = resolve(path)
    mine = (ranks_tokenizer if name.endswith(".json") else pieces_tokenizer)(definition)  # type: ignore[operator]
    theirs = (Tekkenizer.from_file if name.endswith(".json") else SentencePieceTokenizer)(path)  # type: ignore[operator]
    assert mine.highest_id == theirs.n_words - 1
    texts = ["[INST] Hello wörld </s>", "日本 \U00013000\n\n\n x", *list(awkward_texts())[:16]]
    tokens = all_errors_as_unencodable(mine.reference)(large_string_array(*texts))
    for text, start, stop in zip(texts, tokens.offsets, tokens.offsets[1:], strict=False):
        assert tokens.ids[start:stop].tolist() == theirs.encode(text, False, False)


def test_a_hub_repository_may_have_a_model_alone(stand_in_hub, tmp_path):
    data = trained()
    commit = stand_in_hub.commit("org/one", {"tokenizer.model": data, "config.json": "{}"}, kind="models")
    tokenizer = load_tokenizer(TokenizerConfig(name="org/one"))
    assert (tokenizer.revision, tokenizer.digest) == (commit, resolve(str(model_file(tmp_path / "x.model"))).digest)
    stand_in_hub.commit("org/none", {"config.json": "{}"}, kind="models")
    with refusal(r"'org/none' of the hub has no tokenizer.json, tekken.json, tokenizer.model or"):
        resolve("org/none")
