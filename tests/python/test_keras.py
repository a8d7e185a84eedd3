"""byteps.keras and byteps.tensorflow.keras: optimizers, callbacks and saved models."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["KERAS_BACKEND"] = "tensorflow"  # Whatever the user's own settings say.
pytest.importorskip("keras", reason="Keras is not installed; python/environment installs it")
pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import keras_cells
from byteps.errors import ConfigError, MismatchError
from cluster import Cluster, clean_environment
from tensorflow_ranks import on_ranks
from test_failures import launch

START_SECONDS = 180


@pytest.fixture
def keras_pair(pair):
    """Two ranks that have imported Keras on TensorFlow."""
    pair.run(on_ranks(lambda: __import__("keras_ranks") and None), timeout=START_SECONDS)
    return pair


def same_on_all(cluster, function, *arguments):
    results = cluster.run(on_ranks(function), *arguments, timeout=START_SECONDS)
    assert all(one == results[0] for one in results), "all ranks have the same bits"


# Training


def trained(compiled):
    import keras_ranks

    return keras_ranks.check(keras_ranks.momentum, **compiled)


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": False}, {"run_eagerly": True}], ids=str)
def test_two_ranks_train_as_one(keras_pair, compiled):
    same_on_all(keras_pair, trained, compiled)


def trained_with(which):
    import keras

    import keras_ranks

    optimizers = {
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras_ranks.momentum()),
        "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5),
    }
    return keras_ranks.check(optimizers[which])


@pytest.mark.parametrize("which", ["loss scale", "accumulation", "clipped"])
def test_optimizers_around_gradients(keras_pair, which):
    same_on_all(keras_pair, trained_with, which)


def trained_in_passes(which, average):
    """As one process does whose batches are those of all ranks and passes."""
    import keras
    import numpy as np

    import byteps.keras as bps
    import keras_ranks

    make = {
        "momentum": keras_ranks.momentum,
        "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras_ranks.momentum()),
    }[which]
    rank, size = bps.rank(), bps.size()
    features, labels = keras_ranks.data(rank, size)
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    optimizer = bps.DistributedOptimizer(make(), **passes)
    together = keras_ranks.network(10, optimizer, run_eagerly=average)
    sent = []
    exchange = bps._exchange.reduced_gradients

    def counted(gradients, *arguments):
        sent.append(len(gradients))
        return exchange(gradients, *arguments)

    bps._exchange.reduced_gradients = counted
    try:
        # Two passes of six rows on two ranks make a step of all rows.
        together.fit(features, labels, batch_size=6, epochs=3, verbose=0, shuffle=False)
    finally:
        bps._exchange.reduced_gradients = exchange
    assert sent == [4] * (3 if average else len(sent)), "once for two passes"
    alone = keras_ranks.network(10, make())
    loss = (
        alone.loss
        if average
        else lambda true, found: 2 * keras.losses.mean_squared_error(true, found)
    )
    alone.compile(alone.optimizer, loss)
    alone.fit(*keras_ranks.data(), batch_size=24, epochs=3, verbose=0, shuffle=False)
    for one, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5), (which, average)
    return [one.tobytes() for one in together.get_weights()]


PASSES = [("momentum", False), ("momentum", True), ("clipped", False), ("loss scale", False)]


@pytest.mark.parametrize(("which", "average"), PASSES)
def test_several_passes_make_a_step(keras_pair, which, average):
    same_on_all(keras_pair, trained_in_passes, which, average)


def refused_passes():
    import keras

    import byteps.keras as bps
    import keras_ranks

    with pytest.raises(ConfigError, match="has gradient_accumulation_steps already"):
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
        bps.DistributedOptimizer(optimizer, backward_passes_per_step=2)
    with pytest.raises(ConfigError, match="is built already"):
        built = keras_ranks.momentum()
        built.build([keras.Variable([1.0])])
        bps.DistributedOptimizer(built, backward_passes_per_step=2)
    with pytest.raises(ConfigError, match="1 or more"):
        bps.DistributedOptimizer(keras_ranks.momentum(), backward_passes_per_step=0)


def own_layer():
    """The gradients of one layer are each rank's own, divided by the number of ranks or not."""
    import keras
    import numpy as np

    import byteps.keras as bps

    ends = {}
    for is_scaled in (True, False):
        layers = [keras.Input((1,))]
        layers += [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in "ab"]
        model = keras.Sequential(layers)
        optimizer = bps.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1),
            local_layers=[model.layers[1]],
            scale_local_gradients=is_scaled,
        )
        model.compile(optimizer, lambda true, found: found)
        inputs = np.full((4, 1), bps.rank() + 1.0, "float32")
        model.fit(inputs, inputs, batch_size=4, verbose=0)
        ends[is_scaled] = [float(np.squeeze(one)) for one in model.get_weights()]
    mean, own = (bps.size() + 1) / 2, bps.rank() + 1
    assert ends[True] == pytest.approx([1 - 0.1 * mean, 1 - 0.1 * own / bps.size()])
    assert ends[False] == pytest.approx([1 - 0.1 * mean, 1 - 0.1 * own])
    with pytest.raises(ConfigError, match="local_layers has 3"):
        bps.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=3)
    parts = bps.reducescatter(np.arange(3.0) * own, name="keras.part")
    assert np.allclose(parts, mean * np.array([[0, 1], [2]][bps.rank()]))
    # A rank that has joined leaves the others' training as it is.
    if bps.rank() == 1:
        assert bps.join() == 0
    else:
        assert np.allclose(bps.push_pull(np.ones(2), name="keras.joined"), [0.5, 0.5])
        assert bps.join() == 0


