"""What a build is told: what is accepted and what it means, what is kept secret, and the facts that tasks hand on."""

import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tasks.config import (
    BuildConfig,
    DocumentPolicy,
    HubDataset,
    Source,
    TokenizerConfig,
    available_cores,
    byte_count,
    evaluation_sets,
    size_for_people,
    with_absolute_paths,
)
from tasks.download.sources import resolve_source
from tasks.faults import faults_of
from tasks.locations import plain_location
from tasks.models import Slice, SourceFile, TokenShard, digest_of
from tests.refusal import refusal
from tests.slices import range_of_slice

MINE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


SECRET = "https://user:Tr0ub4dor@example.org/a"


def config(**settings: Any) -> BuildConfig:
    return BuildConfig.model_validate({"output": "/out", "source": {"path": "/in"}, "tokenizer": "bytes", **settings})


def token_shard(**facts: Any) -> TokenShard:
    nothing = {"key": "k" * 64, "inputs": {}, "objects": (), "text_bytes": 0, "rows": 0, "token_count": 0, "max_token_id": 0}
    return TokenShard.model_validate({**nothing, "read": 0, "written": 0, "skipped": {}, "replaced": {}, **facts})


def test_a_single_source_and_a_tokenizer_by_name_are_short_forms():
    short = config()
    assert short.sources == (Source(path="/in"),)
    assert short.tokenizer == TokenizerConfig(name="bytes")
    assert BuildConfig.model_validate(short.model_dump()) == short
    assert BuildConfig.model_validate_json(short.model_dump_json()) == short


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("file:///data/100%25/a%20b", "/data/100%/a b"),
        *(
            (place, place)
            for place in (
                "/data",
                "data/*.jsonl",
                "../data/a[1].parquet",
                "./data",
                "~/data",
                "/data/..hidden",
                "/data/a@b",
                "/data/100%25/a%20b",
                "file:///data",
                "gs://bucket/path",
                "s3://bucket/user@example.org/a",
                "hf://datasets/org/name@main/data",
                "https://example.org/a.jsonl?download=true&type=x&page=2",
                "memory://x",
                "/data/with space",
            )
        ),
    ],
)
def test_plain_locations_are_taken_as_they_are(location, path):
    """But for file:// URLs that are percent-encoded: they are the path, the second time, too."""
    assert plain_location(location) == location
    for setting in ("path", "table"):
        assert [getattr(Source(**{setting: place}), setting) for place in (location, path)] == [path, path]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("$HOME/out", "has a variable, $HOME, which only a shell replaces. Write what it stands for"),
        ("/data/${NAME}/out", "has a variable, ${NAME}, which"),
        ("%USERPROFILE%/out", "has a variable, %USERPROFILE%, which"),
        ("$(pwd)/out", "has $(pwd), which nothing here replaces. Write what it stands for"),
        ("/data/`whoami`/out", "has `whoami`, which nothing here replaces"),
        ("/data/{{ name }}", "has {{ name }}, which nothing here replaces"),
        ("C:\\out", "is a path of Windows. Write it as it is called here, with slashes, such as /mnt/c/data"),
        ("d:", "is a path of Windows"),
        ("\\\\server\\share", "is a path of Windows"),
        ("data\\out", "is a path of Windows"),
        ("~nobody-of-this-name/out", "begins in the home directory of 'nobody-of-this-name', whom this machine does not know"),
    ],
)
def test_what_would_become_a_directory_that_nobody_meant_is_refused(tmp_path, monkeypatch, place, words):
    """As an output and as scratch; a source that is there may be called so."""
    for settings in ({"output": place}, {"scratch": place}):
        with pytest.raises(ValidationError) as refused:
            config(**settings)
        assert words in "; ".join(faults_of(refused.value, BuildConfig))
    monkeypatch.chdir(tmp_path)
    with refusal(f"there is nothing at .*[.] It {re.escape(words[:20])}"):
        resolve_source(Source(path=place), 0)
    name = place.removeprefix("file://").lstrip("/")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert len(resolve_source(Source(path=tmp_path / name), 0).files) == 1


def test_absolute_paths_are_those_of_this_directory(tmp_path, monkeypatch):
    """Of every setting that names a file; another directory does not change them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    step = {"use": "decontaminate", "against": ["x.jsonl", {"hub": {"path": "a/b"}}]}
    told = config(
        output="out/",
        scratch="~/scratch",
        source={"path": "file://in", "messages_column": "m", "chat_template": "t.jinja"},
        tokenizer={"name": "x.tiktoken", "pattern": "gpt2"},
        documents={"steps": [step]},
    )
    made = with_absolute_paths(told)
    assert (made.output, made.scratch) == (f"{tmp_path}/out", "/home/somebody/scratch")
    assert (made.sources[0].path, made.sources[0].chat_template) == (f"file://{tmp_path}/in", f"{tmp_path}/t.jinja")
    assert made.tokenizer == TokenizerConfig(name=f"{tmp_path}/x.tiktoken", pattern="gpt2")
    assert [one.path for one in evaluation_sets(made.documents.steps[0])] == [f"{tmp_path}/x.jsonl", None]
    assert made.model_fields_set == told.model_fields_set
    monkeypatch.chdir("/")
    assert with_absolute_paths(made) == made
    for source in ({"hub": {"path": "a/b"}}, {"table": "texts.web", "catalog": "lake"}):
        short = config(source=source, tokenizer="gpt2")
        assert with_absolute_paths(short) == short
    assert with_absolute_paths(config(source={"table": "x"})).sources[0].table == "/x"


@pytest.mark.parametrize("settings", [{"output": SECRET}, {"scratch": SECRET}, {"source": {"path": SECRET}}])
def test_secrets_are_refused_and_not_repeated(settings):
    """Neither by the error that a person sees nor by pydantic's, which may end in a log."""
    with pytest.raises(ValidationError) as refused:
        config(**settings)
    told = "; ".join(faults_of(refused.value, BuildConfig))
    assert "carries credentials" in told
    assert "Tr0ub4dor" not in told + str(refused.value) + repr(refused.value)


