"""byteps.jax on real GPUs, one for each rank; skipped, with the reason, where there are too few.

Most functions are those that test arrays of the CPU: JAX puts arrays on the GPU by itself.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp

import byteps.jax as bps
import test_jax
import test_jax_gpu_path
from byteps.errors import MismatchError, TensorError
from cluster import Cluster
from jax_ranks import equal, on_ranks

pytestmark = pytest.mark.gpu

START_SECONDS = 180
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
ENVIRONMENT = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Each rank sees its own GPU alone, or all of them and names its own; sums stay on the machine, or
# go through a server.
JOBS = {"server": (False, "0"), "among-themselves": (False, "1"), "all-visible": (True, "0")}


def gpus_here():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def initialise(sees_all):
    local_rank = os.environ["BYTEPS_LOCAL_RANK"]
    if not sees_all:
        os.environ["CUDA_VISIBLE_DEVICES"] = local_rank
    bps.init()
    # XLA would round products of matrices to 19 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    if sees_all:
        jax.config.update("jax_default_device", jax.local_devices()[int(local_rank)])
    assert jnp.ones(1).devices().pop().platform == "gpu"


@pytest.fixture(scope="module")
def _clusters():
    clusters = {}
    yield clusters
    for cluster in clusters.values():
        cluster.kill() if cluster.broken else cluster.close()


@pytest.fixture(params=JOBS)
def gpus(request, _clusters):
    """A job of two ranks, started when it is first wanted and after a test that failed."""
    if not any(map(importlib.util.find_spec, PLUGINS)):
        pytest.skip("JAX has no plugin for CUDA here")
    if gpus_here() < 2:
        pytest.skip(f"two ranks on GPUs of one machine: torch sees {gpus_here()}")
    name = request.param
    if name in _clusters and _clusters[name].broken:
        _clusters.pop(name).kill()
    if name not in _clusters:
        sees_all, reduces = JOBS[name]
        environment = ENVIRONMENT | {"BPS_LOCAL_REDUCE": reduces}
        cluster = Cluster(2, servers=1, cores=2, environment=environment)
        cluster.run(initialise, sees_all, timeout=START_SECONDS)
        _clusters[name] = cluster
    return _clusters[name]


SAME_AS_ON_THE_CPU = [
    *test_jax_gpu_path.SAME_AS_ON_THE_CPU,
    (test_jax.exchanges_of_passes,),
    (test_jax.value_and_gradient,),
]


@pytest.mark.parametrize(
    "what", SAME_AS_ON_THE_CPU, ids=lambda what: "-".join([what[0].__name__, *map(str, what[1:])])
)
def test_same_as_on_the_cpu(gpus, what):
    gpus.run(on_ranks(what[0]), *what[1:], timeout=START_SECONDS)


def test_arrays_are_exchanged_where_they_lie(gpus):
    gpus.run(on_ranks(test_jax_gpu_path.in_place), timeout=START_SECONDS)


def test_a_loop_exchanges_each_time(gpus):
    gpus.run(on_ranks(test_jax_gpu_path.in_a_loop), timeout=START_SECONDS)


def handed_over_and_gone_on():
    """A program that exchanges returns before its work on the GPU is done, and so does the next."""
    size = bps.size()
    x = jnp.ones((2048, 2048)) / 2048

    @jax.jit
    def work(x):
        return jax.lax.fori_loop(0, 200, lambda _, x: x @ x, x)

    @jax.jit
    def exchange(x):
        return bps.push_pull(x, average=False, name="gone.on") / bps.size()

    jax.block_until_ready(exchange(work(x)))
    bps.barrier()
    for _ in range(3):
        y = exchange(work(x))
    assert np.allclose(y[:2, :2], np.asarray(work(x))[:2, :2], rtol=1e-3), size


def test_order_on_the_gpu(gpus):
    gpus.run(on_ranks(handed_over_and_gone_on), timeout=START_SECONDS)


def in_other_places():
    """A name in host memory on one rank, and on the GPU on the other."""
    on_cpu = jax.devices("cpu")[0]
    x = jnp.ones(5) if bps.rank() else jax.device_put(jnp.ones(5), on_cpu)
    with pytest.raises(MismatchError):
        bps.push_pull(x, name="elsewhere")
    both = {"host": jax.device_put(jnp.ones(3), on_cpu), "gpu": jnp.ones(4)}
    summed = bps.push_pull(both, average=False, name="both")
    assert equal(summed, {"host": np.full(3, 2.0), "gpu": np.full(4, 2.0)})
    assert [one.devices().pop().platform for one in summed.values()] == ["gpu", "cpu"]
    if len(jax.local_devices()) > 1:
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("x",))
        spread = jax.device_put(
            jnp.ones(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        )
        with pytest.raises(TensorError, match="on 2 GPUs"):
            bps.push_pull(spread, name="spread")


def test_places(gpus):
    gpus.run(on_ranks(in_other_places), timeout=START_SECONDS)


def test_a_program_outlives_its_job(gpus):
    gpus.run(on_ranks(test_jax_gpu_path.a_job_again), timeout=START_SECONDS)


def test_a_killed_rank_is_an_error_in_a_program(gpus):
    gpus.start(on_ranks(test_jax_gpu_path.dies))
    gpus.broken = True
    gpus.results(START_SECONDS, ranks=[0])
