"""Loss masks through the whole pipeline: built of prompts and completions, reused, and kept by every operation on datasets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from tokenizers import Tokenizer

import flat_tokens
from tests.faults.support import build_here, export_here, import_here, refresh_here, retokenize_here
from tests.flat_tokens.demo import TOKENIZER
from tests.refusal import refusal
from tests.sources import held, write_rows

Pair = tuple[str, str]
PAIRS: list[Pair] = [("2+2=", "4"), ("", "x"), ("ab", ""), ("", ""), ("\0\2\0\1", "\0\2é"), ("a\0", "\1b"), ("\1\2\0", "\0")]


def write_pairs(path: Path, pairs: list[Pair]) -> Path:
    return write_rows(path, [{"a": a, "q": q, "z": 1} for q, a in pairs], group=50)


def settings(output: Path, source: Path, **more: Any) -> dict[str, Any]:
    columns = {"path": str(source), "prompt_column": "q", "completion_column": "a"}
    return {"output": str(output), "source": columns, "tokenizer": "bytes", "validation_fraction": 0, **more}


def spelled(path: Path | str) -> list[tuple[bytes, ...]]:
    """Of each document of train the bytes that don't count, and those that do, which come behind them."""
    return [
        tuple(bytes(i - 1 for i, counts in zip(one.ids, one.mask, strict=True) if counts == which) for which in (0, 1))
        for one in held(path)["train"]
    ]


def as_bytes(pairs: list[Pair]) -> list[tuple[bytes, bytes]]:
    return [(q.encode(), a.encode()) for q, a in pairs]


@pytest.mark.parametrize("layout", ["mmap", "compact", "zarr2"])
def test_plain_zarr_reads_the_mask_beside_the_tokens(tmp_path, layout):
    build_here(settings(tmp_path / "out", write_pairs(tmp_path / "in/x.jsonl", PAIRS[:3]), layout=layout))
    train = zarr.open_group(str(tmp_path / "out/latest/train"), mode="r")
    assert np.asarray(train["loss_mask"]).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert train["loss_mask"].dtype == np.uint8
    assert np.asarray(train["seq_starts"]).tolist() == [0, 5, 6, 8]


def test_verify_refuses_a_mask_of_other_values(tmp_path):
    batch = flat_tokens.TokenBatch.from_sequences([[1, 2, 3]])._replace(loss_mask=np.array([0, 1, 2], np.uint8))
    flat_tokens.write_dataset(tmp_path / "out", [batch])
    with refusal("token 2 has 2, but the mask is 1 or 0", flat_tokens.DamagedError):
        flat_tokens.verify(tmp_path / "out", "full")


def test_another_part_of_the_same_text_is_another_dataset(tmp_path):
    """The mask is part of the keys of shards and segments: nothing of one is taken for the other. All of a source of plain text
    counts.
    """
    source = write_pairs(tmp_path / "in/x.jsonl", [("ab", "c"), ("d", "ef")])
    asked = settings(tmp_path / "out", source)
    build_here(asked)
    turned = {**asked.pop("source"), "name": "turned", "prompt_column": "a", "completion_column": "q"}
    plain = {"name": "plain", "path": str(source), "text_column": "q"}
    build_here({**asked, "sources": [turned, plain]})
    assert spelled(tmp_path / "out") == [(b"c", b"ab"), (b"ef", b"d"), (b"", b"ab"), (b"", b"d")]


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
def test_completions_and_messages_that_are_none_are_bad_documents(tmp_path, pairs, lines, words, left, skipped):
    path = tmp_path / "in.jsonl"
    path.write_text(lines)
    told = (settings if pairs else talk_settings)(tmp_path / "out", path)
    with refusal(rf"in.jsonl, line 2 \(row 1\): {words}"):
        build_here(told)
    build_here({**told, "documents": {"on_bad": "skip"}})
    assert spelled(tmp_path / "out") == [left]
    assert flat_tokens.open(tmp_path / "out").manifest["totals"]["documents"]["skipped"] == skipped


