"""A rank of JAX on a host that `bps-perf gpu --framework jax` staged.

    python jax_rank.py PLAN

JAX's own collectives (NCCL) and this package's engine live in the one process and take turns, so that both meet the
same links, the same GPU and the same moment. PLAN is a JSON object, that of `gpu_rank.py`. The process says `ready`, and
answers each line that it is told with numbers:

    collective WAY BYTES           seconds of one sum of float32 over all ranks in a compiled program, until it is done
    model NAME PRECISION WAY,...   makes parameters for each way; answers how many there are
    steps WAY COUNT                seconds of a step, the mean of COUNT steps
    record NAME                    begins a timeline in the folder NAME of the plan's folder; answers nothing
    stop                           ends it; answers nothing

A collective's WAY is `peer` or `ours`. One of training is `forward` (no more than that), `alone` (a step without any
communication), `psum` (one program over the devices of all processes, whose gradients XLA adds up), or `ours`, also with
`-int8` and `-fp8`, which the engine encodes. A line that takes longer than the plan's patience ends the process, and says
where each thread was.
"""

import contextlib
import faulthandler
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import byteps.jax as bps

MARK = "bps-perf:"
LAYERS, WIDTH = 12, 2048
GPT = {"layers": 12, "hidden": 768, "heads": 12, "words": 16384, "length": 512}
GPT_SMALL = {"layers": 2, "hidden": 32, "heads": 2, "words": 128, "length": 16}


def say(text: str) -> None:
    print(MARK, text, flush=True)


# Models: parameters, the same on all ranks; this rank's own batch; and a loss.


def drawn(key: jax.Array, *shape: int) -> jax.Array:
    """Weights whose products with numbers of magnitude 1 have magnitude 1."""
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def perceptron(plan: Any, layers: int, width: int) -> tuple[Any, Any, Callable[..., Any]]:
    """Layers of equal width, which are to give their input back."""
    keys = jax.random.split(jax.random.key(1), layers)
    params = [{"w": drawn(key, width, width), "b": jnp.zeros(width)} for key in keys]
    inputs = jax.random.normal(jax.random.key(1000 + plan.rank), (plan.batch, width))

    def loss(params: Any, inputs: jax.Array) -> jax.Array:
        hidden = inputs.astype(params[0]["w"].dtype)
        for layer in params:
            hidden = jax.nn.relu(hidden @ layer["w"] + layer["b"])
        return jnp.mean((hidden - inputs) ** 2)

    return params, inputs, loss


