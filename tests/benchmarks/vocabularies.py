"""Files of tokenizers of other kinds, made of what is at hand, for hub repositories cannot be had everywhere.

Byte-level ones have the tokens and merges of `cl100k_base` with the patterns that Llama 3 and Qwen split text by; one of
SentencePiece's kind (a space is `▁`, what it has no token for falls back to bytes) is trained on the text that is measured.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flat_tokens.vocabulary import Ranks, byte_level_alphabet, resolve
from tasks.tokenize.fast_json import LLAMA3, QWEN2
from tests.tasks.tokenize.family import BYTE_TOKENS, PREPEND, SPACES, Definition, bytes_, definition_of, sequence, split

TRAINED_BYTES = 4_000_000
TRAINED_TOKENS = 16_000


def write_all(directory: Path, texts: Iterable[str]) -> dict[str, Path]:
    """A tokenizer.json of each kind below a directory, by what it is called."""
    directory.mkdir()
    made = {
        "Llama 3's kind": byte_level(LLAMA3, None, ignore_merges=True),
        "Qwen's kind": byte_level(QWEN2, {"type": "NFC"}),
        "SentencePiece's kind": sentence_pieces(texts),
    }
    paths = {name: directory / f"{number}.json" for number, name in enumerate(made)}
    for name, definition in made.items():
        paths[name].write_text(json.dumps(definition), "utf-8")
    return paths


def byte_level(pattern: str, normalizer: Definition | None, **options: Any) -> Definition:
    """The ids and merges of cl100k_base, with a pattern of its own."""
    definition = resolve("cl100k_base")
    assert isinstance(definition, Ranks)
    ranks, alphabet = definition.ranks, byte_level_alphabet()
    written = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # As transformers converts them: every way to make the token of two, by the ranks of these.
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(written[one], written[other]) for one, other in sorted(halves, key=lambda pair: [ranks[of] for of in pair])]
    model = {"type": "BPE", "vocab": {written[token]: rank for token, rank in ranks.items()}, "merges": merges, **options}
    return definition_of(normalizer, sequence(split(pattern), bytes_()), model, ())


def sentence_pieces(texts: Iterable[str]) -> Definition:
    """A tokenizer of SentencePiece's kind, as Llama 2 has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=TRAINED_TOKENS, limit_alphabet=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *model["vocab"]]
    model |= {"vocab": {token: number for number, token in enumerate(tokens)}, "unk_token": "<unk>", "fuse_unk": True}
    return definition_of(sequence(PREPEND, SPACES, of="normalizers"), None, {**model, "byte_fallback": True}, ())
