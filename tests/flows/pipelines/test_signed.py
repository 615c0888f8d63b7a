"""Signed outputs: the same bytes next to their signatures, and nothing is read that who has no key could have written. Who has
the public key knows who published what, and what was put back.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens.checker import DamagedError
from flat_tokens.manifest import manifest_bytes
from flat_tokens.stores import signing
from flat_tokens.stores.signing import KEY_FILE
from flat_tokens.stores.store import Store, StoredObject
from flat_tokens.tools.corpus import open_corpus
from tasks.garbage import Policy, collect
from tasks.models import TokenShard
from tasks.output import pointer as pointers
from tasks.output import swap
from tasks.output.pointer import read_pointer
from tasks.output.versions import at_dataset, list_versions, pin, read_origin, roll_back
from tasks.shards.receipts import receipt_json
from tests.damage import change_file
from tests.faults.support import (
    Settings,
    build_here,
    derive_here,
    digests,
    receipts,
    refresh_here,
    settings_of,
    shards_stay,
    unpublish,
    write_notes,
)
from tests.keys import KEY, OTHER, key_file, public_pem
from tests.refusal import refusal

NOW = Policy(keep_versions=1, grace_days=0)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A key that the environment names."""
    path = str(key_file(tmp_path / "keys"))
    monkeypatch.setenv(signing.KEY_FILE, path)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path / "out", write_notes(tmp_path / "in/notes.jsonl", 6), slice_bytes=400)


def all_that_writes(settings: Settings, tmp_path: Path) -> Path:
    """A build, a refresh, a merge, a rollback, and a collection of garbage, at one output."""
    build_here(settings)
    write_notes(tmp_path / "in/notes.jsonl", 7)
    refresh_here(settings)
    output = settings["output"]
    derive_here("merge", output, output, output=output)
    root = Store.at(output)
    roll_back(root)
    pin(root, list_versions(root)[1].version)
    collect(root, NOW, delete=True)
    write_notes(tmp_path / "in/notes.jsonl", 6)
    return Path(output)


def test_all_files_but_the_signatures_are_the_same_with_and_without_a_key(tmp_path, settings, monkeypatch, key):
    signed = digests(all_that_writes(settings, tmp_path))
    monkeypatch.delenv(signing.KEY_FILE)
    plain = digests(all_that_writes({**settings, "output": str(tmp_path / "plain")}, tmp_path))
    told_times = ("runs/", "origins/", "latest.json")
    beside = {name for name in signed if name.endswith(".ed25519")}
    same = {name: digest for name, digest in signed.items() if name not in beside and not name.startswith(told_times)}
    assert same == {name: digest for name, digest in plain.items() if not name.startswith(told_times)}
    records = {
        name
        for name in signed
        if name.endswith(("manifest.json", "token_bytes.json", "receipt.json"))
        or name.startswith(("latest", "origins", "_cache/index/"))
    }
    assert beside == {f"{name}.ed25519" for name in records - beside}
    assert len(beside) > 4


def test_everything_that_is_read_of_a_signed_output_is_signed(settings, tmp_path, key):
    out = all_that_writes(settings, tmp_path)
    assert read_origin(Store.at(out), build_here(settings).version) is not None
    with signing.using(OTHER):
        for read in (flat_tokens.open, flat_tokens.verify, lambda path: list_versions(Store.at(path))):
            with refusal(r"latest\.json: the signature next to it is of something else, or by another key"):
                read(out)
        with refusal(r"latest\.json"):
            build_here(settings)


@pytest.mark.parametrize(("is_signed", "words"), [(True, "the signature next to it"), (False, "is not signed")])
def test_a_forged_receipt_is_told_and_its_shard_is_made_again(settings, key, caplog, is_signed, words):
    """It is right but for its signature, which is of another receipt or, as before there was a key, not there."""
    out = Path(settings["output"])
    with shards_stay():
        build_here(settings)
        right = digests(out / "_cache")
        forged = min(receipts(out))
        receipt = out / "_cache" / forged / "receipt.json"
        facts = {name: value for name, value in json.loads(receipt.read_bytes()).items() if name != "sha256"}
        more = {"read": facts["read"] + 1, "written": facts["written"] + 1}
        receipt.write_bytes(receipt_json(TokenShard.model_validate(facts | more)))
        if not is_signed:
            Path(f"{receipt}.ed25519").unlink()
        unpublish(out)
        build_here(settings)
    assert digests(out / "_cache") == right
    (told,) = [message for message in caplog.messages if "is not trusted and is rebuilt" in message]
    assert forged[:12] in told
    assert f"receipt.json: {words}" in told


def test_a_forged_version_with_matching_digests_is_refused(settings, key, tmp_path):
    """The one that is latest, and one that lies where a build would put its own."""
    first = build_here(settings)
    version = Path(first.path)
    manifest = json.loads((version / "manifest.json").read_bytes())
    card = version / "README.md"
    card.write_text("forged")
    objects = [Store.at(version).digest(stored["key"]) for stored in manifest["objects"]]
    described = {name: manifest[name] for name in ("totals", "layout", "provenance")}
    (version / "manifest.json").write_bytes(manifest_bytes(map(StoredObject._make, objects), **described))
    digest = Store.at(version).digest("manifest.json", "sha256").digest
    change_file(tmp_path / "out/latest.json", {"manifest_sha256": digest})
    with signing.using(b""):
        assert flat_tokens.verify(tmp_path / "out", "full").object_count > 4  # nobody sees it without a key
    with refusal(r"latest\.json: the signature"):
        flat_tokens.open(tmp_path / "out")
    with refusal(r"manifest\.json: the signature"):
        flat_tokens.open(version)
    (tmp_path / "out/latest.json").unlink()
    with refusal(r"manifest\.json: the signature"):
        build_here(settings)


