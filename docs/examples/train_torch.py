"""Train a tiny model on a dataset, and go on after a kill with the same batches: ``train_torch.py DATASET RUN [STEPS]``.

Which rows a step has follows from its number alone, so a checkpoint is the weights, the optimizer's state and the step, and
the path of the dataset's version. It is in the directory RUN; the same command resumes after the last one.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import flat_tokens
from flat_tokens import PackedTokens, ShuffledLoader

LENGTH, BATCH_SIZE, STEPS_A_CHECKPOINT = 64, 8, 10
WIDTH, HEADS = 32, 4


class TinyModel(nn.Module):
    """One block of attention and one of an MLP: packed rows of int32[batch, length] to float32[batch, length, vocabulary]."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.nothing = vocabulary_size  # one embedding more: what the first token of a sequence is predicted from
        self.tokens = nn.Embedding(vocabulary_size + 1, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary_size, bias=False))

    def forward(self, batch: PackedTokens) -> Tensor:
        """Logits of the batch's targets."""
        # An input of 0 is a token, or says that there is none before: the position tells them apart.
        x = self.tokens(batch.inputs.masked_fill(batch.positions == 0, self.nothing)) + self.positions(batch.positions)
        # A token attends to those of its own sequence, up to itself.
        segments, places = batch.segment_ids, torch.arange(LENGTH)
        attends = (segments[:, :, None] == segments[:, None, :]) & (places[:, None] >= places[None, :])
        # [batch, length, 3 * width] -> three of [batch, head, length, width / heads], and back
        query, key, value = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(query, key, value, attn_mask=attends[:, None])
        x = x + self.attended(heads.transpose(1, 2).flatten(2))
        return self.logits(x + self.mlp(x))


def train(path: str, run: Path, steps: int) -> None:
    """Train up to step *steps*, from the last checkpoint on if there is one."""
    checkpoint = run / "checkpoint.pt"
    saved: dict[str, Any] | None = torch.load(checkpoint) if checkpoint.exists() else None
    dataset = flat_tokens.open(path if saved is None else saved["dataset"])  # the version that the run has begun with
    loader = ShuffledLoader(dataset.train.packed(LENGTH, framework="torch"), BATCH_SIZE, seed=7, epochs=None)

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = TinyModel(vocabulary_size=dataset.train.max_token_id + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    with loader.steps(step, steps, prefetch=2) as batches:
        for batch in batches:
            loss = cross_entropy(model(batch).flatten(0, 1), batch.targets.flatten().long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: batch {digest([batch.encoded])}, loss {loss.item()!r}", flush=True)
            step += 1
            if step % STEPS_A_CHECKPOINT == 0:
                state = {"dataset": dataset.path, "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)  # there is always a whole one
    print(f"weights {digest(model.state_dict().values())}")


def digest(tensors: Iterable[Tensor]) -> str:
    """The first half of the sha256 of what tensors hold."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.numpy().tobytes())
    return sha256.hexdigest()[:32]


if __name__ == "__main__":
    run = Path(sys.argv[2])
    run.mkdir(parents=True, exist_ok=True)
    train(sys.argv[1], run, int(sys.argv[3]) if len(sys.argv) > 3 else 50)
