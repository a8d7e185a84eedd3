"""What is asked of the engine for tensors of GPUs, on tensors that pass for such.

The last part has the engine do it, on libraries that pass for CUDA's and NCCL's.
"""

from __future__ import annotations

import time

import pytest
import torch

import byteps.torch as bps
import test_amp
import test_broadcast
import test_cross_barrier
import test_gather
import test_ops
import test_optimizer
import test_parallel
import test_reductions
import test_scatter
import test_stragglers
from byteps import _names, _native, _registry
from byteps.errors import ConfigError, MismatchError, TensorError, UsageError
from byteps.torch import ops
from cluster import Cluster
from conftest import initialise
from stand_in import Gpu, Pipeline


def handed_over_and_awaited():
    size = bps.size()
    with Gpu().plugged_in() as gpu:
        tensor = torch.ones(5)
        handle = bps.push_pull_async_inplace(tensor, False, "path.place")
        assert gpu.opened == 0 and gpu.declared == {"byteps.path.place": True}
        assert gpu.handed_over == [(7, 1)] and gpu.waits == []
        assert bps.wait(handle, timeout=30) and gpu.waits == [], "only synchronize joins streams"
        gpu.stream = 9
        assert bps.synchronize(handle) is tensor
        assert torch.equal(tensor, torch.full((5,), float(size)))
        # The stream that is current now waits, not the one on which it was handed over; torch's
        # allocator hears of it.
        assert gpu.waits == [(9, 1)]
        assert gpu.kept == [(9, [tensor.data_ptr()])]
        assert bps.synchronize(handle) is None and gpu.waits == [(9, 1)]
        source = torch.ones(5)
        output = bps.push_pull(source, False, "path.new")
        assert torch.equal(output, torch.full((5,), float(size))) and source[0] == 1
        assert gpu.kept[-1] == (9, [source.data_ptr(), output.data_ptr(), output.data_ptr()])
        turned = torch.arange(6.0).reshape(2, 3).t()
        bps.push_pull_inplace(turned, False, "path.gaps")
        assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).t() * size)
        assert gpu.declared["byteps.path.gaps"] and len(gpu.handed_over) == 3


def test_handed_over_and_awaited(job):
    job.run(handed_over_and_awaited)


def mixed_groups():
    rank, size = bps.rank(), bps.size()
    with Gpu().plugged_in() as gpu:
        tensors = [torch.full((n,), float(rank)) for n in (3, 0, 1000)] + [torch.arange(4)]
        gpu.host(tensors[2])
        handle = bps.push_pull_group_async(tensors, average=False, name="path.mixed")
        assert gpu.handed_over == [(7, 3)], "one call for those of the GPU, one for the others"
        results = bps.synchronize(handle)
        assert gpu.waits == [(7, 3)]
        for tensor, result in zip(tensors[:3], results, strict=False):
            assert torch.equal(result, torch.full_like(tensor, size * (size - 1) / 2))
        assert torch.equal(results[3], torch.arange(4) * size)
        assert gpu.declared == {f"byteps.path.mixed.{i}": i != 2 for i in range(4)}
        bps.push_pull_group_inplace(tensors, average=True, name="path.mixed.place")
        # Averages of integers are rounded down, which NCCL's are not: to the job, they are tensors
        # of the host.
        assert gpu.declared["byteps.path.mixed.place.3"] is False
        assert gpu.handed_over[-1] == (7, 3) and torch.equal(tensors[3], torch.arange(4))
        assert torch.allclose(tensors[0], torch.full((3,), (size - 1) / 2))
        only_host = gpu.host(torch.ones(2))
        bps.push_pull_group([only_host], name="path.host")
        assert len(gpu.handed_over) == 2


def test_mixed_groups(job):
    job.run(mixed_groups)


def every_type():
    rank, size = bps.rank(), bps.size()
    with Gpu().plugged_in() as gpu:
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.int64):
            for mean in (True, False):
                name = f"path.{dtype}.{mean}"
                mine = torch.full((3,), 2 * rank, dtype=dtype)
                result = bps.push_pull(mine, mean, name)
                wanted = size * (size - 1) // (size if mean else 1)
                assert torch.equal(result, torch.full((3,), wanted, dtype=dtype)), name
                on_gpu = dtype.is_floating_point or not mean
                assert gpu.declared[f"byteps.{name}"] is on_gpu
                scaled = bps.allreduce(mine, mean, f"{name}.scaled", prescale_factor=2.0)
                assert torch.equal(scaled, torch.full((3,), 2 * wanted, dtype=dtype)), name
        flags = torch.tensor([rank == 0, True])
        assert bps.broadcast(flags, 0, "path.flags").tolist() == [True, True]
        assert gpu.declared["byteps.path.flags"] is True
        with pytest.raises(TensorError, match="bool"):
            bps.push_pull(flags, name="path.bool")
        # Without a name, tensors of the host and of the GPU do not get into each other's way.
        one, other = torch.ones(3), gpu.host(torch.ones(3))
        assert bps.push_pull(one, False)[0] == bps.push_pull(other, False)[0] == size


