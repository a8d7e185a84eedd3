"""The path of byteps.jax for GPUs, on the CPU: XLA runs its custom calls in host memory, and the
engine takes that for memory of a GPU (tests/fake_gpu).

XLA for CPUs goes on when a call returns, so the host waits for the stream behind each pull.
"""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

import byteps.jax as bps
import stand_in
import test_jax
import test_jax_programs
import test_jax_stragglers
from byteps import _native, _registry
from byteps.errors import ConfigError
from cluster import Cluster
from jax_ranks import FAILED, equal, on_ranks

# What C calls: it must live as long as the process.
_kept = []


def plug_in():
    """From now on, what this process exchanges is on the GPU of its rank, as it were."""
    from byteps.jax import _arrays, _ffi, _gpu, _primitive

    bps.init()
    rank = bps.local_rank()
    cuda, context = stand_in._cuda(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank) == 0
    push, pull = _native.xla_handlers(_ffi._release())[2:]
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    pull = handler(pull)

    def pull_and_wait(frame):
        failed = pull(frame)
        assert cuda.cuCtxSetCurrent(context) == 0
        assert cuda.cuStreamSynchronize(None) == 0
        return failed

    _kept.append(handler(pull_and_wait))
    for name, address in ((_ffi.PUSH_ON_GPU, push), (_ffi.PULL_ON_GPU, _kept[-1])):
        _ffi.ffi.register_ffi_target(name, _ffi.ffi.pycapsule(address), platform="cpu")
    mlir.register_lowering(
        _primitive.exchange_p, _primitive._lower_on_gpu, platform="cpu", **_primitive._options
    )

    def use_in_programs(jointly):
        _native.xla_gpu(0)
        _registry.send_programs_from(rank)
        if _native.is_initialized():
            _registry.use_gpu(rank, jointly)

    _gpu.use_in_programs = use_in_programs
    _gpu.use = lambda device, jointly: _registry.use_gpu(rank, jointly)
    _arrays.gpu_of = lambda array, how: next(iter(array.devices()))


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """Two ranks, whose sums pass a server."""
    environment = stand_in.Pipeline.libraries(tmp_path_factory.mktemp("gpu"))
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    cluster = Cluster(2, environment=environment | {"JAX_PLATFORMS": "cpu"})
    try:
        cluster.run(plug_in, timeout=120)
        yield cluster
    finally:
        cluster.kill() if cluster.broken else cluster.close()


SAME_AS_ON_THE_CPU = [
    (test_jax.every_type_and_shape, False),
    (test_jax.every_type_and_shape, True, False),
    (test_jax.a_tree,),
    (test_jax.without_names_in_programs,),
    (test_jax.handles,),
    (test_jax.other_order_on_each_rank,),
    (test_jax.broadcasts,),
    (test_jax.mismatch, True),
    (test_jax.names_that_change,),
    (test_jax_programs.gradients,),
    (test_jax_programs.control_flow,),
    (test_jax_programs.batched,),
    (test_jax_programs.many_steps,),
]


@pytest.mark.parametrize(
    "what", SAME_AS_ON_THE_CPU, ids=lambda what: "-".join([what[0].__name__, *map(str, what[1:])])
)
def test_same_as_on_the_cpu(gpus, what):
    gpus.run(on_ranks(what[0]), *what[1:])


def in_place():
    """Large arrays through programs that use their results and their arguments elsewhere, too."""
    rank, size = bps.rank(), bps.size()

    @jax.jit
    def step(tree):
        tree = {name: x * 2 for name, x in tree.items()}
        summed = bps.push_pull(tree, average=False, name="in.place")
        return summed, jax.tree_util.tree_map(lambda x: x + 1, tree)

    tree = {f"{n}": jnp.full((n, 1 << 12), 1.0 + rank + n) for n in (1, 7, 64)}
    for _ in range(5):
        summed, kept = step(tree)
        for name, x in tree.items():
            n = int(name)
            wanted = 2 * (size * (1 + n) + size * (size - 1) / 2)
            assert float(summed[name].min()) == float(summed[name].max()) == wanted
            assert float(kept[name].min()) == float(kept[name].max()) == 2.0 * (1 + rank + n) + 1
            assert float(x[0, 0]) == 1.0 + rank + n


def test_arrays_are_exchanged_where_they_lie(gpus):
    gpus.run(on_ranks(in_place))


def in_a_loop():
    """An exchange that is pushed again and again in one run, on values that depend on the last."""
    rank = bps.rank()

    @jax.jit
    def loop(x):
        def turn(x, _):
            x = bps.push_pull(jnp.tanh(x @ x) + rank, name="in.a.loop")
            return x / 2, x.sum()

        return jax.lax.scan(turn, x, None, length=20)

    _, sums = loop(jnp.eye(16) / 2)
    wanted = np.eye(16, dtype=np.float64) / 2
    for total in np.asarray(sums):
        result = np.tanh(wanted @ wanted) + 0.5
        assert np.isclose(total, result.sum(), rtol=1e-3)
        wanted = result / 2


