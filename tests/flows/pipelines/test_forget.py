"""Documents that are forgotten: they go from every version and from all else below an output, and no build brings them back."""

import contextlib
import gzip
import io
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

import flat_tokens
import flows.pipelines.forgetting
from flat_tokens.arrays.opening import open_array
from flat_tokens.keys import keys_of_bytes
from flat_tokens.manifest import read_manifest
from flat_tokens.record.ledger import Ledger
from flat_tokens.stores.signing import KEY_FILE
from flat_tokens.stores.store import Store
from flat_tokens.tools.export import export_of, note_export, target, writing
from flat_tokens.tools.remains import check_forgotten
from flows.pipelines.build import BuildResult, result_if_up_to_date
from flows.pipelines.forget import ForgetResult, forget, resume
from flows.pipelines.refresh import RefreshResult
from flows.runners.processes import Threads
from tasks.config import BuildConfig
from tasks.derive.request import ForgetRequest
from tasks.garbage import Policy, collect
from tasks.models import digest_of
from tasks.output.paths import BESIDE
from tasks.output.pointer import read_pointer
from tasks.output.versions import approve, list_versions, pin, roll_back
from tests.examples import first_fast
from tests.faults.support import build_here, derive_here, export_here, refresh_here, settings_of, shards_stay
from tests.keys import key_file
from tests.refusal import refusal
from tests.sources import Held, held, write_rows

Rows = list[dict[str, Any]]

GONE = ("a-3", "a-17", "b-5")


def planted(name: str) -> str:
    """Text that no other document has."""
    return f"<{name}> " + "".join(f"{name}:{i * i} " for i in range(7))


def rows(name: str, count: int) -> Rows:
    return [
        {"id": f"{name}-{i}", "text": f"{planted(f'{name}-{i}')} {'salt wind ' * (i % 5)}", "url": f"u{name}-{i}"}
        for i in range(count)
    ]


class Dataset:
    """Sources ``a`` and ``b``, an output, and what is done there."""

    def __init__(self, here: Path, output: str | None = None, **settings: Any) -> None:
        self.here, self.output, self.settings = here, output or str(here / "out"), settings
        self.rows = {"a": rows("a", 40), "b": rows("b", 30)}

    def write(self, name: str = "in", without: Iterable[str] = ()) -> Path:
        """Write the sources, *without* some documents."""
        for source, documents in self.rows.items():
            write_rows(self.here / name / f"{source}.jsonl", [row for row in documents if row["id"] not in without])
        return self.here / name

    def config(self, text: Path, output: str, **settings: Any) -> BuildConfig:
        common = {"validation_fraction": 0.3, "workers": 1, "scratch": str(self.here / "scratch")} | self.settings | settings
        paths = (text / f"{name}.jsonl" for name in self.rows)
        return BuildConfig.model_validate(settings_of(output, *paths, keep=["url"], **common))

    def build(self, **settings: Any) -> BuildResult:
        return build_here(self.config(self.write(), self.output, **settings), 1)

    def refresh(self) -> RefreshResult:
        return refresh_here(self.config(self.write(), self.output))

    def clean(self, gone: Iterable[str], **settings: Any) -> Path:
        """What a build from nothing gives of the sources without some documents."""
        output = self.here / f"clean-{uuid.uuid4().hex}"
        build_here(self.config(self.write("clean", gone), str(output), **settings))
        return output

    def forget(self, *ids: str, **request: Any) -> ForgetResult:
        (self.here / "ids").write_text("".join(f"{one}\n" for one in ids))
        told = {"output": self.output, "reason": "they asked", "scratch": str(self.here / "scratch"), "allow_unknown": True}
        return forget(ForgetRequest(**{**told, **({"id_list": str(self.here / "ids")} if ids else {}), **request}))

    @property
    def root(self) -> Store:
        return Store.at(self.output)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path)


def content(version: Store) -> dict[str, list[tuple[int, Held]]]:
    """Every document of a version with its key, wherever it stood in the sources."""
    found = {}
    for name, docs in held(version.url).items():
        keys = open_array(version / f"documents/{name}/key", "uint64").read(0, len(docs)).tolist()
        found[name] = [(key, one._replace(file=0, row=0)) for key, one in zip(keys, docs, strict=True)]
    return found


