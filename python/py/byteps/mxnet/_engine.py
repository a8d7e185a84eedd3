"""MXNet's engine: the functions of its C interface, and exchanges as its operations."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

import numpy as np

import mxnet as mx
from byteps import _native, _registry
from byteps._backups import WAITS, Backups
from byteps.errors import ConfigError, TensorError

#: The release whose C interface is known; there will be no other.
_RELEASE = "1.9.1"
#: What its library calls itself.
_NUMBER = 10901
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


def check_release() -> None:
    """Raises for a release whose interface, or whose Python, is another.

    The library is asked too: ``MXNET_LIBRARY_PATH`` may name that of another release.
    """
    own = getattr(mx, "__version__", "one without a version")
    if own != _RELEASE:
        raise _other_release(own)
    number = ctypes.c_int()
    library = mx.base._LIB
    library.MXGetVersion(ctypes.byref(number))
    if number.value != _NUMBER:
        major, rest = divmod(number.value, 10_000)
        release = ".".join(map(str, (major, *divmod(rest, 100))))
        raise _other_release(f"{own} with the library of {release}, {library._name}")


def _other_release(which: str) -> ConfigError:
    return ConfigError(
        f"byteps.mxnet speaks the C interface of MXNet {_RELEASE}, and this is {which}: install "
        f"mxnet=={_RELEASE}"
    )


# Before the modules beside this one ask MXNet for what other releases have not.
check_release()


def load() -> None:
    """Finds MXNet's functions; raises for a library that lacks one."""
    global _is_loaded
    with _lock:
        if _is_loaded:
            return
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
    ranks: tuple[int, ...] | None = None,
    settles: bool = False,
    backups: Backups = WAITS,
) -> _registry.Tensor:
    """Exchanges an array in place, behind what MXNet's engine does with it before; returns at once
    what it was declared as.

    It is among these ``ranks``, or all, and ``backups`` says for how many of them it does not wait.
    A name that the caller has not chosen for the job as a whole ``settles``: another one takes its
    place where it stands for another type or shape.

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
        ranks=ranks,
        encoding=encoding if is_encoded else None,
    )
    tensor = backups.over(tensor)
    if settles:
        tensor = _registry.settled(tensor)
    scope = _registry.scoped(tensor.name, ranks)
    with _lock:
        if scope not in _tokens:
            _tokens[scope] = mx.nd.zeros((1,), ctx=mx.cpu())
        token = _tokens[scope]
    (number,) = _registry.declare([tensor])
    size = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    _native.mxnet_push_pull(array.handle.value, token.handle.value, number, size, priority)
    return tensor
