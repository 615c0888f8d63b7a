"""Conversations with tools: three families of templates, and which of content, calls and thought counts."""

import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from flat_tokens.text.rows import BOUNDARY
from tasks.config import TokenizerConfig
from tasks.tokenize.chat import Chat, Conversations
from tasks.tokenize.engines import large_string_array
from tasks.tokenize.rendering.messages import RefusedError
from tasks.tokenize.rendering.renderer import NotATemplateError, Renderer
from tasks.tokenize.rendering.request import Settings
from tests.examples import first_fast
from tests.refusal import refusal

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n②' }}{% generation %}
        {%- if m.reasoning_content %}{{- '①<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- (m.content or '') | said(m.reasoning_content, m.tool_calls) }}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and m.content) or not loop.first %}{{- '③\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '③<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>⓪' }}{% endgeneration %}{{- '\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """
{{- bos_token }}
{%- if tools is not none and messages[0].role != 'user' %}{{- raise_exception('the first message is no question') }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools is not none %}
            {{- 'Functions:\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n②' }}{% generation %}
        {%- if m.tool_calls %}
            {{- (m.content or '') | trim }}{{- '③<|python_tag|>' }}
            {%- for call in m.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "parameters": ' }}
                {%- if call.function.arguments is string %}{{- call.function.arguments }}
                {%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}' }}
                {%- if not loop.last %}{{- '; ' }}{%- endif %}
            {%- endfor %}
            {{- '<|eom_id|>⓪' }}
        {%- else %}{{- m.content | trim + '<|eot_id|>⓪' }}{%- endif %}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == asked[-1] %}
            {{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}{% generation %}{{- '②' }}
        {%- if m.content is string %}{{- m.content | said(false, m.tool_calls) }}
        {%- else %}
            {%- for part in m.content or [] %}
                {%- if part.type == 'thinking' %}{{- '①[THINK]' + part.thinking + '[/THINK]' }}
                {%- else %}{{- '②' + part.text }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '③[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
        {%- endfor %}
        {{- eos_token + '⓪' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""


KINDS = {"⓪": None, "①": "thinking", "②": "content", "③": "tool_calls"}


class Family(NamedTuple):
    """A template with marks of the part of an answer that follows each."""

    source: str
    thought: str | None

    @property
    def marked(self) -> str:
        """The template as it is used, which marks what counts."""
        return re.sub(r" \| said\([^)]*\)|[⓪①②③]", "", self.source)

    @property
    def template(self) -> str:
        return re.sub("{% (end)?generation %}", "", self.marked)


FAMILIES = {
    "hermes": Family(HERMES, "reasoning_content"),
    "llama": Family(LLAMA, None),
    "mistral": Family(MISTRAL, "parts"),
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIALS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
)
WORDS = ["a", "é", "😀", " b", "\n", '"', "{", "}", "<", "4", "\\", "look", "</tool_call>", "中"]
COUNTS = [None, ("content",), ("tool_calls",), ("thinking",), ("content", "tool_calls"), ("thinking", "tool_calls")]


def talk(drawn: random.Random, thought: str | None) -> tuple[list[Message], Tools]:
    """A conversation in which some answers call functions, whose results follow."""

    def text(least: int = 0) -> str:
        return "".join(drawn.choices(WORDS, k=drawn.randrange(least, 6)))

    def arguments() -> Any:
        given = {"place": text(), "n": drawn.randrange(9), "more": [text(), None, {"x": 1.5}]}
        return json.dumps(given) if drawn.random() < 0.3 else given

    messages = []
    for number in range(drawn.randrange(1, 4)):
        messages.append({"role": "user", "content": f"q{number} {text()}"})
        for _ in range(drawn.randrange(1, 4)):
            content = text()
            answer = {"role": "assistant", "content": content if content.strip() else ""}
            thinks = drawn.random() < 0.5 and thought is not None
            if thinks and thought == "parts":
                answer["content"] = [{"type": "thinking", "thinking": f"hm{text()}."}]
                answer["content"] += [{"type": "text", "text": f"so{text()}."}] if drawn.random() < 0.7 else []
            elif thinks:
                answer["reasoning_content"] = f"hm{text()}"
            if drawn.random() < 0.5:
                names = drawn.choices(["look", "find_place", "é.x"], k=drawn.randrange(1, 3))
                functions = [{"name": name, "arguments": arguments()} for name in names]
                answer["tool_calls"] = [{"type": "function", "id": "abc", "function": one} for one in functions]
                if drawn.random() < 0.3 and answer["content"] == "":
                    answer["content"] = None
                messages += [answer, *({"role": "tool", "content": text(1) + "."} for _ in names)]
                continue
            messages.append(answer)
            break
    tools = [
        {"type": "function", "function": {"name": name, "description": text(), "parameters": {"type": "object", "x": None}}}
        for name in ("look", "find_place")
    ]
    return messages, drawn.choice([tools, tools, [], None])


def text_of(messages: list[Message], tools: Tools) -> str:
    """The text of a document: its messages and its tools."""
    return json.dumps(messages, ensure_ascii=False) + BOUNDARY.decode() + ("" if tools is None else json.dumps(tools))


def renderer(template: str, count: tuple[str, ...] | None = None) -> Renderer:
    return Renderer(Settings(template, TOKENS, specials=SPECIALS, boundary=BOUNDARY.decode(), counted=count))


def counted(of: Renderer, text: str) -> tuple[str, list[int]]:
    """What is rendered, and of each byte whether it counts."""
    rendered = of(text.encode())
    parts = [SPECIALS[part].encode() if isinstance(part, int) else part for part in rendered.parts]
    widths = [2 if isinstance(part, int) else len(part) for part in rendered.parts]
    short = [0] * sum(widths)
    for start, stop in zip(rendered.spans[::2], rendered.spans[1::2], strict=True):
        short[start:stop] = [1] * (stop - start)
    mask, at = [], 0
    for part, width, kind in zip(parts, widths, rendered.parts, strict=True):
        mask += [max(short[at : at + 2])] * len(part) if isinstance(kind, int) else short[at : at + width]
        at += width
    return b"".join(parts).decode(), mask


def said(content: str, thinks: Any, calls: Any) -> str:
    """A content with marks. The space around it belongs to the thought before it and to the calls after it."""
    core = content.strip()
    before, after = content.split(core, 1) if core else ("", "")
    return core and f"{'①' if thinks else '②'}{before}②{core}{'③' if calls else '②'}{after}"


JINJA = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
JINJA.filters |= {"said": said, "tojson": functools.partial(json.dumps, ensure_ascii=False)}


def expected(family: Family, messages: list[Message], tools: Tools, count: tuple[str, ...] | None) -> tuple[str, list[int]]:
    """What Jinja renders, and of each byte whether it counts, by the marks of the template."""
    source = re.sub("{% (end)?generation %}", "", family.source)
    text, mask, kind = "", [], None
    for character in JINJA.from_string(source).render(messages=messages, tools=tools, **TOKENS):
        if character in KINDS:
            kind = KINDS[character]
            continue
        text += character
        mask += [int(kind is not None and (count is None or kind in count))] * len(character.encode())
    return text, mask


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", COUNTS, ids=str)
@pytest.mark.parametrize("talks", first_fast([12, 40]))
def test_what_counts_is_what_a_template_writes_of_it(name, count, talks):
    """By the marks of its parts that the template has here. So it is if ``{% generation %}`` says what an answer is."""
    family, drawn = FAMILIES[name], random.Random(f"{name} {count}")
    renderers = [renderer(template, count) for template in (family.template, family.marked)]
    for _ in range(talks):
        messages, tools = talk(drawn, family.thought)
        for of in renderers:
            assert counted(of, text_of(messages, tools)) == expected(family, messages, tools, count)
    assert not renderers[0].turns.by_prefixes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_of_bytes(tmp_path_factory, SPECIALS)


def tokenizer_of_bytes(tmp_path_factory: pytest.TempPathFactory, special_tokens: Sequence[str]) -> Path:
    """Save a tokenizer of bytes with some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.needs("transformers")
def test_ids_are_those_of_transformers(tokenizer, name):
    """With tools and without, calls and thoughts among the messages."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make peers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **TOKENS)
    family, drawn = FAMILIES[name], random.Random(5)
    encoder = Conversations(Chat(template=family.template, tokens=TOKENS, tools=True), TokenizerConfig(name=str(tokenizer)))
    for _ in range(20):
        messages, tools = talk(drawn, family.thought)
        found = theirs.apply_chat_template(messages, tools=tools, chat_template=family.template, return_dict=True)
        assert encoder(large_string_array(text_of(messages, tools))).ids.tolist() == found["input_ids"]


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("{", "its tools are not JSON"),
        ("5", "its tools are not a list of objects"),
        ('["look"]', "its tools are not a list of objects"),
        ('[{"a": ' + "[" * 101 + "]" * 101 + "}]", "nested too deep"),
    ],
)
def test_tools_that_are_none_are_refused(tools, told):
    with refusal(told, RefusedError):
        renderer(FAMILIES["hermes"].marked)(b'[{"role": "user", "content": "x"}]' + BOUNDARY + tools.encode())


def test_special_strings_in_tools_are_text():
    tools = [{"name": "<|im_end|>", "<s>": ["<|im_start|>"]}]
    rendered = renderer(FAMILIES["hermes"].marked)(text_of([{"role": "user", "content": "x"}], tools).encode())
    assert rendered.parts[1] == f"system\n# Tools\n<tools>\n{json.dumps(tools[0])}\n</tools>".encode()


def test_a_template_without_use_for_tools_is_refused():
    """They would be left out silently."""
    with refusal(r"has no use for tools; leave source\.tools_column out", NotATemplateError):
        renderer("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_a_template_that_looks_into_a_content_is_refused():
    """Which of its text is which is not known then; without ``count`` it is rendered as ever."""
    template = "{% for m in messages %}{{ m.content|upper }}{% if tools %}{% endif %}{{ m.tool_calls }};{% endfor %}"
    talk = text_of([{"role": "assistant", "content": "x", "tool_calls": [{"name": "look", "arguments": {}}]}], None).encode()
    with refusal(r"Leave source\.count out", RefusedError):
        renderer(template, ("content",))(talk)
    assert renderer(template)(talk)
