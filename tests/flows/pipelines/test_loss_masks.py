"""Loss masks through the whole pipeline: built of prompts and completions, reused, and kept by every operation on datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import flat_tokens
from flat_tokens.text.rows import prompts_and_completions, with_completions
from flat_tokens.tools import export as exporting
from flows.pipelines.exchange import import_files
from flows.pipelines.refresh import refresh
from flows.pipelines.retokenize import reruns
from flows.runners.processes import Threads
from tasks.config import BuildConfig, Source
from tasks.derive.request import ImportRequest
from tests.conftest import ROOT
from tests.examples import examples
from tests.faults.support import build_here
from tests.refusal import refusal
from tests.sources import write_arrow, write_rows
from tests.terminal import Terminal

Pair = tuple[str, str]
PAIRS: list[Pair] = [("2+2=", "4"), ("", "x"), ("ab", ""), ("", ""), ("\0\2\0\1", "\0\2é")]


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    return write_rows(path, [{"a": a, "q": q, "z": 1} for q, a in pairs], group=50)


def settings(output: Path, source: Path, **more: Any) -> dict[str, Any]:
    columns = {"path": str(source), "prompt_column": "q", "completion_column": "a"}
    return {"output": str(output), "source": columns, "tokenizer": "bytes", "validation_fraction": 0, **more}


def spelled(split: flat_tokens.FlatTokens) -> list[tuple[bytes, bytes]]:
    """Of each document the bytes that don't count, and those that do, which come behind them."""
    found = []
    for i in range(split.seq_count):
        start, stop = split.span(i)
        mask = split.mask(start, stop)
        ids = (split.sequence(i) - 1).astype(np.uint8)
        found.append((ids[mask == 0].tobytes(), ids[mask == 1].tobytes()))
    return found


def as_bytes(pairs: list[Pair]) -> list[tuple[bytes, bytes]]:
    return [(q.encode(), a.encode()) for q, a in pairs]


@given(st.lists(st.tuples(*[st.text(st.sampled_from("\0\1\2ab"), max_size=6)] * 2), max_size=5))
@examples(100)
def test_a_prompt_and_its_completion_are_one_text_and_two_again(pairs: list[Pair]) -> None:
    columns = [pa.array([pair[i] for pair in pairs], pa.string()) for i in (0, 1)]
    texts = with_completions(*columns).cast(pa.large_string())
    assert prompts_and_completions(texts).to_pylist() == [text for pair in pairs for text in pair]


@pytest.mark.parametrize("layout", ["mmap", "compact", "zarr2"])
def test_plain_zarr_reads_the_mask_beside_the_tokens(tmp_path: Path, layout: str) -> None:
    build_here(settings(tmp_path / "out", write_pairs(tmp_path / "in/x.jsonl", PAIRS[:3]), layout=layout))
    train = zarr.open_group(str(tmp_path / "out/latest/train"), mode="r")
    assert np.asarray(train["loss_mask"]).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert train["loss_mask"].dtype == np.uint8
    assert np.asarray(train["seq_starts"]).tolist() == [0, 5, 6, 8]


def test_verify_refuses_a_mask_of_other_values(tmp_path: Path) -> None:
    batch = flat_tokens.TokenBatch.from_sequences([[1, 2, 3]])._replace(loss_mask=np.array([0, 1, 2], np.uint8))
    flat_tokens.write_dataset(tmp_path / "out", [batch])
    with refusal("token 2 has 2, but the mask is 1 or 0", flat_tokens.DamagedError):
        flat_tokens.verify(tmp_path / "out", "full")


def test_sources_without_prompts_count_whole_beside_others(tmp_path: Path) -> None:
    """A source of plain text in a dataset with masks: all of its tokens count."""
    source = write_pairs(tmp_path / "in/x.jsonl", PAIRS[:2])
    plain = {"name": "plain", "path": str(source), "text_column": "q"}
    asked = settings(tmp_path / "out", source)
    sources = [{**asked.pop("source"), "name": "asked"}, plain]
    build_here({**asked, "sources": sources})
    assert spelled(flat_tokens.open(tmp_path / "out").train) == [*as_bytes(PAIRS[:2]), (b"", b"2+2="), (b"", b"")]


