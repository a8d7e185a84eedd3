"""Small models that tests of torch train, and what they are trained on."""

from __future__ import annotations

import torch

import byteps.torch as bps

BATCH = 12


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 3, 3)
        self.hidden = torch.nn.Linear(3 * 4 * 4, 8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.hidden(torch.relu(self.conv(x)).flatten(1))))


def start():
    torch.manual_seed(3)
    return Net().double()


def batch(step):
    generator = torch.Generator("cpu").manual_seed(step)
    shapes = (BATCH, 1, 6, 6), (BATCH, 2)
    inputs, targets = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in shapes
    )
    device = torch.get_default_device()
    return inputs.to(device), targets.to(device)


def share(tensor):
    return tensor[bps.rank() :: bps.size()]


def loss_of(model, inputs, targets):
    return torch.nn.functional.mse_loss(model(inputs), targets)


def difference(one, other):
    return max(
        (a - b).abs().max().item()
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


class Branches(torch.nn.Module):
    """Each rank uses a branch of its own; one is used by none."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(4))
        self.never = torch.nn.Linear(3, 2)

    def forward(self, x, which):
        return self.branches[which](x)
