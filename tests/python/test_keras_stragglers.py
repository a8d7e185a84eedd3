"""byteps.keras with rounds that do not wait for slow ranks, on each of its back ends."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from cluster import Cluster
from test_same_network import on_demand

# Imported by the ranks alone: this process may have libraries that TensorFlow's end it with.
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

RANKS = 3
STEPS = 16


def training():
    """Trains while one rank is slow: the parameters by step, and what a push_pull had."""
    import keras

    import byteps.keras as bps
    from byteps.errors import BytePSError, ConfigError, MismatchError

    bps.init()
    rank = bps.rank()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8)])
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse")
    random = np.random.default_rng(rank)
    digests, sums = [], []
    for step in range(STEPS):
        time.sleep(0.3 if rank == 1 and step in (8, 9, 10) else 0.01)
        own = np.full(1, 32**rank, np.float32)
        total = bps.push_pull(own, name="probe", average=False, backup_workers=1)
        sums.append(int(keras.ops.convert_to_numpy(total)[0]))
        features = random.normal(size=(16, 64)).astype("float32")
        model.train_on_batch(features, features[:, :8] + rank)
        digests.append([one.tobytes() for one in model.get_weights()])
    with pytest.raises(BytePSError, match=f"{RANKS} of {RANKS} ranks"):
        bps.push_pull(own, name="all", backup_workers=RANKS)
    with pytest.raises(ConfigError, match="without a name"):
        bps.push_pull(own, backup_workers=1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.DistributedOptimizer(keras.optimizers.SGD(0.01), backup_workers=-1)
    with pytest.raises(MismatchError, match="slowest"):
        bps.push_pull(own, name="other", backup_workers=min(rank, 1))
        bps.barrier()
    return digests, sums


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_rounds_without_the_slowest_rank(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    if backend != "tensorflow":
        on_demand()
    environment = {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4", "KERAS_BACKEND": backend}
    with Cluster(RANKS, servers=1, environment=environment) as job:
        told = job.run(training, timeout=120)
    assert told[0] == told[1] == told[2]
    digests, sums = told[0]
    assert len({tuple(one) for one in digests}) == STEPS, "nothing was trained"
    whole = sum(32**rank for rank in range(RANKS))
    print(f"ranks that were late: {[whole - one for one in sums]}")
    # The first rounds wait for all, and later ones for all but one.
    assert set(sums[:4]) == {whole}
    assert {whole - one for one in sums} <= {0, 1, 32, 32**2} and whole - 32 in sums, sums