def normed(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(hidden.dtype)


def transformer(
    plan: Any, layers: int, hidden: int, heads: int, words: int, length: int
) -> tuple[Any, Any, Callable[..., Any]]:
    """A language model: each word is to be told from those before it."""
    keys = iter(jax.random.split(jax.random.key(1), 4 * layers + 2))
    blocks = [
        {
            "qkv": drawn(next(keys), hidden, 3 * hidden),
            "out": drawn(next(keys), hidden, hidden),
            "up": drawn(next(keys), hidden, 4 * hidden),
            "down": drawn(next(keys), 4 * hidden, hidden),
            "norms": jnp.ones((2, hidden)),
        }
        for _ in range(layers)
    ]
    params = {
        "words": drawn(next(keys), words, hidden),
        "places": drawn(next(keys), length, hidden),
        "blocks": blocks,
    }
    key = jax.random.key(1000 + plan.rank)
    tokens = jax.random.randint(key, (plan.sequences, length), 0, words)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        rows = params["words"][tokens] + params["places"]
        for block in params["blocks"]:
            qkv = normed(rows, block["norms"][0]) @ block["qkv"]
            q, k, v = jnp.split(qkv.reshape(*rows.shape[:2], heads, -1), 3, axis=-1)
            seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            rows += seen.reshape(rows.shape) @ block["out"]
            rows += jax.nn.gelu(normed(rows, block["norms"][1]) @ block["up"]) @ block["down"]
        scores = (rows[:, :-1] @ params["words"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    return params, tokens, loss


MODELS: dict[str, Callable[[Any], tuple[Any, Any, Callable[..., Any]]]] = {
    "mlp": lambda plan: perceptron(plan, LAYERS, WIDTH),
    "mlp-small": lambda plan: perceptron(plan, 2, 64),
    "gpt": lambda plan: transformer(plan, **GPT),
    "gpt-small": lambda plan: transformer(plan, **GPT_SMALL),
}


# Ways to train


class Training:
    """Parameters that are trained in one way, by one compiled program a step."""

    def __init__(self, way: str, model: Any, precision: str, mesh: Any) -> None:
        params, self.batch, loss = model
        self.kind, _, wire = way.partition("-")
        optimizer = optax.sgd(0.01, momentum=0.9)
        if self.kind == "ours":
            codecs = {"": None, "int8": bps.Compression.int8(), "fp8": bps.Compression.fp8_e4m3()}
            optimizer = bps.DistributedOptimizer(
                optimizer, name=f"{way}.", compression=codecs[wire]
            )

        def loss_of(params: Any, batch: jax.Array) -> jax.Array:
            if precision == "amp":
                params = jax.tree_util.tree_map(lambda one: one.astype(jnp.bfloat16), params)
            return loss(params, batch)

        def step(params: Any, state: Any, batch: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        if self.kind == "psum":
            # The batch is spread over the processes, and everything else is the same in each.
            own = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rank"))
            same = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            self.batch = jax.make_array_from_process_local_data(own, np.asarray(self.batch))
            spread = functools.partial(jax.make_array_from_process_local_data, same)
            params = jax.tree_util.tree_map(lambda one: spread(np.asarray(one)), params)
            init = jax.jit(optimizer.init, out_shardings=same)
            program = jax.jit(step, donate_argnums=(0, 1), out_shardings=same)
        else:
            params = jax.tree_util.tree_map(jnp.copy, params)
            init, program = jax.jit(optimizer.init), jax.jit(step, donate_argnums=(0, 1))
        self.params, self.state = params, init(params)
        self.program, self.forward = program, jax.jit(loss_of)

    def steps(self, count: int) -> None:
        """Does so many, and waits for the last one's results."""
        value = None
        for _ in range(count):
            if self.kind == "forward":
                value = self.forward(self.params, self.batch)
            else:
                self.params, self.state, value = self.program(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, value))
        assert bool(jnp.isfinite(value)), "the loss is not finite"


# The rank


class Rank:
    """This process: its place, its programs and its models."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.is_cuda = plan, plan.device == "cuda"
        self.mesh = None
        if self.is_cuda:
            # JAX's own group. On CPUs it has none between staged hosts: it looks for them by name.
            jax.distributed.initialize(
                f"{plan.master}:{plan.port}",
                plan.hosts * plan.local_size,
                plan.rank,
                initialization_timeout=int(plan.patience_s),
            )
        bps.init()
        if self.is_cuda:
            assert len(jax.local_devices()) == 1 and len(jax.devices()) == bps.size()
            self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rank",))
        self.sums: dict[tuple[str, int], tuple[Callable[..., Any], jax.Array]] = {}
        self.trainings: dict[str, Training] = {}

    def collective(self, way: str, count: str) -> list[float]:
        size = int(count)
        if (way, size) not in self.sums:
            self.sums[way, size] = self._summing(way, size)
        program, array = self.sums[way, size]
        bps.barrier()
        begin = time.perf_counter()
        total = jax.block_until_ready(program(array))
        seconds = time.perf_counter() - begin
        if not bool((total.addressable_data(0) == bps.size()).all()):
            raise AssertionError(f"a wrong sum of {size} bytes by {way}")
        return [seconds]

    def _summing(self, way: str, size: int) -> tuple[Callable[..., Any], jax.Array]:
        ones = np.ones(size // 4, np.float32)
        if way == "ours":
            name = f"collective.{size}"
            return jax.jit(lambda one: bps.push_pull(one, average=False, name=name)), jnp.array(
                ones
            )
        own, same = jax.sharding.PartitionSpec("rank"), jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(self.mesh, own)
        spread = jax.make_array_from_process_local_data(sharding, ones)
        psum = jax.shard_map(
            lambda one: jax.lax.psum(one, "rank"), mesh=self.mesh, in_specs=(own,), out_specs=same
        )
        return jax.jit(psum), spread

    def model(self, name: str, precision: str, ways: str) -> list[float]:
        self.trainings.clear()
        model = MODELS[name](self.plan)
        for way in ways.split(","):
            self.trainings[way] = Training(way, model, precision, self.mesh)
        return [float(sum(one.size for one in jax.tree_util.tree_leaves(model[0])))]

    def steps(self, way: str, count: str) -> list[float]:
        bps.barrier()
        begin = time.perf_counter()
        self.trainings[way].steps(int(count))
        return [(time.perf_counter() - begin) / int(count)]

    def record(self, name: str) -> list[float]:
        bps.start_timeline(f"{self.plan.timelines}/{name}")
        # A server records before it takes keys that are declared later: when a tensor of a new name is summed, whose
        # keys each rank waits for, nothing that comes behind it is missed.
        jax.block_until_ready(bps.push_pull(jnp.zeros(1), name=f"timeline.{name}"))
        return []

    def stop(self) -> list[float]:
        bps.stop_timeline()
        return []

    def end(self) -> None:
        self.trainings.clear()
        bps.barrier()
        bps.shutdown()
        if self.is_cuda:
            jax.distributed.shutdown()


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Shows every thread's stack and ends the process where what is within takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    plan = SimpleNamespace(**json.loads(sys.argv[1]))
    # Earlier than whoever waits for this process, so that it says why.
    patience = max(plan.patience_s - 5, 1)
    with deadline(patience):
        rank = Rank(plan)
        bps.barrier()
    say("ready")
    for line in sys.stdin:
        what, *words = line.split()
        with deadline(patience):
            numbers = getattr(rank, what)(*words)
        say(" ".join(map(repr, numbers)))
    with deadline(patience):
        rank.end()


if __name__ == "__main__":
    main()
