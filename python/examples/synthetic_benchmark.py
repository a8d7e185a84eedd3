"""Images a second of a network that trains on random images, as Horovod's benchmark measures it.

    bpslaunch --local 4 python python/examples/synthetic_benchmark.py --model vgg16
    bpslaunch --local 2 python python/examples/synthetic_benchmark.py --no-cuda --model small

One process for each GPU of the machine, or for as many parts of its CPU. Several machines take the
same command under bpslaunch with their ``DMLC_*`` variables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import byteps.torch as bps
import models
import torch
from byteps.torch.cross_barrier import CrossBarrier
from byteps.torch.parallel import DistributedDataParallel
from torch import nn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="resnet50", help="a network of torchvision or of models.py")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--num-warmup-batches", type=int, default=10, help="steps before anything is measured")
    add("--num-batches-per-iter", type=int, default=10, help="steps of one measurement")
    add("--num-iters", type=int, default=10, help="measurements")
    add("--fp16-pushpull", action="store_true", help="send gradients as float16")
    add("--no-cuda", action="store_true", help="train on the CPU")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--cross-barrier", action="store_true", help="CrossBarrier")
    how.add_argument("--ddp", action="store_true", help="byteps' DistributedDataParallel")
    arguments = parser.parse_args()
    for name in ("batch_size", "num_batches_per_iter", "num_iters"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is 1 or more")
    return arguments


def make_step(arguments: argparse.Namespace, device: torch.device) -> tuple[Callable, str]:
    """What trains for one step, and what to say of the network."""
    network, origin, pixels = models.make(arguments.model)
    network = network.to(device)
    compression = bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    if arguments.ddp:
        network = DistributedDataParallel(network, compression=compression)
    else:
        bps.broadcast_parameters(network.state_dict(), root_rank=0)
        if arguments.cross_barrier:
            steps = arguments.num_warmup_batches
            steps += arguments.num_batches_per_iter * arguments.num_iters
            optimizer = CrossBarrier(
                network, optimizer, network.named_parameters(), compression, num_steps=steps
            )
        else:
            optimizer = bps.DistributedOptimizer(optimizer, network.named_parameters(), compression)
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(arguments.batch_size, 3, pixels, pixels, device=device)
    labels = torch.randint(0, 1000, (arguments.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    parameters = sum(parameter.numel() for parameter in network.parameters())
    return step, f"{arguments.model} ({origin}), {parameters / 1e6:.1f} million parameters"


def log(text: str) -> None:
    if bps.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    cuda = not arguments.no_cuda and torch.cuda.is_available()
    kind = "GPU" if cuda else "CPU"
    if cuda:
        torch.cuda.set_device(bps.local_rank())
        torch.backends.cudnn.benchmark = True
    elif not arguments.no_cuda:
        log("torch sees no GPU: training on the CPU")
    device = torch.device("cuda", bps.local_rank()) if cuda else torch.device("cpu")
    step, described = make_step(arguments, device)

    def steps(count: int) -> float:
        """Seconds for so many steps, with what the GPU has still to do after the last."""
        begun = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    way = "CrossBarrier" if arguments.cross_barrier else "DistributedOptimizer"
    log(f"Model: {described}")
    log(f"Batch size: {arguments.batch_size}")
    log(f"Number of {kind}s: {bps.size()}")
    log(f"Way: {'DistributedDataParallel' if arguments.ddp else way}")
    log("Running warmup...")
    steps(arguments.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for number in range(arguments.num_iters):
        seconds = steps(arguments.num_batches_per_iter)
        rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {kind}")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
    log(
        f"Total img/sec on {bps.size()} {kind}(s): "
        f"{bps.size() * mean:.1f} +-{bps.size() * spread:.1f}"
    )
    bps.shutdown()


if __name__ == "__main__":
    main()
