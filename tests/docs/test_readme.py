"""The first screen is short, and right: what it says is printed is printed."""

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import flat_tokens
from tasks.config import BuildConfig
from tests.docs.programs import ROOT, printed_by, programs, run

TEXT = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("page", "least", "most"), [("README", 600, 700), ("docs/reliability", 0, 900), ("docs/benchmarks", 0, 900)]
)
def test_pages_for_people_are_short(page, least, most):
    assert least <= len((ROOT / f"{page}.md").read_text("utf-8").split()) <= most


def test_a_release_has_40_lines_in_the_changelog():
    for release in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        assert len(release.strip().splitlines()) <= 40, release.partition("\n")[0]


def test_the_configuration_is_one():
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert len(block.splitlines()) <= 10
    assert BuildConfig.model_validate(yaml.safe_load(block)).name == "my-dataset"


def test_the_program_prints_what_is_beneath_it(demo, tmp_path):
    (program,) = programs(TEXT)
    (tmp_path / "demo-output").symlink_to(demo)
    assert printed_by(program, tmp_path) == program.printed


def test_the_demo_is_as_printed(demo):
    (printed,) = re.findall(r"```\n(published\n.*?)```", TEXT, re.DOTALL)
    dataset = flat_tokens.open(demo)
    assert f"demo-output/versions/{Path(dataset.path).name}  (number 1)\n" in printed
    for name, split in (("train     ", dataset.train), ("validation", dataset.validation)):
        line = f"{name} {split.token_count:,} tokens in {split.seq_count} sequences, largest id {split.max_token_id:,}\n"
        assert line in printed


@pytest.mark.slow
@pytest.mark.needs("bpe_openai")
def test_the_commands_build_the_configuration(tmp_path):
    """On a machine that reaches nobody: the vocabulary comes from an installed package."""
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "dataset.yaml").write_text(block)
    (tmp_path / "data").mkdir()
    texts = [f"text {i}" for i in range(300)]
    pq.write_table(pa.table({"id": [f"{i}" for i in range(300)], "text": texts}), tmp_path / "data/a.parquet")
    commands = re.findall(r"^\.venv/bin/flat-tokens-service (.*?) *#", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = ["-m", "flows", *shlex.split(command)]
        run(words, tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY="http://127.0.0.1:9")
    for name in ("my-dataset", "my-dataset-o200k_base"):
        assert flat_tokens.open(tmp_path / "out" / name).train.seq_count > 290
