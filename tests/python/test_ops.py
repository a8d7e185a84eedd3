"""push_pull in all its forms, against sums computed here."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, TensorError, UsageError, WaitTimeoutError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]
SHAPES = [(), (0,), (1,), (17,), (17, 17), (5, 7, 3), (3, 0, 2)]


def value(rank, shape, dtype, seed=1):
    """Small whole numbers, so that every type holds their sums exactly."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 20, shape, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def total(shape, dtype, seed=1):
    return sum(value(rank, shape, torch.float64, seed) for rank in range(bps.size()))


def average(shape, dtype, seed=1):
    exact = total(shape, dtype, seed) / bps.size()
    if not dtype.is_floating_point:
        return exact.floor().to(dtype)
    return (total(shape, dtype, seed).to(torch.float64) / bps.size()).to(dtype)


def check_every_type_and_shape(form):
    for dtype in DTYPES:
        for shape in SHAPES:
            for mean in (True, False):
                mine = value(bps.rank(), shape, dtype)
                before = mine.clone()
                name = f"{form}.{dtype}.{shape}.{mean}"
                if form == "sync":
                    result = bps.push_pull(mine, average=mean, name=name)
                elif form == "async":
                    result = bps.synchronize(bps.push_pull_async(mine, mean, name))
                elif form == "inplace":
                    result = bps.push_pull_inplace(mine, mean, name)
                    assert result is mine
                else:
                    result = bps.synchronize(bps.push_pull_async_inplace(mine, mean, name))
                    assert result is mine
                wanted = average(shape, dtype) if mean else total(shape, dtype).to(dtype)
                assert result.dtype == dtype and result.shape == shape
                close = torch.equal(result, wanted)
                if mean and dtype.is_floating_point and dtype != torch.float64:
                    # The server divides in float32: one unit in the last place is allowed.
                    close = torch.allclose(
                        result.double(), wanted.double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6
                    )
                assert close, (name, mine, result, wanted)
                if form in ("sync", "async"):
                    assert torch.equal(mine, before), "the tensor that was passed has changed"


@pytest.mark.parametrize("form", ["sync", "async", "inplace", "async_inplace"])
def test_every_type_and_shape(job, form):
    job.run(check_every_type_and_shape, form)


def many_at_once():
    handles = []
    for number in range(200):
        shape = (1 + 37 * number % 1000,)
        handles.append(
            bps.push_pull_async(
                value(bps.rank(), shape, torch.float32, number),
                False,
                f"many.{number}",
                priority=number % 7,
            )
        )
    for number in reversed(range(200)):
        shape = (1 + 37 * number % 1000,)
        result = bps.synchronize(handles[number])
        assert torch.equal(result, total(shape, torch.float32, number).float()), number


def test_many_at_once(job):
    job.run(many_at_once)


def other_order_on_each_rank():
    names = [f"order.{index}" for index in range(20)]
    mine = names if bps.rank() % 2 == 0 else names[::-1]
    handles = {
        name: bps.push_pull_async(torch.full((100,), float(names.index(name))), True, name)
        for name in mine
    }
    for index, name in enumerate(names):
        assert torch.equal(bps.synchronize(handles[name]), torch.full((100,), float(index)))


def test_order_of_names_does_not_matter(pair):
    pair.run(other_order_on_each_rank)


def large():
    count = (9 << 20) + 13
    mine = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(bps.rank())
    result = bps.push_pull(mine, average=False, name="large")
    size = bps.size()
    wanted = (
        torch.arange(count, dtype=torch.float32)
        .remainder_(1000)
        .mul_(size)
        .add_(size * (size - 1) / 2)
    )
    assert torch.equal(result, wanted)


def test_many_parts(pair):
    pair.run(large)


def same_name_again_and_again():
    first = bps.push_pull_async(torch.ones(50000), False, "again")
    second = bps.push_pull_async(torch.full((50000,), 2.0), False, "again")
    third = bps.push_pull_async_inplace(torch.full((50000,), 3.0), False, "again")
    assert bps.synchronize(third)[0] == 3 * bps.size()
    assert bps.synchronize(first)[-1] == bps.size()
    assert bps.synchronize(second)[7] == 2 * bps.size()


def test_same_name_under_way_twice(job):
    job.run(same_name_again_and_again)


def average_and_sum_of_one_name():
    one = torch.full((4,), 3.0)
    assert torch.equal(bps.push_pull(one, True, "both"), one)
    assert torch.equal(bps.push_pull(one, False, "both"), one * bps.size())
    assert torch.equal(bps.broadcast(one, 0, "both"), one)
    assert torch.equal(bps.push_pull(one, True, "both"), one)


