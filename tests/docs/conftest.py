"""The dataset of `make demo`, which the programs in the docs read."""

import contextlib
from pathlib import Path

import pytest
import yaml

from tests.docs.programs import ROOT
from tests.flat_tokens.demo import build_dataset


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` builds."""
    settings = yaml.safe_load((ROOT / "deployments/demo/demo.yaml").read_text())
    output = tmp_path_factory.mktemp("demo") / settings.pop("output")
    with contextlib.chdir(ROOT):  # its paths are relative to the checkout
        build_dataset(output, **settings)
    return output
