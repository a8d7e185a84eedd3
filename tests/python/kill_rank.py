"""A rank of ``tests/kill-campaign``: trains until it is told to stop, and writes down each step.

Beside the model's gradients it sums numbers that show whose contributions are in each sum, and
which step they are of.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import byteps.torch as bps
from byteps import _native
from byteps.torch.cross_barrier import CrossBarrier
from byteps.torch.parallel import DistributedDataParallel

#: Bits of a sum that a process has for itself. Its contribution is at most `RESIDUE`, so that a
#: process that was counted twice shows as well.
BITS = 6
RESIDUE = 7
#: Numbers that are summed: some parts of 4 KiB, on more than one core.
COUNT = 1536
WIDTH = 32
#: A step takes about so long, so that a moment within it can be hit.
PAUSE_SECONDS = 0.004


def digest(model: torch.nn.Module) -> str:
    """Equal for models whose parameters are equal, bit for bit."""
    data = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def residues(step: int) -> torch.Tensor:
    """What a process contributes at this step, before it is shifted to the process's bits."""
    return 1 + (torch.arange(COUNT) + step) % RESIDUE


def members(total: torch.Tensor, step: int) -> list[int]:
    """Whose contributions of this step are in a sum; ValueError if anything else is."""
    own = residues(step)
    mask = int(total[0]) // int(own[0])
    if not torch.equal(total, own * mask):
        wrong = (total != own * mask).nonzero().flatten().tolist()
        shown = [(at, hex(int(total[at]))) for at in wrong[:5]]
        raise ValueError(f"step {step}: {len(wrong)} of {COUNT} sums are of other steps: {shown}")
    found = [place for place in range(63 // BITS) if mask >> BITS * place & 1]
    if mask != sum(1 << BITS * place for place in found):
        raise ValueError(f"step {step}: {mask:#x} is no sum of contributions that count once each")
    return found


def train(log: Path, stop: Path, place: int, mode: str) -> None:
    """Appends a JSON object for each event to `log`, and returns at a step after `stop` is there.

    `place` tells the processes of the job apart, below ``63 // BITS``; `mode` is how gradients are
    averaged: ``optimizer``, ``cross`` (CrossBarrier) or ``ddp``.
    """
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # The state is to come from elsewhere.
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(event: str, **values: object) -> None:
        line = {"at": time.time(), "event": event, "pid": os.getpid(), "place": place, **values}
        os.write(out, (json.dumps(line) + "\n").encode())

    def write_step(event: str, step: int, **values: object) -> None:
        job = {"rank": bps.rank(), "size": bps.size(), "epoch": _native.epoch()}
        write(event, step=step, digest=digest(model), **job, **values)

    write("begun")
    bps.init()
    if mode == "cross":
        optimizer = CrossBarrier(model, optimizer)
    elif mode == "optimizer":
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    runs = DistributedDataParallel(model) if mode == "ddp" else model
    write("joined")

    @bps.elastic.run
    def steps(state: bps.elastic.TorchState) -> None:
        write_step("synchronized", state.step)
        while True:
            seed = 1000 * state.step + bps.rank()
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            (runs(inputs) - inputs).square().mean().backward()
            optimizer.step()
            if mode == "cross":
                optimizer.flush()
            shows = residues(state.step) << BITS * place
            total = bps.push_pull(shows, average=False, name="who")
            try:
                who = members(total, state.step)
            except ValueError as error:
                write_step("wrong", state.step, what=str(error))
                raise
            state.step += 1
            write_step("step", state.step, members=who)
            # All ranks see it at the same step.
            ends = torch.tensor([float(stop.exists())])
            if bps.push_pull(ends, average=False, name="stop").item():
                return
            time.sleep(PAUSE_SECONDS)
            state.commit()

    steps(bps.elastic.TorchState(model, optimizer, step=0))
    write("returned")
    bps.shutdown()
    write("done")


if __name__ == "__main__":  # Under a launcher.
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"]), sys.argv[3])
