"""Conversations through the whole pipeline: none loses its text, a bad one is a bad document, and masks are those of a reader."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import flat_tokens
from flat_tokens.vocabulary import byte_level_alphabet
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
    """Build a dataset of lines of JSON, or of Parquet, in the column ``talk``."""

    def built(lines: list[str] | pa.Table, template: str = CHATML, on_bad: str = "error", **source: Any) -> flat_tokens.Dataset:
        build_here(settings(tmp_path, tokenizer, lines, template, on_bad, **source))
        return flat_tokens.open(tmp_path / "out")

    return built


def settings(
    here: Path, tokenizer: Path, lines: list[str] | pa.Table, template: str = CHATML, on_bad: str = "error", **source: Any
) -> dict[str, Any]:
    (here / "x.jinja").write_text(template)
    name = here / ("in.jsonl" if isinstance(lines, list) else "in.parquet")
    if isinstance(lines, list):
        name.write_text("".join(f"{line}\n" for line in lines))
    else:
        pq.write_table(lines, name)
    return {
        "output": str(here / "out"),
        "source": {"path": str(name), "messages_column": "talk", "chat_template": str(here / "x.jinja"), **source},
        "tokenizer": str(tokenizer),
        "validation_fraction": 0,
        "documents": {"on_bad": on_bad},
    }


def line(talk: Any, tools: Any = None) -> str:
    return json.dumps({"talk": talk} if tools is None else {"talk": talk, "tools": tools})


class Reader:
    """A parser of ChatML in tokens, which knows nothing of templates: its messages, and which of its tokens should count."""

    def __init__(self, tokenizer: Path) -> None:
        own = Tokenizer.from_file(str(tokenizer))
        self._start, self._stop = own.token_to_id(START), own.token_to_id(STOP)
        values = {character: value for value, character in enumerate(byte_level_alphabet())}
        self._byte = {i: values[token] for token, i in own.get_vocab(with_added_tokens=False).items()}

    def read(self, ids: list[int]) -> tuple[list[tuple[str, str]], list[int]]:
        messages, mask, at = [], [], 0
        while at < len(ids):
            assert ids[at] == self._start
            stop = ids.index(self._stop, at)
            text = bytes(self._byte[i] for i in ids[at + 1 : stop])
            role, _, content = text.partition(b"\n")
            assert self._byte[ids[stop + 1]] == ord("\n")
            messages.append((role.decode(), content.decode()))
            counts = int(role == b"assistant")
            mask += [0] * (len(role) + 2) + [counts] * (len(content) + 1) + [0]
            at = stop + 2
        return messages, mask

    def check(self, dataset: flat_tokens.Dataset, talks: list[Talk]) -> None:
        """Check that a dataset holds these conversations, in order, with these masks."""
        assert dataset.train.seq_count == len(talks)
        for i, talk in enumerate(talks):
            messages, mask = self.read(dataset.train.sequence(i).tolist())
            assert messages == [(message["role"], message["content"]) for message in talk]
            assert dataset.train.mask(*dataset.train.span(i)).tolist() == mask


BAD = [
    (line([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]), "no_content"),
    (line([{"role": "user", "text": "x"}]), "no_content"),
    (line([*GOOD, {"role": "user", "content": None}]), "no_content"),
    (line([*GOOD, {"role": None, "content": "x"}]), "no_content"),
    (line([*GOOD, {}]), "no_content"),
    (line([]), "no_messages"),
    (line([*GOOD, {"role": "critic", "content": "bad"}]), "not_rendered"),
    (line([*GOOD, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}]), "not_rendered"),
    (line([{"role": "critic", "content": "bad"}]), "not_rendered"),
    (line(["x"]), "unencodable"),
    (line([{"role": "user", "content": {"a": 1}}]), "unencodable"),
    (line(GOOD, "{"), "bad_tools"),
    (line(GOOD, ["look"]), "bad_tools"),
    (line(GOOD, {"name": "look"}), "wrong_type"),
]
"""Lines of conversations that lose their text or have no tools, and the reason under which each is counted."""
TOOLS_FIRST = "{% if tools %}{{ tools|tojson }}{% endif %}" + CHATML
WITHOUT_CRITICS = TOOLS_FIRST.replace("{% for m in messages %}", "{% for m in messages if m.role != 'critic' %}").replace(
    "m.content", "(m.content or '')"
)


def test_a_conversation_that_loses_its_text_is_a_bad_document(build, tokenizer):
    """The error names file, row and reason. If it is skipped, those before and after it are there."""
    told = r"the conversation cannot be encoded: .*no 'role' or 'content'; it has 'from', 'value'.* \[no_content\]"
    for (bad, _), words in ((BAD[0], told), (BAD[-1], "'tools' is a JSON object, not an array of tools")):
        with refusal(rf"in\.jsonl, line 2 \(row 1\): {words}"):
            build([line(GOOD), bad, line(GOOD, [])], WITHOUT_CRITICS, tools_column="tools")
    lines = [line(GOOD)] + [one for bad, _ in BAD for one in (bad, line(GOOD))]
    opened = build(lines, WITHOUT_CRITICS, "skip", tools_column="tools")
    Reader(tokenizer).check(opened, [GOOD] * (len(BAD) + 1))
    assert opened.manifest["totals"]["documents"]["skipped"] == Counter(reason for _, reason in BAD)


@pytest.mark.parametrize("kind", ["lines", "lists", "JSON", "csv"])
def test_messages_with_other_names_and_tools_of_a_conversation(build, tokenizer, tmp_path, kind):
    """Keys and roles are given in the source's configuration. Tools are given to the template; a conversation without any has
    none. Lists of Arrow have no keys that are null.
    """
    talk = [{"from": "human", "value": "2+2?", "n": "1"}, {"from": "gpt", "value": "4"}, {"from": "tool", "value": "!"}]
    names = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
    tools = [[{"name": "look", "more": {"a": 1}}], None, [{"name": "find", "more": {"b": "x"}}]]
    as_json = {"talk": [json.dumps(talk)] * 3, "tools": [one and json.dumps(one) for one in tools]}
    rows = [{"talk": talk, "tools": one} for one in tools]
    table = pa.Table.from_pylist(rows) if kind == "lists" else pa.table(as_json)
    path = {"path": str(write_rows(tmp_path / "in.csv", table.to_pylist()))} if kind == "csv" else {}
    lines = [line(talk, one) for one in tools]
    opened = build(lines if kind == "lines" else table, TOOLS_FIRST, tools_column="tools", messages=names, **path)
    own = Tokenizer.from_file(str(tokenizer))
    expected = [*GOOD, {"role": "tool", "content": "!"}]
    plain = own.encode("".join(f"{START}{m['role']}\n{m['content']}{STOP}\n" for m in expected)).ids
    found = [opened.train.sequence(i).tolist() for i in range(3)]
    assert found == [own.encode(json.dumps(one) if one else "").ids + plain for one in tools]
    assert opened.train.mask(*opened.train.span(1)).tolist() == Reader(tokenizer).read(found[1])[1]
    recorded = opened.manifest["provenance"]["sources"][0]
    assert recorded["messages"] == recorded["chat"]["messages"] == names
    assert recorded["chat"]["tools"] is True


def test_tools_counts_and_other_names_are_part_of_keys_where_they_are_set():
    """Keys of everything else are what they were."""
    usual = {"template": "x", "tokens": {}, "roles": ["assistant"], "day": None, "edition": 3}
    assert Chat(template="x").model_dump(mode="json") == usual
    chat = Chat(template="x", tools=True, count=("content",), messages=MessageNames(role="from"))
    names = {"role": "from", "content": "content", "roles": {}}
    assert chat.model_dump(mode="json") == {**usual, "tools": True, "count": ["content"], "messages": names}
    assert Chat.model_validate_json(chat.model_dump_json()) == chat
    plain = Source(path="in", messages_column="m")
    assert plain.reading() == Source(path="in", messages_column="m", messages={"role": "r"}, count=("content",)).reading()
    assert Source(path="in", messages_column="m", tools_column="t").reading() == (*plain.reading(), {"tools": "t"})


WORDS = [
    "a",
    "Z ",
    " ",
    "\n",
    "é",
    "😀",
    "中",
    START,
    STOP,
    "<|im_",
    "end|>",
    "\\n",
    '"',
    "\u2028",
    "\U000f0000",
    "\0",
    "{% x %}",
]


def good_talk(drawn: random.Random) -> Talk:
    return [
        {"role": drawn.choice(["user", "assistant", "system"]), "content": "".join(drawn.choices(WORDS, k=drawn.randrange(9)))}
        for _ in range(drawn.randrange(1, 7))
    ]


def nested(depth: int, brackets: tuple[str, str]) -> str:
    return brackets[0] * depth + "1" + brackets[1] * depth


def bad_lines(drawn: random.Random) -> str:
    """A line whose conversation is bad, in one of many ways."""
    talk = good_talk(drawn)
    place = drawn.randrange(len(talk))
    character = drawn.choice(["\\ud83f\\udffe", "\\ud83f\\udfff", "\\udbff\\udffe", "\\udbff\\udfff", "\\ud800", "\\udfff x"])
    depth, brackets = drawn.choice([101, 300, 700, 990, 5000, 100_000]), drawn.choice([("[", "]"), ('{"a":', "}")])
    values = [
        f'"a{character}b"',
        f'["{character}"]',
        f'{{"{character}": 1}}',
        nested(depth, brackets),
        "null",
        "5",
        "true",
        "NaN",
        "1" * 5000,
        '{"a": 1}',
        "[1, null]",
    ]
    parts = [json.dumps(message) for message in talk]
    parts[place] = drawn.choice(
        [
            *(f'{{"role": "user", "content": {value}}}' for value in values),
            f'{{"role": {drawn.choice(["null", "5", "[]", "{}", nested(300, brackets)])}, "content": "x"}}',
            '{"from": "human", "value": "x"}',
            "{}",
            "null",
            "[]",
            '"x"',
            '{"role": "user"}',
            '{"content": "x"}',
            f'{{"role": "user", "content": "x", "more": {nested(depth, brackets)}}}',
        ]
    )
    broken = [
        f'{{"talk": [{", ".join(parts)}]}}',
        '{"talk": []}',
        '{"talk": {}}',
        '{"talk": null}',
        '{"talk": 5}',
        "{}",
        '{"talk": [',
        '{"talk": "[}"}',
        json.dumps({"talk": f"[{', '.join(parts)}]"}),
    ]
    return drawn.choices(broken, weights=[20, 1, 1, 1, 1, 1, 1, 1, 5])[0]


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["plain", "marked"])
def test_fuzzed_conversations(build, tokenizer, template):
    """Of 300 lines a third are bad. All others are there, in order, with the tokens and the masks that a reader gives them, and
    so is one of many messages.
    """
    drawn = random.Random(7)
    lines, talks = [], []
    for _ in range(300):
        if drawn.random() < 0.33:
            lines.append(bad_lines(drawn))
            continue
        talks.append(good_talk(drawn))
        is_text = drawn.random() < 0.3
        lines.append(line(json.dumps(talks[-1], ensure_ascii=drawn.random() < 0.5) if is_text else talks[-1]))
    talks.append([{"role": ("user", "assistant")[i % 2], "content": f"m{i}" * (i % 7)} for i in range(3000)])
    lines.append(line(talks[-1]))
    opened = build(lines, template, "skip")
    Reader(tokenizer).check(opened, talks)
    counts = opened.manifest["totals"]["documents"]
    assert sum(counts["skipped"].values()) == len(lines) - len(talks)
    assert {"no_content", "no_messages", "unencodable", "null", "wrong_type", "malformed"} <= set(counts["skipped"])


def test_a_template_that_looks_into_contents_says_so_before_it_is_used(build, tokenizer, tmp_path, caplog):
    """Tokens and masks are the same. ``plan`` says it, too."""
    alone = "{% if messages[1] and messages[1].content|length not in (1, 9) %}!{% endif %}" + CHATML
    opened = build([line(GOOD)] * 3, alone)
    assert "each beginning of a conversation is rendered alone" in caplog.text
    assert "it changes what its messages hold" in caplog.text
    Reader(tokenizer).check(opened, [GOOD] * 3)
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


def test_an_engine_that_differs_is_not_used_for_conversations(
    build,
    tokenizer,
    monkeypatch,
    caplog,
):
    """The reference tokenizes the first conversations, too. Where tokens or masks differ it tokenizes all of the source."""
    monkeypatch.setattr(Widths, "of", lambda self, ids, is_special: np.full(len(ids), 2))
    monkeypatch.setattr(Widths, "is_right", lambda self, extra: extra == extra)
    opened = build([line(GOOD)] * 3)
    assert "does not give the tokens and masks of" in caplog.text
    assert "Using the slower reference engine for its conversations" in caplog.text
    Reader(tokenizer).check(opened, [GOOD] * 3)


def test_a_template_is_tried_before_anything_is_made(build, tmp_path):
    with refusal("takes more than [0-9,]+ bytes of memory"):
        build([line(GOOD)], "{{ 'x'|center(6000000000) }}" + CHATML, "skip")
    assert not (tmp_path / "out/versions").exists()
