"""Jobs that tests share: of one, two and three ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs NVIDIA GPUs, and is skipped where there is none")


def initialise() -> None:
    import torch

    import byteps.torch as bps

    torch.set_num_threads(1)
    bps.init()


class _Shared:
    """A job that is started when it is first wanted, and again after a test that failed in it."""

    def __init__(self, size: int, **options: int) -> None:
        self.size = size
        self.options = options
        self.cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self.cluster is not None and self.cluster.broken:
            self.cluster.kill()
            self.cluster = None
        if self.cluster is None:
            self.cluster = Cluster(self.size, **self.options)
            self.cluster.run(initialise, timeout=120)
        return self.cluster

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.kill() if self.cluster.broken else self.cluster.close()


@pytest.fixture(scope="session")
def _jobs() -> Iterator[dict[str, _Shared]]:
    jobs = {
        "single": _Shared(1),
        "pair": _Shared(2, servers=1, cores=2),
        "trio": _Shared(3, servers=2, cores=1),
    }
    yield jobs
    for job in jobs.values():
        job.close()


@pytest.fixture
def single(_jobs: dict[str, _Shared]) -> Cluster:
    """A job of one process, without servers."""
    return _jobs["single"].get()


@pytest.fixture
def pair(_jobs: dict[str, _Shared]) -> Cluster:
    """Two ranks, one server of two cores."""
    return _jobs["pair"].get()


@pytest.fixture
def trio(_jobs: dict[str, _Shared]) -> Cluster:
    """Three ranks, two servers: averages that are not exact in binary."""
    return _jobs["trio"].get()


@pytest.fixture(params=["single", "pair", "trio"])
def job(request: pytest.FixtureRequest) -> Cluster:
    """Each of them."""
    return request.getfixturevalue(request.param)
