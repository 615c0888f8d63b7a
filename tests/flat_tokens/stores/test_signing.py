"""Signatures of records: what they cover, what they refuse, and where keys come from."""

import shutil
from pathlib import Path

import pytest

import flat_tokens
from flat_tokens.stores import signing
from flat_tokens.stores.store import Store, read_record
from tests.keys import KEY, OTHER, key_file, pem, public_pem
from tests.made import write_sequences
from tests.refusal import refusal

PLACE = "versions/v1/manifest.json"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one key, which the environment names."""
    path = key_file(tmp_path / "keys")
    monkeypatch.setenv(signing.KEY_FILE, str(path))
    return path


def test_a_signature_is_of_the_place_and_the_digest(tmp_path, key):
    """The literal is from: openssl pkeyutl -sign -rawin -in F, of a file of the words of the line with a zero between two."""
    store = Store.at(tmp_path / "out")
    store.put(PLACE, b"{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    literal = (
        "f548a3192fef97c96db28b5abf137e66450b9cb105e94668d21e98d6c6ed3db9"
        "ca09b3418c0f5aa8c6d75108a76ab508ef55e312b85b2d66e596ba9a0f9ab604"
    )
    assert (tmp_path / "out" / f"{PLACE}.ed25519").read_text() == f"{literal} record 0 {PLACE} {digest}\n"
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
def test_records_that_decide_about_tokens_are_signed_and_refused_without(tmp_path, key, name):
    store, path = Store.at(tmp_path / "out"), tmp_path / "out" / name
    store.put(name, b'{"a": 1}')
    path.write_bytes(b'{"a": 2}')
    with pytest.raises(ValueError, match=f"{path}: the signature next to it is of something else, or by another key") as refused:
        read_record(store, name)
    assert "flat-tokens verify PATH --full --sign" in str(refused.value)
    Path(f"{path}.ed25519").unlink()
    with refusal(f"{path}: is not signed"):
        read_record(store, name)
    with signing.using(b""):
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
def test_the_signature_of_a_record_is_refused_in_anothers_place(tmp_path, key, of, at):
    """Whether the record goes with it, or the line is made to name the other place."""
    store = Store.at(tmp_path)
    store.put(of, b"{}")
    (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / at).write_bytes(b"{}")
    line = (tmp_path / f"{of}.ed25519").read_text()
    for forged in (line, line.replace(of, at)):
        (tmp_path / f"{at}.ed25519").write_text(forged)
        with refusal("is of something else"):
            read_record(store, at)


def test_a_version_stays_signed_where_it_is_copied_to_but_not_under_another_versions_name(tmp_path, key):
    mine = write_sequences(tmp_path / "out/versions/v1", [[1, 2, 3]])
    for there in ("copy", "elsewhere/versions/v1"):
        shutil.copytree(mine, tmp_path / there)
        assert flat_tokens.open(tmp_path / there).train.sequence(0).tolist() == [1, 2, 3]
        assert flat_tokens.verify(tmp_path / there, "full").object_count > 4
    shutil.copytree(mine, tmp_path / "out/versions/v2")
    with refusal("is of something else"):
        flat_tokens.open(tmp_path / "out/versions/v2")


def test_an_open_refuses_a_manifest_that_was_changed_or_is_gone(tmp_path, key):
    path = write_sequences(tmp_path / "data", [[1, 2, 3]])
    manifest = path / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before + b" ")
    for read in (flat_tokens.open, flat_tokens.verify):
        with refusal(r"manifest\.json: the signature next to it is of something else"):
            read(path)
    manifest.unlink()
    for read in (flat_tokens.open, flat_tokens.verify):
        with refusal(r"has no manifest\.json, so that nothing signs it"):
            read(path)


def test_the_first_key_signs_and_all_are_accepted(tmp_path, key):
    store = Store.at(tmp_path / "out")
    store.put(PLACE, b"{}")
    with signing.using(OTHER + public_pem(KEY)):
        assert read_record(store, PLACE) == b"{}"
        store.sign(PLACE, b"{}")
    for one in (KEY, OTHER, public_pem(OTHER)):
        with signing.using(one):
            assert read_record(store, PLACE) == b"{}"
    with signing.using(public_pem(OTHER)), refusal("are public: they check records and sign none", PermissionError):
        store.put(PLACE, b"{}")
    with signing.using(pem("ee" * 32)), refusal("by another key"):
        read_record(store, PLACE)


def test_a_kill_between_signature_and_record_leaves_the_former_record_readable(tmp_path, key):
    store = Store.at(tmp_path)
    store.put("latest.json", b"1")
    store.sign("latest.json", b"2")
    assert read_record(store, "latest.json") == b"1"
    store.put("latest.json", b"2")
    assert read_record(store, "latest.json") == b"2"


def test_the_file_of_signatures_stays_small_and_a_spoilt_one_is_mended(tmp_path, key):
    store = Store.at(tmp_path)
    for number in range(110):
        store.put("latest.json", b"%d" % number)
    assert store.size("latest.json.ed25519") < signing.MOST_BYTES
    (tmp_path / "latest.json.ed25519").write_bytes(b"\xff" * 10_000)
    with refusal("is of something else"):
        read_record(store, "latest.json")
    store.put("latest.json", b"100")
    assert read_record(store, "latest.json") == b"100"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"", "has no ed25519 keys in PEM alone"),
        (b"\n", "has no ed25519 keys in PEM alone"),
        (b"ab" * 32, "has no ed25519 keys in PEM alone"),
        (KEY + b"secret", "has no ed25519 keys in PEM alone"),
        (KEY.replace(b"MC4", b"MC5"), "has a key that cannot be read"),
        (b"ssh-ed25519 secret", "has a key that cannot be read"),
    ],
)
def test_a_file_without_keys_is_refused_and_not_shown(tmp_path, monkeypatch, text, cause):
    monkeypatch.setenv(signing.KEY_FILE, str(key_file(tmp_path / "keys", text)))
    with pytest.raises(PermissionError, match=f"{cause}.*openssl genpkey -algorithm ed25519 -out KEY") as refused:
        flat_tokens.open(write_sequences(tmp_path / "data", [[1, 2, 3]]))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("FLAT_TOKENS_PRIVATE_KEY_FILE", "key", f"Name its file in {signing.KEY_FILE}"),
        (signing.KEY_FILE, "", r"is empty\. Name the file of the key, or unset it"),
    ],
)
def test_a_setting_that_is_not_used_or_empty_is_refused(setting, value, remedy, monkeypatch):
    monkeypatch.setenv(setting, value)
    with refusal(remedy, PermissionError):
        signing.keys()


def test_a_key_that_cannot_be_read_stops_everything(tmp_path, monkeypatch):
    path = write_sequences(tmp_path / "data", [[1, 2, 3]])
    for name, cause in (("nowhere", "No such file"), ("data", "Is a directory")):
        monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / name))
        with refusal(rf"{signing.KEY_FILE}={tmp_path}/{name} cannot be read \({cause}.*Restore", PermissionError):
            flat_tokens.open(path)


def test_without_a_key_nothing_is_signed_and_signed_datasets_open(tmp_path, key, monkeypatch):
    path = write_sequences(tmp_path / "signed", [[1, 2, 3]])
    monkeypatch.delenv(signing.KEY_FILE)
    assert flat_tokens.verify(path, "full").seq_count == 1
    assert not list(write_sequences(tmp_path / "unsigned", [[1, 2, 3]]).rglob("*.ed25519"))


def test_an_outputs_own_path_does_not_switch_signatures_off(tmp_path, key):
    """Whatever characters it has: a line feed ended the pattern of signed records."""
    for name in ("a\nb", "a\rb", "\u2028", "a b", "\n", "x\n/versions/v1/manifest.json"):
        store = Store.at(tmp_path / name)
        assert signing.place_of(store.path(PLACE)) == PLACE
        (tmp_path / name / "versions/v1").mkdir(parents=True)
        (tmp_path / name / PLACE).write_bytes(b"{}")
        with refusal("is not signed"):
            read_record(store, PLACE)


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o604, 0o640])
def test_a_key_file_that_others_may_read_or_write_is_not_used(key, mode):
    signing._text_in.cache_clear()
    key.chmod(mode)
    with refusal(r"can be read or written by others.* chmod 600 ", PermissionError):
        signing.keys()
