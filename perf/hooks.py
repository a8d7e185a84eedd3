"""What hooks cost: training of many tiny parameters by this package, by DistributedDataParallel, and without either.

    bpslaunch --local 2 --servers 0 .venv/bin/python perf/hooks.py [--json]

`bps-perf hooks` starts it so, and says where it was measured. The model is a chain of LayerNorms, each with two
parameters and next to nothing to compute. Ways to train it take turns, round by round, in the same processes:

    alone     no hooks, and nothing is sent
    ddp       DistributedDataParallel over gloo
    ours      DistributedOptimizer
    each      a hook at each parameter that sends its gradient by itself, by push_pull_async_inplace
    cross     CrossBarrier

A figure is the median over the rounds of the slowest rank's mean of the steps of a round. A step is from the end of a
forward pass to the end of the next, so that it counts whole wherever a way waits for what it sent.
`us_per_parameter` is what a way takes longer than `alone`, by the number of parameters. `gc_ms` is the time of a step,
or of that part of it, in which Python's garbage collector ran: the mean over all rounds of the slowest rank's. It hides
from medians, since a full collection is rare and long.
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import byteps.torch as bps
from beside_gloo import join, slowest
from gpu_rank import Clock, Training, Work, sgd

# Rounds; in the 105 steps that they have as a rule, CrossBarrier finds out whether to overlap.
WARM_UP = 21
WAYS = ("alone", "ddp", "ours", "each", "cross")
WORKS = ("forward", "backward", "step")


def chain(layers: int, size: int) -> Work:
    """A model that is the same on all ranks, and an input and an aim of this rank's own."""
    width = max(size // 4, 1)
    model = nn.Sequential(*[nn.LayerNorm(width) for _ in range(layers)])
    torch.manual_seed(1000 + bps.rank())
    return Work(model, (torch.randn(1, width),), torch.randint(width, (1,)), sgd)


class Collector:
    """The seconds in which Python's garbage collector ran, so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


class Moment(NamedTuple):
    """When, and how long the garbage collector had run by then; in seconds."""

    at: float
    collected: float


class Trained:
    """A copy of the model that is trained in one way, and how long that took."""

    def __init__(self, way: str, work: Work, collector: Collector) -> None:
        self.collector = collector
        device = torch.device("cpu")
        self.training = Training("alone" if way == "each" else way, work, "fp32", device)
        self.clock = Clock(device)
        # Of each round, by part of a step: milliseconds, and how many of them were the collector's.
        self.rounds: list[list[float]] = []
        self.collected: list[list[float]] = []
        self.handles: list[int] = []
        if way == "each":
            for name, param in self.training.raw.named_parameters():
                param.register_post_accumulate_grad_hook(self._sender(f"each.{name}"))

    def _sender(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda param: self.handles.append(bps.push_pull_async_inplace(param.grad, name=name))

    def _now(self) -> Moment:
        return Moment(time.perf_counter(), self.collector.seconds)

    def _step(self) -> tuple[Moment, Moment, Moment]:
        """The moments when its forward pass began and ended, and when its backward pass ended."""
        training = self.training
        training.optimizer.zero_grad()
        begin = self._now()
        loss = training.loss(training.work.inputs, training.work.aim)
        middle = self._now()
        loss.backward()
        end = self._now()
        while self.handles:
            bps.synchronize(self.handles.pop())
        training.optimizer.step()
        return begin, middle, end

    def train(self, steps: int) -> None:
        """A round of so many steps after a first one, whose forward pass has none before it."""
        dist.barrier()
        moments = [self._step() for _ in range(steps + 1)]
        self.training.finish(self.clock)
        parts = []
        for of in range(len(Moment._fields)):
            forward = sum(middle[of] - begin[of] for begin, middle, _ in moments[1:])
            backward = sum(end[of] - middle[of] for _, middle, end in moments[:-1])
            whole = moments[-1][1][of] - moments[0][1][of]
            parts += [seconds * 1e3 / steps for seconds in (forward, backward, whole)]
        slow = slowest(parts)
        self.rounds.append(slow[: len(WORKS)])
        self.collected.append(slow[len(WORKS) :])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are what they should be, but for the order of sums."""
    return torch.allclose(one, other, atol=1e-5)


def check(trained: dict[str, Trained]) -> None:
    """All ways have come to the same parameters; where there is one rank, to those of `alone` too."""
    models = {way: list(one.training.raw.parameters()) for way, one in trained.items()}
    peer = models["ddp"]
    for way, model in models.items():
        if (way != "alone" or bps.size() == 1) and not all(map(same, model, peer)):
            raise AssertionError(
                f"the parameters differ from those of DistributedDataParallel: {way}"
            )


def results(arguments: argparse.Namespace, trained: dict[str, Trained]) -> list[dict[str, object]]:
    """A row for each part of a step and way."""
    rows, count = [], 2 * arguments.layers
    for index, work in enumerate(WORKS):
        times = {
            way: sorted(one[index] for one in that.rounds[WARM_UP:])
            for way, that in trained.items()
        }
        middles = {way: statistics.median(one) for way, one in times.items()}
        collected = {
            way: statistics.mean(one[index] for one in that.collected[WARM_UP:])
            for way, that in trained.items()
        }
        for way, middle in middles.items():
            rows.append({
                "work": work,
                "way": way,
                "parameters": count,
                "size_bytes": next(iter(trained["alone"].training.raw.parameters())).nbytes,
                "workers": bps.size(),
                "rounds": arguments.rounds,
                "steps": arguments.steps,
                "ms_p50": middle,
                "ms_p99": times[way][min(arguments.rounds - 1, int(0.99 * arguments.rounds))],
                "us_per_parameter": (middle - middles["alone"]) * 1e3 / count,
                "gc_ms": collected[way],
                "peer_ms_p50": middles["ddp"],
                "ratio": middles["ddp"] / middle,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="what hooks cost, with many tiny parameters")
    parser.add_argument("--layers", type=int, default=80, help="LayerNorms, of two parameters each")
    parser.add_argument("--size", type=int, default=4096, help="bytes of a parameter")
    parser.add_argument("--rounds", type=int, default=31, help="timed rounds of all ways, in turn")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a way in a round")
    parser.add_argument("--json", action="store_true", help="print one JSON object a result")
    arguments = parser.parse_args()
    # Newer releases of torch rename arguments that older ones need.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    bps.init()
    join()
    work = chain(arguments.layers, arguments.size)
    collector = Collector()
    trained = {way: Trained(way, work, collector) for way in WAYS}
    for number in range(arguments.rounds + WARM_UP):
        for one in trained.values():
            one.train(arguments.steps)
        # Sums of more than two ranks differ by their order, and training makes more of it.
        if number == 0 or bps.size() <= 2:
            check(trained)
    if bps.rank() == 0:
        columns = ("work", "way", "ms_p50", "us_per_parameter", "gc_ms", "ratio")
        for row in results(arguments, trained):
            cells = (
                f"{row[name]:.3f}" if isinstance(row[name], float) else row[name]
                for name in columns
            )
            print(
                json.dumps(row)
                if arguments.json
                else "  ".join(map("{} {}".format, columns, cells)),
                flush=True,
            )
    bps.barrier()
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
