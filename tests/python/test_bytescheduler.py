"""ByteScheduler's names: the same steps as CrossBarrier's, and programs that import Horovod."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import byteps.torch as bps
import bytescheduler.pytorch.horovod as bsc
from byteps.errors import ConfigError
from cluster import clean_environment
from small_models import start
from test_cross_barrier import equal, step
from test_failures import launch

ROOT = Path(__file__).resolve().parents[2]


def the_same_bits():
    bsc.init()
    one = start()
    other = copy.deepcopy(one)

    def wrapped(model, kind):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return kind(optimizer, model.named_parameters(), compression=bsc.Compression.fp16)

    barrier = one, wrapped(one, bps.DistributedOptimizer)
    given = wrapped(other, bsc.DistributedOptimizer)
    declared = dict(given._byteps.names)
    scheduled = other, bsc.ScheduledOptimizer(other, given, 5)
    assert scheduled[1] is given, "schedulers and scalers go on to refer to it"
    # What the other ranks know stays as it was: no gradient has a second place on the servers.
    assert scheduled[1]._byteps.names == declared
    assert scheduled[1]._byteps.compression is bsc.Compression.fp16
    for number in range(5):
        assert torch.equal(step(barrier, number), step(scheduled, number))
        assert bool(scheduled[1]._updates.pending) == (number < 4), "the last step waits"
    assert equal(one, other)


def test_scheduled_steps_are_those_of_distributed_optimizer(pair):
    pair.run(the_same_bits)


def refusals():
    def adam(model):
        return torch.optim.Adam(model.parameters())

    model = start()
    few = bps.add_process_set([0])
    for options in ({"op": bps.Sum}, {"op": bps.Adasum}, {"async_": True}, {"process_set": few}):
        given = bsc.DistributedOptimizer(adam(model), model.named_parameters(), **options)
        with pytest.raises(ConfigError, match="averages gradients over all ranks"):
            bsc.ScheduledOptimizer(model, given)
    kind = type("Adam", (torch.optim.Adam,), {"__module__": "horovod.torch.optimizer"})
    with pytest.raises(ConfigError, match="python -m bytescheduler"):
        bsc.ScheduledOptimizer(model, kind(model.parameters()))
    plain = bsc.ScheduledOptimizer(model, adam(model))
    assert all(name.startswith("Gradient.") for name in plain._byteps.names.values())


def test_what_cannot_be_scheduled(single):
    single.run(refusals)


def python(*arguments, folder=None):
    environment = clean_environment()
    if folder is not None:
        environment["PYTHONPATH"] += f":{folder}"
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def installed(tmp_path):
    """A folder with a Horovod of somebody else's."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").touch()
    (tmp_path / "horovod/torch.py").write_text("whose = 'installed'\n")
    return tmp_path


def test_an_installed_horovod_is_found_first(installed):
    code = "import bytescheduler, horovod.torch as hvd; print(hvd.whose)"
    assert python("-c", code, folder=installed) == (0, "installed\n")
    # Nothing is there until somebody asks for ByteScheduler.
    status, said = python("-c", "import byteps.common; import horovod")
    assert status == 1 and "No module named 'horovod'" in said
    # What we have no answer for is missing, also below a package that is ours.
    status, said = python("-c", "import bytescheduler; import horovod.spark")
    assert status == 1 and "No module named 'horovod.spark'" in said
    code = "import bytescheduler; from horovod.common.exceptions import HorovodInternalError as it"
    assert python("-c", f"{code}; print(it.__module__)") == (0, "byteps.errors\n")


def test_usage_errors():
    assert python("-m", "bytescheduler")[0] == 2
    status, said = python("-m", "bytescheduler", "missing.py")
    assert status == 2 and "there is no program missing.py" in said


def test_a_program_of_bytescheduler(installed, tmp_path):
    """It runs unchanged, with its variables, and with a Horovod installed that would fail."""
    script = ROOT / "python/examples/bytescheduler_digits.py"
    path = clean_environment()["PYTHONPATH"]
    variables = {
        "PYTHONPATH": f"{path}:{installed}",
        "BYTESCHEDULER_PARTITION": "2000",
        "BYTESCHEDULER_CREDIT": "8000",
        "BYTESCHEDULER_CREDIT_TUNING": "1",
        "BYTESCHEDULER_TIMELINE": str(tmp_path / "timeline"),
        "BPS_LOCAL_REDUCE": "0",
    }
    command = [sys.executable, "-m", "bytescheduler", str(script)]
    result = launch(command, timeout=120, environment=variables)
    assert result.returncode == 0, result.stdout
    assert "difference between the ranks' parameters: 0.0" in result.stdout
    assert "has no effect here" not in result.stdout
    assert "tuning: trial 0, " in result.stdout, result.stdout
    timeline = Path(tmp_path / "timeline/0/comm.json").read_text()
    # The first layer, of 64 x 128 elements, in parts of 2,000 elements, or a multiple of 64 bytes.
    assert "Gradient.1.weight" in timeline