def test_average_and_sum_of_one_name(job):
    job.run(average_and_sum_of_one_name)


def without_names():
    handles = [bps.push_pull_async(torch.full((3,), float(i)), True) for i in range(200)]
    for i, handle in enumerate(handles):
        assert torch.equal(bps.synchronize(handle), torch.full((3,), float(i)))
    # The results are picked up in another order on each rank; names must not depend on it.
    handles = [bps.push_pull_async(torch.full((5,), float(i)), True) for i in range(20)]
    order = range(20) if bps.rank() % 2 == 0 else reversed(range(20))
    for i in order:
        assert torch.equal(bps.synchronize(handles[i]), torch.full((5,), float(i)))
    for i in range(20):
        assert torch.equal(bps.push_pull(torch.full((5,), float(i))), torch.full((5,), float(i)))


def test_without_names(job):
    job.run(without_names)


def with_gaps():
    rank, size = bps.rank(), bps.size()
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) + rank
    wanted = torch.arange(24, dtype=torch.float32).reshape(4, 6) * size + size * (size - 1) / 2
    assert torch.equal(bps.push_pull(base.t(), False, "gap.t"), wanted.t())
    assert torch.equal(bps.push_pull(base[:, ::2], False, "gap.step"), wanted[:, ::2])
    inner = base.clone()
    bps.push_pull_inplace(inner[1:3, 2:5], False, "gap.inner")
    assert torch.equal(inner[1:3, 2:5], wanted[1:3, 2:5])
    assert torch.equal(inner[0], base[0]) and torch.equal(inner[:, :2], base[:, :2])
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    # One rank has its channels last: what counts is the value at an index, not its place in memory.
    mine = image.contiguous(memory_format=torch.channels_last) if rank == 0 else image.clone()
    assert torch.equal(bps.push_pull(mine, True, "gap.channels"), image)
    bps.push_pull_inplace(mine, False, "gap.channels")
    assert torch.equal(mine, image * size)
    wide = torch.ones(1, 3).expand(4, 3)
    assert torch.equal(bps.push_pull(wide, False, "gap.wide"), torch.full((4, 3), float(size)))
    offset = torch.arange(9, dtype=torch.float32)[1:]
    assert torch.equal(bps.push_pull(offset, True, "gap.offset"), torch.arange(1.0, 9.0))


def test_tensors_with_gaps(job):
    job.run(with_gaps)


