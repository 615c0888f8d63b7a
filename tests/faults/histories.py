"""Histories of edits: sources change, refreshes are killed and run again, and each version is that of a build from nothing."""

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import tasks.assemble.write
import tasks.tokenize.segments
from tests.faults.cases import Case, words_of
from tests.faults.commands import Bench, Flaw, command, differences, import_all, named, seen
from tests.faults.inject import KILLS, Ended, Fault, Watch
from tests.faults.support import Settings, version_digests
from tests.sources import write_rows

KEPT: Settings = {"keep_columns": ["url", "score"]}
DROPPED: Settings = {"duplicates": "drop"}
VARIANTS = {
    "refresh": ({}, {}),
    "refresh, columns kept": (KEPT, {}),
    "refresh, duplicates dropped": ({}, DROPPED),
    "refresh, columns kept and duplicates dropped": (KEPT, DROPPED),
}
"""What a history has besides: settings of the source, and of documents."""

CHANGES = 5
"""Of the sources in a history, with a version behind each."""
COLLECT = "gc HERE/out --keep 1 --days 0 --delete"
MOST_KILLS = 3
"""In a row, before a refresh comes to its end."""


class Document(NamedTuple):
    """A row of a source, with its columns."""

    id: str
    text: str
    url: str | None
    score: float | None


class History:
    """The sources below a directory, and what becomes of them. All of it follows from the seed."""

    def __init__(self, here: Path, seed: int, variant: str, *, gates: bool = False) -> None:
        self.here, self.chance = here, random.Random(seed)
        kept, dropped = VARIANTS[variant]
        self.ending = self.chance.choice(["jsonl", "jsonl.zst", "parquet"])  # a source is of one format
        self._count = 0
        self._files = {name: self._documents(self.chance.randrange(1, 40)) for name in "abc"}
        steps = [{"use": "length", "max_characters": 150}, {"use": "normalize"}] if self.chance.random() < 0.4 else []
        self._of_this_refresh: Settings = {}
        self._lost: dict[str, list[Document]] | None = None
        self.told: Settings = {
            "name": "history",
            "source": {"path": str(here / "in"), "id_column": "id", **kept},
            "tokenizer": "bytes",
            "documents": {"steps": steps, **dropped},
            "validation_fraction": 0.3,
            "layout": self.chance.choice(["mmap", "compact"]),
            "workers": 1,
            **({} if gates else {"publish": {"defaults": False}}),
        }

    def _documents(self, count: int) -> list[Document]:
        """New ones, of which some have the text of others."""
        found = []
        for _ in range(count):
            self._count += 1
            text = f"text {self._count}: " + "salt wind " * self.chance.randrange(20)
            if self.chance.random() < 0.3:
                text = f"text {self.chance.randrange(9)}\r\n"
            score = None if self.chance.random() < 0.3 else self.chance.choice([1.0, 2.5])
            found.append(Document(str(self._count), text, self.chance.choice([None, "x", "y" * 30]), score))
        return found

    def change(self) -> None:
        """Edit some files, and write all."""
        for _ in range(self.chance.randrange(1, 5)):
            name = self.chance.choice(sorted(self._files))
            rows = self._files[name]
            match self.chance.choice(["add", "drop", "edit", "column", "move", "clear", "new", "gone", "join"]):
                case "add":
                    rows[self.chance.randrange(len(rows) + 1) : 0] = self._documents(self.chance.randrange(6))
                case "drop" if len(rows) > 1:
                    del rows[self.chance.randrange(len(rows))]
                case "edit":
                    i = self.chance.randrange(len(rows))
                    rows[i] = rows[i]._replace(text=f"edited {self.chance.randrange(4)}")
                case "column":
                    i = self.chance.randrange(len(rows))
                    rows[i] = rows[i]._replace(score=self.chance.choice([None, 3.0, 4.5]))
                case "move":
                    other = self.chance.choice(sorted(self._files))
                    self._files[name], self._files[other] = self._files[other], self._files[name]
                case "clear":
                    del rows[1:]
                case "new" if len(self._files) < 5:
                    self._files[f"new{self._count}"] = self._documents(self.chance.randrange(1, 12))
                case "gone" if len(self._files) > 2:
                    del self._files[name]
                case "join" if len(self._files) > 2:
                    del self._files[name]
                    self._files[self.chance.choice(sorted(self._files))].extend(rows)
        self._write()

    def lose(self) -> None:
        """Lose nine tenths of the documents, as a source does overnight."""
        self._lost = self._lost or {name: [*rows] for name, rows in self._files.items()}
        for rows in self._files.values():
            del rows[max(len(rows) // 10, 1) :]
        self._write()

    def restore(self) -> None:
        """Get back what was lost last, if anything was."""
        self._files, self._lost = self._lost or self._files, None
        self._write()

    def _write(self) -> None:
        self.write_without(set(), "in")

    @property
    def unique(self) -> list[str]:
        """Ids of documents that have the text of no other one: it begins ``text ID:``."""
        return [one.id for rows in self._files.values() for one in rows if one.text.startswith(f"text {one.id}: ")]

    @property
    def ids(self) -> list[str]:
        """Ids of all documents."""
        return [one.id for rows in self._files.values() for one in rows]

    def write_without(self, ids: set[str], directory: str) -> None:
        """Write the sources without some documents, and without files that have no others."""
        shutil.rmtree(self.here / directory, ignore_errors=True)
        (self.here / directory).mkdir(parents=True)
        for name, documents in self._files.items():
            if kept := [one for one in documents if one.id not in ids]:
                self._put(self.here / directory / f"{name}.{self.ending}", kept)

    def _put(self, path: Path, documents: list[Document]) -> None:
        rows = [one._asdict() for one in documents]
        if self.ending == "parquet":
            kinds = [(name, pa.float64() if name == "score" else pa.string()) for name in Document._fields]
            size, codec = self.chance.choice([7, 50]), self.chance.choice(["snappy", "zstd"])
            pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), path, row_group_size=size, compression=codec)
            return
        write_rows(path, rows)

    def configure(self, output: str, **more: Any) -> None:
        """Write the configuration of a refresh into *output*."""
        told = {"output": str(self.here / output), **self.told, **self._of_this_refresh, **more}
        (self.here / f"{output}.json").write_text(json.dumps(told))

    def turn(self) -> None:
        """Choose the settings that differ from refresh to refresh."""
        slice_bytes, seed = self.chance.choice([900, 6000]), self.chance.choice([0, 0, 1])
        self._of_this_refresh = {"slice_bytes": slice_bytes, "split_seed": seed}

    def fault(self, counts: Counter[str]) -> Fault:
        """A death at one of as many operations as the last command had."""
        kind, way = self.chance.choice(KILLS)
        return Fault(kind, self.chance.randrange(1, max(counts[kind], 60) + 1), way)


