"""One rank of a job that has the wheel, the standard library and nothing else: sums some arrays."""

import array
import sys

from byteps import _native, _registry, common
from byteps._objects import broadcast_object

ELEMENTS, ROUNDS = 100_000, 3


def push_pull(memory: array.array) -> array.array:
    """The sum of all ranks' arrays of float32, in place."""
    tensor = _registry.Tensor("sum", "f32", (len(memory),), "sum")
    address = memory.buffer_info()[0]
    sends = [_registry.Send(tensor, address, address)]
    return _registry.synchronize(_registry.start(sends, memory, lambda done: done), timeout=60)


common.init()
rank, size = common.rank(), common.size()
for turn in range(ROUNDS):
    sums = push_pull(array.array("f", [rank + turn]) * ELEMENTS)
    expected = sum(range(size)) + turn * size
    assert sums == array.array("f", [expected]) * ELEMENTS, (turn, sums[:4], expected)
said = broadcast_object({"from": rank}, root_rank=size - 1, name="who", ranks=None)
assert said == {"from": size - 1}, said
common.barrier(timeout=60)
common.shutdown()
python = ".".join(map(str, sys.version_info[:2]))
print(f"rank {rank} of {size} on Python {python} with byteps {_native.__version__}: ok")
