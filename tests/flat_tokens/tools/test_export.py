"""Exports: whole files only, going on behind them, nothing overwritten; and the way back by ``flat-tokens import``."""

import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

import flat_tokens
from flat_tokens.formats import FORMATS
from flat_tokens.tools import export as exporting
from flat_tokens.tools.cli import main
from flat_tokens.tools.corpus import ORIGIN, open_corpus
from flat_tokens.tools.export import ExportResult, export_of, import_dataset, write
from tests.damage import change_file, flip
from tests.flat_tokens.demo import DEMO
from tests.made import write_sequences
from tests.refusal import refusal
from tests.terminal import Terminal

TRAIN, VALIDATION = [[1, 2], [3, 4, 5], [], [6], [7, 8, 9, 10]], [[11], [12, 4, 13]]
END = 300
MARKED = {"nanogpt", "build-nanogpt", "jaxformer", "llm.c", "llm.c-llama-3"}
"""Formats that keep documents apart by an end-of-text token alone."""


def given_to(format: str) -> dict[str, Any]:
    """What keeps documents apart in a format; and several files of few tokens, where it has such."""
    known = {field.name for field in fields(FORMATS[format].options)}
    small = {"tokens_per_file": 5, "tokens_per_shard": 5, "tokens_per_row_group": 4, "tokens_per_batch": 4, "size_limit": 300}
    return ({"end_of_text": END} if format in MARKED else {}) | {name: n for name, n in small.items() if name in known}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return made(tmp_path / "dataset")


def made(path: Path, train: list[list[int]] = TRAIN, validation: list[list[int]] = VALIDATION) -> Path:
    return write_sequences(path, train, validation)


def export(dataset: Path, out: Path, format: str = "megatron", **options: Any) -> ExportResult:
    return write(export_of(dataset, format, options), str(out))


def contents(out: Path) -> dict[str, bytes]:
    """Every file of an export, but what is noted of the export itself."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files if ".export" not in path.parts}


def sequences(path: Path) -> dict[str, list[list[int]]]:
    flat_tokens.verify(path, "full")
    return {name: [ids.tolist() for ids in split] for name, split in flat_tokens.open(path).splits.items()}


@pytest.mark.parametrize("format", FORMATS)
def test_every_token_is_told_of_once(dataset, tmp_path, format):
    """Also by formats that pass over their files twice, and by a run that finds them written."""
    request, out = export_of(dataset, format, given_to(format)), str(tmp_path / "out")
    for was_there in (False, True):
        told = []
        for part in FORMATS[format].plan(request.source(), request.options):
            assert exporting.write_file(part, request, out, told.append).reused is was_there
        assert sum(told) == request.token_count == 14


def test_files_that_are_whole_are_not_written_again(dataset, tmp_path, monkeypatch):
    """Those that are missing or damaged are, and so is what an error kept from being written."""
    out, options = tmp_path / "out", {"tokens_per_file": 3}
    write = Mock(wraps=FORMATS["megatron"].write, side_effect=[DEFAULT, DEFAULT, *[OSError(28, "No space left on device")] * 9])
    with monkeypatch.context() as patch, refusal("No space left", OSError):
        patch.setattr(exporting, "FORMATS", {"megatron": replace(FORMATS["megatron"], write=write)})
        export(dataset, out, **options)
    assert len(contents(out)) == 4
    whole, written = export(dataset, out, **options), contents(out)
    assert whole.reused == 2
    (out / whole.objects[0].key).unlink()
    flip(out / whole.objects[-1].key)
    done = export(dataset, out, **options)
    assert (done.parts, done.reused) == (whole.parts, whole.parts - 2)
    assert contents(out) == written
    assert not (out / ".export/staging").exists()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A build's output, as far as an export looks at it."""
    made(tmp_path / "output/versions/one")
    (tmp_path / "output/latest.json").write_text('{"version": "one"}')
    return tmp_path / "output"


def notes(output: Path) -> list[Any]:
    return [json.loads(path.read_bytes()) for path in (output / "exports").iterdir()]


