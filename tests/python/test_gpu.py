"""byteps.torch on real GPUs, one for each rank; skipped, with the reason, where there are too few.

Most functions are those that test tensors of the CPU: they run with the GPU as torch's default
device.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import byteps.torch as bps
import test_adasum
import test_amp
import test_broadcast
import test_compression
import test_cross_barrier
import test_elastic
import test_gather
import test_ops
import test_optimizer
import test_parallel
import test_reductions
import test_scatter
import test_sparse
import test_stragglers
import test_sync_batch_norm
from byteps.errors import BytePSError, ConfigError, MismatchError
from cluster import Cluster
from hosts import move_to, needs_mounts

pytestmark = pytest.mark.gpu

# Ranks, and whether they add up among themselves or through a server.
JOBS = {"1": (1, True), "2": (2, True), "4": (4, True), "2-server": (2, False)}
START_SECONDS = 180
# About a second of any GPU's clock.
LONG_CYCLES = 2_000_000_000


def initialise():
    bps.init()
    torch.cuda.set_device(bps.local_rank())
    torch.set_num_threads(1)
    # Sums are compared with those of the whole batch.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def cluster_of(size, among_themselves, environment=None):
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here < size:
        pytest.skip(f"ranks on GPUs of one machine: needs {size}, and torch sees {here}")
    environment = {"BPS_LOCAL_REDUCE": str(int(among_themselves))} | (environment or {})
    cluster = Cluster(size, servers=1, cores=2, environment=environment)
    cluster.run(initialise, timeout=START_SECONDS)
    return cluster


@pytest.fixture(scope="module")
def _clusters() -> Iterator[dict[str, Cluster]]:
    clusters: dict[str, Cluster] = {}
    yield clusters
    for cluster in clusters.values():
        cluster.kill() if cluster.broken else cluster.close()


@pytest.fixture(params=JOBS)
def gpus(request, _clusters) -> Cluster:
    """A job of 1, 2 or 4 ranks, started when it is first wanted and after a test that failed."""
    name = request.param
    if name in _clusters and _clusters[name].broken:
        _clusters.pop(name).kill()
    if name not in _clusters:
        _clusters[name] = cluster_of(*JOBS[name])
    return _clusters[name]


def on_gpu(function, *arguments):
    with torch.device("cuda", torch.cuda.current_device()):
        return function(*arguments)


SAME_AS_ON_THE_CPU = [
    (test_ops.check_every_type_and_shape, "sync"),
    (test_ops.check_every_type_and_shape, "async_inplace"),
    (test_ops.many_at_once,),
    (test_ops.other_order_on_each_rank,),
    (test_ops.large,),
    (test_ops.same_name_again_and_again,),
    (test_ops.average_and_sum_of_one_name,),
    (test_ops.without_names,),
    (test_ops.with_gaps,),
    (test_ops.groups,),
    (test_ops.horovods_names,),
    (test_ops.compression,),
    (test_ops.autograd,),
    (test_ops.declared_before,),
    *[(test_optimizer.as_one_process, kind, False) for kind in ("momentum", "adam", "rmsprop")],
    (test_optimizer.as_one_process, "adamw", True),
    (test_optimizer.lbfgs_as_one_process, None),
    (test_optimizer.several_passes,),
    (test_optimizer.clipping,),
    (test_optimizer.unused_parameters,),
    (test_optimizer.frozen_and_thawed,),
    (test_optimizer.two_optimizers,),
    (test_optimizer.schedulers,),
    (test_optimizer.compressed, "fp16"),
    (test_optimizer.compressed, "bf16"),
    (test_optimizer.half_models, torch.bfloat16),
    (test_optimizer.half_models, torch.float16),
    (test_optimizer.sparse_gradients,),
    (test_parallel.as_one_process, False),
    (test_parallel.as_one_process, True),
    (test_parallel.several_instances,),
    (test_parallel.no_sync,),
    (test_parallel.two_backward_passes,),
    (test_parallel.buffers,),
    (test_parallel.unused, True),
    (test_parallel.a_failed_backward_pass,),
    (test_broadcast.bit_for_bit,),
    (test_broadcast.parameters,),
    (test_broadcast.optimizer_state_in_other_types,),
    (test_amp.overflow_on_one_rank, "optimizer", True),
    (test_amp.overflow_on_one_rank, "ddp", False),
    (test_amp.several_passes, "optimizer"),
    (test_amp.several_passes, "ddp"),
    (test_amp.autocast,),
    *[(test_cross_barrier.same_bits, kind) for kind in ("sgd", "adam", "adamw", "rmsprop")],
    (test_cross_barrier.looked_at_between_steps,),
    (test_cross_barrier.gradients_of_several_passes,),
    (test_cross_barrier.tied_weights,),
    (test_cross_barrier.whole_steps,),
    (test_cross_barrier.compressed,),
    (test_reductions.every_type_and_operation,),
    (test_gather.several_sizes,),
    (test_gather.calls,),
    (test_gather.gradients,),
    (test_scatter.reducescatters,),
    (test_scatter.alltoalls,),
    (test_sparse.sums,),
    (test_sparse.every_optimizer, False),
    (test_sparse.every_optimizer, True),
    *[(test_sparse.dense_and_sparse_together, how) for how in ("plain", "compressed", "wrapped")],
    (test_adasum.as_the_formula,),
    (test_adasum.steps, "adam", False),
    *[(test_sync_batch_norm.passes, kind, torch.float64, {}) for kind in ("1d", "2d")],
    (test_sync_batch_norm.passes, "2d", torch.bfloat16, {}),
    (test_sync_batch_norm.empty_batches,),
    (test_sync_batch_norm.trained,),
]


@pytest.mark.parametrize(
    "what", SAME_AS_ON_THE_CPU, ids=lambda what: "-".join([what[0].__name__, *map(str, what[1:])])
)
def test_same_as_on_the_cpu(gpus, what):
    gpus.run(on_gpu, *what, timeout=START_SECONDS)


@pytest.mark.parametrize("gpus", ["2-server"], indirect=True)
def test_nan_of_one_rank(gpus):
    """Through servers: within a host it is NCCL that compares, and may drop a NaN."""
    gpus.run(on_gpu, test_reductions.nan_on_one_rank, timeout=START_SECONDS)


def encoded(name):
    codec, formula = test_compression.REFERENCES[name]
    gradients = [test_compression.gradient(rank) for rank in range(bps.size())]
    mine = gradients[bps.rank()].cuda()
    got = bps.push_pull(mine, False, f"formula of {name}", compression=codec).cpu()
    wanted = torch.from_numpy(formula(sum(formula(one.numpy()) for one in gradients)))
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.equal(got, sum(gradients)), "it was simply sent"
    assert torch.equal(mine.cpu(), gradients[bps.rank()])


def test_codecs():
    environment = {"BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": "1M"}
    with cluster_of(2, False, environment) as job:
        for name in test_compression.REFERENCES:
            job.run(encoded, name)


def as_on_the_cpu():
    """Steps on GPUs give what steps on the CPU give, so no GPU is compared with itself alone."""
    model = test_optimizer.start()
    alone = test_optimizer.start()
    model = model.cuda()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = test_optimizer.batch(step)
        reference.zero_grad()
        test_optimizer.loss_of(alone, inputs, targets).backward()
        reference.step()
        optimizer.zero_grad()
        mine = test_optimizer.share(inputs).cuda(), test_optimizer.share(targets).cuda()
        test_optimizer.loss_of(model, *mine).backward()
        optimizer.step()
    assert test_optimizer.difference(alone, model.cpu()) < 1e-9


def test_as_on_the_cpu(gpus):
    gpus.run(as_on_the_cpu)


def in_order_of_streams():
    """The source is still being computed when it is handed over, and nobody waits on the host."""
    rank, size = bps.rank(), bps.size()
    before, after = torch.cuda.Stream(), torch.cuda.Stream()
    total = size * (size + 1) / 2
    warm = bps.push_pull(torch.ones(1 << 20, device="cuda"), False, "streams")
    torch.cuda.synchronize()
    bps.barrier()
    with torch.cuda.stream(before):
        tensor = torch.zeros_like(warm)
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(rank + 1)
        begun = time.monotonic()
        handle = bps.push_pull_async_inplace(tensor, False, "streams")
        took = time.monotonic() - begun
        assert not before.query(), f"handing over waited for the stream, {took:.3f} s"
        assert not bps.poll(handle)
    with torch.cuda.stream(after):
        bps.synchronize(handle)
        # On the stream on which synchronize was called, and no other.
        assert torch.equal(tensor, torch.full_like(tensor, total))
    assert bps.poll(handle)
    # The same on autograd's stream, with work that the hook's stream has still to do.
    with torch.cuda.stream(before):
        weight = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        scale = torch.zeros((), device="cuda")
        torch.cuda._sleep(LONG_CYCLES // 4)
        scale.fill_(rank + 1)
        (weight * scale).sum().backward()
        optimizer.step()
        assert torch.allclose(weight, torch.full_like(weight, 1 - (size + 1) / 2))


def test_in_order_of_streams(gpus):
    gpus.run(in_order_of_streams)


def memory_that_is_reused():
    """Tensors dropped right after they were sent, or received, and others made in their place."""
    rank, size = bps.rank(), bps.size()
    count, total = 1 << 18, size * (size - 1) / 2
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            handles = [
                bps.push_pull_async(
                    torch.full((count,), float(rank + number), device="cuda"),
                    False,
                    f"reused.{number}",
                )
                for number in range(8)
            ]
            spoilt = [torch.full((count,), float("nan"), device="cuda") for _ in range(8)]
        del spoilt
        with torch.cuda.stream(streams[turn // 2 % 2]):
            results = [bps.synchronize(handle) for handle in handles]
            for number, result in enumerate(results):
                assert (result == total + number * size).all(), (turn, number)
        del results, result
        with torch.cuda.stream(streams[turn % 2]):
            spoilt = [torch.full((count,), float("nan"), device="cuda") for _ in range(8)]
        del spoilt


def test_memory_that_is_reused(gpus):
    gpus.run(memory_that_is_reused)


def nothing_waits_for_the_gpu(kind):
    """torch raises where one of its calls makes the host wait for the GPU."""
    with torch.device("cuda", torch.cuda.current_device()):
        model = test_optimizer.start().float()
        inputs, targets = (test_optimizer.share(t).float() for t in test_optimizer.batch(0))
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    called, optimizer = model, plain
    if kind == "ddp":
        called = bps_ddp()(torch.nn.Sequential(model, torch.nn.BatchNorm1d(2).cuda()))
    elif kind == "cross":
        optimizer = test_cross_barrier.CrossBarrier(model, plain)
    else:
        compression = bps.Compression.bf16 if kind == "bf16" else bps.Compression.none
        optimizer = bps.DistributedOptimizer(plain, model.named_parameters(), compression)
    for step in range(4):
        # What torch sets up in the first steps may wait.
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.zero_grad()
            test_optimizer.loss_of(called, inputs, targets).backward()
            optimizer.step()
            torch.nn.utils.parameters_to_vector(model.parameters())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for parameter in model.state_dict().values():
        assert torch.equal(bps.broadcast(parameter, 0), parameter)


def bps_ddp():
    from byteps.torch.parallel import DistributedDataParallel

    return DistributedDataParallel


@pytest.mark.parametrize("kind", ["none", "bf16", "ddp", "cross"])
def test_nothing_waits_for_the_gpu(gpus, kind):
    gpus.run(nothing_waits_for_the_gpu, kind)


def host_and_gpu():
    rank, size = bps.rank(), bps.size()
    tensors = [torch.full((n,), float(rank)) for n in (3, 1000, 5, 0)]
    tensors[1], tensors[3] = tensors[1].cuda(), tensors[3].cuda()
    numbers = torch.tensor([rank, 5], device="cuda")
    results = bps.push_pull_group([*tensors, numbers], average=False, name="both.sum")
    for tensor, result in zip(tensors, results, strict=False):
        assert result.device == tensor.device and result is not tensor
        assert torch.equal(result, torch.full_like(tensor, size * (size - 1) / 2))
    assert results[4].tolist() == [size * (size - 1) // 2, 5 * size]
    bps.push_pull_group_inplace([*tensors, numbers], average=True, name="both.average")
    assert torch.allclose(tensors[1], torch.full_like(tensors[1], (size - 1) / 2))
    assert numbers.is_cuda and numbers.tolist() == [(size * (size - 1) // 2) // size, 5]


def test_host_and_gpu(gpus):
    gpus.run(host_and_gpu)


def broadcasts():
    rank, root = bps.rank(), bps.size() - 1
    flags = torch.tensor([rank == root, True], device="cuda")
    assert bps.broadcast(flags, root, "flags").tolist() == [True, True]
    odd = torch.full((3,), float("nan") if rank == root else 1.0, device="cuda")
    assert bps.broadcast_(odd, root, "odd").isnan().all()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), capturable=True)
    if rank == 0:
        model(torch.randn(5, 3, device="cuda")).pow(2).sum().backward()
        optimizer.step()
    bps.broadcast_parameters(model.state_dict(), 0)
    bps.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].is_cuda and state["step"].is_cuda and state["step"].item() == 1
    sums = [value.double().sum().item() for value in model.state_dict().values()]
    sums += [optimizer.state[p]["exp_avg"].double().sum().item() for p in model.parameters()]
    return sums, bps.broadcast_object({"rank": rank}, root)


def test_broadcasts(gpus):
    results = gpus.run(broadcasts)
    assert all(result == results[0] for result in results)
    assert results[0][1] == {"rank": gpus.size - 1}


def second_gpu():
    bps.push_pull(torch.ones(2, device="cuda"), name="own")
    if torch.cuda.device_count() == 1:
        return
    own = torch.cuda.current_device()
    other = (own + 1) % torch.cuda.device_count()
    for tensors in ([torch.ones(2, device=f"cuda:{other}")], [torch.ones(2, device="cuda")] * 2):
        tensors[-1] = torch.ones(2, device=f"cuda:{other}")
        with pytest.raises(ConfigError) as caught:
            bps.push_pull_group(tensors, name="other")
        assert str(own) in str(caught.value) and str(other) in str(caught.value)
    assert bps.push_pull(torch.ones(2, device="cuda"), False, "own.sum")[0] == bps.size()


def test_second_gpu(gpus):
    gpus.run(second_gpu)


def host_here_gpu_there():
    bps.push_pull(torch.ones(1, device="cuda"), name="places.before")
    place = "cpu" if bps.rank() == 0 else "cuda"
    with pytest.raises(MismatchError, match=r"places.*rank 0|rank 0.*places"):
        bps.push_pull(torch.ones(4, device=place), name="places")
    bps.barrier()
    assert bps.push_pull(torch.ones(4, device="cuda"), False, "places.after")[0] == bps.size()


def test_host_here_gpu_there(gpus):
    if gpus.size > 1:
        gpus.run(host_here_gpu_there)


def leave_and_return():
    """A job may end and begin again in the same processes, with the same GPU."""
    bps.push_pull(torch.ones(5, device="cuda"), name="before")
    bps.shutdown()
    bps.init()
    tensor = torch.full((5,), float(bps.rank()), device="cuda")
    assert bps.push_pull(tensor, False, "after")[0] == bps.size() * (bps.size() - 1) / 2
    handle = bps.push_pull_async(tensor, name="after")
    bps.shutdown()
    with pytest.raises(ValueError):
        bps.push_pull(tensor, name="after")
    del handle


def test_leave_and_return():
    with cluster_of(*JOBS["1"]) as cluster:
        cluster.run(leave_and_return, timeout=START_SECONDS)


def training_that_loses_some(victims, steps, host_size=1):
    """Of which ranks each step's result is, and what the parameters are at the end."""
    if host_size > 1:
        move_to(f"host {int(os.environ['BYTEPS_LOCAL_RANK']) // host_size}")
    bps.init()
    torch.cuda.set_device(bps.rank() % host_size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    sets, probe = [], torch.zeros(1, device="cuda")
    for step in range(steps):
        if step == steps // 2 and bps.rank() in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(16, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        probe.fill_(float(1 << bps.rank()))
        handle = bps.push_pull_async_inplace(probe, average=False, name="probe")
        there = bps.contributors(handle)
        bps.synchronize(handle)
        assert probe.item() == sum(1 << rank for rank in there), there
        sets.append(there)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert flat.isfinite().all()
    return sets, flat.cpu()


def test_others_go_on_without_a_rank_and_its_gpu():
    """Ranks of one GPU, each as on a host of its own: the steps of the two that live are one."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU, as torch sees it")
    environment = {"BPS_LOCAL_REDUCE": "0", "BPS_ELASTIC": "shrink", "BPS_MIN_WORKERS": "2"}
    with Cluster(3, servers=2, cores=1, environment=environment) as job:
        job.start(training_that_loses_some, (1,), 40)
        (sets, first), (others, second) = job.results(START_SECONDS, ranks=(0, 2))
        alive = sets.index([0, 2])
        assert sets == others == [[0, 1, 2]] * alive + [[0, 2]] * (40 - alive), sets
        assert alive >= 19 and torch.equal(first, second)
        log = job.log()
        assert "2 ranks of 3 go on without rank 1" in log and "epoch 2" not in log, log
        job.kill()


def test_others_go_on_without_a_host_and_its_gpus():
    """Two ranks on each of two hosts, which share two GPUs: NCCL adds up within either."""
    needs_mounts()
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("ranks on two GPUs of a host: torch sees fewer")
    with Cluster(
        4, servers=2, environment={"BPS_LOCAL_REDUCE": "1", "BPS_ELASTIC": "shrink"}
    ) as job:
        job.start(training_that_loses_some, (2, 3), 40, 2)
        (sets, first), (others, second) = job.results(START_SECONDS, ranks=(0, 1))
        alive = sets.index([0, 1])
        assert sets == others == [[0, 1, 2, 3]] * alive + [[0, 1]] * (40 - alive), sets
        assert alive >= 19 and torch.equal(first, second)
        log = job.log()
        assert "go on without ranks 2, 3 of one host" in log and "epoch 2" not in log, log
        job.kill()


def test_ranks_go_back_to_a_commit():
    """The same in a job that forms again, and whose states are on the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU, as torch sees it")
    environment = {"BPS_LOCAL_REDUCE": "0"}
    test_elastic.check_a_death(
        test_elastic.trained_over_a_death, "cuda:0", 1, 40, environment=environment
    )


def without_slow_ranks(*arguments):
    bps.init()
    torch.cuda.set_device(0)
    return on_gpu(test_stragglers.training, *arguments)


def test_rounds_without_slow_ranks():
    """Ranks of one GPU, each as on a host of its own."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU, as torch sees it")
    environment = {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4"}
    with Cluster(3, servers=2, environment=environment) as job:
        begun = test_stragglers.WHOLE
        for mode, slowest in (("optimizer", [0, 1]), ("ddp", [2]), ("cross", [1])):
            told = job.run(without_slow_ranks, mode, slowest, timeout=START_SECONDS)
            test_stragglers.check(told, begun)
            begun = 0  # Rounds of the probe are known by now.


@pytest.mark.parametrize("kind", ["2", "4", "2-server"])
def test_death_of_a_rank(kind):
    with cluster_of(*JOBS[kind]) as cluster:
        last = cluster.size - 1

        def one_dies():
            tensor = torch.ones(1 << 22, device="cuda")
            bps.push_pull_inplace(tensor, name="alive")
            torch.cuda.synchronize()
            bps.barrier()
            if bps.rank() == last:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            try:
                while True:
                    bps.push_pull_inplace(tensor, name="alive")
            except BytePSError as error:
                return type(error).__name__, str(error), time.monotonic() - begun

        cluster.start(one_dies)
        begun = time.monotonic()
        try:
            [(name, message, seconds)] = cluster.results(20, ranks=[0])
            assert name == "PeerDiedError" and f"rank {last}" in message, message
            assert seconds < 6
        except AssertionError as error:
            # The launcher ends the survivors too; then they have said so before.
            assert f"rank {last}" in str(error), error
        assert time.monotonic() - begun < 10
        assert cluster.wait(20) != 0
        cluster.kill()
