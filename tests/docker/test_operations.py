"""docs/operations: what its pages name exists."""

import re

import prefect.settings
import yaml

from tests.docker.compose import COMPOSE, ROOT

TEXT = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs/operations").glob("*.md")))


def test_files_that_are_named_are_there():
    named = set(re.findall(r"(?:docker|deployments|tests|tasks)/[\w./-]*\w\.(?:py|yaml|json|md)", TEXT))
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]


def test_settings_are_ones_that_prefect_and_the_compose_file_know():
    of_kubernetes = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_"  # of a package that the lock does not hold
    for setting in re.findall(r"\bPREFECT_[A-Z_]+[A-Z]\b", TEXT):
        assert hasattr(prefect.settings, setting) or setting.startswith(of_kubernetes), setting
    compose = COMPOSE.read_text("utf-8")
    for variable in ("AUTH_STRING", "SERVERS", "PORT", "GROUP_CPUS", "KEEP_EVENTS", "KEEP_RUNS_SECONDS", "PUBLIC_URL"):
        assert variable in TEXT
        assert f"${{{variable}:" in compose
    services = yaml.safe_load(compose)["services"]
    for row in re.findall(r"^\| (`[a-z`, ]+`) \| .* \| .* \|$", TEXT[TEXT.index("## Containers") :], re.MULTILINE)[:6]:
        assert set(re.findall(r"`([a-z]+)`", row)) <= set(services)