def contents(root: Store) -> Iterator[tuple[str, bytes]]:
    """Every object below an output, as it is, and unpacked."""
    for key, _ in root.listing():
        if key == "latest":
            continue
        data = root.read(key)
        yield key, data
        if data[:4] == b"PAR1":
            yield key, repr(pq.read_table(io.BytesIO(data)).to_pylist()).encode()
        at = data.find(b"\x28\xb5\x2f\xfd")
        while at >= 0:
            with contextlib.suppress(zstandard.ZstdError):
                yield key, zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
            at = data.find(b"\x28\xb5\x2f\xfd", at + 1)


def where(root: Store, ids: Iterable[str]) -> set[str]:
    """Objects with a run of tokens of documents, as bytes of tokens in either form or as text, or with a column of theirs."""
    marks = []
    for one in ids:
        tokens = np.frombuffer(planted(one)[2:26].encode(), np.uint8).astype("<u4") + 1
        marks += [tokens.tobytes(), (tokens * 2).astype("<u4").tobytes(), planted(one).encode(), f"u{one}'".encode()]
    return {key for key, data in contents(root) for mark in marks if mark in data}


def check_gone(dataset: Dataset, gone: Iterable[str] = GONE) -> None:
    assert where(dataset.root, gone) == set()
    assert where(dataset.root, ["a-4"])  # it is looked for rightly
    assert list(check_forgotten(dataset.root)) == []
    for version in list_versions(dataset.root):
        flat_tokens.verify(f"{dataset.output}/versions/{version.version}", "full")


def check_same(dataset: Dataset, gone: Iterable[str] = GONE, **settings: Any) -> None:
    """The latest version has what a clean build has."""
    assert content(latest(dataset.root)) == content(latest(Store.at(dataset.clean(gone, **settings))))


def latest(root: Store) -> Store:
    return root / "versions" / str(read_pointer(root).version)


VARIANTS: dict[str, dict[str, Any]] = {
    "three splits, duplicates dropped": {
        "test_fraction": 0.3,
        "split": {"by": "text"},
        "documents": {"duplicates": "drop"},
        "slice_bytes": 1000,
    },
    "compact": {"layout": "compact", "documents": {"steps": [{"use": "length", "max_characters": 200}, {"use": "normalize"}]}},
    "zarr2": {"layout": "zarr2", "slice_bytes": 1000},
    "masks, duplicates dropped": {
        "of_sources": {"prompt_column": "url", "completion_column": "text"},
        "documents": {"duplicates": "drop"},
        "slice_bytes": 1000,
    },
}


@pytest.mark.parametrize("variant", first_fast(list(VARIANTS)[::-1], every=2))
def test_forgotten_documents_are_nowhere_and_stay_away(tmp_path, variant):
    """All others are as in a build of the sources without them; the next build has nothing to do; a refresh tokenizes only what
    has changed. The first of the variants is in an object store.
    """
    in_store = variant == [*VARIANTS][-1]
    dataset = Dataset(tmp_path, f"memory://{uuid.uuid4().hex}/out" if in_store else None, **VARIANTS[variant])
    first = dataset.build()
    result = dataset.forget(*GONE, "nobody")
    assert (result.key_count, result.unknown, result.documents, result.left) == (4, 1, 3, ())
    assert list(result.versions) == [first.version]
    check_gone(dataset)
    check_same(dataset)
    again = dataset.refresh()
    assert (again.outcome, again.version) == ("unchanged", result.latest)
    with Threads(1) as runner:
        nothing = result_if_up_to_date(dataset.config(dataset.write(), dataset.output), runner)
    assert nothing.was_published
    totals = read_manifest(latest(dataset.root))["totals"]["documents"]
    assert totals["skipped"]["forgotten"] == 3
    assert totals["read"] == first.totals["documents"]["read"]
    assert [one["skipped"].get("forgotten", 0) for one in totals["by_source"]] == [2, 1]
    dataset.rows["a"].append({"id": "a-new", "text": planted("a-new"), "url": "new"})
    more = dataset.refresh()
    assert more.outcome == "published"
    assert more.build.totals["documents"]["skipped"]["forgotten"] == 3
    check_gone(dataset)
    check_same(dataset)


