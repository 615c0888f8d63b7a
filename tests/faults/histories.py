"""Histories of edits: sources change, refreshes are killed and run again, and each version is that of a build from nothing.

And histories of versions that wait: sources lose documents, refreshes hold versions, people approve and reject, pin, roll back,
forget documents and collect garbage, and any of it is killed. ``latest`` names nothing that neither a gate nor a person let
through, and no byte of a forgotten document's own tokens is found.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import tasks.assemble.write
import tasks.tokenize.segments
from flat_tokens.forgotten import read_forgotten
from flat_tokens.keys import keys_of_bytes
from flat_tokens.stores.store import Store
from flat_tokens.tools.remains import FRAME
from tasks.output.pointer import Pointer, read_pointer
from tests.faults.cases import Case, words_of
from tests.faults.commands import Bench, Flaw, command, differences, is_published, named, seen
from tests.faults.inject import KILLS, Ended, Fault, Watch
from tests.faults.support import Settings, version_digests
from tests.made import read_docs
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


CHANGES_OF = {"refresh": 500, "build": 500, "gc": 300, "forget": 300}
"""A command is killed at one of the first this many changes of the disk; most have ended by then. Other commands have fewer."""
FEW_CHANGES = 25
CHANGES_A_WRITE = 6
"""Of this many changes one is a write."""


def kill(chance: random.Random, step: str) -> Fault:
    kind, way = chance.choice(KILLS)
    most = CHANGES_OF.get(step, FEW_CHANGES) // (CHANGES_A_WRITE if kind == "write" else 1)
    return Fault(kind, chance.randrange(1, most + 1), way)


def small_segments() -> None:
    """From now on a slice has many segments, and a version many spans."""
    tasks.tokenize.segments.MEAN_BYTES, tasks.tokenize.segments.MOST_BYTES = 400, 2000
    tasks.assemble.write.SPAN_TOKENS = tasks.assemble.write.SPAN_DOCUMENTS = 1


IN_SMALL_SEGMENTS = Case(lambda here, command: None, "", patch=small_segments)


class Histories:
    """Plays histories in the directory of a bench, in forks of this process, which must not have threads."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._here = bench, bench.here
        bench.calm("refresh")  # so that it has imported what forks need

    def play(self, seed: int, variant: str) -> list[Flaw]:
        """Play a history; what did not hold."""
        shutil.rmtree(self._here, ignore_errors=True)
        history = History(self._here, seed, variant)
        flaws = []
        for number in range(CHANGES):
            history.change()
            history.turn()
            for _ in range(history.chance.randrange(MOST_KILLS + 1)):
                self._refresh(history, kill(history.chance, "refresh"))
                flaws += self._looked(f"killed in {number}")
                if history.chance.random() < 0.3:  # the next refresh meets other sources
                    history.change()
            ended = self._refresh(history)
            if ended.value is None or ended.value.status:
                return [*flaws, Flaw("message", f"{number}: it failed: {ended.output}{ended.error}")]
            flaws += [*self._looked(f"behind {number}"), *self._differences(history, number)]
            if history.chance.random() < 0.4:
                self._run(COLLECT, kill(history.chance, "gc") if history.chance.random() < 0.5 else None)
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
        return self._bench.child(lambda: command(words, Watch(self._here, fault)), IN_SMALL_SEGMENTS)


STEPS = 14
"""Commands in a history."""
KILLED = 0.5
OFTEN = ("refresh", "refresh", "refresh", "refresh", "approve", "approve", "rollback", "rollback")
CHOICES = (*OFTEN, "build", "reject", "pin", "gc", "forget", "forget")


def record(out: Path) -> Pointer:
    """What decides at an output."""
    return read_pointer(Store.at(out))


def waiting(pointer: Pointer) -> str | None:
    """The version that waits."""
    return pointer.candidate and pointer.candidate.version


def decided(pointer: Pointer, version: str | None) -> tuple[str, str]:
    """The last decision of a version, or of any, and its version."""
    found = [one for one in pointer.decisions if version in (None, one.version) and one.decision]
    return (found[-1].decision.what, found[-1].version) if found else ("", "")


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def successors(out: Path) -> dict[str, str]:
    """Versions that lost forgotten documents, by those which took their places."""
    return dict(_json(out / "forgotten/list.json").get("successors", {}))


def forgotten(out: Path, ids: list[str]) -> set[str]:
    """Those of *ids* that are forgotten, by the list of an output."""
    gone = read_forgotten(Store.at(out)).those(keys_of_bytes([one.encode() for one in ids]))
    return {one for one, is_gone in zip(ids, gone.tolist(), strict=True) if is_gone}


