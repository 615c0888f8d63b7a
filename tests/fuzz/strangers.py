"""Targets: what strangers write besides sources and neighbours' files. Conversations, chat templates, kept columns, ledgers of
runs, the family of nanoGPT's formats, and the records in `.export`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import flat_tokens
from flat_tokens import Ledger
from flat_tokens.columns import Columns, ColumnsWriter, name_of, parts_of
from flat_tokens.formats import open_any
from flat_tokens.stores.store import Store
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.export import done_before, export_of, target, write
from tasks.config import Source, TokenizerConfig
from tasks.tokenize.chat import chats_of
from tasks.tokenize.engines import large_string_array
from tasks.tokenize.rendering.processes import Renderers
from tasks.tokenize.rendering.request import Limits, Settings
from tests.fuzz.driver import Fuzzed, WrongError, of_file, portable
from tests.fuzz.mutators import either, havoc, json_values, parquet
from tests.made import write_sequences

LIMITS = Limits(seconds=4, memory=1 << 32)
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
COUNTED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GOOD = '[{"role": "user", "content": "before"}, {"role": "assistant", "content": "and behind"}]'
WORDS = (
    b'"\\ud83f\\udffe"',
    b"\\udbff\\udffe",
    b"\\udbff\\udfff",
    b'"role"',
    b'"content"',
    b"[" * 300,
    b"null",
    b"1e999",
    b"\\ud800",
)
TAGS = (
    b"{{ ", b" }}", b"{% for x in range(99999) %}", b"{% endfor %}", b"|center(9999999999)", b"|random", b"lipsum()",
    b" * 99999999", b"{% set ns = namespace(x='a') %}", b"{% macro f(n) %}{{ f(n) }}{% endmacro %}", b"{{ f(1) }}",
    b"{% generation %}", b"|tojson",
)  # fmt: skip


def _renderers(template: str) -> Renderers:
    return Renderers(Settings(template, specials=("<s>", "<|user|>")), LIMITS)


def _rendered(renderers: Renderers, *texts: str) -> list[int]:
    """The numbers of those that are refused; each of *texts* has one answer."""
    answered, refused = 0, []
    for one in renderers(large_string_array(*texts)):
        refused += [answered + i for i in one.faults]
        answered += len(one.counts)
    if answered != len(texts):
        raise WrongError("count", f"{answered} answers to {len(texts)} conversations")
    return refused


def _conversations(work: Path) -> Fuzzed:
    """A bad conversation is refused, and the ones around it are not."""
    renderers = [_renderers(template) for template in (PLAIN, COUNTED)]

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for one in renderers:
            if {0, 2} & set(_rendered(one, GOOD, text, GOOD)):
                raise WrongError("neighbour", "a conversation is refused that was not changed")

    seeds = [GOOD.encode(), b'[{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [{"id": 1}]}]']
    return Fuzzed(seeds, either(json_values(), havoc(*WORDS)), run, ("conversation",))


def _templates(work: Path) -> Fuzzed:
    """A template renders a conversation in the same way twice, or is refused by the name of its file."""

    path = work / "template.jinja"
    source = Source(path="in", messages_column="m", chat_template=str(path))
    config = TokenizerConfig(name=str(work), max_seconds=LIMITS.seconds, max_memory=LIMITS.memory)

    def render() -> None:
        chats_of([source], config, None)  # errors name the file here
        renderers = _renderers(path.read_bytes().decode())
        found = [[part.texts.to_pylist() for part in renderers(large_string_array(GOOD))] for _ in range(2)]
        if found[0] != found[1]:
            raise WrongError("random", f"{found[0]!r}, and then {found[1]!r}"[:300])

    return of_file(path, havoc(*TAGS), render, seeds=[PLAIN.encode(), COUNTED.encode()])


def _columns(work: Path) -> Fuzzed:
    store, key, kinds = Store.at(work), name_of("train", 0), {"n": "int64", "t": "text"}
    with store.create(key) as stored, ColumnsWriter(stored, kinds) as writer:
        texts = large_string_array(*(f"text {i % 3} " * 9 for i in range(40)))
        writer.append(pa.record_batch({"n": pa.array(range(40)), "t": texts}))
    columns = Columns(store, kinds, parts_of([key], "train", 40))

    def read() -> None:
        for fault in columns.faults():
            raise ValueError(fault)
        columns.take(np.arange(40), list(kinds))

    return of_file(work / key, parquet, read, names=(key, "column", "run flat_tokens.verify"))


def _ledger(work: Path) -> Fuzzed:
    dataset = work / "dataset"
    write_sequences(dataset, [[1, 2, 3]] * 9, [[1]])
    path = work / "ledger.json"
    Ledger.create(path, {"one": (flat_tokens.open(dataset).train.packed(4), 1.0)}, 2)
    words = (b'"weight"', b'"step"', b'"sources"', b"1e999", b"-1", b'"../../etc"', b'"/dev/zero"')
    mutate, names = either(json_values(), json_values(), havoc(*words)), (str(work), "ledger", "source")
    return portable(of_file(path, mutate, lambda: Ledger.open(path).mixture(), names=names), {str(work).encode(): b"WORK"})


def _export(record: str) -> Any:
    def prepare(work: Path) -> Fuzzed:
        """A record that cannot be read is as if it were not there; none leads out of the export."""
        write_sequences(work / "made", [[1, 2], [3]], [[4]])
        request, files = export_of(work / "made", "megatron", {"end_of_text": 9}), work / "files"
        write(request, files)
        calls = (lambda: done_before(request, target(str(files))), lambda: open_any(files), lambda: open_corpus(str(files)))
        mutate = either(json_values(), havoc(b'"../../x"', b'"format"', b'"parts"', b"null"))
        return of_file(files / ".export" / record, mutate, *calls, names=(str(work),))

    return prepare


STRANGERS = {
    "conversations": _conversations,
    "templates": _templates,
    "kept-columns": _columns,
    "ledger": _ledger,
    "export-record": _export("export.json"),
    "export-plan": _export("plan.json"),
}
