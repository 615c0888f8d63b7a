"""The page of a version that waits for a person, the artifact ``NAME-held``: what its gates found, and the version next to the
one that ``latest`` names, in lists, tables and pictures. An event reports it to the automations.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from flat_tokens.manifest import VERSIONS
from flat_tokens.tools.terminal import markdown as as_markdown
from flat_tokens.tools.terminal import plural, short, size
from flows.pipelines.publish import Published
from flows.watch.api import Api, ask
from flows.watch.markdown import code, link, page, table
from flows.watch.page import link_to_page
from flows.watch.pictures import Bar, bars
from flows.watch.words import UI, slug, tolerated
from tasks.finalize.facts import Comparison
from tasks.gates import changed
from tasks.output.held import Candidate

logger = logging.getLogger(__name__)

HELD_EVENT = "flat-tokens.version.held"
"""The event of a run whose version waits for a person (deployments/automations.yaml)."""
DRAWN = 8
"""Sources, and reasons, in a picture."""


def show_held(name: str, output: str, result: Published) -> None:
    """Within a flow run: leave the page of the version that its result says is held, and tell the automations."""
    from prefect import get_client  # here: what is below is used without Prefect, too
    from prefect.artifacts import create_markdown_artifact
    from prefect.events import emit_event

    from flows.watch.progress import of_run

    if result.held is None or result.comparison is None:
        return
    with tolerated("page of the version that is held"):
        with get_client(sync_client=True) as client:
            forms = forms_of(client, output, result.held)
        text = held_page(name, output, result.held, result.comparison, forms)
        create_markdown_artifact(key=held_key(name), markdown=text, description=as_markdown(result.headline))
    with tolerated("notification"):
        says = {"version": result.version, "headline": result.headline, "page": f"artifacts/key/{held_key(name)}"}
        emit_event(HELD_EVENT, **of_run(), payload=says)


def held_key(name: str) -> str:
    """Key of the artifact that is the page of a dataset's held version."""
    return f"{slug(name)}-held"


def forms_of(client: Api, output: str, held: Candidate) -> list[str]:
    """Links to the forms that approve and reject a version, as far as the server has such deployments."""
    found = []
    for what in ("approve", "reject"):
        try:
            deployment = ask(client, "GET", f"/deployments/name/{what}-version/{what}")
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            continue
        parameters = quote(json.dumps({"output": output, "version": held.version}))
        found.append(f"[{what.capitalize()} it]({UI}/deployments/deployment/{deployment['id']}/run?parameters={parameters})")
    return found


def held_page(name: str, output: str, held: Candidate, compared: Comparison, forms: Sequence[str] = ()) -> str:
    """The page in Markdown. *forms*: links that decide. Tables have few columns: the UI cuts off the right of wide ones."""
    where = link(f"{output.rstrip('/')}/{VERSIONS}/{held.version}")
    beside = f"Latest is {code(held.before)}" if held.before else "Nothing is published yet"
    commands = [
        f"python -m flows {what} {shlex.quote(output)} {held.version[:8]} --reason TEXT" for what in ("approve", "reject")
    ]
    return page(
        f"# {as_markdown(name)}: a version waits for a person",
        f"Version {code(held.version)} at {where}: {plural(held.documents, 'document')}, "
        f"{plural(held.tokens, 'token')}. {beside}, and stays so "
        f"until somebody decides. {link_to_page(name)}.",
        ["## What the gates found", "", *(f"- {as_markdown(one.sentence)}" for one in held.findings)],
        ["## Decide", "", " or ".join(forms)] if forms else "## Decide",
        ["```", *commands, "```"],
        "## Next to the latest version",
        *(_sources(compared, what) for what in ("documents", "tokens", "text_bytes")),
        "Grey is the latest version, blue the one that waits." if compared.before else "",
        _in_pairs("Documents by source", _of_sources(compared, "documents")),
        _in_pairs("Tokens by source", _of_sources(compared, "tokens")),
        _in_pairs("Documents left out, by reason", list(_of_reasons(compared))),
        _in_pairs("Documents by length in tokens", list(_of_lengths(compared))),
        _changes(compared),
    )


def _sources(compared: Comparison, what: str) -> list[str]:
    """A table of a count of each source."""
    rows: list[Sequence[str | int]] = []
    for one in compared.sources:
        before, now = getattr(one, what)
        rows.append((as_markdown(one.name), *(_amount(what, value) for value in (before, now)), _change(before, now)))
    return table(f"{what.replace('text_bytes', 'text')} of | #latest | #waits | #change", rows)


def _amount(what: str, value: int | None) -> str:
    return "–" if value is None else size(value) if what == "text_bytes" else f"{value:,}"


def _change(before: int | None, now: int | None) -> str:
    if before is None or now is None:
        return "new" if now is not None else "gone"
    return changed(now, before) if now != before else "same"


def _of_sources(compared: Comparison, what: str) -> list[tuple[str, int, int]]:
    counts = ((one.name, getattr(one, what)) for one in compared.sources)
    rows = [(name, before or 0, now or 0) for name, (before, now) in counts]
    return sorted(rows, key=lambda row: -max(row[1:]))[:DRAWN]


def _of_reasons(compared: Comparison) -> Iterator[tuple[str, int, int]]:
    largest = sorted(compared.skipped.items(), key=lambda item: -max(item[1]))[:DRAWN]
    yield from ((reason, *counts) for reason, counts in largest)


def _of_lengths(compared: Comparison) -> Iterator[tuple[str, int, int]]:
    for one in compared.lengths:
        yield f"{one.first:,} to {one.last:,}" if one.last > one.first else f"{one.first:,}", *one.documents


def _in_pairs(title: str, rows: Sequence[tuple[str, int, int]]) -> str:
    """A picture of two bars for each row: of the latest version, and of the one that waits."""
    return bars(title, [Bar(name, now, f"{short(before)} → {short(now)}", before) for name, before, now in rows])


def _changes(compared: Comparison) -> list[str] | str:
    if compared.before is None:
        return ""
    if compared.documents is None:
        return "What became of documents is unknown."
    rows: list[Sequence[Any]] = []
    for one in (*compared.documents.by_source, compared.documents.total):
        for kind in ("added", "removed", "changed", "moved"):
            if count := getattr(one, kind):
                rows.append((f"{as_markdown(one.name)}, {kind}", count))
    rows += ((f"changed their split, {one.before} → {one.after}", one.documents) for one in compared.documents.of_splits)
    return ["## What became of documents", "", *table("documents | #count", rows)] if rows else ""
