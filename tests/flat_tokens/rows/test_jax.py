"""A loader's batches as arrays that lie on all devices of a mesh, on one host and on two."""

import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import flat_tokens
from flat_tokens import FlatTokens, ShuffledLoader
from tests.elsewhere import elsewhere
from tests.made import write_ragged

BATCH_SIZE, STEP = 8, 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ragged(tmp_path_factory.mktemp("dataset") / "ragged", 1, 30, 300)


def loaders(train: FlatTokens) -> list[ShuffledLoader]:
    views = train.packed(32), train.documents(24), train.packed_documents(32), train.packed(32, fields=["inputs"])
    return [ShuffledLoader(view, BATCH_SIZE, seed=1) for view in views]


def test_each_of_two_hosts_loads_its_own_rows(dataset, monkeypatch):
    """Two processes of two devices each make one array of the batch."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    # The port is held, so that no other process takes it: servers of gRPC share theirs.
    with socket.socket() as port, ThreadPoolExecutor(2) as hosts:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        list(hosts.map(lambda host: elsewhere(on_a_host_of_two, dataset, port.getsockname()[1], host), range(2)))


def on_a_host_of_two(path: Path, port: int, process_index: int) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process_index)
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
    rows = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))
    for whole in loaders(flat_tokens.open(path).train):
        batch = whole[STEP]
        mine = whole.shard(jax.process_index(), jax.process_count())[STEP]
        assert len(jax.tree.leaves(mine)[0]) == BATCH_SIZE // 2
        placed = jax.tree.map(lambda array, rows=rows: jax.make_array_from_process_local_data(rows, array), mine)
        assert type(placed) is type(batch)
        # What is derived within jit lies as the rows do: each device has its two rows.
        for array, expected in [
            *zip(jax.tree.leaves(placed), jax.tree.leaves(batch), strict=True),
            *((array, batch[name]) for name, array in jax.jit(dict)(placed).items()),
            *([(jax.jit(lambda packs: packs.mask())(placed), batch.mask())] if hasattr(batch, "mask") else []),
        ]:
            assert (array.shape, array.sharding.spec[0]) == (expected.shape, "data")
            assert not array.is_fully_addressable
            for shard in array.addressable_shards:
                assert shard.data.shape == (2, *expected.shape[1:])
                assert np.array_equal(shard.data, expected[shard.index].astype(array.dtype))
    jax.distributed.shutdown()
