"""Requests of an object store.

A build of small slices onto an S3 server on loopback, counted by a proxy: requests for objects below `_cache`. First everything
is built; then again with the token shards there and the version gone. `tests/flows/test_stores.py` bounds both. Then sources of
text files of 4 kB in a bucket: all requests of a build whose output is on the store, too, and of one that writes to a local disk.
Last, a table of 500 columns, of which two are read, from S3 and from a web server that sends ranges, both with requests counted
by the proxy: bytes that are fetched, the most that were on the disk, those that stay there, and seconds.
"""

import logging
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from flat_tokens.stores.store import Store
from tests.benchmarks.bench import Bench, Grid, greatest
from tests.faults.stores import BUCKETS, Bucket
from tests.faults.support import build_here, write_notes

PACKAGES = ("s3fs", "aiobotocore", "moto")
DOCUMENTS = 200
KINDS = ("parquet", "arrow")
WIDE = ["table", "from", "`keep_files`", "file", "two columns", "fetched", "most on the disk", "at the end", "time"]
FILE_COUNTS, FILE_BYTES = (200, 2_000), 4_000


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("object-store")
    scratch.mkdir()
    notes = write_notes(scratch / "notes.jsonl", DOCUMENTS, 18)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the server's log of requests
    rows = []
    with pytest.MonkeyPatch.context() as patch, BUCKETS["s3"](patch) as bucket:
        settings = {"output": f"{bucket.url}/out", "scratch": str(scratch / "scratch"), "verify_level": "quick"}
        text = {"source": {"path": str(notes), "id_column": "id"}, "tokenizer": "bytes", "slice_bytes": 4000}
        for name in ("nothing is there", "the token shards are there"):
            bucket.proxy.requests.clear()
            made = build_here({**settings, **text, "validation_fraction": 0.3})
            asked = sum("_cache" in path for _, path, _ in bucket.proxy.requests)
            rows.append([name, made.slices, len(bucket.proxy.requests), asked, f"{asked / made.slices:.1f}"])
            Store.at(made.path).remove("")
        small = [
            of_small_files(bucket, bench.size(count, count // 100), place, scratch)
            for count in FILE_COUNTS
            for place in ("the store", "a local disk")
        ]
        wide = [
            of_wide_table(bucket, bench.size(40_000, 4_000), kind, place, keep, scratch)
            for kind in KINDS
            for place in ("S3", "HTTP")
            for keep in (True, "auto")
        ]
    header = ["files", "output", "requests", "GET of a file", "other GET", "HEAD", "PUT", "POST", "DELETE"]
    return [Grid(["", "slices", "requests", "below `_cache`", "of these, a slice"], rows), Grid(header, small), Grid(WIDE, wide)]


def of_wide_table(bucket: Bucket, rows: int, kind: str, place: str, keep: bool | str, scratch: Path) -> list[object]:
    """A build of two columns of a table of 500."""
    numbers = np.random.default_rng(0)
    others = {f"c{number}": numbers.integers(1 << 60, 1 << 61, rows) for number in range(498)}
    table = pa.table({"text": [f"{row} " + "salt wind " * (row % 60) for row in range(rows)], "id": np.arange(rows), **others})
    path = scratch / f"wide.{kind}"
    if kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed", chunksize=rows // 4)
    else:
        pq.write_table(table, path, row_group_size=rows // 4)
    if not Store.at(bucket.url).has(path.name):
        Store.at(bucket.url).upload(path.name, path)
        Store.at(bucket.url).fs.chmod(f"bucket/{path.name}", "public-read")
    own = scratch / f"wide-{kind}-{place}-{keep}"
    places = {"output": str(scratch / f"out-{own.name}"), "scratch": str(own), "keep_files": keep, "slice_bytes": "4 MB"}
    url = bucket.url if place == "S3" else f"{bucket.proxy.url}/bucket"
    source = {"path": f"{url}/{path.name}", "id_column": "id"}
    bucket.proxy.sent.clear()
    begun = time.perf_counter()
    with greatest(lambda: taken_below(own), 0.02) as most:
        build_here({**places, "source": source, "tokenizer": "bytes"})
    seconds = time.perf_counter() - begun
    sizes = path.stat().st_size, table.select(["text", "id"]).nbytes, bucket.proxy.sent[path.name], most[0], taken_below(own)
    return [kind, place, "yes" if keep is True else "no", *(f"{size / 1e6:.1f} MB" for size in sizes), f"{seconds:.1f} s"]


def taken_below(directory: Path) -> int:
    """Bytes that files below a directory take on the disk: one that is read by ranges has holes."""
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


def of_small_files(bucket: Bucket, count: int, place: str, scratch: Path) -> list[object]:
    """The requests of a build of *count* small files."""
    source = Store.at(f"{bucket.url}/{count}")
    for number in range(count):
        source.put(f"{number // 500:03d}/{number:06d}.txt", (f"note {number}: " + "salt wind " * 400)[:FILE_BYTES].encode())
    output = f"{bucket.url}/out-{count}" if place == "the store" else str(scratch / f"out-{count}")
    settings = {"output": output, "scratch": str(scratch / f"scratch-{count}-{len(place)}"), "verify_level": "quick"}
    bucket.proxy.requests.clear()
    build_here({**settings, "source": {"path": source.url}, "tokenizer": "bytes"})
    asked = Counter(
        "file" if method == "GET" and path.partition("?")[0].endswith(".txt") else method
        for method, path, _ in bucket.proxy.requests
    )
    return [
        f"{count:,}",
        place,
        f"{asked.total():,}",
        *(f"{asked[kind]:,}" for kind in ("file", "GET", "HEAD", "PUT", "POST", "DELETE")),
    ]
