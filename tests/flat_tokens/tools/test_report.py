"""The HTML report: whole, self-contained, and harmless whatever a dataset calls itself and its tokens."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.tools import report
from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.stats import count, summarise
from flat_tokens.vocabulary import Vocabulary
from tests.made import write_sequences

VOID = {"meta", "br", "img", "line", "rect", "polyline"}
HOSTILE = "<script>alert(1)</script>\"'&</style>"


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def self_contained(text: str) -> Page:
    """A page that is one file: it loads nothing and runs nothing."""
    page = Page(text)
    assert {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"} == set()
    assert all(name not in attributes for _, attributes in page.elements for name in ("src", "href", "srcset", "action"))
    assert not re.search(r"url\(|@import|https?://|expression\(", text)
    assert text.count("</style>") == 1
    assert all(attributes.get("scope") for tag, attributes in page.elements if tag == "th")
    return page


def of(sequences: list[list[int]], tmp_path: Path, **provenance: Any) -> str:
    corpus = open_corpus(write_sequences(tmp_path / "data", sequences, provenance=provenance))
    vocabulary = Vocabulary.of(HOSTILE, None, {i: f"{HOSTILE}{i}".encode() for i in range(40)}, None)
    return report.page(summarise(corpus, {name: count(corpus, name) for name in corpus.splits}, vocabulary, 25))


def test_the_page_is_one_file_that_loads_nothing_with_every_section_and_the_numbers(demo, tmp_path, tool):
    """Equal datasets have equal pages."""
    paths = [tmp_path / "a.html", tmp_path / "b.html"]
    for path in paths:
        assert tool.out("stats", "--trust-records", demo, "--html", path) == f"wrote {path}\n"
    text, other = (path.read_text() for path in paths)
    assert text == other
    assert sorted(tmp_path.iterdir()) == paths
    os.mkfifo(tmp_path / "pipe")
    tool.errors("stats", demo, "--html", tmp_path / "pipe")
    page = self_contained(text)
    assert "default-src 'none'" in text
    assert [bool(attributes["aria-label"]) for tag, attributes in page.elements if tag == "svg"] == [True] * 4
    for part in ("Document lengths", "What it was made of", "55,820", "44,912", "175,022", "stories.parquet"):
        assert part in page.text
    assert set(re.findall(r"var\((--[a-z-]+)\)", text)) <= set(re.findall(r"(--[a-z-]+):", text))


def test_names_and_tokens_are_text_and_never_markup(tmp_path):
    evil = f"{HOSTILE}\x1b\x9b\u202e"
    source = {"name": evil, "from": evil, "revision": evil, "text_column": evil, "files": []}
    source["files"] = [{"name": evil, "size": 1, "sha256": evil}]
    tokenizer = {"name": evil, "digest": evil, "highest_id": 39}
    text = of([[1, 2, 3], [4]], tmp_path, name=evil, sources=[source], tokenizer=tokenizer, documents={evil: evil})
    assert self_contained(text).text.count("<script>alert(1)</script>") > 5
    assert not {*"\x1b\x9b\u202e"} & {*text}


MANY_LENGTHS = [[1] * length for length in [*range(40), 100, 1000, 70_000]]
MANY_SEQUENCES = [[i % 40] for i in range(6000)]


@pytest.mark.parametrize(
    "sequences",
    [[], [[]], [[5]], [[1] * 7] * 3, [[2**31 - 1, 0]], MANY_LENGTHS, MANY_SEQUENCES],
)
def test_whatever_the_lengths_shapes_stay_within_their_pictures(tmp_path, sequences):
    for tag, found in Page(of(sequences, tmp_path)).elements:
        points = []
        if tag == "polyline":
            points = [pair.split(",") for pair in (found["points"] or "").split()]
        elif tag in ("rect", "text"):
            points = [(found["x"], found["y"])]
        for x, y in points:
            assert 0 <= float(x or "nan") + float(found.get("width") or 0) <= report.WIDTH
            assert 0 <= float(y or "nan") + float(found.get("height") or 0) <= report.HEIGHT
