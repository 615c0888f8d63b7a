"""Reuse by segment, and tokens stored once: whatever changed in the sources, the bytes are those of a build from nothing."""

import json
import shutil
from pathlib import Path

import pytest

from flows.pipelines.build import BuildResult
from tests.examples import first_fast
from tests.faults.support import build_here, receipts, same_bytes, shards_stay
from tests.sources import write_rows

MEAN, MOST = 400, 2000
Rows = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenize.segments.MEAN_BYTES", MEAN)
    monkeypatch.setattr("tasks.tokenize.segments.MOST_BYTES", MOST)


def rows_of(name: str, count: int) -> Rows:
    return [(f"{name}-{i}", f"{name} {i}: " + "salt wind " * (i % 7)) for i in range(count)]


def put(path: Path, rows: Rows, group: int = 50, codec: str = "zstd") -> None:
    write_rows(path, [{"id": one, "text": text} for one, text in rows], group, codec)


def built(here: Path, to: str = "out", **more: object) -> BuildResult:
    """Build what is in ``in``."""
    told = {"output": str(here / to), "source": {"path": str(here / "in"), "id_column": "id"}, "tokenizer": "bytes"}
    return build_here({**told, "validation_fraction": 0.2, "slice_bytes": 6000, **more})


def check_same(here: Path, **more: object) -> BuildResult:
    """Build on what is there, and from nothing: the bytes are the same. No token is stored twice."""
    result = built(here, **more)
    shutil.rmtree(here / "anew", ignore_errors=True)
    assert same_bytes(result, built(here, "anew", **more))
    assert receipts(here / "out") == set()
    return result


FORMATS = ["a.parquet", "a.jsonl", "a.jsonl.zst"]


@pytest.mark.parametrize("name", first_fast(FORMATS))
def test_a_change_of_a_file_costs_its_segments(name, tmp_path):
    rows = rows_of("a", 800)
    put(tmp_path / "in" / name, rows)
    first = check_same(tmp_path)
    text_bytes = first.totals["documents"]["text_bytes"]
    assert first.text_bytes_tokenized == text_bytes
    seams = 1 + text_bytes // 6000
    for changed in (
        [*rows[:400], ("a-400", "another text"), *rows[401:]],
        [*rows[:300], *rows[301:]],
        [("front", "at the front"), *rows],
        [*rows, *rows_of("more", 10)],
    ):
        put(tmp_path / "in" / name, changed)
        result = check_same(tmp_path)
        assert result.slices_reused == 0
        assert 0 < result.text_bytes_tokenized < 4 * seams * MEAN < text_bytes


def test_content_that_moves_between_files_costs_its_seams(tmp_path):
    """Renamed, recompressed with other row groups, converted and split, joined."""
    rows, some = rows_of("a", 900), 24_000
    put(tmp_path / "in/a.parquet", rows)
    check_same(tmp_path)
    (tmp_path / "in/a.parquet").rename(tmp_path / "in/b.parquet")
    assert check_same(tmp_path).text_bytes_tokenized == 0
    put(tmp_path / "in/b.parquet", rows, group=33, codec="snappy")
    assert check_same(tmp_path).text_bytes_tokenized < some
    (tmp_path / "in/b.parquet").unlink()
    for name, those in (("b", rows[:450]), ("c", rows[450:])):
        put(tmp_path / f"in/{name}.jsonl", those)
    result = check_same(tmp_path)
    assert result.text_bytes_tokenized < some < result.totals["documents"]["text_bytes"]
    put(tmp_path / "in/b.jsonl", rows)
    (tmp_path / "in/c.jsonl").unlink()
    assert check_same(tmp_path).text_bytes_tokenized < some


