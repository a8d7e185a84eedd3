"""Exchanges in programs that XLA compiles (``jit_compile=True``), on CPUs: two custom calls.

A push hands its tensor to the engine and returns a ticket at once; one pull takes the tickets of
all tensors that are exchanged together, and gives their results. XLA runs the calls of a program
one after the other, so what is exchanged in one call is under way together, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops import control_flow_util

from byteps import _dtypes, _native, _registry
from byteps.errors import ConfigError

if TYPE_CHECKING:
    from byteps.tensorflow._exchange import How

_PUSH = "byteps_tensorflow_push"
_PULL = "byteps_tensorflow_pull"


def compiles(graph: Any) -> bool:
    """Whether what is traced into this graph is for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def _refuse(why: str) -> ConfigError:
    return ConfigError(
        f"push_pull in a program that is compiled by XLA: {why}; pass jit_compile=False to "
        "tf.function or model.compile"
    )


def exchange(
    tensors: Sequence[Any],
    names: Sequence[str],
    hows: Sequence[How],
    moved_back: Callable[[Sequence[Any], Sequence[str], Sequence[How]], list[Any]],
) -> list[Any]:
    """The results for these tensors, whose gradients ``moved_back`` exchanges."""
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.shape.is_fully_defined():
            raise _refuse(f"'{name}' has no fixed shape there, but {tensor.shape}")
    unknown = _native.xla_register_in_tensorflow()
    if unknown is not None:
        raise _refuse(f"this TensorFlow ({tf.__version__}) offers no way to do that: {unknown}")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchanged(*sent: Any) -> Any:
        tickets = [
            _call(_PUSH, [one], _text(one, name, how), [tf.TensorSpec([], tf.int64)])[0]
            for one, name, how in zip(sent, names, hows, strict=True)
        ]
        specs = [tf.TensorSpec(one.shape, one.dtype.base_dtype) for one in sent]
        sizes = ",".join(str(one.shape.num_elements() * one.dtype.size) for one in specs)
        results = _call(_PULL, tickets, sizes, specs)
        return list(results), lambda *gradients: moved_back(gradients, names, hows)

    return list(exchanged(*tensors))


def _call(target: str, operands: Sequence[Any], text: str, specs: Sequence[Any]) -> Sequence[Any]:
    return gen_xla_ops.xla_custom_call_v2(  # type: ignore[no-any-return]
        operands=list(operands),
        call_target_name=target,
        backend_config=text,
        has_side_effect=False,
        result_dtypes=[spec.dtype for spec in specs],
        result_shapes=[spec.shape for spec in specs],
    )


def _text(tensor: Any, name: str, how: How) -> str:
    """What ``python/src/xla/in_tensorflow.rs`` reads."""
    parts = (
        _dtypes.DTYPES[tensor.dtype.base_dtype.name],
        ",".join(map(str, tensor.shape.as_list())),
        how.operation,
        how.root,
        how.priority,
        how.encoding or _registry.NOT_ENCODED,
        ",".join(map(str, how.ranks or ())),
        how.backups,
        name,
    )
    return "|".join(map(str, parts))
