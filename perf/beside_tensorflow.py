"""push_pull in a TensorFlow program beside TensorFlow's own collectives, in the same processes, in turn.

    bpslaunch --local 2 --servers 0 .venv/bin/python perf/beside_tensorflow.py [--json] [--tensors 200] [--size BYTES]

`bps-perf tensorflow` starts it so, and says where it was measured. Both programs (`tf.function`) sum the same float32
tensors over the same ranks of this machine: ours by one push_pull_group of the list, TensorFlow's by one all_reduce of
it in a MultiWorkerMirroredStrategy, whose ranks make a ring. A figure is the median over the rounds of the slowest
rank's time of one call, to the end of its last result.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import byteps.tensorflow as bps

WARM_UP = 3


def join() -> Any:
    """Makes TensorFlow's own group of the ranks of a job that this package has begun: before TensorFlow computes
    anything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ports = bps.allgather_object(port, name="port")
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": bps.rank()},
        }
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def ways(strategy: Any, count: int, size: int) -> dict[str, Callable[[], Any]]:
    """By name: a program that sums tensors."""
    tensors = [tf.fill([size // 4], float(bps.rank() + 1)) for _ in range(count)]
    names = [f"sum.{index}" for index in range(count)]

    @tf.function
    def ours() -> Any:
        return bps.push_pull_group(tensors, names, average=False)

    def each() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    @tf.function
    def theirs() -> Any:
        return strategy.run(each)

    return {"ours": ours, "tensorflow": theirs}


def timed(program: Callable[[], Any]) -> float:
    """Seconds of one call, on the slowest rank; all begin together."""
    bps.barrier()
    begin = time.perf_counter()
    # TensorFlow hands results over when the whole program is done.
    results = [result.numpy() for result in program()]
    took = time.perf_counter() - begin
    total = bps.size() * (bps.size() + 1) / 2
    assert all(result[0] == total for result in results), "a wrong sum"
    return float(bps.push_pull(tf.constant(took, tf.float64), op=bps.Max, name="took"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--size", type=int, default=65536, help="bytes of a tensor")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    bps.init()
    both = ways(join(), arguments.tensors, arguments.size)
    seconds: dict[str, list[float]] = {way: [] for way in both}
    for number in range(WARM_UP + arguments.rounds):
        for way, program in both.items():
            took = timed(program)
            if number >= WARM_UP:
                seconds[way].append(took)
    ours, theirs = (statistics.median(seconds[way]) * 1e3 for way in ("ours", "tensorflow"))
    fields = {
        "tensors": arguments.tensors,
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
                f"{arguments.tensors} tensors of {arguments.size} B: {ours:.2f} ms, TensorFlow's ring "
                f"{theirs:.2f} ms: {theirs / ours:.2f} times"
            )
    bps.barrier()
    bps.shutdown()
    # The servers of TensorFlow's strategy wait for each other at the end of a process, in no order.
    os._exit(0)


if __name__ == "__main__":
    main()
