"""Parameters whose values live on the servers, for asynchronous training.

Each rank pushes by how much its own steps have changed a parameter, and gets the sum of what all
ranks have pushed by then, without waiting for them. Rank 0, or the first of a process set, gives
the values that everybody begins with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps import _registry
from byteps._registry import Send, Store
from byteps.torch import _sending, _tensors

Named = Sequence[tuple[str, torch.Tensor]]


class _Value:
    """A parameter and what the servers had of it last, in memory of the host."""

    __slots__ = ("param", "tensor", "value")

    def __init__(self, param: torch.Tensor, tensor: _registry.Tensor, dtype: torch.dtype) -> None:
        self.param = param
        self.tensor = tensor
        self.value = param.detach().to("cpu", dtype, copy=True).contiguous()

    def set_delta(self) -> None:
        """Puts in the place of the value by how much the parameter has left it.

        A parameter of a half type began at the rounded value: what rounding took is no delta.
        """
        new = self.param.detach().to("cpu", self.value.dtype)
        old = self.value.to(self.param.dtype).to(self.value.dtype)
        torch.sub(new, old, out=self.value)

    def show(self) -> None:
        """Gives the parameter the value."""
        with torch.no_grad():
            self.param.copy_(self.value)


class StoredParameters:
    """Some parameters of a model, by the names that they are stored under.

    ``staleness`` is by how many pushes this rank may be ahead of the slowest; as the environment
    says if None. ``ranks`` are those that share the values; all if None.
    """

    def __init__(self, staleness: int | None, ranks: _sending.Ranks) -> None:
        self._store = Store(ranks[0] if ranks else 0, staleness)
        self._ranks = ranks
        self._values: dict[torch.Tensor, _Value] = {}
        self._job = _registry.job_number()

    def join(self, named: Named) -> None:
        """Gives those of these parameters that are new the value that the servers have.

        In a job that has formed again, after a suspend or a death, all are new: values begin again
        with those of the root.
        """
        if self._job != _registry.job_number():
            self._values.clear()
            self._job = _registry.job_number()
        new = [self._value(name, param) for name, param in named if param not in self._values]
        self._exchange(new)
        for value in new:
            self._values[value.param] = value

    def push(self, named: Named) -> None:
        """Adds what has changed to the servers' values, and gives the parameters the sums.

        Each was in a :meth:`join` before.
        """
        values = [self._values[param] for _, param in named]
        for value in values:
            value.set_delta()
        self._exchange(values)

    def _value(self, name: str, param: torch.Tensor) -> _Value:
        dtype = torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype
        wire = _tensors.summed_dtype(torch.empty(0, dtype=dtype), "parameter", name)
        tensor = _registry.Tensor(
            name, wire, param.shape, "sum", ranks=self._ranks, store=self._store
        )
        return _Value(param, tensor, dtype)

    def _exchange(self, values: Sequence[_Value]) -> None:
        if not values:
            return
        addresses = [(value.tensor, value.value.data_ptr()) for value in values]
        sends = [Send(tensor, address, address) for tensor, address in addresses]
        handle = _registry.start(sends, list(values), _show)
        _registry.synchronize(handle)


def _show(values: list[_Value]) -> None:
    for value in values:
        value.show()
