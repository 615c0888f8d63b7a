"""Texts on which engines are compared before a build: awkward ones, and those that a tokenizer's definition calls for."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from flat_tokens.vocabulary import PieceKind, Ranks, SentencePieceModel, TokenizerJson

TOKENS = 2000
"""Tokens of a vocabulary that are tried, as texts."""


def awkward_texts() -> Iterator[str]:
    """Texts on which tokenizers have been seen to differ."""
    yield from ("", " ", "\ufeff", "\0", "a\0b", "\r\n", "a\r\nb\r\n\r\nc", "\t's")
    yield from ("'S 'LL 'Ve 'rE don't DON'T i'M", "  lead", "trail  ")
    for unit in (" ", "\n", "\t", "\r\n", "a", "A", "7", "-", "😀", "中", "あ", "é", "e\u0301", "\u200d", "'s", " \n"):
        yield unit * (10_000 // len(unit))
    yield " ".join("1234567890123456789012"[:n] for n in range(1, 21))
    yield "x = 3.14159; y = 1e-10; z = 0xDEADBEEF; 1,000,000.00 ½ ² ٣ ७"
    yield "e\u0301a\u0308o\u0302\u0303 \u0939\u093f\u0928\u094d\u0926\u0940 n\u0303 Z\u0351\u036b\u0343a\u0328lgo"
    yield "שלום עולם، مرحبا بالعالم \u202bright to left\u202c \u2067isolate\u2069"
    yield "".join(chr(point) for point in range(0x20, 0x3000, 7))
    yield "".join(chr(plane << 16 | low) for plane in range(17) for low in (0, 1, 0x80, 0xFF, 0x1F600 & 0xFFFF, 0xFFFD))
    yield "<|endoftext|> <|endofprompt|><|fim_prefix|>x<|fim_suffix|>y<|im_start|>user<|im_end|></s><s>[INST]<pad><unk>[CLS][SEP]"
    yield base64.b64encode(hashlib.sha512(b"flat").digest() * 40).decode()
    yield "def f(x):\n\treturn {\n\t\t'a': x[0],\n    }  # ok\n\n\n\n\nclass  A :  pass\n" * 5
    yield "https://example.org/a?b=c&d=%20#e user@example.org CamelCase snake_case kebab-case SCREAMING_CASE 50% $100 #tag @me"
    yield " ".join(f"a{character}b1{character}2" for character in RECENT)


RECENT = (
    "\u1c8a\ua7da\ua7dc\U000105c0\U00010d40\U00010d4e\U00010efd\U00011f5a\U00016121\U0001611e\U0001e4d0\U0001e5d0\U0001e5f1"
    "\U0002ebf0\U00031350"
)
"""Letters, marks and digits that Unicode 15 and 16 added: engines differ where the tables of one are older."""


def texts_of_json(of: TokenizerJson) -> Iterator[str]:
    """Texts for a tokenizer.json: its added tokens in all places, its options' strings, and some of its tokens."""
    decoder = of.tokenizer.get_added_tokens_decoder()
    yield from around([token.content for token in decoder.values()])
    parts = (of.tokenizer.normalizer, of.tokenizer.pre_tokenizer)
    strings = {text for part in parts if part is not None for text in _strings(json.loads(part.__getstate__()))}
    yield from around(sorted(text for text in strings if len(text) <= LONGEST))
    ids = sorted(of.tokenizer.get_vocab(with_added_tokens=False).values())
    yield from _words([of.tokenizer.decode([i], skip_special_tokens=False) for i in _spread(ids)])


def texts_of_ranks(of: Ranks) -> Iterator[str]:
    """Texts for ranks: special tokens in all places, and some of the tokens."""
    yield from around(list(of.special))
    yield from _words([token.decode(errors="replace") for token in _spread(list(of.ranks))])


def texts_of_pieces(of: SentencePieceModel) -> Iterator[str]:
    """Texts for a model of SentencePiece: its control pieces and defined ones in all places, and some of its pieces."""
    kinds = (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.USER_DEFINED)
    yield from around([text for kind in kinds for text in of.pieces.of_kind(kind)])
    yield from _words([of.pieces.bytes_of(i).decode(errors="replace") for i in _spread(range(len(of.pieces.pieces)))])


LONGEST = 100
"""Characters of an option's string, at most: longer ones are patterns and tables."""


def around(strings: Sequence[str]) -> Iterator[str]:
    """Texts with each string alone, at both ends, glued to words and others, spaced, doubled, cut, and in other letters."""
    for i, one in enumerate(strings):
        following = strings[(i + 1) % len(strings)]
        yield one
        yield f"{one} a{one}b 1{one}2 é{one}中 {one}{one} {one} {one}\n{one}\t.{one}. a {one} b  {one}{following}{one}"
        yield f"{one[1:]} {one[:-1]} {one[:-1]}{one} {one}{one[1:]} {one.upper()} {one.lower()} a\n\n {one} \n\nb"


def _strings(part: Any) -> Iterator[str]:
    """All strings in a part of a definition."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _strings(inner)


def _spread(items: Sequence[Any]) -> Sequence[Any]:
    """At most TOKENS of the items, from all over."""
    return items[:: -(-len(items) // TOKENS) or 1]


def _words(tokens: list[str]) -> Iterator[str]:
    """Texts with each of the tokens alone, within a word, and after a space."""
    yield from tokens
    for start in range(0, len(tokens), 50):
        yield " ".join(f"{token}a{token} {token}" for token in tokens[start : start + 50])
