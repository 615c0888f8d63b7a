"""Templates in their sandbox: the same text each time, special strings and marks that nobody forges, every failure refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tokenize.rendering.forms import RenderedConversation
from tasks.tokenize.rendering.messages import Names, RefusedError, lost_message
from tasks.tokenize.rendering.renderer import MAX_DEPTH, NotATemplateError, Renderer
from tasks.tokenize.rendering.request import Settings
from tests.examples import examples
from tests.refusal import refusal

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
MARKED = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def renderer(template: str) -> Renderer:
    return Renderer(Settings(template, {"bos_token": "<s>"}, specials=SPECIALS))


def user(content: Any, **more: Any) -> bytes:
    return json.dumps([{"role": "user", "content": content, **more}]).encode()


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].items",
        "[messages[0].items]",
        "messages[0].items|string",
        "messages[0]['keys'] ~ ''",
        "'%s' % messages[0].items",
        "'{}'.format(messages[0].items)",
        "messages|attr('copy')",
        "''.join",
        "''.format",
        "{'a': ''.join}|pprint",
        "[''.join]|join",
        "messages|map('upper')",
        "'ab'|list|reverse",
        "messages|selectattr('role')|string",
        "messages|map('items')|list",
        "messages|batch(2)",
        "messages|slice(2)",
        "messages[0]|items",
        "joiner()",
        "cycler('a')",
        "cycler('a').next",
        "raise_exception",
        "strftime_now",
        "range",
        "joiner",
    ],
)
def test_nothing_with_an_address_becomes_text(expression):
    """It would be another text in each process."""
    with refusal("where text is wanted", RefusedError):
        renderer(ALL + "{{ " + expression + " }}")(user("x"))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ x|nothing }}", "No filter named 'nothing'"),
        ("{{ messages|random }}", "it uses 'random', which gives something else each time"),
        ("{{ lipsum(1)|upper }}", "it uses 'lipsum', which gives something else each time"),
        ("{{" + "(" * 500 + "1" + ")" * 500 + "}}", "maximum recursion depth"),
        ("{% for i in [] %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
    ],
)
def test_what_is_no_template_is_refused(template, told):
    with refusal(f"it is not one: {told}", NotATemplateError):
        renderer(template)


def test_functions_are_of_use_all_the_same():
    """They are called, and their results are text."""
    template = (
        "{{ messages[0].items()|list|length }}{{ 'ab'|list|reverse|join }}{{ messages|map(attribute='role')|join(',') }}"
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(';') %}{{ j() }}{{ j() }}"
        "{{ range(3)|list }}{{ '{}!'.format('x') }}{{ messages[0].content.strip().upper() }}{{ dict(a=1)['a'] }}"
    )
    (text,) = renderer(template)(user(" y ")).parts
    assert text == b"2bauserab;[0, 1, 2]x!Y1"


@pytest.mark.parametrize(
    ("template", "content", "told"),
    [
        ("{{ messages[0].content[0][0] }}", [["x"]], None),
        (ALL, "\U0001fffe", "it holds U+1FFFE"),
        (ALL, "a\U0010fffeb", "it holds U+10FFFE"),
        (ALL, {"\U0010ffff": 1}, "it holds U+10FFFF"),
        (ALL, "\ud800", "half of a surrogate pair"),
        ("{{ messages[0].content[:-1] }}{{ messages[0].content }}", "<s>", "cuts a string of a special token"),
        ("{{ '\\U0010fffe' }}" + ALL, "x", "makes U+10FFFE of it"),
        ("{{ 1 / 0 }}", "x", "the chat template says: division by zero"),
        ("{{ messages.__class__.__mro__ }}", "x", "unsafe"),
        ("{{ 'a' * 10000000000 }}", "x", "it repeats 1 items 10000000000 times"),
        ("{{ 9 ** 999999999 }}", "x", "power above 64"),
        ("{% set n = namespace() %}{% set n.__x = 2 ** 1 %}", "x", "underscore"),
        ("{{ messages.append(1) }}", "x", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "x", "the chat template says: maximum recursion depth"),
        ("{{ 'x' * 65535 }}" + ALL, "x", None),
        ("{{ 'x' * 65536 }}" + ALL, "x", "the chat template makes 65,537 characters of it"),
        ("{{ '' }}", "", "the chat template makes nothing of it"),
        ("{{ messages[0].role }}", "x", "leaves out the content or calls of its message 0, of role 'user'"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(template, content, told):
    """Whatever the template or the conversation does."""
    rendered = renderer(template)
    if told is None:
        assert rendered(user(content))
        return
    with pytest.raises(RefusedError) as refused:
        rendered(user(content))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "written"),
    [("[m.content]", "['a<s>é']"), ("[m.content]|tojson", '["a<s>é"]'), ("m.content|tojson(ensure_ascii=true)", '"a<s>\\u00e9"')],
)
def test_special_strings_stay_text_within_lists_and_escapes(expression, written):
    """Python and JSON write escapes for characters that nobody sees, as those are that stand for special strings."""
    of = renderer("{% for m in messages %}{{ " + expression + " }}{% endfor %}")
    assert of(user("a<s>é")).parts == [written.encode()]
    with refusal(r"it spells U\+1FFFE", RefusedError):
        of(user("a<s>\\U0001fffe" if "ensure" not in expression else "a<s>\\ud83f\\udffe"))


def test_a_message_may_not_be_nested_deeply():
    """How deep is the same with every Python. Rendering goes on with the next conversation."""
    of = renderer("{{ messages[0].content|tojson }}")
    deep = "x"
    for depth in range(MAX_DEPTH + 600):
        deep = {"a": deep} if depth % 2 else [deep]
        if depth == MAX_DEPTH - 1:
            assert isinstance(of(user(deep)), RenderedConversation)
        elif depth in (MAX_DEPTH, MAX_DEPTH + 599):
            with refusal("nested too deep", RefusedError):
                of(user(deep))
    assert isinstance(of(user("x")), RenderedConversation)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (MARKED, "a\U0010fffeb\U0010ffff"),
        (MARKED.replace("m.role", "m.content"), "\U0010fffe\U00100000\U00100001\U00100002\U00100003x"),
        ("{{ messages[0].content.encode().decode('unicode_escape') }}" + MARKED, "\\U0010fffe x \\U0010ffff"),
        ("{{ '%c' % messages[0].number }}" + MARKED, "x"),
        ("{{ '{:c}'.format(messages[0].number) }}" + ALL, "x"),
        ("{{ messages[0].content|replace('u', '\\U0010fffe') }}" + ALL, "u"),
    ],
)
def test_marks_are_not_forged(template, content):
    """Neither by characters in a message nor by a template that decodes what a message spells."""
    with refusal(r"it holds U\+10FFF|makes U\+10FFF", RefusedError):
        renderer(template)(user(content, number=0x10FFFE))


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ("|lower", "<|IM_END|> x"),
        (".swapcase()", "<|IM_END|> x"),
        ("|replace(' ', '')", "<|im_ end|> x"),
        (".split('</think>')|join", "<|im_</think>end|> x"),
        ("|striptags", "&lt;|im_end|&gt; x"),
        ("|replace('<image>', '')", "<|im_<image>end|> x"),
    ],
)
def test_no_special_token_comes_of_a_changed_content(change, content):
    """A conversation is refused where the template changes a content that could become one. Others with that template are not."""
    of = renderer("{% for m in messages %}<s>{{ m.content" + change + " }}<|im_end|>{% endfor %}")
    with refusal(r"so that '<\|im_end\|>' may come of it|leaves out the content", RefusedError):
        of(user(content))
    assert of(user("x")).parts[0::2] == [2, 1]


alphabet = st.sampled_from(
    ["<s>", "<|im_", "start|>", "<", "|im_end|>", "s>", "a", "é", "😀", "\U000f0000", "\U00100000", "\U0010fffd", "\n"]
)


@given(st.lists(st.lists(alphabet, max_size=6).map("".join), min_size=1, max_size=4))
@examples(200)
def test_text_of_messages_stays_text(contents):
    """Special tokens are those of the template alone, however messages' strings meet; marks are where the content is. Characters
    of numbers and of seals are text.
    """
    of = renderer(
        "{% for m in messages %}<s>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    rendered = of(json.dumps([{"role": "user", "content": text} for text in contents]).encode())
    parts = []
    spans, at = [], 0
    for text in contents:
        parts += [2, b"user\n" + text.encode(), 1]
        spans.append((at + 7, at + 9 + len(text.encode())))
        at += 9 + len(text.encode())
    assert rendered == RenderedConversation.of(parts, spans)


@pytest.mark.parametrize("content", ["<s>", "\\u003cs>", "<s\\u003e", "a<", "a< ", "s>", "<\\/s>"])
def test_text_of_a_message_stays_text_once_its_form_is_known(content):
    of, talk = renderer("{% for m in messages %}{{ m.content }}s><s>{% endfor %}"), '[{"role": "user", "content": "%s"}]'
    of((talk % "x").encode())
    assert of((talk % content).encode()).parts == [json.loads(f'"{content}"').encode() + b"s>", 2]


def test_a_content_may_end_as_a_special_string_begins(monkeypatch):
    """The form is used if what follows the content does not complete the string."""
    of = renderer("{% for m in messages %}<s>{{ m.content|trim }}\n{% endfor %}")
    of(user("x"))
    monkeypatch.setattr(of.turns, "find", None)
    assert of(user("a < ")).parts == [2, b"a <\n"]


def test_space_that_only_python_strips_is_stripped_once_a_form_is_known():
    of = renderer("{% for m in messages %}<s>{{ m.content|trim }}{% endfor %}")
    of(user("x"))
    assert of(user("\x1cz")).parts == [2, b"z"]


# Messages: what they lack, other names for what they have, and what a template leaves out of them.
SHARE = Names("from", "value", {"human": "user", "gpt": "assistant"})


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, None),
        ({"role": "assistant", "tool_calls": [{}]}, None),
        ({"role": "assistant", "reasoning": "hm"}, None),
        ({"from": "human", "value": "x"}, "message 1 has no 'role' or 'content'; it has 'from', 'value'. Set source.messages"),
        ({"role": "assistant", "tool_calls": None}, "message 1 has no 'content'"),
        ({"role": "", "content": "x"}, "message 1 has no 'role'"),
        ({}, "message 1 has no 'role' or 'content'; it has nothing"),
    ],
)
def test_a_message_has_a_role_and_content(message, told):
    """Or calls, or a thought, in place of content."""
    fault = Names().fault_of([{"role": "user", "content": "x"}, message])
    assert fault is None if told is None else fault is not None and told in fault


def test_other_names_are_those_of_templates():
    """Roles that are not named stay, as do other keys. A key that templates know gives way."""
    assert SHARE.fault_of([{"from": "human", "value": "x"}]) is None
    assert SHARE.applied({"from": "human", "value": "x", "weight": 1}) == {"role": "user", "content": "x", "weight": 1}
    assert SHARE.applied({"from": "tool", "tool_calls": [1]}) == {"role": "tool", "tool_calls": [1]}
    both = {"from": "gpt", "value": "x", "role": "?", "content": "y"}
    assert SHARE.applied(both) == {"role": "assistant", "content": "x"}  # what the configuration names
    assert SHARE.applied({"from": "gpt", "content": "y", "tool_calls": [1]})["content"] == "y"
    told = SHARE.fault_of([{"role": "user", "content": "x"}])
    assert told is not None
    assert "message 0 has no 'from' or 'value'; it has 'role', 'content'" in told


@pytest.mark.parametrize(
    "case",
    [
        (" hello\n", "ahellob"),
        ("", "x"),
        ('say "x"\n', json.dumps('say "x"\n')),
        ("a < b & c", "a &lt; b &amp; c"),
        ("Hello", "HELLO"),
        ("one\n  two", "one two"),
        ("<think>\nhm\n</think>\n\nan answer", "<s>an answer</s>"),
        ([{"type": "text", "text": "one"}, {"type": "image"}, "two"], "one two"),
        (None, "x"),
        ("hello", "hell", 1),
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
