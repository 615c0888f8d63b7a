"""The messages of a conversation: read from JSON, with the keys and roles of templates, and looked for in rendered text."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, Any]
"""An object of JSON. Nothing of ``flat_tokens`` is imported: a process that renders begins in a fifth of the time without."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys of a message's reasoning: templates ask for one of them."""
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", *REASONING)
"""A message that has one of these needs no content."""
END_OF_THOUGHT = "</think>"
"""Templates leave out the text of earlier answers up to this."""


class RefusedError(Exception):
    """A conversation that cannot be encoded. ``reason``: the name under which it is counted."""

    def __init__(self, detail: str, reason: str = "unencodable") -> None:
        super().__init__(detail)
        self.reason = reason


class Names(NamedTuple):
    """The keys that messages have for a role and for content, and roles as templates know them, by what they are here."""

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = {}

    def applied(self, message: Message) -> Message:
        """The message as templates know it. A key that is named counts, whatever a message has under the name of templates."""
        role = message[self.role]
        named = {"role": self.roles.get(role, role)}
        if self.content in message:
            named["content"] = message[self.content]
        return named | {name: value for name, value in message.items() if name not in (self.role, self.content, *named)}

    def fault_of(self, messages: Sequence[Message]) -> str | None:
        """The first message that has no role, or no content; None if each has both."""
        for i, message in enumerate(messages):
            role = message.get(self.role)
            lacks = [] if isinstance(role, str) and role else [self.role]
            if message.get(self.content) is None and all(message.get(name) is None for name in INSTEAD_OF_CONTENT):
                lacks.append(self.content)
            if lacks:
                is_missing = " or ".join(map(repr, lacks))
                found = ", ".join(map(repr, message)) or "nothing"
                return (
                    f"its message {i} has no {is_missing}; it has {found}. Set source.messages to the keys that it has, such as "
                    "{role: from, content: value}"
                )
        return None


def read_messages(text: str) -> list[Message]:
    """The messages of a conversation, which is JSON. RefusedError if they are not a list of objects, or there is none."""
    messages = _objects(text, "messages", "unencodable")
    if not messages:
        raise RefusedError("it has no messages", "no_messages")
    return messages


def read_tools(text: str) -> list[Message] | None:
    """The tools of a conversation, which are JSON or nothing. RefusedError if they are not a list of objects."""
    return _objects(text, "tools", "bad_tools") if text and text.strip() != "null" else None


def _objects(text: str, what: str, reason: str) -> list[Message]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"its {what} are not JSON ({error})", reason) from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RefusedError(f"its {what} are not a list of objects", reason)
    return found


def lost_message(messages: Sequence[Message], rendered: str, specials: Sequence[str] = ()) -> int | None:
    """The number of the first message whose content, or a function that it calls, does not occur in the rendered text; None if
    all do. Space around it, letters' case, and what JSON and HTML write for a character make no difference, and neither does a
    thought that is left out.
    RefusedError if a content is changed in such a way, and one of *specials* may have come of that.
    """
    at, plain, answers = 0, None, None
    for i, message in enumerate(messages):
        for text in (*_texts(message.get("content")), *(names_of_calls(message) or ())):
            content = text.strip()
            found = rendered.find(content, at)
            if found < 0 and content in rendered:  # before its turn: it is there, or a part of another content is
                answers = _answers(messages, rendered) if answers is None else answers
                if rendered.count(content) < answers.count(content):
                    return i
            elif found < 0:
                written = (json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1], html.escape(content))
                if any(one in rendered for one in written):
                    continue
                answer = content.rpartition(END_OF_THOUGHT)[2].strip()
                plain = _plain(rendered) if plain is None else plain
                if not (answer and answer in rendered) and _plain(content) not in plain:
                    return i
                joined = _plain(content).replace(END_OF_THOUGHT, "")
                if made := next((one for one in specials if one.strip() and _plain(one) in joined), None):
                    raise RefusedError(
                        f"the chat template changes the content of its message {i}, so that {made!r} may come of it"
                    )
            at = max(at, found + len(content))
    return None


def names_of_calls(message: Message) -> list[str] | None:
    """The names of the functions that a message calls; None if it calls none."""
    calls = message.get("tool_calls") or [one for one in [message.get("function_call")] if one]
    if not isinstance(calls, list) or not calls:
        return None
    functions = [one.get("function", one) if isinstance(one, dict) else one for one in calls]
    names = [one.get("name") if isinstance(one, dict) else None for one in functions]
    return [name for name in names if isinstance(name, str)]


def _texts(content: Any) -> Iterator[str]:
    """The texts of a message's content: it is one, or a list of them and of parts that have one."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _answers(messages: Sequence[Message], rendered: str) -> str:
    """The texts of all contents that are in the rendered text, without their thoughts, with a null in between."""
    texts = (text.rpartition(END_OF_THOUGHT)[2].strip() for message in messages for text in _texts(message.get("content")))
    return "\0".join(text for text in texts if text in rendered)


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def with_reasoning(message: Message) -> Message:
    """A message whose reasoning has all names by which templates ask for it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
