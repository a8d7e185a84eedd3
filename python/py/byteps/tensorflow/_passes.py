"""Gradients that are added up over several backward passes and exchanged once, as Horovod's
``backward_passes_per_step`` has it: for optimizers of TensorFlow 1, and of Keras 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from byteps.tensorflow import ops
from byteps.tensorflow._exchange import not_converted

__all__ = ["Passes"]


class Passes:
    """The sums of an optimizer's gradients over ``count`` passes, the last of which makes a step.

    Sums are dense. Its variables are local ones in graphs of TensorFlow 1: they are not saved.
    """

    def __init__(self, count: int, average: bool) -> None:
        self._count = count
        self._factor = 1.0 / count if average else 1.0
        self._sums: dict[int, Any] = {}
        self._passed: Any = None

    @not_converted
    def added(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        exchange: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> list[Any]:
        """The sums with these gradients of the variables, exchanged in the last pass of a step."""
        there = [index for index, one in enumerate(gradients) if one is not None]
        with tf.init_scope():
            if self._passed is None:
                self._passed = _variable(tf.zeros([], tf.int32), "passes")
            for index in there:
                if index not in self._sums:
                    variable = variables[index]
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    self._sums[index] = _variable(zeros, f"sum_{index}")
        sums = [self._sums[index] for index in there]
        added = [
            one.assign_add(tf.convert_to_tensor(gradients[index]), read_value=False)
            for one, index in zip(sums, there, strict=True)
        ]
        added.append(self._passed.assign_add(1, read_value=False))
        with _behind(added):
            values = [one.read_value() for one in sums]
            is_last = self._is_last()

        def exchanged() -> list[Any]:
            sent = [ops.scaled(value, self._factor) for value in values]
            return [tf.convert_to_tensor(one) for one in exchange(sent)]

        results: list[Any] = list(gradients)
        if there:
            found = tf.cond(is_last, exchanged, lambda: [tf.identity(value) for value in values])
            for index, one in zip(there, found, strict=True):
                results[index] = one
        return results

    @not_converted
    def step(
        self, apply: Callable[[], Any], gradients: Sequence[Any], otherwise: Callable[[], Any]
    ) -> Any:
        """Applies, and begins anew, if the pass of these gradients, of :meth:`added`, is the last
        one; else does what there is to do otherwise."""

        def last() -> Any:
            with _behind([apply()]):
                zeros = [one.assign(tf.zeros_like(one), read_value=False) for one in self._all()]
            with _behind(zeros):
                return tf.identity(True)

        def not_last() -> Any:
            with _behind([otherwise()]):
                return tf.identity(False)

        with _behind([one for one in gradients if one is not None]):
            is_last = self._is_last()
        return tf.cond(is_last, last, not_last)

    def _is_last(self) -> Any:
        return self._passed.read_value() >= self._count

    def _all(self) -> list[Any]:
        return [self._passed, *self._sums.values()]


def _variable(zeros: Any, name: str) -> Any:
    """One that is made outside of programs."""
    if tf.executing_eagerly():
        return tf.Variable(zeros, trainable=False, name=name)
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(
        zeros, trainable=False, name=name, collections=local, use_resource=True
    )


def _behind(results: Sequence[Any]) -> Any:
    """What is made within is run after these; outside of graphs they are over."""
    if tf.executing_eagerly():
        return tf.control_dependencies([])
    return tf.control_dependencies([one for one in results if one is not None])
