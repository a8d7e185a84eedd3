"""What torch.compile must not trace: calls of the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates what a compiled module runs as it is: the graph breaks there, without a warning."""
    # torch.compiler.disable is the same, and imports the compiler at once, which takes seconds.
    outside = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
