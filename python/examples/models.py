"""The networks of the examples: torchvision's by name where it is installed, else those below.

ResNet18, ResNet50 and VGG16 are here with torchvision's shapes, so that times can be compared; the
fourth, ``small``, is for trying things out on a CPU.
"""

from __future__ import annotations

import torch
from torch import nn

try:
    import torchvision
except ImportError:
    torchvision = None


def make(name: str) -> tuple[nn.Module, str, int]:
    """The network of this name, where it comes from, and the height and width of its images."""
    if name in BUILT_IN and (torchvision is None or name == "small"):
        network, pixels = BUILT_IN[name]
        return network(), "built in", pixels
    if torchvision is None:
        raise SystemExit(
            f"--model {name}: torchvision, which has it, is not installed (pip install "
            f"torchvision); without it there are {', '.join(BUILT_IN)}"
        )
    try:
        network = torchvision.models.get_model(name, weights=None)
    except ValueError as error:
        raise SystemExit(f"--model {name}: {error}") from error
    return network, f"torchvision {torchvision.__version__}", 299 if "inception" in name else 224


def convolution(inputs: int, outputs: int, width: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias, and the normalisation that has one."""
    layer = nn.Conv2d(inputs, outputs, width, stride, padding=width // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """Layers whose result is added to their input, which is adapted where the shapes differ."""

    def __init__(self, layers: list[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        shortcut = [] if same else convolution(inputs, outputs, 1, stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.shortcut(images))


def basic(inputs: int, width: int, stride: int) -> tuple[Residual, int]:
    """Two convolutions of 3 x 3."""
    layers = [*convolution(inputs, width, 3, stride), nn.ReLU(), *convolution(width, width, 3)]
    return Residual(layers, inputs, width, stride), width


def bottleneck(inputs: int, width: int, stride: int) -> tuple[Residual, int]:
    """A convolution of 3 x 3 between two of 1 x 1, of which the last widens."""
    layers = [*convolution(inputs, width, 1), nn.ReLU()]
    layers += [*convolution(width, width, 3, stride), nn.ReLU()]
    layers += convolution(width, 4 * width, 1)
    return Residual(layers, inputs, 4 * width, stride), 4 * width


def resnet(block, depths: tuple[int, ...]) -> nn.Module:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            layer, channels = block(channels, 64 << stage, stride)
            layers.append(layer)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 49, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def small() -> nn.Module:
    """0.9 million parameters, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [*convolution(inputs, outputs, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 1000)]
    return nn.Sequential(*layers)


BUILT_IN = {
    "resnet18": (lambda: resnet(basic, (2, 2, 2, 2)), 224),
    "resnet50": (lambda: resnet(bottleneck, (3, 4, 6, 3)), 224),
    "vgg16": (vgg16, 224),
    "small": (small, 32),
}
