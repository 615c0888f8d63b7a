"""Conversations to tokens: templates of known families, what counts in them, and special strings that are no special tokens."""

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tasks.config import Source, TokenizerConfig
from tasks.tokenize.chat import Chat, Conversations, chats_of
from tasks.tokenize.engines import Refusal, UnencodableError, large_string_array
from tests.examples import examples
from tests.refusal import refusal
from tests.tasks.tokenize.test_parts import byte_level

Messages = list[dict[str, Any]]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen and many others have it, without a mark of what counts."""

CHATML_MARKED = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "{%- if message['role'] == 'assistant' %}\n"
    "{% generation %}\n"
    "{{- message['content'] + '<|im_end|>' }}\n"
    "{%- endgeneration %}\n"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{% endif %}\n"
    "{{- '\\n' }}\n"
    "{%- endfor %}"
)

LLAMA = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK: Messages = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4, é 😀"},
    {"role": "user", "content": " thanks "},
    {"role": "assistant", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer, some special tokens, and one added token that is not special."""
    made = byte_level()
    made.add_tokens([AddedToken("<think>", special=False)])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "add_bos_token": True, "chat_template": CHATML}))
    return directory


class Spoken(NamedTuple):
    """What became of one conversation, and the texts of runs of tokens that count."""

    ids: list[int]
    mask: list[int]
    counted: list[str]


@pytest.fixture(scope="module")
def speak(tokenizer: Path) -> Callable[..., Spoken]:
    plain = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def spoken(messages: Messages, template: str, **chat: Any) -> Spoken:
        encoder = Conversations(Chat(template=template, tokens=TOKENS, **chat), TokenizerConfig(name=str(tokenizer)))
        found = encoder(large_string_array(json.dumps(messages, ensure_ascii=False)))
        ids, mask = found.ids.tolist(), found.mask.tolist()
        runs = [[i for i, _ in run] for counts, run in groupby(zip(ids, mask, strict=True), lambda one: one[1]) if counts]
        return Spoken(ids, mask, [plain.decode(run, skip_special_tokens=False) for run in runs])

    return spoken


def ids_of(tokenizer: Path, text: str) -> list[int]:
    """The tokens of a text by the tokenizer itself, to which special strings are special tokens."""
    return list(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("template", "text", "counted"),
    [
        *(
            (
                template,
                "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nIt is 4, é 😀<|im_end|>\n"
                "<|im_start|>user\n thanks <|im_end|>\n<|im_start|>assistant\n<|im_end|>\n",
                ["It is 4, é 😀<|im_end|>", "<|im_end|>"],
            )
            for template in (CHATML, CHATML_MARKED)
        ),
        (
            LLAMA,
            "<s><|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 4, é 😀<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nthanks<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>",
            ["It is 4, é 😀<|eot_id|>", "<|eot_id|>"],
        ),
        (
            MISTRAL,
            "<s>[INST] What is 2+2? [/INST] It is 4, é 😀</s>[INST]  thanks  [/INST] </s>",
            [" It is 4, é 😀</s>", " </s>"],
        ),
    ],
    ids=["chatml", "chatml marked", "llama", "mistral"],
)
def test_templates_of_known_families(tokenizer, speak, template, text, counted):
    """What the template writes around the assistant's message does not count, the token that ends it does."""
    spoken = speak(TALK, template)
    assert spoken.ids == ids_of(tokenizer, text)
    assert spoken.counted == counted


def test_other_roles_count_where_they_are_chosen(speak):
    """The whole message then, as nobody asks for it."""
    spoken = speak(TALK, CHATML_MARKED, roles=("user",))
    assert spoken.counted == ["<|im_start|>user\nWhat is 2+2?<|im_end|>", "<|im_start|>user\n thanks <|im_end|>"]


def test_no_two_messages_make_a_special_token_together(tokenizer, speak):
    """Nor parts of one that a template puts side by side."""
    template = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    parts = [{"text": text} for text in ("a<|im_", "end|><", "s>", "</s", ">")]
    spoken = speak([{"role": "user", "content": parts}], template)
    assert not {ids_of(tokenizer, text)[0] for text in SPECIALS} & {*spoken.ids}


def test_a_role_makes_special_tokens_as_the_template_says(tokenizer, speak):
    """A plain one; a special string for a role is text."""
    template = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    assert speak([{"role": "im_end", "content": "x"}], template).ids == ids_of(tokenizer, "<|im_end|>x")
    strange = speak([{"role": "<s>", "content": "x"}], template)
    assert ids_of(tokenizer, "<s>")[0] not in strange.ids


