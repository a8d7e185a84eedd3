"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from byteps import _registry, common
from byteps.torch import ops
from byteps.torch._compiled import untraced

__all__ = ["SyncBatchNorm"]

# The forward and the backward pass wait for these sums: they overtake every gradient.
_PRIORITY = 1 << 30


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """:class:`torch.nn.BatchNorm1d` to ``3d`` with the mean and the variance of all ranks' batches.

    The arguments are those of these. Inputs have the shape (N, C, ...), of a floating type; N may
    differ between ranks and be 0 on some. Every rank runs the module equally often, in training
    mode: each pass waits for two sums of about 2 C numbers, one forward and one backward. In
    evaluation mode, and where there is one rank, it is the plain one.

    Gradients of ``weight`` and ``bias`` are this rank's share, as those of other layers are: an
    optimizer averages them.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._name = f"SyncBatchNorm.{_registry.count_up('SyncBatchNorm')}"

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input, of its shape and type."""
        if not self.training or common.size() == 1:
            alone: torch.Tensor = super().forward(input)
            return alone
        self._check_input_dim(input)
        output: torch.Tensor = self._across_ranks(input)
        return output

    @untraced
    def _across_ranks(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self._name
        )
        self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        # That of one sample is unknown; torch's layers refuse such a batch, here others have some.
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """The module with every layer of batch normalization replaced, with its parameters.

        As :meth:`torch.nn.SyncBatchNorm.convert_sync_batchnorm`. On all ranks alike, before the
        optimizer is made: parameters stay the same objects.
        """
        if isinstance(module, cls):
            return module
        kinds = torch.nn.modules.batchnorm
        converted = module
        if isinstance(module, (kinds._BatchNorm, kinds.SyncBatchNorm)):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
            )
            name = converted._name
            # Parameters, buffers, hooks and the mode stay the same objects.
            converted.__dict__.update(copy.copy(module.__dict__))
            converted._name = name
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child))
        return converted


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over all but dimension 1 and all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance, count = _statistics(input, name)
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        # In evaluation mode torch's kernel takes mean and variance as they are.
        output = F.batch_norm(
            input.to(mean.dtype), mean, variance, scale, shift, training=False, eps=eps
        ).to(input.dtype)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.name = name
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        channels = mean.numel()
        shape = [1, channels] + [1] * (input.dim() - 2)
        gradient = gradient.to(mean.dtype)
        centred = input.to(mean.dtype) - mean.view(shape)
        own = torch.cat([_sum(gradient), _sum(gradient * centred) * scale])
        sums = ops.push_pull(own, average=False, name=f"{ctx.name}.backward", priority=_PRIORITY)
        # With y = x̂ w + b and N samples of all ranks:
        # dx = w / sqrt(variance + eps) (dy - Σ dy / N - x̂ Σ (dy x̂) / N)
        mean_gradient, mean_product = (sums / count).to(mean.dtype).split(channels)
        factor = scale if weight is None else scale * weight.to(mean.dtype)
        for_input = gradient - mean_gradient.view(shape)
        for_input -= centred * (scale * mean_product).view(shape)
        for_input *= factor.view(shape)
        for_weight = for_bias = None
        if weight is not None:
            for_bias, for_weight = (one.to(weight.dtype) for one in own.split(channels))
        return for_input.to(input.dtype), for_weight, for_bias, None, None


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def _statistics(input: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel, at least of float32, and the samples of a channel (f64).

    Ranks add up n m, n (v + m²) and n, of their own samples n, mean m and variance v, in float64:
    the difference that gives the variance then keeps a float32's digits, as long as the mean is
    below 10⁴ standard deviations.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    channels = input.shape[1]
    samples = input.numel() // max(channels, 1)
    if samples:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(input.to(dtype), dims, correction=0)
        variance, mean = variance.double(), mean.double()
        own = torch.cat([mean, variance + mean * mean, mean.new_ones(1)]) * samples
    else:
        own = input.new_zeros(2 * channels + 1, dtype=torch.float64)
    sums = ops.push_pull(own, average=False, name=f"{name}.forward", priority=_PRIORITY)
    count = sums[-1:]
    mean, square = (sums[:-1] / count).split(channels)
    return mean.to(dtype), (square - mean * mean).clamp(min=0).to(dtype), count
