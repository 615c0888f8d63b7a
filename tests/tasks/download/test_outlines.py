"""Files that are larger than the disk: Parquet is read by ranges, others are removed when their slices are settled."""

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_tokens
import tasks.download.cut
import tasks.shards.write
from flat_tokens.stores.store import Store
from flows.commands.build import plan_text
from flows.pipelines.build import build
from flows.pipelines.plan import plan
from flows.runners.processes import Threads
from tasks.config import BuildConfig, Source
from tasks.download.cut import local_slice, look_into
from tasks.download.fetch import room_taken, take_room
from tasks.download.outlines import _in_pieces
from tasks.download.slices import slices_of
from tasks.download.sources import NoRoomError, resolve_source
from tasks.models import Slice
from tasks.output.leases import Workspace
from tests.faults.stores import BUCKETS, Bucket
from tests.processes import serving
from tests.refusal import refusal
from tests.sources import write_arrow, write_rows
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture  # noqa: F401  a fixture
from tests.tasks.download.test_fetch import Server

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body")  # by gcsfs
GS, AZURE = (pytest.param(protocol, "", marks=pytest.mark.slow) for protocol in ("gs", "abfs"))
ROWS, COLUMNS = 1000, 200
TEXTS = [f"document {row} " + "salt wind " * (row % 40) for row in range(ROWS)]


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with BUCKETS[getattr(request, "param", "s3")](monkeypatch) as made:
        yield made


def wide(seed: int = 0) -> pa.Table:
    """A table of which a column is read. Another seed, another content of the same size."""
    numbers = np.random.default_rng(seed)
    others = {f"c{number}": numbers.integers(1 << 60, 1 << 61, ROWS) for number in range(COLUMNS - 2)}
    return pa.table({**others, "text": TEXTS, "other": TEXTS})


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".arrow":
        write_arrow(path, table, 500)
        return
    pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)


def put(bucket: Bucket, name: str, data: bytes) -> None:
    """Store an object that everybody may read, by HTTP, too."""
    Store.at(bucket.url).put(name, data)
    if bucket.protocol == "s3":
        Store.at(bucket.url).fs.chmod(f"bucket/{name}", "public-read")


def settings(output: Path, source: str | dict[str, Any], **more: Any) -> BuildConfig:
    scratch = output.with_name(f"scratch-{output.name}")
    scratch.mkdir(exist_ok=True)
    places = {"output": str(output), "scratch": str(scratch), "source": {"path": source} if isinstance(source, str) else source}
    return BuildConfig.model_validate({**places, "tokenizer": "bytes", "slice_bytes": 200_000, **more})


def built(config: BuildConfig) -> tuple[str, list[bytes]]:
    """The version, and the tokens of its documents, as bytes: lists of millions of numbers take long."""
    with Threads(2) as runner:
        made = build(config, runner)
    splits = flat_tokens.open(made.path)
    return made.version, sorted(part[i].tobytes() for part in (splits.train, splits.validation) for i in range(part.seq_count))


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]


def left_in(config: BuildConfig) -> list[Path]:
    return files_in(Path(str(config.scratch)))


@pytest.mark.parametrize(
    ("bucket", "place", "name"),
    [
        ("s3", "", "w.parquet"),
        ("s3", "http", "w.arrow"),
        pytest.param("gs", "", "w.arrow", marks=pytest.mark.slow),
        pytest.param("abfs", "", "w.parquet", marks=pytest.mark.slow),
    ],
    indirect=["bucket"],
)
def test_a_column_of_a_wide_table_costs_its_bytes(tmp_path, bucket, place, name):
    """Not of the table, and none of them stays on the disk. Whether files are kept changes nothing that is stored."""
    write(tmp_path / name, wide())
    data = (tmp_path / name).read_bytes()
    put(bucket, name, data)
    source = f"{bucket.proxy.url}/bucket/{name}" if place else f"{bucket.url}/{name}"
    config = settings(tmp_path / "ranges", source)
    bucket.proxy.requests.clear()
    version, documents = built(config)
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", header) for _, _, header in bucket.proxy.requests]
    asked = sum(int(span[2]) - int(span[1]) + 1 for span in ranges if span)
    for span, (method, path, _) in zip(ranges, bucket.proxy.requests, strict=True):
        assert span or method == "HEAD" or name not in path or path.startswith("/storage")  # which describes the object
    two, outline = wide().select(["text"]).nbytes, (1 << 16) + 400 * COLUMNS
    assert asked < 2 * two + outline < len(data) / 3
    assert left_in(config) == []
    kept = settings(tmp_path / "kept", source, keep_files=True)
    assert built(kept) == (version, documents)
    assert [path.stat().st_size for path in left_in(kept) if path.suffix == ".raw"] == [len(data)]
    assert built(settings(tmp_path / "local", str(tmp_path / name)))[1] == documents
    files = flat_tokens.open(tmp_path / "ranges").manifest["provenance"]["sources"][0]["files"]
    assert files[0]["version"].startswith({"s3": 'ETag:"', "gs": "generation:", "abfs": "etag:"}[bucket.protocol])


