"""byteps.jax in compiled programs: transformations, several devices, what is under way at once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp

import byteps.jax as bps
from byteps import _native
from byteps.errors import ConfigError, UsageError
from cluster import Cluster
from jax_ranks import FAILED, equal, exchange_by_name, on_ranks

# Transformations


def gradients():
    rank, size = bps.rank(), bps.size()
    x = jnp.arange(1.0, 4.0) * (rank + 1)
    mean = np.arange(1.0, 4.0) * (size + 1) / 2

    def loss(x, op=bps.Average, name="loss"):
        return (rank + 1) * (bps.push_pull(x, name=name, op=op) ** 2).sum()

    for wrap in (lambda f: f, jax.jit):
        # The gradient of an average is the average of the ranks' gradients.
        assert np.allclose(wrap(jax.grad(loss))(x), (size + 1) / 2 * 2 * mean)
        summed = wrap(jax.grad(lambda x: loss(x, bps.Sum, "total")))(x)
        assert np.allclose(summed, size * (size + 1) / 2 * 2 * mean * size)
        change = wrap(lambda x: jax.jvp(lambda x: bps.push_pull(x, name="jvp"), (x,), (x,)))(x)
        assert np.allclose(change[1], mean)
        second = wrap(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x)
        assert np.allclose(second, (size + 1) * np.ones(3))
        back = wrap(jax.grad(lambda x: (rank + 1) * bps.broadcast(x, 0, "root").sum()))(x)
        assert np.allclose(back, (size + 1) / 2 if rank == 0 else 0)
    with pytest.raises(ConfigError, match="operation max has no gradient"):
        jax.grad(lambda x: bps.push_pull(x, op=bps.Max, name="max").sum())(x)

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: (bps.push_pull(ct, name="vjp"),))
    own = jax.jit(jax.grad(lambda x: (identity(x) * (rank + 1)).sum()))(x)
    assert np.allclose(own, (size + 1) / 2)


def test_gradients(trio):
    trio.run(on_ranks(gradients))


def control_flow():
    rank, size = bps.rank(), bps.size()
    mean = (size - 1) / 2
    x = jnp.full(3, float(rank))

    def body(carry, extra):
        return bps.push_pull(carry, name="scan") + extra, bps.push_pull(extra * rank, name="scan.y")

    last, ys = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(4.0)))(x)
    assert np.allclose(last, mean + 6) and np.allclose(ys, mean * np.arange(4.0))

    # What does not change in a loop may be moved out of it by XLA.
    def constant(carry, extra):
        return carry + bps.push_pull(x, name="constant") + bps.push_pull(
            carry * 0 + extra * rank, name="changing"
        ), None

    total, _ = jax.jit(lambda start: jax.lax.scan(constant, start, jnp.arange(3.0)))(jnp.zeros(3))
    assert np.allclose(total, 3 * mean + 3 * mean)

    def chosen(x, flag):
        return jax.lax.cond(flag, lambda x: bps.push_pull(x, name="branch"), lambda x: x + 100, x)

    compiled = jax.jit(chosen)
    assert np.allclose(compiled(x, True), mean) and np.allclose(compiled(x, False), rank + 100)
    looped = jax.lax.while_loop(
        lambda state: state[0] < 3,
        lambda state: (state[0] + 1, bps.push_pull(state[1] + 1, name="while")),
        (0, x),
    )
    assert np.allclose(looped[1], mean + 3)

    @jax.checkpoint
    def block(x):
        return jnp.sin(bps.push_pull(x, name="remat"))

    kept = jax.jit(jax.grad(lambda x: block(block(x)).sum()))
    plain = jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())
    assert np.allclose(kept(jnp.full(3, 0.5)), plain(jnp.full(3, 0.5)), atol=1e-6)


def test_loops_branches_and_remat(pair):
    pair.run(on_ranks(control_flow))


def batched():
    rank, size = bps.rank(), bps.size()
    x = jnp.arange(12.0).reshape(3, 4) * (rank + 1)
    mean = np.arange(12.0).reshape(3, 4) * (size + 1) / 2
    for wrap in (lambda f: f, jax.jit):
        assert np.allclose(wrap(jax.vmap(lambda x: bps.push_pull(x, name="vmap")))(x), mean)
        columns = jax.vmap(lambda x: bps.push_pull(x, name="columns"), in_axes=1, out_axes=1)
        assert np.allclose(wrap(columns)(x), mean)
        each = jax.vmap(jax.grad(lambda x: (bps.push_pull(x, name="each") ** 2).sum()))
        assert np.allclose(wrap(each)(x), 2 * mean)


def test_vmap_exchanges_the_batch(pair):
    pair.run(on_ranks(batched))


def several_devices():
    rank, size = bps.rank(), bps.size()
    devices = jax.devices()
    assert len(devices) == 2
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    x = jnp.arange(8.0) * (rank + 1)
    mean = np.arange(8.0) * (size + 1) / 2
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    # Outside of programs, an array of several devices is exchanged once, as a whole.
    whole = bps.push_pull(spread, name="spread")
    assert np.allclose(whole, mean) and whole.sharding == spread.sharding
    # In a program each device has all of it, and exchanges it with those of the same number.
    assert np.allclose(jax.jit(lambda x: bps.push_pull(x, name="jitted"))(spread), mean)
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map

        checks = {"check_rep": False}
    else:
        checks = {"check_vma": False}
    mapped = shard_map(
        lambda x: bps.push_pull(x, name="mapped"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        **checks,
    )
    if jax.__version_info__ >= (0, 6, 0):  # Before, XLA does not say which device a call is for.
        assert np.allclose(jax.jit(mapped)(spread), mean)

    # Once for all devices: sum them here, let one exchange, and share what it got.
    def once(x):
        local = jax.lax.pmean(x, "device")
        first = jax.lax.axis_index("device") == 0
        own = jax.lax.cond(
            first, lambda x: bps.push_pull(x, name="once"), lambda x: jnp.zeros_like(x), local
        )
        return jax.lax.psum(own, "device")

    nothing = jax.sharding.PartitionSpec()
    mapped = shard_map(once, mesh=mesh, in_specs=spec, out_specs=nothing, **checks)
    assert np.allclose(jax.jit(mapped)(spread), mean.reshape(2, 4).mean(0))


def a_device_that_is_not_known():
    """As in a process that runs programs which another has compiled: none has told of devices."""
    if jax.__version_info__ < (0, 6, 0):
        return  # XLA does not say which device a call is for.
    first, second = jax.devices()
    program = jax.jit(lambda x: bps.push_pull(x, False, name="of a device"))
    arrays = [jax.device_put(jnp.ones(4), device) for device in (first, second)]
    for array in arrays:
        assert equal(program(array), np.full(4, 2.0))
    _native.xla_devices([])
    try:
        with pytest.raises(FAILED, match="'of a device' is on CPU device 1, which is not known"):
            jax.block_until_ready(program(arrays[1]))
        with pytest.raises(UsageError, match="compile a program"), bps.typed_errors():
            jax.block_until_ready(program(arrays[1]))
        # There is always a first one, and the others are as good as before once they are known.
        assert equal(program(arrays[0]), np.full(4, 2.0))
    finally:
        _native.xla_devices([first.id, second.id])
    assert equal(program(arrays[1]), np.full(4, 2.0))


def unused_results():
    @jax.jit
    def forgets(x):
        bps.push_pull(x, name="forgotten")
        kept = bps.push_pull({"a": x, "b": x + 1}, name="half")
        return kept["a"]

    assert equal(forgets(jnp.ones(4)), np.ones(4))
    assert equal(forgets(jnp.ones(4)), np.ones(4))
    # Handles that nobody waits for.
    bps.push_pull_async(jnp.ones(4), name="never waited for")


def test_several_devices_and_results_that_nobody_uses():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with Cluster(2, environment=flags) as cluster:
        cluster.run(on_ranks(several_devices), timeout=120)
        cluster.run(on_ranks(a_device_that_is_not_known), timeout=120)
        cluster.run(on_ranks(unused_results), timeout=120)
        # Leaving the block ends the job in good order, or fails.


def raises_in_a_step():
    """An error of a program on all ranks, between its exchanges: the next run works."""

    def check(mean):
        if float(mean[0]) < 2:
            raise ZeroDivisionError("in a step")
        return np.asarray(mean)

    @jax.jit
    def step(x):
        mean = bps.push_pull(x, name="raising.before")
        beside = bps.push_pull(x * 3, name="raising.beside")
        mean = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), mean)
        return bps.push_pull(mean * 2, name="raising.after") + beside

    for _ in range(2):
        with pytest.raises(FAILED, match="in a step"):
            jax.block_until_ready(step(jnp.ones(4)))
        assert np.allclose(step(jnp.full(4, bps.rank() + 2.0)), 2.5 * 5)


def test_an_error_in_a_step_leaves_the_next_one_whole(pair):
    pair.run(on_ranks(raises_in_a_step))


# Overlap


def in_flight_together(count):
    """Seconds of a step of so many exchanges, of which each takes 200 ms.

    Rank 1 needs the last array before it sends the one before: in turns, nothing would move.
    """
    names = [f"flight.{count}.{index}" for index in range(count)]
    x = jnp.ones((64, 64))

    @jax.jit
    def step(x):
        tree = {}
        for name in names:
            x = jnp.tanh(x @ x / 64)
            tree[name] = x
        return exchange_by_name(tree)

    jax.block_until_ready(step(x))
    seconds = []
    for _ in range(3):
        bps.barrier()
        begun = time.monotonic()
        if bps.rank() == 0:
            jax.block_until_ready(step(x))
        else:
            time.sleep(0.2)
            for name in reversed(names):
                bps.push_pull(x, average=False, name=name)
        seconds.append(time.monotonic() - begun)
    return min(seconds)


def test_arrays_of_a_step_are_in_flight_together(pair):
    one = pair.run(on_ranks(in_flight_together), 1)[0]
    eight = pair.run(on_ranks(in_flight_together), 8)[0]
    assert eight <= 1.15 * one, (one, eight)


def sent_when_computed():
    """How long before the last gradient's exchange the first one's ended, at a rank that waits for
    all from the beginning. The last ones take 500 ms to compute."""
    names = [f"early.{index}" for index in range(10)]

    def slow(x):
        time.sleep(0.5)
        return np.asarray(x)

    @jax.jit
    def step(x):
        tree = {}
        for name in names:
            x = jnp.tanh(x @ x / 64)
            if name == names[8]:
                x = jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            tree[name] = x
        return exchange_by_name(tree)

    x = jnp.ones((64, 64))
    bps.barrier()
    if bps.rank() == 0:
        jax.block_until_ready(step(x))
        return None
    moments = {}

    def other(name):
        bps.push_pull(x, average=False, name=name)
        moments[name] = time.monotonic()

    threads = [threading.Thread(target=other, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return moments[names[-1]] - moments[names[0]]


def test_a_gradient_is_sent_when_it_is_computed(pair):
    # The first exchanges end while the last arrays are still being computed.
    assert pair.run(on_ranks(sent_when_computed))[1] > 0.25


def many_steps():
    tree = {f"{index}": jnp.full(64 + index, float(bps.rank())) for index in range(50)}

    @jax.jit
    def step(tree):
        return jax.tree_util.tree_map(lambda x: x + 1, bps.push_pull(tree, name="stress"))

    donating = jax.jit(step, donate_argnums=0)
    for _ in range(10):
        tree = donating(tree)
    mean = (bps.size() - 1) / 2
    assert all(np.allclose(leaf, mean + 10) for leaf in jax.tree_util.tree_leaves(tree))


def test_many_arrays_and_steps_with_donated_buffers(trio):
    trio.run(on_ranks(many_steps))