def test_another_part_of_the_same_text_is_another_dataset(tmp_path: Path) -> None:
    """The mask is part of the keys of shards and segments: nothing of one is taken for the other."""
    source = write_pairs(tmp_path / "in/x.jsonl", [("ab", "c"), ("d", "ef")])
    build_here(settings(tmp_path / "out", source))
    turned = {"path": str(source), "prompt_column": "a", "completion_column": "q"}
    build_here({**settings(tmp_path / "out", source), "source": turned})
    assert spelled(flat_tokens.open(tmp_path / "out").train) == [(b"c", b"ab"), (b"ef", b"d")]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"completion_column": "a"}, "has a completion_column; give its prompt_column, too"),
        ({"prompt_column": "q"}, "has a prompt_column; give its completion_column, too"),
        ({"prompt_column": "q", "completion_column": "q"}, "are both 'q'"),
        ({"prompt_column": "q", "completion_column": "a", "text_column": "t"}, "has text_column and prompt_column"),
        ({"roles": ("user",)}, "has roles, which is for messages; give its messages_column, too"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(more: dict[str, Any], told: str) -> None:
    with refusal(told):
        Source(path="in", **more)


@pytest.mark.parametrize(
    ("pairs", "lines", "words", "left", "skipped"),
    [
        (
            True,
            '{"q": "a", "a": "b"}\n{"q": "c", "a": null}\n{"q": "d"}\n{"q": "e", "a": 5}\n',
            "the text is null",
            (b"a", b"b"),
            {"null": 2, "wrong_type": 1},
        ),
        (
            False,
            '{"talk": [{"role": "user", "content": "a"}]}\n{"talk": {"role": "user"}}\n{"talk": null}\n{"talk": "[1]"}\n',
            "'talk' is a JSON object, not an array of messages",
            (b"u:a;", b""),
            {"null": 1, "unencodable": 1, "wrong_type": 1},
        ),
    ],
    ids=["completions", "messages"],
)
def test_completions_and_messages_that_are_none_are_bad_documents(
    tmp_path: Path, pairs: bool, lines: str, words: str, left: tuple[bytes, bytes], skipped: dict[str, int]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines)
    told = (settings if pairs else talk_settings)(tmp_path / "out", path)
    with refusal(rf"in.jsonl, line 2 \(row 1\): {words}"):
        build_here(told)
    build_here({**told, "documents": {"on_bad": "skip"}})
    opened = flat_tokens.open(tmp_path / "out")
    assert spelled(opened.train) == [left]
    assert opened.manifest["totals"]["documents"]["skipped"] == skipped


def test_a_refresh_another_tokenizer_and_an_import_keep_the_mask(tmp_path: Path) -> None:
    """A zero byte of a prompt is not taken for its end."""
    source = write_pairs(tmp_path / "in/x.jsonl", PAIRS[:2])
    told = settings(tmp_path / "out", source)
    build_here(told)
    write_pairs(source, PAIRS)
    with Threads(2) as runner:
        refresh(BuildConfig.model_validate(told), runner)
        assert spelled(flat_tokens.open(tmp_path / "out").train) == as_bytes(PAIRS)
        other = str(ROOT / "deployments/demo/tokenizer.json")
        with reruns(str(tmp_path / "out"), [other], str(tmp_path / "other"), lambda config: Threads(2)) as (configs, publish):
            publish(configs[0])
        split = str(tmp_path / "out/latest/train")
        import_files(ImportRequest(path=split, output=str(tmp_path / "imported")), runner)
    assert spelled(flat_tokens.open(tmp_path / "imported").train) == as_bytes(PAIRS)
    again, encode = flat_tokens.open(tmp_path / "other").train, Tokenizer.from_file(other).encode
    for i, (prompt, completion) in enumerate(PAIRS):
        counts = [len(encode(text, add_special_tokens=False).ids) for text in (prompt, completion)]
        assert again.mask(*again.span(i)).tolist() == [0] * counts[0] + [1] * counts[1]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_an_import_of_labels_has_the_mask(tmp_path: Path, format: str) -> None:
    """It is another version than that of an import that passes them over, as earlier releases did, and of other shards."""
    build_here(settings(tmp_path / "made", write_pairs(tmp_path / "in/x.jsonl", PAIRS)))
    exporting.write(exporting.export_of(tmp_path / "made", format, {}), str(tmp_path / "files"))
    results = []
    with Threads(2) as runner:
        for labels in ("ignore", "read", "read"):
            options = {"labels": labels} if labels == "ignore" else {}
            request = ImportRequest(path=str(tmp_path / "files"), output=str(tmp_path / "out"), format=format, options=options)
            results.append(import_files(request, runner))
    ignored, read, again = results
    assert ignored.version != read.version == again.version
    assert (read.parts_reused, again.was_published) == (0, True)
    assert flat_tokens.open(ignored.path).train.loss_mask is None
    assert spelled(flat_tokens.open(read.path).train) == spelled(flat_tokens.open(tmp_path / "made").train)
    flat_tokens.verify(tmp_path / "out", "full")


def test_a_sample_of_prompts_is_tokenized_again(tmp_path: Path, tool: Terminal) -> None:
    """By ``verify --sample``, which finds each document's text in its source; a conversation's template it does not have."""
    build_here(settings(tmp_path / "out", write_pairs(tmp_path / "in/x.jsonl", PAIRS)))
    assert tool.json("verify", tmp_path / "out", "--sample", "1/1", "--trust-records")["documents"]["same"] == len(PAIRS)
    build_here(talk_settings(tmp_path / "talks", write_talks(tmp_path / "in/y.jsonl")))
    assert "conversations are tokenized by builds alone" in tool.out(
        "verify", tmp_path / "talks", "--sample", "1/1", "--trust-records", "--json"
    )


TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "assistant", "content": "é"}],
    [{"role": "user", "content": "z"}],
]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def write_talks(path: Path) -> Path:
    """Conversations as JSON lines, as lists in Parquet or Arrow, or as JSON in a text column."""
    path.parent.mkdir(exist_ok=True)
    if path.name.startswith("text"):
        pq.write_table(pa.table({"talk": [json.dumps(talk) for talk in TALKS]}), path)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(TALKS)), "talk": TALKS}), path, row_group_size=2)
    elif path.suffix == ".arrow":
        table = pa.table({"talk": TALKS})
        write_arrow(path, table)
    else:
        write_rows(path, [{"talk": talk} for talk in TALKS])
    return path


