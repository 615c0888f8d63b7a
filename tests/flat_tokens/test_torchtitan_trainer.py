"""The trainer of torchtitan 0.3.0 with the data loader of this library.

torchtitan and triton are not among the peers: triton, which torchtitan imports without a GPU, too, takes a gigabyte.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flat_tokens import TokenBatch, write_dataset
from tests.docs.programs import ROOT

PROGRAM = """
import os, sys, types
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
import torch
import torchtitan.tools.utils as utils

class Cpu:
    # torch.cpu, and what torchtitan asks of a GPU
    def __getattr__(self, name):
        stand_ins = {"get_device_name": "cpu", "get_device_properties": types.SimpleNamespace(total_memory=1 << 33)}
        return getattr(torch.cpu, name, lambda *_, **__: stand_ins.get(name, {}))

utils.device_type, utils.device_module = "cpu", Cpu()
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import flat_tokens
from flat_tokens import ShuffledLoader
from flat_tokens.torchtitan import Config

def batches(length, batch_size, start):
    rows = flat_tokens.open(sys.argv[1]).train.packed_documents(length, fit="crop", bos=0)
    return ShuffledLoader(rows, batch_size, seed=7, epochs=None, start=start)

config = llama3_debugmodel()
config.dataloader = Config(batches=batches)
config.loss = config.loss.loss_fn
config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 3
config.validator.enable, config.dump_folder = False, "titan"
config.tokenizer = types.SimpleNamespace(build=lambda **_: None, to_dict=dict)
trainer = config.build()
for _, (inputs, labels) in zip(range(2), trainer.batch_generator(trainer.dataloader)):
    inputs, labels, others = trainer.post_dataloading_process(inputs, labels)
    with torch.no_grad():  # flex attention has no backward on a CPU
        logits = trainer.model_parts[0](inputs, **others)
    print(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).item())
print(trainer.dataloader.state_dict()["position"])
trainer.dataloader.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.needs("torchtitan", "triton")
def test_the_first_losses_of_its_llama_are_finite(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "d", [TokenBatch.from_sequences([rng.integers(0, 2000, rng.integers(5, 200)) for _ in range(500)])])
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "d", os.environ.get("MASTER_PORT", "29533")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *losses, position = map(float, done.stdout.split())
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss < 12 for loss in losses)
    assert position == 4
