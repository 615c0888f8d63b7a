"""Small datasets with languages, licences and two sources, and runs on them."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.flat_tokens.demo import build_dataset
from tests.sources import write_rows

COLUMNS = ("language", "licence", "score", "split", "url")


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Documents of which some are empty, some long, and some have no licence."""
    draw = np.random.default_rng(seed)
    return [
        {
            "id": f"{seed}-{i}",
            "text": ("é" if i % 3 else "ab ") * int(draw.integers(0, 40)),
            "language": ("en", "de", "fr")[draw.integers(0, 3)],
            "licence": (None, "cc-by-4.0", "cc0-1.0")[draw.integers(0, 3)],
            "score": float(draw.integers(0, 3)) / 4,
            "split": bool(draw.integers(0, 2)),
            "url": f"https://example.org/{seed}/{i}",
        }
        for i in range(count)
    ]


def build_corpus(root: Path, name: str, count: int = 60, seed: int = 0, **settings: Any) -> Path:
    """The version of a dataset of two sources; one token is a byte."""
    sources = []
    for k, source in enumerate((f"{name}-web", f"{name}-books")):
        path = root / "in" / f"{source}.jsonl"
        write_rows(path, rows_of(count, 2 * seed + k))
        sources.append({"name": source, "path": str(path), "id_column": "id", "keep_columns": list(COLUMNS)})
    more = {"tokenizer": "bytes", "validation_fraction": 0.3, "licence": "odc-by", **settings}
    return build_dataset(root / name, name=name, sources=sources, **more)
