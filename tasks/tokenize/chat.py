"""Conversations to tokens: a column of messages, rendered by a chat template.

What the template writes may be special tokens; what a message brings is ordinary text. So the tokenizer sees each special token
under a name that no text has.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from flat_tokens.stores.store import file_at
from flat_tokens.vocabulary import ByteValues, Definition, Ranks, TokenizerJson, beside, resolve
from tasks.config import Source, TokenizerConfig
from tasks.models import Model
from tasks.text.documents import text_and_spans
from tasks.tokenize.engines import Tokens, UnencodableError, is_visible, joined, watched

if TYPE_CHECKING:
    from tasks.tokenize.templates import Rendered, Renderer

SPECIAL, NUMBERS = "\U0001ffff", 0xF0000
"""A special token is called by the first, which is in no text, and the character of its number."""
ASSISTANT = ("assistant",)


class Chat(Model):
    """How the conversations of a source become tokens."""

    template: str
    tokens: dict[str, str] = Field({}, description="What the template knows of special tokens, by names")
    roles: tuple[str, ...] = Field(ASSISTANT, description="Of the messages that count")
    day: date | None = Field(None, description="Today, to a template that asks")


class Encoded(NamedTuple):
    """The tokens of one conversation, and where each stands: uint32[n], int64[n, 2]."""

    ids: npt.NDArray[np.uint32]
    places: npt.NDArray[np.int64]


Render = Callable[[str], "Rendered"]
Speak = Callable[["Sequence[Rendered]"], Iterable[Encoded]]


class Marked:
    """Texts of which some characters count. The tokens that have one of them count, also where a token begins before it.
    *renderer_of* takes the strings of the special tokens and gives what renders one text. *what*: one of the texts, in errors.
    """

    def __init__(self, renderer_of: Callable[[list[str]], Render], config: TokenizerConfig, what: str) -> None:
        definition = resolve(config.name, pattern=config.pattern, revision=config.revision, pin=True)
        specials = special_tokens(definition)
        self._render, self._speak = renderer_of(list(specials)), _speaker(definition, list(specials.values()))
        self._what = what
        self._lossy = config.lossy
        self._encode = watched(self._tokens, config.model_copy(update={"lossy": True}))  # of what is rendered, it is told here

    def __call__(self, texts: pa.LargeStringArray) -> Tokens:
        return self._encode(texts)

    def one_by_one(self, texts: pa.LargeStringArray) -> Iterator[Tokens | str]:
        for i in range(len(texts)):
            try:
                yield self._encode(texts.slice(i, 1))
            except UnencodableError as error:
                yield f"the {self._what} cannot be encoded: {error}"

    def _tokens(self, texts: pa.LargeStringArray) -> Tokens:
        rendered = [self._render(text) for text in texts.to_pylist()]
        if any(SPECIAL in part for one in rendered for part in one.parts if isinstance(part, str)):
            raise UnencodableError("it holds U+1FFFF, which is no character")
        try:
            found = list(self._speak(rendered))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # libraries panic in Rust, which is no Exception
            raise UnencodableError(f"{type(error).__name__}: {error}") from error
        for of, one in zip(rendered, found, strict=True):
            if not self._lossy and not len(one.ids) and any(map(is_visible, "".join(map(str, of.parts)))):
                raise UnencodableError("it has no tokens for any of it; tokenizer.lossy allows that")
        parts = [
            Tokens(one.ids, np.array([0, len(one.ids)]), _mask(of.spans, one.places))
            for of, one in zip(rendered, found, strict=True)
        ]
        return joined(parts) if parts else Tokens(np.empty(0, np.uint32), np.zeros(1, np.int64), np.empty(0, np.uint8))


class Conversations(Marked):
    """Texts that are conversations in JSON."""

    def __init__(self, chat: Chat, config: TokenizerConfig) -> None:
        super().__init__(lambda specials: _renderer(chat, specials), config, "conversation")


def _mask(spans: list[tuple[int, int]], places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Which tokens have a character of a span: uint8[n]."""
    edges = np.zeros(int(max([0, *(stop for _, stop in spans), *places.max(axis=0, initial=0)])) + 2, np.int64)
    for start, stop in spans:
        edges[start] += 1
        edges[stop] -= 1
    counted = np.append(0, np.cumsum(np.cumsum(edges) > 0))
    begin, end = places.T
    mask: npt.NDArray[np.uint8] = (counted[np.maximum(end, begin + 1)] > counted[begin]).astype(np.uint8)
    return mask


def special_tokens(definition: Definition) -> Mapping[str, int]:
    """The special tokens of a tokenizer, by their strings."""
    if isinstance(definition, ByteValues):
        return {}
    if isinstance(definition, Ranks):
        return definition.special
    named = [token["content"] for token in definition.definition.get("added_tokens") or [] if token.get("special")]
    return {text: definition.tokenizer.token_to_id(text) for text in named if text}


