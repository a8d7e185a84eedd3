"""Objects of Python's, sent from one rank to others as bytes: of no framework."""

from __future__ import annotations

import array
import hmac
import io
import pickle
from typing import Any

from byteps import _native, _registry
from byteps.errors import ConfigError, CorruptionError, TensorError

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

#: Everyone waits for what is broadcast, so it goes before gradients.
BROADCAST_PRIORITY = 1 << 30

_OBJECT_BYTES_MIN = 1024
_LENGTH = ".length"
_TAG_BYTES = 32


def check_root(root_rank: int, ranks: tuple[int, ...] | None) -> None:
    """Raises unless this rank can broadcast to these; to all where they are None."""
    if not 0 <= root_rank < _native.size():
        raise ConfigError(
            f"broadcast from rank {root_rank}: the ranks are 0 to {_native.size() - 1}"
        )
    if ranks is not None and root_rank not in ranks:
        raise ConfigError(
            f"broadcast from rank {root_rank} among ranks {list(ranks)}: the root is one of them, "
            "by its number in the job"
        )


def _broadcast(
    memory: array.array[int], dtype: str, root: int, name: str, ranks: tuple[int, ...] | None
) -> None:
    """Overwrites the memory with that of the root, which has as many elements."""
    check_root(root, ranks)
    shape = (len(memory),)
    tensor = _registry.Tensor(name, dtype, shape, "broadcast", root, ranks=ranks)
    address = memory.buffer_info()[0]
    send = _registry.Send(tensor, address, address, BROADCAST_PRIORITY)
    _registry.synchronize(_registry.start([send], memory, lambda memory: memory))


def _tag(key: bytes, data: bytes, pickled: bool) -> bytes:
    return hmac.digest(key, bytes([pickled]) + data, "sha256")


def follow(tensor: _registry.Tensor) -> None:
    """To be called when this rank takes part in a broadcast on whose result it does not look.

    Where it is that of an object, its key is used up, as on the ranks that look.
    """
    name = tensor.name.removesuffix(_LENGTH)
    if tensor.operation == "broadcast" and name != tensor.name:
        _native.object_key(_registry.scoped(name, tensor.ranks), tensor.root)


def broadcast_object(obj: Any, root_rank: int, name: str, ranks: tuple[int, ...] | None) -> Any:
    """The object of ``root_rank``, as :func:`byteps.torch.broadcast_object` documents it."""
    data, cause = b"", None
    try:
        # Asked before anything can fail, so that all ranks count alike.
        key = _native.object_key(_registry.scoped(name, ranks), root_rank)
    except (OverflowError, UnicodeEncodeError):
        key = None  # No rank and no name: the broadcast says so below.
    if _native.rank() == root_rank:
        buffer = io.BytesIO()
        try:
            (cloudpickle or pickle).dump(obj, buffer)
            data = buffer.getvalue()
        except Exception as error:  # Whatever the object's own methods raise.
            # The other ranks wait for bytes: they get the reason in place of the object.
            data, cause = f"{type(error).__name__}: {error}".encode(errors="replace"), error
        if key is not None:
            data += _tag(key, data, cause is None)
    header = array.array("q", [len(data), cause is None])
    _broadcast(header, "i64", root_rank, f"{name}{_LENGTH}", ranks)
    count, pickled = header
    # A name stands for one size, so the bytes travel in one of a few sizes.
    room = max(_OBJECT_BYTES_MIN, 1 << (count - 1).bit_length()) if count > 1 else _OBJECT_BYTES_MIN
    payload = array.array("B", data.ljust(room, b"\0"))
    _broadcast(payload, "u8", root_rank, f"{name}.bytes.{room}", ranks)
    received = payload[: max(count, 0)].tobytes()
    if key is not None:
        received, tag = received[:-_TAG_BYTES], received[-_TAG_BYTES:]
        own = _tag(key, received, bool(pickled))
        if not hmac.compare_digest(tag, own):
            altered = CorruptionError(
                f"the object '{name}' of rank {root_rank} does not authenticate on rank "
                f"{_native.rank()}, so it was not unpickled: something between the two, or a "
                "server, changes what passes, or the ranks did not broadcast the same objects"
            )
            altered.rank, altered.ranks, altered.tensor = root_rank, (root_rank,), name
            raise altered
    if not pickled:
        reason = received.decode(errors="replace")
        raise TensorError(
            f"the object that rank {root_rank} broadcasts cannot be pickled ({reason}): send "
            "plain data, or a class that defines __reduce__"
        ) from cause
    return obj if _native.rank() == root_rank else pickle.loads(received)
