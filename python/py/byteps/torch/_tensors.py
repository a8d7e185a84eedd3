"""From a torch tensor to an address and back: what can be sent, and from which memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from byteps.errors import TensorError

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


class Memory(NamedTuple):
    """Where a tensor is read, where its result is written, and what the caller gets."""

    source: torch.Tensor
    target: torch.Tensor
    output: torch.Tensor
    copied: bool

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
    """Raises if it is not a dense tensor in the memory of this process."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
        return
    label = _label(what, name)
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{label}: a torch tensor is wanted, not {type(tensor).__name__}")
    if tensor.is_cuda:
        raise TensorError(
            f"{label} is on {tensor.device}: GPU support is not built in yet, so send tensor.cpu()"
        )
    if not tensor.is_cpu:
        raise TensorError(f"{label} is on {tensor.device}: only tensors in CPU memory can be sent")
    raise TensorError(f"{label} is sparse ({tensor.layout}): send tensor.to_dense()")


def _label(what: str, name: str | None) -> str:
    return f"{what} '{name}'" if name else f"{what} a tensor without a name"


def in_place(tensor: torch.Tensor) -> Memory:
    """Sent from, and received into, the tensor's own memory; through a copy where that has gaps."""
    if _plain(tensor):
        return Memory(tensor, tensor, tensor, False)
    copy = _packed(tensor)
    return Memory(copy, copy, tensor, True)


def to_new(tensor: torch.Tensor) -> Memory:
    """Sent from the tensor's own memory where that has no gaps, received into a new tensor."""
    output = torch.empty(tensor.shape, dtype=tensor.dtype)
    source = tensor if _plain(tensor) else _packed(tensor)
    return Memory(source, output, output, False)


def to_other(tensor: torch.Tensor, output: torch.Tensor) -> Memory:
    """Sent from one tensor and received into another of the same shape and type."""
    source, target = to_new(tensor), in_place(output)
    return Memory(source.source, target.target, output, target.copied)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory in the order, and with the values, that it shows."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