def test_an_output_knows_of_exports_also_where_a_first_run_was_killed(output, tmp_path):
    """What the note of a killed export left is removed, and one that is missing is made up for by the next run."""
    noted = [{"path": str(tmp_path / "out"), "format": "megatron", "version": "one"}]
    for was_done in (False, True):
        (output / "exports").mkdir(exist_ok=True)
        (output / "exports/.0123abcd-one.json.4567cdef.part").write_text("{")
        assert export(output / "versions/one", tmp_path / "out").was_done is was_done
        assert notes(output) == noted
        next((output / "exports").iterdir()).unlink()


def test_an_export_that_cannot_be_noted_says_so_before_it_writes(output, tmp_path):
    (output / "exports").write_text("no directory")
    with refusal(f"{output}/exports", NotADirectoryError):
        export(output / "versions/one", tmp_path / "out")
    assert contents(tmp_path / "out") == {}


def test_who_may_only_read_an_output_exports_without_a_note(output, tmp_path, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    export(output / "versions/one", tmp_path / "out")
    assert sorted(path.name for path in output.iterdir()) == ["latest.json", "versions"]


def test_an_export_of_no_documents_is_done_at_once(tmp_path, tool):
    made(tmp_path / "empty", [], [])
    for said in ("there are no sequences", "nothing to do"):
        assert said in tool.out("export", tmp_path / "empty", tmp_path / "out", "--to", "parquet")


def test_nothing_is_written_over(dataset, tmp_path):
    """Neither files that are there, nor another export, nor the dataset."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    with refusal(r"full: is not empty; there is thesis.txt. Choose another directory"):
        export(dataset, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]
    export(dataset, tmp_path / "out")
    before, other = contents(tmp_path / "out"), made(tmp_path / "other", [[5]])
    for path, format, options in ((dataset, "megatron", {"end_of_text": 5}), (dataset, "datatrove", {}), (other, "megatron", {})):
        with refusal("holds an export of another dataset, or in another way"):
            export(path, tmp_path / "out", format, **options)
    with refusal("is within the dataset"):
        export(dataset, dataset / "out")
    assert contents(tmp_path / "out") == before
    assert not (dataset / "out").exists()


@pytest.mark.parametrize(
    ("place", "above"), [("built/_cache/a", "built"), ("built/latest/a", "built/versions/one"), ("other/a/b", "other")]
)
def test_nothing_is_exported_into_an_output_or_another_dataset(dataset, tmp_path, place, above):
    made(tmp_path / "built/versions/one")
    made(tmp_path / "other")
    (tmp_path / "built/latest.json").write_text("{}")
    (tmp_path / "built/latest").symlink_to("versions/one")
    before = sorted(tmp_path.rglob("*"))
    with refusal(rf"{place}: is within .*{above}, a build's output or a dataset. Choose another dir"):
        export(dataset, tmp_path / place)
    for around in (tmp_path, tmp_path / "built", tmp_path / "built/versions"):
        with refusal(r"is not empty; there is|is within"):
            export(dataset, around)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_that_came_to_no_file_is_not_in_the_way(dataset, tmp_path):
    """Here a document holds the token that is to stand between documents, which is noticed when it is met."""
    with refusal("Set inner_end_of_text='keep'"):
        export(dataset, tmp_path / "out", "nanogpt", end_of_text=4)
    export(dataset, tmp_path / "out", "nanogpt", end_of_text=4, inner_end_of_text="keep")
    assert sorted(contents(tmp_path / "out")) == ["train.bin", "val.bin"]


def test_an_export_is_written_by_one_process_at_a_time(dataset, tmp_path):
    out = str(tmp_path / "out")
    request = export_of(dataset, "megatron", {})
    with exporting.writing(request, exporting.target(out)), refusal("another process is writing here"):
        write(request, out)
    assert not write(request, out).was_done


def test_the_commands_take_every_option_as_a_flag(dataset, tmp_path, tool):
    out, back = tmp_path / "shards", tmp_path / "back"
    told = [dataset, "--to", "build-nanogpt", out, "--end-of-text", "50_256", "--tokens-per-shard", "4", "--name", "corpus"]
    assert tool.json("export", *told)["byte_count"] == sum(path.stat().st_size for path in out.glob("corpus_*_00000?.npy"))
    assert tool.out("export", *told).startswith(f"nothing to do: {out} is this export, ")

    found = tool.json("import", out, back, "--format", "build-nanogpt", "--end-of-text", "50256")
    assert found["splits"]["train"] == {"token_count": 10, "seq_count": 5}
    assert flat_tokens.open(back).manifest["provenance"]["imported"]["options"] == {"end_of_text": 50256}
    assert "exists already" in tool.errors("import", out, back)


@pytest.mark.parametrize("format", FORMATS)
def test_an_import_that_loses_the_bounds_of_documents_says_how_to_keep_them(dataset, tmp_path, tool, format):
    export(dataset, tmp_path / "out", format, **given_to(format))
    said = tool.errors("import", tmp_path / "out", tmp_path / "one", "--format", format, status=0)
    if format not in MARKED:
        assert (said, sequences(tmp_path / "one")["train"]) == ("", TRAIN)
        return
    assert len(sequences(tmp_path / "one")["train"]) == 1
    assert f"each split is one long sequence: {format} keeps documents apart by an end-of-text token alone" in said
    told = ["import", tmp_path / "out", tmp_path / "back", "--format", format, "--end-of-text", END]
    assert tool.errors(*told, status=0) == ""
    assert sequences(tmp_path / "back") == {"train": TRAIN, "validation": VALIDATION}


def test_an_import_that_was_stopped_says_what_to_do(dataset, tmp_path):
    export(dataset, tmp_path / "out")
    (tmp_path / "back/train").mkdir(parents=True)
    with refusal("If an import was stopped there, remove it and try again", FileExistsError):
        import_dataset(tmp_path / "out", tmp_path / "back")


def test_a_split_by_itself_is_imported(dataset, tmp_path):
    import_dataset(dataset / "validation", tmp_path / "back")
    assert sequences(tmp_path / "back") == {"train": [], "validation": VALIDATION}


# What an export was made of travels with it


def exported(version: Path, out: Path, format: str, *more: str) -> Path:
    marks = ["--end-of-text", "4096"] if format in MARKED else []
    assert main(["export", str(version), str(out), "--to", format, *marks, *more]) == 0
    return out


def traced(path: Path, tool: Terminal, split: str = "train", sequence: int = 7) -> dict[str, Any]:
    return tool.json("trace", path, "--split", split, "--sequence", sequence, "--source", DEMO)


@pytest.mark.parametrize("format", FORMATS)
def test_trace_and_inspect_find_an_exports_documents_again(version, tmp_path, format, tool):
    """Also of formats that nobody recognises, and without naming the end-of-text token: the origin tells them."""
    out = exported(version, tmp_path / "moved" / format, format)
    for place in (("train", 7), ("validation", 0)):
        there = traced(version, tool, *place)
        same = {"text_from": "source", **{key: there[key] for key in ("document", "found", "text")}}
        assert traced(out, tool, *place).items() >= same.items()
    told = tool.json("inspect", out)
    assert (told["made_of"]["version"], told["tokenizer"]["name"]) == (version.name, "tokenizer.json")


def test_one_split_and_a_directory_of_an_export_have_its_origin(version, tmp_path, tool):
    out = exported(version, tmp_path / "held-out", "mds", "--split", "validation")
    assert traced(out, tool, "validation", 3) == {**traced(out / "validation", tool, "validation", 3), "path": str(out)}
    assert not (out / ".export/documents/train").exists()


def test_a_file_of_several_has_no_documents_but_its_sources(version, tmp_path):
    out = exported(version, tmp_path / "out", "megatron", "--tokens-per-file", "5000")
    corpus = open_corpus(out / "train_00000.bin")
    assert corpus.documents("train") is None
    assert [source.name for source in corpus.sources] == ["stories", "notes"]


def test_without_room_or_origin_an_export_is_read_all_the_same(version, tmp_path, monkeypatch, tool):
    monkeypatch.setattr("flat_tokens.tools.export.ALWAYS_ROOM", -(10**9))
    out = exported(version, tmp_path / "out", "parquet")
    assert not (out / ".export/documents").exists()
    assert traced(out, tool)["document"] is None
    shutil.rmtree(out / ".export")
    assert open_corpus(out).provenance == {}


@pytest.mark.parametrize("wrong", [{"options": {"end_of_text": "x"}}, {"format": "tar"}, {"provenance": []}])
def test_an_origin_that_is_something_else_is_refused_by_name(version, tmp_path, wrong):
    out = exported(version, tmp_path / "out", "parquet")
    change_file(out / ORIGIN, wrong)
    with refusal(r"origin\.json: is not the origin of an export"):
        open_corpus(out)
