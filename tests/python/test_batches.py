"""Which gradients go together, and what a step leaves behind."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

import byteps.torch as bps
from byteps import _native, common
from small_models import batch, start


def in_the_order_of_the_backward_pass():
    model = start()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    inputs, targets = batch(0)
    gradients, sent = optimizer._byteps, []
    push_batch = _native.push_batch

    def record(hooks, indices, *rest):
        sent.extend(gradients.names[gradients.params[index]] for index in indices)
        return push_batch(hooks, indices, *rest)

    with mock.patch.object(_native, "push_batch", record):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    assert {gradients.priority_of(param) for param in model.parameters()} == {0}
    # The last layer's are complete first.
    assert "last" in sent[0] and "conv" in sent[5], sent
    optimizer.step()


def test_in_the_order_of_the_backward_pass(single):
    single.run(in_the_order_of_the_backward_pass)


LAYERS = 40  # Of 64 KiB each.


def batches_of_passes(prepare):
    """How many gradients go together in each of three backward passes, after `prepare(hooks)`."""
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    prepare(optimizer._byteps.hooks)
    passes = []
    push_batch = _native.push_batch

    def record(hooks, indices, *rest):
        passes[-1].append(len(indices))
        return push_batch(hooks, indices, *rest)

    for _ in range(3):
        passes.append([])
        with mock.patch.object(_native, "push_batch", record):
            model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sum(passes[-1]) == LAYERS, passes
    return passes


def are_halves(batches):
    """Whether each batch but the last is at least as large as all that follow it."""
    return all(count >= sum(batches[place + 1 :]) for place, count in enumerate(batches[:-1]))


def batches_by_what_is_to_come(sends_halves, first):
    """While much is still to come, a batch is as large as is set, and the first one no larger."""

    def prepare(hooks):
        hooks.batch_bytes_min = 0
        hooks.sends_halves = sends_halves

    for batches in batches_of_passes(prepare):
        assert batches[0] == first, batches
        assert not sends_halves or are_halves(batches), batches


@pytest.mark.parametrize(("sends_halves", "first"), [(False, 1), (True, 20)])
def test_batches_by_what_is_to_come(single, sends_halves, first):
    single.run(batches_by_what_is_to_come, sends_halves, first)


def batches_as_hosts_are(hosts):
    """One rank alone sends all at once, ranks of a host halves, and others what a line can take."""
    with mock.patch.object(common, "local_size", lambda: bps.size() // hosts):
        passes = batches_of_passes(lambda _: None)
    for batches in passes:
        if bps.size() == 1:
            assert batches == [LAYERS], batches
        elif hosts == 1:
            assert batches[0] == LAYERS // 2 and are_halves(batches), batches
        else:
            assert batches[0] == 1, batches


def test_batches_of_one_rank_alone(single):
    single.run(batches_as_hosts_are, 1)


@pytest.mark.parametrize("hosts", [1, 2])
def test_batches_of_two_ranks(pair, hosts):
    pair.run(batches_as_hosts_are, hosts)


def few_objects_for_the_garbage_collector():
    layers = 50
    model = torch.nn.Sequential(*(torch.nn.LayerNorm(4) for _ in range(layers)))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    watched = []
    for _ in range(3):
        gc.collect()
        before = len(gc.get_objects())
        model(torch.ones(1, 4)).sum().backward()
        gc.collect()
        watched.append((len(gc.get_objects()) - before) / (2 * layers))
        optimizer.step()
        optimizer.zero_grad()
    # Torch's own object for the gradient.
    assert watched[-1] < 1.5, watched


def test_few_objects_for_the_garbage_collector(single):
    single.run(few_objects_for_the_garbage_collector)
