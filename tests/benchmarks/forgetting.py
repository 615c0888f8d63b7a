"""Forgetting: 1,000 documents of a dataset of 1 GB of text, and the refresh after it.

``python -m tests.benchmarks.forgetting SCRATCH`` makes the text, builds, forgets and refreshes. It prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flows.pipelines.build import build
from flows.pipelines.forget import ForgetRequest, forget
from flows.pipelines.refresh import refresh
from flows.runners.threads import Threads
from tasks.config import BuildConfig
from tasks.output.pointer import read_pointer

TEXT_BYTES = 1_000_000_000
DOCUMENT_BYTES = 4_000
FILES = 10
FORGOTTEN = 1_000
WORDS = 20_000


def write_text(directory: Path) -> int:
    """Write files of JSON lines of words that a generator draws. Return the number of documents."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(chance.choice(letters, chance.integers(2, 10))) for _ in range(WORDS)])
    count = TEXT_BYTES // FILES // DOCUMENT_BYTES
    for number in range(FILES):
        with (directory / f"{number}.jsonl").open("w") as file:
            for row in range(count):
                text = " ".join(words[np.minimum(chance.zipf(1.2, DOCUMENT_BYTES // 6), WORDS) - 1])
                file.write(json.dumps({"id": f"{number}-{row}", "text": text[:DOCUMENT_BYTES]}) + "\n")
    return count * FILES


def main(scratch: Path) -> None:
    documents, out = write_text(scratch / "in"), scratch / "out"
    source = {"path": str(scratch / "in" / "*.jsonl"), "id_column": "id"}
    told = {"output": str(out), "source": source, "tokenizer": "cl100k_base"}
    config = BuildConfig.model_validate(told)
    begun = time.monotonic()
    with Threads(None) as runner:
        built = build(config, runner)
    building = time.monotonic() - begun
    step = documents // FORGOTTEN
    count = documents // FILES
    ids = [f"{i // count}-{i % count}" for i in range(0, documents, step)][:FORGOTTEN]
    (scratch / "ids").write_text("".join(f"{one}\n" for one in ids))
    begun = time.monotonic()
    result = forget(ForgetRequest(output=str(out), reason="benchmark", id_list=str(scratch / "ids")))
    forgetting = time.monotonic() - begun
    begun = time.monotonic()
    with Threads(None) as runner:
        after = refresh(config, runner)
    refreshing = time.monotonic() - begun
    root = Store.at(out)
    manifest = read_manifest(root / "versions" / str(read_pointer(root).version))
    facts = {
        "text_bytes": built.totals["documents"]["text_bytes"],
        "documents": documents,
        "tokens": sum(built.totals[split]["token_count"] for split in ("train", "validation")),
        "build_seconds": round(building, 1),
        "forgotten": result.documents,
        "forget_seconds": round(forgetting, 1),
        "bytes_written": sum(one["size"] for one in manifest["objects"]),
        "left": list(result.left),
        "refresh_seconds": round(refreshing, 1),
        "refresh": after.outcome,
        "text_bytes_tokenized": after.text_bytes_tokenized,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
