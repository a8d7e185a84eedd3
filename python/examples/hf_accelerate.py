"""Trains a small network in a loop of one's own with Hugging Face's Accelerate.

    torchrun --nproc-per-node 2 python/examples/hf_accelerate.py
    bpslaunch --local 2 python python/examples/hf_accelerate.py --backend gloo

On GPUs the backend is given by ``InitProcessGroupKwargs``. On CPUs Accelerate accepts no name but
gloo and mpi, and takes a process group that is there already.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="byteps", help="as init_process_group takes it")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    use_cpu = not torch.cuda.is_available()
    if use_cpu:
        dist.init_process_group(arguments.backend)
    handlers = [] if use_cpu else [InitProcessGroupKwargs(backend=arguments.backend)]
    accelerator = Accelerator(cpu=use_cpu, gradient_accumulation_steps=2, kwargs_handlers=handlers)
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True)
    )
    for epoch in range(arguments.epochs):
        for batch, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)
    rows = accelerator.gather_for_metrics(model(inputs[:3]))
    assert rows.shape[0] == 3 * accelerator.num_processes
    assert dist.get_backend() == arguments.backend
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