def _speaker(definition: Definition, ids: Sequence[int]) -> Speak:
    """The function that tokenizes what was rendered. *ids*: those of the special tokens, by their numbers."""
    if isinstance(definition, TokenizerJson):
        return _json_speaker(definition, ids)
    encoding = None if isinstance(definition, ByteValues) else definition.encoding

    def parts_of(part: str) -> tuple[list[int], list[bytes]]:
        if encoding is None:
            return [byte + 1 for byte in part.encode()], [bytes([byte]) for byte in part.encode()]
        found = encoding.encode_ordinary(part)
        return found, encoding.decode_tokens_bytes(found)

    def speak(one: Rendered) -> Encoded:
        found, places, at = list[int](), [np.empty((0, 2), np.int64)], 0
        for part in one.parts:
            if isinstance(part, int):
                found.append(ids[part])
                places.append(np.array([[at, at + 2]]))
                at += 2
                continue
            tokens, spelled = parts_of(part)
            # byte -> character: the bytes of a character that are not its first have 10 as their first bits
            data = np.frombuffer(part.encode(), np.uint8)
            character = np.append(np.cumsum((data & 0xC0) != 0x80) - 1, len(part))
            ends = np.cumsum([len(token) for token in spelled], dtype=np.int64)
            starts = np.append(0, ends[:-1])[: len(ends)]
            found += tokens
            places.append(np.stack([character[starts], character[ends - 1] + 1], axis=1) + at)
            at += len(part)
        return Encoded(np.array(found, np.uint32), np.concatenate(places))

    return lambda rendered: map(speak, rendered)


def _json_speaker(definition: TokenizerJson, ids: Sequence[int]) -> Speak:
    """With the tokenizer itself, in which each special token has a name that is in no text. What surrounds one then is tokenized
    as it is around the token.
    """
    named, tokens = [SPECIAL + chr(NUMBERS + number) for number in range(len(ids))], []
    numbers = {text: number for number, text in enumerate(special_tokens(definition))}
    for token in definition.definition.get("added_tokens") or []:
        if token.get("special") and token["content"] in numbers:
            token = {**token, "content": named[numbers[token["content"]]], "normalized": False}
        tokens.append(token)
    plain = {**definition.definition, **dict.fromkeys(("truncation", "padding", "post_processor")), "added_tokens": tokens}
    tokenizer = type(definition.tokenizer).from_str(json.dumps(plain))
    there = {text: int(i) for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    to_id = np.arange(max(there.values(), default=0) + 1, dtype=np.uint32)
    for token in tokens:
        if token["content"] in there:
            number = ord(token["content"][1]) - NUMBERS if token["content"] in set(named) else None
            to_id[there[token["content"]]] = definition.tokenizer.token_to_id(token["content"]) if number is None else ids[number]

    def speak(rendered: Sequence[Rendered]) -> Iterator[Encoded]:
        texts = ["".join(named[part] if isinstance(part, int) else part for part in one.parts) for one in rendered]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield Encoded(to_id[np.array(encoding.ids, np.int64)], np.array(encoding.offsets, np.int64).reshape(-1, 2))

    return speak


def chats_of(sources: Sequence[Source], config: TokenizerConfig, revision: str | None) -> tuple[Chat | None, ...]:
    """How the conversations of each source become tokens; None where it has none. *revision*: the commit of the tokenizer.
    ValueError where there is no template.
    """
    return tuple(_chat_of(source, config, revision) if source.messages_column else None for source in sources)


def _chat_of(source: Source, config: TokenizerConfig, revision: str | None) -> Chat:
    settings = json.loads(beside(config.name, "tokenizer_config.json", revision) or b"{}")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    if source.chat_template is not None:
        store, name = file_at(source.chat_template)
        data: bytes | None = store.read(name)
    else:
        data = beside(config.name, "chat_template.jinja", revision)
    template = _default_of(settings.get("chat_template")) if data is None else data.decode()
    if template is None:
        raise ValueError(
            f"source {source.name!r}: tokenizer {config.name!r} has no chat template beside it. Set source.chat_template to a "
            "file."
        )
    chat = Chat(
        template=template,
        tokens={name: text for name, text in tokens.items() if isinstance(text, str)},
        roles=source.roles or ASSISTANT,
        day=date.fromisoformat(source.chat_date) if source.chat_date else None,
    )
    _renderer(chat, [])  # ValueError where it is no template
    return chat


def _renderer(chat: Chat, specials: Sequence[str]) -> Renderer:
    from tasks.tokenize.templates import Renderer  # Jinja is slow to import, and not of use to every build

    return Renderer(chat, specials)


def _default_of(templates: Any) -> str | None:
    """The template, or of several the one that is named ``default``."""
    if isinstance(templates, list):
        templates = next((one.get("template") for one in templates if one.get("name") == "default"), None)
    return templates if isinstance(templates, str) else None


@functools.lru_cache(8)
def conversations(chat_json: str, config: TokenizerConfig) -> Conversations:
    """The encoder of a source of conversations, once a process. *chat_json*: the `Chat`."""
    return Conversations(Chat.model_validate_json(chat_json), config)


@functools.lru_cache(8)
def spanned(config: TokenizerConfig) -> Marked:
    """The encoder of texts with the spans that a step gave, once a process."""
    from tasks.tokenize.templates import Rendered  # Jinja is slow to import, and not of use to every build

    def render(text: str) -> Rendered:
        plain, spans = text_and_spans(text)
        return Rendered([plain], spans)

    return Marked(lambda _: render, config, "document")
