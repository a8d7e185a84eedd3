"""A rank of ``tests/kill-campaign``: trains until it is told to stop, and writes down each step.

Beside the model's gradients it sums numbers that show whose contributions are in each sum, and
which step they are of. One parameter of the model shows the same of averages of gradients.
"""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
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
#: Of these a part has so many. Each part of a sum is of whole contributions of its own.
PART = 4096 // 8
WIDTH = 32
#: Numbers of a parameter, whose gradients say likewise of whom an average is. They are floats,
#: which have 24 bits without rounding, so each process has fewer of its own.
MARKS = 1024
MARK_BITS = 3
PLACES = 6
#: Any number of them divides this, so an average is a whole number.
SHARES = 60
#: A step takes about so long, so that a moment within it can be hit.
PAUSE_SECONDS = 0.004


class Model(torch.nn.Module):
    """A small one, and a parameter whose gradient is what it is told to be.

    Four parameters of a part each: what the scheduler answers when these are declared still passes
    a black hole. With a part more, a job whose path to the scheduler is one ends by a stall that
    names the rank alone, and not its process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(WIDTH, WIDTH)
        self.b = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.marks = torch.nn.Parameter(torch.zeros(MARKS))

    def forward(self, inputs: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        outputs = self.b(torch.tanh(self.a(inputs)))
        return (outputs - inputs).square().mean() + (self.marks * marks).sum()


def digest(model: torch.nn.Module) -> str:
    """Equal for models whose parameters are equal, bit for bit."""
    data = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def residues(step: int, count: int = COUNT) -> torch.Tensor:
    """What a process contributes at this step, before it is shifted to the process's bits."""
    return 1 + (torch.arange(count) + step) % RESIDUE


def members(total: torch.Tensor, step: int) -> list[list[int]]:
    """Whose contributions of this step are in each part of a sum; ValueError if others are."""
    parts = zip(total.split(PART), residues(step).split(PART), strict=True)
    return [_members(part, own, step) for part, own in parts]


def _members(total: torch.Tensor, own: torch.Tensor, step: int) -> list[int]:
    mask = int(total[0]) // int(own[0])
    if not torch.equal(total, own * mask):
        wrong = (total != own * mask).nonzero().flatten().tolist()
        shown = [(at, hex(int(total[at]))) for at in wrong[:5]]
        raise ValueError(f"step {step}: {len(wrong)} of {PART} sums are of other steps: {shown}")
    found = [place for place in range(63 // BITS) if mask >> BITS * place & 1]
    if mask != sum(1 << BITS * place for place in found):
        raise ValueError(f"step {step}: {mask:#x} is no sum of contributions that count once each")
    return found


def _averages() -> Iterator[tuple[int, list[int]]]:
    """The average of ones that are shifted to the bits of each process, for any of them."""
    for count in range(1, PLACES + 1):
        for places in itertools.combinations(range(PLACES), count):
            total = sum(1 << MARK_BITS * place for place in places)
            yield SHARES // count * total, list(places)


AVERAGES = dict(_averages())


def averaged(marks: torch.Tensor, step: int) -> list[list[int]]:
    """Of whom averages of gradients of this step are, in any order; ValueError if they are divided
    by another number than that of those who are in them."""
    # Who divides by three may multiply by a third, which is rounded.
    shown, own = marks.double().round().long(), residues(step, MARKS)
    found = (shown // own).unique().tolist()
    if not torch.equal(shown // own * own, shown) or not all(one in AVERAGES for one in found):
        wrong = [one for one in found if one not in AVERAGES]
        raise ValueError(f"step {step}: averages that are none: {wrong[:5]}, {shown[:5].tolist()}")
    return [AVERAGES[one] for one in found]


def train(log: Path, stop: Path, place: int, mode: str) -> None:
    """Appends a JSON object for each event to `log`, and returns at a step after `stop` is there.

    `place` tells the processes of the job apart, below ``63 // BITS``; `mode` is how gradients are
    averaged: ``optimizer``, ``cross`` (CrossBarrier) or ``ddp``.
    """
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # The state is to come from elsewhere.
    model = Model()
    # A step from 0 leaves the average itself in the marks, in all modes.
    marks = {"params": [model.marks], "lr": 1.0, "momentum": 0.0}
    groups = [{"params": [*model.a.parameters(), *model.b.parameters()]}, marks]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
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
            with torch.no_grad():
                model.marks.zero_()
            shown = SHARES * residues(state.step, MARKS) << MARK_BITS * place
            optimizer.zero_grad()
            runs(inputs, shown.float()).backward()
            optimizer.step()
            if mode == "cross":
                optimizer.flush()
            shows = residues(state.step) << BITS * place
            handle = bps.push_pull_async(shows, average=False, name="who")
            said = bps.contributors(handle)
            total = bps.synchronize(handle)
            try:
                averages = averaged(-model.marks.detach(), state.step)
                who = members(total, state.step)
            except ValueError as error:
                write_step("wrong", state.step, what=str(error))
                raise
            state.step += 1
            # All are in the whole of it but those who died at this step.
            whole = sorted(set.intersection(*map(set, who)))
            sets = {"members": whole, "sums": who, "averages": averages, "contributors": said}
            write_step("step", state.step, **sets)
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
