"""docs/steps.md: its programs print what stands beneath them, and make steps of a package; its configuration is one."""

import re
import sys
import tomllib

import pytest
import yaml

import flat_tokens
import flat_tokens.extras
import flat_tokens.steps
from tasks.config import DocumentPolicy
from tests.docs.programs import ROOT, printed_by, programs
from tests.faults.support import build_here

PAGE = (ROOT / "docs/steps.md").read_text("utf-8")
PROGRAM, COLUMN = programs(PAGE)


def block(language: str) -> str:
    """The first block in a language."""
    first, *_ = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(first)


@pytest.mark.parametrize("program", [PROGRAM, COLUMN], ids=["steps", "column"])
def test_a_program_prints_what_stands_beneath_it(tmp_path, program):
    assert printed_by(program, tmp_path) == program.printed


@pytest.mark.needs("datatrove")
def test_the_configuration_is_one():
    policy = DocumentPolicy.model_validate(yaml.safe_load(block("yaml"))["documents"])
    assert [step["name"] for step in policy.opened().described] == ["normalize", "length", "boilerplate", "datatrove"]


def test_the_program_is_a_package_whose_steps_a_build_finds(tmp_path, monkeypatch):
    """It is installed as pip would do it: a module, and a directory that tells its name, its version and its entry points."""
    site = tmp_path / "site"
    about = site / "house_steps-1.dist-info"
    about.mkdir(parents=True)
    (site / "house_steps.py").write_text(PROGRAM.source + COLUMN.source)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house-steps\nVersion: 1\n")
    ((group, entries),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    (about / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    monkeypatch.syspath_prepend(site)
    flat_tokens.steps._opened.cache_clear()
    (tmp_path / "in.txt").write_text("BUY NOW\nTwo and two? Answer: 4\nNo answer\n")
    steps = [{"use": "shouting", "most": 0.3}, {"use": "digits"}, {"use": "answers"}]
    source = {"path": str(tmp_path / "in.txt"), "document_separator": "\n"}
    told = {"output": str(tmp_path / "out"), "source": source, "tokenizer": "bytes", "documents": {"steps": steps}}
    try:
        documents = build_here({**told, "validation_fraction": 0}).totals["documents"]
    finally:
        flat_tokens.steps._opened.cache_clear()
        sys.modules.pop("house_steps", None)
    assert (documents["written"], documents["skipped"]) == (2, {"shouting.capitals": 1})
    train = flat_tokens.open(tmp_path / "out").train
    digits = [train.select(where=f"digits {of}").numbers for of in ("> 0", "= 0")]
    assert [of if of is None else of.tolist() for of in digits] == [[0], [1]]
    assert [bytes(train.sequence(i)[train.mask(*train.span(i)) == 1].astype("u1") - 1) for i in range(2)] == [b" 4", b""]