def test_pinned_former_and_held_versions_get_successors(dataset, tmp_path, monkeypatch):
    """Pins move with their notes, a rollback goes to the successor, and what waits for a person waits on; all of it signed."""
    monkeypatch.setenv(KEY_FILE, str(key_file(tmp_path / "keys")))
    one = dataset.build().version
    pin(dataset.root, one, "the paper")
    dataset.rows["a"] += rows("c", 20)
    two = dataset.build().version
    dataset.rows["b"] = dataset.rows["b"][:6]
    held = dataset.refresh()
    assert held.outcome == "held"
    result = dataset.forget(*GONE)
    assert set(result.versions) == {one, two, held.build.version}
    assert {(version.version, version.state, version.pinned) for version in list_versions(dataset.root)} == {
        (result.versions[one], "former", "the paper"),
        (result.versions[two], "latest", None),
        (result.versions[held.build.version], "held", None),
    }
    assert read_pointer(dataset.root).pins[result.versions[one]].moved_from == (one,)
    check_gone(dataset)
    assert dataset.refresh().outcome == "still held"
    assert roll_back(dataset.root).version == result.versions[one]
    assert roll_back(dataset.root, result.versions[two]).version == result.versions[two]
    assert dataset.refresh().outcome == "held"
    assert approve(dataset.root, None, "yes").pointer.version == result.versions[held.build.version]
    check_same(dataset)
    assert dataset.refresh().outcome == "unchanged"


def test_what_was_rolled_back_or_rejected_stays_so(dataset):
    """Also where its version has been collected: it is known by the name that it would have without anything forgotten."""
    dataset.build()
    dataset.rows["a"] += rows("c", 20)
    dataset.build()
    roll_back(dataset.root)
    dataset.forget(*GONE)
    assert dataset.refresh().outcome == "withdrawn"
    collect(dataset.root, Policy(keep_versions=1, grace_days=0), delete=True)
    assert len(list_versions(dataset.root)) == 1
    assert dataset.refresh().outcome == "withdrawn"


def test_documents_of_the_same_text_go_with_it(tmp_path):
    """A copy that was left out would take its place."""
    dataset = Dataset(tmp_path, documents={"duplicates": "drop"})
    dataset.rows["b"][20]["text"] = dataset.rows["a"][3]["text"]
    dataset.rows["b"][21]["text"] = dataset.rows["a"][3]["text"]
    dataset.rows["b"][22]["text"] = dataset.rows["a"][4]["text"]
    dataset.build()
    (left_out,) = Path(dataset.output, BESIDE).iterdir()
    shutil.copytree(left_out, tmp_path / "left_out")
    result, gone = dataset.forget("b-21"), ["a-3", "b-20", "b-21"]
    assert (result.key_count, result.same_text) == (1, 2)
    shutil.copytree(tmp_path / "left_out", left_out)
    assert any(f"what version {left_out.name} left out" in line for line in check_forgotten(dataset.root))
    shutil.rmtree(left_out)
    assert dataset.refresh().outcome == "unchanged"
    with pytest.raises(AssertionError):
        check_gone(dataset, ["a-4"])
    check_gone(dataset, ["a-3"])
    check_same(dataset, gone)
    totals = read_manifest(latest(dataset.root))["totals"]["documents"]
    assert totals["skipped"] == {"duplicate": 1, "forgotten": 3}
    del dataset.rows["a"][4]
    result = dataset.refresh()
    assert result.text_bytes_tokenized <= sum(len(row["text"]) for row in dataset.rows["a"])  # none of b
    check_same(dataset, gone)


