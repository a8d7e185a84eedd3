"""Names and arguments of Horovod and BytePS that callers pass by habit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import byteps.torch as bps
from byteps import errors
from byteps.errors import ConfigError
from cluster import clean_environment
from test_interface import parameters


class Communicator:
    """What mpi4py's communicators have that is looked at."""

    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size


def test_what_a_build_is_asked(single):
    def check():
        assert bps.nccl_built() and bps.cuda_built() and bps.is_homogeneous()
        assert bps.mpi_threads_supported()
        without = (bps.mpi_built, bps.mpi_enabled, bps.gloo_built, bps.gloo_enabled)
        without += (bps.ddl_built, bps.ccl_built, bps.rocm_built)
        assert not any(query() for query in without)

    single.run(check)


def test_exceptions_by_horovods_names():
    assert bps.HorovodInternalError is errors.HorovodInternalError
    for error in (errors.PeerDiedError, errors.StallError, errors.MismatchError):
        assert issubclass(error, bps.HorovodInternalError)
    # What a program gets wrong by itself is nothing to start again for.
    assert not issubclass(ConfigError, bps.HorovodInternalError)
    assert bps.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert not bps.HostsUpdatedInterrupt().skip_sync


def test_arguments_stand_where_horovod_has_them():
    assert parameters(bps.DistributedOptimizer) == [
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        "process_set",
        # Not Horovod's.
        "async_",
        "staleness",
        "backup_workers",
    ]
    scaled = ["op", "prescale_factor", "postscale_factor", "process_set"]
    assert parameters(bps.allreduce) == ["tensor", "average", "name", "compression", *scaled]
    assert parameters(bps.allreduce_async_) == ["tensor", "average", "name", *scaled]
    assert parameters(bps.grouped_allreduce)[-4:] == scaled
    assert parameters(bps.broadcast_async) == ["tensor", "root_rank", "name", "process_set"]


INIT = """
import byteps.torch as bps
from byteps.errors import ConfigError
from test_horovod import Communicator

for comm in ([0, 1], [1], Communicator(2)):
    try:
        bps.init(comm=comm)
    except ConfigError as error:
        assert "all 1 ranks" in str(error) and not bps.is_initialized(), error
    else:
        raise AssertionError(comm)
for process_sets in ([bps.global_process_set], [[1]], [bps.ProcessSet([0]), [0]], [3], 3):
    try:
        bps.init(process_sets=process_sets)
    except (ConfigError, TypeError):
        assert not bps.is_initialized(), process_sets
    else:
        raise AssertionError(process_sets)
for arguments in ((None,), ([0],), ([],), (Communicator(1),), (), (False,)):
    bps.init(*arguments)
    assert bps.size() == 1
    bps.shutdown()
bps.init(comm=[0], process_sets=[])
try:
    bps.init([3])
except ConfigError:
    assert bps.is_initialized(), "the job that runs is not ended"
else:
    raise AssertionError("a second call looks at comm, too")
"""


def test_init_takes_all_ranks_and_no_others():
    environment = clean_environment() | {"PYTHONPATH": str(__file__).rsplit("/", 1)[0]}
    command = [sys.executable, "-c", INIT]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def check_process_sets():
    everyone = bps.global_process_set
    assert everyone.ranks == [0, 1] and everyone.size() == 2 and everyone.included()
    assert everyone.rank() == bps.rank() and everyone.process_set_id == 0
    ones = torch.ones(3)
    for function, arguments in (
        (bps.allreduce, ()),
        (bps.allreduce_, ()),
        (bps.broadcast, (0,)),
        (bps.broadcast_, (0,)),
    ):
        result = function(ones.clone(), *arguments, process_set=everyone)
        assert torch.equal(result, ones), function
    grouped = bps.grouped_allreduce([ones, 2 * ones], op=bps.Sum, process_set=everyone)
    assert torch.equal(grouped[1], 4 * ones)
    assert torch.equal(bps.synchronize(bps.allreduce_async(ones, process_set=everyone)), ones)
    assert bps.broadcast_object({"a": 1}, 0, process_set=everyone) == {"a": 1}
    bps.barrier(everyone)
    bps.barrier(process_set=everyone)
    calls = (
        lambda: bps.allreduce(ones, process_set=[0]),
        lambda: bps.grouped_allreduce_async_([ones], process_set=[0]),
        lambda: bps.broadcast_async_(ones, 0, process_set=[0]),
        lambda: bps.broadcast_object(1, process_set=[0]),
        lambda: bps.barrier(process_set=[0]),
        lambda: distributed(torch.nn.Linear(2, 1), process_set=[0]),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="global_process_set"):
            call()


def test_the_one_process_set(pair):
    pair.run(check_process_sets)


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return bps.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def trained(**options):
    """A model after two steps, the ranks' inputs being different."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = distributed(model, **options)
    for step in range(2):
        inputs = torch.arange(4.0).repeat(3, 1) + bps.rank() + step
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


def check_neutral_arguments():
    plain = trained()
    params = list(torch.nn.Linear(2, 1).parameters())
    for options in (
        {"gradient_predivide_factor": 1.0, "num_groups": 0, "groups": None},
        {"num_groups": 3, "process_set": bps.global_process_set},
        {"groups": 2},
        {"groups": [[params[0]], [params[1]]]},
    ):
        assert torch.equal(trained(**options), plain), options
    # A power of two changes no bit, any other factor only rounding.
    assert torch.equal(trained(gradient_predivide_factor=4.0), plain)
    torch.testing.assert_close(trained(gradient_predivide_factor=float(bps.size() + 1)), plain)
    for options, words in (
        ({"gradient_predivide_factor": 2.0, "op": bps.Sum}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 0.0}, "positive"),
        ({"num_groups": -1}, "num_groups"),
        ({"groups": "all"}, "groups"),
        ({"groups": [[params[0]], [params[0]]]}, "two of them"),
    ):
        with pytest.raises(ConfigError, match=words):
            trained(**options)


def test_neutral_arguments_of_the_optimizer(pair):
    pair.run(check_neutral_arguments)


def check_predivision():
    """A gradient beyond the range of what is sent arrives, divided before."""
    for factor, finite in ((1.0, False), (8.0, True)):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [("weight", weight)],
            compression=bps.Compression.fp16,
            gradient_predivide_factor=factor,
        )
        (weight * 2.0**17).sum().backward()
        optimizer.synchronize()
        assert bool(weight.grad.isfinite().all()) == finite, (factor, weight.grad)
        assert not finite or torch.equal(weight.grad, torch.full((3,), 2.0**17))


def test_predivision_keeps_small_types_finite(pair):
    pair.run(check_predivision)


def check_counted_calls():
    bps.byteps_torch_set_num_grads(3)
    for step in range(2):
        handles = []
        for index in range(3):
            tensor = torch.full((4,), bps.rank() + 1.0)
            handle, count = bps.push_pull_group_sync_inplace(tensor, True, f"counted.{index}")
            assert count == index + 1, (step, count)
            handles.append((handle, tensor))
        for handle, tensor in handles:
            assert torch.equal(bps.synchronize(handle), torch.full((4,), 1.5))
            assert torch.equal(tensor, torch.full((4,), 1.5))
    assert bps.byteps_push_pull_group is bps.push_pull_group_sync_inplace


def test_calls_are_counted_as_byteps_counts_them(pair):
    pair.run(check_counted_calls)


def test_broadcast_of_a_state_takes_the_model(pair):
    def check():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + bps.rank())
        bps.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert optimizer.param_groups[0]["lr"] == 1.0

    pair.run(check)
