"""Places of what counts: the same by both engines, in few renderings, and right if the last answer is written otherwise."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tokenize.rendering.forms import RenderedConversation
from tasks.tokenize.rendering.messages import RefusedError
from tasks.tokenize.rendering.renderer import Renderer
from tasks.tokenize.rendering.request import Settings
from tests.calls import before_each_call
from tests.examples import examples

Messages = list[dict[str, Any]]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

FOR, END = "{% for m in messages %}", "{% endfor %}"
ALL = FOR + TURN + END

TEMPLATES = {
    "plain": ALL + ASK,
    "no prompt": ALL,
    "a head": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + FOR + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + END + ASK,
    "messages but the first": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if loop.index0 == 0 %}{{ system }}{% endif %}" + TURN + END + ASK,
    "prompt in the loop": FOR + TURN + "{% if loop.last and add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}" + END,
    "one end or another": ALL + "{% if add_generation_prompt %}A{% else %}{{ eos_token }}{% endif %}",
    "the last is other": FOR + "{{ m.content if loop.last else m.content ~ '</s>' }}" + END + ASK,
    "neighbours": FOR + "{% if loop.previtem is defined and loop.previtem.role == m.role %}+{% endif %}" + TURN
    + "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}!{% endif %}" + END + ASK,
    "neighbours by index": FOR + "{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}+{% endif %}" + TURN
    + "{% if m.role == 'tool' and (loop.last or messages[loop.index0 + 1].role != 'tool') %}</s>{% endif %}" + END + ASK,
    "a namespace": "{% set ns = namespace(n=0, seen='') %}" + FOR + "{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'tool' %}{% set ns.seen = 'T' %}{% endif %}{{ ns.n ~ ns.seen }}" + TURN + END
    + "{{ ns.n ~ ns.seen }}" + ASK,
    "a look before": "{% set ns = namespace(system='') %}" + FOR + "{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}" + END + "{{ ns.system }}" + ALL + ASK,
    "a check before": "{% set ns = namespace(n=0) %}" + FOR + "{% if m.role in ('user', 'assistant') %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% endif %}" + END + "{{ bos_token }}" + ALL + ASK,
    "a macro": "{% macro turn(m, n) %}" + TURN + "{{ n }}{% endmacro %}" + FOR + "{{ turn(m, loop.index) }}" + END + ASK,
    "a condition": "{% for m in messages if m.role != 'tool' %}" + TURN + END + ASK,
    "continue": FOR + "{% if m.role == 'tool' %}{% continue %}{% endif %}" + TURN + END + ASK,
    "an inner loop": FOR + "{% for c in m.content %}{{ c }}{% if loop.last %};{% endif %}{% endfor %}"
    "{{ loop.index }}{{ loop.cycle('x', 'y') }}" + END + ASK,
    "no tools": "{% if tools is not none and tools|length > 0 %}{{ messages[-1].content }}{% endif %}"
    "{% if not add_generation_prompt is defined %}{% set x = messages|list %}{% endif %}" + ALL + ASK,
    "it refuses some ends": FOR + "{% if loop.last and m.role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURN
    + END + ASK,
    "the tail refuses": ALL + "{% if add_generation_prompt %}{{ raise_exception('no prompt') }}{% endif %}",
    "blocks": "{% macro caller_of(m) %}{{ caller(m.role) }}{% endmacro %}" + FOR + "{% set t %}" + TURN
    + "{% endset %}{% filter upper %}{{ t }}{% endfilter %}{% call(x) caller_of(m) %}{{ x }}{% endcall %}" + END + ASK,
    "from the end": "{% for m in messages[::-1] %}" + TURN + END,
    "the last": "{{ messages[-1].role }}" + ALL,
    "their number": "{{ messages|length }}" + ALL,
    "a break": FOR + "{% if m.role == 'tool' %}{% break %}{% endif %}" + TURN + END,
    "an else": FOR + TURN + "{% else %}none" + END,
    "twice": FOR + "{% for n in messages %}{{ n.content }}{% endfor %}" + END,
    "a cycler": "{% set c = cycler('a', 'b') %}" + FOR + "{{ c.next() }}" + TURN + END,
    "loop changed": FOR + "{% if loop.changed(m.role) %}!{% endif %}" + TURN + END,
    "another prompt": "{% set add_generation_prompt = false %}" + ALL,
    "a block": "{% block a %}" + ALL + "{% endblock %}",
    "a thought of the last": FOR + "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}" + TURN
    + END + ASK,
}  # fmt: skip


def renderer(template: str, fast: bool = True, roles: tuple[str, ...] = ("assistant",)) -> Renderer:
    return Renderer(Settings(template, {"bos_token": "<s>", "eos_token": "</s>"}, roles, SPECIALS, fast, "2024-07-26"))


def outcome(of: Renderer, messages: Messages) -> RenderedConversation | str:
    try:
        return of(json.dumps(messages).encode())
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
alternating = st.lists(texts, min_size=1, max_size=8).map(
    lambda those: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(those)]
)


def check_same(pairs: list[list[Renderer]], most: int) -> None:
    """Both of each pair give the same."""

    @given(st.one_of(conversations, alternating))
    @examples(most)
    def same(messages: Messages) -> None:
        for one, other in pairs:
            assert outcome(one, messages) == outcome(other, messages)

    same()


BY_JINJA = {"a macro", "an inner loop", "a cycler", "loop changed", "a block"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_engines_give_the_same(name):
    """Parts and spans, for several choices of roles that count, and the same refusals. One remembers what it found before."""
    pairs = [[renderer(TEMPLATES[name], fast, of) for fast in (True, False)] for of in (("assistant",), ("user", "tool"))]
    check_same(pairs, 60)
    fast = pairs[0][0].template._mini
    assert (fast is None) == (name in BY_JINJA)
    if fast is not None:
        fast.render_template("chat", messages=[{"role": "user", "content": ""}])  # nothing is left to Jinja


LOOK_IN = {"twice", "a namespace", "a macro", "the tail refuses"}
"""They number messages, look into contents, or repeat them."""


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - LOOK_IN - {"it refuses some ends"}))
def test_a_conversation_is_rendered_few_times(name, monkeypatch):
    """However many messages it has, if the texts between them are known."""
    rendered = before_each_call(monkeypatch, "tasks.tokenize.rendering.templates.Template.render", lambda *_: None)
    of = renderer(TEMPLATES[name])
    for text in ("m", "n "):
        rendered.clear()
        outcome(of, [{"role": ("user", "assistant")[i % 2], "content": f"{text}{i}"} for i in range(40)])
    assert len(rendered) <= 3


PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set thought = m.reasoning_content or '' %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.last or thought %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
OPENED = QWEN3.replace("assistant\n' }}{%- endif", "assistant\n<think>\n' }}{%- endif")
ALONE = "{% if messages %}You are kind.{% else %}{{ raise_exception('asks nothing') }}{% endif %}" + OPENED
MARKED = (
    FOR + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}" + TURN + "{% endif %}" + END + ASK
)  # fmt: skip
WEIGHTED = [
    {"role": "assistant", "content": "4", "weight": 0}, {"role": "user", "content": "so", "weight": 0},
    {"role": "assistant", "content": "5", "weight": 1}, {"role": "user", "content": "so", "weight": None},
    {"role": "assistant", "content": "6"},
]  # fmt: skip
TURNS = [
    *((template, WEIGHTED, ["5<|im_end|>", "6<|im_end|>"]) for template in (QWEN3, MARKED)),
    *((template, WEIGHTED[:2], []) for template in (QWEN3, MARKED)),
    (PHI3, [{"role": "assistant", "content": "4 "}, {"role": "user", "content": "so"}], ["4 <|end|>"]),
    (QWEN3, [{"role": "assistant", "content": " 4"}, {"role": "user", "content": "so"}, {"role": "assistant", "content": "5"}],
     [" 4<|im_end|>", "5<|im_end|>"]),
    (QWEN3, [{"role": "assistant", "content": "4", "reasoning_content": "hm"}], ["<think>\nhm\n</think>\n\n4<|im_end|>"]),
    (OPENED, [{"role": "assistant", "content": "4"}], ["4<|im_end|>"]),
    (ALONE, [{"role": "assistant", "content": "4"}, {"role": "user", "content": "so"}], ["4<|im_end|>"]),
    (HARMONY, [{"role": "assistant", "content": "4"}, {"role": "user", "content": "so"}, {"role": "assistant", "content": ""}],
     ["<|message|>4<|end|>", "<|message|><|return|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "counted"), TURNS)
@pytest.mark.parametrize("count", [None, ("content", "thinking")])
def test_what_counts_if_a_template_writes_the_last_answer_otherwise(template, messages, counted, count):
    """Neither headers, nor what ends the text, nor a thought that is empty; the same with ``count``."""
    specials = (
        "<|im_start|>",
        "<|im_end|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|endoftext|>",
        "<|return|>",
        "<|start|>",
        "<|message|>",
    )
    of = Renderer(Settings(template, {"eos_token": "<|endoftext|>"}, specials=specials, counted=count))
    asked = [] if template is ALONE else [{"role": "user", "content": "2+2"}]
    rendered = of(json.dumps([*asked, *messages]).encode())
    # Places are in bytes of text in which a special token has two.
    wide = b"".join(bytes([128 + part] * 2) if isinstance(part, int) else part for part in rendered.parts)
    spans = [wide[start:stop] for start, stop in zip(rendered.spans[::2], rendered.spans[1::2], strict=True)]
    names = {128 + number: text for number, text in enumerate(specials)}
    assert [
        "".join(names.get(byte, chr(byte)) for byte in re.sub(rb"([\x80-\xff])\1", rb"\1", span)) for span in spans
    ] == counted


@pytest.mark.slow
def test_both_engines_give_the_same_of_templates_of_trl():
    """Those that people train with."""
    trl = pytest.importorskip("trl", reason="trl is not installed: make peers")
    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    templates = [re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", path.read_text()) for path in paths]
    check_same([[renderer(template, fast) for fast in (True, False)] for template in templates], 25)