def test_clusters_that_lose_documents_have_the_names_of_a_clean_build(tmp_path):
    """Near-duplicates that are kept: no row names a forgotten document, and one that is left alone has no cluster."""
    dataset = Dataset(tmp_path, documents={"near_duplicates": {"action": "keep"}}, test_fraction=0.3, slice_bytes=1000)
    words = {name: [f"{name}{i * i % 97}" for i in range(40)] for name in "uvwxyz"}
    for number, (name, text) in enumerate(words.items()):
        for copy, source in enumerate("aab" if name < "x" else "ab"):
            row = {"id": f"{name}-{copy}", "text": " ".join([*text, f"copy{copy}"]), "url": None}
            dataset.rows[source].insert(7 * number + copy, row)
    dataset.build()
    gone = ["u-0", "v-1", "w-0", "w-1", "x-0", "y-1", "a-3"]
    dataset.forget(*gone)
    check_gone(dataset, ["a-3"])
    check_same(dataset, gone)
    dataset.forget("z-0", "u-1")
    check_same(dataset, [*gone, "z-0", "u-1"])


@pytest.mark.parametrize(
    ("request_", "gone"),
    [
        ({"where": "url = 'ub-7' or row = 2 and source = 'a'"}, ["b-7", "a-2"]),
        ({"where": "row < 2", "source": "b"}, ["b-0", "b-1"]),
    ],
)
def test_documents_are_named_by_an_expression_or_a_source(dataset, request_, gone):
    dataset.build()
    assert dataset.forget(**request_).documents == len(gone)
    check_gone(dataset, gone)
    check_same(dataset, gone)


def test_what_names_no_document_is_refused(dataset):
    with refusal("nothing was built here"):
        dataset.forget("a-1")
    dataset.build()
    for request, message in (
        ({"where": "url = 'none'"}, "no version has a document that is named so"),
        ({"source": "z"}, "no version has a source 'z'; there are a, b"),
        ({"where": "colour = 1"}, "there is no column 'colour'"),
        ({}, "one of keys, ids, where or like"),
        ({"where": "row = 1", "key_list": "x"}, "one of keys, ids, where or like"),
        ({"where": "row ="}, "row"),
    ):
        with refusal(message):
            dataset.forget(**request)
    with refusal(r"no version has a document of 2 of 3 ids: late-1, none\. Nothing"):
        dataset.forget("late-1", "a-1", "none", allow_unknown=False)
    assert not dataset.root.exists("forgotten")
    assert dataset.forget("a-1").versions
    assert dataset.forget("a-1", allow_unknown=False).certificate is None


@pytest.mark.parametrize(
    "step", first_fast(["make_successor", "_attest", "sweep_shards", "change_pointer", "remove_version", "sweep_files"], 2)
)
def test_the_next_build_goes_on_with_what_was_begun(tmp_path, monkeypatch, step):
    dataset = Dataset(tmp_path, documents={"duplicates": "drop"})
    dataset.build()

    with monkeypatch.context() as patch:
        patch.setattr(flows.pipelines.forgetting, step, Mock(side_effect=OSError("the machine is gone")))
        with refusal("gone", OSError):
            dataset.forget(*GONE)
    assert any("documents are being forgotten" in line for line in check_forgotten(dataset.root))
    if step == "_attest":
        assert resume(dataset.output, str(tmp_path / "scratch")).certificate
    else:
        assert dataset.refresh().outcome == "unchanged"
    check_gone(dataset)
    check_same(dataset)
    with refusal("no forgetting was begun"):
        resume(dataset.output, str(tmp_path / "scratch"))


def test_shards_and_copies_of_files_go(tmp_path):
    """Tokens of a build that did not publish, and a compressed source's unpacked copy."""
    dataset = Dataset(tmp_path, slice_bytes=1000)
    with shards_stay():
        dataset.build()
        dataset.build(split_seed=4)
    files = tmp_path / "out/_cache/files"
    files.mkdir(parents=True, exist_ok=True)
    (files / f"{'ab' * 32}.raw").write_text(planted("a-3"))
    assert where(dataset.root, GONE) & {key for key, _ in dataset.root.listing() if key.startswith("_cache/")}
    result = dataset.forget(*GONE)
    assert len(result.versions) == 2
    check_gone(dataset)
    check_same(dataset, split_seed=4)
    packed = dataset.write("packed") / "a.jsonl"
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    build_here(dataset.config(packed.parent, dataset.output, scratch=None))
    check_gone(dataset)


