"""Files of tokenizers of other kinds, made of what is at hand, for hub repositories cannot be had everywhere.

Byte-level ones have the tokens and merges of `cl100k_base` with the patterns that Llama 3 and Qwen split text by; one of
SentencePiece's kind (a space is `▁`, what it has no token for falls back to bytes) is trained on the text that is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flat_tokens.vocabulary import Ranks, resolve

TRAINED_BYTES = 4_000_000
TRAINED_TOKENS = 16_000

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3, QWEN = rf"{_WORDS}\p{{N}}{{1,3}}{_OTHERS}", rf"{_WORDS}\p{{N}}{_OTHERS}"


def write_all(directory: Path, texts: Iterable[str]) -> dict[str, Path]:
    """A tokenizer.json of each kind below a directory, by what it is called."""
    directory.mkdir()
    ranks = resolve("cl100k_base")
    assert isinstance(ranks, Ranks)
    made = {
        "Llama 3's kind": byte_level(ranks.ranks, LLAMA_3, ignore_merges=True),
        "Qwen's kind": byte_level(ranks.ranks, QWEN, normalizer="NFC"),
        "SentencePiece's kind": sentence_pieces(texts),
    }
    paths = {name: directory / f"{number}.json" for number, name in enumerate(made)}
    for name, tokenizer in made.items():
        tokenizer.save(str(paths[name]))
    return paths


def byte_level(ranks: Mapping[bytes, int], pattern: str, normalizer: str | None = None, ignore_merges: bool = False) -> Any:
    """A `tokenizers.Tokenizer` with the ids and merges of an encoding of tiktoken, and a pattern of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    shown = shown_bytes()

    def written(token: bytes) -> str:
        return "".join(shown[byte] for byte in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        # As transformers converts them: every way to make the token of two, by the ranks of these.
        found = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [
            (written(one), written(other)) for one, other in sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        made.normalizer = getattr(normalizers, normalizer)()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def shown_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def sentence_pieces(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` of SentencePiece's kind, as Llama 2 has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=TRAINED_TOKENS, limit_alphabet=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(vocabulary, list(map(tuple, model["merges"])), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made
