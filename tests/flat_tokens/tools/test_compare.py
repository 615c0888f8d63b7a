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
from tests.flat_tokens.demo import TOKENIZER
from tests.flat_tokens.record import corpora
from tests.flat_tokens.record.corpora import build_corpus, rows_of
from tests.flat_tokens.tools.test_report import self_contained
from tests.made import write_sequences
from tests.refusal import refusal


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Versions of the same text, by the demo's tokenizer, by bytes, and by one that writes small letters."""
    home = tmp_path_factory.mktemp("compare")
    (home / "lower.json").write_text(
        json.dumps({**json.loads(Path(TOKENIZER).read_bytes()), "normalizer": {"type": "Lowercase"}})
    )
    tokenizers = {"demo": TOKENIZER, "bytes": "bytes", "lower": str(home / "lower.json")}
    return {name: build_corpus(home / name, "out", tokenizer=tokenizer) for name, tokenizer in tokenizers.items()}


def compared(*versions: Path, **settings: Any) -> dict[str, Any]:
    return tool.compare([open_corpus(path) for path in versions], **settings)


def by_hand(path: Path, kind: str, splits: tuple[str, ...] = ("train", "validation")) -> dict[str, list[int]]:
    """Tokens, bytes and tokens of one byte by a column, one document after another."""
    dataset, counts = flat_tokens.open(path), {}
    rows = dataset.documents.read_all().to_pylist()
    for name in splits:
        for row, ids in zip((row for row in rows if row["split"] == name), dataset.splits[name], strict=True):
            lengths = dataset.token_bytes[ids]
            of = counts.setdefault("(none)" if row[kind] is None else str(row[kind]).lower(), [0, 0, 0])
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
    versions = [home["demo"], home["bytes"]]
    found = compared(*versions, by=["language", "licence", "split"])
    for (k, path), kind in itertools.product(enumerate(versions), ("source", "language", "licence", "split")):
        assert as_counts(found["by"][kind], k) == by_hand(path, "columns.split" if kind == "split" else kind)
    text = "".join(row["text"] for seed in (0, 1) for row in rows_of(60, seed)).encode()
    assert found["text_bytes"] == len(text)
    demo, plain = found["versions"]
    assert plain["token_count"] == len(text)
    assert plain["bytes_per_token"] == plain["byte_token_share"] == 1
    assert demo["bytes_per_token"] == len(text) / demo["token_count"] > 1
    assert (plain["vocabulary"], plain["unused"]) == (256, 256 - len({*text}))


def test_bytes_are_those_of_the_text_where_a_tokenizer_changes_it(home):
    """In one split alone."""
    found = compared(home["lower"], home["bytes"], split="validation")
    assert list(found["by"]) == ["source", "language"]  # the language is kept, so it is compared
    assert as_counts(found["by"]["language"], 0) == by_hand(home["lower"], "language", ("validation",))
    lower, plain = found["versions"]
    assert (lower["exact"], plain["exact"]) == (False, True)
    assert lower["bytes_per_token"] == plain["token_count"] / lower["token_count"]
    assert "changes text before it is tokenized" in tool.note_of(found)


def test_versions_of_other_documents_are_refused_with_the_difference(home, tmp_path):
    derive_here({"operation": "subset", "fraction": 0.5}, home["bytes"], output=tmp_path / "half")
    with refusal(r"not of the same documents and splits: \d+ are in the first alone, such as train"):
        compared(home["demo"], tmp_path / "half")
    with refusal("are in another split"):
        compared(home["demo"], build_corpus(tmp_path, "out", split_seed=1))


def test_versions_of_the_same_ids_with_other_texts_are_refused(home, tmp_path, monkeypatch):
    changed = [[row | {"text": row["text"].replace("ab", "abc")} for row in rows_of(60, seed)] for seed in (0, 1)]
    monkeypatch.setattr(corpora, "rows_of", lambda count, seed: changed[seed])
    other = build_corpus(tmp_path, "out")
    with refusal(r"not of the same texts: source 'out-web' has [\d,]+ bytes in one and"):
        compared(home["demo"], other)
    with refusal("have other tokens, though the tokenizer is the same"):
        compared(home["bytes"], other)


def test_what_cannot_be_compared_is_refused(home, tmp_path, monkeypatch):
    demo, plain = home["demo"], home["bytes"]
    with refusal("keeps no column 'domain'; it keeps language, licence"):
        compared(demo, plain, by=["domain"])
    with refusal("has no record of the bytes of its tokens"):
        compared(demo, write_sequences(tmp_path / "plain", [[1, 2]]))
    monkeypatch.setattr(tool, "MOST_VALUES", 2)
    with refusal("column 'language' has more than 2 different values, too many for a table"):
        compared(demo, plain)


def test_the_terminal_and_the_page_show_what_json_has(home, tmp_path, tool):
    paths, page = [home["demo"], home["bytes"]], tmp_path / "page.html"
    found = tool.json("compare", *paths, "--html", page)
    html, shown = page.read_text(), tool.out("compare", *paths)
    for text in (f"{found['versions'][0]['bytes_per_token']:.3f}", f"{found['versions'][1]['token_count']:,}", "out-books"):
        assert text in shown
        assert text in html
    assert [tag for tag, _ in self_contained(html).elements].count("svg") == 2


def test_names_say_which_output_where_tokenizers_are_called_the_same():
    versions = [{"tokenizer": "t.json", "path": f"/out/{name}/versions/0"} for name in "ab"]
    assert tool.names_of({"versions": versions}) == ["t.json (a)", "t.json (b)"]
