"""flat-tokens verify: what is right is said to be right, what is damaged is named, and documents are tokenized again."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flat_tokens
import flat_tokens.extras
from flat_tokens import TokenBatch, write_dataset
from flat_tokens.tools.cli import main
from flat_tokens.tools.verify import Sample, choose, sample
from tests.flat_tokens.demo import DEMO, TOKENIZER, build_dataset


@pytest.fixture
def copy(demo: Path, tmp_path: Path) -> Path:
    """A version that may be damaged."""
    shutil.copytree(demo, tmp_path / "out", symlinks=True)
    return tmp_path / "out"


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def shard_in(output: Path) -> Path:
    return sorted(path.parent for path in output.glob("_cache/*/receipt.json"))[0]


WHERE: dict[str, Callable[[Path], Path]] = {
    "output": lambda output: output,
    "version": lambda output: next(output.glob("versions/*")),
    "split": lambda output: next(output.glob("versions/*/train")),
    "shard": shard_in,
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("level", [[], ["--quick"], ["--full"], ["--sample", "2/3"]])
def test_what_is_whole_is_right(demo: Path, capsys: pytest.CaptureFixture[str], where: str, level: list[str]) -> None:
    status, said = verified(capsys, str(WHERE[where](demo)), *level)
    assert (status, said["ok"], said["faults"]) == (0, True, [])
    assert said["seq_count"] == {"output": 330, "version": 330, "split": 263, "shard": said["seq_count"]}[where]


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("where", ["output", "split", "shard"])
def test_a_flipped_bit_is_found_by_full_and_by_one_part_of_a_sample(
    copy: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    place = WHERE[where](copy)
    flip((WHERE["split"](copy) if where == "output" else place) / "encoded_tokens/c/0")
    assert verified(capsys, str(place), "--quick")[0] == 0
    status, said = verified(capsys, str(place), "--full")
    assert status == 1
    assert "encoded_tokens/c/0" in said["faults"][0]
    parts = [verified(capsys, str(place), "--sample", f"{n}/7", "--documents", "0")[0] for n in range(1, 8)]
    assert 1 in parts


@pytest.mark.parametrize("name", ["train/encoded_tokens/c/0", "documents/train/key/c/0", "train/seq_starts/zarr.json"])
def test_a_missing_object_is_found_at_once(copy: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (WHERE["version"](copy) / name).unlink()
    status, said = verified(capsys, str(copy))
    assert status == 1
    assert f"{name} is missing" in said["faults"]
    assert main(["verify", str(copy)]) == 1
    assert capsys.readouterr().out.startswith(f"damaged: {copy}\n  ")


def test_all_parts_together_look_at_every_object(demo: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever object is damaged, its size unchanged, exactly one part says so."""
    version = WHERE["version"](copy)
    for name in ("README.md", "documents/validation/row/c/0", "validation/encoded_tokens/c/0"):
        flip(version / name)
        found = [verified(capsys, str(copy), "--sample", f"{n}/5", "--documents", "0")[1]["faults"] for n in range(1, 6)]
        named = [faults for faults in found if any(fault.startswith(f"{name} has blake3") for fault in faults)]
        assert len(named) == 1
        shutil.copy(WHERE["version"](demo) / name, version / name)


def test_a_mark_where_no_sequence_starts_is_found_by_the_part_that_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a dataset without a manifest, where no digest tells."""
    sequences = [[1, 2, 3]] * 30
    batch = TokenBatch.from_sequences(sequences)
    batch.encoded_tokens[40] |= np.uint32(1)
    write_dataset(tmp_path / "data", [batch])
    (tmp_path / "data" / "manifest.json").unlink()
    statuses = [verified(capsys, str(tmp_path / "data"), "--sample", f"{n}/3")[0] for n in (1, 2, 3)]
    assert statuses == [0, 1, 0]
    assert verified(capsys, str(tmp_path / "data"), "--full")[0] == 1
    assert verified(capsys, str(tmp_path / "data" / "train"), "--full")[0] == 1


def test_an_id_above_the_largest_is_found_by_the_part_that_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = TokenBatch.from_sequences([[1], [2], [9]])
    write_dataset(tmp_path / "data", [batch._replace(max_token_id=8)])
    found = [verified(capsys, str(tmp_path / "data"), "--sample", f"{n}/3", "--documents", "0") for n in (1, 2, 3)]
    assert [status for status, _ in found] == [0, 0, 1]
    assert found[2][1]["faults"] == [f"{tmp_path}/data/train: token id 9 is above max_token_id 8"]


def test_a_pointer_to_nothing_is_a_fault(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(WHERE["version"](copy))
    status, said = verified(capsys, str(copy))
    assert status == 1
    assert "if there is no dataset" in said["faults"][0]


def test_a_damaged_receipt_is_a_fault_of_its_shard(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard_in(copy) / "receipt.json").write_text("{}")
    status, said = verified(capsys, str(shard_in(copy)))
    assert status == 1
    assert "is not a token shard's receipt" in said["faults"][0]


def test_a_record_of_documents_that_is_too_short_is_a_fault(demo: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a manifest that would name the objects."""
    version = WHERE["version"](copy)
    shutil.rmtree(version / "documents/train/row")
    shutil.copytree(version / "documents/validation/row", version / "documents/train/row")
    manifest = json.loads((version / "manifest.json").read_text())
    keep = [item for item in manifest["objects"] if not item["key"].startswith("documents/train/row")]
    store = flat_tokens.stores.store.Store.at(version)
    keep += [store.digest(f"documents/train/row/{key}").described() for key in ("c/0", "zarr.json")]
    (version / "manifest.json").write_text(json.dumps({**manifest, "objects": keep}))
    status, said = verified(capsys, str(version))
    assert status == 1
    assert "documents/train: has {" in said["faults"][0]