def test_an_earlier_pointer_with_its_signature_leads_back_to_a_version_that_was_signed(settings, key, tmp_path):
    """No signature tells which of two pointers is the newer one: docs/operations/signatures.md says so."""
    first = build_here(settings)
    earlier = {name: (tmp_path / "out" / name).read_bytes() for name in ("latest.json", "latest.json.ed25519")}
    build_here({**settings, "split_seed": 1})
    for name, data in earlier.items():
        (tmp_path / "out" / name).write_bytes(data)
    assert flat_tokens.open(tmp_path / "out").path == first.path


def test_what_was_made_without_a_key_is_adopted_after_a_full_check_if_it_is_not_damaged(
    settings,
    tmp_path,
    monkeypatch,
    tool,
    caplog,
):
    out = str(tmp_path / "out")

    def unsigned() -> dict[str, str]:
        return {name: digest for name, digest in digests(Path(out)).items() if not name.endswith(".ed25519")}

    first = build_here(settings)
    key_file(tmp_path / "keys")
    tool.errors("verify", out, "--full", "--sign")  # no key
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "keys"))
    assert f"{out}/latest.json: is not signed" in tool.errors("verify", out)
    tool.errors("verify", out, "--sign")  # only after a full check
    card = Path(first.path, "README.md")
    right = card.read_text()
    card.write_text("changed")
    tool.out("verify", out, "--full", "--sign", status=1)
    assert not list((tmp_path / "out").rglob("*.ed25519"))
    card.write_text(right)
    before = unsigned()
    tool.out("verify", out, "--full", "--sign")
    assert unsigned() == before
    assert flat_tokens.open(out).path == first.path
    build_here({**settings, "split_seed": 1})
    assert f"The index of version {first.version} is not used" in caplog.text


def test_garbage_takes_signatures_with_their_records_and_no_needed_ones(settings, key, tmp_path):
    out = tmp_path / "out"
    first = build_here(settings)
    second = build_here({**settings, "split_seed": 1})
    orphans = [
        "origins/0123.json.ed25519",
        f"_cache/files/{'0' * 64}.cut.json.ed25519",
        f"_cache/{'0' * 64}/receipt.json.ed25519",
    ]
    for name in orphans:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("orphan")
    collect(Store.at(out), NOW, delete=True)
    assert not (out / "versions" / first.version).exists()
    beside = {path.relative_to(out).as_posix() for path in out.rglob("*.ed25519")}
    needed = [
        "latest.json",
        f"_cache/index/{second.version}.json",
        f"versions/{second.version}/manifest.json",
        f"versions/{second.version}/token_bytes.json",
        f"origins/{second.version}.json",
    ]
    assert beside == {f"{name}.ed25519" for name in needed if (out / name).exists()}
    assert len(beside) >= 4


def test_the_link_latest_leads_where_the_signed_pointer_says(settings, tmp_path, key):
    """Whoever writes to the output can change the link, but not sign a pointer."""
    output = all_that_writes(settings, tmp_path)
    pointed = json.loads((output / "latest.json").read_text())["version"]
    older = next(path.name for path in (output / "versions").iterdir() if path.name != pointed)
    (output / "latest").unlink()
    (output / "latest").symlink_to(f"versions/{older}")
    assert Path(flat_tokens.open(output / "latest").store.root).name == pointed
    assert at_dataset(str(output / "latest"))[1] == pointed
    assert Path(open_corpus(str(output / "latest")).store.root).name == pointed
    (tmp_path / "mine").symlink_to("out/latest/")
    assert Path(flat_tokens.open(tmp_path / "mine").store.root).name == pointed
    (output / "latest.json").unlink()
    for path in (output / "latest", tmp_path / "mine"):
        with refusal(r"out/latest: there is no latest\.json next to it, whose signature would say"):
            flat_tokens.open(path)
    (output / "latest").unlink()
    shutil.copytree(output / "versions" / older, output / "latest")  # no link, but a copy in its place
    with refusal("there is no latest"):
        flat_tokens.open(output / "latest")


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
    _, version = (build_version(output, tmp_path, seed) for seed in range(2))
    monkeypatch.delenv(KEY_FILE)
    check(output, public, level="full", number=2)
    with refusal("is not signed by this key", DamagedError):
        check(output, key_file(tmp_path / "other", public_pem(OTHER)))
    root, manifest = Store.at(output), f"versions/{version}/manifest.json"
    root.put(manifest, root.read(manifest) + b"\n")
    with refusal("is not signed by this key", DamagedError):
        check(output, public)


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
    tool.out("verify", output, "--full", "--sign")
    with refusal(r"manifest\.json: is not signed"):
        build_version(output, tmp_path, 1)
    tool.out("verify", f"{output}/versions/{version}", "--full", "--sign")
    assert build_version(output, tmp_path, 1) == version


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
