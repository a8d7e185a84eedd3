"""Trains a tiny language model with the Trainer of Hugging Face's transformers.

    torchrun --nproc-per-node 2 python/examples/hf_trainer.py
    bpslaunch --local 2 python python/examples/hf_trainer.py --backend gloo

On GPUs the backend is one argument of ``TrainingArguments``. On CPUs the Trainer's Accelerate
accepts no name but gloo and mpi, and takes a process group that is there already.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WORDS, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset):
    """Sequences of numbers that go up by one."""

    def __len__(self) -> int:
        return WORDS

    def __getitem__(self, first: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(LENGTH) + first) % WORDS
        return {"input_ids": numbers, "labels": numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="byteps", help="as init_process_group takes it")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    use_cpu = not torch.cuda.is_available()
    if use_cpu:
        dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                use_cpu=use_cpu,
                ddp_backend=None if use_cpu else arguments.backend,
                max_steps=arguments.steps,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Counting(),
        )
        trainer.train()
    assert dist.get_backend() == arguments.backend
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
