"""From a torch tensor to an address and back: what can be sent, and from which memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from byteps import _registry
from byteps._backups import WAITS, Backups
from byteps._codecs import encoding_for
from byteps.errors import TensorError
from byteps.torch import _gpu

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}

SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


class Memory(NamedTuple):
    """Where a tensor is read, where its result is written, and what the caller gets.

    ``copied`` says that the result has still to be copied from ``target`` to ``output``.
    """

    source: torch.Tensor
    target: torch.Tensor
    output: torch.Tensor
    copied: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Each of them once."""
        if self.source is self.output and self.target is self.output:
            return (self.output,)
        return self.source, self.target, self.output

    def finish(self) -> torch.Tensor:
        """The result, in the tensor that the caller knows."""
        if self.copied:
            with torch.no_grad():
                self.output.copy_(self.target)
        return self.output


def summed_dtype(tensor: torch.Tensor, what: str, name: str | None) -> str:
    """The name of its type, or the error that says which types can be summed."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TensorError(
            f"{_label(what, name)}: the servers do not sum {tensor.dtype} (they sum {known}): "
            "cast it to one of them"
        )
    return dtype


def check(tensor: torch.Tensor, what: str, name: str | None) -> None:
    """Raises if it is not a dense tensor in the memory of this process or of a GPU."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
        if tensor.is_cpu or _gpu.holds(tensor):
            return
    label = _label(what, name)
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{label}: a torch tensor is wanted, not {type(tensor).__name__}")
    if not (tensor.is_cpu or _gpu.holds(tensor)):
        raise TensorError(
            f"{label} is on {tensor.device}: only tensors in host memory and on CUDA devices can "
            "be sent"
        )
    raise TensorError(
        f"{label} is sparse ({tensor.layout}): send tensor.to_dense(), or call sparse_allreduce"
    )


def _label(what: str, name: str | None) -> str:
    return f"{what} '{name}'" if name else f"{what} a tensor without a name"


def is_of_host(tensor: torch.Tensor, average: bool, ranks: tuple[int, ...] | None = None) -> bool:
    """Whether a tensor is one of the host to the job, wherever each rank has it.

    On a GPU, averages of integers are: they are rounded down, which NCCL's are not. So is what is
    for some ``ranks``, since NCCL reduces among all of a host, and what does not wait for all of
    them (:class:`byteps._backups.Backups`). All else that :data:`DTYPES` has, NCCL reduces, and a
    broadcast is of bytes.
    """
    return (
        not _gpu.holds(tensor)
        or ranks is not None
        or (average and not tensor.dtype.is_floating_point)
    )


def gradient(
    name: str,
    param: torch.Tensor,
    compression: Any,
    average: bool,
    ranks: tuple[int, ...] | None = None,
    backups: Backups = WAITS,
) -> _registry.Tensor:
    """What is declared for the gradients of a parameter before there is one."""
    check(param, "parameter", name)
    sent, _ = compression.compress(torch.empty(1, dtype=param.dtype, device="cpu"))
    dtype = summed_dtype(sent, "parameter", name)
    on_gpus = not is_of_host(param, average, ranks)
    operation = "average" if average else "sum"
    encoding = encoding_for(compression, sent.dtype.is_floating_point, operation)
    tensor = _registry.Tensor(
        name, dtype, param.shape, operation, device=on_gpus, ranks=ranks, encoding=encoding
    )
    tensor = backups.over(tensor)
    _gpu.open_for([param], [tensor.device])
    return tensor


def in_place(tensor: torch.Tensor) -> Memory:
    """Sent from, and received into, the tensor's own memory; through a copy where that has gaps."""
    if is_plain(tensor):
        return Memory(tensor, tensor, tensor, False)
    copy = packed(tensor)
    return Memory(copy, copy, tensor, True)


def to_new(tensor: torch.Tensor) -> Memory:
    """Sent from the tensor's own memory where that has no gaps, received into a new tensor."""
    output = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return Memory(tensor if is_plain(tensor) else packed(tensor), output, output, False)


def to_other(tensor: torch.Tensor, output: torch.Tensor) -> Memory:
    """Sent from one tensor and received into another of the same shape and type."""
    source, target = to_new(tensor), in_place(output)
    return Memory(source.source, target.target, output, target.copied)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory in the order, and with the values, that it shows."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values of which that holds."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
