"""Gradients that are sent from their own memory: which may be, and from where."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from byteps import _native


class Odd(torch.Tensor):
    """A subclass, of which nothing is known but its attributes."""


def negative(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which memory holds the opposites."""
    return torch._neg_view(-tensor)


LIKE = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
# What a gradient may turn out to be, and whether it is sent as it is.
GRADIENTS = {
    "the same": (LIKE + 1, True),
    "a slice of something larger": (torch.zeros(5, 4, dtype=torch.bfloat16)[1:4], True),
    "a subclass": (LIKE.as_subclass(Odd), True),
    "another type of that size": (LIKE.to(torch.float16), False),
    "a type of another size": (LIKE.float(), False),
    "fewer": (LIKE[:2], False),
    "transposed": (torch.zeros(4, 3, dtype=torch.bfloat16).t(), False),
    "every other column": (torch.zeros(3, 8, dtype=torch.bfloat16)[:, ::2], False),
    "one number": (torch.zeros((), dtype=torch.bfloat16).expand(3, 4), False),
    "negative": (negative(LIKE), False),
    "a transposed subclass": (torch.zeros(4, 3, dtype=torch.bfloat16).t().as_subclass(Odd), False),
    "a negative subclass": (negative(LIKE).as_subclass(Odd), False),
    "sparse": (LIKE.to_sparse(), False),
    # By its attributes it is; that there is nothing to send is for torch to say.
    "without memory": (torch.zeros(3, 4, dtype=torch.bfloat16, device="meta"), True),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_what_is_sent_as_it_is(case):
    gradient, is_plain = GRADIENTS[case]
    plain = _native.Plain(LIKE, torch.strided, LIKE.nbytes, False)
    assert _native.are_plain([0], [gradient], [plain]) == is_plain
    others = [_native.Plain(torch.zeros(1), torch.strided, 4, False)] * 2
    gradients = [torch.zeros(1), gradient, torch.zeros(1)]
    assert _native.are_plain([2, 0, 1], gradients, [plain, *others]) == is_plain


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,), (1, 5, 1), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_shapes_and_types_that_are_like_themselves(shape, dtype):
    like = torch.zeros(shape, dtype=dtype)
    plain = _native.Plain(like, torch.strided, like.nbytes, False)
    assert _native.are_plain([0], [torch.ones(shape, dtype=dtype)], [plain])
    on_gpu = _native.Plain(like, torch.strided, like.nbytes, True)
    assert not _native.are_plain([0], [torch.ones(shape, dtype=dtype)], [on_gpu])


def test_strides_of_what_has_one_element_say_nothing():
    like = torch.zeros(1, 4)
    plain = _native.Plain(like, torch.strided, like.nbytes, False)
    assert _native.are_plain([0], [torch.zeros(8).as_strided((1, 4), (77, 1))], [plain])


def averages_in_place():
    """Of memory that begins within something larger, that memory alone is averaged."""
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    for odd in (False, True, False):
        around = torch.full((4, 4), float(bps.rank()))
        gradient = around[1:3]
        model.weight.grad = gradient.as_subclass(Odd) if odd else gradient
        optimizer.synchronize()
        assert model.weight.grad.data_ptr() == around[1].data_ptr()
        assert (around[1:3] == 0.5).all()
        assert (around[0] == bps.rank()).all() and (around[3] == bps.rank()).all()
        optimizer.zero_grad()


def test_memory_within_something_larger(pair):
    pair.run(averages_in_place)


def negatives_are_averaged():
    """A negative view holds other bits than its numbers'."""
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    model.weight.grad = negative(torch.full((2, 4), 1.0 + bps.rank()))
    optimizer.synchronize()
    assert (model.weight.grad == 1.5).all()


def test_negative_views(pair):
    pair.run(negatives_are_averaged)
