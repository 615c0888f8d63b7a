"""The zarr2 layout read by zarr 2.18, as people have it who cannot move to zarr 3."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flat_tokens

READ = """
import json, sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(json.dumps({
    "zarr": zarr.__version__,
    "groups": sorted(group.group_keys()),
    "tokens": int(group["train/encoded_tokens"][:].astype("u8").sum()),
    "starts": group["train/seq_starts"][-3:].tolist(),
    "max_token_id": group["train"].attrs["max_token_id"],
}))
"""


@pytest.fixture(scope="module")
def old_zarr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has zarr 2.18 and nothing of ours."""
    environment = tmp_path_factory.mktemp("zarr2")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "zarr==2.18.7", "numcodecs==0.15.1"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"zarr 2.18 cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return python


@pytest.mark.slow
@pytest.mark.nightly  # the bytes of the layout are those of test_same_bytes.py, which never change
def test_zarr_2_18_reads_the_zarr2_layout(tmp_path, old_zarr):
    rng = np.random.default_rng(0)
    batch = flat_tokens.TokenBatch.from_sequences([rng.integers(0, 100_000, n) for n in rng.integers(0, 5000, 300)])
    flat_tokens.write_dataset(tmp_path / "out", [batch], layout="zarr2")
    done = subprocess.run([old_zarr, "-c", READ, tmp_path / "out"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "zarr": "2.18.7",
        "groups": ["train", "validation"],
        "tokens": int(batch.encoded_tokens.astype("u8").sum()),
        "starts": batch.seq_starts[-3:].tolist(),
        "max_token_id": batch.max_token_id,
    }
