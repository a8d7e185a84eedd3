"""Random numbers that a test can draw again, where torch makes its tensors: on GPUs, too."""

from __future__ import annotations

import torch


def generator(seed: int) -> torch.Generator:
    """A generator of the default device, with this seed."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
