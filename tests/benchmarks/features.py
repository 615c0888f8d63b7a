"""Features of builds.

One Parquet source, a quarter of the text in slices of 32 MB, cl100k_base, with what a build may have besides. Wall time and
processor time (user and system), median of the rounds. *Written* is the bytes that the build's processes wrote for a byte of the
version. The conversations are the same text cut into messages of 500 characters, six in each, as lists of messages in Parquet;
below them the text that their template makes.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.bench import Bench, Grid, bytes_below, flows
from tests.benchmarks.corpus import Corpus, texts_in

PACKAGES = ("prefect", "tiktoken", "gigatoken", "numpy", "pyarrow")

FEATURES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("two threads", {}, {"workers": 2}),
    ("nine processes", {}, {"workers": 9}),
    ("kept columns", {"keep_columns": ["id"]}, {}),
    ("`duplicates: drop`", {}, {"documents": {"duplicates": "drop"}}),
    ("`near_duplicates`", {}, {"documents": {"near_duplicates": {}}}),
    ("`compact`", {}, {"layout": "compact"}),
    ("`zarr2`", {}, {"layout": "zarr2"}),
    ("loss mask", {"prompt_column": "id", "completion_column": "text"}, {}),
    ("conversations", {"path": "chat/*.parquet", "messages_column": "messages", "chat_template": "chat/chat.jinja"}, {}),
    ("their rendered text", {"path": "chat/*.parquet"}, {}),
)
"""A name, settings of the source, settings of the build."""
MESSAGE, MESSAGES = 500, 6


def write_conversations(corpus: Corpus, directory: Path) -> None:
    """The text of a corpus as conversations, and as their template renders them."""
    directory.mkdir()
    (directory / "chat.jinja").write_text("{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}")
    for path in corpus.paths:
        text = "\n".join(texts_in([path]))
        pieces = [text[i : i + MESSAGE].strip() or "." for i in range(0, len(text), MESSAGE)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": piece} for i, piece in enumerate(pieces)]
        found = [turns[i : i + MESSAGES] for i in range(0, len(turns), MESSAGES)]
        texts = ["".join(f"{one['role']}: {one['content']}\n" for one in messages) for messages in found]
        pq.write_table(pa.table({"messages": found, "text": texts}), directory / path.name, row_group_size=5000)


def measure(bench: Bench) -> list[Grid]:
    corpus, output, rows = bench.share(0.25), bench.fresh("features-output"), []
    write_conversations(corpus, bench.fresh("chat"))
    for name, source, settings in FEATURES:
        path = bench.config(
            output,
            {"path": f"{corpus.directory}/*.parquet", **source},
            **{"slice_bytes": bench.size(32_000_000, 1_000_000), **settings},
        )
        path.write_text(path.read_text().replace('"chat/', f'"{bench.scratch}/chat/'))
        runs = bench.runs(flows("build", path), output)
        written = runs.median("written") / bytes_below(output / "versions")
        rows.append([name, *(f"{figure:.2f}" for figure in (runs.median(), runs.median("cpu"), written))])
    return [Grid(["one Parquet source", "s", "processor, s", "written / version"], rows)]
