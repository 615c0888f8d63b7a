"""Divided templates: one rendering of a conversation shows all its beginnings, and they are those that are rendered alone."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tokenize.rendering.messages import RefusedError
from tasks.tokenize.rendering.prefixes import Rendering
from tasks.tokenize.rendering.request import Settings
from tasks.tokenize.rendering.templates import Rendered, Renderer
from tests.examples import examples

Messages = list[dict[str, Any]]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

FOR, END = "{% for m in messages %}", "{% endfor %}"
ALL = FOR + TURN + END

DIVIDED = {
    "plain": ALL + ASK,
    "no prompt": ALL,
    "a head": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + FOR + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + END + ASK,
    "messages but the first": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if loop.index0 == 0 %}{{ system }}{% endif %}" + TURN + END + ASK,
    "the same name": "{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{{ '<s>' ~ system }}" + ALL + ASK,
    "chosen by an expression": "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}" + TURN + END + ASK,
    "prompt in the loop": FOR + TURN + "{% if loop.last and add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}" + END,
    "prompt first in the loop": FOR + TURN + "{% if add_generation_prompt and loop.last %}A{% endif %}" + END,
    "one end or another": ALL + "{% if add_generation_prompt %}A{% else %}{{ eos_token }}{% endif %}",
    "the last is other": FOR + "{{ m.content if loop.last else m.content ~ '</s>' }}" + END + ASK,
    "neighbours": FOR + "{% if loop.previtem is defined and loop.previtem.role == m.role %}+{% endif %}" + TURN
    + "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}!{% endif %}" + END + ASK,
    "neighbours by index": FOR + "{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}+{% endif %}" + TURN
    + "{% if m.role == 'tool' and (loop.last or messages[loop.index0 + 1].role != 'tool') %}</s>{% endif %}" + END + ASK,
    "a namespace": "{% set ns = namespace(n=0, seen='') %}" + FOR + "{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'tool' %}{% set ns.seen = 'T' %}{% endif %}{{ ns.n ~ ns.seen }}" + TURN + END
    + "{{ ns.n ~ ns.seen }}" + ASK,
    "an end that forgets": "{% set ns = namespace(n=0) %}" + FOR + "{% set ns.n = ns.n + 1 %}{{ ns.n }}" + TURN + END
    + "{% set ns.n = 100 %}{{ '' }}" + ASK,
    "a namespace of each": FOR + "{% set ns = namespace(x=0) %}{% for c in m.content %}{% set ns.x = ns.x + 1 %}{% endfor %}"
    "{{ ns.x }}" + TURN + END + ASK,
    "a look before": "{% set ns = namespace(system='') %}" + FOR + "{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}" + END + "{{ ns.system }}" + ALL + ASK,
    "a check before": "{% set ns = namespace(n=0) %}" + FOR + "{% if m.role in ('user', 'assistant') %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% endif %}" + END + "{{ bos_token }}" + ALL + ASK,
    "a look that ends": "{% set ns = namespace(at=0) %}" + FOR + "{% if m.role == 'tool' %}{% set ns.at = loop.index %}"
    "{% break %}{% endif %}" + END + "{{ ns.at }}" + ALL + ASK,
    "a macro": "{% macro turn(m, n) %}" + TURN + "{{ n }}{% endmacro %}" + FOR + "{{ turn(m, loop.index) }}" + END + ASK,
    "a condition": "{% for m in messages if m.role != 'tool' %}" + TURN + END + ASK,
    "continue": FOR + "{% if m.role == 'tool' %}{% continue %}{% endif %}" + TURN + END + ASK,
    "an inner loop": FOR + "{% for c in m.content %}{{ c }}{% if loop.last %};{% endif %}{% endfor %}"
    "{{ loop.index }}{{ loop.cycle('x', 'y') }}" + END + ASK,
    "some messages": "{% if messages|length > 1 and messages[1].role == 'tool' %}T{% endif %}"
    "{% if messages %}M{% endif %}" + ALL + ASK,
    "no tools": "{% if tools is not none and tools|length > 0 %}{{ messages[-1].content }}{% endif %}"
    "{% if not add_generation_prompt is defined %}{% set x = messages|list %}{% endif %}" + ALL + ASK,
    "names in the tail": "{% set x = 'a' %}" + FOR + "{% set x = 'b' %}" + TURN + END + "{{ x }}{% set y = 'c' %}{{ y }}" + ASK,
    "it refuses some ends": FOR + "{% if loop.last and m.role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURN
    + END + ASK,
    "the tail refuses": ALL + "{% if add_generation_prompt %}{{ raise_exception('no prompt') }}{% endif %}",
    "blocks": "{% macro caller_of(m) %}{{ caller(m.role) }}{% endmacro %}" + FOR + "{% set t %}" + TURN
    + "{% endset %}{% filter upper %}{{ t }}{% endfilter %}{% call(x) caller_of(m) %}{{ x }}{% endcall %}" + END + ASK,
}  # fmt: skip

ALONE = {
    "from the end": ("{% for m in messages[::-1] %}" + TURN + END, "no loop over the messages at its top level"),
    "the last": ("{{ messages[-1].role }}" + ALL, "line 1 looks at the messages from their end"),
    "their number": ("{{ messages|length }}" + ALL, "line 1 uses 'messages' as a whole"),
    "a filter": ("{% set u = messages|selectattr('role')|list %}" + FOR + "{{ u[0] }}" + END, "as a whole"),
    "a break": (FOR + "{% if m.role == 'tool' %}{% break %}{% endif %}" + TURN + END, "has a break"),
    "an else": (FOR + TURN + "{% else %}none" + END, "has an else"),
    "twice": (FOR + "{% for n in messages %}{{ n.content }}{% endfor %}" + END, "as a whole"),
    "within a condition": ("{% if true == true %}" + ALL + "{% endif %}", "no loop over the messages"),
    "a cycler": ("{% set c = cycler('a', 'b') %}" + FOR + "{{ c.next() }}" + TURN + END, "remembers its calls"),
    "loop changed": (FOR + "{% if loop.changed(m.role) %}!{% endif %}" + TURN + END, "uses loop otherwise"),
    "items": ("{% set i = messages[0].items()|map('first') %}" + ALL, "can be read once"),
    "another prompt": ("{% set add_generation_prompt = false %}" + ALL, "another value"),
    "another list": (
        "{% if messages[0].role %}{% set r = messages %}{% else %}{% set r = [] %}{% endif %}{% for m in r %}" + TURN + END,
        "another value than a list",
    ),
    "a macro of messages": ("{% macro f(messages) %}{{ messages[0] }}{% endmacro %}" + ALL, "another value"),
    "a macro of the tail": (
        "{% set z = 1 %}{% macro f() %}{{ z }}{% endmacro %}" + ALL + "{% set z = 2 %}{{ f() }}",
        "a macro before it uses",
    ),
    "our names": ("{% set flat_tokens_loop = 1 %}" + ALL, "begins with flat_tokens_"),
    "a block": ("{% block a %}" + ALL + "{% endblock %}", "block"),
}
LAST_USER = "{% set ns = namespace(last=0) %}" + FOR + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}" + END


def renderer(template: str, divides: bool = True, roles: tuple[str, ...] = ("assistant",)) -> Renderer:
    return Renderer(Settings(template, {"bos_token": "<s>", "eos_token": "</s>"}, roles, "2024-07-26", SPECIALS, None, divides))


def outcome(of: Renderer, messages: Messages) -> Rendered | str:
    try:
        return of(json.dumps(messages))
    except RefusedError as error:
        return f"{error.reason}: {error}"


texts = st.lists(st.sampled_from(["a", "b ", " ", "\n", "é", "😀", "<|im", "_end|>", "<s>", "x"]), max_size=5).map("".join)
conversations = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "user", "assistant", "system", "tool"]),
        texts,
    ),
    min_size=1,
    max_size=8,
)
alternating = st.builds(
    lambda system, all_texts: [
        *([{"role": "system", "content": "s"}] if system else []),
        *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(all_texts)),
    ],
    st.booleans(),
    st.lists(texts, min_size=1, max_size=8),
)


@pytest.mark.parametrize("name", DIVIDED)
def test_a_divided_template_renders_what_it_renders_alone(name: str) -> None:
    """Parts and spans, for several choices of roles that count, and the same refusals."""
    pairs = [(renderer(DIVIDED[name], True, of), renderer(DIVIDED[name], False, of)) for of in (("assistant",), ("user", "tool"))]
    assert [divided.why_slow for divided, _ in pairs] == [None, None]

    @given(st.one_of(conversations, alternating))
    @examples(60)
    def same(messages: Messages) -> None:
        for divided, alone in pairs:
            assert outcome(divided, messages) == outcome(alone, messages)

    same()


@pytest.mark.parametrize("name", ALONE)
def test_other_templates_say_why_they_are_slow(name: str) -> None:
    """They render each beginning alone."""
    template, why = ALONE[name]
    divided, alone = renderer(template), renderer(template, divides=False)
    assert divided.why_slow is not None
    assert why in divided.why_slow

    @given(alternating)
    @examples(25)
    def same(messages: Messages) -> None:
        assert outcome(divided, messages) == outcome(alone, messages)

    same()


def test_a_template_whose_messages_depend_on_later_ones_says_so_when_it_is_used() -> None:
    """No form of the template shows it."""
    divided = renderer(LAST_USER + FOR + "{{ '' if loop.index0 > ns.last else '' }}" + TURN + END)
    assert divided.why_slow is None
    found = outcome(divided, [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(8)])
    assert isinstance(found, Rendered)
    assert divided.why_slow == "what it writes for a message depends on later ones"


@pytest.mark.parametrize("name", [name for name in DIVIDED if "refuse" not in name])
def test_the_work_grows_with_the_number_of_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is rendered at most three times, and its tail twice; no more than two beginnings are rendered alone."""
    steps, alone = [0], [0]
    drive, render = Rendering.drive, Renderer.render

    @functools.wraps(drive)
    def counted(self: Rendering, items: Any) -> Any:
        for step in drive(self, items):
            steps[0] += 1
            yield step

    def count_alone(self: Renderer, messages: Any, prompt: bool) -> str:
        alone[0] += 1
        return render(self, messages, prompt)

    monkeypatch.setattr(Rendering, "drive", counted)
    monkeypatch.setattr(Renderer, "render", count_alone)
    divided = renderer(DIVIDED[name])
    for count in (50, 100):
        steps[0] = alone[0] = 0
        outcome(divided, [{"role": ("user", "assistant")[i % 2], "content": f"m{i}"} for i in range(count)])
        assert 0 < steps[0] <= 5 * count + 1
        assert alone[0] <= 2


@pytest.mark.slow
def test_templates_of_trl_render_what_they_render_alone() -> None:
    """Those that people train with."""
    trl = pytest.importorskip("trl", reason="trl is not installed: make peers")
    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    pairs = []
    for path in paths:
        template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", path.read_text())
        pairs.append((renderer(template), renderer(template, divides=False)))
    assert sum(divided.why_slow is None for divided, _ in pairs) > len(pairs) / 2

    @given(st.one_of(conversations, alternating))
    @examples(25)
    def same(messages: Messages) -> None:
        for divided, alone in pairs:
            assert outcome(divided, messages) == outcome(alone, messages)

    same()
