"""Outputs endorsed by an ed25519 key: whoever has the public key knows who published what, and that nothing was put back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.checker import DamagedError
from flat_tokens.stores.endorsing import PRIVATE_KEY_FILE, private_key, private_key_of
from flat_tokens.stores.store import Store
from tasks.output import pointer as pointers
from tasks.output.pointer import read_pointer
from tasks.output.versions import roll_back
from tests.faults.support import build_here, settings_of, write_notes

serialization: Any = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ed25519: Any = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")


class Keys:
    """Two files: of a private key, and of its public one."""

    def __init__(self, here: Path, name: str) -> None:
        key, raw = ed25519.Ed25519PrivateKey.generate(), serialization.NoEncryption()
        self.private, self.public = here / name, here / f"{name}.pub"
        self.private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, raw))
        self.private.chmod(0o600)
        told = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.public.write_bytes(told)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    made = Keys(tmp_path, "key")
    monkeypatch.setenv(PRIVATE_KEY_FILE, str(made.private))
    return made


def build_version(output: str, tmp_path: Path, seed: int) -> str:
    source = write_notes(tmp_path / "in" / "a.jsonl", 4)
    told = {**settings_of(Path("unused"), source, scratch=str(tmp_path / "scratch")), "output": output, "split_seed": seed}
    return build_here(told).version


def check(output: str, keys: Keys, **settings: Any) -> None:
    flat_tokens.verify(output, key=keys.public, **settings)


def test_a_stranger_checks_with_the_public_key_alone(
    output: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        build_version(output, tmp_path, seed)
    monkeypatch.delenv(PRIVATE_KEY_FILE)
    check(output, keys, level="full", number=2)
    with pytest.raises(DamagedError, match="is not endorsed by this key"):
        check(output, Keys(tmp_path, "other"))


def test_an_earlier_version_that_is_put_back_is_refused(output: str, keys: Keys, tmp_path: Path) -> None:
    root = Store.at(output)
    first = build_version(output, tmp_path, 0)
    then = root.read("latest.json")
    build_version(output, tmp_path, 1)
    now = json.loads(root.read("latest.json"))
    forged = {**json.loads(then), "sequence": now["sequence"]}
    root.put("latest.json", json.dumps(forged).encode())
    with pytest.raises(DamagedError, match=f"has version {first} as number 2, but those that the key endorsed of it are 1"):
        check(output, keys)
    root.put("latest.json", then)  # as a whole
    with pytest.raises(
        DamagedError, match=r"is number 1, but version .* became the latest as number 2: an earlier one was put back"
    ):
        check(output, keys)
    root.remove(f"versions/{now['version']}")  # and what tells of it goes
    with pytest.raises(DamagedError, match="is number 1, but number 2 is known"):
        check(output, keys, number=2)


@pytest.mark.parametrize("path", ["", "latest", "versions/{version}", "copy"])
def test_a_number_needs_a_pointer(keys: Keys, tmp_path: Path, path: str) -> None:
    """By a version alone nobody can tell that a later one is known."""
    output = tmp_path / "out"
    version = build_version(str(output), tmp_path, 0)
    shutil.copytree(output / "versions" / version, output / "copy")
    if not path:
        (output / "latest.json").unlink()
    there = output / path.format(version=version) if path else output / "latest"
    check(str(there), keys)
    with pytest.raises(DamagedError, match=r"has no latest\.json, whose number could be compared with 1"):
        check(str(there), keys, number=1)


def test_a_rollback_is_endorsed_with_a_number_of_its_own(output: str, keys: Keys, tmp_path: Path) -> None:
    for seed in range(3):
        build_version(output, tmp_path, seed)
    for number in (4, 5):
        roll_back(Store.at(output))
        check(output, keys, number=number)


def test_what_the_key_did_not_see_made_is_not_published(
    output: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.delenv(PRIVATE_KEY_FILE)
        build_version(output, tmp_path, 0)
        version = build_version(output, tmp_path, 1)
        roll_back(Store.at(output))
    with pytest.raises(PermissionError, match="was not endorsed by this key when it was made"):
        build_version(output, tmp_path, 1)
    if output.startswith("memory"):
        return
    command = [sys.executable, "-m", "flat_tokens", "verify", f"{output}/versions/{version}", "--full", "--sign"]
    assert subprocess.run(command, cwd=Path(__file__).parents[3], check=False).returncode == 0
    assert build_version(output, tmp_path, 1) == version
    check(output, keys)


def test_a_manifest_that_was_changed_is_not_endorsed(output: str, keys: Keys, tmp_path: Path) -> None:
    version, root = build_version(output, tmp_path, 0), Store.at(output)
    root.put(f"versions/{version}/manifest.json", root.read(f"versions/{version}/manifest.json") + b"\n")
    with pytest.raises(DamagedError, match="is not endorsed by this key"):
        check(output, keys)


@pytest.mark.parametrize("dies_at", ["swap", "endorse_moved"])
def test_a_kill_around_the_move_raises_no_false_alarm(
    output: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    build_version(output, tmp_path, 0)
    real = getattr(pointers, dies_at)

    def die(root: Store, key: Any, *others: Any) -> Any:
        if dies_at == "swap" and key != "latest.json":
            return real(root, key, *others)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pointers, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            build_version(output, tmp_path, 1)
    check(output, keys)
    version = build_version(output, tmp_path, 1)
    assert read_pointer(Store.at(output)).version == version
    check(output, keys, number=2)


def test_a_key_that_others_may_read_or_that_is_none_stops_everything(keys: Keys, tmp_path: Path) -> None:
    keys.private.chmod(0o640)
    with pytest.raises(PermissionError, match="can be read or written by others"):
        private_key()
    with pytest.raises(PermissionError, match="has no private key"):
        private_key_of(b"secret stuff", "KEY")
    with pytest.raises(ValueError, match="has no public ed25519 key"):
        flat_tokens.verify(tmp_path, key=keys.private)
