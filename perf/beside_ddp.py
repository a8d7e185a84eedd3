"""torch.distributed over this package's backend beside gloo: all-reduces, and training with DDP, in turn.

    torchrun --standalone --nproc-per-node 2 perf/beside_ddp.py [--json] [BYTES...]

Both backends' groups have the same processes and take turns, round by round. A figure is the median over the rounds of
the slowest rank's time. `engine` is the sum by the engine alone, without torch.distributed: what is above it is the
cost of the calls. Small sums are timed over some hundred calls in a row, since a clock and a barrier cost as much as
one of them. DDP trains a chain of linear layers; both must end with the same parameters. `silent` is a step of DDP whose
hook gives each bucket back without sending it: what is above it is communication, as far as it is not hidden.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2
SMALL_BYTES = 64 << 10
WAYS = ("engine", "byteps", "gloo")


def slowest(seconds: float, group: dist.ProcessGroup) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()


def sums(sizes: list[int], rounds: int, gloo: dist.ProcessGroup) -> list[dict]:
    from byteps import _native, _registry

    found = []
    for size in sizes:
        tensor = torch.empty(max(size // 4, 1))
        known = _registry.Tensor(f"beside.{size}", "f32", tensor.shape, "sum")
        (number,) = _registry.declare([known])
        item = (number, tensor.data_ptr(), tensor.data_ptr(), 0)
        calls = {
            "engine": lambda item=item: _native.start_batch([item]).wait(),
            "byteps": lambda tensor=tensor: dist.all_reduce(tensor),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=gloo),
        }
        repeats = 200 if size <= SMALL_BYTES else 1
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds + WARM_UP):
            for way in WAYS:
                tensor.fill_(1.0)
                dist.barrier(group=gloo)
                begin = time.perf_counter()
                for _ in range(repeats):
                    calls[way]()
                times[way].append(slowest((time.perf_counter() - begin) / repeats, gloo))
                if repeats == 1:
                    assert (tensor == dist.get_world_size()).all(), "a wrong sum"
        medians = {way: statistics.median(times[way][WARM_UP:]) for way in WAYS}
        found.append(
            {
                "size_bytes": tensor.numel() * 4,
                **{f"{way}_us": medians[way] * 1e6 for way in WAYS},
                "above_engine_us": (medians["byteps"] - medians["engine"]) * 1e6,
                "ratio": medians["gloo"] / medians["byteps"],
            }
        )
    return found


def unsent(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def training(layers: int, width: int, rounds: int, gloo: dist.ProcessGroup) -> dict:
    ways = {"silent": gloo, "byteps": None, "gloo": gloo}
    models, steps = {}, {}
    for way, group in ways.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        parallel = DistributedDataParallel(model, process_group=group)
        if way == "silent":
            parallel.register_comm_hook(None, unsent)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank()))

        def step(parallel=parallel, optimizer=optimizer, inputs=inputs) -> None:
            optimizer.zero_grad()
            parallel(inputs).square().mean().backward()
            optimizer.step()

        models[way], steps[way] = model, step
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + WARM_UP):
        for way in ways:
            dist.barrier(group=gloo)
            begin = time.perf_counter()
            steps[way]()
            times[way].append(slowest(time.perf_counter() - begin, gloo))
    pairs = zip(models["byteps"].parameters(), models["gloo"].parameters(), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)
    medians = {way: statistics.median(times[way][WARM_UP:]) for way in ways}
    return {
        "ddp_gradient_bytes": 4 * layers * (width * width + width),
        **{f"{way}_ms": medians[way] * 1e3 for way in ways},
        "ratio": medians["gloo"] / medians["byteps"],
        "communication_ratio": (medians["gloo"] - medians["silent"])
        / (medians["byteps"] - medians["silent"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the backend byteps beside gloo")
    parser.add_argument("bytes", type=int, nargs="*", help="bytes of each rank's tensor")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each")
    parser.add_argument("--layers", type=int, default=8, help="linear layers of DDP's model")
    parser.add_argument("--width", type=int, default=1024, help="their inputs and outputs")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("byteps")
    gloo = dist.new_group(backend="gloo")
    sizes = arguments.bytes or [16, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
    found = sums(sizes, arguments.rounds, gloo)
    found.append(training(arguments.layers, arguments.width, arguments.rounds, gloo))
    if dist.get_rank() == 0:
        for fields in found:
            if arguments.json:
                print(json.dumps(fields), flush=True)
            else:
                print(
                    "  ".join(f"{name} {value:.4g}" for name, value in fields.items()), flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