@pytest.mark.parametrize(("bucket", "place"), [("s3", ""), ("s3", "http"), GS, AZURE], indirect=["bucket"])
def test_a_file_that_changed_between_two_reads_is_an_error_that_names_it(tmp_path, bucket, place):
    name = "w.parquet"
    for seed in (0, 1):
        write(tmp_path / f"{seed}.parquet", wide(seed))
    put(bucket, name, (tmp_path / "0.parquet").read_bytes())
    source = Source(path=f"{bucket.proxy.url}/bucket/{name}" if place else f"{bucket.url}/{name}")
    (found,) = resolve_source(source, 0).files
    here = Workspace(Store.at(tmp_path / "out"), "", str(tmp_path / "scratch"), room=1 << 30)
    slices = list(slices_of([look_into(found, (source,), 100_000, here)], 100_000))
    with local_slice(slices[0], (source,), here) as ready:
        assert Path(ready.ranges[0].file.location).stat().st_size == found.size
    assert not Path(ready.ranges[0].file.location).exists()
    put(bucket, name, (tmp_path / "1.parquet").read_bytes())
    with (
        refusal(re.escape("w.parquet changed while the build read it")),
        local_slice(slices[1], (source,), here),
    ):
        pass
    assert files_in(tmp_path / "scratch") == []


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_slice_of_several_files_has_what_it_needs_of_each(tmp_path, stand_in_hub, ending):
    """Also on the hub, whose files are pinned to a commit; one that has gone is an error that names it."""
    write(tmp_path / f"w.{ending}", wide())
    data = (tmp_path / f"w.{ending}").read_bytes()
    commit = stand_in_hub.commit("org/text", {f"{number}.{ending}": data for number in range(3)})
    config = settings(tmp_path / "hub", {"hub": {"path": "org/text"}}, slice_bytes=1 << 27)
    documents = built(config)[1]
    assert documents == sorted(3 * built(settings(tmp_path / "local", str(tmp_path / f"w.{ending}")))[1])
    assert left_in(config) == []
    here = Workspace(Store.at(tmp_path / "out"), "", str(tmp_path / "scratch"), room=1 << 30)
    cuts = [look_into(found, config.sources, 1 << 30, here) for found in resolve_source(config.sources[0], 0).files]
    (slice_,) = slices_of(cuts, 1 << 30)
    del stand_in_hub.commits["datasets", "org/text", commit][f"1.{ending}"]
    tasks.download.outlines._of_outline.cache_clear()
    with refusal(f"1.{ending} changed while the build read it"), local_slice(slice_, config.sources, here):
        pass


