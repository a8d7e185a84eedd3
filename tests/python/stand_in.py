"""Lets tensors of host memory pass for tensors of a GPU, where there is none.

What the package then asks of the engine is carried out by the engine on host memory, and written
down: which tensors were declared to be on a GPU, on which stream work was handed over, which
streams were told to wait for which results. That the engine does as it is asked on a real GPU is
for ``test_gpu.py`` to show.
"""

from __future__ import annotations

import contextlib
from unittest import mock

from byteps import _native, _registry
from byteps.errors import ConfigError
from byteps.torch import _gpu, _tensors


class Gpu:
    """The one GPU that there seems to be; all tensors are on it but those in ``in_host``."""

    def __init__(self):
        self.stream = 7
        self.opened = None
        self.declared = {}
        self.handed_over = []
        self.waits = []
        self.kept = []
        self.in_host = {}
        self._natives = set()

    def host(self, tensor):
        """Puts a tensor into host memory, as it were."""
        self.in_host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def holds(self, tensor):
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() not in self.in_host

    def open_gpu(self, ordinal):
        if self.opened not in (None, ordinal):
            raise ConfigError(f"cuda:{self.opened} is open, so cuda:{ordinal} cannot be")
        self.opened = ordinal

    @contextlib.contextmanager
    def plugged_in(self):
        declare, push_pull, release = _native.declare, _native.push_pull, _native.release
        packed, use_gpu = _tensors._packed, _registry.use_gpu

        def declare_here(tensors):
            for name, *_, device in tensors:
                assert not device or self.opened is not None, "declared before its GPU was open"
                self.declared[name] = device
            return declare([(*tensor[:5], False) for tensor in tensors])

        def push_pull_gpu(tensors, stream):
            assert stream == self.stream, "handed over on another stream than the current one"
            handles = push_pull(tensors)
            self.handed_over.append((stream, len(tensors)))
            self._natives.update(handles)
            return handles

        def stream_wait(handles, stream):
            assert handles and self._natives.issuperset(handles)
            assert all(_native.poll(handle) for handle in handles), "not waited for before"
            self.waits.append((stream, len(handles)))

        def release_here(handle):
            self._natives.discard(handle)
            release(handle)

        def packed_here(tensor, in_host=False):
            copy = packed(tensor, in_host)
            return self.host(copy) if in_host or not self.holds(tensor) else copy

        with (
            mock.patch.multiple(
                _native,
                create=True,
                declare=declare_here,
                open_gpu=self.open_gpu,
                push_pull_gpu=push_pull_gpu,
                stream_wait=stream_wait,
                release=release_here,
            ),
            mock.patch.object(_tensors, "_packed", packed_here),
            mock.patch.object(_registry, "_gpu", None),
            # A tensor of the CPU says no number of its device.
            mock.patch.object(_registry, "use_gpu", lambda number: use_gpu(number or 0)),
            mock.patch.multiple(
                _gpu,
                holds=self.holds,
                current_stream=lambda device: self.stream,
                keep_for_current_stream=lambda tensors: self.kept.append(
                    (self.stream, [tensor.data_ptr() for tensor in tensors])
                ),
            ),
        ):
            yield self
