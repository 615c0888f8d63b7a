"""The commands for versions: status, versions, approve, reject, forget, pin, unpin, rollback, gc."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flat_tokens.annotations import JsonObject
from flat_tokens.stores.local import kind_of
from flat_tokens.tools.cli import existing_place
from flat_tokens.tools.terminal import plural, show, size, table
from flows.commands.build import DAYS, KEEP, policy_of, read_config, why_held
from flows.commands.running import add_command, add_fields, checked_request, given_fields, run_with_progress

if TYPE_CHECKING:
    from flat_tokens.stores.store import Store
    from tasks.garbage import GarbageReport
    from tasks.output.versions import DecisionResult, Version


OUTPUTS_HAVE = ("latest.json", "versions", "_cache", "_staging", "_running")
"""An output has one of these from the moment on at which its first build begins."""
SHOWN_OF_A_KIND = 8
GONE = "processes that are gone: the next build removes it, and so does 'gc --delete'"
GOES_ON = ": the same build goes on from there, and 'gc --days 0 --delete' removes it"
AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


OUTPUT = "\nOUTPUT  a build's output, or its configuration file\n"
DECIDE = """
version=VERSION?  its name or how it begins; the one that waits without it
--reason TEXT!  for whoever looks at the runs later
--by NAME  who decides (default: who runs the command)"""
GC = f"""
--keep N  versions that are kept next to pinned ones (default: {KEEP})
--days D  nothing goes that was in use or made in the last D days (default: {DAYS:g})
--delete  remove it"""


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""
    from tasks.derive.request import ForgetRequest

    def add(name: str, run: Callable[[Namespace], None], about: str, listed: str = "", **settings: Any) -> ArgumentParser:
        return add_command(commands, name, run, about, OUTPUT + listed.strip(), output=existing_place, **settings)

    about = "tell what is published, since when, when it was last refreshed, its size, and whether a build is under way"
    add("status", run_status, about)
    add("versions", run_versions, "list the published versions")
    add("approve", run_decide, "let 'latest' name the version that a gate holds", DECIDE, reports=True)
    about = "leave 'latest' where it is; refreshes leave the version that a gate holds alone from now on"
    add("reject", run_decide, about, DECIDE, reports=True)
    about, listed = (
        "take documents out of all versions, and leave them out from now on",
        "--resume  bring a forgetting that was begun to its end",
    )
    forget = add("forget", run_forget, about, listed, reports=True)
    add_fields(forget, ForgetRequest, key_list="keys", id_list="ids", runs="run")
    listed = (
        "version=VERSION?  its name or how it begins; the latest one without it\n--note NOTE  why, for whoever lists the versions"
    )
    add("pin", run_pin, "keep a version until it is unpinned", listed)
    listed = "version=VERSION{}  its name or how it begins"
    add("unpin", run_unpin, "let a pinned version go when its time has come", listed.format(""))
    about = "let 'latest' point at the version before, or at the one that is named"
    add("rollback", run_rollback, about, listed.format("?"))
    add("gc", run_gc, "list what an output does not need, and with --delete remove it", GC, keep=int, days=float)


def output_at(options: Namespace) -> Store:
    """The output that is named, or that a configuration names. ValueError if there is none."""
    from flat_tokens.stores.store import Store
    from tasks.locations import plain_location

    is_config = options.output.endswith((".yaml", ".yml", ".json")) and kind_of(options.output) == "file"
    root = Store.at(read_config(Path(options.output), []).output if is_config else plain_location(options.output))
    if not any(map(root.exists, OUTPUTS_HAVE)):
        raise ValueError(f"{root.url}: nothing was built here")
    return root


def run_status(options: Namespace) -> None:
    root = output_at(options)
    from tasks.garbage import dead_staging, unfinished_bytes
    from tasks.output.leases import in_use
    from tasks.output.versions import status_of

    found = status_of(root)
    facts = {
        "output": found.output,
        "latest": found.latest.model_dump(mode="json") if found.latest else None,
        "last_refresh": found.last_refresh.isoformat() if found.last_refresh else None,
        "versions": len(found.versions),
        "pinned": {one.version: one.pinned for one in found.versions if one.pinned is not None},
        "versions_bytes": sum(one.byte_count for one in found.versions),
        "cache_bytes": found.cache_bytes,
        "unfinished_bytes": unfinished_bytes(root),
        "staging_bytes": sum(item.byte_count for item in dead_staging(root)),
        "in_use": in_use(root),
        "held": found.held.model_dump(mode="json") if found.held else None,
    }
    lines = status_text(facts, found.latest, datetime.now(UTC))
    if (held := found.held) is not None:
        counts = f"{plural(held.documents, 'document')}, {plural(held.tokens, 'token')}"
        since = f"  held       {held.version}, since {held.at:%Y-%m-%d %H:%M} UTC: {counts}"
        lines += [since, *why_held(held, found.output)]
    show(options, facts, lines)


def status_text(facts: JsonObject, latest: Version | None, now: datetime) -> list[str]:
    """The state of an output at the time *now*, for people."""
    refreshed = facts["last_refresh"] and datetime.fromisoformat(facts["last_refresh"])
    pinned = [f"{version} ({note})" if note else version for version, note in facts["pinned"].items()]
    made = [f"{plural(latest.documents, 'document')}, {latest.tokens:,} tokens of {latest.tokenizer}"] if latest else []
    sizes = f"{size(facts['versions_bytes'])} in {plural(facts['versions'], 'version')}, {size(facts['cache_bytes'])} in _cache"
    unfinished = f"{size(facts['unfinished_bytes'])} of builds that have not published"
    rows = [
        ("latest", f"{latest.version}, made {_when(latest.at, now)}" if latest else "nothing is published yet"),
        *(("holds", one) for one in made),
        ("refreshed", _when(refreshed, now)),
        ("pinned", ", ".join(pinned) or "none"),
        ("size", sizes),
        *([("unfinished", f"{unfinished}{'' if facts['in_use'] else GOES_ON}")] if facts["unfinished_bytes"] else []),
        *([("staging", f"{size(facts['staging_bytes'])} of {GONE}")] if facts["staging_bytes"] else []),
        ("now", facts["in_use"] or "no build is under way"),
    ]
    return [facts["output"], *table(rows, "<<")]


def _when(at: datetime | None, now: datetime) -> str:
    if at is None:
        return "at a time that is not known"
    seconds = max((now - at).total_seconds(), 0)
    ago = next((f"{seconds / unit:.0f} {name}" for unit, name in AGES if seconds >= 1.5 * unit), "a moment")
    return f"{at:%Y-%m-%d %H:%M} UTC, {ago} ago"


def run_versions(options: Namespace) -> None:
    root = output_at(options)
    from tasks.output.versions import list_versions

    versions = list_versions(root)
    rows = [("version", "made (UTC)", "documents", "tokens", "tokenizer", "layout", "size", "")]
    for version in versions:
        made = f"{version.at:%Y-%m-%d %H:%M}" if version.at else ""
        counts = f"{version.documents:,}", f"{version.tokens:,}"
        stored = version.tokenizer, version.layout, size(version.byte_count)
        rows.append((version.version, made, *counts, *stored, version.marks))
    show(options, [version.model_dump(mode="json") for version in versions], table(rows, "<<>><<><", indent=0))


def run_decide(options: Namespace) -> None:
    from tasks.output.pointer import current_user
    from tasks.output.versions import approve, reject

    root, version, reason = output_at(options), options.version, options.reason
    if not reason.strip():
        raise ValueError("--reason needs a text, for whoever looks at the runs later")
    decide, by = {"approve": approve, "reject": reject}[options.command], options.by or current_user()
    settings = {"output": root.url, "version": version, "reason": reason, "by": by}

    def pipeline(_: None) -> DecisionResult:
        return decide(root, version, reason, by)

    decided = run_with_progress(options, nullcontext(), pipeline, f"flows.decide:{options.command}_version", **settings)
    decision = decided.decision.model_dump(mode="json")
    facts = {
        "version": decided.made.version,
        "findings": decision.pop("findings"),
        "decision": decision,
        "latest": decided.pointer.version,
        "number": decided.pointer.sequence,
    }
    show(options, facts, [decided.headline])


def run_forget(options: Namespace) -> None:
    from tasks.derive.request import ForgetRequest

    root = output_at(options)
    if not options.resume and not (options.reason or "").strip():
        raise ValueError("--reason needs a text, for whoever reads the certificate")
    request = (
        None if options.resume else checked_request(ForgetRequest, {**given_fields(options, ForgetRequest), "output": root.url})
    )
    from flows.pipelines.forget import ForgetResult, forget, resume

    work: Callable[..., ForgetResult] = forget if request else resume
    flow, arguments = ("forget_documents", (request,)) if request else ("resume_forgetting", (root.url, options.scratch))
    result = run_with_progress(options, nullcontext(), lambda _: work(*arguments), f"flows.forget:{flow}", *arguments)
    where = [f"certificate: {result.certificate}"] if result.certificate else []
    show(options, result.model_dump(mode="json"), [result.headline, *map(run_text, result.runs.items()), *result.rest, *where])


def run_text(run: tuple[str, JsonObject]) -> str:
    """A sentence about what a run saw of documents, by the path of its ledger."""
    path, saw = run
    steps = f", in steps {saw['first_step']:,} to {saw['last_step']:,}" if saw["visits"] else ""
    edited = f". {saw['not_edited']}" if "not_edited" in saw else ""
    if "replaced_by" in saw:
        edited = f". From step {saw['skip_from']:,} on: {', '.join(f'{old} -> {new}' for old, new in saw['replaced_by'].items())}"
    count = f"{plural(saw['documents'], 'document')} {plural(saw['visits'], 'time')}"
    return f"{path}: saw {count} before step {saw['before']:,}{steps}{edited}"


def run_pin(options: Namespace) -> None:
    from tasks.output.pointer import read_pointer
    from tasks.output.versions import pin

    root = output_at(options)
    version = read_pointer(root).version if options.version is None else options.version
    if version is None:
        raise ValueError(f"{root.url}: nothing was ever published here")
    _tell(options, {"pinned": pin(root, version, options.note or "")})


def run_unpin(options: Namespace) -> None:
    from tasks.output.versions import unpin

    _tell(options, {"unpinned": unpin(output_at(options), options.version)})


def run_rollback(options: Namespace) -> None:
    from tasks.output.pointer import read_pointer
    from tasks.output.versions import roll_back

    root = output_at(options)
    before = read_pointer(root).version
    now = roll_back(root, options.version)
    facts = {"latest": now.version, "before": before, "number": now.sequence}
    withdrawn = ", which is withdrawn" if before in now.names("withdrawn") else ""
    show(options, facts, [f"latest is now {now.version} (number {now.sequence}). It was {before}{withdrawn}."])


def _tell(options: Namespace, facts: JsonObject) -> None:
    show(options, facts, [", ".join(f"{name} {value}" for name, value in facts.items())])


def run_gc(options: Namespace) -> None:
    root = output_at(options)
    policy = policy_of(options.keep, options.days)
    from tasks.garbage import collect

    collected = collect(root, policy, delete=options.delete)
    show(options, collected.model_dump(mode="json"), collected_text(collected))


def collected_text(collected: GarbageReport) -> list[str]:
    """Garbage that went, or would go, for people: the first ones of every kind, and sums."""
    lines = []
    for kind, group in groupby(collected.garbage, key=lambda item: item.kind):
        items = list(group)
        lines.append(f"  {kind}: {len(items):,}, {size(sum(item.byte_count for item in items))}")
        lines += [f"    {item.name}  {size(item.byte_count)}  {item.why}" for item in items[:SHOWN_OF_A_KIND]]
        if len(items) > SHOWN_OF_A_KIND:
            lines.append(f"    and {len(items) - SHOWN_OF_A_KIND:,} more")
    total = f"{len(collected.garbage):,} things, {size(collected.byte_count)}"
    done = f"removed {total}" if collected.deleted else f"may go: {total}. --delete removes it."
    lines.insert(0, done if lines else "nothing to remove")
    kept = []
    for version in collected.kept:
        marks = [*([version.state] if version.state != "other" else []), *(["pinned"] if version.pinned is not None else [])]
        kept.append(version.version + (f" ({', '.join(marks)})" if marks else ""))
    lines.append(f"  kept: {', '.join(kept) or 'no version'}")
    if collected.recent_bytes:
        lines.append(
            f"  kept for builds that are run again: {size(collected.recent_bytes)}, stored in the days of grace. "
            "--days 0 removes it, too."
        )
    if collected.left:
        stay = "were left" if collected.deleted else "would be left for now"
        lines.append(f"  {collected.left}: token shards, downloads and unfinished versions {stay}")
    return lines
