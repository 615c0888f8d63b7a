"""Features of a build together: in every layout, by every runner and at every place, a version holds what its rows say."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import tasks.assemble.spans
import tasks.tokenize.segments
from flat_tokens.arrays.layouts import LAYOUTS
from flat_tokens.stores.store import Store
from flows.pipelines.build import BuildResult, build
from flows.runners.threads import Threads
from tasks.config import BuildConfig
from tests.examples import first_fast
from tests.flows.through_json import Elsewhere
from tests.sources import Rows, expected, held, write_rows

FRACTION = 0.3
FORMATS = ("jsonl", "parquet", "arrow", "csv", "jsonl.zst", "jsonl.gz")
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # settings of each source, of the documents, and what is expected by them
    "nothing": ({}, {}, {}),
    "columns": ({"keep_columns": ["url"]}, {}, {"columns": ["url"]}),
    "masks": ({"prompt_column": "prompt", "completion_column": "text"}, {}, {"prompt": "prompt"}),
    "steps": ({}, {"steps": [{"use": "length", "min_bytes": 30}]}, {"least_bytes": 30}),
    "duplicates": ({}, {"duplicates": "drop"}, {"once": True}),
}
TOGETHER = [
    *((name,) for name in FEATURES),
    ("columns", "masks"),
    ("columns", "steps"),
    ("columns", "duplicates"),
    ("masks", "duplicates"),
    ("steps", "duplicates"),
    ("columns", "masks", "duplicates"),
    ("columns", "steps", "duplicates"),
]
CASES = [(features, layout) for layout in LAYOUTS for features in TOGETHER]
# Every two features that go together, and every layout; slowly all.
FIRST = list(zip([TOGETHER[0], *TOGETHER[-2:], ("masks",)], ["compact", *LAYOUTS], strict=True))


def some_rows(name: str, count: int) -> Rows:
    """Documents of which every fourth has the text of one before it, in this file or another."""
    return [
        {
            "id": f"{name}-{i}",
            "prompt": f"say {i % 4}: ",
            "text": "the same " * (i % 8) if i % 4 == 3 else f"{name} {i} é " + "salt wind " * (i % 5),
            "url": f"https://{name}.example/{i}",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "case",
    first_fast([*FIRST, *(case for case in CASES if case not in FIRST)], len(FIRST), every=3),
    ids=lambda case: "+".join((*case[0], case[1])),
)
def test_a_version_is_what_the_rows_say_however_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[tuple[str, ...], str]
) -> None:
    """The same objects with any workers, through groups, on a disk and in an object store. A second build makes no token."""
    monkeypatch.setattr(tasks.tokenize.segments, "MEAN_BYTES", 200)
    monkeypatch.setattr(tasks.assemble.spans, "SPAN_TOKENS", 1)
    monkeypatch.setattr(tasks.assemble.spans, "SPAN_DOCUMENTS", 1)
    features, layout = case
    of_sources, of_documents, of_versions = ({}, {}, {})
    for name in features:
        for whole, part in zip((of_sources, of_documents, of_versions), FEATURES[name], strict=True):
            whole |= part
    files = [some_rows(f"f{k}", 8) for k in range(len(FORMATS))]
    paths = [write_rows(tmp_path / f"in/{k}.{name}", rows) for k, (name, rows) in enumerate(zip(FORMATS, files, strict=True))]
    given = {
        "sources": [{"name": f"s{k}", "path": str(path), "id_column": "id", **of_sources} for k, path in enumerate(paths)],
        "documents": of_documents,
        "tokenizer": "bytes",
        "layout": layout,
        "validation_fraction": FRACTION,
        "slice_bytes": 300,
        "scratch": str(tmp_path / "scratch"),
    }

    def built(output: str, workers: int | None) -> BuildResult:
        config = BuildConfig.model_validate({"output": output, **given})
        with Threads(workers or 1) as threads:
            return build(config, threads if workers else Elsewhere(config))

    outputs = {str(tmp_path / "one"): 1, str(tmp_path / "groups"): None, f"memory://{uuid.uuid4().hex}": 3}
    objects = []
    for output, workers in outputs.items():
        result = built(output, workers)
        store = Store.at(output) / "versions" / result.version
        objects.append({key: store.digest(key, "sha256").digest for key, _ in store.listing()})
        assert result.slices > len(files)
    assert objects[0] == objects[1] == objects[2]
    assert held(output) == expected(files, fraction=FRACTION, **of_versions)
    again = built(output, workers)
    assert (again.version, again.text_bytes_tokenized) == (result.version, 0)
    assert {key: store.digest(key, "sha256").digest for key, _ in store.listing()} == objects[0]
