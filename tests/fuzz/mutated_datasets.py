"""Mutations of published datasets in every layout, each judged by ``verify --full`` and by what readers get.

An input is the JSON of one mutation, such as ``["relink", {"latest": "versions/gone"}]``. Paths are below the output, which has
two versions of the same shape.
"""

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS, LayoutName
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from tasks.output.pointer import read_pointer
from tests.faults.power_loss import tree_of, write_tree
from tests.fuzz.driver import Fuzzed, Outcome, Prepare, WrongError, portable
from tests.fuzz.mutators import havoc, json_values
from tests.made import docs_of, publish_docs, small

OBJECT_TOKENS = 64

Truth = dict[str, list[list[int]]]

WHOLE_OBJECTS = ("add", "swap", "other")
"""Mutations that put a sound object in another's place: arrays have no digest of their objects, only the manifest has."""


def dataset(layout: LayoutName, *, is_small: bool) -> Prepare:
    def prepare(work: Path) -> Fuzzed:
        if is_small:
            LAYOUTS[layout] = small(layout, OBJECT_TOKENS, OBJECT_TOKENS, in_blocks=True)
        output = work / "out"
        versions, truth = _publish(output, layout)
        flat_tokens.verify(output, "full")
        assert _at_once(output) == _by_sequences(output) == truth
        mutations = Mutations(output, *versions, is_raw=LAYOUTS[layout].encoded_tokens.zstd_level is None)

        def run(data: bytes) -> str:
            shutil.rmtree(output, ignore_errors=True)
            try:
                kind, changes = json.loads(data)
                changed = mutations.make(changes)
            except (OSError, ValueError):
                return "not a mutation"  # of a mutation
            return judge(mutations, kind, changed, truth)

        words = {versions[0].encode(): b"FORMER", versions[1].encode(): b"LATEST"}
        words[json.loads(mutations.files["latest.json"])["manifest_sha256"].encode()] = b"DIGEST"
        return portable(Fuzzed([b'["nothing", {}]'], mutations.mutate, run, (str(output),)), words)

    return prepare


def _publish(output: Path, layout: LayoutName) -> tuple[tuple[str, str], Truth]:
    """Two versions of the same numbers of sequences and tokens; and the sequences of the latest."""
    versions, truth = [], {}
    for seed in (1, 2):
        chance = random.Random(7)
        lengths = [chance.choice((0, 1, 3, 9, 40)) for _ in range(40)]
        ids = random.Random(seed)
        sequences = [[ids.randrange(300) for _ in range(length)] for length in lengths]
        versions.append(publish_docs(output, docs_of(*sequences[:30]), docs_of(*sequences[30:]), layout=layout))
        truth = {"train": sequences[:30], "validation": sequences[30:]}
    return (versions[0], versions[1]), truth


