"""Tokenizers from files that go on for ever, take all memory, panic or leave out text are refused before they tokenize."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Trained

from flat_tokens.vocabulary import load_vocabulary
from tasks.config import TokenizerConfig
from tasks.tokenize.engines import Engine, Tokens, TooSlowError, UnencodableError, engine_of, large_string_array, with_timeout
from tasks.tokenize.tokenizers import load_tokenizer
from tasks.tokenize.trial import is_from_a_file, try_out
from tests.examples import first_fast
from tests.refusal import refusal
from tests.tasks.tokenize.test_tokenizers import Panic, load, write_ranks


@pytest.fixture
def _in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests try tokenizers in their own."""
    monkeypatch.setattr("tasks.tokenize.tokenizers.try_out", try_out)


TEXT = ["the quick brown fox jumps over the lazy dog 0123456789 ,.;:!?'\"-()[]{}"]


def word_level() -> Trained:
    return Trained(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def bert(*more: Any) -> Trained:
    tokenizer = Trained(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.BertNormalizer(lowercase=True), *more])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(special_tokens=["[UNK]"], vocab_size=200))
    return tokenizer


def pairs(splits: Any) -> Trained:
    """Byte pairs that have no token for what is not in the text that they are learned from."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = splits
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300))
    return tokenizer


def config_of(tokenizer: Trained, directory: Path, **settings: Any) -> TokenizerConfig:
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerConfig(name=str(path), **settings)


def test_a_tokenizer_without_case_and_accents_is_taken(tmp_path):
    loaded = load_tokenizer(config_of(bert(), tmp_path))
    assert len(Engine(loaded, fast=False)(large_string_array("Déjà vu, ok", "", " \t")).ids)


LOSSY = {
    "BPE without unk": pairs(pre_tokenizers.Whitespace()),
    "digits are deleted": bert(normalizers.Replace(Regex("[0-9]"), "")),
    "not all bytes": pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


@pytest.mark.usefixtures("_in_a_process_of_its_own")
@pytest.mark.parametrize("tokenizer", first_fast(LOSSY.values(), every=3), ids=LOSSY)
def test_a_tokenizer_that_leaves_out_text_is_refused_unless_that_is_wanted(tmp_path, tokenizer):
    config = config_of(tokenizer, tmp_path)
    with refusal(r"has no tokens for .+ in .+ lost\. .*set tokenizer\.lossy to true"):
        load_tokenizer(config)
    assert load_tokenizer(config.model_copy(update={"lossy": True})).name == config.name


def test_a_document_of_which_nothing_is_left_is_a_bad_document(tmp_path):
    """As a trial cannot know every text. Spaces, and documents without text, are none."""
    config = config_of(bert(normalizers.Replace(Regex("(xyz)+"), "")), tmp_path)
    texts = large_string_array("a", "xyzxyz", "", " \n")
    with refusal(r"no tokens for any of it; tokenizer\.lossy", UnencodableError):
        engine_of(load_tokenizer(config), fast=False)(texts)
    first, refused, empty, blank = engine_of(load_tokenizer(config), fast=False).one_by_one(texts)
    assert isinstance(refused, str)
    assert [len(tokens.ids) for tokens in (first, empty, blank) if isinstance(tokens, Tokens)] == [1, 0, 0]
    lossy = load_tokenizer(config.model_copy(update={"lossy": True}))
    assert np.diff(engine_of(lossy, fast=False)(texts).offsets).tolist() == [1, 0, 0, 0]


def test_a_normalizer_that_multiplies_text_is_refused(tmp_path):
    tokenizer = word_level()
    tokenizer.normalizer = normalizers.Replace("\u0416", "a" * 10_000)  # a letter that few texts have
    with refusal(r"makes 10,000 characters of 'Ж'.*tokenizer\.max_memory = 8,589,934,592"):
        load_tokenizer(config_of(tokenizer, tmp_path))


@pytest.mark.usefixtures("_in_a_process_of_its_own")
def test_memory_of_the_trial_is_limited(tmp_path):
    tokenizer = word_level()
    tokenizer.normalizer = normalizers.Replace(Regex("[a-z]{20}"), "b" * 10_000_000)
    with refusal(r"ends its process .*tokenizer\.max_memory = 1,073,741,824 bytes"):
        load_tokenizer(config_of(tokenizer, tmp_path, max_memory=1 << 30))


def ranks(directory: Path) -> str:
    return str(write_ranks(directory / "a.tiktoken", {bytes([value]): value for value in range(256)}))


@pytest.mark.usefixtures("_in_a_process_of_its_own")
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "cannot be used with pattern '\\('"),
        (r"(?:(?!x)(?:a|a)*)*?b|[\s\S]", "ends its process on a little text .*BacktrackLimitExceeded"),
        (r"[\s\S](?=.*(a|aa)+$)|[\s\S]", "takes more than 2 seconds .*raise tokenizer.max_seconds"),
    ],
)
def test_a_pattern_that_panics_or_does_not_end_is_refused(tmp_path, pattern, words):
    with refusal(words):
        load_tokenizer(TokenizerConfig(name=ranks(tmp_path), pattern=pattern, max_seconds=2 if "max_seconds" in words else 60))


def test_a_pattern_that_panics_is_an_error_for_readers_too(tmp_path, monkeypatch):
    import tiktoken

    def panic(*arguments: Any, **settings: Any) -> None:
        raise Panic("out of luck")

    monkeypatch.setattr(tiktoken, "Encoding", panic)
    with refusal("cannot be used with pattern 'gpt2': out of luck"):
        load_vocabulary(ranks(tmp_path), pattern="gpt2")


def test_a_text_that_takes_for_ever_is_an_error_that_no_policy_takes_for_a_bad_document():
    ended = threading.Event()

    def encode(texts: pa.LargeStringArray) -> Tokens:
        ended.wait(60)
        raise AssertionError

    config = TokenizerConfig(name="a.json").model_copy(update={"max_seconds": 0.01})
    tokenizer = load("bytes")
    engine = Engine(type(tokenizer)("slow", "slow", 1, with_timeout(encode, config), None, tokenizer.decode), fast=False)
    begun = time.monotonic()
    with refusal(r"takes more than 0 seconds for \d+ bytes of text.*tokenizer\.max_seconds", TooSlowError):
        engine(large_string_array("a"))
    with pytest.raises(TooSlowError):
        list(engine.one_by_one(large_string_array("a")))
    assert time.monotonic() - begun < 30
    ended.set()


@pytest.mark.slow
def test_a_process_ends_although_its_tokenizer_does_not(tmp_path):
    """The library works in a thread that cannot be ended."""
    program = """
import sys
from tasks.config import TokenizerConfig
from tasks.tokenize import tokenizers
tokenizers.try_out = lambda config: None
config = TokenizerConfig(name=sys.argv[1], pattern=sys.argv[2], max_seconds=1)
from tasks.tokenize.engines import large_string_array
print(tokenizers.load_tokenizer(config).reference(large_string_array("ab" * 2_000_000)))
"""
    command = [sys.executable, "-c", program, ranks(tmp_path), r"[\s\S](?=.*(a|aa)+$)|[\s\S]"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False)
    assert "TooSlowError" in done.stderr
    assert done.returncode == 1


def test_published_encodings_are_not_tried():
    assert not any(map(is_from_a_file, ("bytes", "gpt2", "cl100k_base")))
    assert all(map(is_from_a_file, ("a.json", "a.tiktoken", "openai-community/gpt2", "/tmp")))
