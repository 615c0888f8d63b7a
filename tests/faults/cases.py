"""The commands that the harness disturbs: what each is run over, and its words."""

import contextlib
import gzip
import json
import os
import pickle
import random
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from flows.pipelines.stages import OF_A_BUILD, Step, run_step
from tasks.config import TokenizerConfig
from tasks.tokenize.tokenizers import load_tokenizer
from tests.faults.support import settings_of, write_notes
from tests.made import small
from tests.processes import ROOT
from tests.sources import write_rows

Words = list[str]
Command = Callable[[str], None]


def words_of(text: str, here: Path, output: str = "") -> Words:
    """Words of a command, whose text names the directory HERE, an OUTPUT, and the FIRST version of the one in the directory."""
    words = [word.replace("HERE", str(here)).replace("OUTPUT", output) for word in text.split()]
    if words[-1] == "FIRST":
        words[-1] = json.loads((here / "out/latest.json").read_bytes())["former"][0]["version"]
    return words


class Case(NamedTuple):
    """A command, and the directory that it is run in. ``prepare(here, command)`` fills the directory, with other commands if it
    likes. ``patch()`` prepares each process, a fork, in which something of it happens. ``is_for_all``: not if it starts processes
    of Python, which an ordinary user may not be allowed to run.
    """

    prepare: Callable[[Path, Command], object]
    text: str
    signed: bool = False
    patch: Callable[[], None] = lambda: None
    is_for_all: bool = True


def config(here: Path, name: str, *notes: Path, **settings: Any) -> None:
    told = settings_of(settings.pop("output", here / "out"), *notes, **{"workers": 1, "slice_bytes": 400, **settings})
    (here / f"{name}.json").write_text(json.dumps(told))


BUILD = "build HERE/new.json --no-server"


def built(here: Path, command: Command, name: str, *notes: Path, **settings: Any) -> None:
    """Build of notes, as a configuration of this name says."""
    config(here, name, *notes, **settings)
    command(f"build HERE/{name}.json --no-server")


def packed(path: Path) -> Path:
    """The same file, compressed."""
    target = path.with_name(f"{path.stem}_packed.jsonl.gz")
    target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    return target


def prepare_build(here: Path, command: Command, **settings: Any) -> list[Path]:
    """An older version, and sources of two slices and more."""
    built(here, command, "old", write_notes(here / "in/old.jsonl", 2), **settings)
    new = [write_notes(here / "in/new.jsonl", 4), packed(write_notes(here / "in/more.jsonl", 2))]
    config(here, "new", *new, **settings)
    return new


def prepare_refresh(here: Path, command: Command, **settings: Any) -> list[Path]:
    """A version, one of whose sources has changed since."""
    notes = [write_notes(here / "in" / f"{name}.jsonl", 3) for name in ("a", "b")]
    built(here, command, "new", *notes, **settings)
    write_notes(notes[1], 5)
    return notes


def prepare_retokenize(here: Path, command: Command) -> None:
    shutil.copy(ROOT / "deployments/demo/tokenizer.json", here / "tokenizer.json")
    built(here, command, "new", write_notes(here / "in/a.jsonl", 4))


def prepare_rollback(here: Path, command: Command) -> None:
    """Three versions."""
    for seed in range(3):
        built(here, command, "new", write_notes(here / "in/a.jsonl", 3), split_seed=seed)


def prepare_three(here: Path, command: Command, pin: str = "pin HERE/out", **settings: Any) -> None:
    """A superfluous version, a pinned one, and the latest."""
    for name in ("a", "b", "c"):
        built(here, command, name, write_notes(here / "in" / f"{name}.jsonl", 2), **settings)
        if name == "b":
            command(pin)


def prepare_gc(here: Path, command: Command) -> None:
    """Three versions, and remains of every kind."""
    out = here / "out"
    prepare_three(here, command)
    remains = ("versions/unfinished/train/zarr.json", "_staging/dead/0123/file", f"_cache/files/{'0' * 64}.raw")
    for left in (*remains, "_cache/left_out/gone/texts/zarr.json"):
        (out / left).parent.mkdir(parents=True, exist_ok=True)
        (out / left).write_text("{}")
    (out / "_quarantine/damaged").mkdir(parents=True)


def prepare_forget(here: Path, command: Command) -> None:
    """A pinned version and a later one, which drop duplicates, and a copy of a source file."""
    notes = [write_notes(here / "in" / f"{name}.jsonl", 4) for name in ("a", "b")]
    for some in (notes[:1], notes):
        built(here, command, "new", *some, documents={"duplicates": "drop"})
        if some == notes[:1]:
            command("pin HERE/out")
    (here / "ids").write_text("a-1\nb-2\n")
    (here / "out/_cache/files").mkdir(parents=True, exist_ok=True)
    (here / "out/_cache/files" / f"{'0' * 64}.raw").write_text("text")


def without_chance() -> None:
    """Let the list of what is forgotten be the same in each run."""
    secrets.token_hex = lambda count=None: "5a" * (count or 8)


def prepare_two(here: Path, command: Command) -> None:
    """Two datasets, one of which has a version at the output already."""
    built(here, command, "one", write_notes(here / "in/a.jsonl", 4))
    config(here, "two", write_notes(here / "in/b.jsonl", 3))
    command("build HERE/two.json --no-server --set output=HERE/more")


def prepare_subset(here: Path, command: Command) -> None:
    prepare_two(here, command)
    (here / "ids").write_text("b-0\nb-1\nb-2\n")


