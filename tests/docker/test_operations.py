"""docs/operations: what its pages name exists, and their sums are right."""

import re

import pytest
import yaml

from tests.docker.compose import COMPOSE, ROOT
from tests.docker.test_compose import names_of_settings

TEXT = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs/operations").glob("*.md")))


def test_files_that_are_named_are_there():
    named = set(re.findall(r"(?:docker|deployments|tests|tasks)/[\w./-]*\w\.(?:py|yaml|json|md)", TEXT))
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]


def test_settings_are_ones_that_prefect_and_the_compose_file_know():
    known = names_of_settings()
    of_kubernetes = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_"  # of a package that the lock does not hold
    for setting in re.findall(r"\bPREFECT_[A-Z_]+[A-Z]\b", TEXT):
        assert setting.lower() in known or setting.startswith(of_kubernetes), setting
    compose = COMPOSE.read_text("utf-8")
    for variable in ("AUTH_STRING", "SERVERS", "PORT", "GROUP_CPUS", "KEEP_EVENTS", "KEEP_RUNS_SECONDS", "PUBLIC_URL"):
        assert variable in TEXT
        assert f"${{{variable}:" in compose
    services = yaml.safe_load(compose)["services"]
    for row in re.findall(r"^\| (`[a-z`, ]+`) \| .* \| .* \|$", TEXT[TEXT.index("## Containers") :], re.MULTILINE)[:6]:
        assert set(re.findall(r"`([a-z]+)`", row)) <= set(services)


BYTES_A_TOKEN, PACKED_BYTES, RATE, NETWORK = 4.6, 4.6 * 0.61, 50e6, 1e9
UNITS = {"s": 1, "min": 60, "h": 3600, "GB": 1e9, "TB": 1e12, "$": 1, "": 1}


@pytest.mark.parametrize(
    ("row", "of_a_token"),
    [
        ("text", BYTES_A_TOKEN),
        ("cores' price", BYTES_A_TOKEN / RATE / 3600 * 0.04),
        ("tokenizing, 64 cores", BYTES_A_TOKEN / RATE / 64),
        ("fetching, *m* machines", PACKED_BYTES / NETWORK),
        ("shards written, and read for either split, *m* machines", 12 / NETWORK),
        ("slices of 128 MB", BYTES_A_TOKEN / 128e6),
        ("token shards (`_cache`), until the version is published", 4),
        ("downloads (`scratch`) with `keep_files: true`, until collected", PACKED_BYTES),
    ],
)
def test_sums_follow_from_the_rates(row, of_a_token):
    """To the precision that they are printed with."""
    (line,) = [one for one in TEXT.splitlines() if one.startswith(f"| {row} |")]
    for cell, tokens in zip(line.strip("| ").split(" | ")[2:], (10e9, 350e9, 15e12), strict=True):
        number, _, unit = cell.strip().removesuffix(" / m").partition(" ")
        value = float(number.replace(",", "")) * UNITS[unit]
        assert value == pytest.approx(of_a_token * tokens, rel=0.16 if len(number.strip("0.")) == 1 else 0.05), (row, cell)
