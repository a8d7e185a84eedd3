"""Trains a small network that goes on when a rank or a server is killed.

    bpslaunch --local 3 --servers 2 --elastic redo python python/examples/elastic.py

While it runs, kill a rank or a server (`kill -9`, by the process numbers that it prints): the
others form the job again and redo the step. With `--suicide STEP` the last rank kills itself there.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import byteps.torch as bps
import torch
from torch import nn

SAMPLES = 4096


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank in a step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep in each step")
    parser.add_argument("--suicide", type=int, default=-1, help="the last rank's last step")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    make = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 16, generator=make)
    targets = (inputs @ torch.randn(16, 1, generator=make)).tanh()
    data = torch.utils.data.TensorDataset(inputs, targets)

    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # From here on the others wait for a rank that comes to a running job: what takes long is done.
    bps.init()
    print(f"rank {bps.rank()} of {bps.size()} is process {os.getpid()}", flush=True)
    doomed = arguments.suicide >= 0 and bps.rank() == bps.size() - 1
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    # What every rank is to have: whoever joins or comes back gets it from those that go on.
    sampler = bps.elastic.ElasticSampler(data)
    state = bps.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)

    def changed() -> None:
        print(f"the job has {bps.size()} ranks now, and this is rank {bps.rank()}", flush=True)

    state.register_reset_callbacks([changed])

    @bps.elastic.run
    def train(state: bps.elastic.TorchState) -> None:
        while state.epoch < arguments.epochs:
            loader = torch.utils.data.DataLoader(data, arguments.batch, sampler=sampler)
            for number, (some, wanted) in enumerate(loader):
                optimizer.zero_grad()
                loss = (model(some) - wanted).square().mean()
                loss.backward()
                if doomed and state.step >= arguments.suicide:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                sampler.record_batch(number, arguments.batch)
                state.step += 1
                time.sleep(arguments.pause)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            if bps.rank() == 0:
                print(f"epoch {state.epoch}, step {state.step}: loss {loss:.4f}", flush=True)

    train(state)
    with torch.no_grad():
        loss = (model(inputs) - targets).square().mean()
    print(f"rank {bps.rank()} of {bps.size()}: final loss {loss:.6f}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
