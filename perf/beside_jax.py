"""push_pull in a compiled JAX program beside JAX's own collectives (gloo), in the same processes, in turn.

    bpslaunch --local 2 --servers 0 .venv/bin/python perf/beside_jax.py [--json] [--arrays 200] [--size BYTES]

`bps-perf jax` starts it so, and says where it was measured. Both programs sum the same float32 arrays over the same
ranks of this machine: ours by one push_pull of the list, JAX's by one psum of it over the devices of all processes. A
figure is the median over the rounds of the slowest rank's time of one call, to the end of its last result.
"""

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import byteps.jax as bps

WARM_UP = 3


def join() -> None:
    """Makes JAX's own group of the ranks of a job that this package has begun."""
    port = None
    if bps.rank() == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    port = bps.broadcast_object(port, root_rank=0, name="port")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", bps.size(), bps.rank())


def ways(count: int, size: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """By name: a compiled program that sums a list of arrays, and such a list."""
    own = [jnp.full(size // 4, float(bps.rank() + 1)) for _ in range(count)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rank",))
    spec = jax.sharding.PartitionSpec("rank")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    spread = [jax.make_array_from_process_local_data(sharding, np.asarray(array)) for array in own]

    def psum(arrays: Any) -> Any:
        return jax.lax.psum(arrays, "rank")

    nothing = jax.sharding.PartitionSpec()
    shared = jax.shard_map(psum, mesh=mesh, in_specs=(spec,), out_specs=nothing)
    return {
        "ours": (jax.jit(lambda arrays: bps.push_pull(arrays, average=False, name="sum")), own),
        "jax": (jax.jit(shared), spread),
    }


def timed(program: Callable[..., Any], arrays: Any) -> float:
    """Seconds of one call, on the slowest rank; all begin together."""
    bps.barrier()
    begin = time.perf_counter()
    results = jax.block_until_ready(program(arrays))
    took = time.perf_counter() - begin
    total = bps.size() * (bps.size() + 1) / 2
    assert all(float(result[0]) == total for result in (results[0], results[-1])), "a wrong sum"
    return float(bps.push_pull(jnp.float32(took), op=bps.Max, name="took"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--size", type=int, default=65536, help="bytes of an array")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    bps.init()
    join()
    both = ways(arguments.arrays, arguments.size)
    seconds: dict[str, list[float]] = {way: [] for way in both}
    for number in range(WARM_UP + arguments.rounds):
        for way, (program, arrays) in both.items():
            took = timed(program, arrays)
            if number >= WARM_UP:
                seconds[way].append(took)
    ours, theirs = (statistics.median(seconds[way]) * 1e3 for way in ("ours", "jax"))
    fields = {
        "arrays": arguments.arrays,
        "size_bytes": arguments.size,
        "workers": bps.size(),
        "rounds": arguments.rounds,
        "ms_p50": ours,
        "peer_ms_p50": theirs,
        "ratio": theirs / ours,
    }
    if bps.rank() == 0:
        if arguments.json:
            print(json.dumps(fields))
        else:
            print(
                f"{arguments.arrays} arrays of {arguments.size} B: {ours:.2f} ms, JAX's gloo "
                f"{theirs:.2f} ms: {theirs / ours:.2f} times"
            )
    bps.barrier()
    jax.distributed.shutdown()
    bps.shutdown()


if __name__ == "__main__":
    main()
