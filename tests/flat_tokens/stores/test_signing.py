"""Signatures of records: what they cover, what they refuse, and where keys come from."""

from __future__ import annotations

import hashlib
import hmac
import shutil
from pathlib import Path

import numpy as np
import pytest

import flat_tokens
from flat_tokens import TokenBatch
from flat_tokens.stores import signing
from flat_tokens.stores.records import read_record
from flat_tokens.stores.store import Store

KEY, OTHER = "00112233445566778899aabbccddeeff" * 2, "f" * 64
PLACE = "versions/v1/manifest.json"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one key, which the environment names."""
    path = tmp_path / "keys"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    monkeypatch.setenv(signing.KEY_FILE, str(path))
    return path


def using_keys(*keys: str) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, keys))


def write_dataset(path: Path) -> Path:
    batch = TokenBatch.from_sequences([np.array([1, 2, 3], np.uint32)])
    flat_tokens.write_dataset(path, [batch], [batch])
    return path


def test_a_signature_is_an_hmac_of_the_place_and_the_bytes(tmp_path: Path, key: Path) -> None:
    """The literal is from: printf 'flat-tokens record\\0versions/v1/manifest.json\\0{}' | openssl dgst -sha256 -mac hmac ..."""
    store = Store.at(tmp_path / "out")
    store.put(PLACE, b"{}")
    literal = "5f8c29294a0185340eef72e295dd8385cb00d3757355fbe91c560070592504b0"
    assert (tmp_path / "out" / f"{PLACE}.hmac").read_text() == f"{literal}  {PLACE}\n"
    assert literal == hmac.new(bytes.fromhex(KEY), f"flat-tokens record\0{PLACE}\0{{}}".encode(), hashlib.sha256).hexdigest()
    assert read_record(store, PLACE) == b"{}"


@pytest.mark.parametrize(
    "name",
    [
        "latest.json",
        PLACE,
        "versions/v1/token_bytes.json",
        f"_cache/{'0' * 64}/receipt.json",
        f"_cache/files/{'0' * 64}.json",
        f"_cache/files/{'0' * 64}.table",
        f"_groups/{'0' * 64}/group.json",
        f"_groups/{'0' * 64}/b7e2.json",
        "origins/v1.json",
    ],
)
def test_records_that_decide_about_tokens_are_signed_and_refused_without(tmp_path: Path, key: Path, name: str) -> None:
    store, path = Store.at(tmp_path / "out"), tmp_path / "out" / name
    store.put(name, b'{"a": 1}')
    path.write_bytes(b'{"a": 2}')
    with pytest.raises(ValueError, match=f"{path}: the signature next to it is of something else, or by another key") as refused:
        read_record(store, name)
    assert "flat-tokens verify PATH --full --sign" in str(refused.value)
    Path(f"{path}.hmac").unlink()
    with pytest.raises(ValueError, match=f"{path}: is not signed"):
        read_record(store, name)
    with signing.using(()):
        assert read_record(store, name) == b'{"a": 2}'


@pytest.mark.parametrize(
    ("of", "at"),
    [
        (PLACE, "versions/v2/manifest.json"),
        (f"_cache/{'0' * 64}/receipt.json", f"_cache/{'1' * 64}/receipt.json"),
        ("origins/v1.json", "origins/v2.json"),
        ("latest.json", PLACE),
        (PLACE, "latest.json"),
    ],
)
def test_the_signature_of_a_record_is_refused_in_anothers_place(tmp_path: Path, key: Path, of: str, at: str) -> None:
    """Whether the record goes with it, or the line is made to name the other place."""
    store = Store.at(tmp_path)
    store.put(of, b"{}")
    (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / at).write_bytes(b"{}")
    line = (tmp_path / f"{of}.hmac").read_text()
    for forged in (line, line.replace(of, at)):
        (tmp_path / f"{at}.hmac").write_text(forged)
        with pytest.raises(ValueError, match="is of something else"):
            read_record(store, at)


def test_a_version_stays_signed_where_it_is_copied_to_but_not_under_another_versions_name(tmp_path: Path, key: Path) -> None:
    mine = write_dataset(tmp_path / "out" / "versions" / "v1")
    for there in ("copy", "elsewhere/versions/v1"):
        shutil.copytree(mine, tmp_path / there)
        assert flat_tokens.open(tmp_path / there).train.sequence(0).tolist() == [1, 2, 3]
        assert flat_tokens.verify(tmp_path / there, "full").object_count > 4
    shutil.copytree(mine, tmp_path / "out" / "versions" / "v2")
    with pytest.raises(ValueError, match="is of something else"):
        flat_tokens.open(tmp_path / "out" / "versions" / "v2")


def test_an_open_refuses_a_manifest_that_was_changed_or_is_gone(tmp_path: Path, key: Path) -> None:
    path = write_dataset(tmp_path / "data")
    manifest = path / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before + b" ")
    for read in (flat_tokens.open, flat_tokens.verify):
        with pytest.raises(ValueError, match=r"manifest\.json: the signature next to it is of something else"):
            read(path)
    manifest.unlink()
    for read in (flat_tokens.open, flat_tokens.verify):
        with pytest.raises(ValueError, match=r"has no manifest\.json, so that nothing signs it"):
            read(path)


def test_the_first_key_signs_and_all_are_accepted(tmp_path: Path, key: Path) -> None:
    store = Store.at(tmp_path / "out")
    store.put(PLACE, b"{}")
    with signing.using(using_keys(OTHER, KEY)):
        assert read_record(store, PLACE) == b"{}"
        store.sign(PLACE, b"{}")
    for one in (KEY, OTHER):
        with signing.using(using_keys(one)):
            assert read_record(store, PLACE) == b"{}"
    with signing.using(using_keys("e" * 64)), pytest.raises(ValueError, match="by another key"):
        read_record(store, PLACE)


def test_a_kill_between_signature_and_record_leaves_the_former_record_readable(tmp_path: Path, key: Path) -> None:
    store = Store.at(tmp_path)
    store.put("latest.json", b"1")
    store.sign("latest.json", b"2")
    assert read_record(store, "latest.json") == b"1"
    store.put("latest.json", b"2")
    assert read_record(store, "latest.json") == b"2"


def test_the_file_of_signatures_stays_small_and_a_spoilt_one_is_mended(tmp_path: Path, key: Path) -> None:
    store = Store.at(tmp_path)
    for number in range(100):
        store.put("latest.json", b"%d" % number)
    assert store.size("latest.json.hmac") <= 4096
    (tmp_path / "latest.json.hmac").write_bytes(b"\xff" * 10_000)
    with pytest.raises(ValueError, match="is of something else"):
        read_record(store, "latest.json")
    store.put("latest.json", b"100")
    assert read_record(store, "latest.json") == b"100"


@pytest.mark.parametrize("text", ["", "\n", "secret", "ab" * 31, f"{KEY}\nshort", "zz" * 32])
def test_a_file_without_keys_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    (tmp_path / "keys").chmod(0o600)
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "keys"))
    with pytest.raises(PermissionError, match="openssl rand -hex 32") as refused:
        flat_tokens.open(write_dataset(tmp_path / "data"))
    assert not text.strip() or text.split()[-1] not in str(refused.value).replace("openssl rand", "")


def test_a_key_that_cannot_be_read_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dataset(tmp_path / "data")
    for name, cause in (("nowhere", "No such file"), ("data", "Is a directory")):
        monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / name))
        with pytest.raises(PermissionError, match=rf"{signing.KEY_FILE}={tmp_path}/{name} cannot be read \({cause}.*Restore"):
            flat_tokens.open(path)


def test_without_a_key_nothing_is_signed_and_signed_datasets_open(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_dataset(tmp_path / "signed")
    monkeypatch.delenv(signing.KEY_FILE)
    assert flat_tokens.verify(path, "full").seq_count == 2
    other = write_dataset(tmp_path / "unsigned")
    files = [sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) for root in (path, other)]
    assert files[0] == sorted([*files[1], "manifest.json.hmac"])
    assert all((path / name).read_bytes() == (other / name).read_bytes() for name in files[1])


def test_an_outputs_own_path_does_not_switch_signatures_off(tmp_path: Path, key: Path) -> None:
    """Whatever characters it has: a line feed ended the pattern of signed records."""
    for name in ("a\nb", "a\rb", "\u2028", "a b", "\n", "x\n/versions/v1/manifest.json"):
        store = Store.at(tmp_path / name)
        assert signing.place_of(store.path(PLACE)) == PLACE
        (tmp_path / name / "versions/v1").mkdir(parents=True)
        (tmp_path / name / PLACE).write_bytes(b"{}")
        with pytest.raises(ValueError, match="is not signed"):
            read_record(store, PLACE)


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o604, 0o640])
def test_a_key_file_that_others_may_read_or_write_is_not_used(key: Path, mode: int) -> None:
    signing._keys_in.cache_clear()
    key.chmod(mode)
    with pytest.raises(PermissionError, match=r"can be read or written by others.* chmod 600 "):
        signing.keys()


def test_an_empty_setting_is_not_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.KEY_FILE, "")
    with pytest.raises(PermissionError, match=r"is empty\. Name the file of the key, or unset it"):
        signing.keys()
