"""flat-tokens verify: what is right is said to be right, what is damaged is named, and documents are tokenized again."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flat_tokens.extras
from flat_tokens import TokenBatch, write_dataset
from flat_tokens.manifest import read_manifest
from flat_tokens.stores.store import Store
from flat_tokens.tools.sources import SampledPart, choose
from flat_tokens.tools.verify import sample
from tests.damage import change_file, flip
from tests.flat_tokens.demo import TOKENIZER, build_lines, shard_in

WHERE: dict[str, Callable[[Path], Path]] = {
    "output": lambda output: output,
    "version": lambda output: next(output.glob("versions/*")),
    "split": lambda output: next(output.glob("versions/*/train")),
    "shard": shard_in,
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("level", [[], ["--quick"], ["--full"], ["--sample", "2/3"]])
def test_what_is_whole_is_right(demo, tool, where, level):
    said = tool.json("verify", WHERE[where](demo), *level)
    assert (said["ok"], said["faults"]) == (True, [])
    assert said["seq_count"] == {"output": 330, "version": 330, "split": 263, "shard": said["seq_count"]}[where]


@pytest.mark.parametrize("where", ["output", "split", "shard"])
def test_a_flipped_bit_is_found_by_full_and_by_one_part_of_a_sample(copy, tool, where):
    place = WHERE[where](copy)
    flip((WHERE["split"](copy) if where == "output" else place) / "encoded_tokens/c/0")
    tool.json("verify", place, "--quick")
    assert "encoded_tokens/c/0" in tool.json("verify", place, "--full", status=1)["faults"][0]
    assert 1 in [tool("verify", place, "--sample", f"{n}/2", "--documents", "0")[0] for n in (1, 2)]


def without(name: str) -> Callable[[Path], object]:
    return lambda output: (WHERE["version"](output) / name).unlink()


@pytest.mark.parametrize(
    ("where", "damage", "fault"),
    [
        *(("output", without(name), f"{name} is missing") for name in ("documents/train/key/c/0", "train/seq_starts/zarr.json")),
        ("output", lambda output: shutil.rmtree(WHERE["version"](output)), "if there is no dataset"),
        ("shard", lambda output: (shard_in(output) / "receipt.json").write_text("{}"), "is not a token shard's receipt"),
    ],
)
def test_what_is_missing_or_damaged_is_found_at_once(copy, tool, where, damage, fault):
    damage(copy)
    path = WHERE[where](copy)
    assert any(fault in one for one in tool.json("verify", path, status=1)["faults"])
    assert tool.out("verify", path, status=1).startswith(f"damaged: {path}\n  ")


def test_all_parts_together_look_at_every_object(demo, copy, tool):
    """Whichever object is damaged, its size unchanged, exactly one part says so."""
    version = WHERE["version"](copy)
    for name in ("README.md", "documents/validation/row/c/0", "validation/encoded_tokens/c/0"):
        flip(version / name)
        parts = [tool("verify", copy, "--sample", f"{n}/5", "--documents", "0", "--json")[1] for n in range(1, 6)]
        assert sum(f'"{name} has blake3' in part for part in parts) == 1
        shutil.copy(WHERE["version"](demo) / name, version / name)


MARKED = TokenBatch.from_sequences([[1, 2, 3]] * 30)
MARKED.encoded_tokens[40] |= np.uint32(1)


@pytest.mark.parametrize(
    ("batch", "part", "fault"),
    [
        (MARKED, 2, "train: token 40 is marked as a start where"),
        (TokenBatch.from_sequences([[1], [2], [9]])._replace(max_token_id=8), 3, "train: token id 9 is above max_token_id 8"),
    ],
)
def test_what_no_digest_tells_is_found_by_the_part_that_has_it(tmp_path, tool, batch, part, fault):
    """In a dataset without a manifest."""
    write_dataset(data := tmp_path / "data", [batch])
    (data / "manifest.json").unlink()
    assert [tool("verify", data, "--sample", f"{n}/3")[0] for n in (1, 2, 3)] == [n == part for n in (1, 2, 3)]
    for told in ([data, "--sample", f"{part}/3"], [data, "--full"], [data / "train", "--full"]):
        assert fault in tool.json("verify", *told, status=1)["faults"][0]


def replace_rows(version: Path, by: str) -> None:
    """Rows of the documents of train are another array, in a manifest whose digests all agree."""
    rows, store = version / "documents/train/row", Store.at(version)
    shutil.rmtree(rows)
    shutil.copytree(version / by, rows)
    keep = [item for item in read_manifest(store)["objects"] if not item["key"].startswith("documents/train/row")]
    keep += [store.digest(f"documents/train/row/{key}").described() for key in ("c/0", "zarr.json")]
    change_file(version / "manifest.json", {"objects": keep})


def test_a_record_of_documents_that_is_too_short_is_a_fault(copy, tool):
    replace_rows(version := WHERE["version"](copy), "documents/validation/row")
    assert "documents/train: has {" in tool.json("verify", version, status=1)["faults"][0]


def test_a_damaged_file_of_another_format_is_a_fault(reference, tmp_path, tool):
    path = tmp_path / "x.pbin"
    shutil.copy(reference / "modalities/lorem_ipsum_long.pbin", path)
    tool.json("verify", path, "--sample", "1/2")
    path.write_bytes(path.read_bytes()[:-3])
    assert "x.pbin" in tool.out("verify", path, "--format", "modalities", status=1)


def test_all_documents_of_the_demo_are_tokenized_again_to_the_same_tokens(demo, trusting):
    said = [trusting.json("verify", demo, "--sample", f"{n}/3", "--documents", "1000")["documents"] for n in (1, 2, 3)]
    assert sum(documents["same"] for documents in said) == 330


def test_other_tokens_than_the_sources_are_faults(demo, trusting):
    """Seen here with another tokenizer, of which the command warns."""
    told = ["--sample", "1/1", "--documents", "2", "--tokenizer", "bytes", "--json"]
    status, out, err = trusting("verify", demo, *told)
    said = json.loads(out)
    assert (status, said["documents"]) == (1, {"same": 0, "different": 4, "not_reachable": {}})
    assert said["faults"][0].endswith("gives other tokens")
    assert "bytes is not the tokenizer of the dataset" in err


def test_documents_whose_source_is_gone_are_counted_as_not_reachable(tmp_path, tool):
    build_lines(tmp_path, *"abc").parent.rename(tmp_path / "elsewhere")
    verify = ["verify", tmp_path / "out", "--sample", "1/1", "--documents", "9"]
    said = tool.json(*verify, "--trust-records")["documents"]
    assert said["same"] == 0
    assert said["not_reachable"] == {"their source files are not found; say where with --source": 3}
    assert tool.json(*verify, "--source", tmp_path / "elsewhere")["documents"]["same"] == 3


def test_a_source_that_has_changed_says_nothing_of_the_dataset(tmp_path, trusting):
    path = build_lines(tmp_path, "one", "two")
    path.write_text(path.read_text().replace("two", "TWO"))  # of the same size
    said = trusting.json("verify", tmp_path / "out", "--sample", "1/1")
    assert said["documents"] == {"same": 1, "different": 0, "not_reachable": {"x.jsonl has changed since it was read": 1}}


def test_a_key_that_is_not_its_documents_is_a_fault(copy, trusting):
    replace_rows(version := WHERE["version"](copy), "documents/train/file")
    said = trusting.json("verify", version, "--sample", "1/1", "--documents", "5", "--tokenizer", TOKENIZER, status=1)
    assert any("is another document, by its key" in fault for fault in said["faults"])


@pytest.mark.parametrize("package", ["tokenizers", "pyarrow"])
def test_a_package_that_is_not_installed_makes_documents_unreachable(demo, trusting, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(vars(flat_tokens.extras.pa), "_package", None)  # as if nobody had used it
    said = trusting.json("verify", demo, "--sample", "1/1", "--documents", "3")
    assert any("pip install" in reason for reason in said["documents"]["not_reachable"])


def test_the_same_documents_of_a_part_are_chosen_each_time_and_lie_within_it():
    for n in (1, 4):
        chosen, again = (choose(SampledPart(n, 4), 1000, 16).tolist() for _ in range(2))
        assert chosen == again == sorted({*chosen} & {*range(250 * n - 250, 250 * n)})
        assert len(chosen) == 16
    assert [choose(SampledPart(n, 4), 3, 16).tolist() for n in (1, 4)] == [[], [2]]


@pytest.mark.parametrize("wrong", ["1", "0/3", "4/3", "1/2/3", "a/b", "1/0"])
def test_a_part_that_is_none_is_refused(wrong):
    with pytest.raises(Exception, match="is not a part such as 3/30"):
        sample(wrong)
