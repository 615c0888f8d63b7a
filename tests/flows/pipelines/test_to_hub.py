"""A version on the hub: only what is missing is uploaded, the tag comes last, and the hub's own readers read it."""

import json
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flows.pipelines.build import BuildResult
from flows.pipelines.to_hub import HubResult, publish_to_hub
from flows.runners.processes import Threads
from tasks.derive.request import HubRequest
from tests.faults.support import build_here, settings_of, write_notes
from tests.flows.asked import Seen, on_prefect_server
from tests.made import read_docs, sequences
from tests.refusal import refusal
from tests.stand_in_hub import StandInHub, stand_in_hub_fixture

__all__ = ["stand_in_hub_fixture"]

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of httpx, to huggingface_hub

REPO = "org/notes"


@pytest.fixture
def hub(stand_in_hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    stand_in_hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    return stand_in_hub


def built(tmp_path: Path, count: int = 30, **settings: Any) -> BuildResult:
    notes = write_notes(tmp_path / "in/notes.jsonl", count)
    return build_here(settings_of(tmp_path / "out", notes, name="notes", slice_bytes=1000, **settings))


def publish(tmp_path: Path, repo: str = REPO, **settings: Any) -> HubResult:
    request = HubRequest(dataset=str(tmp_path / "out"), repo=repo, scratch=str(tmp_path / "scratch"), **settings)
    with Threads(2) as runner:
        return publish_to_hub(request, runner)


def at(hub: StandInHub, revision: str) -> dict[str, bytes]:
    return hub.commits["datasets", REPO, hub.refs["datasets", REPO][revision]]


def test_datasets_loads_what_was_published(hub, tmp_path):
    import datasets

    result = built(tmp_path, licence="cc-by-4.0")
    told = publish(tmp_path, private=True)
    assert (told.was_done, told.uploaded, told.removed) == (False, told.files, 0)
    assert hub.made == {REPO: "private"}
    loaded = datasets.load_dataset(REPO, revision=result.version)
    dataset = flat_tokens.open(tmp_path / "out")
    for split in ("train", "validation"):
        tokens = getattr(dataset, split)
        assert loaded[split]["input_ids"] == sequences(tokens)
    card = at(hub, result.version)["README.md"].decode()
    assert card.startswith("---\nlicense: cc-by-4.0\nconfigs:\n")
    assert f'load_dataset("org/notes", revision="{result.version}")' in card
    everything = b"".join(data for name, data in at(hub, result.version).items() if name != "README.md")
    assert str(tmp_path / "scratch").encode() not in everything
    assert not list((tmp_path / "scratch").rglob("*.parquet"))


def test_a_publication_that_was_stopped_goes_on(hub, tmp_path, monkeypatch):
    """The zarr of a version is the version."""
    from huggingface_hub import snapshot_download

    monkeypatch.setattr("tasks.upload.FILES_A_COMMIT", 4)
    result = built(tmp_path)
    hub.fail("/tag/", 400)
    with refusal("dataset org/notes"):
        publish(tmp_path, form="zarr")
    assert len(hub.messages) > 2
    before = hub.count("/large/", "PUT")
    told = publish(tmp_path, form="zarr")
    assert (told.uploaded, hub.count("/large/", "PUT")) == (0, before)
    assert at(hub, result.version).keys() == at(hub, "main").keys()
    directory = snapshot_download(REPO, repo_type="dataset", revision=result.version)
    assert read_docs(Path(directory) / "zarr") == read_docs(tmp_path / "out")
    assert (
        publish(tmp_path, form="zarr").headline == f"version {result.version} was published already: {hub.url}/datasets/org/notes"
    )


def test_a_new_version_uploads_what_changed_and_removes_what_went(hub, tmp_path):
    """Files of others stay, and the tag of the version before is still whole."""
    first = built(tmp_path)
    publish(tmp_path, form="zarr")
    old = at(hub, first.version)
    hub.commit(REPO, {**old, "LICENSE": "of the owner", "zarr/stale": "of an earlier version"})
    second = built(tmp_path, split_seed=5)
    told = publish(tmp_path, form="zarr")
    now = at(hub, second.version)
    assert (told.removed, "LICENSE" in now, "zarr/stale" in now) == (1, True, False)
    assert 0 < told.uploaded < told.files
    assert at(hub, first.version) == old
    assert now["zarr/manifest.json"] == Path(second.path, "manifest.json").read_bytes()


def test_a_bucket_has_a_directory_for_each_version(hub, tmp_path):
    """It is read by the library and by datasets. What is there is not sent again, and a next version changes nothing of it."""
    import datasets

    first, bucket = built(tmp_path), "buckets/org/notes"
    texts = sequences(flat_tokens.open(tmp_path / "out").train)
    assert publish(tmp_path, bucket, form="zarr").url == f"{hub.url}/{bucket}"
    assert publish(tmp_path, bucket, form="zarr").was_done
    files = hub.buckets["org/notes"]
    del files[f"{first.version}/README.md"], files[f"{first.version}/zarr/train/seq_starts/c/0"]
    assert publish(tmp_path, bucket, form="zarr").uploaded == 1
    old = {name: one for name, one in files.items() if name != "README.md"}
    second = built(tmp_path, split_seed=5)
    publish(tmp_path, bucket)
    assert files.items() >= old.items()
    place = f"hf://{bucket}/{first.version}/zarr"
    assert flat_tokens.verify(place, "full").seq_count == 30
    assert sequences(flat_tokens.open(place).train) == texts
    parquet = f"hf://{bucket}/{second.version}/data/train-*.parquet"
    rows = datasets.load_dataset("parquet", data_files=parquet)["train"]["input_ids"]
    assert rows[:] == sequences(flat_tokens.open(tmp_path / "out").train)
    assert f'data_files="{parquet}"' in files["README.md"][1].decode()


def link_out(version: Path) -> None:
    (version.parent / "secret").write_text("of this machine")
    (version / "train/encoded_tokens/c/0").unlink()
    (version / "train/encoded_tokens/c/0").symlink_to(version.parent / "secret")


def write_card(version: Path) -> None:
    (version / "README.md").write_text("# Another card\n")


def write_unlisted_card(version: Path) -> None:
    write_card(version)
    manifest = json.loads((version / "manifest.json").read_text())
    manifest["objects"] = [one for one in manifest["objects"] if one["key"] != "README.md"]
    (version / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("zarr", link_out, "c/0: is not what the manifest says"),
        *((form, change, r"README\.md") for form in ("zarr", "parquet") for change in (write_card, write_unlisted_card)),
    ],
)
def test_what_differs_from_the_manifest_is_not_published(hub, tmp_path, form, change, words):
    """The card is what everybody sees of a repository."""
    change(tmp_path / "out/versions" / built(tmp_path).version)
    with refusal(words):
        publish(tmp_path, form=form)
    assert hub.messages == []


