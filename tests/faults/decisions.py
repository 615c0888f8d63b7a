"""Histories of versions that wait: sources lose documents, refreshes hold versions, people approve and reject, pin, roll back and
collect garbage, and any of it is killed. ``latest`` names nothing that neither a gate nor a person let through.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.cases import Words
from tests.faults.commands import MARKERS, Flaw, differences
from tests.faults.histories import Histories, History
from tests.faults.inject import KILL, KILL_WITHIN, Ended, Fault
from tests.faults.support import version_digests

STEPS = 14
"""Commands in a history."""
KILLED = 0.5
CHANGES_OF = {"refresh": 90, "build": 90, "gc": 40}
"""A command is killed at one of so many changes of the disk, or is not; others have fewer."""
FEW_CHANGES = 25
OFTEN = ("refresh", "refresh", "refresh", "refresh", "approve", "approve", "rollback", "rollback")
CHOICES = (*OFTEN, "build", "reject", "pin", "gc")


class State(NamedTuple):
    """What decides at an output: the pointer, and the version that waits."""

    version: str | None
    sequence: int
    former: tuple[str, ...]
    withdrawn: tuple[str, ...]
    waits: dict[str, Any] | None
    rejected: tuple[str, ...]

    @classmethod
    def of(cls, out: Path) -> State:
        pointer, held = (_json(out / name) for name in ("latest.json", "held.json"))
        former, withdrawn = (tuple(one["version"] for one in pointer.get(name, ())) for name in ("former", "withdrawn"))
        rejected = tuple(one["version"] for one in held.get("rejected", ()))
        return cls(pointer.get("version"), pointer.get("sequence", 0), former, withdrawn, held.get("candidate"), rejected)

    @property
    def candidate(self) -> str | None:
        """The version that may be approved."""
        if self.waits is None or self.waits["sequence"] != self.sequence or self.decision == "rejected":
            return None
        return str(self.waits["version"])

    @property
    def decision(self) -> str | None:
        return self.waits["decision"]["what"] if self.waits and self.waits["decision"] else None


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def counts(out: Path, version: str) -> dict[str, int]:
    """Documents of each source."""
    totals = _json(out / "versions" / version / "manifest.json")["totals"]["documents"]["by_source"]
    return {one["name"]: one["written"] for one in totals}


def lets_through(before: dict[str, int], now: dict[str, int]) -> bool:
    """Whether gates that nobody set let a version through, in words of their own."""
    return all(count >= 1 and 2 * count >= before.get(name, 0) for name, count in now.items())


class Decisions(Histories):
    """Plays histories of decisions below *scratch*, in forks of this process, which must not have threads."""

    def play(self, seed: int, variant: str) -> list[Flaw]:
        shutil.rmtree(self._here, ignore_errors=True)
        history = History(self._here, seed, variant, gates=True)
        chance, out, flaws = random.Random(f"decisions {seed}"), self._here / "out", list[Flaw]()
        names = list[str]()
        history.change()
        for number in range(STEPS):
            step = chance.choice(CHOICES) if number else "refresh"
            if step in ("refresh", "build") and number:
                (history.change, history.lose, history.lose, history.restore)[chance.randrange(4)]()
            if (candidate := State.of(out).candidate) and candidate not in names:
                names.append(candidate)
            if step == "approve" and chance.random() < 0.3:  # what was the candidate is none any more
                flaws += self._made(f"{number}, before", "rollback", ["rollback", str(out)], None, out)
            words = self._words_of(step, history, chance, names)
            if chance.random() < KILLED:
                way = chance.choice([("change", KILL), ("change", KILL), ("write", KILL_WITHIN)])
                fault = Fault(way[0], chance.randrange(1, CHANGES_OF.get(step, FEW_CHANGES) + 1), way[1])
                flaws += self._made(f"{number}, killed", step, words, fault, out)
                if chance.random() < 0.3:
                    continue  # what comes next meets what it left
            flaws += self._made(str(number), step, words, None, out)
            if flaws:
                break
        return flaws or [*self._at_the_end(history, out)]

    def _words_of(self, step: str, history: History, chance: random.Random, names: list[str]) -> Words:
        out = str(self._here / "out")
        match step:
            case "refresh" | "build":
                history.turn()
                return [step, *self._words(history)[1:]]
            case "approve" | "reject":
                named = [chance.choice(names)] if names and chance.random() < 0.5 else []
                return [step, out, *named, "--why", f"because {step}", "--no-server", "--quiet"]
            case "gc":
                return ["gc", out, "--keep", "1", "--days", "0", "--delete"]
            case _:
                return [step, out]

    def _made(self, when: str, step: str, words: Words, fault: Fault | None, out: Path) -> list[Flaw]:
        """What does not hold behind a command."""
        before = State.of(out)
        of_before = counts(out, before.version) if before.version else {}
        ended = self._run(words, fault)
        after, when = State.of(out), f"{when}: {step}"
        flaws = [*self._looked(when)]
        if wrong := self._wrong_move(step, before, of_before, after, out):
            flaws.append(Flaw("pointer", f"{when}: latest went from {before.version} to {after.version}: {wrong}"))
        if after.candidate and not any((out / "versions" / after.candidate / marker).exists() for marker in MARKERS):
            flaws.append(Flaw("readers", f"{when}: {after.candidate} waits, and is gone"))
        if ended.hung or ended.error or "Traceback" in ended.output:
            flaws.append(Flaw("message", f"{when}: {ended.error or ended.output}"))
        elif fault is None:
            flaws += self._wrong_status(when, step, words, before, after, ended)
        return flaws

    def _wrong_move(self, step: str, before: State, of_before: dict[str, int], after: State, out: Path) -> str:
        """Why ``latest`` may not have moved so; nothing where it may."""
        now = after.version
        if now == before.version:
            return "" if after.sequence == before.sequence else f"its number went from {before.sequence} to {after.sequence}"
        if now is None or after.sequence <= before.sequence:
            return f"its number went from {before.sequence} to {after.sequence}"
        is_approved = before.decision == "approved" and before.candidate == now
        match step:
            case "refresh" if now in before.rejected or now in before.withdrawn:
                return "it was rejected, or withdrawn"
            case "build" if now == before.candidate and not is_approved:
                return "it waits"
            case "build":  # no gate of its own
                return "it was rejected" if now in before.rejected else ""
            case "refresh":
                return "" if is_approved or lets_through(of_before, counts(out, now)) else "no gate let it through"
            case "approve":
                return "" if now == before.candidate else "it did not wait"
            case "rollback":
                return "" if now in before.former else "it was never the latest"
        return "it may not move"

    def _wrong_status(self, when: str, step: str, words: Words, before: State, after: State, ended: Ended) -> Iterator[Flaw]:
        """What is wrong with how an undisturbed command ended."""
        status = ended.value.status if ended.value is not None else None
        if step in ("refresh", "gc") and status:
            yield Flaw("message", f"{when}: it failed: {ended.output}")
        if step in ("approve", "reject"):
            named = words[2] if words[2] != "--why" else None
            mine = before.candidate if named in (None, before.candidate) else None
            done = {"approve": "approved", "reject": "rejected"}[step]
            if mine and before.decision is None and (status or after.decision != done):
                yield Flaw("message", f"{when}: {mine} waited, and was not {done}: {ended.output}")
            if not status and after.decision != done:
                yield Flaw("message", f"{when}: nothing was {done}, and it says that it did so: {ended.output}")

    def _at_the_end(self, history: History, out: Path) -> Iterator[Flaw]:
        """The sources give what a build from nothing gives, as soon as a person lets it through."""
        shutil.rmtree(self._here / "anew", ignore_errors=True)
        self._run(self._words(history), None)
        self._run(["approve", str(out), "--why", "the last one", "--no-server", "--quiet"], None)
        settings = json.loads(Path(history.settings("anew")).read_text())
        Path(history.settings("anew")).write_text(json.dumps({**settings, "publish": {"defaults": False}}))
        ended = self._run(["refresh", str(self._here / "anew.json"), "--no-server"], None)
        if ended.value is None or ended.value.status:
            yield Flaw("message", f"from nothing, it failed: {ended.output}{ended.error}")
            return
        anew, now = _json(self._here / "anew" / "latest.json")["version"], State.of(out)
        if now.version != anew and anew not in (*now.withdrawn, *now.rejected):
            yield Flaw("pointer", f"the end: latest is {now.version}, but the sources give {anew}")
        elif now.version == anew:
            yield from differences(*(version_digests(self._here / name, anew) for name in ("out", "anew")))
        lines = (out / "runs" / "refreshes.jsonl").read_text().splitlines() if (out / "runs/refreshes.jsonl").exists() else []
        decided = [one["decision"] for one in map(json.loads, lines) if one.get("decision")]
        if len({json.dumps(one) for one in decided}) < len(decided):
            yield Flaw("message", f"the end: a decision is recorded twice: {decided}")
        if now.decision and now.waits and now.waits["decision"] not in decided:
            yield Flaw("message", f"the end: {now.waits['decision']} is not in the history")
        left = sorted(path.name for path in out.glob("_staging/*"))
        if left:
            yield Flaw("leftovers", f"the end: _staging has {left}")
