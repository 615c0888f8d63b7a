"""Mutations of published datasets in every layout, each judged by ``verify --full`` and by what readers get.

An input is the JSON of one mutation, such as ``["flip", "versions/LATEST/train/zarr.json", 17, 3]``. Paths are below the output,
which has two versions of the same shape.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import flat_tokens
from flat_tokens.arrays.layouts import LAYOUTS, ArraySpec, Layout, LayoutName
from flat_tokens.manifest import SPLITS
from flat_tokens.stores.store import Store
from tasks.output.pointer import read_pointer
from tests.fuzz.driver import Fuzzed, Outcome, Target, WrongError, portable
from tests.fuzz.mutators import json_values
from tests.made import docs_of, publish_docs

OBJECT_TOKENS, CHUNK_TOKENS = 64, 16

Truth = dict[str, list[list[int]]]

WHOLE_OBJECTS = ("add", "swap", "other", "rename")
"""Mutations that put a sound object in another's place: arrays have no digest of their objects, only the manifest has."""


def in_small_objects(layout: Layout) -> Layout:
    """The layout with objects of some tokens, so that arrays have several of them, and these several chunks."""

    def cut(spec: ArraySpec) -> ArraySpec:
        chunk = OBJECT_TOKENS if spec.zarr_format == 2 else CHUNK_TOKENS
        return replace(spec, object_length=OBJECT_TOKENS, chunk_length=chunk, block_length=spec.block_length and chunk // 2)

    return layout._replace(encoded_tokens=cut(layout.encoded_tokens), seq_starts=cut(layout.seq_starts))


def dataset(layout: LayoutName, *, small: bool) -> Target:
    def prepare(work: Path) -> Fuzzed:
        if small:
            LAYOUTS[layout] = in_small_objects(LAYOUTS[layout])
        output = work / "out"
        versions, truth = _publish(output, layout)
        flat_tokens.verify(output, "full")
        assert _at_once(output) == _by_sequences(output) == _by_zarr(output / "latest") == truth
        pristine = {
            path.relative_to(output).as_posix(): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()
        }
        pristine = {name: data for name, data in pristine.items() if not name.startswith(".") and not name.startswith("latest/")}
        mutations = Mutations(output, pristine, *versions, is_raw=LAYOUTS[layout].encoded_tokens.zstd_level is None)

        def run(data: bytes) -> str:
            mutation = json.loads(data)
            mutations.restore()
            try:
                mutations.apply(mutation)
            except (OSError, ValueError, LookupError, TypeError):
                return "not a mutation"  # of a mutation
            return judge(mutations, mutation[0], truth)

        words = {versions[0].encode(): b"FORMER", versions[1].encode(): b"LATEST"}
        words[json.loads(pristine["latest.json"])["manifest_sha256"].encode()] = b"DIGEST"
        return portable(Fuzzed([b'["nothing"]'], mutations.mutate, run, (str(output),)), words)

    return Target(f"dataset-{layout}{'-small' if small else ''}", prepare)


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
    """An output that is mutated and restored. ``apply`` takes a mutation: its kind, a path, and more."""

    def __init__(self, output: Path, pristine: dict[str, bytes], former: str, latest: str, *, is_raw: bool) -> None:
        self.output, self.pristine, self.former, self.latest, self.is_raw = output, pristine, former, latest, is_raw
        self.below = f"versions/{latest}/"
        self.names = [name for name in pristine if name.startswith(self.below)]
        self.link = os.readlink(output / "latest")
        self._touched: set[str] = set()
        self._json = json_values()

    def restore(self) -> None:
        if not self._touched:
            return
        if os.path.lexists(self.output / "latest") and not (self.output / "latest").is_symlink():
            _remove(self.output / "latest")
        for path in sorted(self.output.rglob("*"), reverse=True):
            name = path.relative_to(self.output).as_posix()
            if path.is_file() and not name.startswith(".") and name not in self.pristine and not path.is_symlink():
                path.unlink()
        for name, data in self.pristine.items():
            path = self.output / name
            if path.is_dir():
                shutil.rmtree(path)
            for parent in path.parents:
                if parent.is_file():
                    parent.unlink()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (self.output / "latest").unlink(missing_ok=True)
        (self.output / "latest").symlink_to(self.link)
        self._touched = set()

    def apply(self, mutation: list[Any]) -> None:
        kind, *arguments = mutation
        self._touched = {str(argument) for argument in arguments[:2]} | {kind}
        getattr(self, f"_{kind}")(*arguments)

    def changed(self) -> list[str]:
        """Names of what is not as it was; JSON of the same value is."""
        found = []
        for name, data in self.pristine.items():
            path = self.output / name
            now = path.read_bytes() if path.is_file() else None
            if now != data and not (now is not None and name.endswith(("json", ".zattrs", ".zgroup")) and _same_json(now, data)):
                found.append(name)
        for path in self.output.rglob("*"):
            name = path.relative_to(self.output).as_posix()
            if path.is_file() and not name.startswith((".", "latest/")) and name not in self.pristine:
                found.append(name)
        link = self.output / "latest"
        if not link.is_symlink() or os.path.realpath(link) != os.path.realpath(self.output / self.link):
            found.append("latest")
        return found

    # Kinds

    def _nothing(self) -> None: ...

    def _flip(self, name: str, at: int, bit: int) -> None:
        data = bytearray((self.output / name).read_bytes())
        data[at] ^= 1 << bit
        (self.output / name).write_bytes(data)

    def _cut(self, name: str, size: int) -> None:
        os.truncate(self.output / name, size)

    def _extend(self, name: str, text: str) -> None:
        with (self.output / name).open("ab") as file:
            file.write(text.encode("latin-1"))

    def _zero(self, name: str, start: int, stop: int) -> None:
        data = bytearray((self.output / name).read_bytes())
        data[start:stop] = bytes(stop - start)
        (self.output / name).write_bytes(data)

    def _swap(self, one: str, other: str) -> None:
        first, second = (self.output / one).read_bytes(), (self.output / other).read_bytes()
        (self.output / one).write_bytes(second)
        (self.output / other).write_bytes(first)

    def _delete(self, name: str) -> None:
        _remove(self.output / name)

    def _add(self, name: str, text: str) -> None:
        (self.output / name).parent.mkdir(parents=True, exist_ok=True)
        (self.output / name).write_bytes(text.encode("latin-1"))

    def _json_value(self, name: str, text: str) -> None:
        (self.output / name).write_bytes(text.encode("latin-1"))

    def _other(self, name: str) -> None:
        """An object of the other version."""
        shutil.copyfile(self.output / name.replace(self.latest, self.former), self.output / name)

    def _rename(self, one: str, other: str) -> None:
        os.replace(self.output / one, self.output / other)

    def _directory(self, name: str) -> None:
        _remove(self.output / name)
        (self.output / name).mkdir()

    def _relink(self, target: str) -> None:
        (self.output / "latest").unlink()
        (self.output / "latest").symlink_to(target)

    def _forge(self, name: str, at: int, bit: int) -> None:
        """A changed object, and a manifest that agrees with it."""
        self._flip(name, at, bit)
        version = Store.at(self.output / self.below)
        key = name.removeprefix(self.below)
        manifest = json.loads(version.read("manifest.json"))
        entry = next(entry for entry in manifest["objects"] if entry["key"] == key)
        entry.update(version.digest(key).described())
        (self.output / self.below / "manifest.json").write_text(json.dumps(manifest))

    def _consolidated(self, length: int) -> None:
        """Metadata of all arrays in that of the root, which plain zarr believes first: with other lengths."""
        path = self.output / self.below
        root = zarr.open_group(path, mode="r", use_consolidated=False)
        zarr.consolidate_metadata(path)
        name = "zarr.json" if root.metadata.zarr_format == 3 else ".zmetadata"
        text = json.loads((path / name).read_bytes())
        for key, value in _arrays(text):
            if key.endswith("encoded_tokens"):
                value["shape"] = [length]
        (path / name).write_text(json.dumps(text))

    # Drawing one

    def mutate(self, chance: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        name = chance.choice([*self.names, *self.names, "latest.json"])
        content = self.pristine[name]
        at = chance.choice((chance.randrange(len(content)), chance.randrange(min(len(content), 3000)), len(content) - 1))
        return json.dumps(self._drawn(chance, name, content, at, pool)).encode()

    def _drawn(self, chance: random.Random, name: str, content: bytes, at: int, pool: Sequence[bytes]) -> list[Any]:
        kind = chance.choice(KINDS)
        added = f"{self.below}{chance.choice(ADDED)}"
        match kind:
            case "cut":
                return [kind, name, chance.choice((0, at, len(content) - 1, len(content) - 4))]
            case "extend":
                return [kind, name, _text(chance.choice((b"\0", b"\n", bytes(100), content[-20:], content[:4096])))]
            case "zero":
                return [kind, name, at, min(at + chance.choice((1, 4, 100, 10_000)), len(content))]
            case "swap":
                alike = [other for other in self.names if other.rpartition("/")[0] == name.rpartition("/")[0]]
                return [kind, name, chance.choice(chance.choice((self.names, alike or self.names)))]
            case "delete":
                parent = name.rpartition("/")[0]
                return [kind, chance.choice((name, name, name, parent if parent.startswith(self.below) else name))]
            case "add":
                small = [data for path, data in self.pristine.items() if path.startswith(self.below) and len(data) < 4096]
                return [kind, added, _text(chance.choice([b"", b"{}", b'{"a": 1}', b'{"zarr_format": 2}', b"x" * 100, *small]))]
            case "json_value":
                described = [other for other in [*self.names, "latest.json"] if self.pristine[other][:1] == b"{"]
                root = [other for other in described if "/" not in other.removeprefix(self.below)]
                chosen = chance.choice(chance.choice((described, root)))
                return [kind, chosen, _text(self._json(chance, self.pristine[chosen], pool))]
            case "rename":
                return [kind, name, chance.choice((chance.choice(self.names), added))]
            case "other" | "directory":
                return [kind, name]
            case "relink":
                return [kind, chance.choice((f"versions/{self.former}", "versions/gone", "versions", ".", f"{self.below}train"))]
            case "consolidated":
                return [kind, chance.choice((0, 1, 100, 10_000))]
            case "forge":
                objects = [other for other in self.names if other.removeprefix(self.below).startswith(SPLITS)]
                chosen = chance.choice(objects)
                return [kind, chosen, chance.randrange(len(self.pristine[chosen])), 0]
        return [kind, name, at, chance.randrange(8)]


KINDS = [
    "flip",
    "flip",
    "flip",
    "flip",
    "cut",
    "cut",
    "extend",
    "zero",
    "swap",
    "swap",
    "delete",
    "add",
    "json_value",
    "json_value",
]
KINDS += ["json_value", "other", "other", "rename", "directory", "relink", "consolidated", "forge"]

ADDED = ["stray", "zarr.json", ".zattrs", ".zgroup", ".zmetadata", "train/zarr.json", "train/.zattrs", "train/.zgroup"]
ADDED += ["train/encoded_tokens/c/99", "train/encoded_tokens/99", "train/encoded_tokens/c/1", "train/seq_starts/1", "train/0"]
ADDED += ["train/encoded_tokens/.zarray", "train/encoded_tokens/zarr.json", "test/zarr.json", "documents/zarr.json", "a/b/c"]
ADDED += ["train/encoded_tokens/.0.part", "manifest.json.bak", "README.md", "validation/encoded_tokens/c/0/0"]


def _text(data: bytes) -> str:
    return data.decode("latin-1")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other) and json.dumps(json.loads(one)) == json.dumps(json.loads(other)))
    except (ValueError, RecursionError):
        return False


