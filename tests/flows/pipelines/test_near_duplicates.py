"""Near-duplicates through the whole pipeline: the first of a cluster stays, or all do and a column says which belong together."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.manifest import CLUSTER
from flows.pipelines.build import BuildResult
from flows.pipelines.forget import forget
from flows.watch.summaries import summary
from tasks.config import BuildConfig
from tasks.derive.request import ForgetRequest
from tests.benchmarks.planted import joined, shingles_of, similar_pairs
from tests.calls import before_each_call
from tests.faults.support import build_here, refresh_here, same_bytes, settings_of
from tests.flows.through_json import built
from tests.made import read_docs
from tests.refusal import refusal
from tests.sources import by_place, write_rows

WORDS = 120


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", 1500)


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Texts, of which half are some text before them with a passage of a few other words, or of a third: near it, or not."""
    draw, found = random.Random(seed), []
    for i in range(count):
        words = [f"w{draw.randrange(10**5)}" for _ in range(WORDS)]
        if found and draw.random() < 0.5:
            words, old = draw.choice(found).split(), words
            count, at = draw.choice([1, 2, 40]), draw.randrange(WORDS - 40)
            words[at : at + count] = old[:count]
        found.append(" ".join(words) + f" {i}.")
    return found


def put(path: Path, texts: Iterable[str]) -> Path:
    return write_rows(path, [{"id": f"{path.name}-{i}", "text": text} for i, text in enumerate(texts)])


def told(output: Path, *sources: Path, action: str = "drop", **more: Any) -> dict[str, Any]:
    common = {"documents": {"near_duplicates": {"action": action}}, "validation_fraction": 0.3, "slice_bytes": 4000}
    return settings_of(output, *sources, **common | more)


def naive(*files: list[str]) -> list[list[tuple[int, int]]]:
    """The clusters of texts, by the exact similarity of all pairs, each in the order of the sources."""
    places = [(file, row) for file, texts in enumerate(files) for row in range(len(texts))]
    pairs = similar_pairs(shingles_of([text for texts in files for text in texts]), 0.8)
    return [[places[number] for number in mine] for mine in joined(pairs)]


ONE, OTHER = texts_of(30, 1), texts_of(8, 2)
OTHER = [*OTHER, ONE[3], ONE[7].upper()]
"""Two files, the second with copies of documents of the first."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BuildResult]:
    """A version of both by each action. Nothing changes them."""
    here = tmp_path_factory.mktemp("near")
    paths = put(here / "a.jsonl", ONE), put(here / "b.jsonl", OTHER)
    return {action: build_here(told(here / action, *paths, action=action)) for action in ("drop", "keep")}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return put(tmp_path / "a.jsonl", ONE), put(tmp_path / "b.jsonl", OTHER)


def test_the_first_of_a_cluster_stays_with_any_workers_and_through_groups(tmp_path, paths):
    results = [built(told(tmp_path / f"out{n}", *paths), n) for n in (1, 3, None)]
    clusters = naive(ONE, OTHER)
    dropped = {place for mine in clusters for place in mine[1:]}
    assert len(dropped) > 8
    assert set(by_place(results[0].path)) == ({(0, row) for row in range(30)} | {(1, row) for row in range(10)}) - dropped
    assert same_bytes(*results)
    config, documents = BuildConfig.model_validate(told(tmp_path / "out1", *paths)), results[0].totals["documents"]
    assert documents["skipped"] == {"near_duplicate": len(dropped)}
    of_source = [sum(place[0] == file for place in dropped) for file in range(2)]
    assert [one["skipped"].get("near_duplicate", 0) for one in documents["by_source"]] == of_source
    assert results[0].slices > 3
    shown = summary(config, results[0], "x")
    assert f"Near-duplicates: {len(dropped)} documents with nearly the text of another one are left out." in shown


@pytest.mark.parametrize("by", ["key", "cluster"])
def test_a_column_says_which_are_kept_together(tmp_path, paths, by):
    settings = told(tmp_path / "out", *paths, action="keep", split={"by": by})
    result = build_here(settings)
    entries, clusters = by_place(result.path), naive(ONE, OTHER)
    found = {place: one.columns[CLUSTER] for place, (_, one) in entries.items()}
    keys = {(doc.file, doc.row): doc.key for docs in read_docs(result.path).values() for doc in docs}
    lowest = {place: min(keys[one] for one in mine) for mine in clusters for place in mine}  # whichever comes first
    assert len(found) == 40
    assert found == {place: lowest.get(place) for place in found}
    splits = {place: split for place, (split, _) in entries.items()}
    apart = [mine for mine in clusters if len({splits[place] for place in mine}) > 1]
    assert bool(apart) == (by == "key")
    assert result.totals["documents"]["near_duplicates"] == sum(len(mine) - 1 for mine in clusters)


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts were signed, call by call."""
    return before_each_call(monkeypatch, "tasks.shards.recipe.signatures", lambda texts, *_: len(texts))


