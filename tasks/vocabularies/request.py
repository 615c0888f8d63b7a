"""The settings of vocabularies that are trained."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from flat_tokens.options import did_you_mean
from tasks.models import Model
from tasks.tokenize.fast_json import GPT2, GPT4O, LLAMA3, MAX_ID, NEMOTRON, QWEN2, QWEN35

PATTERNS = {
    "gpt2": GPT2,
    "gpt4": LLAMA3,
    "gpt4o": GPT4O,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "qwen3.5": QWEN35,
    "nemotron": NEMOTRON,
    "r50k_base": GPT2,
    "cl100k_base": LLAMA3,
    "o200k_base": GPT4O,
}
"""Published split patterns by name. The fast engine has each of them by heart."""
BYTES = 256
"""Tokens that every vocabulary begins with: one for each byte."""

VocabSize = Annotated[int, Field(gt=BYTES, le=MAX_ID)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class VocabularyRequest(Model):
    """The vocabularies that are made of one training. Their sizes count all ids, special tokens among them."""

    vocab_sizes: tuple[VocabSize, ...] = Field(min_length=1)
    """Ids of each vocabulary; the text is read once for all."""
    pattern: str = Field("gpt4", min_length=1)
    """How text is split: gpt2, gpt4, gpt4o, qwen2 ... or a regular expression."""
    special_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ("<|endoftext|>",)
    """They have the last ids, and are never found in text."""
    fraction: Fraction = 1.0
    """A sample of the documents by a hash of key and seed."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Another seed draws another sample."""

    @field_validator("pattern")
    @classmethod
    def _is_known(cls, pattern: str) -> str:
        if pattern not in PATTERNS and re.fullmatch(r"[\w.-]+", pattern):  # no text is split at a word
            raise ValueError(f"there is no pattern {pattern!r}. {did_you_mean(pattern, PATTERNS)}")
        return pattern

    @field_validator("vocab_sizes")
    @classmethod
    def _in_order(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(sizes)))

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if len(set(self.special_tokens)) < len(self.special_tokens):
            raise ValueError(f"special_tokens names a token twice: {', '.join(self.special_tokens)}")
        least = BYTES + len(self.special_tokens)
        if self.vocab_sizes[0] < least:
            raise ValueError(
                f"vocab_sizes has {self.vocab_sizes[0]}, but {BYTES} bytes and {len(self.special_tokens)} special tokens are "
                f"{least} ids"
            )
        return self

    @property
    def regex(self) -> str:
        """The pattern, spelled out."""
        return PATTERNS.get(self.pattern, self.pattern)

    @property
    def learned(self) -> int:
        """Ids of the largest vocabulary without its special tokens."""
        return self.vocab_sizes[-1] - len(self.special_tokens)
