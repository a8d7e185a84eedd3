"""What Horovod's own tests for torch hold, where no other file here holds it."""

from __future__ import annotations

import warnings

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, MismatchError


def one_name_under_way_twice():
    """Horovod refuses a name that is under way; here its rounds follow one another."""
    rank, size = bps.rank(), bps.size()
    rows = [torch.full((2, 3), 10.0 * call + rank) for call in range(2)]
    total = [sum(10.0 * call + other for other in range(size)) for call in range(2)]
    reduced = [bps.allreduce_async(one, name="twice.reduced", op=bps.Sum) for one in rows]
    sent = [bps.broadcast_async(one, root_rank=size - 1, name="twice.sent") for one in rows]
    gathered = [bps.allgather_async(one, name="twice.gathered") for one in rows]
    scattered = [
        bps.reducescatter_async(one.repeat(size, 1), name="twice.scattered", op=bps.Sum)
        for one in rows
    ]
    for call in range(2):
        assert torch.equal(bps.synchronize(reduced[call]), torch.full((2, 3), total[call]))
        assert torch.equal(bps.synchronize(sent[call]), torch.full((2, 3), 10.0 * call + size - 1))
        expected = torch.arange(size).repeat_interleave(2) + 10.0 * call
        assert torch.equal(bps.synchronize(gathered[call])[:, 0], expected)
        assert torch.equal(bps.synchronize(scattered[call]), torch.full((2, 3), total[call]))


def test_one_name_under_way_twice(trio):
    trio.run(one_name_under_way_twice)


def splits_of_wrong_types():
    size = bps.size()
    tensor = torch.arange(2.0 * size)
    wrong = ([2.0] * size, torch.full((size,), 2.0), torch.full((size,), True), ["2"] * size, 2)
    for index, splits in enumerate(wrong):
        with pytest.raises((ConfigError, MismatchError), match=r"splits|nothing that can be sent"):
            bps.alltoall(tensor, splits, name=f"wrong.{index}")
    # One rank alone: the others hear of it.
    mine = [2.0] * size if bps.rank() == 1 else [2] * size
    with pytest.raises(ConfigError if bps.rank() == 1 else MismatchError):
        bps.alltoall(tensor, mine, name="wrong.of.one")
    assert bps.alltoall(tensor, [2] * size, name="right")[1].tolist() == [2] * size


def test_splits_are_whole_numbers(pair):
    pair.run(splits_of_wrong_types)


def gradients_in_a_set():
    rank = bps.rank()
    few = bps.add_process_set([0, 2])
    if few.included():
        place = few.rank()
        weights = torch.tensor([1.0, 2.0])

        def gradient_of(call, *, rows=2):
            leaf = torch.full((rows,), 1.0 + rank, requires_grad=True)
            output = call(leaf)
            (output * weights.repeat(output.numel() // 2) * (place + 1)).sum().backward()
            return leaf.grad.tolist()

        # What comes back is what went, by the same way: place + 1 is 1 on one rank, 2 on the other.
        reduced = gradient_of(lambda leaf: bps.allreduce(leaf, op=bps.Sum, process_set=few))
        assert reduced == [3.0, 6.0]
        averaged = gradient_of(lambda leaf: bps.allreduce(leaf, process_set=few))
        assert averaged == [1.5, 3.0]
        gathered = gradient_of(lambda leaf: bps.allgather(leaf, process_set=few))
        assert gathered == [1.5, 3.0]
        sent = gradient_of(lambda leaf: bps.broadcast(leaf, root_rank=2, process_set=few))
        assert sent == ([1.5, 3.0] if rank == 2 else [0.0, 0.0])
        swapped = gradient_of(lambda leaf: bps.alltoall(leaf, process_set=few))
        assert swapped == [1.0 * (1 + place), 2.0 * (1 + place)]
        scattered = gradient_of(
            lambda leaf: bps.reducescatter(leaf, op=bps.Sum, process_set=few), rows=4
        )
        assert scattered == [1.0, 2.0, 2.0, 4.0]
    assert bps.remove_process_set(few)


def test_gradients_pass_in_a_process_set(trio):
    trio.run(gradients_in_a_set)


def barriers_between():
    """Barriers pass what is under way, and do not wait for it."""
    rank, size = bps.rank(), bps.size()
    handles = []
    for index in range(4):
        handles.append(bps.allreduce_async(torch.full((3,), float(rank)), name=f"between.{index}"))
        bps.barrier()
        handles.append(bps.allgather_async(torch.tensor([rank]), name=f"rows.{index}"))
    bps.barrier()
    for mean, rows in zip(handles[::2], handles[1::2], strict=True):
        assert torch.allclose(bps.synchronize(mean), torch.full((3,), (size - 1) / 2))
        assert bps.synchronize(rows).tolist() == list(range(size))


def test_barriers_among_other_calls(trio):
    trio.run(barriers_between)


def state_of_frozen_parameters():
    rank = bps.rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.6))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [param.requires_grad for param in model.parameters()] == [False, True, True, True]
    values = [*model.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
    assert len(optimizer.state) == 3 and optimizer.param_groups[0]["lr"] == 0.1
    for value in values:
        assert all(torch.equal(value, other) for other in bps.allgather(value.detach()[None]))


def test_state_of_parameters_without_gradients(pair):
    pair.run(state_of_frozen_parameters)


def no_warnings():
    """Horovod warns of a step that averages again; here no call does."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(prefix="silent"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for is_skipped in (False, True):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(bps.rank()))).sum().backward()
            optimizer.synchronize()
            wanted = torch.full((1, 2), (bps.size() - 1) / 2)
            assert torch.allclose(model.weight.grad, wanted)
            if is_skipped:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            assert torch.allclose(model.weight.grad, wanted)


def test_a_step_after_synchronize_warns_of_nothing(pair):
    pair.run(no_warnings)


def scattered_adasum():
    """Of ranks that agree, Adasum counts one."""
    rank, size = bps.rank(), bps.size()
    part = bps.reducescatter(torch.arange(2.0 * size), op=bps.Adasum, name="scattered.adasum")
    assert torch.allclose(part, torch.arange(2.0 * rank, 2.0 * rank + 2))


def test_reducescatter_takes_adasum(pair):
    pair.run(scattered_adasum)
