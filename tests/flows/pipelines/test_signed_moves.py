"""Moves of `latest` signed by an ed25519 key: whoever has the public one knows who published what, and what was put back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.checker import DamagedError
from flat_tokens.stores import signing
from flat_tokens.stores.signing import KEY_FILE
from flat_tokens.stores.store import Store
from tasks.garbage import Policy, collect
from tasks.output import pointer as pointers
from tasks.output import swap
from tasks.output.pointer import read_pointer
from tasks.output.versions import roll_back
from tests.faults.support import build_here, settings_of, write_notes
from tests.keys import KEY, OTHER, key_file, public_pem
from tests.refusal import refusal


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The public key of the private one that the environment names."""
    monkeypatch.setenv(KEY_FILE, str(key_file(tmp_path / "key")))
    return key_file(tmp_path / "key.pub", public_pem(KEY))


def build_version(output: str, tmp_path: Path, seed: int) -> str:
    source = write_notes(tmp_path / "in/a.jsonl", 4)
    return build_here(settings_of(output, source, scratch=str(tmp_path / "scratch"), split_seed=seed)).version


def check(output: str, public: Path, **settings: Any) -> None:
    with signing.using(b""):
        flat_tokens.verify(output, key=public, **settings)


def test_a_stranger_checks_with_the_public_key_alone(output, public, tmp_path, monkeypatch):
    for seed in range(2):
        build_version(output, tmp_path, seed)
    monkeypatch.delenv(KEY_FILE)
    check(output, public, level="full", number=2)
    with refusal("is not signed by this key", DamagedError):
        check(output, key_file(tmp_path / "other", public_pem(OTHER)))


def test_an_earlier_version_that_is_put_back_is_refused(output, public, tmp_path):
    root = Store.at(output)
    first = build_version(output, tmp_path, 0)
    then = root.read("latest.json")
    build_version(output, tmp_path, 1)
    now = json.loads(root.read("latest.json"))
    forged = {**json.loads(then), "sequence": now["sequence"]}
    root.put("latest.json", json.dumps(forged).encode())
    with refusal(f"has version {first} as number 2, but those that the key signed of it are 1", DamagedError):
        check(output, public)
    root.put("latest.json", then)  # as a whole
    with refusal(r"is number 1, but version .* became the latest as number 2: an earlier one was put back", DamagedError):
        check(output, public)
    root.remove(f"versions/{now['version']}")  # and what tells of it goes
    with refusal("is number 1, but number 2 is known", DamagedError):
        check(output, public, number=2)


@pytest.mark.parametrize("path", ["", "latest", "versions/{version}", "copy"])
def test_a_number_needs_a_pointer(public, tmp_path, path):
    """By a version alone nobody can tell that a later one is known."""
    output = tmp_path / "out"
    version = build_version(str(output), tmp_path, 0)
    shutil.copytree(output / "versions" / version, output / "copy")
    if not path:
        (output / "latest.json").unlink()
    there = output / path.format(version=version) if path else output / "latest"
    check(str(there), public)
    with refusal(r"has no latest\.json, whose number could be compared with 1", DamagedError):
        check(str(there), public, number=1)


def test_a_rollback_is_signed_with_a_number_of_its_own(output, public, tmp_path):
    for seed in range(3):
        build_version(output, tmp_path, seed)
    for number in (4, 5):
        roll_back(Store.at(output))
        check(output, public, number=number)
    collect(Store.at(output), Policy(keep_versions=1, grace_days=0), delete=True)
    check(output, public, number=5)


def test_what_was_made_without_the_key_is_not_published(output, public, tmp_path, monkeypatch, tool):
    with monkeypatch.context() as other:
        other.delenv(KEY_FILE)
        build_version(output, tmp_path, 0)
        version = build_version(output, tmp_path, 1)
        roll_back(Store.at(output))
    with refusal(r"latest\.json: is not signed"):
        build_version(output, tmp_path, 1)
    if output.startswith("memory"):
        return
    for path, then in ((output, r"manifest\.json: is not signed"), (f"{output}/versions/{version}", None)):
        tool.out("verify", path, "--full", "--sign")
        if then is not None:
            with refusal(then):
                build_version(output, tmp_path, 1)
    assert build_version(output, tmp_path, 1) == version
    check(output, public)


def test_a_manifest_that_was_changed_is_refused(output, public, tmp_path):
    version, root = build_version(output, tmp_path, 0), Store.at(output)
    with signing.using(b""):
        root.put(f"versions/{version}/manifest.json", root.read(f"versions/{version}/manifest.json") + b"\n")
    with refusal("is not signed by this key", DamagedError):
        check(output, public)


@pytest.mark.parametrize("dies_at", ["swap", "say_of_move"])
def test_a_kill_around_the_move_raises_no_false_alarm(output, public, tmp_path, monkeypatch, dies_at):
    build_version(output, tmp_path, 0)
    module = swap if dies_at == "swap" else pointers
    real = getattr(module, dies_at)

    def die(root: Store, key: Any, *others: Any) -> Any:
        if (dies_at == "swap" and key != "latest.json") or others == ("offered",):
            return real(root, key, *others)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            build_version(output, tmp_path, 1)
    check(output, public)
    version = build_version(output, tmp_path, 1)
    assert read_pointer(Store.at(output)).version == version
    check(output, public, number=2)


def test_a_private_key_is_not_given_as_the_public_one(public, tmp_path):
    with refusal("has a private key"):
        flat_tokens.verify(tmp_path, key=tmp_path / "key")
