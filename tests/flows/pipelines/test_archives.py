"""Sources of archives: a version is what their rows say, in slices, on other workers, and after a refresh."""

from __future__ import annotations

from pathlib import Path

import pytest

from flat_tokens.tools.corpus import open_corpus
from flat_tokens.tools.sources import Locator, places_of, texts_of
from tests.examples import first_fast
from tests.flows.through_json import built
from tests.sources import Rows, expected, held, write_rows

FRACTION = 0.3


def some_rows(name: str, count: int) -> Rows:
    return [
        {"id": f"{name}-{i}", "text": f"{name} {i} é " + "salt wind " * (i % 5), "url": f"https://x/{i}"} for i in range(count)
    ]


@pytest.mark.parametrize("name", first_fast(["tar", "warc.gz", "tar.zst", "warc"], 2))
def test_a_version_is_what_the_rows_say(tmp_path: Path, name: str) -> None:
    """Cut within the file on other workers, too. A row that changes costs its slice. The text of a document is found again."""
    files = [some_rows(f"f{k}", 30) for k in range(2)]
    for k, rows in enumerate(files):
        write_rows(tmp_path / f"in/{k}.{name}", rows, group=4)
    given = {
        "source": {"path": str(tmp_path / "in"), "id_column": "id", "keep_columns": ["url"]},
        "tokenizer": "bytes",
        "validation_fraction": FRACTION,
        "slice_bytes": 1500,
        "scratch": str(tmp_path / "scratch"),
        "output": str(tmp_path / "one"),
    }
    first = built(given)
    assert first.slices > 4
    assert held(first.path) == expected(files, fraction=FRACTION, columns=["url"])
    assert built({**given, "output": str(tmp_path / "groups")}, None).version == first.version
    corpus = open_corpus(first.path)
    places = places_of(corpus, "train", range(5))
    assert places is not None
    (found,) = texts_of(corpus, dict(enumerate(places)), Locator(corpus, [str(tmp_path / "in")]))
    assert [found.texts[i] for i in range(5)] == [files[0][place.row]["text"] for place in places]

    files[1][29]["text"] += "more"
    write_rows(tmp_path / f"in/1.{name}", files[1], group=4)
    second = built(given)
    assert held(second.path) == expected(files, fraction=FRACTION, columns=["url"])
    assert 0 < second.text_bytes_tokenized < first.text_bytes_tokenized / 4
