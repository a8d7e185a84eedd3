"""byteps.jax: push_pull in and out of compiled programs, and training built on it."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import optax

import byteps.jax as bps
from byteps._operations import Adasum
from byteps.errors import (
    ConfigError,
    MismatchError,
    PeerDiedError,
    StallError,
    TensorError,
    UsageError,
    WaitTimeoutError,
)
from cluster import Cluster
from jax_ranks import FAILED, equal, exchange_by_name, on_ranks

NOTICED_SECONDS = 5
DTYPES = ["float32", "float16", "bfloat16", "uint8", "int8", "int32"]
SHAPES = [(), (5, 7, 3)]


def value(rank, shape, dtype, seed=1):
    """Small whole numbers, so that every type holds their sums exactly."""
    numbers = np.random.default_rng(1000 * seed + rank).integers(0, 20, shape)
    return np.asarray(numbers).astype(jnp.dtype(dtype))


def wanted(shape, dtype, operation, seed=1):
    mine = [value(rank, shape, dtype, seed).astype(np.float64) for rank in range(bps.size())]
    stacked = np.stack(mine)
    if operation is bps.Average:
        mean = stacked.sum(0) / bps.size()
        return mean if jnp.issubdtype(dtype, jnp.floating) else np.floor(mean)
    reduce = {bps.Sum: np.sum, bps.Min: np.min, bps.Max: np.max, bps.Product: np.prod}
    return reduce[operation](stacked, 0)


# Values


def every_type_and_shape(compiled, averages_whole_numbers=True):
    for dtype in DTYPES:
        is_average = averages_whole_numbers or jnp.issubdtype(dtype, jnp.floating)
        first = bps.Average if is_average else bps.Sum
        for shape in [*SHAPES, (0,)] if dtype == "float32" else SHAPES:
            for op in (first, bps.Max if shape else bps.Sum):
                name = f"jax.{compiled}.{dtype}.{shape}.{op.name}"

                def exchange(array, name=name, op=op):
                    return bps.push_pull(array, name=name, op=op)

                mine = jnp.asarray(value(bps.rank(), shape, dtype))
                result = (jax.jit(exchange) if compiled else exchange)(mine)
                assert (result.shape, result.dtype) == (mine.shape, mine.dtype)
                exact = wanted(shape, dtype, op)
                if op is bps.Average and jnp.issubdtype(dtype, jnp.floating):
                    # The server divides in float32, and rounds once.
                    close = np.allclose(np.asarray(result, np.float64), exact, rtol=1e-2)
                else:
                    close = np.array_equal(np.asarray(result, np.float64), exact)
                assert close, (name, mine, result, exact)
                assert equal(mine, value(bps.rank(), shape, dtype)), "the argument has changed"


@pytest.mark.parametrize("compiled", [False, True])
def test_every_type_and_shape(pair, compiled):
    pair.run(on_ranks(every_type_and_shape), compiled)


def a_tree():
    rank, size = bps.rank(), bps.size()
    tree = {"a": jnp.full((3,), 1.0 + rank), "b": [jnp.full((2, 2), 10.0 * rank), 3.0 + rank]}
    outside = bps.push_pull(tree, name="tree")
    inside = jax.jit(lambda tree: bps.push_pull(tree, name="tree"))(tree)
    mean = (size - 1) / 2
    assert np.allclose(outside["a"], 1 + mean) and np.allclose(outside["b"][1], 3 + mean)
    assert equal(outside, inside)
    product = bps.push_pull(jnp.float32(rank + 1), op=bps.Product, name="product")
    assert product == np.prod(range(1, size + 1))
    assert equal(bps.push_pull({}, name="empty"), {})
    # Without names: the order of the calls is what matters.
    first, second = bps.push_pull(jnp.float32(rank)), bps.push_pull(jnp.ones(5))
    assert first == mean and equal(second, np.ones(5))
    return jax.tree_util.tree_map(lambda leaf: np.asarray(leaf).tobytes(), inside)


def test_trees_have_the_same_bits_on_all_ranks(trio):
    results = trio.run(on_ranks(a_tree))
    assert results[0] == results[1] == results[2]


def without_names_in_programs():
    rank, size = bps.rank(), bps.size()

    @jax.jit
    def two(x):
        return bps.push_pull(x) + 10 * bps.push_pull(2 * x)

    assert equal(two(jnp.float32(rank)), np.float32(21 * (size - 1) / 2))
    # Traced again for another shape.
    assert equal(two(jnp.full(3, rank, jnp.float32)), np.full(3, 21 * (size - 1) / 2, np.float32))
    assert equal(two(jnp.float32(rank + 1)), np.float32(21 * (size + 1) / 2))


def test_programs_without_names_and_retraced(pair):
    pair.run(on_ranks(without_names_in_programs))


def of_one_process():
    x = jnp.arange(4.0)
    assert equal(bps.push_pull(x), x) and equal(jax.jit(bps.push_pull)(x), x)
    assert equal(bps.allgather(x), x) and equal(bps.broadcast(x, 0), x)


def test_one_process_needs_no_server(single):
    single.run(on_ranks(of_one_process))


def handles():
    rank, size = bps.rank(), bps.size()
    handle = bps.push_pull_async({"x": jnp.full(4, float(rank))}, average=False, name="handle")
    assert bps.wait(handle, 30) and bps.poll(handle)
    assert equal(bps.synchronize(handle), {"x": np.full(4, size * (size - 1) / 2)})
    assert bps.synchronize(handle) is None
    if rank == 0:
        late = bps.push_pull_async(jnp.ones(2), name="late")
        with pytest.raises(WaitTimeoutError):
            bps.synchronize(late, 0.05)
    bps.barrier()
    if rank != 0:
        late = bps.push_pull_async(jnp.ones(2), name="late")
    assert equal(bps.synchronize(late), np.ones(2))


def test_handles(pair):
    pair.run(on_ranks(handles))


def other_order_on_each_rank():
    names = [f"order.{index}" for index in range(20)]
    mine = names if bps.rank() % 2 == 0 else names[::-1]
    handles = {
        name: bps.push_pull_async(jnp.full(100, float(names.index(name))), name=name)
        for name in mine
    }
    for index, name in enumerate(names):
        assert equal(bps.synchronize(handles[name]), np.full(100, float(index)))
    # In one program, too: the arrays of a tree go in an order of the rank's own.
    tree = {name: jnp.full(100, float(names.index(name))) for name in names}
    order = sorted(tree, reverse=bps.rank() % 2 == 0)

    @jax.jit
    def program(tree):
        return dict(
            zip(order, exchange_by_name({n: tree[n] for n in order}, "average"), strict=True)
        )

    assert equal(program(tree), tree)


def test_order_of_names_does_not_matter(pair):
    pair.run(on_ranks(other_order_on_each_rank))


# Broadcast and objects


def broadcasts():
    rank = bps.rank()
    key = jax.random.key(rank)
    tree = {
        "f": jnp.full((2, 3), rank, jnp.float32),
        "flags": jnp.arange(5) > rank,
        "complex": jnp.arange(3.0) + 1j * rank,
        "short": jnp.full(4, rank, jnp.int16),
        "word": jnp.full(4, rank, jnp.uint32),
        "key": key,
    }
    for root in (0, 1):
        for form in (bps.broadcast_parameters, jax.jit(bps.broadcast_parameters, static_argnums=1)):
            result = form(tree, root)
            assert equal(result["f"], np.full((2, 3), root, np.float32))
            assert equal(result["flags"], np.arange(5) > root)
            assert equal(result["complex"], np.arange(3) + 1j * root)
            assert equal(result["short"], np.full(4, root)) and result["short"].dtype == jnp.int16
            assert equal(result["word"], np.full(4, root)) and result["word"].dtype == jnp.uint32
            expected = jax.random.normal(jax.random.key(root), (3,))
            assert equal(jax.random.normal(result["key"], (3,)), expected)
    state = optax.adam(1e-3).init({"w": jnp.full(3, float(rank))})
    same = bps.broadcast_parameters(state, 0, prefix="State.")
    assert jax.tree_util.tree_structure(same) == jax.tree_util.tree_structure(state)
    with pytest.raises(ConfigError, match="broadcast from rank 9"):
        bps.broadcast(jnp.ones(1), 9)
    assert bps.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert bps.allgather_object(rank) == list(range(bps.size()))
    rows = [np.full((r + 1, 2), r, np.float32) for r in range(bps.size())]
    assert equal(bps.allgather(jnp.asarray(rows[rank]), "ragged"), np.concatenate(rows))
    even = jax.jit(lambda x: bps.allgather(x, "even"))(jnp.full((2,), rank, jnp.float32))
    assert equal(even, np.repeat(np.arange(bps.size(), dtype=np.float32), 2))


def test_broadcast_and_gather(pair):
    pair.run(on_ranks(broadcasts))


# Training


def network(params, images):
    hidden = jnp.tanh(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, images), labels).mean()


def train(passes, compiled, form):
    """Trains on this rank's share of each batch, and by itself on whole batches; returns the
    parameters' bytes, and how far apart both end."""
    rank, size = bps.rank(), bps.size()
    rng = np.random.default_rng(1)
    images, labels = rng.normal(size=(60, 8)).astype(np.float32), rng.integers(0, 4, 60)
    start = {
        "w1": rng.normal(size=(8, 16)).astype(np.float32) * 0.3,
        "b1": np.zeros(16, np.float32),
        "w2": rng.normal(size=(16, 4)).astype(np.float32) * 0.3,
        "b2": np.zeros(4, np.float32),
    }
    plain = optax.adam(1e-2)
    mine = jax.tree_util.tree_map(lambda leaf: jnp.asarray(leaf + rank), start)
    params = bps.broadcast_parameters(mine, root_rank=0)
    name = f"{form}.{passes}.{compiled}."
    if form == "optimizer":
        optimizer = bps.DistributedOptimizer(plain, passes, name=name)
        gradients_of = jax.grad(loss_of)
    else:
        optimizer = plain
        gradients_of = bps.grad(loss_of, name=name)
    state = optimizer.init(params)

    def step(params, state, images, labels):
        updates, state = optimizer.update(gradients_of(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    if compiled:
        step = jax.jit(step)
    for _ in range(8):
        for part in range(passes):
            some = slice(rank * passes + part, None, size * passes)
            params, state = step(params, state, images[some], labels[some])

    @jax.jit
    def step_alone(params, state):
        updates, state = plain.update(jax.grad(loss_of)(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    alone = {key: jnp.asarray(leaf) for key, leaf in start.items()}
    own = plain.init(alone)
    for _ in range(8):
        alone, own = step_alone(alone, own)
    apart = max(float(jnp.abs(params[key] - alone[key]).max()) for key in alone)
    return {key: np.asarray(leaf).tobytes() for key, leaf in params.items()}, apart


@pytest.mark.parametrize(
    ("ranks", "passes", "compiled", "form"),
    [
        ("pair", 1, True, "optimizer"),
        ("pair", 2, True, "optimizer"),
        ("pair", 1, False, "optimizer"),
        ("pair", 1, True, "grad"),
        ("trio", 1, True, "optimizer"),
    ],
)
def test_training_equals_that_of_one_process(request, ranks, passes, compiled, form):
    results = request.getfixturevalue(ranks).run(on_ranks(train), passes, compiled, form)
    assert all(bits == results[0][0] for bits, _ in results)
    assert max(apart for _, apart in results) < 1e-4


def exchanges_of_passes():
    optimizer = bps.DistributedOptimizer(optax.sgd(1.0), 3, name="counted.")
    params = {"w": jnp.zeros(2)}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update({"w": gradient}, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(1, 7):
        if bps.rank() == 0:
            # Nobody else exchanges before the third pass: these return without the other rank.
            params, state = step(params, state, jnp.full(2, float(number)))
            if number % 3 == 2:
                bps.barrier()
        else:
            if number % 3 == 0:
                bps.barrier()
                for _ in range(3):
                    params, state = step(params, state, jnp.full(2, 0.0))
    # The mean of three passes and two ranks, applied once.
    assert np.allclose(params["w"], -((1 + 2 + 3) / 3 / 2 + (4 + 5 + 6) / 3 / 2))


def test_accumulation_exchanges_once(pair):
    pair.run(on_ranks(exchanges_of_passes))


def value_and_gradient():
    rank, size = bps.rank(), bps.size()

    def fun(x, y):
        return (x * y).sum() * (rank + 1), {"rank": rank}

    x, y = jnp.ones(3), jnp.full(3, 2.0)
    both = bps.value_and_grad(fun, argnums=(0, 1), has_aux=True, name="vg")
    (value, aux), (dx, dy) = both(x, y)
    assert float(value) == 6 * (rank + 1) and aux == {"rank": rank}
    assert np.allclose(dx, 2 * (size + 1) / 2) and np.allclose(dy, (size + 1) / 2)
    dx, _ = jax.jit(lambda x, y: bps.grad(fun, has_aux=True, op=bps.Sum, name="g")(x, y))(x, y)
    assert np.allclose(dx, 2 * size * (size + 1) / 2)
    with pytest.raises(ConfigError, match="averaged or summed"):
        bps.DistributedOptimizer(optax.sgd(1.0), op=bps.Max)
    with pytest.raises(ConfigError, match="1 or more"):
        bps.DistributedOptimizer(optax.sgd(1.0), 0)
    with pytest.raises(ConfigError, match="an optax optimizer is wanted"):
        bps.DistributedOptimizer(object())


def test_value_and_grad(pair):
    pair.run(on_ranks(value_and_gradient))


def codecs():
    rank, codec = bps.rank(), bps.Compression.int8()
    large = jnp.sin(jnp.arange(100_000, dtype=jnp.float32) * (rank + 1))
    tree = {"large": large, "small": large[:100], "whole": jnp.arange(100_000)}
    outside = bps.push_pull(tree, name="codec", compression=codec)
    # One program pushes what another did, with no error feedback: to the same bits.
    inside = jax.jit(lambda tree: bps.push_pull(tree, name="codec", compression=codec))(tree)
    assert equal(outside, inside)
    exact = bps.push_pull(tree, name="exact")
    error = jnp.abs(outside["large"] - exact["large"]).max()
    # A step of the ranks, whose largest value is 1, and one of the server.
    assert 0 < error <= 2 * 0.5 / 127
    assert equal(outside["small"], exact["small"]) and equal(outside["whole"], exact["whole"])

    optimizer = bps.DistributedOptimizer(
        optax.sgd(0.05), name="encoded", compression=bps.Compression.topk(0.2)
    )
    params = {"w": jnp.zeros((200, 200))}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda p: ((p["w"] - 1 - rank) ** 2).sum() / 2)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(100):
        params, state = step(params, state)
    # The ranks want 1 and 2.
    assert jnp.abs(params["w"] - 1.5).max() < 0.2

    # What is left out is this rank's, and goes into checkpoints.
    [(name, kept)] = bps.compression_state_dict().items()
    assert kept["residue"].shape == (200 * 200,) and np.abs(kept["residue"]).max() > 0
    assert kept["velocity"].size == 0
    changed = {name: {"residue": 2 * kept["residue"], "velocity": kept["velocity"]}}
    bps.load_compression_state_dict(changed)
    again = bps.compression_state_dict()[name]["residue"]
    assert np.array_equal(again, 2 * kept["residue"])
    with pytest.raises(ConfigError, match="'another' keeps nothing here"):
        bps.load_compression_state_dict({"another": kept})
    with pytest.raises(ConfigError, match="has 40000 elements, and the state is of 3"):
        bps.load_compression_state_dict({name: kept | {"residue": np.zeros(3)}})
    return np.asarray(params["w"]).tobytes()


def test_codecs(pair):
    assert len(set(pair.run(on_ranks(codecs)))) == 1


# Errors


def refused():
    with pytest.raises(TensorError, match="do not sum complex64"):
        bps.push_pull(jnp.ones(3) + 1j, name="complex")
    with pytest.raises(TensorError, match="do not sum bool"):
        jax.jit(lambda x: bps.push_pull(x, name="flags"))(jnp.ones(3) > 0)
    with pytest.raises(ConfigError, match="inside jit"):
        jax.jit(lambda x: bps.push_pull_async(x))(jnp.ones(3))
    with pytest.raises(TensorError, match="scalar"):
        bps.allgather(jnp.float32(1))
    with pytest.raises(ConfigError, match="op=Adasum"):
        bps.push_pull(jnp.ones(3), op=Adasum)

    with pytest.raises(ConfigError, match="'same' stands twice"):
        bps._primitive.exchange([jnp.ones(1)] * 2, [bps._primitive.How("same", "sum", 0, 0)] * 2)

    call = bps._ffi.ffi.ffi_call
    ticket = jax.ShapeDtypeStruct((2,), jnp.uint32)
    what = {"name": "twice", "operation": "sum", "encoding": "none", "ranks": ""}
    what |= {"root": np.int64(0), "priority": np.int64(0), "backups": np.int64(0)}

    @jax.jit
    def twice(x):
        first = call(bps._ffi.PUSH, ticket)(x, **what)
        second = call(bps._ffi.PUSH, ticket)(x + 1, **what)
        return call(bps._ffi.PULL, [x, x])(x, x, first, second)

    if jax.__version_info__ >= (0, 5, 1):  # Before, XLA does not say which program it runs.
        with (
            pytest.raises(UsageError, match="pushes 'twice' again before it has pulled it"),
            bps.typed_errors(),
        ):
            jax.block_until_ready(twice(jnp.ones(3)))
    with pytest.raises(FAILED, match="other arguments than byteps"):
        jax.block_until_ready(jax.jit(lambda x: call(bps._ffi.PUSH, ticket)(x))(jnp.ones(3)))
    unknown = jnp.array([7, 7], jnp.uint32)
    with pytest.raises(FAILED, match="not its own"):
        jax.block_until_ready(jax.jit(lambda x: call(bps._ffi.PULL, [x])(x, unknown))(jnp.ones(3)))
    return True


def test_what_cannot_be_is_refused(single):
    assert single.run(on_ranks(refused)) == [True]


def mismatch(compiled):
    name = f"jax.mismatch.{compiled}"

    def exchange(x):
        return bps.push_pull(x, name=name)

    x = jnp.ones(10 + bps.rank())
    bps.barrier()
    begun = time.monotonic()
    with pytest.raises(MismatchError) as caught, bps.typed_errors():
        jax.block_until_ready((jax.jit(exchange) if compiled else exchange)(x))
    assert time.monotonic() - begun < NOTICED_SECONDS
    assert name in str(caught.value) and "rank 0" in str(caught.value)
    assert caught.value.ranks == (0, 1)
    bps.barrier()
    again = jax.jit(lambda x: bps.push_pull(x, name=f"{name}.after"))(jnp.ones(3))
    assert equal(again, np.ones(3))


@pytest.mark.parametrize("compiled", [False, True])
def test_mismatch(pair, compiled):
    pair.run(on_ranks(mismatch), compiled)


def compile_step():
    step = jax.jit(lambda x: bps.push_pull(x, name="step"))
    assert equal(step(jnp.ones(1000)), np.ones(1000))
    return os.getpid()


def step_without_others(kind, seconds):
    step = jax.jit(lambda x: bps.push_pull(x, name="step"))
    begun = time.monotonic()
    with pytest.raises(FAILED) as caught:
        jax.block_until_ready(step(jnp.ones(1000)))
    assert time.monotonic() - begun < seconds
    assert f"byteps.errors.{kind.__name__}: " in str(caught.value), caught.value
    with pytest.raises(kind) as typed, bps.typed_errors():
        raise caught.value
    assert typed.value.ranks == (1,)


def test_a_killed_rank_is_an_error_in_a_program():
    with Cluster(2) as cluster:
        pids = cluster.run(on_ranks(compile_step), timeout=120)
        cluster.start(on_ranks(step_without_others), PeerDiedError, NOTICED_SECONDS)
        os.kill(pids[1], signal.SIGKILL)
        cluster.results(ranks=[0])
        cluster.kill()


def step_or_nothing(kind, seconds):
    if bps.rank() == 0:
        step_without_others(kind, seconds)


def test_a_stall_is_an_error_in_a_program():
    settings = {"BPS_STALL_REPORT": "1", "BPS_STALL_TIMEOUT": "2"}
    with Cluster(2, environment=settings) as cluster:
        cluster.run(on_ranks(compile_step), timeout=120)
        cluster.run(on_ranks(step_or_nothing), StallError, 10)
        cluster.kill()


def a_job_of_one_again():
    step = jax.jit(lambda x: bps.push_pull(x, name="kept"))
    assert equal(step(jnp.ones(3)), np.ones(3))
    bps.shutdown()
    with pytest.raises(FAILED, match="NotInitializedError: byteps is not initialised"):
        step(jnp.ones(3))
    bps.init()
    assert equal(step(jnp.ones(3)), np.ones(3))


def test_a_program_outlives_its_job(single):
    single.run(on_ranks(a_job_of_one_again))


def names_that_change():
    step = jax.jit(lambda x: bps.push_pull(x, name="changing"))
    for _ in range(2):
        assert equal(step(jnp.ones(3)), np.ones(3))
        assert equal(bps.push_pull(jnp.full(5, 2.0), name="changing"), np.full(5, 2.0))


def test_a_name_may_stand_for_another_shape(pair):
    pair.run(on_ranks(names_that_change))


# Beside torch


def beside_torch():
    import torch

    import byteps.torch

    if bps.rank() == 0:
        result = jax.jit(lambda x: bps.push_pull(x, name="mixed"))(jnp.arange(6.0).reshape(2, 3))
        own = bps.broadcast(jnp.full(3, 7.0), 0, "mixed.root")
        assert equal(own, np.full(3, 7.0))
        assert bps.broadcast_object("from jax", 0) == "from jax"
    else:
        result = byteps.torch.push_pull(torch.ones(2, 3), name="mixed")
        own = byteps.torch.broadcast(torch.zeros(3), 0, "mixed.root")
        assert own.tolist() == [7.0] * 3
        assert byteps.torch.broadcast_object(None, 0) == "from jax"
    return np.asarray(result).tolist()


def test_jax_and_torch_sum_the_same_tensor(pair):
    wanted = ((np.arange(6.0).reshape(2, 3) + 1) / 2).tolist()
    assert pair.run(on_ranks(beside_torch)) == [wanted, wanted]
