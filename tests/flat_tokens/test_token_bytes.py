"""The bytes of every token id: next to the manifest, as trainers count them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
from flat_tokens.manifest import TokenBytes, read_manifest, read_token_bytes
from flat_tokens.stores.store import Store
from flat_tokens.vocabulary import token_bytes
from flows.pipelines.forget import forget
from tasks.derive.request import ForgetRequest
from tests.damage import change_file
from tests.faults.support import derive_here
from tests.flat_tokens.demo import TOKENIZER
from tests.flat_tokens.test_vocabulary import added, rank_file
from tests.refusal import refusal


def tokenizer_json(path: Path, **changes: Any) -> Path:
    """A byte-level tokenizer.json: a, Ġ (a space) and Ġa, a special token, and one that is not special."""
    definition = {
        "added_tokens": [added(3, "<|end|>"), added(4, "é!", special=False)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "Ġ": 1, "Ġa": 2}, "merges": [["Ġ", "a"]]},
        **changes,
    }
    path.write_text(json.dumps(definition))
    return path


def test_tokens_have_their_bytes_and_special_tokens_none(tmp_path):
    assert token_bytes(str(tokenizer_json(tmp_path / "tokenizer.json"))).lengths.tolist() == [1, 1, 2, 0, 3]
    assert token_bytes("bytes").lengths.tolist() == [0] + [1] * 256
    ranks = token_bytes(str(rank_file(tmp_path / "x.tiktoken")), pattern="gpt2")
    assert ranks.lengths.tolist() == [1] * 256 + [2, 3, 4]
    assert ranks.lengths.dtype == np.int32


@pytest.mark.needs("shared/vocab")
def test_an_encodings_special_tokens_have_no_bytes():
    lengths = token_bytes("gpt2").lengths
    assert lengths[[0, 262, 50255, 50256]].tolist() == [1, 4, 6, 0]  # !, " the", " gazed"


def test_tokens_are_exact_where_a_text_has_their_bytes(tmp_path):
    assert token_bytes("bytes").is_exact
    assert token_bytes(TOKENIZER).is_exact
    assert not token_bytes(str(tokenizer_json(tmp_path / "few-bytes.json"))).is_exact
    definition = json.loads(Path(TOKENIZER).read_bytes())
    for number, changes in enumerate(({"normalizer": {"type": "NFC"}}, {"normalizer": {"type": "Lowercase"}})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({**definition, **changes}))
        assert not token_bytes(str(path)).is_exact


def test_every_version_that_is_built_has_them(version):
    dataset = flat_tokens.open(version)
    assert dataset.token_bytes.tolist() == token_bytes(TOKENIZER).lengths.tolist()
    written = dataset.manifest["totals"]["documents"]["text_bytes"]
    splits = (dataset.train, dataset.validation)
    assert sum(int(dataset.token_bytes[split.slice(0, split.token_count) >> 1].sum()) for split in splits) == written
    flat_tokens.verify(version, "full")


def test_datasets_made_of_datasets_have_those_of_the_first_that_has_them(version, tmp_path):
    old = without(version, tmp_path / "old")
    for inputs, has_them in (([old, version], True), ([old], False)):
        made = derive_here("merge", *inputs, output=tmp_path / f"merged-{len(inputs)}")
        assert Path(made.path, "token_bytes.json").is_file() == has_them
    merged = flat_tokens.open(tmp_path / "merged-2")
    assert merged.token_bytes.tolist() == flat_tokens.open(version).token_bytes.tolist()


def test_a_version_without_forgotten_documents_has_those_of_the_one_before(version, tmp_path):
    shutil.copytree(version.parents[1], tmp_path / "out", symlinks=True)
    result = forget(ForgetRequest(output=str(tmp_path / "out"), reason="they asked", where="row = 0 and source = 'notes'"))
    assert list(result.versions) == [version.name]
    after = flat_tokens.open(tmp_path / "out")
    assert after.path != str(version)
    assert after.token_bytes.tolist() == flat_tokens.open(version).token_bytes.tolist()


def without(version: Path, copy: Path) -> Path:
    """The version as an earlier release wrote it."""
    shutil.copytree(version, copy)
    (copy / "token_bytes.json").unlink()
    with refusal(r"token_bytes\.json"):
        flat_tokens.verify(copy)
    kept = [one for one in read_manifest(Store.at(copy))["objects"] if one["key"] != "token_bytes.json"]
    change_file(copy / "manifest.json", {"objects": kept})
    return copy


def test_a_version_of_an_earlier_release_says_how_they_are_had(version, tmp_path):
    old = without(version, tmp_path / "old")
    with refusal(r"its tokens are from elsewhere. flat_tokens.vocabulary.token_bytes has", FileNotFoundError):
        _ = flat_tokens.open(old).token_bytes
    flat_tokens.verify(old, "full")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_bytes": [1, -1]}, "a token has -1 bytes"),
        ({"token_bytes": [1, 1 << 40]}, "another one 1099511627776"),
        ({"token_bytes": [1, 2]}, "it ends with id 1, but the dataset has id"),
        ({"token_bytes": [1.5]}, "not a number of bytes for each id"),
        ({"token_bytes": {"0": 1}}, "token_bytes is"),
        ({"tokenizer": "0" * 64}, "it is of the tokenizer 000000000000, but the manifest names"),
        ({"exact": False}, "another digest"),
        ({"sha256": "0" * 64}, "another digest"),
        ({"format_version": 2}, "version 2"),
    ],
)
def test_a_damaged_record_is_refused_by_its_name(version, tmp_path, changes, message):
    copy = shutil.copytree(version, tmp_path / "copy")
    change_file(copy / "token_bytes.json", changes)
    with refusal(rf"token_bytes\.json: does not tell .*{message}"):
        _ = flat_tokens.open(copy).token_bytes
    with refusal("does not tell the bytes of the dataset's tokens"):
        flat_tokens.verify(copy)


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = TokenBytes(np.array([1, 0, 3], np.int32), "ab" * 32, is_exact=False)
    store = Store.at(tmp_path)
    store.put("token_bytes.json", written.record())
    totals = {"train": {"max_token_id": 2}, "test": None, "documents": None}
    manifest = {"totals": totals, "provenance": {"tokenizer": {"digest": "ab" * 32}}}
    found = read_token_bytes(store, manifest)
    assert (found.lengths.tolist(), found.tokenizer, found.is_exact) == ([1, 0, 3], "ab" * 32, False)
