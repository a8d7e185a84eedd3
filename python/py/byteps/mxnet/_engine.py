"""MXNet's engine: the functions of its C interface, and exchanges as its operations."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

import numpy as np

import mxnet as mx
from byteps import _native, _registry
from byteps.errors import ConfigError, TensorError

#: The release whose C interface is known; there will be no other.
_RELEASE = "1.9.1"
_FUNCTIONS = (
    "MXEnginePushAsyncND",
    "MXShallowCopyNDArray",
    "MXNDArrayFree",
    "MXNDArrayToDLPack",
    "MXNDArrayCallDLPackDeleter",
    "MXGetLastError",
    # Of the C++ library that MXNet brings in: what its engine takes as an error.
    "_ZNSt13runtime_errorC1EPKc",
    "_ZNSt13runtime_errorD1Ev",
)
_DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
}

_lock = threading.Lock()
_is_loaded = False
#: An array for each name, which every exchange of the name is said to write: so they keep their
#: order, whatever arrays they are of.
_tokens: dict[str, Any] = {}


def load() -> None:
    """Finds MXNet's functions; raises for a release whose interface is another."""
    global _is_loaded
    with _lock:
        if _is_loaded:
            return
        if mx.__version__ != _RELEASE:
            raise ConfigError(
                f"byteps.mxnet speaks the C interface of MXNet {_RELEASE}, and this is "
                f"{mx.__version__}: install mxnet=={_RELEASE}"
            )
        library = mx.base._LIB
        found = (getattr(library, name, 0) for name in _FUNCTIONS)
        _native.mxnet_functions([ctypes.cast(it, ctypes.c_void_p).value or 0 for it in found])
        _is_loaded = True


def drain() -> None:
    """Waits for all operations. What failed says so where its array is waited for."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


def dtype_of(array: Any, name: str) -> str:
    """What the engine calls the array's type; raises for an array that cannot be exchanged."""
    if not isinstance(array, mx.nd.NDArray):
        raise TensorError(
            f"'{name}': byteps.mxnet exchanges arrays of MXNet, and this is {type(array)!r}"
        )
    if array.stype != "default":
        raise TensorError(
            f"'{name}' is stored as {array.stype}: only dense arrays can be exchanged; convert it "
            "with tostype('default')"
        )
    if array.context.device_type not in ("cpu", "cpu_pinned", "cpu_shared"):
        raise TensorError(
            f"'{name}' is on {array.context}: byteps.mxnet exchanges arrays in host memory; copy "
            "it with as_in_context(mx.cpu())"
        )
    dtype = np.dtype(array.dtype).name
    if dtype not in _DTYPES:
        raise TensorError(
            f"'{name}' is of type {dtype}: {', '.join(_DTYPES)} can be exchanged; convert it with "
            "astype"
        )
    return _DTYPES[dtype]


def exchange(
    array: Any,
    name: str,
    operation: str,
    root: int = 0,
    priority: int = 0,
    encoding: str | None = None,
) -> _registry.Tensor:
    """Exchanges an array in place, behind what MXNet's engine does with it before; returns at once
    what it was declared as.

    Raises :class:`byteps.errors.MismatchError` where another rank has declared the name
    differently; what fails later is an ``MXNetError`` for whoever waits for the array.
    """
    load()
    dtype = dtype_of(array, name)
    is_encoded = operation in ("average", "sum") and dtype in ("f16", "f32", "f64")
    tensor = _registry.Tensor(
        name,
        dtype,
        tuple(array.shape),
        operation,
        root,
        encoding=encoding if is_encoded else None,
    )
    with _lock:
        if name not in _tokens:
            _tokens[name] = mx.nd.zeros((1,), ctx=mx.cpu())
        token = _tokens[name]
    (number,) = _registry.declare([tensor])
    size = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    _native.mxnet_push_pull(array.handle.value, token.handle.value, number, size, priority)
    return tensor
