"""What the tests of faults share: small inputs, builds here and in processes of their own, and what they left."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flat_tokens.stores.store import Store
from flat_tokens.tools.export import ExportResult, export_of
from flows.pipelines.build import BuildResult, build
from flows.pipelines.derive import DerivedResult, derive
from flows.pipelines.exchange import ImportResult, export, import_files
from flows.pipelines.refresh import RefreshResult, refresh
from flows.pipelines.retokenize import BESIDE, reruns
from flows.runners.processes import Threads
from tasks.config import BuildConfig, TokenizerConfig
from tasks.derive.request import DeriveRequest, ImportRequest
from tasks.garbage import Policy

Settings = dict[str, Any]


def write_notes(path: Path, count: int, words: int = 12) -> Path:
    """A JSONL file of *count* documents that differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"{path.stem}-{i}", "text": f"{path.stem} {i}: " + "salt wind " * (words + i % 5)})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings_of(
    output: str | Path, *paths: Path, keep: Sequence[str] | None = None, of_sources: Mapping[str, Any] = {}, **settings: Any
) -> Settings:
    """A configuration as JSON can carry it: a source for each path, byte tokens, half of the documents validation."""
    sources = [{"name": path.stem, "path": str(path), "id_column": "id", "keep_columns": keep, **of_sources} for path in paths]
    return {"output": str(output), "sources": sources, "tokenizer": "bytes", "validation_fraction": 0.5, **settings}


def build_here(settings: Settings | BuildConfig, workers: int = 2, publish_anyway: str | None = None) -> BuildResult:
    with Threads(workers) as runner:
        return build(BuildConfig.model_validate(settings), runner, publish_anyway)


def refresh_here(
    settings: Settings | BuildConfig, policy: Policy | None = None, publish_anyway: str | None = None
) -> RefreshResult:
    with Threads(2) as runner:
        return refresh(BuildConfig.model_validate(settings), runner, policy, publish_anyway)


def retokenize_here(dataset: str | Settings, *tokenizers: str | TokenizerConfig, output: str = BESIDE) -> list[BuildResult]:
    given = BuildConfig.model_validate(dataset) if isinstance(dataset, dict) else dataset
    with reruns(given, tokenizers, output, lambda _: Threads(2)) as (configs, publish):
        return list(map(publish, configs))


def derive_here(
    operation: str | Settings, *inputs: str | Path, output: str | Path, workers: int = 2, **settings: Any
) -> DerivedResult:
    told = {"operation": operation} if isinstance(operation, str) else operation
    request = {"operation": told, "inputs": list(map(str, inputs)), "output": str(output), **settings}
    with Threads(workers) as runner:
        return derive(DeriveRequest.model_validate(request), runner)


def export_here(dataset: str | Path, output: str | Path, format: str = "megatron", **options: Any) -> ExportResult:
    with Threads(2) as runner:
        return export(export_of(dataset, format, options), str(output), runner)


def import_here(path: str | Path, output: str | Path, workers: int = 2, **settings: Any) -> ImportResult:
    with Threads(workers) as runner:
        return import_files(ImportRequest(path=str(path), output=str(output), **settings), runner)


def entries(directory: str | Path, above: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All that is below a directory, by name. Path.rglob would take a third of a trial's time."""
    with os.scandir(directory) as found:
        for entry in found:
            yield above + entry.name, entry
            if entry.is_dir(follow_symlinks=False):
                yield from entries(entry.path, f"{above}{entry.name}/")


def objects(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key, _ in store.listing()}


def digests(directory: Path) -> dict[str, str]:
    """The sha256 of every file below a directory, by its name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def version_digests(root: Path, version: str) -> dict[str, str]:
    return digests(root / "versions" / version)


def same_bytes(*results: BuildResult | RefreshResult) -> bool:
    """Whether the versions of all results have the same files, and what each left out, too."""
    versions = [Path(one.path) for one in results]
    beside = [version.parents[1] / "_cache/left_out" / version.name for version in versions]
    return len({json.dumps([*map(digests, places)]) for places in zip(versions, beside, strict=True)}) == 1


@contextlib.contextmanager
def shards_stay() -> Iterator[None]:
    """Builds in the block store their tokens in shards, as one by processes does, and leave these, as one does that dies after
    its commit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.assemble.assembler.Assembler.open_sink", lambda *_, **__: None)
        patch.setattr("flows.pipelines.publish.remove_held_shards", lambda root: None)
        yield


def unpublish(root: Path) -> None:
    """Leave the token shards alone."""
    shutil.rmtree(root / "versions")
    (root / "latest.json").unlink()


def staged(root: Path) -> list[str]:
    """What is left in the staging directory."""
    return sorted(path.relative_to(root).as_posix() for path in root.glob("_staging/**/*"))


def receipts(root: Path) -> set[str]:
    """Keys of the finished shards."""
    return {path.parent.name for path in root.glob("_cache/*/receipt.json")}


def pointer(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "latest.json").read_bytes()))


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def command(config: Path, *arguments: str) -> list[str]:
    """The build as a command of its own; JSON is YAML, so settings can be written as they are."""
    return [sys.executable, "-m", "flows", "build", str(config), "--no-server", *arguments]
