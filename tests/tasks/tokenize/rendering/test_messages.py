"""Messages: what they lack, other names for what they have, and what a template leaves out of them."""

import json

import pytest

from tasks.tokenize.rendering.messages import USUAL, Names, RefusedError, lost_message, read_messages

SHARE = Names("from", "value", {"human": "user", "gpt": "assistant"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "unencodable"),
        ('{"role": "user"}', "unencodable"),
        ('["user"]', "unencodable"),
        ("null", "unencodable"),
        ("[" * 100_000, "unencodable"),
        ("[]", "no_messages"),
    ],
)
def test_what_is_no_list_of_messages_is_refused(text, reason):
    with pytest.raises(RefusedError) as refused:
        read_messages(text)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": ""}, None),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, None),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, None),
        ({"role": "assistant", "tool_calls": [{}]}, None),
        ({"role": "assistant", "reasoning": "hm"}, None),
        ({"from": "human", "value": "x"}, "message 1 has no 'role' or 'content'; it has 'from', 'value'. Set source.messages"),
        ({"role": "user", "text": "x"}, "message 1 has no 'content'; it has 'role', 'text'"),
        ({"role": "user", "content": None}, "message 1 has no 'content'"),
        ({"role": "assistant", "tool_calls": None}, "message 1 has no 'content'"),
        ({"role": None, "content": "x"}, "message 1 has no 'role'"),
        ({"role": "", "content": "x"}, "message 1 has no 'role'"),
        ({"role": 1, "content": "x"}, "message 1 has no 'role'"),
        ({}, "message 1 has no 'role' or 'content'; it has nothing"),
    ],
)
def test_a_message_has_a_role_and_content(message, told):
    """Or calls, or a thought, in place of content."""
    fault = USUAL.fault_of([{"role": "user", "content": "x"}, message])
    assert fault is None if told is None else fault is not None and told in fault


def test_other_names_are_those_of_templates():
    """Roles that are not named stay, as do other keys. A key that templates know gives way."""
    assert SHARE.fault_of([{"from": "human", "value": "x"}]) is None
    assert SHARE.applied({"from": "human", "value": "x", "weight": 1}) == {"role": "user", "content": "x", "weight": 1}
    assert SHARE.applied({"from": "tool", "value": "x"})["role"] == "tool"
    assert SHARE.applied({"from": "gpt", "tool_calls": [1]}) == {"role": "assistant", "tool_calls": [1]}
    both = {"from": "gpt", "value": "x", "role": "?", "content": "y"}
    assert SHARE.applied(both) == {"role": "assistant", "content": "x"}  # what the configuration names
    assert SHARE.applied({"from": "gpt", "content": "y", "tool_calls": [1]})["content"] == "y"
    told = SHARE.fault_of([{"role": "user", "content": "x"}])
    assert told is not None
    assert "message 0 has no 'from' or 'value'; it has 'role', 'content'" in told


@pytest.mark.parametrize(
    "case",
    [
        ("hello", "a hello b"),
        (" hello\n", "ahellob"),
        ("", "x"),
        (" \n", "x"),
        ('say "x"\n', json.dumps('say "x"\n')),
        ("é\n", json.dumps("é\n")),
        ("a < b & c", "a &lt; b &amp; c"),
        ("Hello", "HELLO"),
        ("one\n  two", "one two"),
        ("<think>\nhm\n</think>\n\nan answer", "<s>an answer</s>"),
        ([{"type": "text", "text": "one"}, {"type": "image"}, "two"], "one two"),
        ([{"type": "image"}], "x"),
        ({"a": 1}, "x"),
        (None, "x"),
        (5, "x"),
        ("hello", "hell", 1),
        ("hello world", "hello", 1),
        ("<think>hm</think>", "<s></s>", 1),
        ("<think>hm</think>an answer", "hm", 1),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one", 1),
    ],
)
def test_content_that_occurs_and_that_is_lost(case):
    """Space around it, case, escapes of JSON and HTML, and a thought that is left out make no difference."""
    content, rendered, *lost = case
    messages = [{"role": "user", "content": "h"}, {"role": "user", "content": content}]
    assert [lost_message(messages, "h" + rendered)] == (lost or [None])


def test_messages_are_looked_for_in_any_order():
    """A template may write the last one first, and an earlier one may contain a later one."""
    messages = [{"role": "user", "content": text} for text in ("one", "two", "one two", "o")]
    assert lost_message(messages, "one two two one o") is None


@pytest.mark.parametrize(
    ("texts", "rendered"),
    [
        (("yes", "yes"), "|yes|"),
        (("yes it is", "it"), "|yes it is|"),
        (("it", "yes it is", "it"), "|it|yes it is|"),
        (("<think>no</think>yes", "yes"), "|yes|"),
        (("a", "b", "a", "b", "a"), "|a|b|a|b|"),
    ],
)
def test_content_that_is_found_in_another_alone_is_lost(texts, rendered):
    """A role that the template skips: what it says is short, and is said elsewhere, too."""
    messages = [{"role": "user", "content": text} for text in texts]
    assert lost_message(messages, rendered) is not None
    assert lost_message(messages, "".join(f"|{text}" for text in reversed(texts))) is None
    assert lost_message(messages, "".join(f"|{text}" for text in texts)) is None
