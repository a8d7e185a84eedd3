"""push_pull beside torch.distributed's gloo all-reduce, in the same processes, in turn.

    bpslaunch --local 2 --servers 1 --server-cores 1 .venv/bin/python perf/beside_gloo.py [MIB...]

Both sum the same float32 tensors in place over the same ranks of this machine. A figure is the median over the
rounds of the slowest rank's time; GB/s are bytes of one rank's tensor (10^9) over it. BPS_TRANSPORT=tcp measures
loopback TCP instead of shared memory; gloo always uses TCP.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import byteps.torch as bps

ROUNDS = 21
WARM_UP = 3


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    values = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()


def timed(work, tensor: torch.Tensor) -> float:
    """Seconds of one call, on the slowest rank; all begin together."""
    tensor.fill_(1.0)
    dist.barrier()
    begin = time.perf_counter()
    work(tensor)
    took = slowest(time.perf_counter() - begin)
    assert torch.all(tensor == bps.size()), "a wrong sum"
    return took


def main() -> None:
    torch.set_num_threads(1)
    bps.init()
    # The port of the rendezvous comes from rank 0, through the engine itself.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if bps.rank() == 0 else None
    port = bps.broadcast_object(store.port if store else None, root_rank=0, name="port")
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=bps.rank(), world_size=bps.size())
    transport = os.environ.get("BPS_TRANSPORT", "auto")
    if bps.rank() == 0:
        print(f"{bps.size()} ranks on one machine, transport {transport}, {ROUNDS} rounds in turn")
        print(f"{'MiB':>6} {'push_pull ms':>13} {'gloo ms':>9} {'push_pull GB/s':>15} {'gloo GB/s':>10} {'ratio':>6}")
    for mebibytes in [int(text) for text in sys.argv[1:]] or [1, 16, 64]:
        tensor = torch.empty(mebibytes << 18)
        name = f"beside.{mebibytes}"
        ours, theirs = [], []
        for _ in range(ROUNDS + WARM_UP):
            ours.append(timed(lambda t: bps.push_pull_inplace(t, average=False, name=name), tensor))
            theirs.append(timed(dist.all_reduce, tensor))
        mine, peer = (statistics.median(times[WARM_UP:]) for times in (ours, theirs))
        if bps.rank() == 0:
            size = tensor.numel() * 4 / 1e9
            print(
                f"{mebibytes:>6} {mine * 1e3:>13.2f} {peer * 1e3:>9.2f} {size / mine:>15.2f} {size / peer:>10.2f}"
                f" {peer / mine:>6.2f}",
                flush=True,
            )
    bps.barrier()
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
