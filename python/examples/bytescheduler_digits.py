"""A program that was written for ByteScheduler on Horovod, unchanged, on real handwritten digits.

    bpslaunch --local 2 python -m bytescheduler python/examples/bytescheduler_digits.py

``horovod.torch`` is answered by byteps.torch, so no Horovod is installed for it. The digits are the
1,797 images that scikit-learn ships. At the end all ranks compare their parameters.
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn, optim

BATCH, EPOCHS, HELD_OUT, ACCURACY_MIN = 64, 12, 360, 0.9


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> int:
    # Set up standard model.
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # bytescheduler wrapper
    import bytescheduler.pytorch.horovod as bsc

    bsc.init()

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    batches = len(train) // BATCH
    num_steps = EPOCHS * batches

    # ByteScheduler, further wrap Horovod DistributedOptimizer
    optimizer = bsc.ScheduledOptimizer(model, optimizer, num_steps)

    for epoch in range(EPOCHS):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: batches * BATCH].view(batches, BATCH):
            share = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[share]), labels[share]).backward()
            optimizer.step()

    # The last step has waited, so parameters may be read.
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    differs = max((mine - other).abs().max().item() for other in hvd.allgather(mine[None]))
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    if hvd.rank() == 0:
        print(f"difference between the ranks' parameters: {differs}")
        print(f"accuracy on {HELD_OUT} held-out images: {accuracy:.3f} (at least {ACCURACY_MIN})")
    return 0 if differs == 0 and accuracy >= ACCURACY_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
