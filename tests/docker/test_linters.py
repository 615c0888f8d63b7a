"""What tools for containers say of the files here: hadolint of the Dockerfile, the compose CLI of compose.yaml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SECRETS = {"AUTH_STRING": "admin:swordfish", "POSTGRES_PASSWORD": "wolfram", "REDIS_PASSWORD": "caesium"}


def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"needs {program} (make peers), which is not installed")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run([found, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_hadolint_finds_nothing() -> None:
    done = run("hadolint", "docker/Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_takes_the_file_by_its_schema_with_all_secrets() -> None:
    done = run("docker-compose", "--file", "docker/compose.yaml", "config", **SECRETS)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert services["server"]["ports"][0]["host_ip"] == "127.0.0.1"
    assert services["groups"]["depends_on"]["register"]["condition"] == "service_completed_successfully"


@pytest.mark.parametrize("name", SECRETS)
def test_compose_refuses_it_without_a_secret(name: str) -> None:
    done = run("docker-compose", "--file", "docker/compose.yaml", "config", **{**SECRETS, name: ""})
    assert done.returncode != 0
    assert f"set {name} in docker/.env" in done.stderr
