"""flat-tokens compare: counts of versions of the same documents, against counting one document after another."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens.tools import compare as tool
from flat_tokens.tools.corpus import open_corpus
from tests.faults.support import derive_here
from tests.flat_tokens.demo import TOKENIZER, build_dataset
from tests.flat_tokens.tools.test_report import self_contained
from tests.made import write_sequences
from tests.refusal import refusal
from tests.sources import write_rows

TEXTS = ["salt wind", "été", "", "海 over the harbour", "wall " * 30, "x"]


def rows_of(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"d{i}",
            "text": f"{TEXTS[i % len(TEXTS)]}{i}" * (i % 4),
            "language": ("en", "de", None)[i % 3],
            "part": i % 2 == 0,
        }
        for i in range(first, first + count)
    ]


def settings_of(home: Path, **changes: Any) -> dict[str, Any]:
    """Two sources with kept columns, a quarter of the documents in validation."""
    for name, first in (("web", 0), ("books", 100)):
        write_rows(home / f"{name}.jsonl", rows_of(first, 60))
    keep = {"id_column": "id", "keep_columns": ["language", "part"]}
    sources = [{"name": name, "path": str(home / f"{name}.jsonl"), **keep} for name in ("web", "books")]
    return {"name": "made", "sources": sources, "validation_fraction": 0.25, "tokenizer": TOKENIZER, **changes}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of the same text: by the demo's tokenizer, by bytes, and by one that writes small letters. Nothing changes them."""
    home = tmp_path_factory.mktemp("compare")
    build_dataset(home / "demo", **settings_of(home))
    build_dataset(home / "bytes", **settings_of(home, tokenizer="bytes"))
    definition = json.loads(Path(TOKENIZER).read_bytes())
    (home / "lower.json").write_text(json.dumps({**definition, "normalizer": {"type": "Lowercase"}}))
    build_dataset(home / "lower", **settings_of(home, tokenizer=str(home / "lower.json")))
    return home


def compared(home: Path, *names: str | Path, **settings: Any) -> dict[str, Any]:
    return tool.compare([open_corpus(home / name) for name in names], **settings)


def by_hand(path: Path, kind: str, splits: tuple[str, ...] = ("train", "validation")) -> dict[str, list[int]]:
    """Tokens, bytes and tokens of one byte by a column, one document after another."""
    dataset, counts = flat_tokens.open(path), {}
    rows = dataset.documents.read_all().to_pylist()
    for name in splits:
        for row, ids in zip((row for row in rows if row["split"] == name), dataset.splits[name], strict=True):
            lengths = dataset.token_bytes[ids]
            of = counts.setdefault({None: "(none)", True: "true", False: "false"}.get(row[kind], row[kind]), [0, 0, 0])
            of[:] = np.add(of, (len(ids), lengths.sum(), (lengths == 1).sum())).tolist()
    return counts


def as_counts(groups: list[dict[str, Any]], k: int) -> dict[str, list[int]]:
    found = {group["name"]: group["of"][k] for group in groups}
    return {
        name: [of["token_count"], of["token_bytes"], round((of["byte_token_share"] or 0) * of["token_count"])]
        for name, of in found.items()
    }


def test_counts_are_those_of_counting_by_hand(home, monkeypatch):
    monkeypatch.setattr(tool, "COUNT_TOKENS", 37)  # a sequence is in several windows
    found = compared(home, "demo", "bytes", by=["language", "part"])
    for (k, name), kind in itertools.product(enumerate(("demo", "bytes")), ("source", "language", "part")):
        assert as_counts(found["by"][kind], k) == by_hand(home / name, kind)
    text = "".join(row["text"] for row in (*rows_of(0, 60), *rows_of(100, 60))).encode()
    assert found["text_bytes"] == len(text)
    demo, plain = found["versions"]
    assert plain["token_count"] == len(text)
    assert plain["bytes_per_token"] == plain["byte_token_share"] == 1
    assert demo["bytes_per_token"] == len(text) / demo["token_count"] > 1
    assert (plain["vocabulary"], plain["unused"]) == (256, 256 - len({*text}))


def test_one_split_is_counted_alone(home):
    found = compared(home, "demo", "bytes", split="validation")
    assert list(found["by"]) == ["source", "language"]  # the language is kept, so it is compared
    assert as_counts(found["by"]["language"], 0) == by_hand(home / "demo", "language", ("validation",))


def test_bytes_are_those_of_the_text_where_a_tokenizer_changes_it(home):
    found = compared(home, "lower", "bytes")
    lower, plain = found["versions"]
    assert (lower["exact"], plain["exact"]) == (False, True)
    assert lower["bytes_per_token"] == plain["token_count"] / lower["token_count"]
    assert "changes text before it is tokenized" in tool.note_of(found)


def test_versions_of_other_documents_are_refused_with_the_difference(home, tmp_path):
    derive_here({"operation": "subset", "fraction": 0.5}, home / "bytes", output=tmp_path / "half")
    with refusal(r"not of the same documents and splits: \d+ are in the first alone, such as train"):
        compared(home, "demo", tmp_path / "half")
    other = build_dataset(tmp_path / "split", **settings_of(home, tokenizer="bytes", split_seed=1))
    with refusal("are in another split"):
        compared(home, "demo", other)


def test_versions_of_the_same_ids_with_other_texts_are_refused(home, tmp_path):
    changed = settings_of(tmp_path, tokenizer="bytes")
    path = tmp_path / "web.jsonl"
    path.write_text(path.read_text().replace("wind", "winds"))
    other = build_dataset(tmp_path / "changed", **changed)
    with refusal(r"not of the same texts: source 'web' has [\d,]+ bytes in one and"):
        compared(home, "demo", other)
    with refusal("have other tokens, though the tokenizer is the same"):
        compared(home, "bytes", other)


def test_what_cannot_be_compared_is_refused(home, tmp_path):
    with refusal("two versions or more"):
        compared(home, "demo")
    with refusal("keeps no column 'domain'; it keeps language, part"):
        compared(home, "demo", "bytes", by=["domain"])
    write_sequences(tmp_path / "plain", [[1, 2]])
    with refusal("has no record of the bytes of its tokens"):
        compared(home, "demo", tmp_path / "plain")


def test_a_column_with_too_many_values_is_refused(home, monkeypatch):
    monkeypatch.setattr(tool, "MOST_VALUES", 2)
    with refusal("column 'language' has more than 2 different values, too many for a table"):
        compared(home, "demo", "bytes", by=["language"])


def test_the_terminal_and_the_page_show_what_json_has(home, tmp_path, tool):
    paths = [str(home / name) for name in ("demo", "bytes")]
    page = tmp_path / "page.html"
    found = tool.json("compare", *paths, "--html", page)
    html = page.read_text()
    shown = tool.out("compare", *paths)
    for text in (f"{found['versions'][0]['bytes_per_token']:.3f}", f"{found['versions'][1]['token_count']:,}", "books", "de"):
        assert text in shown
        assert text in html
    assert [tag for tag, _ in self_contained(html).elements].count("svg") == 2
    tool.out("compare", *paths, "--html", page)
    assert page.read_text() == html


def test_names_say_which_output_where_tokenizers_are_called_the_same():
    versions = [{"tokenizer": "tokenizer.json", "path": f"/out/{name}/versions/0"} for name in ("a", "b")]
    assert tool.names_of({"versions": versions}) == ["tokenizer.json (a)", "tokenizer.json (b)"]