@pytest.mark.parametrize("function", [refused_passes, own_layer], ids=lambda one: one.__name__)
def test_horovod(keras_pair, function):
    keras_pair.run(on_ranks(function))


def overflow_on_one():
    import keras
    import numpy as np

    import byteps.keras as bps
    import keras_ranks

    inner = keras_ranks.momentum()
    optimizer = bps.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
    model = keras_ranks.network(1, optimizer)
    before = model.get_weights()
    features, labels = keras_ranks.data()
    if bps.rank() == 1:
        features = np.full_like(features, np.inf)
    model.fit(features, labels, epochs=1, batch_size=len(labels), verbose=0)
    after = model.get_weights()
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True)), "left out by all"
    return float(optimizer.dynamic_scale)


def test_ranks_agree_about_overflow(keras_pair):
    same_on_all(keras_pair, overflow_on_one)


def by_xla():
    import keras_ranks

    return keras_ranks.check(keras_ranks.momentum, jit_compile=True)


def test_programs_of_xla_train_as_one(keras_pair):
    same_on_all(keras_pair, by_xla)


def normalized(mask):
    """A layer on ranks whose batches differ in size does what one process does with all rows."""
    import keras
    import numpy as np
    import tensorflow as tf

    import byteps.keras as bps

    random = np.random.default_rng(5)
    rows, factors = random.normal(3, 2, size=(2, 10, 4, 3)).astype("float32")
    masks = random.random((10, 4)) < 0.7 if mask else None
    own = [slice(0, 3), slice(3, 10)][bps.rank()]
    layers = bps.SyncBatchNormalization(), keras.layers.BatchNormalization()
    for layer in layers:
        layer.build(rows.shape)

    def run(layer, part):
        inputs, mask = tf.constant(rows[part]), None if masks is None else tf.constant(masks[part])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True, mask=mask)
            loss = tf.reduce_sum(outputs * factors[part])
        return outputs, tape.gradient(loss, [inputs, *layer.trainable_variables])

    together, alone = layers
    wanted, (wanted_inputs, *wanted_weights) = run(alone, slice(None))
    found, (found_inputs, *found_weights) = tf.function(lambda: run(together, own))()
    assert np.allclose(found, wanted[own], atol=1e-5)
    assert np.allclose(found_inputs, wanted_inputs[own], atol=1e-5)
    for index, (one, other) in enumerate(zip(found_weights, wanted_weights, strict=True)):
        assert np.allclose(bps.push_pull(one, f"weight.{index}", average=False), other, atol=1e-4)
    for one, other in zip(together.variables, alone.variables, strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6), one.path
    # Without training it is the plain layer, and needs nobody.
    if bps.rank() == 0:
        assert np.allclose(together(rows), alone(rows), atol=1e-5)
    assert bps.SyncBatchNormalization.from_config(together.get_config()).epsilon == 1e-3


@pytest.mark.parametrize("mask", [False, True])
def test_normalization_over_ranks(keras_pair, mask):
    keras_pair.run(on_ranks(normalized), mask)