def test_kept_copies_of_files_are_named_as_long_as_they_hold_forgotten_documents(tmp_path):
    """Also those of a file that has changed since, but not of one from which its owner has removed them."""
    dataset = Dataset(tmp_path, keep_files=True, scratch=None)

    def build() -> None:
        for path in (packed := dataset.write()).iterdir():
            path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        build_here(dataset.config(packed, dataset.output), 1)

    build()
    dataset.forget(*GONE, scratch=None)
    for change, copies in ([*dataset.rows["a"], *rows("c", 1)], 2), ([*rows("a", 3), *rows("c", 1)], 3):
        dataset.rows["a"] = change
        build()
        named = {line.partition(":")[0] for line in check_forgotten(dataset.root)}
        assert named == where(dataset.root, GONE)
        assert (len(named), len(list((tmp_path / "out/_cache/files").iterdir()))) == (2, copies)


def test_derived_versions_and_inputs_are_without_them(tmp_path):
    """A merge into the output leaves them out, and a version that was made of others gets a successor, too."""
    dataset, other = Dataset(tmp_path), Dataset(tmp_path, str(tmp_path / "other"))
    dataset.build()
    other.build(split_seed=3)
    shuffle = partial(derive_here, {"operation": "shuffle", "seed": 1}, dataset.output, output=dataset.output)
    shuffle()
    dataset.forget(*GONE)
    check_gone(dataset)
    assert shuffle().was_published
    merged = derive_here("merge", dataset.output, other.output, output=dataset.output)
    assert merged.totals["documents"]["skipped"] == {"forgotten": 3}
    assert merged.totals["documents"]["written"] == 67 + 67
    check_gone(dataset)


def test_the_certificate_says_what_was_done(dataset, tmp_path):
    dataset.rows["a"][3]["text"] = "short"
    dataset.rows["a"][4]["text"] = dataset.rows["b"][5]["text"]
    first = dataset.build().version
    result = dataset.forget(*GONE)
    path = Path(str(result.certificate))
    told = json.loads(path.read_text())
    assert told["reason"] == "they asked"
    assert [(one["version"], one["documents"], one["successor"]) for one in told["versions"]] == [(first, 3, result.latest)]
    assert [one["name"] for one in told["source_files"]] == ["a.jsonl", "b.jsonl"]
    assert told["by_tokens"]["short"] == 1
    assert told["by_tokens"]["shared"] > 3  # those of b-5, whose text a-4 has
    key = f"{keys_of_bytes([b'a-4'])[0]:016x}"  # it has the text of b-5
    (same,) = told["checked"]["left"]
    assert f"1 document with the text of a forgotten one under another key. Forget them, too: echo {key} > keys.txt" in same
    assert list(check_forgotten(dataset.root)) == [same]
    page = path.with_suffix(".html").read_text()
    assert "they asked" in page
    assert not any(one in page + path.read_text() for one in GONE)
    (tmp_path / "keys").write_text(key)
    assert dataset.forget(key_list=str(tmp_path / "keys")).left == ()
    assert where(dataset.root, ["b-5"]) == set()
    assert list(check_forgotten(dataset.root)) == []


def test_runs_that_saw_them_are_told_and_skip_them(dataset, tmp_path):
    """The steps are those of the batches that have their tokens; from a step on the ledger has the successor."""
    version = f"{dataset.output}/versions/{dataset.build(validation_fraction=0, test_fraction=1).version}"
    path = tmp_path / "run.json"
    before = Ledger.create(path, {"text": (flat_tokens.open(version).test.documents(300), 1.0)}, batch_size=8, seed=3).mixture()
    shutil.copytree(version, tmp_path / "copy")
    mark = bytes(byte + 1 for byte in b"<a-3>")
    saw = [step for step in range(20) if mark in _ids(before[step])]
    result = dataset.forget("a-3", runs=(str(path),), skip_from=20)
    (run,) = result.runs.values()
    assert (run["documents"], run["visits"], run["steps"], run["replaced_by"]) == (1, len(saw), saw, {"text": "text-2"})
    ledger = Ledger.open(path)
    after = ledger.mixture()
    assert after.position(20) == before.position(20)
    with refusal("cannot be read any more", FileNotFoundError):
        after[3]
    with refusal("was replaced, as documents were forgotten, so that its documents are not known"):
        ledger.documents_of("text")
    assert mark in _ids(Ledger.open(path, places={"text": str(tmp_path / "copy")}).mixture()[saw[0]])
    assert not any(mark in _ids(after[step]) for step in range(20, 40))


