"""A rank of torch.distributed's gloo all-reduce on a host that `bps-perf cluster --peer gloo` staged.

    python perf/gloo_rank.py RANK SIZE MASTER_ADDRESS BYTES

It says `ready`, and answers each line that it is told with the seconds of one all-reduce of float32, from a barrier
of all ranks until its own result is there.
"""

import sys
import time

import torch
import torch.distributed as dist

MARK = "bps-perf:"
PORT = 9100


def say(text: str) -> None:
    print(MARK, text, flush=True)


def main() -> None:
    rank, size, master, count = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]) // 4,
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}:{PORT}", rank=rank, world_size=size
    )
    tensor = torch.ones(count)
    dist.barrier()
    say("ready")
    for _ in sys.stdin:
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds = time.perf_counter() - begin
        assert torch.all(tensor == size), "a wrong sum"
        tensor.fill_(1.0)
        say(repr(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