def test_what_is_left_out_is_in_the_same_order(tmp_path):
    """A document of a reused slice that now is a copy comes before those that a step had left out of it."""
    copy = "a text that both of them have"
    more = {"documents": {"duplicates": "drop", "steps": [{"use": "length", "min_characters": 9}]}, "slice_bytes": 140}
    put(tmp_path / "in/b.jsonl", [("b-0", "short"), ("b-1", copy), ("b-2", "a text of its own")])
    for texts in (["the first text"], ["the first text", copy]):
        put(tmp_path / "in/a.jsonl", [*zip("xy", texts, strict=False)])
        assert check_same(tmp_path, **more).slices_reused == len(texts) - 1


def test_copies_of_empty_texts_keep_the_places_of_what_follows(tmp_path):
    """Their key is 0, as that of no document is."""
    rows = rows_of("a", 300)
    rows[5:9] = [("", "")] * 4
    for count in (300, 299):
        put(tmp_path / "in/a.jsonl", rows[:count])
        check_same(tmp_path, documents={"duplicates": "drop", "empty": "keep"})


def test_another_fraction_seed_or_layout_makes_no_token_again(tmp_path):
    put(tmp_path / "in/a.jsonl.zst", rows_of("a", 500))
    put(tmp_path / "in/b.jsonl", [("empty", ""), *rows_of("b", 100), ("last", "")])
    check_same(tmp_path)
    for change in ({"validation_fraction": 0.7}, {"validation_fraction": 0}, {"split_seed": 3}, {"layout": "compact"}):
        result = check_same(tmp_path, **change)
        assert result.text_bytes_tokenized == 0
        assert result.slices_reused == result.slices


def test_a_version_that_is_damaged_or_gone_is_no_cache(tmp_path, caplog):
    put(tmp_path / "in/a.jsonl", rows_of("a", 300))
    first = check_same(tmp_path)
    path = Path(first.path) / "train/encoded_tokens/c/0"
    data = bytearray(path.read_bytes())
    data[100] ^= 2
    path.write_bytes(data)
    second = check_same(tmp_path, split_seed=1)
    assert second.text_bytes_tokenized > 0
    assert f"Version {first.version} is not trusted" in caplog.text
    shutil.rmtree(first.path)
    third = check_same(tmp_path, split_seed=2)
    assert third.text_bytes_tokenized == 0  # the second one holds it
    (tmp_path / "out/_cache/index" / f"{third.version}.json").write_text("{}")
    shutil.rmtree(second.path)
    assert check_same(tmp_path, split_seed=3).text_bytes_tokenized > 0


def test_shards_of_a_build_that_did_not_end_give_their_segments(tmp_path):
    """The file has changed since, so that no slice is known by its key."""
    rows = rows_of("a", 600)
    put(tmp_path / "in/a.jsonl", rows)
    with shards_stay():
        lost = built(tmp_path)
    shutil.rmtree(tmp_path / "out/versions")
    shutil.rmtree(tmp_path / "out/_cache/index")
    (tmp_path / "out/latest.json").unlink()
    put(tmp_path / "in/a.jsonl", [*rows, *rows_of("b", 5)])
    result = built(tmp_path)
    assert 0 < result.text_bytes_tokenized < lost.text_bytes_tokenized // 3
    assert same_bytes(result, built(tmp_path, "anew"))


def test_documents_that_an_engine_does_not_take_make_no_segment_known(tmp_path):
    """What was left out of a segment is asked for again."""
    tokenizer = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"salt": 0, "wind": 1}, "unk_token": "missing"}
    tokenizer.write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}, "version": "1.0"}))
    rows = [(str(i), "storm" if i % 50 == 7 else "salt wind " * 20) for i in range(300)]
    put(tmp_path / "in/a.jsonl", rows)
    more = {"tokenizer": str(tokenizer), "documents": {"on_bad": "skip"}}
    first = check_same(tmp_path, **more)
    assert first.totals["documents"]["skipped"] == {"unencodable": 6}
    put(tmp_path / "in/a.jsonl", [*rows, ("last", "salt")])
    second = check_same(tmp_path, **more)
    assert second.totals["documents"]["skipped"] == {"unencodable": 6}
    assert second.text_bytes_tokenized < first.text_bytes_tokenized
