"""Encoders of documents that say which of their tokens count for the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from flat_tokens.text.rows import prompts_and_completions
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.tokenize.chat import Chat, conversations, spanned
from tasks.tokenize.engines import Encoder, Tokens, joined

NO_STEPS = DocumentPolicy()


class Completions:
    """Texts that are a prompt and its completion. Each is tokenized alone, as a model that is asked sees the prompt; the tokens
    of the completion count.
    """

    def __init__(self, engine: Encoder) -> None:
        self._engine = engine

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        return _masked(self._engine(prompts_and_completions(texts)))

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        for i in range(len(texts)):
            parts = list(self._engine.one_by_one(prompts_and_completions(texts.slice(i, 1))))
            faults = [part for part in parts if isinstance(part, str)]
            yield faults[0] if faults else _masked(joined([part for part in parts if not isinstance(part, str)]))


def _masked(tokens: Tokens) -> Tokens:
    """Tokens of prompts and completions in turn -> those of documents, with their mask."""
    counts = np.tile(np.array([0, 1], np.uint8), len(tokens.offsets) // 2)
    return Tokens(tokens.ids, tokens.offsets[::2], np.repeat(counts, np.diff(tokens.offsets)))


def encoder_of(
    engine: Encoder, source: Source, chat: Chat | None, config: TokenizerConfig, policy: DocumentPolicy = NO_STEPS
) -> Encoder:
    """The encoder of a source's documents. *chat*: how its conversations become tokens. The *policy* has their steps."""
    if chat is not None:
        return conversations(chat.model_dump_json(), config)
    if policy.opened().gives_spans:
        return spanned(config)
    return Completions(engine) if source.masked else engine
