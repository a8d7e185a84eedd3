"""What tests of byteps.jax share: how functions are run on ranks, and results compared."""

from __future__ import annotations

import jax
import numpy as np

import byteps.jax as bps

# What XLA makes of an error, depending on the release and on how the program was called.
FAILED = (RuntimeError, ValueError)


def equal(one, other):
    """Whether two trees hold the same values."""
    return all(
        jax.tree_util.tree_leaves(
            jax.tree_util.tree_map(
                lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b))), one, other
            )
        )
    )


def on_ranks(function):
    """The function, to be run on a rank: the engine of JAX's module is started before."""

    def started(*arguments):
        bps.init()
        return function(*arguments)

    return started


def exchange_by_name(tree, operation="sum"):
    """push_pull of the arrays of a dict under its keys."""
    return bps._primitive.exchange(
        list(tree.values()), [bps._primitive.How(name, operation, 0, 0) for name in tree]
    )
