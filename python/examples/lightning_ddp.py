"""Trains a small network with Lightning's Trainer; the backend is an argument of its strategy.

torchrun --nproc-per-node 2 python/examples/lightning_ddp.py
bpslaunch --local 2 python python/examples/lightning_ddp.py --backend gloo
"""

import argparse
import os
import tempfile

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sines(lightning.LightningModule):
    """Learns sums of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            loss = self.trainer.callback_metrics["loss"].item()
            print(f"epoch {self.current_epoch}: loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="byteps", help="as init_process_group takes it")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    lightning.seed_everything(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=arguments.backend),
            max_epochs=arguments.epochs,
            gradient_clip_val=1.0,
            sync_batchnorm=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Sines(), DataLoader(data, batch_size=8, shuffle=True))
    assert dist.get_backend() == arguments.backend
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
