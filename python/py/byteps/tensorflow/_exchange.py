"""The operation of the engine in TensorFlow, which exchanges one tensor or several.

Outside of programs one operation takes all tensors that are exchanged together. In a program
(``tf.function``, a graph) each tensor has one of its own, which runs as soon as the tensor is
there, beside the rest of the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import tensorflow as tf
from tensorflow.python.eager import context, execute

from byteps import _dtypes, _native, _registry
from byteps._typed_errors import typed
from byteps.errors import ConfigError, MismatchError, UsageError
from byteps.tensorflow import _xla

#: The oldest release that this was tried with.
_FLOOR = (2, 15)
_OPERATION = "BytepsPushPull"

Call = TypeVar("Call", bound=Callable[..., Any])


class How(NamedTuple):
    """What is done with tensors that are exchanged together: on all ranks, or on these.

    ``backups`` is a :func:`byteps._backups.number_of`. The names of ``sized`` ones are followed by
    their first dimension, which in a program may be known when it runs alone: a name stands for one
    shape.
    """

    operation: str
    root: int = 0
    priority: int = 0
    encoding: str | None = None
    ranks: tuple[int, ...] | None = None
    sized: bool = False
    backups: int = 0


def _load() -> None:
    """Makes the operation known to TensorFlow."""
    release = tuple(int(number) for number in re.findall(r"\d+", tf.__version__)[:2])
    if release < _FLOOR:
        raise ConfigError(
            f"byteps.tensorflow needs TensorFlow {'.'.join(map(str, _FLOOR))} or later, and this "
            f"is {tf.__version__}: install a later one"
        )
    _native.tf_register()


_load()


def not_converted(function: Call) -> Call:
    """The function as it is also where AutoGraph converts who calls it: it has nothing to convert,
    and errors keep their classes."""
    return cast(Call, tf.autograph.experimental.do_not_convert(function))


def exchange(tensors: Sequence[Any], names: Sequence[str | None], how: How) -> list[Any]:
    """The results for these tensors, all under way together; the first is the most urgent."""
    if not tensors:
        return []
    _check(tensors, names)
    if tf.executing_eagerly():
        return _at_once(tensors, names, how)
    hows = [how._replace(priority=how.priority - index) for index in range(len(tensors))]
    return _in_program(tensors, names, hows)


def exchange_each(tensors: Sequence[Any], names: Sequence[str], hows: Sequence[How]) -> list[Any]:
    """:func:`exchange` in a program, where each tensor may go another way."""
    _check(tensors, names)
    return _in_program(tensors, names, hows)


def _check(tensors: Sequence[Any], names: Sequence[str | None]) -> None:
    chosen = [name for name in names if name]
    if len(set(chosen)) < len(chosen):
        twice = next(name for name in chosen if chosen.count(name) > 1)
        raise UsageError(f"the name '{twice}' stands twice in one group: give each its own")
    for tensor, name in zip(tensors, names, strict=True):
        label = f"'{name}'" if name else "a tensor without a name"
        _dtypes.summed(tensor.dtype.base_dtype.name, label)


def _in_program(
    tensors: Sequence[Any], names: Sequence[str | None], hows: Sequence[How]
) -> list[Any]:
    if _xla.compiles(tf.compat.v1.get_default_graph()):
        named = [name or place_in_program() for name in names]
        return _xla.exchange(tensors, named, hows, _moved_back)
    # What is computed from constants alone, TensorFlow would compute once for all runs.
    anchor = tf.timestamp()
    return [
        _operation(tensor, name, how, anchor)
        for tensor, name, how in zip(tensors, names, hows, strict=True)
    ]


def _attributes(
    dtypes: Sequence[Any], anchors: int, names: Sequence[str], how: How
) -> dict[str, Any]:
    return {
        "T": [dtype.base_dtype.as_datatype_enum for dtype in dtypes],
        "A": anchors,
        "names": list(names),
        "operation": how.operation,
        "root": how.root,
        "priority": how.priority,
        "encoding": how.encoding or _registry.NOT_ENCODED,
        "ranks": list(how.ranks or ()),
        "sized": int(how.sized),
        "backups": how.backups,
    }


def _at_once(tensors: Sequence[Any], names: Sequence[str | None], how: How) -> list[Any]:
    unnamed = _registry.unnamed(sum(not name for name in names), how.ranks)
    chosen = iter(unnamed)
    named = [name or next(chosen) for name in names]
    attributes = _attributes([tensor.dtype for tensor in tensors], 0, named, how)
    flat = tuple(item for pair in attributes.items() for item in pair)
    inputs = list(tensors)
    try:
        with typed(tf.errors.OpError):
            results = execute.execute(
                _OPERATION.encode(), len(inputs), inputs=inputs, attrs=flat, ctx=context.context()
            )
    except MismatchError:
        for name in unnamed:
            _registry.refused(name)
        raise
    _record(inputs, flat, results)
    return list(results)


def _record(inputs: Sequence[Any], flat: tuple[Any, ...], results: Sequence[Any]) -> None:
    """Lets tapes that watch the inputs know."""
    if execute.must_record_gradient():
        execute.record_gradient(_OPERATION, inputs, flat, results)


def _operation(tensor: Any, name: str | None, how: How, anchor: Any) -> Any:
    graph = tf.compat.v1.get_default_graph()
    named = name or _name_in(graph, graph.unique_name(_OPERATION, mark_as_used=False))
    attributes = _attributes([tensor.dtype], 1, [named], how)
    values = {key: _attribute(value) for key, value in attributes.items()}
    values["T"] = tf.compat.v1.AttrValue(
        list=tf.compat.v1.AttrValue.ListValue(type=attributes["T"])
    )
    operation = graph.create_op(
        _OPERATION, [tensor, anchor], [tensor.dtype.base_dtype], attrs=values, name=_OPERATION
    )
    flat = tuple(item for pair in attributes.items() for item in pair)
    _record(list(operation.inputs), flat, operation.outputs)
    return operation.outputs[0]


def _attribute(value: Any) -> Any:
    """A text, a number, or a list of either, as graphs have them."""
    if isinstance(value, str):
        return tf.compat.v1.AttrValue(s=value.encode())
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    lists = tf.compat.v1.AttrValue.ListValue
    if value and isinstance(value[0], str):
        return tf.compat.v1.AttrValue(list=lists(s=[one.encode() for one in value]))
    return tf.compat.v1.AttrValue(list=lists(i=value))


def place_in_program() -> str:
    """A name that follows from the place in the program that is traced, for what has none there."""
    graph = tf.compat.v1.get_default_graph()
    return _name_in(graph, graph.unique_name(_OPERATION))


def _name_in(graph: Any, name: str) -> str:
    """The name behind the places of a graph, so that tracing it again finds the same."""
    places = [name]
    while graph is not None:
        # Branches and bodies of loops are numbered in the order of all that is traced.
        places.append(re.sub(r"_\d+$", "", getattr(graph, "name", "graph")))
        graph = getattr(graph, "outer_graph", None)
    return "/".join(reversed(places))


def _gradient(op: Any, *gradients: Any) -> list[Any]:
    """What TensorFlow calls for the gradients of an operation."""
    how = How(
        tf.compat.as_str(op.get_attr("operation")),
        root=op.get_attr("root"),
        priority=op.get_attr("priority"),
        ranks=tuple(op.get_attr("ranks")) or None,
        backups=op.get_attr("backups"),
    )
    names = [tf.compat.as_str(name) for name in op.get_attr("names")]
    anchors: list[Any] = [None] * op.get_attr("A")
    return _moved_back(gradients, names, [how] * len(names)) + anchors


def _moved_back(gradients: Sequence[Any], names: Sequence[str], hows: Sequence[How]) -> list[Any]:
    """Of an average the average of the ranks' gradients, of a sum their sum; of a broadcast their
    average, which the root gets. All are of one operation and root."""
    operation, root = hows[0].operation, hows[0].root
    if operation not in ("sum", "average", "broadcast"):
        raise ConfigError(
            f"a push_pull with the operation {operation} has no gradient here: pass it "
            "tf.stop_gradient(tensor)"
        )
    wanted = "average" if operation == "broadcast" else operation
    how = hows[0]._replace(operation=wanted, root=0, encoding=None, sized=False)
    moved = exchange(gradients, [f"{name}.grad" for name in names], how)
    if operation == "broadcast" and _native.rank() != root:
        return [_zeros_after(one) for one in moved]
    return moved


def _zeros_after(result: Any) -> Any:
    """Zeros that wait for an exchange: a program in which nothing depended on it would leave it
    out, and the others would wait."""
    if not tf.executing_eagerly() and _xla.compiles(tf.compat.v1.get_default_graph()):
        # No compiler takes this for zeros: it would be none of infinity or NaN.
        return tf.where(tf.math.is_finite(result), result, tf.zeros_like(result)) * 0
    return tf.where(tf.timestamp() < 0, result, tf.zeros_like(result))


tf.RegisterGradient(_OPERATION)(_gradient)