def test_a_refresh_another_tokenizer_and_an_import_keep_the_mask(tmp_path):
    """A zero byte of a prompt is not taken for its end."""
    source = write_pairs(tmp_path / "in/x.jsonl", PAIRS[:2])
    told = settings(tmp_path / "out", source)
    build_here(told)
    write_pairs(source, PAIRS)
    refresh_here(told)
    retokenize_here(str(tmp_path / "out"), TOKENIZER, output=str(tmp_path / "other"))
    import_here(tmp_path / "out/latest/train", tmp_path / "imported")
    assert spelled(tmp_path / "out") == spelled(tmp_path / "imported") == as_bytes(PAIRS)
    again, encode = flat_tokens.open(tmp_path / "other").train, Tokenizer.from_file(TOKENIZER).encode
    for i, (prompt, completion) in enumerate(PAIRS):
        counts = [len(encode(text, add_special_tokens=False).ids) for text in (prompt, completion)]
        assert again.mask(*again.span(i)).tolist() == [0] * counts[0] + [1] * counts[1]


def test_an_import_of_labels_has_the_mask(tmp_path):
    """It is another version than that of an import that passes them over, as earlier releases did, and of other shards."""
    build_here(settings(tmp_path / "made", write_pairs(tmp_path / "in/x.jsonl", PAIRS)))
    export_here(tmp_path / "made", tmp_path / "files", "parquet")
    ignored, read, again = (
        import_here(tmp_path / "files", tmp_path / "out", format="parquet", options=options)
        for options in ({"labels": "ignore"}, {}, {})
    )
    assert ignored.version != read.version == again.version
    assert (read.parts_reused, again.was_published) == (0, True)
    assert flat_tokens.open(ignored.path).train.loss_mask is None
    assert spelled(read.path) == spelled(tmp_path / "made")


def test_a_sample_of_prompts_is_tokenized_again(tmp_path, tool):
    """By ``verify --sample``, which finds each document's text in its source; a conversation's template it does not have."""
    build_here(settings(tmp_path / "out", write_pairs(tmp_path / "in/x.jsonl", PAIRS)))
    assert tool.json("verify", tmp_path / "out", "--sample", "1/1", "--trust-records")["documents"]["same"] == len(PAIRS)
    build_here(talk_settings(tmp_path / "talks", write_rows(tmp_path / "in/y.jsonl", TALKS)))
    assert "conversations are tokenized by builds alone" in tool.out(
        "verify", tmp_path / "talks", "--sample", "1/1", "--trust-records", "--json"
    )


TALKS = [
    {"talk": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"talk": [{"role": "assistant", "content": "é"}]},
    {"talk": [{"role": "user", "content": "z"}]},
]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def talk_settings(output: Path, source: Path, template: str = TEMPLATE, **more: Any) -> dict[str, Any]:
    (output.parent / "x.jinja").write_text(template)
    chat = {"path": str(source), "messages_column": "talk", "chat_template": str(output.parent / "x.jinja"), **more}
    return {"output": str(output), "source": chat, "tokenizer": "bytes", "validation_fraction": 0}


def test_the_template_and_the_roles_are_part_of_the_dataset(tmp_path):
    """Its content, not its path: another template, or other roles, tokenize anew; the same one elsewhere is the same dataset."""
    source = write_rows(tmp_path / "in/x.arrow", TALKS)
    first = build_here(talk_settings(tmp_path / "out", source))
    other = build_here(talk_settings(tmp_path / "out", source, TEMPLATE.replace(";", "!")))
    assert build_here(talk_settings(tmp_path / "out", source, roles=["user"])).version != first.version != other.version
    assert spelled(first.path) == [(b"u:2+2?;a:", b"4;"), (b"a:", "é;".encode()), (b"u:z;", b"")]
    assert spelled(other.path)[0] == (b"u:2+2?!a:", b"4!")
    (tmp_path / "elsewhere").mkdir()
    assert build_here(talk_settings(tmp_path / "elsewhere/out", source)).version == first.version
    recorded = flat_tokens.open(first.path).manifest["provenance"]["sources"][0]
    assert recorded["chat"] == {"template": TEMPLATE, "tokens": {}, "roles": ["assistant"], "edition": 4}
    assert str(tmp_path) not in json.dumps(recorded)
