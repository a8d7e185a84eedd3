"""Trains a small network with FSDP2, sharded in groups of two ranks that replicate each other.

    torchrun --nproc-per-node 4 python/examples/fsdp_hybrid.py
    bpslaunch --local 4 python python/examples/fsdp_hybrid.py --backend gloo

On GPUs leave the shards of a host to NCCL, and give byteps the axis between hosts alone:
``init_device_mesh("cuda", ..., backend_override={"replicate": "byteps"})``.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SHARDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="byteps", help="as init_process_group takes it")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(16 * size, 8)
    wanted = inputs.sin().sum(1, keepdim=True)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rank::size]), wanted[rank::size])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / size:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