def test_where_nothing_is_there_is_nothing_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"flat-tokens verify: {tmp_path / 'none'}: there is nothing here. ")
    (tmp_path / "x.txt").write_text("x")
    assert main(["verify", str(tmp_path / "x.txt")]) == 2


def test_a_damaged_file_of_another_format_is_a_fault(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.pbin"
    shutil.copy(reference / "modalities" / "lorem_ipsum_long.pbin", path)
    assert verified(capsys, str(path), "--full")[0] == 0
    assert verified(capsys, str(path), "--sample", "1/2")[0] == 0
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["verify", str(path), "--format", "modalities"]) == 1
    assert "x.pbin" in capsys.readouterr().out


def test_all_documents_of_the_demo_are_tokenized_again_to_the_same_tokens(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = 0
    for n in (1, 2, 3):
        status, said = verified(capsys, "--trust-records", str(demo), "--sample", f"{n}/3", "--documents", "1000")
        assert status == 0
        assert said["documents"]["not_reachable"] == {}
        seen += said["documents"]["same"]
    assert seen == 330


def test_other_tokens_than_the_sources_are_faults(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen here with another tokenizer, of which the command warns."""
    status = main(
        ["verify", "--trust-records", str(demo), "--sample", "1/1", "--documents", "2", "--tokenizer", "bytes", "--json"]
    )
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert status == 1
    assert said["documents"] == {"same": 0, "different": 4, "not_reachable": {}}
    assert said["faults"][0].endswith("gives other tokens")
    assert "bytes is not the tokenizer of the dataset" in err


def test_documents_whose_source_is_gone_are_counted_as_not_reachable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO / "notes.jsonl", tmp_path / "notes.jsonl")
    build_dataset(tmp_path / "out", source={"path": str(tmp_path / "notes.jsonl")}, tokenizer="bytes", validation_fraction=0)
    (tmp_path / "notes.jsonl").rename(tmp_path / "gone.jsonl")
    status, said = verified(capsys, "--trust-records", str(tmp_path / "out"), "--sample", "1/1", "--documents", "9")
    assert (status, said["documents"]["same"]) == (0, 0)
    assert said["documents"]["not_reachable"] == {"their source files are not found; say where with --source": 9}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "gone.jsonl").rename(tmp_path / "elsewhere" / "notes.jsonl")
    again = ["--sample", "1/1", "--documents", "9", "--source", str(tmp_path / "elsewhere")]
    assert verified(capsys, str(tmp_path / "out"), *again)[1]["documents"]["same"] == 9


def test_a_source_that_has_changed_says_nothing_of_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    build_dataset(tmp_path / "out", source={"path": str(path)}, tokenizer="bytes", validation_fraction=0)
    path.write_text('{"text": "one"}\n{"text": "TWO"}\n')  # of the same size
    status, said = verified(capsys, "--trust-records", str(tmp_path / "out"), "--sample", "1/1")
    assert status == 0
    assert said["documents"] == {"same": 1, "different": 0, "not_reachable": {"x.jsonl has changed since it was read": 1}}


def test_a_key_that_is_not_its_documents_is_a_fault(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were mixed up, in a dataset whose digests all agree."""
    version = WHERE["version"](copy)
    manifest = json.loads((version / "manifest.json").read_text())
    for item in manifest["objects"]:
        if item["key"].startswith("documents/train/row"):
            other = item["key"].replace("/row/", "/file/")
            shutil.copy(version / other, version / item["key"])
            item |= flat_tokens.stores.store.Store.at(version).digest(item["key"]).described()
    (version / "manifest.json").write_text(json.dumps(manifest))
    status, said = verified(
        capsys, "--trust-records", str(version), "--sample", "1/1", "--documents", "5", "--tokenizer", TOKENIZER
    )
    assert status == 1
    assert any("is another document, by its key" in fault for fault in said["faults"])


@pytest.mark.parametrize("package", ["tokenizers", "pyarrow"])
def test_a_package_that_is_not_installed_makes_documents_unreachable(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(vars(flat_tokens.extras.pa), "_package", None)  # as if nobody had used it
    status, said = verified(capsys, "--trust-records", str(demo), "--sample", "1/1", "--documents", "3")
    assert status == 0
    assert any("pip install" in reason for reason in said["documents"]["not_reachable"])


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("length", [0, 1, 5, 100])
def test_parts_are_everything_once(count: int, length: int) -> None:
    shares = [Sample(n, count).share(length) for n in range(1, count + 1)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(length))


def test_the_same_documents_of_a_part_are_chosen_each_time_and_lie_within_it() -> None:
    for n in range(1, 5):
        chosen = choose(Sample(n, 4), 1000, 16)
        assert chosen.tolist() == choose(Sample(n, 4), 1000, 16).tolist() == sorted(set(chosen.tolist()))
        assert len(chosen) == 16
        assert 250 * (n - 1) <= chosen.min() <= chosen.max() < 250 * n
    assert choose(Sample(1, 4), 3, 16).tolist() == []
    assert choose(Sample(4, 4), 3, 16).tolist() == [2]


@pytest.mark.parametrize("wrong", ["", "1", "0/3", "4/3", "1/2/3", "a/b", "1/0", "-1/3"])
def test_a_part_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(Exception, match="is not a part such as 3/30"):
        sample(wrong)