def places_of(out: Path, ids: set[str]) -> Iterator[str]:
    """Objects below an output with tokens of documents that no other one has, as they are or within frames of zstd."""
    marks = [(np.frombuffer(f"ext {one}: ".encode(), np.uint8).astype("<u4") + 1) * np.uint32(2) for one in sorted(ids)]
    for path in (path for path in sorted(out.rglob("*")) if path.is_file() and ids):
        data = path.read_bytes()
        parts = [data]
        at = data.find(FRAME)
        while at >= 0:
            with contextlib.suppress(zstandard.ZstdError):
                parts.append(zstandard.ZstdDecompressor().decompressobj().decompress(data[at:]))
            at = data.find(FRAME, at + 1)
        for one, mark in zip(sorted(ids), marks, strict=True):
            if any(mark.tobytes() in part for part in parts):
                yield f"{path.relative_to(out)} has document {one}"


def documents_of(version: Path) -> dict[str, list[tuple[object, ...]]]:
    """Tokens and keys of all documents of a version, in order."""
    return {name: [doc[:2] for doc in docs] for name, docs in read_docs(version).items()}


def counts(out: Path, version: str) -> dict[str, int]:
    """Documents of each source."""
    totals = _json(out / "versions" / version / "manifest.json")["totals"]["documents"]["by_source"]
    return {one["name"]: one["written"] for one in totals}