def prepare_import(here: Path, command: Command) -> None:
    prepare_two(here, command)
    command("export HERE/more HERE/files --to datatrove --no-server --workers 1")


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
            return run_step(step, item)
        there, shared = pickle.loads(pickle.dumps((item, step.shared)))
        return run_step(step._replace(shared=shared), there)


def small_objects_by_processes() -> None:
    """The same, and the workers are processes, as far as a build knows: a fork of a trial with processes of its own would leave
    those behind.
    """
    small_objects()
    flows.runners.processes.process_pool = lambda workers: contextlib.nullcontext(Processes().do)  # type: ignore[assignment]


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
    of_sources = settings.pop("source", {})
    if "chat_template" in of_sources:
        of_sources = {**of_sources, "chat_template": str(here / "x.jinja")}
    settings |= {"of_sources": of_sources, "workers": 2, "slice_bytes": 700}
    built(here, command, "old", write_rows(old, made("a", 8)), **settings)
    config(here, "new", write_rows(old, made("a", 24)), write_rows(more, made("b", 12)), **settings)


def prepare_many_files(here: Path, command: Command) -> None:
    """A version, and other sources: many small files, whose slices are runs of them."""
    rows = rows_of("a", 48)
    for k in range(24):
        write_rows(here / "in/many" / f"{k:02}.jsonl", rows[2 * k : 2 * k + 2])
    old = write_rows(here / "in/old/00.jsonl", rows_of("b", 4))

    source, more = {"name": "many", "id_column": "id"}, {"workers": 3, "slice_bytes": 1600}
    built(here, command, "old", sources=[{**source, "path": str(old.parent)}], **more)
    config(here, "new", sources=[{**source, "path": str(here / "in/many")}], **more)


OF_ROWS: dict[str, dict[str, Any]] = {
    "": {},
    ", duplicates dropped": {"documents": {"duplicates": "drop"}},
    ", near-duplicates dropped": {"documents": {"near_duplicates": {"threshold": 0.8}}},
    ", near-duplicates kept": {"documents": {"near_duplicates": {"action": "keep"}}},
    ", kept columns": {"source": {"keep_columns": ["n"]}},
    ", three splits": {"source": {"keep_columns": ["n"]}, "split": {"by": "n"}, "test_fraction": 0.3},
    ", compact": {"layout": "compact"},
}
TALKS = partial(prepare_streamed, made=talks_of, source={"messages_column": "talk", "chat_template": "x.jinja"})
STREAMED = {
    f"build, streamed{name}": Case(prepare, BUILD, patch=patch, is_for_all=prepare is not TALKS)
    for name, prepare, patch in (
        (", loss masks", TALKS, small_objects),
        *((name, partial(prepare_streamed, made=rows_of, **settings), small_objects) for name, settings in OF_ROWS.items()),
        (", processes", partial(prepare_streamed, made=rows_of), small_objects_by_processes),
        (", many small files", prepare_many_files, small_objects),
    )
}
"""Builds whose slices cross the borders of objects."""


CORPUS = ROOT.parent / "shared/corpus"
CORPUS_TOKENIZER = "cl100k_base"


def prepare_corpus(here: Path, command: Command, layout: str) -> None:
    """The real job. Its tokenizer is loaded here, so that forks have it. Only the tokens of the mmap layout are streamed."""
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(CORPUS.parent / "vocab/tiktoken_cache"))
    load_tokenizer(TokenizerConfig(name=CORPUS_TOKENIZER))
    source, more = {"path": str(CORPUS), "id_column": "id"}, {"slice_bytes": 4_000_000, "workers": 2}
    config(here, "new", sources=[source], tokenizer=CORPUS_TOKENIZER, layout=layout, **more)


CORPUS_CASES = {
    name: Case(partial(prepare_corpus, layout=layout), BUILD)
    for name, layout in (("build of the corpus, cl100k_base", "mmap"), ("build of the corpus, cl100k_base, compact", "compact"))
}
CASES = {
    **{f"build, {layout}": Case(partial(prepare_build, layout=layout), BUILD) for layout in LAYOUTS},
    "build, signed": Case(prepare_build, BUILD, signed=True),
    **STREAMED,
    "refresh": Case(prepare_refresh, "refresh HERE/new.json --no-server"),
    "retokenize": Case(
        prepare_retokenize,
        "retokenize HERE/out --no-server --trust-records --output HERE/other"
        ' --tokenizer {"name":"HERE/tokenizer.json","max_seconds":3600}',
    ),
    "train-tokenizer": Case(
        lambda here, command: built(here, command, "new", write_notes(here / "in/a.jsonl", 8)),
        "train-tokenizer HERE/out --no-server --vocab-size 260,264 --to HERE/tokenizers/{size}",
    ),
    "rollback": Case(prepare_rollback, "rollback HERE/out FIRST"),
    "forget": Case(prepare_forget, "forget HERE/out --ids HERE/ids --reason asked --no-server --quiet", patch=without_chance),
    "gc": Case(prepare_gc, "gc HERE/out --keep 1 --days 0 --delete"),
    "merge": Case(prepare_two, "merge HERE/out HERE/more HERE/out --no-server --workers 1"),
    "subset": Case(prepare_subset, "subset HERE/more HERE/out --ids HERE/ids --no-server --workers 1"),
    "shuffle": Case(prepare_two, "shuffle HERE/more HERE/out --no-server --workers 1"),
    "import": Case(prepare_import, "import HERE/files HERE/out --no-server --workers 1"),
    "export": Case(prepare_two, "export HERE/more HERE/exported --to megatron --tokens-per-file 400 --no-server --workers 1"),
}
