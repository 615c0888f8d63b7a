"""The certificate of a forgetting, as JSON and a page: the request, what was done and checked, and what is not known here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from flat_tokens import __version__
from flat_tokens.forgotten import DIRECTORY, STEP, WINDOW, Forgotten
from flat_tokens.stores.store import Store
from flat_tokens.tools import markup
from flat_tokens.tools.terminal import plural
from tasks.output.forgotten import Pending

FORMAT = "flat-tokens-forgotten"
NOT_KNOWN = (
    "The sources still hold the documents, unless whoever owns them removes them. Builds here leave them out. Other outputs that "
    "are built of the same sources do not, unless they are named here and forget them, too.",
    "Backups, snapshots of disks and older states of objects in a versioned bucket are not looked at.",
    "Copies that people or programs made of versions are not known, nor what readers keep in their caches.",
    "What a model has learned is not undone.",
)
REPLACED = ("version", "replaced by", "documents", "tokens")
SOURCE_FILES = ("source", "file", "sha256")


def certificate_key(id: str) -> str:
    """Key of a certificate below its output."""
    return f"{DIRECTORY}/{id}.json"


def certificate_of(pending: Pending, forgotten: Forgotten, facts: dict[str, Any]) -> dict[str, Any]:
    """The certificate as JSON. *facts*: what was done and checked."""
    request = pending.request
    return {
        "format": FORMAT,
        "format_version": 1,
        "made_by": f"flat-tokens {__version__}",
        **request.model_dump(mode="json"),
        "list_sha256": forgotten.sha256,
        "holders": [one.model_dump(mode="json") for one in pending.holders],
        "source_files": [{"source": source, "name": name, "sha256": sha256} for source, name, sha256 in pending.files],
        "runs": pending.runs,
        **facts,
        "not_known": list(NOT_KNOWN),
    }


def write_certificate(root: Store, certificate: dict[str, Any]) -> None:
    """Write a certificate and its page, signed where a key is set. A second time, it replaces what was there."""
    key = certificate_key(certificate["id"])
    data = (json.dumps(certificate, indent=2, ensure_ascii=False) + "\n").encode()
    root.put(key.removesuffix(".json") + ".html", page(certificate, hashlib.sha256(data).hexdigest()).encode())
    root.put(key, data)


def page(certificate: dict[str, Any], sha256: str) -> str:
    """The page of a certificate: HTML without anything from elsewhere."""
    source, tokens, checked = certificate["source"], certificate["by_tokens"], certificate["checked"]
    exports = certificate["exports"]
    request = [
        ("When", certificate["at"]),
        ("By", certificate["by"]),
        ("Why", certificate["reason"]),
        ("Named by", certificate["named"] + (f", of source {source}" if source else "")),
        ("Keys", f"{certificate['keys']:,}, of which {certificate['unknown']:,} are of no document here"),
        ("Same text", f"{certificate['same_text']:,} more documents, which have the text of one that was named"),
        ("List", certificate["list_sha256"]),
    ]
    done = [
        ("Versions replaced", plural(len(certificate["versions"]), "version")),
        ("latest", certificate["latest"] or "nothing"),
        ("Removed", ", ".join(certificate["removed"]) or "nothing else"),
        ("Exports removed", ", ".join(exports["removed"]) or "none is known"),
        ("Exports not reached", ", ".join(exports["not_reached"]) or "none"),
        ("Outputs made of this one", ", ".join(certificate["outputs"]) or "none is known"),
    ]
    looked = [
        ("Looked through", f"{plural(checked['objects'], 'object')}, {plural(checked['tokens'], 'token')}"),
        ("Left", "; ".join(checked["left"]) or "no key, and no run of tokens that is theirs alone"),
        (
            "By their tokens",
            f"{tokens['windows']:,} runs of {WINDOW} tokens are looked for, {STEP} tokens apart in documents of up to 500. "
            f"{tokens['shared']:,} more are in other documents, too, and say nothing. {plural(tokens['short'], 'document')} "
            f"with fewer than {WINDOW} tokens cannot be recognised by tokens: only the keys are looked for.",
        ),
    ]
    versions = [
        (one["version"], str(one["successor"]), f"{one['documents']:,}", f"{one['tokens']:,}") for one in certificate["versions"]
    ]
    files = [(one["source"], one["name"], one["sha256"]) for one in certificate["source_files"]]
    runs = list(_of_runs(certificate["runs"]))
    sections: list[dict[str, Any]] = [
        {"id": "request", "title": "Request", "facts": request},
        {"id": "done", "title": "Done", "facts": done},
        {"id": "versions", "title": "Versions", "head": REPLACED, "rows": versions, "text": (1,)},
        {"id": "checked", "title": "Checked", "facts": looked},
        {"id": "files", "title": "Source files that held them", "head": SOURCE_FILES, "rows": files, "text": (1, 2)},
        {"id": "runs", "title": "Runs", "head": ("ledger", "saw"), "rows": runs, "text": (1,)},
        {"id": "not-known", "title": "Not known", "paragraphs": certificate["not_known"]},
    ]
    return markup.page(
        "sections.html",
        title=f"forgotten {certificate['id']}",
        kind="certificate",
        name="Documents that were forgotten",
        path=certificate["id"],
        sections=[one for one in sections if one["id"] not in ("files", "runs") or one["rows"]],
        footer="The certificate as JSON has the SHA-256",
        digest=sha256,
    )


def _of_runs(runs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, run in runs.items():
        steps = f", first at step {run['first_step']:,}, last at step {run['last_step']:,}" if run["visits"] else ""
        yield (
            path,
            f"{plural(run['documents'], 'document')}, {plural(run['visits'], 'time')} before step {run['before']:,}{steps}",
        )
