"""Histories of versions that wait: sources lose documents, refreshes hold versions, people approve and reject, pin, roll back,
forget documents and collect garbage, and any of it is killed. ``latest`` names nothing that neither a gate nor a person let
through, and no byte of a forgotten document's own tokens is found.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from flat_tokens.forgotten import read_forgotten
from flat_tokens.keys import document_keys
from flat_tokens.stores.store import Store
from flat_tokens.tools.remains import FRAME
from tasks.output.pointer import Pointer, read_pointer
from tests.faults.commands import Flaw, is_published
from tests.faults.histories import COLLECT, Histories, History
from tests.faults.inject import KILLS, Ended, Fault
from tests.made import read_docs

STEPS = 14
"""Commands in a history."""
KILLED = 0.5
CHANGES_OF = {"refresh": 90, "build": 90, "gc": 40, "forget": 300}
"""A command is killed at one of so many changes of the disk, or is not; others have fewer."""
FEW_CHANGES = 25
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
    data = [one.encode() for one in ids]
    keys = document_keys(np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)]))
    gone = read_forgotten(Store.at(out)).those(keys)
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
                way = chance.choice(KILLS)
                fault = Fault(way[0], chance.randrange(1, CHANGES_OF.get(step, FEW_CHANGES) + 1), way[1])
                flaws += self._made(f"{number}, killed", step, text, fault, out)
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
        elif fault is None:
            flaws += self._wrong_status(when, step, text, before, after, ended)
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

    def _wrong_status(self, when: str, step: str, text: str, before: Pointer, after: Pointer, ended: Ended) -> Iterator[Flaw]:
        """What is wrong with how an undisturbed command ended."""
        status = ended.value.status if ended.value is not None else None
        if step in ("refresh", "gc", "forget") and status:
            yield Flaw("message", f"{when}: it failed: {ended.output}")
        if step in ("approve", "reject"):
            third = text.split()[2]
            named = third if third != "--reason" else None
            mine = waiting(before) if named in (None, waiting(before)) else None
            done = {"approve": "approved", "reject": "rejected"}[step]
            if mine and (status or decided(after, None) != (done, mine)):
                yield Flaw("message", f"{when}: {mine} waited, and was not {done}: {ended.output}")
            if not status and decided(after, named)[0] != done:
                yield Flaw("message", f"{when}: nothing was {done}, and it says that it did so: {ended.output}")

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