def _ids(batch: Any) -> bytes:
    """The ids of tokens of all rows, as bytes can have them."""
    return bytes(np.minimum(batch.samples.encoded >> 1, 255).astype(np.uint8))


def test_no_command_brings_them_back(tmp_path, terminal):
    """Neither from sources nor from versions nor from an export. A version that was put back is refused until it is forgotten."""
    dataset = Dataset(tmp_path, validation_fraction=0)
    config, out, other = tmp_path / "config.json", Path(dataset.output), tmp_path / "other"
    config.write_text(dataset.config(dataset.write(), dataset.output).model_dump_json(exclude_unset=True))
    version = dataset.build().version
    retokenize = ("retokenize", config, "--tokenizer", "bytes", "--output", other)
    terminal.lines(*retokenize, "--no-server")
    for name, ended in (("old", ()), ("ended", ("--end-of-text", 300))):  # the second one's tokens are others
        terminal.lines("export", out, tmp_path / name, "--to", "megatron", *ended, "--no-server")
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-too")
    shutil.copytree(out / "versions" / version, tmp_path / "copy")
    lines = terminal.lines("forget", out, "--where", "url = 'ua-3'", "--reason", "they asked", "--no-server")
    assert lines[1].startswith(f"{other}: was made of this. There, too: python -m flows forget {other} --like {out} --reason")
    commands = [
        (retokenize, other),
        (("refresh", config), out),
        (("retokenize", out, "--tokenizer", "bytes", "--output", tmp_path / "third", "--trust-records"), tmp_path / "third"),
        (("refresh", config, "--set", f"output={other}"), other),
        (("append", tmp_path / "copy", "--to", out), out),
        (("merge", out, other, tmp_path / "merged"), tmp_path / "merged"),
        (("subset", out, tmp_path / "subset", "--min-tokens", "1"), tmp_path / "subset"),
        (("subset", tmp_path / "copy", out, "--min-tokens", "1"), out),
        (("shuffle", out, tmp_path / "shuffled"), tmp_path / "shuffled"),
        (("relayout", out, tmp_path / "relaid", "--layout", "zarr2"), tmp_path / "relaid"),
        (("import", tmp_path / "old-too", out), out),
        (("import", tmp_path / "ended-too", out), out),
    ]
    for command, place in commands:
        terminal.lines(*command, "--no-server")
        assert where(Store.at(place), ["a-3"]) == set(), command
        assert where(Store.at(place), ["a-4"]), command
    trained = terminal.lines("train-tokenizer", config, "--vocab-size", 280, "--to", tmp_path / "vocabulary", "--no-server")
    assert "of 69 documents" in trained[0]
    assert "about 69" in "".join(terminal.lines("plan", config))

    shutil.copytree(tmp_path / "copy", out / "versions" / version)
    back = out / "versions" / version
    for command in (
        ("subset", back, tmp_path / "again", "--min-tokens", "1", "--no-server"),
        ("rollback", out, version),
        ("train-tokenizer", back, "--vocab-size", 280, "--to", tmp_path / "vocabulary", "--no-server"),
    ):
        errors = terminal.errors(*command, status=1 if command[0] == "train-tokenizer" else 2)
        assert f"Take them out: python -m flows forget {out} --like {out}" in errors
    terminal.lines("forget", out, "--like", out, "--reason", "again", "--no-server")
    assert where(dataset.root, ["a-3"]) == set()


def test_outputs_inherit_the_lists_of_others(tmp_path):
    """What two outputs have forgotten is left out where the text of one is read at the other, also where it is added later."""
    dataset, other = Dataset(tmp_path), Dataset(tmp_path, str(tmp_path / "other"))
    dataset.build()
    other.build()
    other.forget("b-5")
    dataset.forget("a-3")
    before = read_pointer(dataset.root)
    result = dataset.forget("late-1")
    assert (result.key_count, result.unknown, result.versions) == (1, 1, {})
    assert read_pointer(dataset.root) == before
    result = other.forget(like=dataset.output)
    assert (result.documents, result.left) == (1, ())
    other.rows["a"] += rows("late", 3)
    assert other.refresh().outcome == "published"
    gone = ["a-3", "b-5", "late-1"]
    check_gone(other, gone)
    check_same(other, gone)
    assert other.refresh().outcome == "unchanged"
    assert other.forget(like=dataset.output).certificate is None


