"""Trains on scikit-learn's digits with torch's DistributedDataParallel; the backend is one word.

    torchrun --nproc-per-node 2 python/examples/ddp_digits.py
    torchrun --nproc-per-node 2 python/examples/ddp_digits.py --backend gloo

Nothing of this package is imported: torch finds the backend by its name. Each rank takes its share
of the images, and rank 0 prints the share of images that the model does not know and gets right.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="byteps", help="as init_process_group takes it")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    known = TensorDataset(images[:-300], labels[:-300])
    sampler = DistributedSampler(known)
    loader = DataLoader(known, batch_size=32, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    with torch.no_grad():
        right = (model.module(images[-300:]).argmax(1) == labels[-300:]).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy {right.item():.3f} over {arguments.backend}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