def pair_on(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; python/environment installs it")
    return Cluster(2, environment={"KERAS_BACKEND": backend})


@pytest.fixture(scope="module")
def jax_pair():
    with pair_on("jax") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def torch_pair():
    with pair_on("torch") as cluster:
        yield cluster


@pytest.fixture(params=["keras_pair", "jax_pair", "torch_pair"])
def back_end(request):
    """Two ranks on each back end."""
    cluster = request.getfixturevalue(request.param)
    wanted = {"keras_pair": "tensorflow"}.get(request.param, request.param.removesuffix("_pair"))
    found = cluster.run(keras_cells.on_ranks(keras_cells.backend), timeout=START_SECONDS)
    assert found == [wanted] * 2
    return cluster


CELLS = ["uses_nothing", "traced_again", "in_another_order", "raises_in_a_step", "disagrees"]


@pytest.mark.parametrize("cell", CELLS)
def test_what_steps_do(back_end, cell):
    function = keras_cells.on_ranks(getattr(keras_cells, cell))
    results = back_end.run(function, timeout=START_SECONDS)
    assert results[0] == results[1], "all ranks have the same bits"


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_killed_rank_is_an_error_in_fit(backend):
    with pair_on(backend) as cluster:
        cluster.start(keras_cells.on_ranks(keras_cells.killed_in_fit))
        (waited,) = cluster.results(timeout=START_SECONDS, ranks=[0])
        cluster.broken = True
        cluster.kill()
    assert waited < keras_cells.NOTICED_SECONDS


TRAIN_ON_A_BACK_END = """
import hashlib
import byteps.keras as bps
bps.init()
import keras, keras_ranks
assert keras.backend.backend() == "{backend}"
bits = keras_ranks.check(keras_ranks.momentum)
optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras_ranks.momentum())
bits += keras_ranks.check(optimizer)
bits += keras_ranks.check(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))
digests = [hashlib.sha256(b"".join(bits)).hexdigest()]
assert all(bps.broadcast_object(digests, rank) == digests for rank in range(bps.size()))
print("all alike")
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_back_ends(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed; python/environment installs it")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "byteps.launch", "--local", "2", sys.executable),
            *("-c", TRAIN_ON_A_BACK_END.format(backend=backend)),
        ],
        env=clean_environment() | {"KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert run.returncode == 0 and run.stdout.count("all alike") == 2, run.stdout


# Saved models


def saved_and_loaded(folder):
    import keras
    import numpy as np

    import byteps.tensorflow.keras as bps
    import keras_ranks

    optimizer = bps.DistributedOptimizer(keras_ranks.momentum())
    model = keras_ranks.network(1, optimizer)
    model.fit(*keras_ranks.data(), verbose=0, batch_size=8)
    path = f"{folder}/{bps.rank()}.keras"
    model.save(path)
    plain = keras.saving.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.SGD
    loaded = bps.load_model(path)
    with pytest.raises(ConfigError, match="distributed already"):
        bps.DistributedOptimizer(loaded.optimizer)
    assert int(loaded.optimizer.iterations) == int(optimizer.iterations) > 0
    # It exchanges: what ranks learn from other rows is the same.
    loaded.fit(*keras_ranks.data(bps.rank(), bps.size()), verbose=0, batch_size=4, shuffle=False)
    assert not np.array_equal(loaded.get_weights()[0], plain.get_weights()[0])
    return [one.tobytes() for one in loaded.get_weights()]


def test_saved_models(keras_pair, tmp_path):
    same_on_all(keras_pair, saved_and_loaded, str(tmp_path))


# Releases

KERAS = """
class backend:
    backend = staticmethod(lambda: {backend!r})
"""


def imported(environment):
    """The last line of an import that fails."""
    result = subprocess.run(
        [sys.executable, "-c", "import byteps.keras"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("release", "backend", "said"),
    [
        ("2.14.0", "tensorflow", "byteps.keras needs Keras 2.15 or later, and this is 2.14.0: "),
        ("a fork", "tensorflow", "Keras calls itself 'a fork', which is no release: install"),
        ("3.15.1", "numpy", "Keras runs on 'numpy', which does not train; set KERAS_BACKEND to "),
    ],
)
def test_other_releases_and_back_ends_are_refused(tmp_path, release, backend, said):
    """A stand-in for it has nothing else, as others lack what this package asks of Keras."""
    (tmp_path / "keras.py").write_text(
        f"__version__ = {release!r}\n" + KERAS.format(backend=backend)
    )
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    last = imported(environment)
    assert last.startswith("byteps.errors.ConfigError: ") and said in last, last


def test_a_back_end_that_is_not_installed(tmp_path):
    (tmp_path / "keras.py").write_text("import tensorflow_that_is_not_there\n")
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    last = imported(environment)
    assert last.startswith("byteps.errors.ConfigError: byteps.keras: Keras cannot be imported (No ")
    assert "set KERAS_BACKEND to tensorflow, jax or torch" in last, last


# Callbacks


def learning_rates():
    import keras

    import byteps.keras as bps
    import keras_ranks

    rates = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    def fit(callback, epochs, **compiled):
        rates.clear()
        model = keras_ranks.network(1, keras.optimizers.SGD(0.1, momentum=0.5), **compiled)
        # Four batches an epoch.
        model.fit(
            *keras_ranks.data(),
            batch_size=6,
            epochs=epochs,
            verbose=0,
            callbacks=[callback, Record()],
        )
        return list(rates)

    schedule = bps.callbacks.LearningRateScheduleCallback
    halves = schedule(lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
    assert fit(halves, 4)[::4] == pytest.approx([0.1, 0.05, 0.025, 0.025])
    within = schedule(lambda epoch: epoch, staircase=False, initial_lr=1.0)
    assert fit(within, 1) == pytest.approx([0.0, 0.25, 0.5, 0.75])
    tenth = fit(schedule(0.1), 1, run_eagerly=True)
    assert tenth == pytest.approx([0.01] * 4)
    warmup = fit(bps.callbacks.LearningRateWarmupCallback(2), 3)
    size = bps.size()
    exact = [0.1 / size * ((batch + 1) / 4 * (size - 1) / 2 + 1) for batch in range(8)]
    assert warmup == pytest.approx([*exact, *[0.1] * 4])


def test_learning_rates(keras_pair):
    keras_pair.run(on_ranks(learning_rates), timeout=START_SECONDS)


def metrics_that_differ():
    import byteps.keras as bps

    callback = bps.callbacks.MetricAverageCallback()
    logs = {"loss": float(bps.rank()), "accuracy": 1.0}
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": (bps.size() - 1) / 2, "accuracy": 1.0}
    more = {f"metric {index}": 0.0 for index in range(3 + bps.rank())}
    with pytest.raises(MismatchError, match=r"keras\.metrics"):
        callback.on_epoch_end(1, more)


def test_metrics(keras_pair):
    keras_pair.run(on_ranks(metrics_that_differ))


# The rest


def small_things():
    import keras
    import numpy as np

    import byteps.keras as bps

    rank, size = bps.rank(), bps.size()
    mean = bps.push_pull(np.full(3, float(rank)), name="keras.value")
    assert np.array_equal(mean, np.full(3, (size - 1) / 2))
    total = bps.allreduce(np.ones(2), name="keras.total", average=False)
    assert np.array_equal(total, np.full(2, size))
    assert np.array_equal(bps.broadcast(np.full(3, rank), 1, name="keras.root"), np.ones(3))
    with pytest.raises(ConfigError, match="no global variables"):
        bps.broadcast_global_variables(0)
    with pytest.raises(ConfigError, match="is not built"):
        bps.broadcast_model(keras.Sequential([keras.layers.Dense(1)]), 0)
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(int\)"):
        bps.DistributedOptimizer(3)
    with pytest.raises(ConfigError, match="set TF_USE_LEGACY_KERAS=1 before TensorFlow"):
        bps.DistributedOptimizer(type("SGD", (), {"__module__": "tf_keras.optimizers"})())
    with pytest.raises(ConfigError, match="averaged or summed"):
        bps.DistributedOptimizer(keras.optimizers.SGD(), op=bps.ReduceOp.Max)


def test_small_things(keras_pair):
    keras_pair.run(on_ranks(small_things))


def test_three_ranks_train_as_one(trio):
    same_on_all(trio, trained, {})


def test_train_digits():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = Path(__file__).parents[2] / "python/examples/keras/train_digits.py"
    result = launch([sys.executable, str(script)], timeout=START_SECONDS)
    assert result.returncode == 0, result.stdout
    assert "of digits that were held out" in result.stdout
