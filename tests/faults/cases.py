"""The commands that the harness disturbs: what each is run over, and its words."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import pickle
import random
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import flat_tokens.text.limits
import flows.runners.processes
import tasks.assemble.write
import tasks.output.target
import tasks.parts.stored
import tasks.shards.writers
import tasks.tokenize.segments
from flat_tokens.arrays.layouts import LAYOUTS
from flows.pipelines.stages import OF_A_BUILD, Step, do
from tests.faults.support import ROOT, settings_of, write_notes
from tests.made import small
from tests.sources import write_rows

Words = list[str]
Command = Callable[..., None]


class Case(NamedTuple):
    """A command, and the directory that it is run in. ``prepare(here, command)`` fills the directory, with other commands if it
    likes; ``words(here)`` are the command's own. ``patch()`` prepares each process, a fork, in which something of it happens.
    ``is_for_all``: not if it starts processes of Python, which an ordinary user may not be allowed to run.
    """

    name: str
    prepare: Callable[[Path, Command], None]
    words: Callable[[Path], Words]
    signed: bool = False
    patch: Callable[[], None] = lambda: None
    is_for_all: bool = True


def config(here: Path, name: str, *notes: Path, **settings: Any) -> str:
    path = here / f"{name}.json"
    path.write_text(json.dumps(settings_of(here / "out", *notes, workers=1, slice_bytes=400, **settings)))
    return str(path)


def packed(path: Path) -> Path:
    """The same file, compressed."""
    target = path.with_name(f"{path.stem}_packed.jsonl.gz")
    target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    return target


def prepare_build(here: Path, command: Command, layout: str) -> None:
    """An older version, and sources of two slices and more."""
    command("build", config(here, "old", write_notes(here / "in/old.jsonl", 2), layout=layout), "--no-server")
    new = [write_notes(here / "in/new.jsonl", 4), packed(write_notes(here / "in/more.jsonl", 2))]
    config(here, "new", *new, layout=layout)


def prepare_refresh(here: Path, command: Command) -> None:
    """A version, one of whose sources has changed since."""
    notes = [write_notes(here / "in" / f"{name}.jsonl", 3) for name in ("a", "b")]
    command("build", config(here, "new", *notes), "--no-server")
    write_notes(notes[1], 5)


def prepare_retokenize(here: Path, command: Command) -> None:
    shutil.copy(ROOT / "deployments/demo/tokenizer.json", here / "tokenizer.json")
    command("build", config(here, "new", write_notes(here / "in/a.jsonl", 4)), "--no-server")


def prepare_train_tokenizer(here: Path, command: Command) -> None:
    command("build", config(here, "new", write_notes(here / "in/a.jsonl", 8)), "--no-server")


def prepare_rollback(here: Path, command: Command) -> None:
    """Three versions."""
    for seed in range(3):
        name = config(here, "new", write_notes(here / "in/a.jsonl", 3), split_seed=seed)
        command("build", name, "--no-server")


def first_version(here: Path) -> str:
    former = json.loads((here / "out/latest.json").read_bytes())["former"]
    return str(former[0]["version"])


def prepare_gc(here: Path, command: Command) -> None:
    """A superfluous version, a pinned one, the latest, and remains of every kind."""
    out = here / "out"
    for name in ("a", "b", "c"):
        command("build", config(here, "new", write_notes(here / "in" / f"{name}.jsonl", 2)), "--no-server")
        if name == "b":
            command("pin", str(out))
    remains = ("versions/unfinished/train/zarr.json", "_staging/dead/0123/file", f"_cache/files/{'0' * 64}.raw")
    for left in (*remains, "_cache/left_out/gone/texts/zarr.json"):
        (out / left).parent.mkdir(parents=True, exist_ok=True)
        (out / left).write_text("{}")
    (out / "_quarantine/damaged").mkdir(parents=True)


def prepare_forget(here: Path, command: Command) -> None:
    """A pinned version and a later one, which drop duplicates, and a copy of a source file."""
    notes = [write_notes(here / "in" / f"{name}.jsonl", 4) for name in ("a", "b")]
    for some in (notes[:1], notes):
        command("build", config(here, "new", *some, documents={"duplicates": "drop"}), "--no-server")
        if some == notes[:1]:
            command("pin", str(here / "out"))
    (here / "ids").write_text("a-1\nb-2\n")
    (here / "out/_cache/files").mkdir(parents=True, exist_ok=True)
    (here / "out/_cache/files" / f"{'0' * 64}.raw").write_text("text")


def without_chance() -> None:
    """Let the list of what is forgotten be the same in each run."""
    secrets.token_hex = lambda count=None: "5a" * (count or 8)


def prepare_two(here: Path, command: Command) -> None:
    """Two datasets, one of which has a version at the output already."""
    command("build", config(here, "one", write_notes(here / "in/a.jsonl", 4)), "--no-server")
    more = config(here, "two", write_notes(here / "in/b.jsonl", 3))
    command("build", more, "--no-server", "--set", f"output={here / 'more'}")


def prepare_import(here: Path, command: Command) -> None:
    prepare_two(here, command)
    command("export", str(here / "more"), str(here / "files"), "--to", "datatrove", "--no-server", "--workers", "1")


def on_two(name: str, *options: str) -> Callable[[Path], Words]:
    return lambda here: [name, *options, str(here / "more"), str(here / "out"), "--no-server", "--workers", "1"]


OBJECT_TOKENS = 256
"""Of an object in builds of small objects, whose slices have 600 tokens."""


def small_objects() -> None:
    """From now on an object holds few tokens, so that slices cross its border; a slice has many batches, and few of them wait."""
    for name in LAYOUTS:
        LAYOUTS[name] = small(name, OBJECT_TOKENS, 16, in_blocks=True)
    flat_tokens.text.limits.BATCH_BYTES = 120
    tasks.assemble.write.SPAN_TOKENS, tasks.assemble.write.SPAN_DOCUMENTS = 2 * OBJECT_TOKENS, 16
    tasks.assemble.write.SMALL_TOKENS = 1
    for module in (tasks.parts.stored, tasks.shards.writers):
        module.SHARD_LAYOUT = LAYOUTS["mmap"]  # type: ignore[attr-defined]
    tasks.output.target.LEFT_OUT_TOKENS = replace(LAYOUTS["mmap"].encoded_tokens, zstd_level=1)
    tasks.assemble.write.ARRAYS_WAITING = tasks.assemble.write.MARKS_TOGETHER = 2
    tasks.tokenize.segments.MEAN_BYTES, tasks.tokenize.segments.MOST_BYTES = 200, 1000


class Processes:
    """Stands for the processes of a build: what they would do is done here, with what would reach them."""

    def do(self, step: Step, item: Any) -> Any:
        if OF_A_BUILD.get(step.stage.name) is not step.stage or step.stage.pool is None:
            return do(step, item)
        there, shared = pickle.loads(pickle.dumps((item, step.shared)))
        return do(step._replace(shared=shared), there)


def small_objects_by_processes() -> None:
    """The same, and the workers are processes, as far as a build knows: a fork of a trial with processes of its own would leave
    those behind.
    """
    small_objects()
    flows.runners.processes.process_pool = lambda workers: contextlib.nullcontext(Processes())  # type: ignore[assignment]


Row = dict[str, Any]


def rows_of(name: str, count: int) -> list[Row]:
    """Documents of 20 to 130 bytes, a sixth of which are copies of others."""
    drawn = random.Random(name)
    texts = [f"{name} {i}: " + "salt wind " * drawn.randrange(1, 12) for i in range(count)]
    return [{"id": f"{name}-{i}", "text": texts[i - 5 if i % 6 == 5 else i], "n": i} for i in range(count)]


def talks_of(name: str, count: int) -> list[Row]:
    """Conversations of 40 to 130 bytes."""
    rows = rows_of(name, count)
    return [{**row, "talk": [{"role": "user", "content": "?"}, {"role": "assistant", "content": row["text"]}]} for row in rows]


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def prepare_streamed(here: Path, command: Command, made: Callable[[str, int], list[Row]], **settings: Any) -> None:
    """A version of some documents, and sources with more: slices of several batches, in objects that they do not fit."""
    old, more = here / "in/a.jsonl", here / "in/b.jsonl"
    (here / "x.jinja").write_text(TEMPLATE)
    source = settings.pop("source", {})
    if "chat_template" in source:
        source = {**source, "chat_template": str(here / "x.jinja")}

    def config_of(name: str, *paths: Path) -> str:
        path = here / f"{name}.json"
        told = settings_of(here / "out", *paths, workers=2, slice_bytes=700, **settings)
        told["sources"] = [{**one, **source} for one in told["sources"]]
        path.write_text(json.dumps(told))
        return str(path)

    command("build", config_of("old", write_rows(old, made("a", 8))), "--no-server")
    config_of("new", write_rows(old, made("a", 24)), write_rows(more, made("b", 12)))


def prepare_many_files(here: Path, command: Command) -> None:
    """A version, and other sources: many small files, whose slices are runs of them."""
    rows = rows_of("a", 48)
    for k in range(24):
        write_rows(here / "in/many" / f"{k:02}.jsonl", rows[2 * k : 2 * k + 2])
    old = write_rows(here / "in/old/00.jsonl", rows_of("b", 4))

    def config_of(name: str, path: Path) -> str:
        sources = [{"name": "many", "path": str(path), "id_column": "id"}]
        told = {**settings_of(here / "out"), "sources": sources, "workers": 3, "slice_bytes": 1600}
        (here / f"{name}.json").write_text(json.dumps(told))
        return str(here / f"{name}.json")

    command("build", config_of("old", old.parent), "--no-server")
    config_of("new", here / "in/many")


LOSS_MASKS = "build, streamed, loss masks"
OF_ROWS: dict[str, dict[str, Any]] = {
    "": {},
    ", duplicates dropped": {"documents": {"duplicates": "drop"}},
    ", near-duplicates dropped": {"documents": {"near_duplicates": {"threshold": 0.8}}},
    ", near-duplicates kept": {"documents": {"near_duplicates": {"action": "keep"}}},
    ", kept columns": {"source": {"keep_columns": ["n"]}},
    ", three splits": {"source": {"keep_columns": ["n"]}, "split": {"by": "n"}, "test_fraction": 0.3},
    ", compact": {"layout": "compact"},
}
STREAMED: dict[str, tuple[Callable[[Path, Command], None], Callable[[], None]]] = {
    LOSS_MASKS: (
        functools.partial(
            prepare_streamed,
            made=talks_of,
            source={"messages_column": "talk", "chat_template": "x.jinja"},
        ),
        small_objects,
    ),
    **{
        f"build, streamed{name}": (functools.partial(prepare_streamed, made=rows_of, **settings), small_objects)
        for name, settings in OF_ROWS.items()
    },
    "build, streamed, processes": (functools.partial(prepare_streamed, made=rows_of), small_objects_by_processes),
    "build, streamed, many small files": (prepare_many_files, small_objects),
}
"""Builds whose slices cross the borders of objects."""


CASES = {
    case.name: case
    for case in (
        *(
            Case(
                f"build, {layout}",
                functools.partial(prepare_build, layout=layout),
                lambda here: ["build", str(here / "new.json"), "--no-server"],
            )
            for layout in LAYOUTS
        ),
        Case(
            "build, signed",
            functools.partial(prepare_build, layout="mmap"),
            lambda here: ["build", str(here / "new.json"), "--no-server"],
            signed=True,
        ),
        *(
            Case(
                name,
                prepare,
                lambda here: ["build", str(here / "new.json"), "--no-server"],
                patch=patch,
                is_for_all=name != LOSS_MASKS,
            )
            for name, (prepare, patch) in STREAMED.items()
        ),
        Case("refresh", prepare_refresh, lambda here: ["refresh", str(here / "new.json"), "--no-server"]),
        Case(
            "retokenize",
            prepare_retokenize,
            lambda here: [
                *("retokenize", str(here / "out"), "--no-server", "--trust-records"),
                *("--tokenizer", json.dumps({"name": str(here / "tokenizer.json"), "max_seconds": 3600})),
                *("--output", str(here / "other")),
            ],
        ),
        Case(
            "train-tokenizer",
            prepare_train_tokenizer,
            lambda here: [
                *("train-tokenizer", str(here / "out"), "--no-server", "--vocab-size", "260,264"),
                *("--to", str(here / "tokenizers/{size}")),
            ],
        ),
        Case("rollback", prepare_rollback, lambda here: ["rollback", str(here / "out"), first_version(here)]),
        Case(
            "forget",
            prepare_forget,
            lambda here: ["forget", str(here / "out"), "--ids", str(here / "ids"), "--reason", "asked", "--no-server", "--quiet"],
            patch=without_chance,
        ),
        Case("gc", prepare_gc, lambda here: ["gc", str(here / "out"), "--keep", "1", "--days", "0", "--delete"]),
        Case(
            "merge",
            prepare_two,
            lambda here: ["merge", *(str(here / name) for name in ("out", "more", "out")), "--no-server", "--workers", "1"],
        ),
        Case("shuffle", prepare_two, on_two("shuffle")),
        Case(
            "import",
            prepare_import,
            lambda here: ["import", str(here / "files"), str(here / "out"), "--no-server", "--workers", "1"],
        ),
        Case(
            "export",
            prepare_two,
            lambda here: [
                *("export", str(here / "more"), str(here / "exported"), "--to", "megatron", "--tokens-per-file", "400"),
                *("--no-server", "--workers", "1"),
            ],
        ),
    )
}