@pytest.mark.parametrize("repo", [REPO, f"buckets/{REPO}"])
def test_who_may_not_write_is_told_so(hub, tmp_path, monkeypatch, repo):
    built(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refusal(rf"^{repo}: the hub does not let the account of HF_TOKEN write here \(status 403\)"):
        publish(tmp_path, repo)


@pytest.mark.parametrize("repo", ["notes", "org/notes/more", "../notes", "org/no tes"])
def test_a_repository_is_an_owner_and_a_name(repo):
    with refusal("repo"):
        HubRequest(dataset="/data/out", repo=repo)


def test_the_command_publishes_and_says_what_it_did(hub, tmp_path, terminal):
    result = built(tmp_path)
    words = ["publish", str(tmp_path / "out"), "--to", "hub", REPO, "--scratch", str(tmp_path / "scratch"), "--no-server"]
    assert terminal.out(*words).startswith(f"version {result.version} at {hub.url}/datasets/org/notes, ")


@on_prefect_server
def test_a_publication_can_be_watched(hub, tmp_path):
    from flows.publish_dataset import publish_dataset

    result = built(tmp_path)
    told = publish_dataset(HubRequest(dataset=str(tmp_path / "out"), repo=REPO, scratch=str(tmp_path / "scratch")))
    seen = Seen("dataset:notes", "format:hub", name=f"publish {tmp_path / 'out'} as {REPO}")
    assert seen.run["state"]["message"] == told.headline
    assert seen.progress["notes-upload"][0] == 100.0
    assert (
        f"[{hub.url}/datasets/org/notes]({hub.url}/datasets/org/notes/tree/{result.version})"
        in seen.texts["notes-publish-summary"]
    )
