"""Encoders of documents that say which of their tokens count for the loss."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from flat_tokens.text.rows import prompts_and_completions
from tasks.config import DocumentPolicy, Source, TokenizerConfig
from tasks.tokenize.chat import Chat, Conversations, conversations, spanned
from tasks.tokenize.engines import Encoder, Engine, Tokens, joined, large_string_array
from tasks.tokenize.probes import awkward_texts

logger = logging.getLogger(__name__)

NO_STEPS = DocumentPolicy()
AWKWARD_LENGTH = 400
"""Characters of each awkward text that a conversation is tried with."""
RENDERED_ALONE = (
    "Source %r: each beginning of a conversation is rendered alone, and the time grows with the square of the messages. The chat "
    "template is why: %s. Put {%% generation %%} and {%% endgeneration %%} in it, around what counts, to avoid that."
)
NOT_SPECIAL = (
    "Source %r: the chat template writes %s, which %s has no special tokens for: each becomes several tokens of ordinary text. "
    "Set source.chat_template to one whose marks the tokenizer has."
)
MARK = re.compile(r"<[|｜][^<>\s|｜]{1,40}[|｜]>|<(?:start|end)_of_turn>|</?s>")
"""A mark of turns or texts, as templates write it."""
BY_REFERENCE = "Source %r: the fast engine %s. Using the slower reference engine for its conversations."


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
    """Tokens of prompts and completions alternately -> those of documents, with their mask."""
    counts = np.tile(np.array([0, 1], np.uint8), len(tokens.offsets) // 2)
    return Tokens(tokens.ids, tokens.offsets[::2], np.repeat(counts, np.diff(tokens.offsets)))


def encoder_of(
    engine: Engine,
    source: Source,
    chat: Chat | None,
    config: TokenizerConfig,
    policy: DocumentPolicy = NO_STEPS,
    by_reference: bool = False,
) -> Encoder:
    """The encoder of a source's documents. *chat*: how its conversations become tokens. The *policy* has their steps.
    *by_reference*: the engine is not to be used for conversations.
    """
    if chat is not None:
        return conversations(chat.model_dump_json(), config, None if by_reference else engine)
    if policy.opened().gives_spans:
        return spanned(config, engine)
    return Completions(engine) if source.masked else engine


def chats_by_reference(
    sources: Sequence[Source],
    chats: Sequence[Chat | None],
    samples: Mapping[int, Sequence[str]],
    config: TokenizerConfig,
    engine: Engine,
) -> tuple[int, ...]:
    """The numbers of the sources whose conversations the reference has to tokenize: the engine gives other tokens or masks on
    *samples* and on awkward texts, or does not show their places. Warnings say so, and which templates are slow.
    """
    found = []
    for i, (source, chat) in enumerate(zip(sources, chats, strict=True)):
        if chat is None:
            continue
        if unknown := _without_token(chat, config, engine):
            logger.warning(NOT_SPECIAL, source.name, ", ".join(unknown), config.name)
        fault = None if config.engine == "auto" else ""
        if fault is None:
            encoder = conversations(chat.model_dump_json(), config, engine)
            if encoder.why_slow:
                logger.warning(RENDERED_ALONE, source.name, encoder.why_slow)
            fault = _difference(encoder, Conversations(chat, config), [*samples.get(i, ()), *_awkward(chat)], config)
        if fault is not None:
            found.append(i)
        if fault:
            logger.warning(BY_REFERENCE, source.name, fault)
    return tuple(found)


def _without_token(chat: Chat, config: TokenizerConfig, engine: Engine) -> list[str]:
    """The marks in a template that are several tokens."""
    named = [text for name, text in chat.tokens.items() if text and re.search(rf"\b{re.escape(name)}\b", chat.template)]
    marks = {*MARK.findall(chat.template), *named} - {*conversations(chat.model_dump_json(), config, engine).parts.specials}
    return sorted(mark for mark in marks if len(engine(large_string_array(mark)).ids) > 1)


def _difference(encoder: Conversations, reference: Conversations, texts: list[str], config: TokenizerConfig) -> str | None:
    """Why an encoder of conversations is not used: it differs from the reference. None where it does not."""
    array, before = large_string_array(*texts), encoder.parts.by_reference
    for text, one, other in zip(texts, encoder.one_by_one(array), reference.one_by_one(array), strict=True):
        is_same = (
            one == other
            if isinstance(one, str) or isinstance(other, str)
            else one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()  # type: ignore[union-attr]
        )
        if not is_same:
            return f"does not give the tokens and masks of {config.name} on {text[:57]!r}..."
    if encoder.parts.by_reference - before > len(texts) // 2:
        return f"does not show where the tokens of {config.name} are"
    return None


def _awkward(chat: Chat) -> Iterator[str]:
    """Conversations of awkward texts."""
    names = chat.messages
    role, content = (names.role, names.content) if names else ("role", "content")
    for text in awkward_texts():
        messages = [{role: of, content: text[:AWKWARD_LENGTH]} for of in ("user", "assistant")]
        yield json.dumps(messages, ensure_ascii=False)
