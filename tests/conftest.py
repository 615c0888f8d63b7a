"""What every test stands on: no telemetry, a Prefect home of its own, and the shared material where it is there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.examples import FEW

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"

_home = tempfile.TemporaryDirectory(prefix="flat-tokens-tests-")
os.environ.update(
    PREFECT_HOME=f"{_home.name}/prefect",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    PREFECT_LOGGING_LEVEL="WARNING",
)
os.environ.pop("PREFECT_API_URL", None)
if (SHARED / "vocab").exists():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "vocab" / "tiktoken_cache"))

settings.load_profile(FEW)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist a file's tests run in one process, as do all that use the Prefect server: it starts once."""
    for item in items:
        group = "prefect" if "prefect_server" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def _shared(part: str) -> Path:
    path = SHARED / part
    if not path.exists():
        pytest.skip(f"needs {part} from the shared material, which is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def corpus() -> Path:
    """169 MB of real text in eight Parquet files."""
    return _shared("corpus")


@pytest.fixture(scope="session")
def reference() -> Path:
    """Files written by the reference implementations."""
    return _shared("reference")


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """The real gpt2, r50k, cl100k and o200k vocabularies, which tiktoken finds through TIKTOKEN_CACHE_DIR."""
    return _shared("vocab")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server on a fresh database, for the flows that need one."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