def groups():
    rank, size = bps.rank(), bps.size()
    tensors = [torch.full((n,), float(n + rank)) for n in (3, 0, 1000, 7)]
    wanted = [torch.full((n,), float(n * size + size * (size - 1) // 2)) for n in (3, 0, 1000, 7)]

    def equal(results):
        return all(map(torch.equal, results, wanted))

    assert equal(bps.push_pull_group(tensors, average=False, name="group"))
    assert equal(bps.push_pull_group(tensors, average=False, name=["w", "x", "y", "z"]))
    assert equal(bps.push_pull_group(tensors, average=False))
    assert equal(bps.synchronize(bps.push_pull_group_async(tensors, average=False, name="group")))
    assert equal(bps.grouped_allreduce(tensors, op=bps.Sum))
    assert equal(bps.synchronize(bps.grouped_allreduce_async(tensors, op=bps.Sum, name="group")))
    copies = [tensor.clone() for tensor in tensors]
    assert bps.push_pull_group_inplace(copies, average=False, name="group")[0] is copies[0]
    assert equal(copies)
    copies = [tensor.clone() for tensor in tensors]
    assert equal(bps.grouped_allreduce_(copies, op=bps.Sum)) and equal(copies)
    copies = [tensor.clone() for tensor in tensors]
    bps.synchronize(bps.grouped_allreduce_async_(copies, op=bps.Sum, name="group"))
    assert equal(copies)
    assert bps.push_pull_group([]) == []
    with pytest.raises(UsageError, match="twice"):
        bps.push_pull_group(tensors[:2], name=["twice", "twice"])
    for names in (["one"], ["a", "b", "c", "d", "e"]):
        with pytest.raises(ConfigError):
            bps.push_pull_group(tensors, name=names)


def test_groups(job):
    job.run(groups)


def horovods_names():
    rank, size = bps.rank(), bps.size()
    mine = torch.full((6,), float(rank))
    mean, whole = (size - 1) / 2, size * (size - 1) / 2
    assert torch.allclose(bps.allreduce(mine), torch.full((6,), mean))
    assert torch.allclose(bps.allreduce(mine, op=bps.Average), torch.full((6,), mean))
    assert torch.equal(bps.allreduce(mine, op=bps.Sum, name="hvd"), torch.full((6,), whole))
    assert torch.equal(bps.allreduce(mine, average=False), torch.full((6,), whole))
    assert torch.equal(
        bps.synchronize(bps.allreduce_async(mine, op=bps.Sum)), torch.full((6,), whole)
    )
    for scales in ({"prescale_factor": 3.0}, {"postscale_factor": 3.0}):
        assert torch.equal(bps.allreduce(mine, op=bps.Sum, **scales), torch.full((6,), 3 * whole))
        copy = mine.clone()
        assert bps.allreduce_(copy, op=bps.Sum, **scales) is copy
        assert torch.equal(copy, torch.full((6,), 3 * whole))
    numbers = torch.full((4,), rank, dtype=torch.int32)
    assert torch.equal(
        bps.allreduce(numbers, op=bps.Sum, postscale_factor=0.5),
        torch.full((4,), int(whole / 2), dtype=torch.int32),
    )
    copy = mine.clone()
    bps.synchronize(bps.allreduce_async_(copy, op=bps.Sum))
    assert torch.equal(copy, torch.full((6,), whole))
    with pytest.raises(ValueError):
        bps.allreduce(mine, average=True, op=bps.Sum)
    with pytest.raises(ValueError):
        bps.allreduce(mine, op=7)


def test_horovods_names(job):
    job.run(horovods_names)


def handles():
    handle = bps.push_pull_async(torch.ones(10), True, "handle")
    assert bps.wait(handle, timeout=30) is True
    assert bps.wait(handle) is True
    assert bps.poll(handle) is True
    assert torch.equal(bps.synchronize(handle), torch.ones(10))
    assert bps.synchronize(handle) is None, "a spent handle gives None, as in BytePS"
    assert bps.poll(handle) is True
    for never in (0, -1, 10**9, "x", None):
        with pytest.raises(ValueError):
            bps.synchronize(never)
    own = bps.byteps_push_pull(torch.ones(3), average=False, name="handle.own")
    assert torch.equal(bps.synchronize(own), torch.full((3,), float(bps.size())))


def test_handles(job):
    job.run(handles)


def wait_for_a_late_rank():
    import time

    bps.barrier()
    if bps.rank() == 0:
        handle = bps.push_pull_async(torch.ones(10), False, "late")
        begun = time.monotonic()
        assert bps.wait(handle, timeout=0.0) is False
        assert bps.wait(handle, timeout=0.3) is False
        with pytest.raises(WaitTimeoutError, match="late"):
            bps.synchronize(handle, timeout=0.2)
        with pytest.raises(TimeoutError):
            bps.synchronize(handle, timeout=0)
        assert 0.4 < time.monotonic() - begun < 5
        assert bps.poll(handle) is False
        bps.barrier()
        return bps.synchronize(handle)[0].item()
    bps.barrier()
    return bps.push_pull(torch.ones(10), False, "late")[0].item()


def test_wait_with_a_timeout(pair):
    assert pair.run(wait_for_a_late_rank) == [2.0, 2.0]


def other_threads_run_while_one_waits():
    import threading
    import time

    bps.barrier()
    if bps.rank() == 0:
        turns = 0
        handle = bps.push_pull_async(torch.ones(10), False, "threads")
        waiter = threading.Thread(target=bps.synchronize, args=(handle,))
        waiter.start()
        begun = time.monotonic()
        while time.monotonic() - begun < 0.5:
            turns += 1
        assert waiter.is_alive() and turns > 10000
        bps.barrier()
        waiter.join()
    else:
        bps.barrier()
        bps.push_pull(torch.ones(10), False, "threads")


def test_other_threads_run_while_one_waits(pair):
    pair.run(other_threads_run_while_one_waits)


def what_cannot_be_sent():
    wrong = {
        "bool": torch.ones(3, dtype=torch.bool),
        "int16": torch.ones(3, dtype=torch.int16),
        "complex": torch.ones(3, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "list": [1.0, 2.0],
    }
    for name, tensor in wrong.items():
        for call in (bps.push_pull, bps.push_pull_async, bps.push_pull_inplace):
            with pytest.raises(TensorError, match=f"wrong.{name}"):
                call(tensor, name=f"wrong.{name}")
    with pytest.raises(TensorError, match="float32"):
        bps.push_pull(wrong["bool"], name="x")
    surrogate = "weights-\udce9"  # As os.fsdecode gives for a file name that is not UTF-8.
    for call in (bps.push_pull, bps.push_pull_async, bps.push_pull_inplace, bps.declare):
        with pytest.raises(TensorError, match=r"weights-.udce9.*character 8 is a lone surrogate"):
            call(name=surrogate, tensor=torch.ones(3))
    with pytest.raises(TensorError, match="lone surrogate"):
        bps.broadcast_object(1, 0, name=surrogate)


def test_what_cannot_be_sent(job):
    job.run(what_cannot_be_sent)


def compression():
    rank = bps.rank()
    for compressor in (bps.Compression.none, bps.Compression.fp16, bps.Compression.bf16):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32):
            mine = value(rank, (33,), dtype)
            name = f"compression.{compressor.__name__}.{dtype}"
            result = bps.push_pull(mine, False, name, compression=compressor)
            assert result.dtype == dtype
            assert torch.equal(result, total((33,), dtype).to(dtype)), name
            result = bps.allreduce(mine, op=bps.Sum, name=name, compression=compressor)
            assert torch.equal(result, total((33,), dtype).to(dtype)), name
    exact = torch.full((1,), 1.0009765625)
    sent, context = bps.Compression.fp16.compress(exact)
    assert sent.dtype == torch.float16 and context == torch.float32
    assert torch.equal(bps.Compression.fp16.decompress(sent, context), exact)
    sent, context = bps.Compression.bf16.compress(exact)
    assert sent.dtype == torch.bfloat16
    assert bps.Compression.bf16.decompress(sent, context).item() == 1.0


def test_compression(job):
    job.run(compression)


def autograd():
    rank, size = bps.rank(), bps.size()
    for mean in (True, False):
        tensor = torch.full((5, 3), float(rank + 1), requires_grad=True)
        weights = torch.full((5, 3), float(rank + 1))
        (bps.push_pull(tensor, mean, f"autograd.{mean}") * weights).sum().backward()
        # Each rank's loss weighs the result by rank + 1.
        wanted = size * (size + 1) / 2 / (size if mean else 1)
        assert torch.allclose(tensor.grad, torch.full((5, 3), wanted)), (mean, tensor.grad, wanted)
    tensors = [torch.ones(n, requires_grad=True) for n in (2, 4)]
    first, second = bps.grouped_allreduce(tensors, op=bps.Sum, name="autograd.group")
    (first.sum() + 2 * second.sum()).backward()
    assert torch.equal(tensors[0].grad, torch.full((2,), float(size)))
    assert torch.equal(tensors[1].grad, torch.full((4,), 2.0 * size))
    tensor = torch.ones(3, requires_grad=True)
    bps.allreduce(tensor, op=bps.Sum, prescale_factor=2.0, postscale_factor=5.0).sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), 10.0 * size))
    tensor = torch.ones(3, requires_grad=True)
    bps.push_pull(tensor, True, "autograd.half", compression=bps.Compression.fp16).sum().backward()
    assert torch.equal(tensor.grad, torch.ones(3))
    root = size - 1
    tensor = torch.full((3,), float(rank), requires_grad=True)
    result = bps.broadcast(tensor, root, "autograd.broadcast")
    assert torch.equal(result, torch.full((3,), float(root)))
    (result * (rank + 1)).sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), (size + 1) / 2 if rank == root else 0.0))
    with torch.no_grad():
        assert not bps.push_pull(tensor, True, "autograd.off").requires_grad


