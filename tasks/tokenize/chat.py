"""Conversations to tokens: a column of messages, rendered by a chat template.

What the template writes may be special tokens; what a message brings is ordinary text.

Encoders of documents that say which of their tokens count for the loss are here, too.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from flat_tokens.annotations import IntPair, JsonObject
from flat_tokens.stores.store import file_at
from flat_tokens.text.rows import BOUNDARY, prompts_and_completions
from flat_tokens.vocabulary import beside
from tasks.config import DocumentPolicy, MessageNames, Source, TokenizerConfig
from tasks.models import Model
from tasks.text.documents import text_and_spans
from tasks.tokenize.engines import Encoder, Engine, Refusal, Tokens, UnencodableError, joined, large_string_array
from tasks.tokenize.parts import MaskedTexts, PartEncoder, no_tokens, one_of
from tasks.tokenize.probes import awkward_texts
from tasks.tokenize.rendering.messages import END_OF_THOUGHT
from tasks.tokenize.rendering.processes import Renderers, TextParts
from tasks.tokenize.rendering.request import ORDINARY, Limits, Settings

logger = logging.getLogger(__name__)

ASSISTANT = ("assistant",)


class Chat(Model):
    """How the conversations of a source become tokens."""

    template: str
    tokens: dict[str, str] = Field({})
    """Special tokens that the template knows, by names."""
    roles: tuple[str, ...] = ASSISTANT
    """Of the messages that count."""
    day: date | None = None
    """Today, to a template that asks."""
    messages: MessageNames | None = None
    """Keys and roles of messages, where they are unusual."""
    tools: bool = False
    """Whether the tools of a conversation follow it."""
    count: tuple[str, ...] | None = None
    """The parts of a message that count, if not all do."""
    edition: Literal[4] = 4
    """Raised when the same conversation would get other tokens or another mask."""

    @model_serializer(mode="wrap")
    def without_usual_settings(self, dump: SerializerFunctionWrapHandler) -> JsonObject:
        """The facts of keys, which are what they were before there were these settings."""
        found: JsonObject = dump(self)
        unset = {name for name in ("messages", "tools", "count") if not getattr(self, name)}
        return {name: value for name, value in found.items() if name not in unset}


class MarkedEncoder:
    """An encoder of texts that have parts, of which some count. *parted*: makes the parts. *what*: one text, in errors."""

    def __init__(self, parts: PartEncoder, parted: Callable[[pa.LargeStringArray], Iterable[TextParts]], what: str) -> None:
        self.parts = parts
        self._parted, self._what = parted, what
        self._refused = threading.local()

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        found = self._encode(texts)
        for one in found:
            for fault in one.faults.values():
                self._refused.last = texts, found  # its texts are asked for one by one now
                raise UnencodableError(fault.detail)
        return found[0].tokens if len(found) == 1 else joined([no_tokens(0), *(one.tokens for one in found)])

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        known, found = getattr(self._refused, "last", (None, []))
        self._refused.last = None, []
        for one in found if known is texts else self._encode(texts):
            for i in range(len(one.tokens.offsets) - 1):
                fault = one.faults.get(i)
                if fault is None:
                    yield one_of(one.tokens, i)
                else:
                    yield Refusal(f"the {self._what} cannot be encoded: {fault.detail}", fault.reason)

    def _encode(self, texts: pa.LargeStringArray) -> list[MaskedTexts]:
        return [self.parts(parted) for parted in self._parted(texts)]


class Conversations(MarkedEncoder):
    """An encoder of conversations in JSON. *engine*: for ordinary text. Without it the reference tokenizes everything, and each
    beginning of a conversation is rendered alone. ValueError if the template cannot be used. ``why_slow``: why each beginning
    is rendered alone; None if that is not needed.
    """

    def __init__(self, chat: Chat, config: TokenizerConfig, engine: Encoder | None = None) -> None:
        parts = PartEncoder(config, engine)
        renderers = _renderers(chat, [*parts.specials], config, fast=engine is not None)
        self.why_slow = renderers.why_slow
        super().__init__(parts, renderers, "conversation")


def _renderers(chat: Chat, specials: Sequence[str], config: TokenizerConfig, fast: bool) -> Renderers:
    """The processes that render conversations."""
    given = chat.model_dump(mode="json", exclude={"tools", "count", "edition"})
    boundary = BOUNDARY.decode() if chat.tools else None
    settings = Settings(**given, specials=specials, fast=fast, boundary=boundary, counted=chat.count)
    return Renderers(settings, Limits(config.max_seconds, config.max_memory))


def chats_of(sources: Sequence[Source], config: TokenizerConfig, revision: str | None) -> tuple[Chat | None, ...]:
    """The chat settings of each source; None for a source without conversations. *revision*: the commit of the tokenizer.
    ValueError if there is no template.
    """
    return tuple(_chat_of(source, config, revision) if source.messages_column else None for source in sources)


def _chat_of(source: Source, config: TokenizerConfig, revision: str | None) -> Chat:
    """The chat settings of a source, with its own template or the tokenizer's. ValueError without a usable one."""
    settings = json.loads(beside(config.name, "tokenizer_config.json", revision) or b"{}")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    if source.chat_template is not None:
        store, name = file_at(source.chat_template)
        data: bytes | None = store.read(name)
    else:
        data = beside(config.name, "chat_template.jinja", revision)
    where = f"the tokenizer {config.name}" if source.chat_template is None else source.chat_template
    unusable = f"{source.called}: the chat template of {where} cannot be used"
    try:
        template = settings.get("chat_template") if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{unusable}: it is not UTF-8 ({error}). Convert it first.") from error
    if isinstance(template, list):
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ValueError(
            f"{source.called}: tokenizer {config.name!r} has no chat template next to it. Set source.chat_template to a file."
        )
    chat = Chat(
        template=template,
        tokens={name: text for name, text in tokens.items() if isinstance(text, str)},
        roles=source.roles or ASSISTANT,
        day=date.fromisoformat(source.chat_date) if source.chat_date else None,
        messages=source.messages,
        tools=source.tools_column is not None,
        count=tuple(sorted(set(source.count))) if source.count else None,
    )
    try:
        _renderers(chat, [], config, fast=True)
    except ValueError as error:
        raise ValueError(f"{unusable}: {error}") from error
    return chat