@pytest.mark.parametrize(
    ("output", "path"),
    [
        ("/data/out", "/data"),
        ("/data", "/data"),
        ("/data", "/data/in/a.jsonl"),
        ("/data", "/data/*.jsonl"),
        ("data/out", "data/"),
        ("file:///data/out", "/data"),
        ("out", "."),
        ("gs://a/out", "gs://a"),
        ("gs://a", "gcs://a/in/*.jsonl"),
        ("s3a://a/out/", "s3://a/out"),
        ("memory://x/out", "memory:///x/"),
        ("link/out", "data"),  # the link leads there
    ],
)
def test_output_and_sources_within_each_other_are_refused(tmp_path, monkeypatch, output, path):
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    with refusal(r"are within each other. Keep them apart", ValidationError):
        config(output=output, source={"path": path})


@pytest.mark.parametrize(
    ("output", "path"),
    [
        *((place, "/in") for place in ("/data/100%/out", "/data/a$", "s3://bucket/$x")),
        ("/data/out", "/data/in"),
        ("/data2", "/data"),
        ("gs://a/out", "gs://a/*.jsonl"),
        ("gs://a/out", "s3://a/out"),
        ("/x", "s3://x"),
    ],
)
def test_other_places_are_taken_as_they_are(output, path):
    assert config(output=output, source={"path": path}).output == output


def test_any_share_may_be_validation_which_a_validation_split_of_a_source_replaces():
    for fraction in (0, 1, 0.5, 1e-12):
        assert config(validation_fraction=fraction).fraction == fraction
    for more in ({}, {"validation_fraction": 0}):
        assert config(source={"path": "/in", "validation_split": "test"}, **more).fraction == 0


def test_a_config_cannot_be_changed():
    with refusal("frozen", ValidationError):
        config().output = "/elsewhere"


@pytest.mark.parametrize(
    "model",
    [BuildConfig, Source, HubDataset, TokenizerConfig, DocumentPolicy, TokenShard],
    ids=lambda model: model.__name__,
)
def test_every_model_refuses_what_it_does_not_know(model):
    with refusal("Extra inputs are not permitted", ValidationError):
        model.model_validate({"surely_unknown": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranges": []},
        {"ranges": [[[0, "a", 9, "../../etc/passwd", "text"], 0, 9, None, 9]]},
        {"ranges": [[[0, "a", 9, "ab", "exe"], 0, 9, None, 9]]},
        {"ranges": [[[0, "a", 9, "ab", "text"], 0, 9, None]]},
    ],
)
def test_a_slice_from_another_process_is_one(wrong):
    slices = TypeAdapter(Slice)
    file = SourceFile(0, "a.jsonl", 9, "ab", "jsonl", "/in/a.jsonl", stamp=(1, 2))
    right = Slice(range_of_slice(file, 0, 9, 9).ranges * 2)
    assert slices.validate_json(slices.dump_json(right)) == right
    with pytest.raises(ValidationError):
        slices.validate_python(wrong)


def test_digests_are_the_same_for_ever():
    """On every machine: keys of stored shards are made of them. The literals were computed by sha256sum."""
    assert digest_of() == "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"  # of "[]"
    assert digest_of({"b": (1, None), "a": "é"}) == "0d2e6bc8782011b4170a5474904112aba13b0d61992e8273bcafaccad0af071b"
    assert digest_of({"b": 1, "a": "é"}, None) == digest_of({"a": "é", "b": 1}, None)
    assert digest_of((1, 2)) == digest_of([1, 2]) != digest_of([2, 1])
    assert digest_of("ab", "c") != digest_of("a", "bc")


def test_a_receipt_that_lost_a_document_is_refused():
    token_shard(read=5, written=3, skipped={"null": 1, "empty": 1})
    with refusal(r"shard kkkkkkkkkkkk: read 5, written 3, skipped \{'null': 1\}", ValidationError):
        token_shard(read=5, written=3, skipped={"null": 1})


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, MINE),
        ({"cpu.max": "max 100000\n"}, MINE),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, min(64, MINE or 1)),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, MINE),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "nonsense\n"}, MINE),
    ],
)
def test_a_containers_share_of_the_time_counts(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores


def test_a_process_that_is_bound_to_one_core_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert available_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("told", "bytes_"),
    [
        ("128 MB", 128_000_000),
        ("1.5 GiB", 3 << 29),
        ("64 kB", 64_000),
        ("512 B", 512),
        (99, 99),
    ],
)
def test_sizes_are_for_people(told, bytes_):
    assert config(slice_bytes=told).slice_bytes == bytes_


@pytest.mark.parametrize("told", ["128 mb", "MB", "-1 MB", "1.5 B", "9 TB", "", True])
def test_a_size_that_is_none_is_refused(told):
    with refusal("slice_bytes", ValidationError):
        config(slice_bytes=told)


@given(st.integers(0, 1 << 40))
def test_a_size_for_people_is_the_same_size(count):
    assert byte_count(size_for_people(count)) == count


def test_sizes_for_people_are_short():
    sizes = {128_000_000: "128 MB", 256 << 20: "256 MiB", 8 << 30: "8 GiB", 32_000_000_000: "32 GB", 1500: "1500", 0: "0"}
    assert {count: size_for_people(count) for count in sizes} == sizes


def test_null_leaves_a_group_of_settings_as_it_is():
    """So the form submits groups that nobody has opened."""
    assert config(documents=None, groups=None) == config()