def talk_settings(output: Path, source: Path, template: str = TEMPLATE, **more: Any) -> dict[str, Any]:
    (output.parent / "x.jinja").write_text(template)
    chat = {"path": str(source), "messages_column": "talk", "chat_template": str(output.parent / "x.jinja"), **more}
    return {"output": str(output), "source": chat, "tokenizer": "bytes", "validation_fraction": 0}


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "text.parquet", "x.arrow"])
def test_conversations(tmp_path: Path, name: str) -> None:
    """In every format that has lists, or JSON of them in a column of text."""
    build_here(talk_settings(tmp_path / "out", write_talks(tmp_path / "in" / name)))
    assert spelled(flat_tokens.open(tmp_path / "out").train) == [(b"u:2+2?;a:", b"4;"), (b"a:", "é;".encode()), (b"u:z;", b"")]


def test_the_template_and_the_roles_are_part_of_the_dataset(tmp_path: Path) -> None:
    """Its content, not its path: another template, or other roles, tokenize anew; the same one elsewhere is the same dataset."""
    source = write_talks(tmp_path / "in/x.jsonl")
    first = build_here(talk_settings(tmp_path / "out", source))
    other = build_here(talk_settings(tmp_path / "out", source, TEMPLATE.replace(";", "!")))
    roles = build_here(talk_settings(tmp_path / "out", source, roles=["user"]))
    assert len({first.version, other.version, roles.version}) == 3
    assert spelled(flat_tokens.open(tmp_path / "out/versions" / other.version).train)[0] == (b"u:2+2?!a:", b"4!")
    (tmp_path / "elsewhere").mkdir()
    assert build_here(talk_settings(tmp_path / "elsewhere/out", source)).version == first.version
    recorded = flat_tokens.open(tmp_path / "out/versions" / first.version).manifest["provenance"]["sources"][0]
    assert recorded["chat"] == {"template": TEMPLATE, "tokens": {}, "roles": ["assistant"], "edition": 2}
    assert str(tmp_path) not in json.dumps(recorded)