class Mutations:
    """Mutations of an output: a kind, and what is at some paths instead."""

    def __init__(self, output: Path, former: str, latest: str, *, is_raw: bool) -> None:
        self.output, self.former, self.latest, self.is_raw = output, former, latest, is_raw
        self.tree = tree_of(output)
        self.files = {name: data for name, data in self.tree.items() if isinstance(data, bytes)}
        self.below = f"versions/{latest}/"
        self.names = [name for name in self.files if name.startswith(self.below)]
        self._json, self._bytes = json_values(), havoc()
        zarr.consolidate_metadata(output / self.below)  # before there are mutations: each begins with the tree
        root = ".zmetadata" if (output / self.below / ".zmetadata").exists() else "zarr.json"
        self._consolidated = self.below + root, (output / self.below / root).read_bytes()

    def make(self, changes: dict[str, Any]) -> list[str]:
        """Write the output with something else at some paths: a file that begins and ends as the one there, with text in between;
        a link's target; None for a directory, False for nothing. Returns the names of what is not as it was; JSON of the same
        value is.
        """
        tree = dict(self.tree)
        for name, new in changes.items():
            tree = {other: one for other, one in tree.items() if not f"{other}/".startswith(f"{name}/")}
            if isinstance(new, list):
                (head, text, tail), old = new, self.files.get(name, b"")
                tree[name] = old[:head] + text.encode("latin-1") + old[len(old) - tail :]
            elif new is not False:
                tree[name] = new
        write_tree(tree, self.output)
        names = {*self.tree, *tree}
        return sorted(name for name in names if not _same(name, self.tree.get(name), tree.get(name)))

    def mutate(self, chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        kind, name = chance.choice(KINDS), chance.choice([*self.names, *self.names, "latest.json"])
        drawn = self._drawn(chance, kind, name, pool).items()
        return json.dumps([kind, {at: self._short(at, new) if isinstance(new, bytes) else new for at, new in drawn}]).encode()

    def _short(self, name: str, new: bytes) -> list[int | str]:
        """A file's content as far as it is not that of the one there: objects of some layouts have megabytes of fill values."""
        old = self.files.get(name, b"")
        head = _alike(old, new)
        tail = _alike(old[head:][::-1], new[head:][::-1])
        return [head, new[head : len(new) - tail].decode("latin-1"), tail]

    def _drawn(self, chance: random.Random, kind: str, name: str, pool: Sequence[bytes]) -> dict[str, Any]:
        files, content, added = self.files, self.files[name], self.below + chance.choice(ADDED)
        parent = name.rpartition("/")[0]
        match kind:
            case "bytes":
                return {name: self._bytes(chance, content, [content])}
            case "swap":
                alike = [other for other in self.names if other.rpartition("/")[0] == parent]
                other = chance.choice(chance.choice((self.names, alike or self.names)))
                return {name: files[other], other: content}
            case "delete":
                return {chance.choice((name, name, name, parent if parent.startswith(self.below) else name)): False}
            case "add":
                small = [files[other] for other in self.names if len(files[other]) < 4096]
                return {added: chance.choice([b"", b"{}", b'{"a": 1}', b'{"zarr_format": 2}', b"x" * 100, *small])}
            case "json_value":
                described = [other for other in [*self.names, "latest.json"] if files[other][:1] == b"{"]
                root = [other for other in described if "/" not in other.removeprefix(self.below)]
                chosen = chance.choice(chance.choice((described, root)))
                return {chosen: self._json(chance, files[chosen], pool)}
            case "other":  # an object of the other version
                return {name: files[name.replace(self.latest, self.former)]}
            case "directory":
                return {name: None}
            case "relink":
                places = (f"versions/{self.former}", "versions/gone", "versions", ".", f"{self.below}train")
                return {"latest": chance.choice(places)}
            case "consolidated":  # metadata of all arrays in that of the root, which plain zarr believes first: of other lengths
                path, text = self._consolidated
                value, length = json.loads(text), chance.choice((0, 1, 100, 10_000))
                for key, one in value.get("consolidated_metadata", value)["metadata"].items():
                    if "shape" in one and "encoded_tokens" in key:
                        one["shape"] = [length]
                return {path: json.dumps(value).encode()}
        # A changed object, and a manifest that agrees with it.
        key = chance.choice([other for other in self.names if other.removeprefix(self.below).startswith(SPLITS)])
        forged = bytearray(files[key])
        forged[chance.randrange(len(forged))] ^= 1
        manifest = json.loads(files[f"{self.below}manifest.json"])
        stored = Store.at(self.output.parent / "forged").put(key.removeprefix(self.below), bytes(forged))
        next(entry for entry in manifest["objects"] if entry["key"] == stored.key).update(stored.described())
        return {key: bytes(forged), f"{self.below}manifest.json": json.dumps(manifest).encode()}


def _alike(one: bytes, other: bytes) -> int:
    """Bytes that two have in common at the beginning."""
    count = min(len(one), len(other))
    differs = np.frombuffer(one[:count], "u1") != np.frombuffer(other[:count], "u1")
    return int(differs.argmax()) if differs.any() else count


KINDS = [
    *["bytes"] * 8, *["json_value"] * 3, *["swap", "other"] * 2, "delete", "add", "directory", "relink",
    "consolidated", "forge",
]  # fmt: skip

ADDED = [
    "stray", "zarr.json", ".zattrs", ".zgroup", ".zmetadata", "train/zarr.json", "train/.zattrs", "train/.zgroup",
    "train/encoded_tokens/c/99", "train/encoded_tokens/99", "train/encoded_tokens/c/1", "train/seq_starts/1",
    "train/0", "train/encoded_tokens/.zarray", "train/encoded_tokens/zarr.json", "test/zarr.json",
    "documents/zarr.json", "a/b/c", "train/encoded_tokens/.0.part", "manifest.json.bak", "README.md",
    "validation/encoded_tokens/c/0/0",
]  # fmt: skip


def _same(name: str, one: bytes | str | None, other: bytes | str | None) -> bool:
    """Whether a path is as it was. None is a directory or nothing."""
    if one == other or not (
        isinstance(one, bytes) and isinstance(other, bytes) and name.endswith(("json", ".zattrs", ".zgroup"))
    ):
        return one == other
    try:
        return json.dumps(json.loads(one)) == json.dumps(json.loads(other))
    except (ValueError, RecursionError):
        return False


PLACES = {
    "the root": r"^(?!latest|manifest\.json)[^/]*$",
    "metadata": r"^(?!documents).*/(zarr\.json|\.zarray|\.zattrs|\.zgroup)$",
    "starts": "^(?!documents).*/seq_starts",
    "tokens": "^(?!documents).*/encoded_tokens",
    "documents": "^documents/",
    "the manifest": r"^manifest\.json$",
    "the pointer": r"^latest\.json$",
    "the link": "^latest$",
    "others": "",
}
"""Patterns of what may be changed, the most telling first."""

# The judges


def judge(mutations: Mutations, kind: str, changed: list[str], truth: Truth) -> str:
    """What becomes of a mutation, in words. WrongError where verify misses it, or flat_tokens reads wrong tokens that the format
    could have shown.
    """
    output = mutations.output
    if not changed:
        return "no change"
    found = _refused(lambda: flat_tokens.verify(output, "full"))
    whole = _reading(truth, lambda: _at_once(output))
    parts = _reading(truth, lambda: _by_sequences(output))
    where = _where(changed, mutations)
    if not found:
        if where == "the pointer":
            if _refused(lambda: read_pointer(Store.at(output))):
                raise WrongError(f"missed-the-pointer-{kind}", f"builds stop at the pointer, but verify passes: {kind} {changed}")
            return "pointer: other numbers or former versions, which nothing contradicts"
        raise WrongError(f"missed-{where.replace(' ', '-')}-{kind}", f"verify passes: {kind} {changed}; {whole}, {parts}")
    # The pointer may name any version. Without its last entries, seq_starts ends as before if they are of empty sequences.
    metadata_of_starts = all("/seq_starts/" in name for name in changed)
    cannot_be_seen = kind in WHOLE_OBJECTS or where == "the pointer" or (where == "metadata" and metadata_of_starts)
    if whole == "wrong" and not cannot_be_seen:
        raise WrongError(f"wrong-read-{where.replace(' ', '-')}-{kind}", f"verify finds {kind} {changed}, but reading does not")
    if parts == "wrong" and not (cannot_be_seen or (mutations.is_raw and where == "tokens")):
        raise WrongError(f"wrong-part-{where.replace(' ', '-')}-{kind}", f"verify finds {kind} {changed}, but reading does not")
    return f"{where}, {kind}: found by verify; all {whole}, parts {parts}"


def table(outcomes: Iterable[Outcome]) -> str:
    """What became of mutations that changed something."""
    heads = ("dataset", "changes", "found by verify", "missed", "all read wrong", "parts read wrong")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * 5}"]
    for outcome in outcomes:
        changed = {told: count for told, count in outcome.returned.items() if told not in ("no change", "not a mutation")}
        found, *wrong = (
            sum(count for told, count in changed.items() if words in told)
            for words in ("found by verify", "all wrong", "parts wrong")
        )
        missed = sum(count for fault, count in outcome.faults.items() if fault.startswith("missed"))
        counts = (sum(changed.values()) + outcome.faults.total(), found, missed, *wrong)
        lines.append(f"| {outcome.target} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)


def _where(changed: Sequence[str], mutations: Mutations) -> str:
    """The most telling of the changed things."""
    keys = [name.removeprefix(mutations.below) for name in changed]
    return next(place for place, pattern in PLACES.items() if any(map(re.compile(pattern).search, keys)))


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return True
    return False


def _reading(truth: Truth, read: Callable[[], Truth]) -> str:
    try:
        found = read()
    except (ValueError, OSError):
        return "refused"
    return "right" if found == truth else "wrong"


def _at_once(output: Path) -> Truth:
    dataset, found = flat_tokens.open(output), {}
    for name in SPLITS:
        split = getattr(dataset, name)
        ids, starts = (split.slice(0, split.token_count) >> 1).tolist(), split.seq_starts.read(0, split.seq_count + 1).tolist()
        found[name] = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    return found


def _by_sequences(output: Path) -> Truth:
    dataset = flat_tokens.open(output)
    splits = {name: getattr(dataset, name) for name in SPLITS}
    return {name: [split.sequence(i).tolist() for i in range(min(split.seq_count, 1000))] for name, split in splits.items()}


DATASETS = {
    f"dataset-{layout}{'-small' if is_small else ''}": dataset(layout, is_small=is_small)
    for layout in ("mmap", "compact", "zarr2")
    for is_small in (True, False)
}
