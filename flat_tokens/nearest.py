"""Messages and listings for a path that is not a dataset: what is there, and the nearest path that is one."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from flat_tokens.manifest import POINTER, RECEIPT, SPLITS, VERSIONS
from flat_tokens.options import nearest
from flat_tokens.stores.store import NO_OBJECT, Store

ROOTS = ("zarr.json", ".zgroup")
DEPTH, DIRECTORIES = 4, 1000
"""How deep datasets are looked for below a path, and in how many directories."""
NAMED = 5
CONFIG_BYTES = 1 << 16
OUTPUT = re.compile(rb"^output:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
WANTED = f"A dataset is a build's output, with {POINTER}, or one version, with {' and '.join(SPLITS)}."

OTHERS = "flat-tokens inspect says whether it is of another format, and flat-tokens import makes a dataset of it."


class Directory(NamedTuple):
    """A directory with the names of what is right in it."""

    store: Store
    files: tuple[str, ...]
    directories: tuple[str, ...]

    @property
    def is_dataset(self) -> bool:
        """Whether it is a build's output or a version, by the names in it."""
        return POINTER in self.files or (set(SPLITS) <= {*self.directories} and not {*ROOTS}.isdisjoint(self.files))


def directory(store: Store) -> Directory:
    """The directory at *store*, by one listing. Links are left out. FileNotFoundError or NotADirectoryError if there is none."""
    found = [info for info in store.ask("ls", detail=True) if not info.get("islink")]
    names: dict[bool, list[str]] = {False: [], True: []}
    for info in found:
        path = info["name"].rstrip("/")
        if posixpath.dirname(path) == store.root.rstrip("/"):  # web servers list links to anywhere
            names[info["type"] == "directory"].append(posixpath.basename(path))
        elif path == store.root and info["type"] != "directory":
            raise NotADirectoryError(path)
    return Directory(store, tuple(sorted(names[False])), tuple(sorted(names[True])))


def directories_below(store: Store) -> Iterator[Directory]:
    """The directories at and below a path, nearest first; none within a dataset, and no hidden ones. What nobody may list is left
    out.
    """
    level, left = [store], DIRECTORIES
    for _ in range(DEPTH + 1):
        following: list[Store] = []
        for place in level[:left]:
            with suppress(*NO_OBJECT, PermissionError):
                found = directory(place)
                yield found
                if not found.is_dataset:
                    following += [place / name for name in found.directories if not name.startswith(".")]
        level, left = following, left - len(level)
        if left <= 0:
            return


def datasets_below(store: Store) -> list[Store]:
    """The outputs and datasets below a path, nearest first."""
    return [found.store for found in directories_below(store) if found.is_dataset]


def no_dataset(store: Store) -> FileNotFoundError:
    """The error that says what is at *store*, that a dataset was wanted, and the nearest that is one."""
    return FileNotFoundError(f"{store.url}: {_seen(store)}")


def _seen(store: Store) -> str:
    try:
        here = directory(store)
    except NO_OBJECT:
        return _seen_file(store) if store.exists("") else f"there is nothing here.{_beside(store)}"
    if RECEIPT in here.files:
        return f"is a token shard, not a dataset.{_around(store) or ' flat-tokens inspect shows it.'}"
    if not {*ROOTS}.isdisjoint(here.files) and "encoded_tokens" in here.directories:
        return f"is one flat-tokens array, not a dataset with {' and '.join(SPLITS)}.{_around(store)}"
    versions = here if posixpath.basename(store.root) == VERSIONS else None
    if versions is None and VERSIONS in here.directories:
        versions = directory(store / VERSIONS)
    if versions is not None:
        names = [versions.store.path(name) for name in versions.directories]
        if above := _around(store):
            return f"holds the versions of an output.{above}"
        return f"has no {POINTER}. {_one_of(names, 'Name a version')}" if names else "nothing is published here yet."
    if around := _around(store):
        return f"is a part of a dataset, not a dataset.{around}"
    if not here.files and not here.directories:
        return f"is an empty directory. {WANTED}"
    if below := datasets_below(store):
        return f"is not a dataset itself. {_one_of([one.url for one in below], 'Name one below')}"
    holds = ", ".join([*(f"{name}/" for name in here.directories), *here.files][:NAMED])
    return f"is not a flat-tokens dataset. {WANTED} Here are {holds}. {OTHERS}"


def _seen_file(store: Store) -> str:
    if output := config_output(store):
        return f"is a configuration, not a dataset. Name the output of its build: {output}"
    if around := _around(store):
        return f"is a file of a dataset.{around}"
    return f"is a file, no flat-tokens dataset. {WANTED} {OTHERS}"


def config_output(store: Store) -> str | None:
    """The output that a build's configuration names, if *store* is such a file."""
    if not store.root.endswith((".yaml", ".yml")):
        return None
    with suppress(*NO_OBJECT):
        found = OUTPUT.search(store.read_range("", 0, CONFIG_BYTES))
        return found[1].decode(errors="replace") if found else None
    return None


def _around(store: Store) -> str:
    """The remedy where a dataset lies around a path."""
    path = posixpath.dirname(store.root)
    while path not in ("", "/"):
        with suppress(*NO_OBJECT, PermissionError):
            if (found := directory(replace(store, root=path))).is_dataset:
                return f" Name the dataset around it: {found.store.url}"
        path = posixpath.dirname(path)
    return ""


def _beside(store: Store) -> str:
    """The remedy where nothing is at a path: a dataset around or next to it, the one with the most similar name first."""
    if around := _around(store):
        return around
    path, name = posixpath.split(store.root)
    above = None
    while above is None and path:
        try:
            above = directory(replace(store, root=path))
        except (*NO_OBJECT, PermissionError):
            if path == posixpath.dirname(path):
                break
            path, name = posixpath.split(path)
    if above is None:
        return ""
    for names in (filter(None, [nearest(name, above.directories)]), above.directories[:DIRECTORIES]):
        found = [one.store.url for one in map(_if_listed, (above.store / other for other in names)) if one and one.is_dataset]
        if found:
            return f" {_one_of(found, 'Did you mean')}?"
    return f" The nearest directory that is there is {above.store.url}."


def _if_listed(store: Store) -> Directory | None:
    with suppress(*NO_OBJECT, PermissionError):
        return directory(store)
    return None


def _one_of(names: Sequence[str] | Iterable[str], lead: str) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{lead}: {', '.join(names[:NAMED])}{more}"