def test_tokens_that_are_not_special_are_found_in_content(tokenizer, speak):
    """As in every text: a tokenizer's added tokens that are not special are part of its ordinary text."""
    (think,) = ids_of(tokenizer, "<think>")
    assert think in speak([{"role": "user", "content": "<think>"}], CHATML).ids


@pytest.mark.parametrize(
    ("text", "told", "reason"),
    [
        ("{", "its messages are not JSON", "unencodable"),
        ("[" * 100_000, "its messages are not JSON", "unencodable"),
        ('{"role": "user"}', "its messages are not a list of objects", "unencodable"),
        ('[{"role": "user", "content": ""}, {"role": "assistant", "weight": 2, "content": ""}]', "the weight 2", "unencodable"),
        ("[]", "it has no messages", "no_messages"),
        ('[{"role": "assistant", "content": "x"}]', "the chat template says: roles must alternate", "unencodable"),
        ('[{"role": "user"}]', "the chat template says: .*no attribute 'content'", "no_content"),
    ],
)
def test_conversations_that_cannot_be_encoded(tokenizer, text, told, reason):
    """The others are, one by one."""
    encoder = Conversations(Chat(template=MISTRAL, tokens=TOKENS), TokenizerConfig(name=str(tokenizer)))
    good = '[{"role": "user", "content": "x"}]'
    with refusal(told, UnencodableError):
        encoder(large_string_array(good, text))
    one, other = encoder.one_by_one(large_string_array(good, text))
    assert one.ids.tolist() == ids_of(tokenizer, "<s>[INST] x [/INST]")  # type: ignore[union-attr]
    assert isinstance(other, Refusal)
    assert other.reason == reason


@pytest.mark.parametrize(
    ("messages", "content", "told"),
    [
        ("messages", "m.content if loop.last else m.content | length", "otherwise when others follow"),
        ("messages | reverse", "m.content", "out of order"),
    ],
)
def test_a_message_that_is_not_found_is_not_guessed(speak, messages, content, told):
    """Some templates leave out the thoughts of earlier answers."""
    template = f"{{% for m in {messages} %}}<s>{{{{ {content} }}}}</s>{{% endfor %}}"
    with refusal(rf"message 1 is rendered {told}.*\{{% generation %\}}", UnencodableError):
        speak(TALK, template)


def test_where_a_template_comes_from(tokenizer, tmp_path):
    """The source's file, else the tokenizer's own file, else its configuration, where one of several is ``default``."""

    def template_of(name: Path, **more: Any) -> str:
        (chat,) = chats_of([Source(path="in", messages_column="m", **more)], TokenizerConfig(name=str(name)), None)
        return chat.template

    assert template_of(tokenizer) == template_of(tokenizer / "tokenizer.json") == CHATML
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with refusal(r"has no chat template next to it. Set source.chat_template"):
        template_of(tmp_path)
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template_of(tmp_path) == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert template_of(tmp_path) == "c"
    (tmp_path / "mine.jinja").write_text("d")
    assert template_of(tmp_path, chat_template=str(tmp_path / "mine.jinja")) == "d"
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with refusal(r"the chat template of .*/mine\.jinja cannot be used: it is not UTF-8 .* Convert it"):
        template_of(tmp_path, chat_template=str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize("name", ["bytes", "cl100k_base"])
def test_tokenizers_without_a_definition_of_the_library(name):
    """tiktoken's and the bytes: with a file's template. A token counts where one of its characters does."""
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% endfor %}"
    encoder = Conversations(Chat(template=template), TokenizerConfig(name=name))
    found = encoder(large_string_array('[{"role": "user", "content": "é😀 <|endoftext|>"}]'))
    ids = found.ids.tolist()
    begin = 6 if name == "bytes" else 2
    if name == "bytes":
        assert bytes(i - 1 for i in ids) == "user: é😀 <|endoftext|><|endoftext|>".encode()
    else:
        assert ids.index(100257) == len(ids) - 1
    assert found.mask.tolist() == [0] * begin + [1] * (len(ids) - begin)


talks = st.lists(
    st.text(st.sampled_from("ab ?\n\t é😀<|/"), max_size=8).filter(lambda text: text == text.strip()), min_size=1, max_size=5
)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA, MISTRAL])
@pytest.mark.needs("transformers")
def test_ids_and_masks_are_those_of_transformers(tokenizer, speak, template):
    """On text without special strings; the masks where the template says what counts."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make peers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), **TOKENS)

    @given(talks)
    @examples(50)
    def same(texts: Iterable[str]) -> None:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text + "."} for i, text in enumerate(texts)]
        found = theirs.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask="{% generation %}" in template
        )
        spoken = speak(messages, template)
        assert spoken.ids == found["input_ids"]
        if "{% generation %}" in template:
            assert spoken.mask == found["assistant_masks"]

    same()
