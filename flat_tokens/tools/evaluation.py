"""Evaluation sets that documents were compared with, by the step ``decontaminate``: what a manifest says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flat_tokens.annotations import JsonFacts
from flat_tokens.tools.terminal import plural


def names_of_sets(steps: Sequence[JsonFacts]) -> list[str]:
    """The evaluation sets of *steps*, as manifests have these: names such as ``decontaminate.gsm8k``."""
    return [f"{step['name']}.{one['name']}" for step in steps for one in _against(step)]


class SetReport(NamedTuple):
    """An evaluation set in the totals of a dataset. ``questions``: of the set, None where that is not recorded; ``too_short``: of
    these, with too few words to be looked for. ``documents``: that have some of it, ``share``: of all that were read.
    ``examples``: some of these documents.
    """

    step: str
    name: str
    questions: int | None
    too_short: int
    documents: int
    share: float
    examples: Sequence[JsonFacts]

    @property
    def sentence(self) -> str:
        """Such as ``gsm8k: in 12 documents, 0.03%, of 1,319 questions (7 too short)``."""
        short = f" ({self.too_short:,} too short)" if self.too_short else ""
        of = "" if self.questions is None else f", of {plural(self.questions, 'question')}{short}"
        return f"{self.name}: in {plural(self.documents, 'document')}, {self.share:.2%}{of}"

    def lines(self) -> Iterator[str]:
        """Each example in a sentence."""
        for one in self.examples:
            yield f"{one.get('file')}, row {one.get('row')}: question {one.get('question')}"


def set_reports(steps: Sequence[JsonFacts], documents: JsonFacts) -> list[SetReport]:
    """Reports of all evaluation sets, of the *steps* and the totals of *documents* of a manifest."""
    facts = {f"{step['name']}.{one['name']}": one for step in steps for one in _against(step)}
    reports = []
    for name, count in (documents.get("matches") or {}).items():
        step, _, of = name.partition(".")
        one = facts.get(name, {})
        questions, too_short = one.get("questions"), one.get("too_short", 0)
        share = count / max(documents.get("read", 0), 1)
        examples = (documents.get("examples") or {}).get(name, ())
        reports.append(SetReport(step, of, questions, too_short, count, share, examples))
    return reports


def _against(step: JsonFacts) -> Sequence[JsonFacts]:
    """The evaluation sets of a step that a build has read."""
    against = (step.get("options") or {}).get("against") if step.get("use") == "decontaminate" else None
    return [one for one in against or () if isinstance(one, Mapping) and "digest" in one]
