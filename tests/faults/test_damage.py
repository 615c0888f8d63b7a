"""Bits that flip, files that end early, receipts that lie: what is staged is built again, what is published is left alone."""

import contextlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from tasks.models import digest_of
from tests.damage import change_file, flip
from tests.examples import first_fast
from tests.faults.support import (
    Bomb,
    Settings,
    build_here,
    digests,
    pointer,
    receipts,
    settings_of,
    shards_stay,
    staged,
    unpublish,
    version_digests,
    write_notes,
)
from tests.refusal import refusal

Damage = Callable[[Path], None]
Spoil = Callable[[Path, str, str], None]
Built = tuple[Settings, str, dict[str, str]]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


remove = Path.unlink


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module", autouse=True)
def _shards_stay() -> Iterator[None]:
    with shards_stay():
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, _shards_stay: None) -> Built:
    """A build of many slices, undisturbed: what it was told, its version, its bytes."""
    work = tmp_path_factory.mktemp("built")
    settings = settings_of(work / "out", write_notes(work / "in/a.jsonl", 12), slice_bytes=150)
    result = build_here(settings)
    assert result.slices >= 10
    return settings, result.version, version_digests(work / "out", result.version)


@pytest.fixture
def output(built: Built, tmp_path: Path) -> Path:
    """A copy of the output, to be damaged."""
    return shutil.copytree(built[0]["output"], tmp_path / "out", symlinks=True)


def check_mended(built: Built, root: Path, damaged: set[str], caplog: pytest.LogCaptureFixture) -> None:
    """A rerun builds the damaged shards again, says so, keeps what was there aside, and comes to the same bytes."""
    settings, version, expected = built
    unpublish(root)
    stamps = {key: (root / f"_cache/{key}/zarr.json").stat().st_ctime_ns for key in receipts(root) - damaged}
    with caplog.at_level(logging.WARNING):
        result = build_here({**settings, "output": str(root)})
    warned = {message.split()[2] for message in caplog.messages if "is not trusted and is rebuilt" in message}
    assert warned == {key[:12] for key in damaged}
    assert {path.name.rpartition("-")[0] for path in root.glob("_quarantine/*-*")} == damaged
    assert stamps == {key: (root / f"_cache/{key}/zarr.json").stat().st_ctime_ns for key in stamps}
    assert result.version == version
    assert version_digests(root, version) == expected
    assert staged(root) == []
    flat_tokens.verify(root, "full")


@pytest.mark.parametrize("damage", first_fast([remove, flip, become_directory, cut_off, empty], 3, every=2))
def test_damage_to_any_file_of_a_shard_is_found_and_the_shard_built_again(built, output, damage, caplog):
    """Each file in turn, in a shard of its own. One whose receipt is gone is not there."""
    keys = sorted(receipts(output))
    names = [name for name in digests(output / "_cache" / keys[0]) if (damage, name) != (remove, "receipt.json")]
    damaged = dict(zip(keys, names, strict=False))
    assert len(damaged) == len(names)
    for key, name in damaged.items():
        damage(output / "_cache" / key / name)
    check_mended(built, output, set(damaged), caplog)


def test_what_has_no_receipt_is_made_again(built, output, caplog):
    """As after a kill between the shard and its receipt. Nobody counts on it, so it is not put aside, and nobody is warned,
    unless it is no shard at all.
    """
    before = {key: (output / f"_cache/{key}/receipt.json").read_bytes() for key in sorted(receipts(output))}
    _, spoilt, replaced, lacking, *_ = before
    for key in list(before)[:4]:
        remove(output / "_cache" / key / "receipt.json")
    flip(output / "_cache" / spoilt / "encoded_tokens/c/0")
    shutil.rmtree(output / "_cache" / replaced)
    (output / "_cache" / replaced).write_text("in the way")
    shutil.rmtree(output / "_cache" / lacking / "documents")
    check_mended(built, output, {replaced}, caplog)
    assert before == {key: (output / f"_cache/{key}/receipt.json").read_bytes() for key in before}


def foreign(root: Path, key: str, other: str) -> None:
    """The receipt of another shard, objects and all."""
    shutil.rmtree(root / "_cache" / key)
    shutil.copytree(root / "_cache" / other, root / "_cache" / key)


def renamed(root: Path, key: str, other: str) -> None:
    """The receipt of another shard, under this one's name."""
    receipt = root / "_cache" / key / "receipt.json"
    shutil.copy(root / "_cache" / other / "receipt.json", receipt)
    forge(receipt, {"key": key})


