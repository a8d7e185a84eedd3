"""The same results whichever way the bytes go."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from cluster import Cluster
from conftest import initialise
from test_ops import check_every_type_and_shape, large, many_at_once
from test_reductions import every_type_and_operation

WAYS = {
    "shared memory": {"BPS_TRANSPORT": "shm"},
    "io_uring, or plain sockets where it is denied": {"BPS_TRANSPORT": "tcp"},
    "plain sockets": {"BPS_TRANSPORT": "tcp", "BPS_TCP_DRIVER": "poll"},
    "checksums": {"BPS_TRANSPORT": "tcp", "BPS_PAYLOAD_CHECKSUM": "1"},
    "among the ranks of the host": {"BPS_LOCAL_REDUCE": "1"},
    "many parts": {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_SCHEDULING_CREDIT": "2"},
}


def same_memory():
    """What is sent in place comes back to the same address, round after round."""
    tensor = torch.ones(300_000)
    address = tensor.data_ptr()
    for _ in range(10):
        bps.push_pull_inplace(tensor, average=False, name="same.memory")
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.full((300_000,), float(bps.size() ** 10)))


@pytest.mark.parametrize("way", WAYS)
def test_every_way(way):
    with Cluster(2, servers=2, environment=WAYS[way]) as cluster:
        cluster.run(initialise)
        cluster.run(check_every_type_and_shape, "async_inplace")
        cluster.run(every_type_and_operation)
        cluster.run(many_at_once)
        cluster.run(large)
        cluster.run(same_memory)
