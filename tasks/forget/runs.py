"""Runs that saw forgotten documents, by their ledgers: at which steps, how often, and the edit that leaves them out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flat_tokens.ledger import Ledger
from flat_tokens.rows.views import SplitView
from flat_tokens.stores.local import real_path
from flat_tokens.stores.store import Store
from flat_tokens.tools.terminal import one_line
from tasks.forget.find import OfVersion
from tasks.models import Split
from tasks.output.paths import version_store

logger = logging.getLogger(__name__)

STEPS = 1_000
"""Steps of a run that are listed."""


def saw(root: Store, path: str, before: int | None, skip_from: int | None, holders: Sequence[OfVersion]) -> dict[str, Any]:
    """The visits of forgotten documents in a run, by its ledger, before a step; without one to its end. No batch is read.
    ValueError where the run has no end and no step is given, or the ledger is not understood.
    """
    ledger = Ledger.open(path)
    mixture = ledger.mixture()
    try:
        last = len(mixture) if before is None else min(before, len(mixture))
    except TypeError:
        if before is None:
            raise ValueError(f"{ledger.path}: the run has no end. Say --before STEP, or --skip-from STEP") from None
        last = before
    versions = {_place(version_store(root, of.version).url): of for of in holders}
    documents, visits, steps, sources = 0, 0, [np.empty(0, np.int64)], dict[str, str]()
    for name in ledger.names:
        where = ledger.dataset(name)
        of = versions.get(_place(where[0])) if where is not None else None
        view = mixture.views[mixture.names.index(name)]
        if of is None or where is None or not isinstance(view, SplitView):
            continue
        sources[name] = of.version
        split: Split = "validation" if where[1] == "validation" else "train"
        found = mixture.seen(of.numbers[split], before=last, source=name)
        documents += len(np.unique(found.asked))
        visits += len(found.step)
        steps.append(found.step.astype(np.int64))
    at = np.unique(np.concatenate(steps))
    return {
        "before": last,
        "documents": documents,
        "visits": visits,
        "first_step": int(at[0]) if len(at) else None,
        "last_step": int(at[-1]) if len(at) else None,
        "steps": at[:STEPS].tolist(),
        "sources": sources,
        "skip_from": skip_from,
    }


def _place(path_or_url: str) -> str:
    return path_or_url.rstrip("/") if "://" in path_or_url else real_path(path_or_url)


def skip(root: Store, path: str, run: Mapping[str, Any], successors: Mapping[str, str]) -> dict[str, Any]:
    """Edit the ledger of a run, so that from its ``skip_from`` on it reads successors of the versions that it names. Return the
    facts of the run with the names of its new sources, or why there are none.
    """
    if run["skip_from"] is None:
        return dict(run)
    try:
        replaced = {}
        for name, version in run["sources"].items():
            place = version_store(root, successors[version]).url
            replaced[name] = Ledger.open(path).replace(run["skip_from"], name, place)
    except (OSError, ValueError) as error:
        logger.warning("The ledger %s is not edited: %s", path, error)
        return {**run, "not_edited": one_line(error)}
    return {**run, "replaced_by": replaced}