def forge(receipt: Path, row: Any) -> None:
    """Change the facts of a receipt, and its digest."""
    change_file(receipt, row)
    change_file(receipt, lambda facts: facts.update(sha256=digest_of({k: v for k, v in facts.items() if k != "sha256"})))


def pointing_out(name: str) -> Spoil:
    """A receipt with an object that lies elsewhere."""

    def write(root: Path, key: str, other: str) -> None:
        (root / "outside").write_bytes(b"outside")
        outside = [name.format(root=root), 7, "0" * 64]
        forge(root / "_cache" / key / "receipt.json", lambda facts: facts["objects"].append(outside))

    return write


def junk(content: bytes) -> Spoil:
    return lambda root, key, other: (root / "_cache" / key / "receipt.json").write_bytes(content)


SPOILT = [
    foreign,
    renamed,
    *map(
        pointing_out,
        ("../../outside", "encoded_tokens/../../../outside", "{root}/outside", "encoded_tokens", "nul\0", ""),
    ),
    *map(junk, (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"sha256": ' + b"9" * 5000 + b"}")),
    junk(pickle.dumps(Bomb(Path("ran")))),
]


@pytest.mark.parametrize("those", [SPOILT[::2], SPOILT[1::2]], ids=len)
def test_a_receipt_that_lies_is_not_believed(built, output, those, caplog):
    """Each of those of several shards."""
    *keys, other = sorted(receipts(output))
    lying = dict(zip(keys[: len(those)], those, strict=True))
    for key, spoil in lying.items():
        spoil(output, key, other)
    check_mended(built, output, set(lying), caplog)


def test_damaged_objects_of_a_published_version_are_found_and_never_overwritten(built, output):
    """Readers may have it open: who removes the version gets it back from the shards, byte by byte."""
    settings, version, expected = built
    published = output / "versions" / version
    for name in sorted(expected):
        whole = (published / name).read_bytes()
        flip(published / name)
        spoiled = (published / name).read_bytes()
        with refusal(re.escape(published.name)):
            flat_tokens.verify(output, "full")
        with contextlib.suppress(ValueError):  # a quick check finds some of it
            build_here({**settings, "output": str(output)})
        assert (published / name).read_bytes() == spoiled
        (published / name).write_bytes(whole)
    flat_tokens.verify(output, "full")
    flip(published / "train/encoded_tokens/c/0")

    shutil.rmtree(published)
    again = build_here({**settings, "output": str(output)})
    assert again.slices_reused == again.slices
    assert version_digests(output, version) == expected
    assert pointer(output)["sequence"] == 1


def test_a_rerun_over_a_shortened_version_says_so(built, output, tmp_path, terminal):
    settings, version, _ = built
    cut_off(output / "versions" / version / "train/encoded_tokens/c/0")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**settings, "output": str(output)}))
    errors = terminal.errors("build", config, "--no-server", status=1)
    assert len(errors.splitlines()) == 1
    assert "train/encoded_tokens/c/0" in errors
    assert f"Restore the version from a copy, or move {output}/versions/{version} elsewhere and build again." in errors


NOT_A_POINTER = r"latest\.json: is not .*\. Restore it or remove it, and run again\."


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"sequence": "1"}, NOT_A_POINTER),
        ({"version": None}, NOT_A_POINTER),
        # It may be the manifest that is damaged: the pointer holds its only digest, so it is not written anew.
        ({"manifest_sha256": "0" * 64}, "one of them is damaged"),
    ],
)
def test_a_damaged_pointer_is_a_clear_error(built, output, row, told):
    """Before any work; nothing is overwritten."""
    change_file(output / "latest.json", row)
    before, settings = (output / "latest.json").read_bytes(), {**built[0], "output": str(output)}
    with refusal(told):
        build_here(settings)
    assert (output / "latest.json").read_bytes() == before
    (output / "latest.json").write_bytes(b"")
    with refusal(NOT_A_POINTER):
        build_here({**settings, "split_seed": 9})
    assert len(list((output / "versions").iterdir())) == 1

    (output / "latest.json").unlink()
    assert build_here(settings).was_published
    flat_tokens.verify(output, "full")


def test_a_pointer_to_a_version_that_is_gone_moves_on(built, output):
    change_file(output / "latest.json", {"version": "gone", "sequence": 7})
    result = build_here({**built[0], "output": str(output)})
    assert result.was_published
    assert pointer(output) == {**pointer(Path(built[0]["output"])), "sequence": 8}
