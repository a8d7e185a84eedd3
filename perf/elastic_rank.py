"""A rank of `elastic.py`: trains until it is told to stop, and writes down each step."""

import hashlib
import json
import os
import time
from pathlib import Path

import torch

import byteps.torch as bps
from byteps import _native
from byteps.torch.cross_barrier import CrossBarrier
from byteps.torch.parallel import DistributedDataParallel

WIDTH_LARGE = 1024
# Parameters of larger models are compared by their sums: a digest would take as long as a step.
DIGEST_BYTES_MAX = 16 << 20


def model_of(megabytes: float) -> torch.nn.Module:
    """Layers of so many bytes of parameters in all."""
    width = min(WIDTH_LARGE, int((megabytes * 2**20 / 4 / 4) ** 0.5))
    layers = max(1, round(megabytes * 2**20 / 4 / width / (width + 1)))
    layer = [torch.nn.Linear(width, width) for _ in range(layers)]
    return torch.nn.Sequential(*layer)


def digest(model: torch.nn.Module) -> str:
    """Equal for models whose parameters are equal, bit for bit."""
    tensors = [param.detach() for param in model.parameters()]
    if sum(tensor.nbytes for tensor in tensors) <= DIGEST_BYTES_MAX:
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[
            :16
        ]
    sums = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()[:16]


def train(log: Path, megabytes: float, stop: Path, mode: str, threads: int = 1) -> None:
    """Appends one JSON object for each finished step to `log`, and returns at a step after the file `stop` is there.

    `mode` is how gradients are averaged: `optimizer` (DistributedOptimizer), `cross` (CrossBarrier) or `ddp`
    (DistributedDataParallel). `threads` are torch's.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(os.getpid())  # The state is to come from elsewhere.
    model = model_of(megabytes)
    width = model[0].in_features
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    # Once this is a member, the others wait for it.
    bps.init()
    if mode == "cross":
        optimizer = CrossBarrier(model, optimizer)
    elif mode == "optimizer":
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    runs = DistributedDataParallel(model) if mode == "ddp" else model
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(**values: object) -> None:
        place = {
            "pid": os.getpid(),
            "rank": bps.rank(),
            "size": bps.size(),
            "epoch": _native.epoch(),
        }
        os.write(out, (json.dumps({"at": time.time(), **place, **values}) + "\n").encode())

    @bps.elastic.run
    def steps(state: bps.elastic.TorchState) -> None:
        write(event="synchronized", step=state.step, digest=digest(model))
        while True:
            began = time.time()
            # A rank has the same batch at every step, so that the loss falls with each of them.
            inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(bps.rank()))
            optimizer.zero_grad()
            loss = (runs(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if mode == "cross":
                optimizer.flush()
            state.step += 1
            lr = optimizer.param_groups[0]["lr"]
            # The digest is the experiment's, and no part of the step.
            own = {"at": time.time(), "began": began, "loss": loss.item(), "lr": lr}
            write(event="step", step=state.step, digest=digest(model), **own)
            # All ranks see it at the same step.
            if bps.push_pull(torch.tensor([float(stop.exists())]), name="stop").item():
                return
            state.commit()

    steps(bps.elastic.TorchState(model, optimizer, schedule=schedule, step=0))
    bps.shutdown()
