"""A publication on the Hugging Face hub: a version of a dataset in, a tagged commit of a repository out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from flat_tokens.manifest import BYTES_RECORD, MANIFEST, read_manifest, splits_of
from flat_tokens.stores.signing import SIGNATURE
from flat_tokens.stores.store import Store, StoredObject, read_record, stored_object
from flat_tokens.tools.corpus import BESIDE
from flat_tokens.tools.export import export_of, note_export
from flat_tokens.tools.terminal import plural, size
from flows.pipelines.exchange import export
from flows.pipelines.publish import timed
from flows.pipelines.stages import Runner
from tasks.config import Licence
from tasks.derive.request import HubRequest, place_on_hub
from tasks.models import Model, Split
from tasks.output.leases import attempt
from tasks.output.paths import version_store
from tasks.output.places import scratch_apart
from tasks.output.pointer import MARKERS
from tasks.output.versions import Origin, at_dataset, read_origin
from tasks.progress import meter
from tasks.upload import BUCKETS, CARD, DATA, ZARR, HubFile, files_below, upload

OF_THE_RUN = tuple(f"{DATA}/{BESIDE}/{name}" for name in ("plan.json", "parts/", "staging/", "lock"))
"""State of an export, which names a place of this machine."""

ROOT_OBJECTS = (MANIFEST, MANIFEST + SIGNATURE, BYTES_RECORD, *MARKERS, ".zattrs")
"""Objects of a version that its manifest does not list."""

CARDS = {
    ("parquet", False): """\
Each row has the token ids of a document, in `input_ids`.

```python
from datasets import load_dataset

dataset = load_dataset("{repo}", revision="{version}")
```
""",
    ("parquet", True): """\
Each row has the token ids of a document, in `input_ids`.

```python
from datasets import load_dataset

dataset = load_dataset("parquet", data_files="hf://{repo}/{version}/data/train-*.parquet")
```
""",
    ("zarr", False): """\
```python
import flat_tokens
from huggingface_hub import snapshot_download

directory = snapshot_download("{repo}", repo_type="dataset", revision="{version}")
dataset = flat_tokens.open(f"{{directory}}/zarr")
```
""",
    ("zarr", True): """\
```python
import flat_tokens

dataset = flat_tokens.open("hf://{repo}/{version}/zarr")
```
""",
}
"""How to read a repository or, if True, a bucket, by the form of what is there."""


class HubResult(Model):
    """Result of a publication on the hub. ``byte_count``: of the files that it did not have. ``removed``: files of the version
    before.
    """

    url: str
    version: str
    commit: str
    form: str
    files: int
    uploaded: int
    byte_count: int
    removed: int
    was_done: bool
    seconds: dict[str, float]

    @property
    def headline(self) -> str:
        """Such as ``version 80d2fd78 at URL, 3 of 12 files uploaded, 1.2 GB``."""
        if self.was_done:
            return f"version {self.version} was published already: {self.url}"
        files = f"{self.uploaded} of {plural(self.files, 'file')} uploaded, {size(self.byte_count)}"
        return f"version {self.version} at {self.url}, {files}"


def publish_to_hub(request: HubRequest, runner: Runner) -> HubResult:
    """Upload a version's files that the repository does not have, then its card, then a tag with the version's name."""
    meter.reset()
    seconds: dict[str, float] = {}
    root, version = at_dataset(request.dataset)
    store, scratch = version_store(root, version), scratch_apart(request.scratch)
    origin = read_origin(root, version)
    licence = request.licence or _licence_of(origin)
    card = hub_card(own_card(store), request, version, licence, splits_of(read_manifest(store)["totals"]))
    with attempt(Store.at(scratch), scratch, f"hub-{version}") as place:

        def files() -> list[HubFile]:
            found = _files(request, store, Path(place.staging), runner, seconds)
            meter.begin("upload", sum(file.size for file in found))
            return found

        note_export(store.url, f"hub, {request.form}", place_on_hub(request.repo))
        with timed("upload", seconds):
            upload_result = upload(
                request.repo, files, card.encode(), version, request.private, lambda count: meter.add("upload", count, 0, 0)
            )
    meter.begin("done")
    return HubResult(version=version, form=request.form, seconds=seconds, **upload_result._asdict())


def own_card(store: Store) -> str:
    """The card of a version. ValueError if it is not the one that the manifest lists: it is shown to everybody."""
    data = read_record(store, CARD)
    listed = [one for one in map(stored_object, read_manifest(store)["objects"]) if one.key == CARD]
    if not listed or not listed[0].is_of(data):
        raise ValueError(f"{store.path(CARD)}: is not what the manifest says. Find out what is damaged: flat-tokens verify")
    return data.decode()


def _files(request: HubRequest, store: Store, staging: Path, runner: Runner, seconds: dict[str, float]) -> list[HubFile]:
    """The files of a version in the form that is wanted, on the local disk."""
    listed = [stored_object(one) for one in read_manifest(store)["objects"]]
    if request.form == "parquet":
        exported = export(export_of(store.url, "parquet", {}), str(staging / DATA), runner, is_noted=False)
        seconds["export"] = exported.seconds
        return [file for file in files_below(staging / DATA, DATA) if not file.path.startswith(OF_THE_RUN)]
    if store.is_local:
        return _checked(files_below(Path(store.root), ZARR), Store.at(store.root), listed, store)
    with timed("download", seconds):
        copy = Store.at(staging / ZARR)
        for key in (*(stored.key for stored in listed), *filter(store.exists, ROOT_OBJECTS)):
            with copy.create(key) as target:
                for block in store.blocks(key):
                    target.write(block)
        return _checked(files_below(staging / ZARR, ZARR), copy, listed, store)


def _checked(files: Iterable[HubFile], here: Store, listed: list[StoredObject], store: Store) -> list[HubFile]:
    """The files of a version, at *here* on the local disk, that its manifest lists, and those at its root. ValueError if one
    is not what the manifest of *store* says.
    """
    found = {file.path.removeprefix(f"{ZARR}/"): file for file in files}
    for stored in listed:
        if stored.key not in found or here.now(stored) != stored:
            raise ValueError(
                f"{store.path(stored.key)}: is not what the manifest says. Find out what is damaged: flat-tokens verify"
            )
    wanted = {*(stored.key for stored in listed), *ROOT_OBJECTS}
    return [file for key, file in found.items() if key in wanted]


def _licence_of(origin: Origin | None) -> str | None:
    """The licence in the settings of a version, as far as they are known."""
    with contextlib.suppress(ValueError):  # the record is damaged, which costs no more than what it says
        return TypeAdapter(Licence | None).validate_python(origin.config.get("licence") if origin else None)
    return None


def hub_card(card: str, request: HubRequest, version: str, licence: str | None, splits: Sequence[Split]) -> str:
    """The card of a repository: the version's own, with the head that the hub reads, and how to read what is there."""
    head = ["---", *([f"license: {licence}"] if licence else [])]
    of_bucket = request.repo.startswith(BUCKETS)
    if request.form == "parquet" and not of_bucket:
        head += ["configs:", "- config_name: default", "  data_files:"]
        for split in splits:
            head += [f"  - split: {split}", f"    path: {DATA}/{split}-*"]
    reading = CARDS[request.form, of_bucket].format(repo=request.repo, version=version)
    body = re.sub(r"(?<=\n## Read it\n\n).*?(?=\n## )", lambda _: reading, card, count=1, flags=re.DOTALL)
    return "\n".join([*head, "---", "", body])
