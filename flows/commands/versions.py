"""The commands for versions: versions, pin, unpin, rollback, gc."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flat_tokens.tools.terminal import size
from flows.commands.config_file import read_config
from flows.commands.refresh import DAYS, KEEP, policy_of
from flows.commands.running import add_command

if TYPE_CHECKING:
    from flat_tokens.stores.store import Store
    from tasks.garbage import Collected
    from tasks.output.versions import Version


SHOWN_OF_A_KIND = 8


def add_commands(commands: Any) -> None:
    """Add the commands to the command line's parser; each has its function as ``run``."""

    def add_on_output(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = add_command(commands, name, run, about)
        command.add_argument("output", metavar="OUTPUT", help="a build's output, or its configuration file")
        return command

    add_on_output("versions", run_versions, "List the published versions.")
    pin = add_on_output("pin", run_pin, "Keep a version until it is unpinned.")
    pin.add_argument("version", metavar="VERSION", nargs="?", help="its name or how it begins; the latest one without it")
    pin.add_argument("--note", default="", help="why, for whoever lists the versions")
    unpin = add_on_output("unpin", run_unpin, "Let a pinned version go when its time has come.")
    unpin.add_argument("version", metavar="VERSION")
    rollback = add_on_output("rollback", run_rollback, "Let 'latest' point at the version before, or at the one that is named.")
    rollback.add_argument("version", metavar="VERSION", nargs="?", help="its name or how it begins")
    gc = add_on_output("gc", run_gc, "List what an output may do without, and with --delete remove it.")
    gc.add_argument("--keep", type=int, default=KEEP, metavar="N", help=f"versions that are kept beside pinned ones ({KEEP})")
    gc.add_argument(
        "--days",
        type=float,
        default=DAYS,
        metavar="D",
        help=f"nothing goes that was in use or made in the last D days ({DAYS:g})",
    )
    gc.add_argument("--delete", action="store_true", help="remove it")


def output_at(options: argparse.Namespace) -> Store:
    """The output that is named, or that a configuration names. ValueError where there is none."""
    from flat_tokens.stores.store import Store
    from tasks.locations import plain_location

    is_config = options.output.endswith((".yaml", ".yml", ".json")) and os.path.isfile(options.output)
    root = Store.at(read_config(Path(options.output), []).output if is_config else plain_location(options.output))
    if not root.exists("latest.json") and not root.exists("versions"):
        raise ValueError(f"{root.url}: nothing was built here")
    return root


def run_versions(options: argparse.Namespace) -> int:
    from tasks.output.versions import list_versions

    versions = list_versions(output_at(options))
    if options.json:
        print(json.dumps([version.model_dump(mode="json") for version in versions], indent=2))
    else:
        print(versions_text(versions))
    return 0


def versions_text(versions: list[Version]) -> str:
    """A table for people."""
    rows = [("version", "made (UTC)", "documents", "tokens", "tokenizer", "layout", "size", "")]
    for version in versions:
        until = f" until {version.until:%Y-%m-%d %H:%M}" if version.until else ""
        state = "" if version.state == "other" else f"{version.state}{until}"
        pinned = "" if version.pinned is None else f"pinned: {version.pinned}" if version.pinned else "pinned"
        rows.append(
            (
                version.version,
                f"{version.at:%Y-%m-%d %H:%M}" if version.at else "",
                f"{version.documents:,}",
                f"{version.tokens:,}",
                version.tokenizer,
                version.layout,
                size(version.byte_count),
                ", ".join(filter(None, (state, pinned))),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = (2, 3, 6)
    return "\n".join(
        "  ".join(
            text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def run_pin(options: argparse.Namespace) -> int:
    from tasks.output.pointer import read_pointer
    from tasks.output.versions import pin

    root = output_at(options)
    version = read_pointer(root).version if options.version is None else options.version
    if version is None:
        raise ValueError(f"{root.url}: nothing was ever published here")
    return _tell(options, {"pinned": pin(root, version, options.note)})


def run_unpin(options: argparse.Namespace) -> int:
    from tasks.output.versions import unpin

    return _tell(options, {"unpinned": unpin(output_at(options), options.version)})


def run_rollback(options: argparse.Namespace) -> int:
    from tasks.output.pointer import read_pointer
    from tasks.output.versions import roll_back

    root = output_at(options)
    before = read_pointer(root).version
    now = roll_back(root, options.version)
    return _tell(options, {"latest": now.version, "before": before, "number": now.sequence})


def _tell(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    print(json.dumps(facts) if options.json else ", ".join(f"{name} {value}" for name, value in facts.items()))
    return 0


def run_gc(options: argparse.Namespace) -> int:
    policy = policy_of(options.keep, options.days)
    from tasks.garbage import collect

    collected = collect(output_at(options), policy, delete=options.delete)
    print(collected.model_dump_json(indent=2) if options.json else collected_text(collected))
    return 0


def collected_text(collected: Collected) -> str:
    """Garbage that went, or would go, for people: the first ones of every kind, and sums."""
    lines = []
    for kind, group in groupby(collected.garbage, key=lambda item: item.kind):
        items = list(group)
        lines.append(f"  {kind}: {len(items):,}, {size(sum(item.byte_count for item in items))}")
        lines += [f"    {item.name}  {size(item.byte_count)}  {item.why}" for item in items[:SHOWN_OF_A_KIND]]
        if len(items) > SHOWN_OF_A_KIND:
            lines.append(f"    and {len(items) - SHOWN_OF_A_KIND:,} more")
    total = f"{len(collected.garbage):,} things, {size(collected.byte_count)}"
    if not lines:
        lines = ["nothing to remove"]
    elif collected.deleted:
        lines.insert(0, f"removed {total}")
    else:
        lines.insert(0, f"may go: {total}. --delete removes it.")
    kept = []
    for version in collected.kept:
        marks = [*([version.state] if version.state != "other" else []), *(["pinned"] if version.pinned is not None else [])]
        kept.append(version.version + (f" ({', '.join(marks)})" if marks else ""))
    lines.append(f"  kept: {', '.join(kept) or 'no version'}")
    if collected.left:
        stay = "were left" if collected.deleted else "would be left for now"
        lines.append(f"  {collected.left}: token shards, downloads and unfinished versions {stay}")
    return "\n".join(lines)
