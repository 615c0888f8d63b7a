"""The service as a wheel: one package, beside the library, that builds datasets without a checkout."""

import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

PARTS = ("service", "flows", "tasks", "deployments", "flat_tokens", "pyproject.toml", "README.md", "LICENSE")
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import flat_tokens_service
for module in pkgutil.walk_packages(flat_tokens_service.__path__, "flat_tokens_service."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print([name for name in ("tasks", "flows", "deployments", "tests") if importlib.util.find_spec(name)])
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("tasks", "flows", "deployments")))
"""
FLOW = """
from pathlib import Path
import flat_tokens_service
from prefect.flows import load_flow_from_entrypoint
place = Path(flat_tokens_service.__file__).parent / "flows/build.py"
print(load_flow_from_entrypoint(f"{place}:build_dataset", use_placeholder_flow=False).name)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    copy = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        else:
            shutil.copy(ROOT / part, copy / part)
    for place in (".", "./service"):  # the setuptools of this environment: a package index may be out of reach
        made = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*made, "--no-build-isolation", "--wheel-dir", "dist", place], cwd=copy, check=True)
    return {path.name.partition("-")[0]: path for path in (copy / "dist").glob("*.whl")}


@pytest.fixture(scope="module")
def run(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command of a fresh environment, which has the two wheels and sees the other packages of this one."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place / "env", with_pip=True)
    site = place / f"env/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    pip = [place / "env/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, *wheels.values()], check=True)

    def run_in_it(command: str, *arguments: str | Path) -> str:
        done = subprocess.run([place / "env/bin" / command, *arguments], cwd=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_in_it


@pytest.mark.slow
def test_each_wheel_has_one_package_and_the_trainers_wheel_is_the_library_alone(wheels):
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as wheel:
            assert {member.partition("/")[0] for member in wheel.namelist()} == {name, f"{name}-0.1.0.dist-info"}
    with zipfile.ZipFile(wheels["flat_tokens_service"]) as wheel:
        facts = wheel.read("flat_tokens_service-0.1.0.dist-info/METADATA").decode()
        assert "Requires-Dist: flat-tokens==0.1.0\n" in facts
        assert "Requires-Dist: prefect==" in facts
        assert "flat_tokens_service/deployments/prefect.yaml" in wheel.namelist()


@pytest.mark.slow
def test_the_installed_service_builds_without_a_checkout(run, tmp_path):
    assert run("python", "-I", "-c", IMPORT_ALL).splitlines() == ["[]", "[]"]
    assert run("python", "-I", "-c", FLOW).strip() == "build-dataset"
    demo = ROOT / "deployments/demo"
    config = tmp_path / "web.yaml"
    config.write_text(
        f"output: {tmp_path / 'out'}\ntokenizer: {demo / 'tokenizer.json'}\n"
        f"source:\n  path: {demo / 'stories.parquet'}\n  id_column: id\n"
    )
    assert run("flat-tokens-service", "build", config, "--no-server").startswith("published")
    assert run("flat-tokens-service", "refresh", config, "--no-server").startswith("nothing changed")
    assert "no build is under way" in run("flat-tokens-service", "status", config)
    assert run("flat-tokens", "verify", tmp_path / "out", "--full").startswith("right (full)")
    assert run("flat-tokens-service", "--version") == run("flat-tokens", "--version") == "flat-tokens 0.1.0\n"
    assert "usage: flat-tokens-serve" in run("flat-tokens-serve", "--help")