def test_every_type(job):
    job.run(every_type)


def wrong_uses():
    with Gpu().plugged_in() as gpu:
        bps.push_pull(torch.ones(2), name="path.first")
        gpu.opened = 3
        with mock_gpu_number(None), pytest.raises(ConfigError, match=r"cuda:3.*cuda:0"):
            bps.push_pull(torch.ones(2), name="path.second")
        gpu.opened = 0
        with pytest.raises(UsageError, match="twice"):
            bps.push_pull_group([torch.ones(1), gpu.host(torch.ones(1))], name=["a", "a"])
        with pytest.raises(TensorError, match="sparse"):
            bps.push_pull(torch.eye(2).to_sparse(), name="path.sparse")
        with pytest.raises(TensorError, match="meta"):
            bps.push_pull(torch.ones(2, device="meta"), name="path.meta")


def mock_gpu_number(number):
    from unittest import mock

    from byteps import _registry

    return mock.patch.object(_registry, "_gpu", number)


def test_wrong_uses(single):
    single.run(wrong_uses)


def training(what, *arguments):
    """The same training as without a GPU, with every gradient handed over on the right stream."""
    with Gpu().plugged_in() as gpu:
        what(*arguments)
        assert gpu.handed_over and gpu.waits
        gradients = {name: on for name, on in gpu.declared.items() if "Gradient" in name}
        assert gradients and all(gradients.values())


@pytest.mark.parametrize(
    "what",
    [
        (test_optimizer.as_one_process, "adam", False),
        (test_optimizer.several_passes,),
        (test_optimizer.compressed, "fp16"),
        (test_optimizer.unused_parameters,),
        (test_parallel.as_one_process, True),
        (test_parallel.buffers,),
        (test_parallel.no_sync,),
    ],
    ids=lambda what: what[0].__name__,
)
def test_training(pair, what):
    pair.run(training, *what)


def without_the_others():
    """For tensors that are of the host to the job, a rank uses its GPU alone."""
    rank, size = bps.rank(), bps.size()
    sets = [bps.add_process_set([other]) for other in range(size)]
    if rank == 0:
        with Gpu().plugged_in() as gpu:
            result = bps.push_pull(torch.ones(3), name="path.alone", process_set=sets[0])
            assert (gpu.used, gpu.opened) == (0, None) and torch.equal(result, torch.ones(3))
            assert gpu.handed_over == [(7, 1)] and gpu.waits == [(7, 1)]
            assert list(gpu.declared.values()) == [False]
    for one in sets:
        assert bps.remove_process_set(one)


def test_a_gpu_is_used_without_the_others(trio):
    trio.run(without_the_others)


# Ranks, and whether they add up among themselves or through a server.
PIPELINES = {"alone": (1, True), "nccl": (2, True), "server": (2, False)}


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request, tmp_path_factory):
    """A job whose engine works on fake GPUs."""
    size, among_themselves = PIPELINES[request.param]
    environment = Pipeline.libraries(tmp_path_factory.mktemp("gpu"))
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    environment["BPS_LOCAL_REDUCE"] = str(int(among_themselves))
    cluster = Cluster(size, servers=1, cores=1, environment=environment)
    try:
        cluster.run(initialise, timeout=120)
        yield cluster
    finally:
        cluster.kill() if cluster.broken else cluster.close()


