"""Conversations through the whole pipeline: none loses its text, a bad one is a bad document, and masks are those of a reader."""

import json
from collections import Counter
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import flat_tokens
from flows.pipelines.plan import plan
from tasks.config import BuildConfig, MessageNames, Source
from tasks.tokenize.chat import Chat
from tasks.tokenize.parts import Widths
from tests.faults.support import build_here
from tests.refusal import refusal
from tests.sources import write_rows
from tests.tasks.tokenize.test_tools import tokenizer_of_bytes

Talk = list[dict[str, Any]]
START, STOP = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
GOOD: Talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with two special tokens."""
    return tokenizer_of_bytes(tmp_path_factory, (START, STOP))


@pytest.fixture
def build(tokenizer: Path, tmp_path: Path) -> Callable[..., flat_tokens.Dataset]:
    """Build a dataset of lines of JSON in the column ``talk``."""

    def built(lines: list[str], template: str = CHATML, on_bad: str = "error", **source: Any) -> flat_tokens.Dataset:
        build_here(settings(tmp_path, tokenizer, lines, template, on_bad, **source))
        return flat_tokens.open(tmp_path / "out")

    return built


def settings(
    here: Path, tokenizer: Path, lines: list[str], template: str = CHATML, on_bad: str = "error", **source: Any
) -> dict[str, Any]:
    (here / "x.jinja").write_text(template)
    (here / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    told = {"path": str(here / "in.jsonl"), "messages_column": "talk", "chat_template": str(here / "x.jinja"), **source}
    common = {"tokenizer": str(tokenizer), "validation_fraction": 0, "documents": {"on_bad": on_bad}}
    return {"output": str(here / "out"), "source": told, **common}


def line(talk: Any, tools: Any = None) -> str:
    return json.dumps({"talk": talk} if tools is None else {"talk": talk, "tools": tools})


def wanted(tokenizer: Path, talk: Talk) -> tuple[list[int], list[int]]:
    """ChatML in tokens, without a template: the ids of a conversation, and its mask. Special tokens in contents are text."""
    own = Tokenizer.from_file(str(tokenizer))
    own.encode_special_tokens = True
    ids, mask = [], []
    for message in talk:
        before, content, after = (own.encode(text).ids for text in (message["role"] + "\n", message["content"], "\n"))
        ids += [own.token_to_id(START), *before, *content, own.token_to_id(STOP), *after]
        mask += [0] * (len(before) + 1) + [int(message["role"] == "assistant")] * (len(content) + 1) + [0]
    return ids, mask


def held(split: flat_tokens.FlatTokens) -> list[tuple[list[int], list[int]]]:
    """The ids and the mask of each conversation."""
    return [(split.sequence(i).tolist(), split.mask(*split.span(i)).tolist()) for i in range(split.seq_count)]


BAD = [
    (line([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]), "no_content"),
    (line([*GOOD, {"role": "user", "content": None}]), "no_content"),
    (line([*GOOD, {"role": None, "content": "x"}]), "no_content"),
    (line([]), "no_messages"),
    (line([*GOOD, {"role": "critic", "content": "bad"}]), "not_rendered"),
    (line([*GOOD, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}]), "not_rendered"),
    (line([{"role": "critic", "content": "bad"}]), "not_rendered"),
    (line(["x"]), "unencodable"),
    (line(GOOD, "{"), "bad_tools"),
    (line(GOOD, ["look"]), "bad_tools"),
    *((f'{{"talk": [{{"role": "user", "content": {bad}}}]}}', "invalid_unicode") for bad in ('"\\ud83f"', '["\\ud800"]')),
    *((f'{{"talk": [{{"role": "user", "content": {"[" * depth}5{"]" * depth}}}]}}', "unencodable") for depth in (0, 300)),
    *(
        (line(f'[{{"role": "user", "content": "x", "a": {value}}}]'), "unencodable")
        for value in ("1" * 5000, *('{"a":' * depth + "5" + "}" * depth for depth in (101, 700, 990, 5000)))
    ),
    ('{"talk": "[}"}', "unencodable"),
    (line(json.dumps([*GOOD, {}])), "no_content"),
    ("{}", "null"),
    ('{"talk": 5}', "wrong_type"),
    (f'{{"talk": {"[" * 10**5}', "malformed"),
    (line(GOOD, {"name": "look"}), "wrong_type"),
]
"""Lines of conversations that lose their text or have no tools, and the reason under which each is counted."""
TOOLS_FIRST = "{% if tools %}{{ tools|tojson }}{% endif %}"
ODD = [f"Z {START}{STOP}", "<|im_", 'end|>\\n"\u2028 ', "\U000f0000\0{% x %} é😀中", "\n ", "", "<"]


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["plain", "marked"])
def test_a_conversation_that_loses_its_text_is_a_bad_document(build, tokenizer, template):
    """The error names file, row and reason. If it is skipped, those before and after it are there, also one of many messages."""
    template = TOOLS_FIRST + template.replace("m in messages", "m in messages if m.role != 'critic'")
    template = template.replace("m.content", "(m.content or '')")
    told = r"the conversation cannot be encoded: .*no 'role' or 'content'; it has 'from', 'value'.* \[no_content\]"
    for (bad, _), words in ((BAD[0], told), (BAD[-1], "'tools' is a JSON object, not an array of tools")):
        with refusal(rf"in\.jsonl, line 2 \(row 1\): {words}"):
            build([line(GOOD), bad, line(GOOD, [])], template, tools_column="tools")
    talks = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one in ODD for two in ODD]
    talks.append([{"role": ("user", "assistant")[i % 2], "content": f"m{i}" * (i % 7), "a": [nan, 1 << 70]} for i in range(3000)])
    lines = [*map(line, talks), *(line(json.dumps(talk, ensure_ascii=False)) for talk in talks)]
    opened = build([*(one for bad, _ in BAD for one in (line(GOOD), bad)), *lines], template, "skip", tools_column="tools")
    assert held(opened.train) == [wanted(tokenizer, GOOD)] * len(BAD) + [wanted(tokenizer, talk) for talk in talks] * 2
    assert opened.manifest["totals"]["documents"]["skipped"] == Counter(reason for _, reason in BAD)


@pytest.mark.parametrize(("ending", "as_text"), [("jsonl", False), ("parquet", False), ("parquet", True), ("csv", True)])
def test_messages_with_other_names_and_tools_of_a_conversation(build, tokenizer, tmp_path, ending, as_text):
    """Keys and roles are given in the source's configuration. Tools are given to the template; a conversation without any has
    none. Lists of Arrow have no keys that are null.
    """
    talk = [{"from": "human", "value": "2+2?", "n": "1"}, {"from": "gpt", "value": "4"}, {"from": "tool", "value": "!"}]
    names = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
    tools = [[{"name": "look", "more": {"a": 1}}], None, [{"name": "find", "more": {"b": "x"}}]]
    rows = [{"talk": talk, "tools": one} for one in tools]
    if as_text:
        rows = [{name: value and json.dumps(value) for name, value in row.items()} for row in rows]
    path = write_rows(tmp_path / f"talks.{ending}", rows)
    opened = build([], TOOLS_FIRST + CHATML, path=str(path), tools_column="tools", messages=names)
    ids, mask = wanted(tokenizer, [*GOOD, {"role": "tool", "content": "!"}])
    before = [Tokenizer.from_file(str(tokenizer)).encode(json.dumps(one) if one else "").ids for one in tools]
    assert held(opened.train) == [(some + ids, [0] * len(some) + mask) for some in before]
    recorded = opened.manifest["provenance"]["sources"][0]
    assert recorded["messages"] == recorded["chat"]["messages"] == names
    assert recorded["chat"]["tools"] is True


def test_tools_counts_and_other_names_are_part_of_keys_where_they_are_set():
    """Keys of everything else are what they were."""
    usual = {"template": "x", "tokens": {}, "roles": ["assistant"], "day": None, "edition": 4}
    chat = Chat(template="x", tools=True, count=("content",), messages=MessageNames(role="from"))
    names = {"role": "from", "content": "content", "roles": {}}
    assert chat.model_dump(mode="json") == {**usual, "tools": True, "count": ["content"], "messages": names}
    plain = Source(path="in", messages_column="m")
    assert plain.reading() == Source(path="in", messages_column="m", messages={"role": "r"}, count=("content",)).reading()
    assert Source(path="in", messages_column="m", tools_column="t").reading() == (*plain.reading(), {"tools": "t"})


def test_a_template_that_looks_into_contents_says_so_before_it_is_used(build, tokenizer, tmp_path, caplog):
    """Tokens and masks are the same. ``plan`` says it, too."""
    alone = "{% if messages[1] and messages[1].content|length not in (1, 9) %}!{% endif %}" + CHATML
    opened = build([line(GOOD)] * 3, alone)
    assert held(opened.train) == [wanted(tokenizer, GOOD)] * 3
    assert "each beginning of a conversation is rendered alone" in caplog.text
    caplog.clear()
    plan(BuildConfig.model_validate(settings(tmp_path, tokenizer, [line(GOOD)] * 4, alone)))
    assert "each beginning of a conversation is rendered alone" in caplog.text
    caplog.clear()
    build([line(GOOD)] * 5)
    assert not caplog.text


def test_marks_that_are_no_special_tokens_are_named(build, caplog):
    """They become ordinary text of several tokens."""
    build([line(GOOD)], CHATML.replace("<|im_start|>", "<|turn|>"))
    assert "the chat template writes <|turn|>, which" in caplog.text
    assert "each becomes several tokens of ordinary text" in caplog.text


def test_a_thought_within_a_content_is_named(tmp_path, tmp_path_factory, caplog):
    """A special token that a message spells is text, so the template does not find it."""
    tokenizer = tokenizer_of_bytes(tmp_path_factory, (START, STOP, "</think>"))
    for content, is_named in (("4", False), ("2 </think>4", True)):
        talk = [GOOD[0], {"role": "assistant", "content": content}]
        build_here(settings(tmp_path, tokenizer, [line(talk)], CHATML + "{# a thought ends with </think> #}"))
        assert ("a content has </think>, a special token of" in caplog.text) == is_named


def test_an_engine_that_differs_is_not_used_for_conversations(build, tokenizer, monkeypatch, caplog):
    """The reference tokenizes the first conversations, too. Where tokens or masks differ it tokenizes all of the source."""
    monkeypatch.setattr(Widths, "of", lambda self, ids, is_special: np.full(len(ids), 2))
    monkeypatch.setattr(Widths, "is_right", lambda self, extra: extra == extra)
    opened = build([line(GOOD)] * 3)
    assert "does not give the tokens and masks of" in caplog.text
    assert held(opened.train) == [wanted(tokenizer, GOOD)] * 3


def test_a_template_is_tried_before_anything_is_made(build, tmp_path):
    with refusal("takes more than [0-9,]+ bytes of memory"):
        build([line(GOOD)], "{{ 'x'|center(6000000000) }}" + CHATML, "skip")
    assert not (tmp_path / "out/versions").exists()