def _arrays(value: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The metadata of arrays within consolidated metadata, with the names under which they stand."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict) and "shape" in item:
            yield key.removesuffix("/.zarray"), item
        else:
            yield from _arrays(item, key)


# The judges


def judge(mutations: Mutations, kind: str, truth: Truth) -> str:
    """What becomes of a mutation, in words. WrongError where verify misses it, or flat_tokens reads wrong tokens that the format
    could have shown.
    """
    output, changed = mutations.output, mutations.changed()
    if not changed:
        return "no change"
    found = _refused(lambda: flat_tokens.verify(output, "full"))
    whole = _reading(truth, lambda: _at_once(output))
    parts = _reading(truth, lambda: _by_sequences(output))
    plain = _plain(mutations, truth)
    where = _where(changed, mutations)
    if not found:
        if where == "the pointer":
            if _refused(lambda: read_pointer(Store.at(output))):
                raise WrongError(f"missed-the-pointer-{kind}", f"builds stop at the pointer, but verify passes: {kind} {changed}")
            return "pointer: other numbers or former versions, which nothing contradicts"
        raise WrongError(
            f"missed-{where.replace(' ', '-')}-{kind}", f"verify passes: {kind} {changed}; {whole}, {parts}, zarr {plain}"
        )
    # The pointer may name any version. Without its last entries, seq_starts ends as before if they are of empty sequences.
    metadata_of_starts = all("/seq_starts/" in name for name in changed)
    cannot_be_seen = kind in WHOLE_OBJECTS or where == "the pointer" or (where == "metadata" and metadata_of_starts)
    if whole == "wrong" and not cannot_be_seen:
        raise WrongError(f"wrong-read-{where.replace(' ', '-')}-{kind}", f"verify finds {kind} {changed}, but reading does not")
    if parts == "wrong" and not (cannot_be_seen or (mutations.is_raw and where == "tokens")):
        raise WrongError(f"wrong-part-{where.replace(' ', '-')}-{kind}", f"verify finds {kind} {changed}, but reading does not")
    return f"{where}, {kind}: found by verify; flat_tokens: all {whole}, parts {parts}; zarr: {plain}"


def table(outcomes: Iterable[Outcome]) -> str:
    """What became of mutations that changed something."""
    heads = ("dataset", "changes", "found by verify", "missed", "all read wrong", "parts read wrong", "read wrong by zarr")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * 6}"]
    for outcome in outcomes:
        changed = {told: count for told, count in outcome.returned.items() if told not in ("no change", "not a mutation")}
        found, *wrong = (
            sum(count for told, count in changed.items() if words in told)
            for words in ("found by verify", "all wrong", "parts wrong", "zarr: wrong")
        )
        missed = sum(count for fault, count in outcome.faults.items() if fault.startswith("missed"))
        counts = (sum(changed.values()) + outcome.faults.total(), found, missed, *wrong)
        lines.append(f"| {outcome.target} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)


def _where(changed: Sequence[str], mutations: Mutations) -> str:
    """The most telling of the changed things."""
    found = set()
    for name in changed:
        key = name.removeprefix(mutations.below)
        if name in ("latest.json", "latest"):
            found.add("the pointer" if name == "latest.json" else "the link")
        elif key == "manifest.json":
            found.add("the manifest")
        elif "/" not in key:
            found.add("the root")
        elif key.startswith("documents"):
            found.add("documents")
        elif key.rpartition("/")[2] in ("zarr.json", ".zarray", ".zattrs", ".zgroup"):
            found.add("metadata")
        else:
            found.add("starts" if "seq_starts" in key else "tokens" if "encoded_tokens" in key else "others")
    order = ("the root", "metadata", "starts", "tokens", "documents", "the manifest", "the pointer", "the link", "others")
    return next(name for name in order if name in found)


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


def _plain(mutations: Mutations, truth: Truth) -> str:
    """What plain zarr reads, through the link and at the version itself."""
    for path in (mutations.output / "latest", mutations.output / mutations.below):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _by_zarr(path)
        except Exception:  # zarr's errors are of many kinds
            return "refused"
        if found != truth:
            return "wrong"
    return "right"


def _by_zarr(path: Path) -> Truth:
    root, found = zarr.open_group(path, mode="r"), {}
    for name in SPLITS:
        starts, tokens = (root[f"{name}/{array}"] for array in ("seq_starts", "encoded_tokens"))
        if max(starts.shape[0], tokens.shape[0]) > 1 << 20:  # type: ignore[union-attr]
            return {}
        ids, edges = (np.asarray(tokens[:]) >> 1).tolist(), np.asarray(starts[:]).tolist()  # type: ignore[index]
        found[name] = [ids[start:stop] for start, stop in itertools.pairwise(edges)]
    return found


DATASETS = [dataset(layout, small=small) for layout in ("mmap", "compact", "zarr2") for small in (True, False)]
