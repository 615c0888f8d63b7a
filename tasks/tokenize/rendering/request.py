"""A request to a process that renders conversations, and its answer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

IntPair = tuple[int, int]
"""As in ``flat_tokens.annotations``, which imports numpy."""
ORDINARY = -1
"""The kind of a part that is an ordinary text. Others are the numbers of special tokens."""

FACTS = struct.Struct("<q")
"""Bytes of the JSON that follows: first the settings and limits, then why they cannot be used, or what is slow about them."""
BATCH = struct.Struct("<2q")
"""Conversations and bytes of a batch. Its offsets follow, int64[n + 1], and its texts in UTF-8."""
ANSWER = struct.Struct("<6q")
"""Lengths of what follows: parts of each conversation, kinds of all parts, ends of the ordinary ones in their texts, starts and
stops of what counts (all int64), those texts in UTF-8, and as JSON (number, reason, detail) of each conversation that is refused.
"""


class Settings(NamedTuple):
    """The settings of a renderer. ``specials``: the strings of the special tokens, by their numbers. ``fast``: whether minijinja
    may render conversations. ``messages``: their keys and roles, if they are unusual ones. ``boundary``: the text between a
    conversation and its tools, if there are tools. ``counted``: the parts of a message that count, if not all do.
    """

    template: str
    tokens: Mapping[str, str] = {}
    roles: Sequence[str] = ("assistant",)
    specials: Sequence[str] = ()
    fast: bool = True
    day: str | None = None
    messages: Mapping[str, Any] | None = None
    boundary: str | None = None
    counted: Sequence[str] | None = None


class Limits(NamedTuple):
    """``seconds``: ten times the processor time that a conversation may take. ``memory``: the most that a process may have."""

    seconds: float
    memory: int