@functools.lru_cache(8)
def conversations(chat_json: str, config: TokenizerConfig, engine: Engine | None) -> Conversations:
    """The encoder of a source of conversations, once a process. *chat_json*: the `Chat`."""
    return Conversations(Chat.model_validate_json(chat_json), config, engine)


@functools.lru_cache(8)
def spanned(config: TokenizerConfig, engine: Engine | None) -> MarkedEncoder:
    """The encoder of texts with the spans that a step gave, once a process."""
    return MarkedEncoder(PartEncoder(config, engine), _as_parts, "document")


def _as_parts(texts: pa.LargeStringArray) -> Iterator[TextParts]:
    """Texts with spans as one part each."""
    parts, spans, at = list[bytes](), list[IntPair](), 0
    for text in texts.to_pylist():
        plain, own = text_and_spans(text)
        data = plain.encode()
        places: Any = range(len(data) + 1)  # character -> its first byte; and the end
        if len(data) > len(plain):
            places = np.append(np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80), len(data))
        spans += sorted((at + int(places[start]), at + int(places[stop])) for start, stop in own)
        parts.append(data)
        at += len(data)
    offsets = np.cumsum([0, *map(len, parts)])
    array = pa.LargeStringArray.from_buffers(len(parts), pa.py_buffer(offsets), pa.py_buffer(b"".join(parts)))
    kinds = np.full(len(parts), ORDINARY, np.int64)
    yield TextParts(np.ones(len(parts), np.int64), kinds, array, np.array(spans, np.int64).reshape(-1, 2), {})


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
THOUGHT_IN_CONTENT = (
    "Source %r: a content has %s, a special token of %s: in a message it is text, and the chat template finds no thought there. "
    "Give thoughts as reasoning_content."
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
    policy: DocumentPolicy,
    by_reference: bool,
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
        encoder, texts = conversations(chat.model_dump_json(), config, engine), samples.get(i, ())
        named = [text for name, text in chat.tokens.items() if text and re.search(rf"\b{re.escape(name)}\b", chat.template)]
        marks = {*MARK.findall(chat.template), *named} - {*encoder.parts.specials}
        if unknown := sorted(mark for mark in marks if len(engine(large_string_array(mark)).ids) > 1):
            logger.warning(NOT_SPECIAL, source.name, ", ".join(unknown), config.name)
        if (
            END_OF_THOUGHT in encoder.parts.specials
            and END_OF_THOUGHT in chat.template
            and any(END_OF_THOUGHT in one for one in texts)
        ):
            logger.warning(THOUGHT_IN_CONTENT, source.name, END_OF_THOUGHT, config.name)
        fault = None if config.engine == "auto" else ""
        if fault is None:
            if encoder.why_slow:
                logger.warning(RENDERED_ALONE, source.name, encoder.why_slow)
            fault = _difference(encoder, Conversations(chat, config), [*texts, *_awkward(chat)], config)
        if fault is not None:
            found.append(i)
        if fault:
            logger.warning(BY_REFERENCE, source.name, fault)
    return tuple(found)


def _difference(encoder: Conversations, reference: Conversations, texts: list[str], config: TokenizerConfig) -> str | None:
    """Why an encoder of conversations is not used: it differs from the reference. None if it does not."""
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
