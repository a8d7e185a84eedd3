"""Trains a small transformer to tell the next character of a text, with each codec in turn.

    BPS_LOCAL_REDUCE=0 bpslaunch --local 2 --servers 1 --server-cores 1 \
        python python/examples/compression_text.py

The text is what this repository's documents say, of which the last tenth is held out; --text takes
another. Codecs are for what goes to servers, so BPS_LOCAL_REDUCE=0 lets each rank be a machine of
its own. Every codec begins with the same parameters and sees the same characters; at the end all
ranks must have the same bits, and the share of held-out characters that are told right must be
within --tolerance of what gradients that are sent whole give. The codecs that leave much out have
the momentum in front of them, and not the optimizer: behind them it would move parameters by what
is late already. Two of them leave out so much that they learn more slowly all the same, as
docs/compression.md says: they are run with --only, and begin with the --first steps as int8.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import byteps.torch as bps
import torch
from byteps.torch import Compression
from torch import nn

MOMENTUM = 0.9
CODECS = {
    "none": Compression.none,
    "bf16": Compression.wire_bf16(),
    "fp8_e4m3": Compression.fp8_e4m3(),
    "int8": Compression.int8(),
    "dithering": Compression.dithering(levels=15),
    "onebit": Compression.onebit(momentum=MOMENTUM),
    "topk": Compression.topk(0.01, momentum=MOMENTUM),
    "randomk": Compression.randomk(0.1, seed=1, momentum=MOMENTUM),
}
#: These learn as fast as gradients that are sent whole.
CLOSE = ("bf16", "fp8_e4m3", "int8", "dithering", "onebit")
#: These have the momentum, and the optimizer has none.
STRONG = ("onebit", "topk", "randomk")
#: As these, gradients may be sent in the first steps.
MILD = Compression.int8(momentum=MOMENTUM)
DOCUMENTS = Path(__file__).parents[2] / "docs"
WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 64
HELD_OUT_WINDOWS = 256


class Transformer(nn.Module):
    """Pre-norm decoder (Vaswani et al. 2017, arXiv 1706.03762; GPT-2's order of the norms)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        # Copies of one layer, which TransformerEncoder makes, would begin alike.
        for parameter in self.layers.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of shape (batch, CONTEXT, characters) for int64 text of shape (batch, CONTEXT)."""
        hidden = self.characters(text) + self.places
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


def load(paths: list[Path]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Numbers of the characters to train on, and of those held out, and how many there are."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(paths))
    if len(text) < 10 * CONTEXT * HELD_OUT_WINDOWS:
        raise SystemExit(
            f"a text of {len(text)} characters is too short: name longer ones with --text"
        )
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text])
    held_out = len(numbers) // 10
    return numbers[:-held_out], numbers[-held_out:], len(known)


def windows(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read from each start on, and what follows each character of it."""
    places = starts[:, None] + torch.arange(CONTEXT)
    return text[places], text[places + 1]


def train(
    name: str, texts: tuple[torch.Tensor, torch.Tensor, int], arguments: argparse.Namespace
) -> tuple[float, float, torch.Tensor]:
    """The accuracy on what was held out, seconds, and all parameters."""
    text, held_out, characters = texts
    steps, batch, rate = arguments.steps, arguments.batch, arguments.rate
    is_strong = name in STRONG
    first = arguments.first if is_strong else 0
    torch.manual_seed(2)
    model = Transformer(characters)
    momentum = 0.0 if is_strong else MOMENTUM
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, cycle_momentum=False
    )
    codec = MILD if first else CODECS[name]
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    share, begun = batch // bps.size(), time.perf_counter()
    order = torch.Generator().manual_seed(3)
    for step in range(steps):
        if first and step == first:
            optimizer.set_compression(CODECS[name])
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=order)
        read, told = windows(text, starts[bps.rank() * share :][:share])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(read).flatten(0, 1), told.flatten()).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
        read, told = windows(held_out, starts)
        accuracy = (model(read).argmax(-1) == told).float().mean().item()
        parameters = torch.cat([param.flatten() for param in model.parameters()])
    return accuracy, seconds, parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32, help="windows of a global batch")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="steps that onebit, topk and randomk begin with as int8",
    )
    parser.add_argument("--rate", type=float, default=0.3, help="the largest learning rate")
    parser.add_argument("--text", type=Path, nargs="+", help="files to learn, in UTF-8")
    parser.add_argument("--only", nargs="+", choices=CODECS, default=CLOSE, help="beside none")
    parser.add_argument("--tolerance", type=float, default=0.01, help="accuracy that may be lost")
    arguments = parser.parse_args()
    texts = load(arguments.text or list(DOCUMENTS.glob("*.md")))
    # The layers are small, and would be sent whole.
    os.environ.setdefault("BYTEPS_MIN_COMPRESS_BYTES", "1024")
    torch.set_num_threads(1)
    bps.init()
    whole, failed = 0.0, 0
    for name in CODECS:
        if name != "none" and name not in arguments.only:
            continue
        accuracy, seconds, parameters = train(name, texts, arguments)
        digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
        is_same = len(set(bps.allgather_object(digest))) == 1
        whole = accuracy if name == "none" else whole
        is_right = is_same and accuracy >= whole - arguments.tolerance
        failed += not is_right
        if bps.rank() == 0:
            same = "the same bits on all ranks" if is_same else "RANKS DIFFER"
            print(f"{name:12} accuracy {accuracy:.3f}, {seconds:5.1f} s, {same}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