@pytest.mark.slow
def test_files_that_are_not_kept_never_take_more_than_the_bound(tmp_path, bucket, monkeypatch):
    """Six packed files of which two fit at a time; a seventh that fits only alone, and one that never does."""
    seen, real = [], tasks.download.cut.fetch_file
    for number in range(7):
        count, size = (200, 1000) if number < 6 else (20, 90_000)
        rows = [{"text": f"{number} {row} " + "x" * size} for row in range(count)]
        put(bucket, f"in/{number}.jsonl.gz", write_rows(tmp_path / f"{number}.jsonl.gz", rows).read_bytes())

    def fetch(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        seen.append(sum(path.stat().st_size for path in files_in(tmp_path / "scratch-out")))
        return made

    monkeypatch.setattr(tasks.download.cut, "fetch_file", fetch)
    monkeypatch.setattr(tasks.download.small, "SMALL_BYTES", 1)
    config = settings(tmp_path / "out", f"{bucket.url}/in/*.jsonl.gz", scratch_bytes=2_000_000, keep_files=False)
    documents = built(config)[1]
    assert len(documents) == 1220
    assert max(seen) <= 2_000_000
    assert left_in(config) == []
    assert built(settings(tmp_path / "local", f"{tmp_path}/*.jsonl.gz"))[1] == documents
    for bound, words in (
        (1_000_000, "more, unpacked, than scratch_bytes leaves"),
        (1000, r"[\d,]+ bytes, and scratch_bytes is 1,000\."),
    ):
        small = settings(tmp_path / "small", f"{bucket.url}/in/6.jsonl.gz", scratch_bytes=bound, keep_files=False)
        with refusal(rf"6\.jsonl\.gz takes {words}"):
            built(small)


def test_kept_files_never_take_more_than_the_bound(tmp_path, bucket, monkeypatch):
    """Of two packed ones that take much more than was counted for them the first is kept. What stays is not counted again."""
    monkeypatch.setattr(tasks.download.small, "SMALL_BYTES", 4000)
    lines = "".join(f'{{"text": "salt wind {row}"}}\n' for row in range(60)).encode()
    packed = {f"{name}.jsonl.gz": gzip.compress(500 * lines.replace(b"wind", name.encode())) for name in ("bora", "foen")}
    files = {"a.jsonl": 3 * lines, "c.jsonl": lines, **packed}
    for name, data in files.items():
        put(bucket, name, data)
    sources = tuple(Source(path=f"{bucket.url}/{name}*", name=name) for name in "abcf")
    config = settings(tmp_path / "out", bucket.url, scratch_bytes=(bound := 1_600_000)).model_copy(update={"sources": sources})
    for seed in (0, 1):
        assert plan(config).keeps_files
        assert len(built(config.model_copy(update={"split_seed": seed}))[1]) == 1004 * 60
        kept = sorted(path.stat().st_size for path in left_in(config) if path.suffix != ".json")
        assert kept[-1] == 500 * len(lines)
        assert sum(kept) == sum(map(len, files.values())) + kept[-1] < bound


def test_processes_share_the_room_of_a_directory(tmp_path):
    """One that takes too much waits for the others, not for a killed one. It is an error if files that are kept have the room."""
    dead = tmp_path / "_staging/fetch/killed.lock"
    dead.parent.mkdir(parents=True)
    dead.write_text("10 0")
    order = []

    def second() -> None:
        with room_taken(tmp_path, 5, 10):
            order.append("second")

    with ThreadPoolExecutor() as pool:
        with room_taken(tmp_path, 6, 10), room_taken(tmp_path, 4, 10):
            waits = pool.submit(second)
            with pytest.raises(TimeoutError):
                waits.result(0.5)
            order.append("first")
        waits.result()
    assert order == ["first", "second"]
    with contextlib.ExitStack() as stack:
        assert take_room(tmp_path, 7, 10, stack, keeps=True)
        with refusal("keeps 7 bytes of this and other builds, and 5 more are over scratch_bytes, 10", NoRoomError):
            second()
    (tmp_path / "kept.raw").write_bytes(b"6 here")
    with refusal("keeps 6 bytes", NoRoomError):
        second()


def test_a_slice_that_waits_for_room_is_not_waited_for(tmp_path, bucket, monkeypatch):
    """The second slice has the room first, and would stream its tokens after those of the first."""
    begun = threading.Event()
    for number in range(2):
        put(bucket, f"in/{number}.jsonl", json.dumps({"text": f"wind {number} " * 150}).encode() + b"\n")

    @contextlib.contextmanager
    def second_first(slice_: Slice, *rest: Any) -> Iterator[Slice]:
        is_first = slice_.ranges[0].file.name.endswith("0.jsonl")
        assert not is_first or begun.wait(60)
        with local_slice(slice_, *rest) as here:
            begun.set()
            yield here

    monkeypatch.setattr(tasks.shards.write, "local_slice", second_first)
    more = {"slice_bytes": 1600, "scratch_bytes": 1600, "keep_files": False}
    assert len(built(settings(tmp_path / "out", f"{bucket.url}/in", **more))[1]) == 2


def test_files_of_a_server_that_sends_no_ranges_are_fetched_as_a_whole(tmp_path):
    """``plan`` names it, and they take room as others do."""
    write(tmp_path / "w.parquet", wide())
    with serving(server := Server()) as url:
        server.body, server.with_ranges = (tmp_path / "w.parquet").read_bytes(), False
        size = len(server.body)
        config = settings(tmp_path / "out", f"{url}/w.parquet", scratch_bytes=size + 99)
        forecast = "".join(plan_text(plan(config)))
        assert f"{url} sends no ranges or no strong ETags: its files are fetched as a whole" in forecast
        assert len(built(config)[1]) == ROWS
    assert [path.stat().st_size for path in left_in(config) if path.suffix == ".raw"] == [size]


def test_spans_that_meet_or_lie_in_each_other_are_read_once():
    assert _in_pieces([(2, 4), (0, 10), (10, 12), (20, 21)]) == [(0, 12), (20, 21)]
