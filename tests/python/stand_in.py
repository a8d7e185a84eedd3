"""Lets tensors of host memory pass for tensors of a GPU, where there is none.

With :class:`Gpu`, what the package asks of the engine is carried out by the engine on host memory,
and written down: which tensors were declared to be on a GPU, on which stream work was handed over,
which streams were told to wait for which results.

With :class:`Pipeline`, the engine takes them for tensors of a GPU too, and works on the stand-in
for libcuda and libnccl of ``tests/fake_gpu``, to which any address is one of a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from unittest import mock

import byteps.torch as bps
from byteps import _native, _registry
from byteps.errors import ConfigError
from byteps.torch import _gpu, _tensors

ROOT = Path(__file__).resolve().parents[2]


class _Pretence:
    """All tensors are on the GPU but those in ``in_host``."""

    def __init__(self):
        self.in_host = {}

    def host(self, tensor):
        """Puts a tensor into host memory, as it were."""
        self.in_host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def holds(self, tensor):
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() not in self.in_host

    def packed(self, packed):
        def packed_here(tensor):
            copy = packed(tensor)
            return copy if self.holds(tensor) else self.host(copy)

        return mock.patch.object(_tensors, "packed", packed_here)


class _Moment:
    """Of a stream that is never behind its host."""

    def __init__(self, device):
        self._at = time.perf_counter()

    def since(self, earlier):
        return (self._at - earlier._at) * 1e3


class Gpu(_Pretence):
    """The one GPU that there seems to be to the package."""

    def __init__(self):
        super().__init__()
        self.stream = 7
        self.opened = self.used = None
        self.declared = {}
        self.handed_over = []
        self.waits = []
        self.kept = []
        self._natives = set()

    def open_gpu(self, ordinal):
        if self.opened not in (None, ordinal):
            raise ConfigError(f"cuda:{self.opened} is open, so cuda:{ordinal} cannot be")
        self.opened = ordinal

    def use_gpu(self, ordinal):
        if {self.opened, self.used} - {None, ordinal}:
            raise ConfigError(f"another GPU is in use, so cuda:{ordinal} cannot be")
        self.used = ordinal

    @contextlib.contextmanager
    def plugged_in(self):
        declare, push_pull, release = _native.declare, _native.push_pull, _native.release
        push_batch = _native.push_batch
        use_gpu = _registry.use_gpu

        def declare_here(tensors):
            for name, _, _, _, _, device, *_ in tensors:
                assert not device or self.opened is not None, "declared before its GPU was open"
                self.declared[name] = device
            return declare([(*tensor[:5], False, *tensor[6:]) for tensor in tensors])

        def push_pull_gpu(tensors, stream):
            assert stream == self.stream, "handed over on another stream than the current one"
            handles = push_pull(tensors)
            self.handed_over.append((stream, len(tensors)))
            self._natives.update(handles)
            return handles

        def push_batch_here(hooks, indices, addresses, stream):
            assert stream in (None, self.stream), "handed over on another stream"
            if stream is not None:
                self.handed_over.append((stream, len(indices)))
            return push_batch(hooks, indices, addresses, None)

        def stream_wait_batch(batch, stream, positions=None):
            if positions is None:
                batch.wait()
            for position in positions or ():
                assert batch.poll(position), "not waited for before"
            self.waits.append((stream, positions and len(positions)))

        def stream_wait(handles, stream):
            assert handles and self._natives.issuperset(handles)
            assert all(_native.poll(handle) for handle in handles), "not waited for before"
            self.waits.append((stream, len(handles)))

        def release_here(handle):
            self._natives.discard(handle)
            release(handle)

        with (
            mock.patch.multiple(
                _native,
                declare=declare_here,
                open_gpu=self.open_gpu,
                use_gpu=self.use_gpu,
                push_pull_gpu=push_pull_gpu,
                stream_wait=stream_wait,
                release=release_here,
                push_batch=push_batch_here,
                stream_wait_batch=stream_wait_batch,
            ),
            self.packed(_tensors.packed),
            mock.patch.multiple(_registry, _gpu=None, _gpu_alone=None),
            # A tensor of the CPU says no number of its device.
            mock.patch.object(
                _registry,
                "use_gpu",
                lambda number, jointly=True: use_gpu(number or 0, jointly),
            ),
            mock.patch.multiple(
                _gpu,
                holds=self.holds,
                current_stream=lambda device: self.stream,
                stream_getter=lambda device: lambda: self.stream,
                keep_for_current_stream=lambda tensors: self.kept.append(
                    (self.stream, [tensor.data_ptr() for tensor in tensors])
                ),
                Moment=_Moment,
            ),
        ):
            yield self


class Pipeline(_Pretence):
    """A GPU for the engine too. ``libraries(folder)`` is the environment that its process needs."""

    def __init__(self):
        super().__init__()
        self.handed_over = 0

    @staticmethod
    def libraries(folder):
        """Variables that show a process fake GPUs, or None where those are not built."""
        built = [ROOT / "target" / kind / "libbps_fake_gpu.so" for kind in ("debug", "debug/deps")]
        library = next((path for path in built if path.exists()), None)
        if library is None:
            return None
        (folder / "libcuda.so.1").symlink_to(library)
        (folder / "libnccl.so.2").symlink_to(library)
        # torch has an NCCL of its own, which must not be found in the first folder's place.
        return {
            "LD_LIBRARY_PATH": str(folder),
            "BPS_NCCL_LIBRARY": str(folder / "libnccl.so.2"),
            "FAKE_GPU_DELAY_US": "50",
        }

    @contextlib.contextmanager
    def plugged_in(self):
        cuda, stream_wait, use_gpu = _cuda(), _native.stream_wait, _registry.use_gpu
        push_pull_gpu, push_batch = _native.push_pull_gpu, _native.push_batch
        stream_wait_batch = _native.stream_wait_batch

        def push_batch_here(hooks, indices, addresses, stream):
            self.handed_over += 0 if stream is None else len(indices)
            return push_batch(hooks, indices, addresses, stream)

        def stream_wait_batch_here(batch, stream, positions=None):
            stream_wait_batch(batch, stream, positions)
            assert cuda.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

        def push_pull_here(tensors, stream):
            self.handed_over += len(tensors)
            return push_pull_gpu(tensors, stream)

        def stream_wait_here(handles, stream):
            stream_wait(handles, stream)
            # torch works on host memory at once, so the host has to wait for the stream.
            assert cuda.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

        with (
            mock.patch.object(_native, "push_pull_gpu", push_pull_here),
            mock.patch.multiple(
                _native,
                stream_wait=stream_wait_here,
                push_batch=push_batch_here,
                stream_wait_batch=stream_wait_batch_here,
            ),
            self.packed(_tensors.packed),
            mock.patch.object(
                _registry,
                "use_gpu",
                lambda number, jointly=True: use_gpu(number or bps.local_rank(), jointly),
            ),
            mock.patch.multiple(
                _gpu,
                holds=self.holds,
                current_stream=lambda device: 0,
                stream_getter=lambda device: lambda: 0,
                keep_for_current_stream=lambda tensors: None,
                Moment=_Moment,
            ),
        ):
            yield self


def _cuda():
    """The stand-in, with a context on this thread, in which stream 0 is."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), bps.local_rank()) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return cuda