@pytest.mark.parametrize("action", ["drop", "keep"])
def test_a_refresh_signs_the_segment_that_has_changed(tmp_path, signed, action):
    """And gives the bytes of a build from nothing; another threshold signs nothing, shingles of another length all texts."""
    texts = texts_of(60, 5)
    settings = told(tmp_path / "out", put(tmp_path / "a.jsonl", texts), action=action, slice_bytes=100_000)
    assert refresh_here(settings).build is not None
    assert sum(signed) == 60
    signed.clear()
    put(tmp_path / "a.jsonl", [*texts[:30], "another " + texts[30], *texts[31:]])
    result = refresh_here(settings)
    assert 1 <= sum(signed) <= 20
    assert 0 < result.text_bytes_tokenized < sum(map(len, texts)) / 3
    again = build_here({**settings, "output": str(tmp_path / "again")})
    assert same_bytes(result, again)
    signed.clear()
    near = {"near_duplicates": {"action": action, "threshold": 0.95}}
    other = refresh_here({**settings, "documents": near})
    assert (sum(signed), other.text_bytes_tokenized) == (0, 0)
    assert other.version != result.version
    refresh_here({**settings, "documents": {"near_duplicates": {"words": 3}}})
    assert sum(signed) == 60


def test_forgotten_documents_take_their_near_copies_with_them(tmp_path):
    texts = texts_of(12, 4)
    copies = [f"{text} end" for text in texts[:6]]
    settings = told(tmp_path / "out", put(tmp_path / "a.jsonl", texts), put(tmp_path / "b.jsonl", copies))
    before = set(by_place(build_here(settings).path))
    (cluster,) = (mine for mine in naive(texts, copies) if (0, 0) in mine)
    forget(ForgetRequest(output=settings["output"], reason="asked", where="file = 'a.jsonl' and row = 0"))
    successor = Path(tmp_path / "out/latest").resolve()
    assert before - set(by_place(successor)) == {(0, 0)}
    totals = flat_tokens.open(successor).manifest["totals"]["documents"]
    assert totals["skipped"]["forgotten"] == len(cluster) > 1
    again = refresh_here(settings)
    assert set(by_place(again.path)) == before - {(0, 0)}


def test_gates_see_the_share(tmp_path, paths):
    gate = {"of": "near_duplicate_share", "by": "source", "at_most": "10 %"}
    with refusal(r"near_duplicate_share of source a: [\d.]+ %; wanted is at most 10 %"):
        build_here(told(tmp_path / "out", *paths, publish={"gates": [gate]}))


@pytest.mark.parametrize("action", ["drop", "keep"])
def test_the_table_says_of_which_document_each_is(published, action):
    rows = flat_tokens.open(published[action].path).documents.read_all().to_pylist()
    place = {row["key"]: ("ab".index(row["source"]), row["row"]) for row in rows}
    pairs = {place[row["key"]]: place[row["of"]] for row in rows if row["of"] is not None}
    key = {at: key for key, at in place.items()}
    clusters = [sorted(mine, key=None if action == "drop" else key.__getitem__) for mine in naive(ONE, OTHER)]
    assert pairs == {later: mine[0] for mine in clusters for later in mine[1:]}
    assert all((row["of"] is None) or 0.6 < row["similarity"] <= 1 for row in rows)


def test_the_report_shows_pairs_side_by_side(tmp_path, published, tool):
    result, page = published["drop"], tmp_path / "report.html"
    sources = Path(result.path).parents[2]
    found = tool.json("stats", result.path, "--html", page, "--source", sources)["near_duplicates"]
    skipped = result.totals["documents"]["skipped"]["near_duplicate"]
    assert found["near_duplicates"] == sum(row["near_duplicates"] for row in found["by_source"]) == skipped
    assert found["clusters"] == sum(one["clusters"] for one in found["sizes"]) == len(naive(ONE, OTHER))
    pair = next(pair for pair in found["by_source"][1]["pairs"] if pair["document"]["row"] == 9)
    assert pair["document"]["text"] == ONE[7].upper()
    assert "<mark>" in page.read_text()