def for_some_ranks():
    """Tensors and gradients of some ranks, in the memory of their GPUs."""
    rank, size = bps.rank(), bps.size()
    sets = [bps.add_process_set(range(count)) for count in sorted({1, size})]
    for number, one in enumerate(sets):
        if rank not in one.ranks:
            continue
        count = len(one.ranks)
        x = torch.arange(100_000.0) + rank
        mean = bps.push_pull(x, name=f"some.{number}", process_set=one)
        assert torch.equal(mean, torch.arange(100_000.0) + (count - 1) / 2)
        whole = bps.push_pull(x.int(), True, f"some.whole.{number}", process_set=one)
        assert torch.equal(whole, torch.arange(100_000).int() + (count - 1) // 2)
        rows = bps.allgather(x[: rank + 1], name=f"some.rows.{number}", process_set=one)
        assert rows.tolist() == [*[0.0], *[1.0, 2.0]][: count * (count + 1) // 2]
        model = torch.nn.Linear(1000, 7)
        bps.broadcast_parameters(model.state_dict(), 0, process_set=one)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            process_set=one,
        )
        for step in range(1, 4):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            (model(torch.ones(1, 1000)).sum() * (rank + step)).backward()
            optimizer.step()
            change = torch.full_like(before, step + (count - 1) / 2)
            assert torch.equal(model.weight.detach(), before - change)
    for one in sets:
        assert bps.remove_process_set(one)


def test_process_sets_in_the_pipeline(pipeline):
    pipeline.run(through_the_pipeline, for_some_ranks)


def through_the_pipeline(function, *arguments):
    with Pipeline().plugged_in() as gpu:
        function(*arguments)
        assert gpu.handed_over > 0


@pytest.mark.parametrize(
    "what",
    [
        (test_ops.check_every_type_and_shape, "async"),
        (test_ops.check_every_type_and_shape, "inplace"),
        (test_reductions.every_type_and_operation,),
        (test_gather.calls,),
        (test_scatter.reducescatters,),
        (test_scatter.alltoalls,),
        (test_ops.many_at_once,),
        (test_ops.other_order_on_each_rank,),
        (test_ops.large,),
        (test_ops.same_name_again_and_again,),
        (test_ops.average_and_sum_of_one_name,),
        (test_ops.with_gaps,),
        (test_ops.groups,),
        (test_ops.horovods_names,),
        (test_broadcast.every_type_and_root,),
        (test_optimizer.as_one_process, "adam", False),
        (test_optimizer.compressed, "bf16"),
        (test_parallel.as_one_process, True),
        (test_parallel.buffers,),
        (test_amp.overflow_on_one_rank, "optimizer", True),
        (test_cross_barrier.same_bits, "sgd"),
    ],
    ids=lambda what: "-".join([what[0].__name__, *map(str, what[1:])]),
)
def test_pipeline(pipeline, what):
    pipeline.run(through_the_pipeline, *what)


def what_codecs_keep():
    """What error feedback leaves out is on the GPU: it follows the rate, is told and given."""
    known = set(bps.compression_state_dict())
    codec = bps.Compression.topk(1, error_feedback=True)
    # Tensors of fewer bytes are not encoded.
    model = torch.nn.Linear(20_000, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
    gradient = torch.zeros(1, 20_000)
    gradient[0, 0], gradient[0, 19_999] = 4.0, 1.0

    def step(rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        optimizer.step()
        [name] = set(bps.compression_state_dict()) - known
        weight = model.weight.detach()[0, [0, 19_999]].tolist()
        return name, weight, bps.compression_state_dict()[name]["residue"][[0, 19_999]].tolist()

    # One element is sent at a time: (4, 0), then 1 + 1 / 0.25, then the 8 that came together.
    assert step(1.0)[1:] == ([-4.0, 0.0], [0.0, 1.0])
    assert step(0.25)[1:] == ([-4.0, -0.25 * 5], [4.0, 0.0])
    name, weight, residue = step(0.25)
    assert (weight, residue) == ([-4.0 - 0.25 * 8, -0.25 * 5], [0.0, 1.0])
    state = bps.compression_state_dict()[name]
    assert state["residue"].numel() == 20_000 and state["velocity"].numel() == 0
    state["residue"][19_999] = 10.0
    bps.load_compression_state_dict({name: state})
    assert step(0.25)[1:] == ([-6.0, -0.25 * 5 - 0.25 * 11], [4.0, 0.0])


def over_a_suspend():
    with Pipeline().plugged_in() as gpu:
        codec = bps.Compression.topk(0.1)
        # None is 0.
        tensor = torch.arange(1.0, 20_001.0).sin() + bps.rank()

        def kept():
            return bps.compression_state_dict()["kept.on.gpu"]["residue"]

        def push():
            bps.push_pull(tensor, True, "kept.on.gpu", compression=codec)
            return kept()

        first = push()
        bps.suspend()
        bps.resume(1, 1)
        assert torch.equal(kept(), first) and first.abs().sum() > 0
        second = push()
        assert gpu.handed_over == 2
    return tensor, first, second


def _start(tensor, name):
    codec = bps.Compression.topk(1, error_feedback=True)
    return ops.push_pull_start([tensor], "average", [name], 0, False, True, compression=codec)


def _residue(name):
    [kept] = [kept for of, kept in bps.compression_state_dict().items() if of.endswith(name)]
    return kept["residue"][[0, 19_999]].tolist()


# Seconds.
LATE_S = 0.5


def rates_between_pushes(dtype, late_s):
    """A factor holds from the next push on, however long those before wait for their turn."""
    name = f"kept.{dtype}.{late_s}"
    gradient = torch.zeros(20_000, dtype=dtype)
    gradient[0], gradient[19_999] = 4.0, 1.0
    if bps.rank() == 1:
        time.sleep(late_s)
    handles = [_start(gradient, name), _start(gradient, name)]
    [tensor] = [one for one in _registry.encoded() if one.name.endswith(name)]
    _native.scale_residues(_registry.declare([tensor]), 4.0)
    handles.append(_start(gradient, name))
    sums = [bps.synchronize(handle)[[0, 19_999]].tolist() for handle in handles]
    # (4, 1), then (4, 2), and what is left of that is worth four times as much.
    assert sums == [[4.0, 0.0], [4.0, 0.0], [0.0, 9.0]]
    assert _residue(name) == [4.0, 0.0]
    # What is told holds the factors before, also where nothing is pushed between.
    _native.scale_residues(_registry.declare([tensor]), 0.5)
    assert _residue(name) == [2.0, 0.0]


def before_a_result_has_come(dtype):
    """What is kept is told behind the last round, also if only a stream waits for its result."""
    name = f"awaited.{dtype}"
    gradient = torch.zeros(20_000, dtype=dtype)
    gradient[0], gradient[19_999] = 4.0, 1.0
    # The host waits for the first round of each tensor.
    bps.synchronize(_start(gradient, name))
    bps.barrier()
    if bps.rank() == 1:
        time.sleep(LATE_S)
    begun = time.monotonic()
    handle = _start(gradient, name)
    _native.enqueue_results(_registry._find(handle).on_gpu)
    assert bps.wait(handle)
    waited = time.monotonic() - begun
    assert _residue(name) == [0.0, 2.0]
    told = time.monotonic() - begun
    assert bps.synchronize(handle)[0] == 4.0
    assert bps.rank() == 1 or waited < LATE_S / 2 <= told, (waited, told)


def test_what_codecs_keep_is_on_the_gpu(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    with Cluster(2, servers=1, cores=1, environment=environment) as job:
        job.run(initialise, timeout=120)
        job.run(through_the_pipeline, what_codecs_keep)
        # Those of float64 are encoded by the host's processors.
        for dtype in (torch.float32, torch.float64):
            # The plan comes behind all of it, and at any place in it.
            for late_s in (LATE_S, *(0.002 * at for at in range(12))):
                job.run(through_the_pipeline, rates_between_pushes, dtype, late_s)
            job.run(through_the_pipeline, before_a_result_has_come, dtype)
        for tensor, first, second in job.run(over_a_suspend):
            # What was left out is added to what comes next; what is sent of that leaves nothing.
            whole = first + tensor
            is_sent = second == 0
            assert torch.equal(second[~is_sent], whole[~is_sent])
            assert is_sent.sum() >= 2000 and whole[is_sent].abs().min() >= second.abs().max()


def without_slow_ranks(function, *arguments):
    """What it returns; each rank sends its own, by way of the host, from the memory of its GPU."""
    with Pipeline().plugged_in() as gpu:
        returned = function(*arguments)
        assert gpu.handed_over > 0
    backups = [tensor for tensor in _names._declared if tensor.store is not None]
    assert len(backups) > 1 and not any(tensor.device for tensor in backups)
    return returned


def beside_ranks_of_the_host():
    """No GPU is opened jointly: some ranks may have none."""
    rank, size = bps.rank(), bps.size()
    with Pipeline().plugged_in() as gpu:
        for step in range(8):
            mine = torch.full((1000,), float((step + 1) << 16 * rank), dtype=torch.float64)
            if rank == 0:
                gpu.host(mine)
            if step == 5 and rank == 1:
                time.sleep(LATE_S)
            handle = bps.push_pull_async(mine, False, "backups.mixed", backup_workers=1)
            there = bps.contributors(handle)
            result = bps.synchronize(handle)
            wanted = float(sum((step + 1) << 16 * one for one in there))
            assert torch.equal(result, torch.full_like(result, wanted)), (step, there)
            assert len(there) >= size - 1
        assert gpu.handed_over == (8 if rank else 0)
        assert _registry.open_gpu() is None
    return there


def backups_of_some_ranks_alone():
    with Pipeline().plugged_in():
        ones = torch.ones(4)
        assert bps.push_pull(ones, False, "backups.whole")[0] == bps.size()
        with pytest.raises(MismatchError, match="slowest"):
            bps.push_pull(ones, name="backups.other", backup_workers=min(bps.rank(), 1))
            bps.barrier()


def test_rounds_without_slow_ranks(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    environment |= {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4"}
    with Cluster(3, servers=1, environment=environment) as job:
        job.run(initialise, timeout=120)
        sets = job.run(beside_ranks_of_the_host)
        assert sets[0] == sets[1] == sets[2]
        begun = test_stragglers.WHOLE
        for mode, slowest in (("optimizer", [0]), ("ddp", [2]), ("cross", [1])):
            told = job.run(
                without_slow_ranks,
                test_stragglers.training,
                mode,
                slowest,
                timeout=test_stragglers.CALL_SECONDS,
            )
            test_stragglers.check(told, begun)
            begun = 0  # Rounds of the probe are known by now.
        job.run(backups_of_some_ranks_alone)