def test_a_loop_exchanges_each_time(gpus):
    gpus.run(on_ranks(in_a_loop))


def a_job_again():
    """A program that was compiled in one job runs in the next one, and between them not at all."""
    program = jax.jit(lambda x: bps.push_pull(x, average=False, name="again"))
    x = jnp.full(1000, 1.0 + bps.rank())
    assert equal(program(x), np.full(1000, 3.0))
    bps.suspend()
    assert _registry.open_gpu() is None
    with pytest.raises(FAILED, match="NotInitializedError"):
        jax.block_until_ready(program(x))
    bps.resume(1, 1)  # One machine, one server.
    assert equal(program(x), np.full(1000, 3.0))


def test_a_program_outlives_its_job(gpus):
    gpus.run(on_ranks(a_job_again))


def another_gpu():
    """Programs that run elsewhere than on the GPU from which this process sends."""
    program = jax.jit(lambda x: bps.push_pull(x, average=False, name="elsewhere"))
    x = jnp.full(1000, 1.0 + bps.rank())
    assert equal(program(x), np.full(1000, 3.0))
    _native.xla_gpu(1)  # To XLA for CPUs its only device is number 0.
    try:
        for _ in range(2):
            with pytest.raises(FAILED, match="'elsewhere' is on GPU 0, and byteps sends from GPU"):
                jax.block_until_ready(program(x))
        with pytest.raises(ConfigError, match="from GPU 1 in this process"), bps.typed_errors():
            jax.block_until_ready(program(x))
    finally:
        _native.xla_gpu(0)
    assert equal(program(x), np.full(1000, 3.0))


def test_another_gpu_than_the_one_of_the_process(gpus):
    gpus.run(on_ranks(another_gpu))


def averages_of_whole_numbers():
    x = jnp.arange(4)
    assert equal(bps.push_pull(x + bps.rank(), name="whole"), np.arange(4))
    average = jax.jit(lambda x: bps.push_pull(x, name="whole"))
    assert equal(average(x + 3 * bps.rank()), np.arange(4) + 1)


def test_whole_numbers_are_averaged(gpus):
    gpus.run(on_ranks(averages_of_whole_numbers))


def some_ranks():
    """Outside of programs and in them; what is for one rank alone, the other has nothing to do
    with."""
    both = bps.add_process_set([0, 1])
    x = jnp.arange(4.0) + bps.rank()
    assert equal(bps.push_pull(x, name="some", process_set=both), np.arange(4.0) + 0.5)
    assert equal(bps.allgather(x[:1], name="some.rows", process_set=both), [0.0, 1.0])

    @jax.jit
    def step(w, x):
        def loss(w):
            return (w * bps.push_pull(x, False, name="some.sum", process_set=both)).sum()

        gradient = jax.grad(loss)(w)
        tree = {"w": gradient, "half": gradient.astype(jnp.float16)}
        return bps.push_pull(tree, name="some.tree", process_set=both)

    for turn in range(3):
        got = step(jnp.ones(4), x + turn)
        assert equal(got["w"], 2 * np.arange(4.0) + 1 + 2 * turn)
        assert equal(got["half"], 2 * np.arange(4.0) + 1 + 2 * turn)
    alone = bps.add_process_set([1])
    if bps.rank() == 1:
        mine = jax.jit(lambda x: bps.push_pull(x, False, name="alone", process_set=alone))
        assert equal(mine(x), np.arange(4.0) + 1)
    assert bps.remove_process_set(alone) and bps.remove_process_set(both)


def test_process_sets(gpus):
    gpus.run(on_ranks(some_ranks))


def dies():
    step = jax.jit(lambda x: bps.push_pull(x, name="last"))
    jax.block_until_ready(step(jnp.ones(1000)))
    bps.barrier()
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(FAILED, match=r"PeerDiedError.*rank 1"):
        for _ in range(100):
            jax.block_until_ready(step(jnp.ones(1000)))


def test_a_killed_rank_is_an_error_in_a_program(gpus):
    gpus.broken = True
    gpus.start(on_ranks(dies))
    gpus.results(30, ranks=[0])


def test_rounds_without_the_slowest_rank(tmp_path):
    environment = stand_in.Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    environment |= {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4", "JAX_PLATFORMS": "cpu"}
    with Cluster(test_jax_stragglers.RANKS, servers=1, environment=environment) as job:
        job.run(plug_in, timeout=120)
        test_jax_stragglers.check(job.run(test_jax_stragglers.training, timeout=120))