def test_no_words_of_a_match_stay_in_any_record(tmp_path):
    """Only the evaluation set itself still has its question, which a forgotten document had, too."""
    question = "why are there so many little boats in the old harbour of the town"
    (tmp_path / "exam.jsonl").write_text(json.dumps({"text": question}) + "\n")
    step = {"use": "decontaminate", "against": [{"name": "exam", "path": str(tmp_path / "exam.jsonl")}], "action": "mark"}
    dataset = Dataset(tmp_path, documents={"steps": [step]})
    dataset.rows["a"][3]["text"] += question
    result = dataset.build()
    assert result.totals["documents"]["examples"] == {"decontaminate.exam": [{"file": "a.jsonl", "row": 3, "question": 0}]}
    # as earlier releases wrote them
    made = Path(dataset.output, "runs", "20261128T100000000000-0.json")
    made.parent.mkdir(exist_ok=True)
    made.write_text(json.dumps({"totals": result.totals}))
    (made.parent / "cut_off.json").write_text('{"totals": "little boats')
    for path in (made, *Path(dataset.output).glob("_cache/index/*.json")):
        facts = json.loads(path.read_text().replace('"question": 0', f'"question": 0, "words": "{question}"'))
        digest = {"sha256": digest_of(facts)} if facts.pop("sha256", None) else {}
        path.write_text(json.dumps(digest | facts))
        assert question in path.read_text()
    dataset.forget("a-3")
    assert {
        key for key, data in contents(dataset.root) if b"little boats" in data and not key.startswith("_cache/sets/")
    } == set()
    check_gone(dataset, ["a-3"])


def test_exports_that_are_not_finished(dataset, tmp_path):
    """One that is written now is waited for; files that no record names are left, and named."""
    dataset.build()
    place = tmp_path / "exported"
    request = export_of(dataset.output, "megatron", {})
    note_export(request.location, "megatron", str(place))
    with writing(request, target(str(place))), refusal("another process is writing here"):
        dataset.forget("a-3")
    assert not (tmp_path / "out/forgotten").exists()
    (place / "train.bin").write_text("a part that was killed before its record")
    result = dataset.forget("a-3")
    assert result.rest == [f"{place}: an export that is not removed, or not completely: remove it"]


def test_exports_that_the_output_knows_of_are_removed(dataset, tmp_path):
    """Local ones are; the others are on the certificate."""
    version = dataset.build().version
    export_here(dataset.output, tmp_path / "exported", "parquet")
    (tmp_path / "exported/mine.txt").write_text("stays")
    note_export(f"{dataset.output}/versions/{version}", "hub, parquet", "hf://datasets/me/data")
    told = json.loads(Path(str(dataset.forget(*GONE).certificate)).read_text())
    assert told["exports"] == {"removed": [str(tmp_path / "exported")], "not_reached": ["hf://datasets/me/data"]}
    assert [path.name for path in (tmp_path / "exported").rglob("*")] == ["mine.txt"]
    again = json.loads(Path(str(dataset.forget("a-5").certificate)).read_text())
    assert again["exports"] == {"removed": [], "not_reached": ["hf://datasets/me/data"]}


def test_a_list_that_was_removed_or_put_back_stops_the_build(tmp_path):
    """By the last certificate; by ``latest.json`` if all of it has gone."""
    made, path = Dataset(tmp_path), tmp_path / "out/forgotten/list.json"
    made.build()
    made.forget("a-3")
    earlier = path.read_bytes()
    made.forget("a-17")
    for change in (path.unlink, lambda: path.write_bytes(earlier), lambda: shutil.rmtree(path.parent)):
        change()
        for run in (made.build, lambda: list(check_forgotten(made.root)), lambda: made.forget("b-5")):
            with refusal("forgotten documents would return"):
                run()
