"""Requests of an object store.

A build of small slices onto an S3 server on loopback, counted by a proxy: requests for objects below `_cache`. First everything
is built; then again with the token shards there and the version gone. `tests/flows/test_stores.py` bounds both.
"""

from __future__ import annotations

import json
import logging

import pytest

from flat_tokens.stores.store import Store
from flows.pipelines.build import build
from flows.runners.threads import Threads
from tasks.config import BuildConfig
from tests.benchmarks.bench import Bench, Grid
from tests.faults.stores import BUCKETS

PACKAGES = ("s3fs", "aiobotocore", "moto")
DOCUMENTS = 200


def measure(bench: Bench) -> list[Grid]:
    scratch = bench.fresh("object-store")
    scratch.mkdir()
    notes = scratch / "notes.jsonl"
    lines = (json.dumps({"id": f"{i}", "text": f"note {i}: " + "salt wind " * (i % 40)}) for i in range(DOCUMENTS))
    notes.write_text("\n".join(lines) + "\n")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the server's log of requests
    rows = []
    with pytest.MonkeyPatch.context() as patch, BUCKETS["s3"](patch) as bucket:
        settings = {"output": f"{bucket.url}/out", "scratch": str(scratch / "scratch"), "verify_level": "quick"}
        text = {"source": {"path": str(notes), "id_column": "id"}, "tokenizer": "bytes", "slice_bytes": 4000}
        config = BuildConfig.model_validate({**settings, **text, "validation_fraction": 0.3})
        for name in ("nothing is there", "the token shards are there"):
            bucket.proxy.requests.clear()
            with Threads(2) as runner:
                made = build(config, runner)
            asked = sum("_cache" in path for _, path, _ in bucket.proxy.requests)
            rows.append([name, made.slices, len(bucket.proxy.requests), asked, f"{asked / made.slices:.1f}"])
            Store.at(made.path).remove("")
    bench.fresh("object-store")
    return [Grid(["", "slices", "requests", "below `_cache`", "of these, a slice"], rows)]
