"""push_pull beside torch.distributed's gloo all-reduce, in the same processes, in turn.

    bpslaunch --local 2 --servers 1 --server-cores 1 .venv/bin/python perf/beside_gloo.py [--json] [BYTES...]

`bps-perf gloo` starts it so, and says where it was measured. Both sum the same float32 tensors in place over the same ranks of this machine. A figure is the median over the
rounds of the slowest rank's time; GB/s are bytes of one rank's tensor (10^9) over it. BPS_TRANSPORT=tcp measures
loopback TCP instead of shared memory; gloo always uses TCP.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

import byteps.torch as bps

WARM_UP = 3


def join() -> None:
    """Makes gloo's group of the ranks of a job that this package has begun."""
    # The port of the rendezvous comes from rank 0, through the engine itself.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if bps.rank() == 0 else None
    port = bps.broadcast_object(store.port if store else None, root_rank=0, name="port")
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=bps.rank(), world_size=bps.size())


def slowest(seconds: list[float]) -> list[float]:
    """The largest of all ranks' values, each by itself."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def timed(work, tensor: torch.Tensor) -> float:
    """Seconds of one call, on the slowest rank; all begin together."""
    tensor.fill_(1.0)
    dist.barrier()
    begin = time.perf_counter()
    work(tensor)
    (took,) = slowest([time.perf_counter() - begin])
    assert torch.all(tensor == bps.size()), "a wrong sum"
    return took


def show(arguments: argparse.Namespace, size: int, ours: list[float], theirs: list[float]) -> None:
    """Prints the figures of one size."""
    mine, peer = statistics.median(ours), statistics.median(theirs)
    worst = [sorted(times)[min(len(times) - 1, int(0.99 * len(times)))] for times in (ours, theirs)]
    fields = {
        "size_bytes": size,
        "workers": bps.size(),
        "rounds": arguments.rounds,
        "algbw_gbs": size / mine / 1e9,
        "ms_p50": mine * 1e3,
        "ms_p99": worst[0] * 1e3,
        "peer_algbw_gbs": size / peer / 1e9,
        "peer_ms_p50": peer * 1e3,
        "peer_ms_p99": worst[1] * 1e3,
        "ratio": peer / mine,
    }
    if arguments.json:
        print(json.dumps(fields), flush=True)
    else:
        columns = ("size_bytes", "ms_p50", "peer_ms_p50", "algbw_gbs", "peer_algbw_gbs", "ratio")
        print(
            "  ".join(
                f"{name} {fields[name]:.{0 if name == 'size_bytes' else 3}f}" for name in columns
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="push_pull beside gloo's all-reduce")
    parser.add_argument("bytes", type=int, nargs="*", help="bytes of each rank's tensor")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds of both")
    parser.add_argument("--json", action="store_true", help="print one JSON object a size")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bps.init()
    join()
    for size in arguments.bytes or [1 << 20, 16 << 20, 64 << 20]:
        tensor = torch.empty(max(size // 4, 1))
        name = f"beside.{size}"
        ours, theirs = [], []
        for _ in range(arguments.rounds + WARM_UP):
            ours.append(timed(lambda t: bps.push_pull_inplace(t, average=False, name=name), tensor))
            theirs.append(timed(dist.all_reduce, tensor))
        if bps.rank() == 0:
            show(arguments, tensor.numel() * 4, ours[WARM_UP:], theirs[WARM_UP:])
    bps.barrier()
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