def test_autograd(job):
    job.run(autograd)


def a_value_that_autograd_needs_is_changed():
    weight = torch.ones(3, requires_grad=True)
    factor = torch.ones(3)
    loss = (weight * factor).sum()
    bps.push_pull_inplace(factor, False, "needed")
    if bps.size() == 1:
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_changes_in_place(pair):
    pair.run(a_value_that_autograd_needs_is_changed)


def declared_before():
    bps.declare("declared")
    bps.declare("declared.tensor", torch.ones(5))
    assert torch.equal(bps.push_pull(torch.ones(5), True, "declared.tensor"), torch.ones(5))
    ms, megabytes = bps.get_pushpull_speed()
    assert (ms, megabytes) == (0, -5.0) or (ms > 1.6e12 and megabytes > 0)


def test_declare(job):
    job.run(declared_before)


def place():
    import byteps.common

    assert bps.is_initialized()
    bps.init()
    bps.init(lazy=False)
    bps.barrier()
    bps.barrier(timeout=30)
    assert byteps.common.BytePSBasics(__file__).rank() == bps.rank()
    return (
        bps.rank(),
        bps.size(),
        bps.local_rank(),
        bps.local_size(),
        bps.cross_rank(),
        bps.cross_size(),
    )


def test_place(job):
    size = job.size
    assert job.run(place) == [(rank, size, rank, size, 0, 1) for rank in range(size)]
