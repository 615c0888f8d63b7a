"""The Dockerfile: what the image is made of, read from its instructions; the part of the lock that is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.__main__ import C_MEMORY, TUNABLES
from tests.docker.compose import COMPOSE, ROOT, run
from tests.docker.dockerfile import Instruction, Stage, read_stages
from tests.docker.rehearse import context_files

PINNED = re.compile(r"[a-z0-9./-]+:[0-9]+\.[0-9]+(\.[0-9]+)?[a-z0-9.-]*@sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return read_stages()


def named(stage: Stage, name: str) -> list[Instruction]:
    return [one for one in stage.instructions if one.name == name]


@pytest.mark.needs("bin/hadolint")
def test_hadolint_finds_nothing() -> None:
    """No root at the end, no secret among the settings, no ADD where COPY does."""
    done = run("hadolint", "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_every_base_is_pinned_by_version_and_digest(stages: list[Stage]) -> None:
    images = [stage.base for stage in stages]
    images += re.findall(r"image: ([a-z]\S+)", COMPOSE.read_text("utf-8"))
    assert len(images) == 4
    for image in images:
        assert PINNED.fullmatch(image), image


def test_the_last_stage_runs_as_a_fixed_user_that_is_not_root(stages: list[Stage]) -> None:
    last = stages[-1]
    assert [one.value for one in named(last, "USER")] == ["10001:10001"]
    made = " ".join(one.value for one in named(last, "RUN"))
    assert "groupadd --gid 10001 tokens" in made
    assert "useradd --uid 10001 --gid tokens" in made
    after = [one.name for one in last.instructions[last.instructions.index(named(last, "USER")[0]) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


def test_packages_come_by_their_hashes_as_wheels_and_without_pip(stages: list[Stage]) -> None:
    """So nothing is compiled, no stage needs a compiler, and the last stage installs nothing."""
    commands = " ".join(one.value for stage in stages for one in named(stage, "RUN"))
    assert commands.count("pip --python /opt/venv install") == commands.count(" install --no-cache-dir") == 1
    for option in ("--require-hashes", "--no-deps", "--only-binary :all:", "--requirement service.lock"):
        assert option in commands
    assert "venv --without-pip" in commands
    assert "pip --python /opt/venv check" in commands
    assert not re.search(r"\b(apt|apt-get|gcc|curl|wget|sudo)\b", commands)
    assert not [one for stage in stages for one in named(stage, "ADD")]
    assert "pip" not in " ".join(one.value for one in named(stages[-1], "RUN"))


def test_the_image_says_how_it_is_stopped_watched_and_where_it_keeps_data(stages: list[Stage]) -> None:
    last = stages[-1]
    assert [one.value for one in named(last, "STOPSIGNAL")] == ["SIGTERM"]
    assert [one.words for one in named(last, "VOLUME")] == [["/data", "/scratch"]]
    (check,) = named(last, "HEALTHCHECK")
    assert "HEALTH_URL" in check.value
    assert "PYTHONDONTWRITEBYTECODE=1" in " ".join(one.value for one in named(last, "ENV"))


def test_a_build_in_a_container_has_memory_as_one_on_the_command_line(stages: list[Stage]) -> None:
    settings = [word for one in named(stages[-1], "ENV") for word in one.words]
    assert f"{TUNABLES}={C_MEMORY}" in settings


def test_a_build_sees_the_service_and_nothing_else() -> None:
    """No test, no history, no secret, no data comes into the image, and nothing that it needs is left out."""
    seen = context_files(ROOT)
    assert {name.partition("/")[0] for name in seen} == {
        "LICENSE",
        "requirements.lock",
        "docker",
        "flat_tokens",
        "tasks",
        "flows",
        "deployments",
    }
    assert [name for name in seen if name.startswith("docker/")] == ["docker/service_lock.py"]
    assert not [name for name in seen if name.endswith((".pyc", ".env"))]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    service = [name for name in tracked if name.startswith(("flat_tokens/", "tasks/", "flows/", "deployments/"))]
    assert not [name for name in service if (ROOT / name).exists() and name not in seen]


def service_lock(text: str) -> str:
    spec = importlib.util.spec_from_file_location("service_lock", ROOT / "docker" / "service_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.service_lock(text))


def test_the_locks_program_needs_python_alone() -> None:
    """It runs before anything is installed."""
    tree = ast.parse((ROOT / "docker" / "service_lock.py").read_text("utf-8"))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


LOCK = """\
# comment
alpha==1.0 \\
    --hash=sha256:aa
    # via flat-tokens (pyproject.toml:service)
beta[extra]==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:bb \\
    --hash=sha256:bc
    # via
    #   alpha
    #   delta
delta==4.0 \\
    --hash=sha256:dd
    # via flat-tokens (pyproject.toml:dev)
prefect==3.0 \\
    --hash=sha256:pp
    # via
    #   flat-tokens (pyproject.toml:service)
    #   delta
zeta==5.0 \\
    --hash=sha256:ee
    # via beta
"""


def test_the_service_gets_what_it_asks_for_directly_or_not() -> None:
    kept = service_lock(LOCK)
    assert re.findall(r"^(\w+)", kept, re.MULTILINE) == ["alpha", "beta", "prefect", "zeta"]
    assert "beta[extra]==2.0 ; python_full_version < '3.12' \\\n    --hash=sha256:bb \\\n    --hash=sha256:bc\n" in kept


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (LOCK.replace("    --hash=sha256:dd\n", ""), "delta has no hash"),
        (LOCK.replace("    # via beta\n", ""), "zeta has no hash, or nothing asked for it"),
        (LOCK + "loose>=1\n", "'loose>=1' is not a pinned requirement"),
        (LOCK.replace(":service", ":other"), "nothing in the lock was asked for by"),
    ],
)
def test_a_lock_that_is_not_understood_is_refused(broken: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        service_lock(broken)


def test_the_locks_service_part_is_what_it_imports_and_not_what_tests_do(tmp_path: Path) -> None:
    """Run as the Dockerfile runs it."""
    printed = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "service_lock.py"), str(ROOT / "requirements.lock")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout
    names = set(re.findall(r"^([a-z0-9.-]+)", printed, re.MULTILINE))
    assert {"prefect", "zarr", "numpy", "pyarrow", "tiktoken", "gigatoken", "gcsfs", "s3fs", "datasets", "asyncpg"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "moto", "import-linter"}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [([], 2, "usage: service_lock.py requirements.lock"), (["none.lock"], 1, "none.lock: [Errno 2] No such file")],
)
def test_a_lock_that_is_not_there_is_told_in_one_line(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "docker" / "service_lock.py"), *arguments]
    told = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (status, "")
    assert told.stderr.startswith(words)
    assert len(told.stderr.splitlines()) == 1
