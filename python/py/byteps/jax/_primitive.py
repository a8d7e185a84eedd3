"""push_pull as JAX sees it: one primitive, of as many arrays as are exchanged together.

Outside of compiled programs it calls the engine, and raises the engine's errors. In a program it is
a push of each array, which starts at once, and one pull of all of them, which takes the pushes'
tickets. Neither call has a side effect, so programs may have it in branches, loops, and whatever
JAX makes of these; what no result depends on is not sent, on all ranks alike.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from byteps import _native, _registry
from byteps.errors import ConfigError, TensorError
from byteps.jax import _arrays, _ffi, _gpu
from byteps.jax._arrays import How

exchange_p = Primitive("byteps_push_pull")
exchange_p.multiple_results = True

# Numbers for exchanges without a name, in the order in which programs are compiled.
_compiled = itertools.count()


def exchange(arrays: Sequence[Any], hows: Sequence[How]) -> list[Any]:
    """The results for these arrays, all under way together."""
    if not arrays:
        return []
    names = [how.name for how in hows if how.name]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the name '{twice}' stands twice in one push_pull: give each its own")
    for array, how in zip(arrays, hows, strict=True):
        _arrays.dtype_of(array, how.name)
    results: list[Any] = exchange_p.bind(*arrays, hows=tuple(hows))
    return results


exchange_p.def_impl(lambda *arrays, hows: _arrays.exchange(arrays, hows))
exchange_p.def_abstract_eval(lambda *avals, hows: [aval.update(weak_type=False) for aval in avals])


# In programs


# A push's ticket, which makes the pull depend on it.
_TICKET = jax.core.ShapedArray((2,), np.uint32)


def _declared(ctx: Any, hows: Sequence[How], on_gpu: bool) -> list[How]:
    """With names, and made known where there is a job."""
    named = [
        how if how.name else how._replace(name=f"<compiled {next(_compiled)}>") for how in hows
    ]
    if _native.is_initialized():
        # One round trip for all, and what the ranks disagree about is an exception of its class.
        # A program that is run in another job declares them then.
        _registry.declare(
            [
                _arrays.tensor_of(aval, how, on_gpu and not _arrays.is_of_host(aval, how))
                for aval, how in zip(ctx.avals_in, named, strict=True)
            ]
        )
    return named


def _attributes(how: How, device: bool = False) -> dict[str, Any]:
    return {
        "name": how.name,
        "operation": how.operation,
        "root": np.int64(how.root),
        "priority": np.int64(how.priority),
        "encoding": how.encoding or _registry.NOT_ENCODED,
        "ranks": ",".join(map(str, how.ranks or ())),
        "device": np.int64(device),
        "backups": np.int64(how.backups),
    }


def _lower_on_cpu(ctx: Any, *operands: Any, hows: tuple[How, ...]) -> Any:
    _ffi.check_version()
    _native.xla_devices([device.id for device in jax.local_devices(backend="cpu")])
    push = _ffi.ffi.ffi_lowering(_ffi.PUSH)
    tickets = []
    for operand, aval, how in zip(operands, ctx.avals_in, _declared(ctx, hows, False), strict=True):
        one = ctx.replace(avals_in=[aval], avals_out=[_TICKET])
        tickets += push(one, operand, **_attributes(how))
    # Results take the place of the arrays, which nobody else needs any more as a rule.
    places = {index: index for index in range(len(operands))}
    pull = _ffi.ffi.ffi_lowering(_ffi.PULL, operand_output_aliases=places)
    avals = [*ctx.avals_in, *[_TICKET] * len(tickets)]
    return pull(ctx.replace(avals_in=avals, avals_out=ctx.avals_out), *operands, *tickets)


def _lower_on_gpu(ctx: Any, *operands: Any, hows: tuple[How, ...]) -> Any:
    _ffi.check_version()
    on_all = [
        not _arrays.is_of_host(aval, how) for aval, how in zip(ctx.avals_in, hows, strict=True)
    ]
    _gpu.use_in_programs(
        _native.is_initialized()
        and any(
            _arrays.tensor_of(aval, how, device).device
            for aval, how, device in zip(ctx.avals_in, hows, on_all, strict=True)
        )
    )
    # The exchange has the memory from the push to the pull, who is the only one to use the result.
    push = _ffi.ffi.ffi_lowering(_ffi.PUSH_ON_GPU, operand_output_aliases={0: 0})
    arrays, tickets = [], []
    named = _declared(ctx, hows, True)
    for operand, aval, how, device in zip(operands, ctx.avals_in, named, on_all, strict=True):
        one = ctx.replace(avals_in=[aval], avals_out=[aval, _TICKET])
        array, ticket = push(one, operand, **_attributes(how, device))
        arrays.append(array)
        tickets.append(ticket)
    pull = _ffi.ffi.ffi_lowering(_ffi.PULL_ON_GPU)
    avals = [*ctx.avals_in, *[_TICKET] * len(tickets)]
    return pull(ctx.replace(avals_in=avals, avals_out=ctx.avals_out), *arrays, *tickets)


def _lower_elsewhere(ctx: Any, *operands: Any, hows: tuple[How, ...]) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    what = f"'{hows[0].name}'" if hows[0].name else "an array without a name"
    raise TensorError(_arrays.elsewhere(what, ", ".join(platforms)))


# Two exchanges that look alike have names of their own, so one is not compiled for both.
_options: dict[str, Any] = (
    {"cacheable": False}
    if "cacheable" in inspect.signature(mlir.register_lowering).parameters
    else {}
)
mlir.register_lowering(exchange_p, _lower_elsewhere, **_options)
mlir.register_lowering(exchange_p, _lower_on_cpu, platform="cpu", **_options)
mlir.register_lowering(exchange_p, _lower_on_gpu, platform="cuda", **_options)


# Gradients


def _jvp(primals: Any, tangents: Any, *, hows: tuple[How, ...]) -> Any:
    results = exchange_p.bind(*primals, hows=hows)
    wanted = [index for index, one in enumerate(tangents) if type(one) is not ad.Zero]
    for index in wanted:
        if hows[index].operation not in ("sum", "average", "broadcast"):
            raise ConfigError(
                f"a push_pull with the operation {hows[index].operation} has no gradient here: "
                "pass it jax.lax.stop_gradient(array)"
            )
    changes = list(tangents)
    if wanted:
        moved = exchange_p.bind(
            *[tangents[index] for index in wanted],
            hows=tuple(hows[index].derived(".grad") for index in wanted),
        )
        for index, one in zip(wanted, moved, strict=True):
            changes[index] = one
    return results, changes


def _transpose(cotangents: Any, *operands: Any, hows: tuple[How, ...]) -> Any:
    wanted = [index for index, one in enumerate(cotangents) if type(one) is not ad.Zero]
    given = list(cotangents)
    if wanted:
        # The root of a broadcast gets the average, so that a loss averaged over the ranks has the
        # right gradient; the others' arrays were not looked at.
        back = [
            hows[index]._replace(operation="average", root=0)
            if hows[index].operation == "broadcast"
            else hows[index]
            for index in wanted
        ]
        moved = exchange_p.bind(*[cotangents[index] for index in wanted], hows=tuple(back))
        for index, one in zip(wanted, moved, strict=True):
            how = hows[index]
            is_other = how.operation == "broadcast" and how.root != _native.rank()
            # Zeros that XLA takes for a result of the exchange: it would drop it here otherwise,
            # and the root would wait.
            given[index] = jnp.nan_to_num(one) * 0 if is_other else one
    return given


ad.primitive_jvps[exchange_p] = _jvp
ad.primitive_transposes[exchange_p] = _transpose


# vmap


def _batch(arrays: Any, dimensions: Any, *, hows: tuple[How, ...]) -> Any:
    """One exchange of the whole batch, under a name of its own."""
    moved, derived = [], []
    for array, dimension, how in zip(arrays, dimensions, hows, strict=True):
        is_mapped = dimension is not None
        moved.append(jnp.moveaxis(array, dimension, 0) if is_mapped else array)
        derived.append(how.derived(".batch") if is_mapped else how)
    results = exchange_p.bind(*moved, hows=tuple(derived))
    return results, [None if dimension is None else 0 for dimension in dimensions]


batching.primitive_batchers[exchange_p] = _batch
