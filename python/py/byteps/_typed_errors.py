"""Errors that went through a compiled program, as the classes of :mod:`byteps.errors` again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from byteps import _native, errors

_TOLD = re.compile(r"byteps\.errors\.(\w+): (.*)", re.DOTALL)
# What TensorFlow adds: the node, and the operation that was called.
_ADDED = re.compile(r"\s*\[(\[\{\{|Op:).*", re.DOTALL)


@contextlib.contextmanager
def typed(*kinds: type[Exception]) -> Iterator[None]:
    """Raises errors of these kinds, whose texts name a class of ours, as that class."""
    try:
        yield
    except kinds as error:
        told = _TOLD.search(str(error))
        kind = getattr(errors, told[1], None) if told else None
        if told is None or kind is None or isinstance(error, errors.BytePSError):
            raise
        try:
            _native.raise_again(str(error))  # With its attributes, if the engine still knows it.
        except errors.BytePSError as original:
            raise original from error
        raise kind(_ADDED.sub("", told[2])) from error
