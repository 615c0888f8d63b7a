"""The training example: killed and started again, it goes on as if nothing had been."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import flat_tokens
from tests.docs.programs import ROOT, run
from tests.made import write_sequences

EXAMPLE = ROOT / "docs/examples/train_torch.py"
STEPS_A_CHECKPOINT = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="trains with torch, which is not installed"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 documents that count upwards from somewhere, of 0 to 60 tokens: something that can be learned."""
    rng = np.random.default_rng(0)
    documents = [(np.arange(rng.integers(0, 61)) + rng.integers(0, 400)).tolist() for _ in range(500)]
    root = tmp_path_factory.mktemp("dataset")
    write_sequences(root / "versions/one", documents)
    (root / "latest.json").write_text('{"version": "one"}')
    return root


def started(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed_by(*arguments: object) -> list[str]:
    printed, errors = run([str(EXAMPLE), *map(str, arguments)], ROOT, OMP_NUM_THREADS="1")
    assert errors == ""
    return printed.splitlines()


def loss(line: str) -> float:
    return float(line.rpartition(" ")[2])


def test_a_killed_run_goes_on_with_the_same_batches_and_losses(dataset, tmp_path):
    """Digests of batches, losses to the last bit, the weights at the end; also where ``latest`` has moved meanwhile."""
    killed = []
    with started(dataset, tmp_path / "killed", 1_000_000) as process:
        assert process.stdout is not None
        for line in process.stdout:
            killed.append(line.rstrip("\n"))
            if line.startswith("step 27:"):
                process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
    steps = max(50, len(killed) + STEPS_A_CHECKPOINT)  # it may have done more before it was killed
    undisturbed = printed_by(dataset, tmp_path / "undisturbed", steps)
    assert killed == undisturbed[: len(killed)]

    write_sequences(dataset / "versions/two", [[1, 2, 3]] * 500)
    (dataset / "latest.json").write_text('{"version": "two"}')
    assert flat_tokens.open(dataset).train.token_count == 1500
    again = printed_by(dataset, tmp_path / "killed", steps)
    first = steps + 1 - len(again)
    assert again == undisturbed[first:]
    assert first % STEPS_A_CHECKPOINT == 0
    assert first >= 20, "what a checkpoint has is not done again"

    assert len(undisturbed) == steps + 1
    assert len({line.partition(", loss")[0] for line in undisturbed}) == steps + 1, "no batch comes twice"
    assert loss(undisturbed[steps - 1]) < 0.8 * loss(undisturbed[0]), "it learns"
