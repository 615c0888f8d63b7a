"""Trainers install and import the library alone: no orchestrator, tokenizer or data set library comes along."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

import flat_tokens
from tests.made import write_sequences

ROOT = Path(__file__).parents[3]
FRAMEWORKS = ["torch", "torchdata", "jax", "grain"]
SERVICES_OWN = ["prefect", "datasets", "tiktoken", "tokenizers", "gigatoken", "pyarrow", "pydantic", "awkward", "tasks", "flows"]


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, without this checkout or this environment on its path."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=outside, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_local_dataset_is_read_without_the_service_a_framework_or_what_stores_need(tmp_path):
    write_sequences(tmp_path / "a", [range(9)])
    code = (
        "import json, sys, flat_tokens; flat_tokens.open(sys.argv[1]).train.packed(4)[1]; print(json.dumps(sorted(sys.modules)))"
    )
    modules = set(json.loads(run(sys.executable, "-W", "error", "-c", code, tmp_path / "a", cwd=ROOT)))
    assert "flat_tokens.reader" in modules
    assert modules & {*SERVICES_OWN, *FRAMEWORKS, "fsspec", "numcodecs", "zarr", "asyncio", "ssl"} == set()


def test_help_needs_no_orchestrator_and_no_engine():
    code = "import json, sys; from flows.commands.main import parser; parser(); print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(run(sys.executable, "-c", code, cwd=ROOT)))
    assert modules & {"prefect", "pyarrow", "tokenizers", "tiktoken"} == set()


def test_all_names_what_is_public():
    public = {name for name, value in vars(flat_tokens).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public - {"annotations"} == set(flat_tokens.__all__)
    assert flat_tokens.__version__


READ = """
import importlib.metadata, importlib.util, json, sys, flat_tokens
others, *paths = sys.argv[1:]
print(json.dumps({
    "files": [str(file) for file in importlib.metadata.files("flat-tokens")],
    "others": [name for name in others.split() if importlib.util.find_spec(name)],
    "verified": [flat_tokens.verify(path, "full").token_count for path in paths],
}))
"""


@pytest.mark.slow
@pytest.mark.nightly  # tests/service/test_wheel.py looks into the same wheel
def test_the_installed_package_is_the_library_alone_and_reads(tmp_path):
    """What `pip install .` puts into a fresh environment, dependencies included, is enough to read every layout."""
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "demo-output")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    probe = [*map(str, pip), "download", "--no-deps", "--dest", str(tmp_path / "probe"), "setuptools>=77"]
    reached = subprocess.run(probe, capture_output=True, text=True, timeout=500)
    if reached.returncode:
        pytest.skip(f"pip cannot download setuptools here: {reached.stderr.strip().splitlines()[-1]}")

    run(*pip, "install", "--quiet", tmp_path / "checkout", cwd=tmp_path)

    paths = [write_sequences(tmp_path / layout, [[1, 2], [], [3, 4, 5]], layout=layout) for layout in flat_tokens.LAYOUTS]
    others = " ".join([*SERVICES_OWN, *FRAMEWORKS, "tests", "deployments"])
    read = json.loads(run(python, "-I", "-W", "error", "-c", READ, others, *paths, cwd=tmp_path))
    assert (read["others"], read["verified"]) == ([], [5] * len(paths))
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flat_tokens").rglob("*") if path.is_file()}
    installed = {name for name in read["files"] if "dist-info" not in name and "__pycache__" not in name}
    assert installed == {"../../../bin/flat-tokens", *(name for name in source if "__pycache__" not in name)}
