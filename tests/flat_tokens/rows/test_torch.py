"""Views in torch's DataLoader and torchdata's StatefulDataLoader, which shuffle, collate and resume them.

In interpreters of their own: loaders fork, and this one may have threads.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flat_tokens
from flat_tokens import Mixture, ShuffledLoader
from flat_tokens.rows.views import SplitView
from tests.made import write_ragged

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow
needs_torch = pytest.mark.needs("torch")
needs_torchdata = pytest.mark.needs("torch", "torchdata")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ragged(tmp_path_factory.mktemp("dataset") / "ragged", 0, 20, 200)


def views(path: str) -> dict[str, SplitView]:
    train = flat_tokens.open(path).train
    return {
        "packed": train.packed(32),
        "documents": train.documents(16),
        "packs": train.packed_documents(32),
        "fields": train.documents(16, fields=["inputs", "targets", "loss_mask"]),
        "tensors": train.packed(32, framework="torch"),
    }


def run(function: str, path: Path) -> None:
    """Calls a function of this module elsewhere, which says so when it has come to its end."""
    code = f"import sys, test_torch; test_torch.{function}(sys.argv[1]); print('done')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    # torchdata calls what torch deprecates.
    command = [sys.executable, "-W", "error", "-W", "ignore:'set_vital' is deprecated", "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def arrays(batch: Any) -> list[Any]:
    """What a batch holds, as lists."""
    return [array.tolist() for array in (batch.values() if isinstance(batch, dict) else batch)]


def shuffled_by_torch(path: str) -> None:
    import torch
    from torch.utils.data import DataLoader

    for name, view in views(path).items():
        batches = {}
        for workers in (0, 2):
            generator = torch.Generator().manual_seed(5)
            context = ("spawn" if name == "documents" else "fork") if workers else None
            loader = DataLoader(view, 8, shuffle=True, num_workers=workers, generator=generator, multiprocessing_context=context)
            batches[workers] = list(loader)
            assert len(loader) == len(batches[workers]) == -(-len(view) // 8), name
        assert all(type(batch) is type(view[0]) for batch in batches[2]), name
        assert all(isinstance(tensor, torch.Tensor) for batch in batches[2] for tensor in dict(batch).values()), name
        assert [arrays(batch) for batch in batches[2]] == [arrays(batch) for batch in batches[0]], name
        rows = [row for batch in batches[0] for row in zip(*arrays(batch), strict=True)]
        expected = [tuple(arrays(view[i])) for i in range(len(view))]
        assert rows != expected, name
        assert sorted(rows, key=str) == sorted(expected, key=str), f"{name}: every row once"


@needs_torch
def test_torchs_loader_shuffles_every_view(dataset):
    """Each row once, the fields collated, the same without workers, with two that are forked, and with two that are spawned."""
    run("shuffled_by_torch", dataset)


def steps_by_workers(path: str) -> None:
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    train = flat_tokens.open(path).train
    workers = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork"}
    loader = ShuffledLoader(train.packed(8), 8, 2, epochs=2)
    expected = [batch.encoded.tolist() for batch in loader]
    assert [batch.encoded.tolist() for batch in DataLoader(loader, sampler=range(3, len(loader)), **workers)] == expected[3:]
    assert len(DataLoader(loader, **workers)) == len(expected)

    mixed = Mixture({"one": (train.packed(8), 1), "other": (train.packed(8, overlap=1), 2)}, 8)
    for step, batch in enumerate(itertools.islice(DataLoader(mixed, sampler=itertools.count(5), **workers), 3), 5):
        assert batch.samples.encoded.tolist() == mixed[step].samples.encoded.tolist()
        assert batch.source.tolist() == mixed[step].source.tolist()

    source, again = StatefulDataLoader(loader, **workers), StatefulDataLoader(loader, **workers)
    seen = [batch.encoded.tolist() for batch in itertools.islice(source, 4)]
    again.load_state_dict(source.state_dict())
    assert seen + [batch.encoded.tolist() for batch in again] == expected


@needs_torchdata
def test_workers_load_the_steps_of_loaders(dataset):
    run("steps_by_workers", dataset)
