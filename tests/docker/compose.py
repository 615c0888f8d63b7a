"""docker/compose.yaml as the compose CLI reads it: variables put in, anchors resolved, its schema checked."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

COMPOSE = ROOT / "docker/compose.yaml"
DOCKERFILE = ROOT / "docker/Dockerfile"
SECRETS = {"AUTH_STRING": "admin:swordfish", "POSTGRES_PASSWORD": "wolfram", "REDIS_PASSWORD": "caesium"}

Service = dict[str, Any]


def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A linter of ``make peers``. Nothing of this process's environment reaches it but PATH and HOME."""
    found = shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"needs {program} (make peers), which is not installed")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run([found, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def compose_config(variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run("docker-compose", "--file", str(COMPOSE), "config", "--format", "json", **variables)


def read_services(variables: Mapping[str, str]) -> dict[str, Service]:
    """The services by name, those that others depend on first."""
    done = compose_config(variables)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    order = TopologicalSorter({name: service.get("depends_on", ()) for name, service in services.items()})
    return {name: services[name] for name in order.static_order()}