class Decisions(Histories):
    """Plays histories of decisions below *scratch*, in forks of this process, which must not have threads."""

    def play(self, seed: int, variant: str) -> list[Flaw]:
        shutil.rmtree(self._here, ignore_errors=True)
        history = History(self._here, seed, variant, gates=True)
        chance, out, flaws = random.Random(f"decisions {seed}"), self._here / "out", []
        names = []
        self._asked = set()
        history.change()
        for number in range(STEPS):
            step = chance.choice(CHOICES) if number else "refresh"
            if step in ("refresh", "build") and number:
                (history.change, history.lose, history.lose, history.restore)[chance.randrange(4)]()
            if step == "forget" and (record(out).version is None or not history.unique):
                step = "refresh"
            if (candidate := waiting(record(out))) and candidate not in names:
                names.append(candidate)
            if step == "approve" and chance.random() < 0.3:  # what was the candidate is none any more
                flaws += self._made(f"{number}, before", "rollback", "rollback HERE/out", None, out)
            text = self._text_of(step, history, chance, names)
            if chance.random() < KILLED:
                flaws += self._made(f"{number}, killed", step, text, kill(chance, step), out)
                if chance.random() < 0.3:
                    continue  # what comes next meets what it left
            flaws += self._made(str(number), step, text, None, out)
            if flaws:
                break
        return flaws or [*self._at_the_end(history, out)]

    def _text_of(self, step: str, history: History, chance: random.Random, names: list[str]) -> str:
        """The command of a step."""
        match step:
            case "refresh" | "build":
                history.turn()
                history.configure("out")
                return f"{step} HERE/out.json --no-server"
            case "approve" | "reject":
                version = f" {chance.choice(names)}" if names and chance.random() < 0.5 else ""
                return f"{step} HERE/out{version} --reason because-{step} --no-server --quiet"
            case "forget":
                asked = chance.sample(history.unique, min(2, len(history.unique)))
                self._asked |= {*asked}
                (self._here / "ids").write_text("".join(f"{one}\n" for one in asked))
                return "forget HERE/out --ids HERE/ids --reason asked --allow-unknown --no-server --quiet"
            case "gc":
                return COLLECT
        return f"{step} HERE/out"

    def _made(self, when: str, step: str, text: str, fault: Fault | None, out: Path) -> list[Flaw]:
        """What does not hold behind a command."""
        before = record(out)
        of_before = counts(out, before.version) if before.version else {}
        ended = self._run(text, fault)
        after, when = record(out), f"{when}: {step}"
        flaws = [*self._looked(when)]
        if step == "forget" and fault is None:
            gone = forgotten(out, sorted(self._asked))
            flaws += [Flaw("bytes", f"{when}: {place}") for place in places_of(out, gone)]
            # Of an earlier one that was killed before its list was written, nobody knows.
            asked = {*(self._here / "ids").read_text().split()}
            flaws += [Flaw("bytes", f"{when}: {one} is not forgotten") for one in sorted(asked - gone)]
        if wrong := self._wrong_move(step, before, of_before, after, out):
            flaws.append(Flaw("pointer", f"{when}: latest went from {before.version} to {after.version}: {wrong}"))
        are_pinned = all({*after.pins} & {one, successors(out).get(one)} for one in before.pins)
        if after.decisions[: len(before.decisions)] != before.decisions or not are_pinned:
            flaws.append(Flaw("pointer", f"{when}: decisions or pins are lost: {before}, then {after}"))
        if (candidate := waiting(after)) and not is_published(out / "versions" / candidate):
            flaws.append(Flaw("readers", f"{when}: {candidate} waits, and is gone"))
        if ended.hung or ended.error or "Traceback" in ended.output:
            flaws.append(Flaw("message", f"{when}: {ended.error or ended.output}"))
        elif fault is None and step in ("refresh", "gc", "forget") and ended.value.status:
            flaws.append(Flaw("message", f"{when}: it failed: {ended.output}"))
        return flaws

    def _wrong_move(self, step: str, before: Pointer, of_before: dict[str, int], after: Pointer, out: Path) -> str:
        """Why ``latest`` may not have moved so; nothing where it may."""
        now = after.version
        # A successor takes the place of an earlier version in the pointer, too.
        is_renamed = any(before.names(of) != after.names(of) for of in ("former", "withdrawn"))
        is_same = now == before.version
        if not (after.sequence == before.sequence or is_renamed if is_same else now and after.sequence > before.sequence):
            return f"its number went from {before.sequence} to {after.sequence}"
        if is_same:
            return ""
        replaced = successors(out)
        if step in ("forget", "refresh", "build") and before.version is not None and replaced.get(before.version) == now:
            return ""  # the same without documents that are forgotten
        rejected, withdrawn = ({*before.names(of), *map(replaced.get, before.names(of))} for of in ("rejected", "withdrawn"))
        candidate = waiting(before)
        match step:
            case "refresh" if now in rejected | withdrawn:
                return "it was rejected, or withdrawn"
            case "build" if now in (candidate, replaced.get(candidate or "")):
                return "it waits"
            case "build":  # no gate of its own
                return "it was rejected" if now in rejected else ""
            case "refresh":
                # A forgetting that was killed is brought to its end first: the gates look at what is left of the version.
                former = counts(out, successor) if (successor := replaced.get(before.version or "")) else of_before
                # What gates that nobody set let through, in words of their own.
                written = counts(out, now).items()
                is_right = all(count >= 1 and 2 * count >= former.get(name, 0) for name, count in written)
                return "" if is_right else "no gate let it through"
            case "approve":
                return "" if now == candidate and decided(after, None) == ("approved", now) else "it did not wait"
            case "rollback":
                return "" if now in before.names("former") else "it was never the latest"
        return "it may not move"

    def _at_the_end(self, history: History, out: Path) -> Iterator[Flaw]:
        """The sources give what a build from nothing gives, as soon as a person lets it through."""
        self._refresh(history)
        self._run("approve HERE/out --reason the-last-one --no-server --quiet")
        gone = forgotten(out, sorted({*self._asked, *history.ids})) if (out / "forgotten").exists() else set()
        if gone >= {*history.ids}:  # a source without files is refused
            yield from (Flaw("bytes", f"the end: {place}") for place in places_of(out, gone & self._asked))
            return
        more = {}
        if gone:
            history.write_without(gone, "in-anew")
            more = {"source": {**history.told["source"], "path": str(self._here / "in-anew")}}
        history.configure("anew", **more, publish={"defaults": False})
        anew, now = self._from_nothing(), record(out)
        if "failed" in anew:
            yield Flaw("message", anew)
            return
        if gone:
            yield from (Flaw("bytes", f"the end: {place}") for place in places_of(out, gone & self._asked))
            is_chosen = now.withdrawn or now.rejected  # what the sources give may be one of these
            versions = out / f"versions/{now.version}", self._here / f"anew/versions/{anew}"
            if not is_chosen and documents_of(versions[0]) != documents_of(versions[1]):
                yield Flaw("bytes", f"the end: {now.version} has not the documents of the sources without {sorted(gone)}")
            anew = now.version
        if now.version != anew and anew not in now.names("withdrawn", "rejected"):
            yield Flaw("pointer", f"the end: latest is {now.version}, but the sources give {anew}")
        elif now.version == anew and not gone:
            yield from self._unlike(anew)
        yield from self._left()
