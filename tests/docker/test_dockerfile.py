"""The Dockerfile: what the image is made of, read from its instructions; the lock that is installed."""

import re
import shlex
import subprocess

import pytest

from flows.__main__ import C_MEMORY, TUNABLES
from tests.docker.compose import COMPOSE, ROOT, run
from tests.docker.dockerfile import Stage, context_files, read_stages

PINNED = re.compile(r"[a-z0-9./-]+:[0-9]+\.[0-9]+(\.[0-9]+)?[a-z0-9.-]*@sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return read_stages()


@pytest.mark.needs("bin/hadolint")
def test_hadolint_finds_nothing():
    """No root at the end, no secret among the settings, no ADD where COPY does."""
    done = run("hadolint", "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_every_base_is_pinned_by_version_and_digest(stages):
    images = [stage.base for stage in stages]
    images += re.findall(r"image: ([a-z]\S+)", COMPOSE.read_text("utf-8"))
    assert len(images) == 4
    for image in images:
        assert PINNED.fullmatch(image), image


def test_the_last_stage_runs_as_a_fixed_user_that_is_not_root(stages):
    last = stages[-1]
    told = [last.values(name) for name in ("USER", "STOPSIGNAL", "VOLUME")]
    assert told == [["10001:10001"], ["SIGTERM"], ['["/data", "/scratch"]']]
    assert "HEALTH_URL" in last.values("HEALTHCHECK")[0]
    names = [one.name for one in last.instructions]
    assert {"RUN", "COPY", "ADD"}.isdisjoint(names[names.index("USER") :])


def test_packages_come_by_their_hashes_as_wheels_and_without_pip(stages):
    """So nothing is compiled, no stage needs a compiler, and the last stage installs nothing."""
    commands = " ".join(value for stage in stages for value in stage.values("RUN"))
    for option in ("--require-hashes", "--no-deps", "--only-binary :all:", "--requirement requirements.lock"):
        assert option in commands
    assert not re.search(r"\b(gcc|curl|wget|sudo)\b", commands)
    assert not re.search(r"\b(pip|apt|apt-get)\b", " ".join(stages[-1].values("RUN")))


def test_a_build_in_a_container_has_memory_as_one_on_the_command_line(stages):
    assert f"{TUNABLES}={C_MEMORY}" in [word for value in stages[-1].values("ENV") for word in shlex.split(value)]


def test_a_build_sees_the_service_and_nothing_else():
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
    assert not [name for name in seen if name.endswith((".pyc", ".env"))]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    service = [name for name in tracked if name.startswith(("flat_tokens/", "tasks/", "flows/", "deployments/"))]
    assert not [name for name in service if (ROOT / name).exists() and name not in seen]


def test_the_lock_of_the_image_is_what_the_service_imports_and_not_what_tests_do():
    names = set(re.findall(r"^([a-z0-9.-]+)", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE))
    assert {"prefect", "zarr", "numpy", "pyarrow", "tiktoken", "gigatoken", "gcsfs", "s3fs", "datasets", "asyncpg"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "moto", "import-linter"}