def small_segments() -> None:
    """From now on a slice has many segments, and a version many spans."""
    tasks.tokenize.segments.MEAN_BYTES, tasks.tokenize.segments.MOST_BYTES = 400, 2000
    tasks.assemble.write.SPAN_TOKENS = tasks.assemble.write.SPAN_DOCUMENTS = 1


IN_SMALL_SEGMENTS = Case(lambda here, command: None, "", patch=small_segments)


class Histories:
    """Plays histories in the directory of a bench, in forks of this process, which must not have threads."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._here, self._is_warm = bench, bench.here, False

    def play(self, seed: int, variant: str) -> list[Flaw]:
        """Play a history; what did not hold."""
        shutil.rmtree(self._here, ignore_errors=True)
        history = History(self._here, seed, variant)
        counts, flaws = Counter(), []
        for number in range(CHANGES):
            history.change()
            history.turn()
            for _ in range(history.chance.randrange(MOST_KILLS + 1)):
                self._refresh(history, history.fault(counts))
                flaws += self._looked(f"killed in {number}")
                if history.chance.random() < 0.3:  # the next refresh meets other sources
                    history.change()
            ended = self._refresh(history)
            if ended.value is None or ended.value.status:
                return [*flaws, Flaw("message", f"{number}: it failed: {ended.output}{ended.error}")]
            counts = ended.value.counts
            flaws += [*self._looked(f"behind {number}"), *self._differences(history, number)]
            if history.chance.random() < 0.4:
                self._run(COLLECT, history.fault(Counter()) if history.chance.random() < 0.5 else None)
                flaws += self._looked(f"collected behind {number}")
        return flaws

    def _refresh(self, history: History, fault: Fault | None = None) -> Ended:
        history.configure("out")
        return self._run("refresh HERE/out.json --no-server", fault)

    def _differences(self, history: History, number: int) -> Iterator[Flaw]:
        """What differs from a build from nothing."""
        history.configure("anew")
        out, anew = json.loads((self._here / "out/latest.json").read_bytes())["version"], self._from_nothing()
        if out != anew:
            yield Flaw("pointer", f"{number}: {out}, not {anew}")
            return
        yield from named([*self._unlike(out), *self._left()], number)

    def _from_nothing(self) -> str:
        """The version of a build from nothing, or why it failed."""
        shutil.rmtree(self._here / "anew", ignore_errors=True)
        ended = self._run("refresh HERE/anew.json --no-server")
        if ended.value is None or ended.value.status:
            return f"from nothing, it failed: {ended.output}{ended.error}"
        return str(json.loads((self._here / "anew/latest.json").read_bytes())["version"])

    def _unlike(self, version: str) -> Iterator[Flaw]:
        """What differs in a version from that of a build from nothing."""
        return differences(*(version_digests(self._here / name, version) for name in ("out", "anew")))

    def _left(self) -> Iterator[Flaw]:
        if left := sorted(path.name for path in (self._here / "out").glob("_staging/*")):
            yield Flaw("leftovers", f"_staging has {left}")

    def _looked(self, when: str) -> list[Flaw]:
        """What readers find that is wrong."""
        ended = self._bench.child(lambda: seen(self._here), IN_SMALL_SEGMENTS)
        return [] if ended.error is None and not ended.hung else [Flaw("readers", f"{when}: {ended.error or 'it did not end'}")]

    def _run(self, text: str, fault: Fault | None = None) -> Ended:
        words = words_of(text, self._here)
        if not self._is_warm:
            modules = self._bench.child(lambda: (command(words, None), list(sys.modules))[1], IN_SMALL_SEGMENTS).value
            import_all(modules or ())
            self._is_warm = True
            shutil.rmtree(self._here / "out", ignore_errors=True)
        return self._bench.child(lambda: command(words, Watch(self._here, fault)), IN_SMALL_SEGMENTS)
