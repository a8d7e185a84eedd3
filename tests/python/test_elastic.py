"""Jobs that go on when ranks and servers are killed; and what does not need a death."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import byteps.common
import byteps.elastic
import byteps.torch as bps
from byteps import _native, _registry
from byteps.elastic import State
from byteps.errors import ConfigError, PeerDiedError
from byteps.torch.elastic import ElasticSampler, RandomState, TorchState
from cluster import Cluster, clean_environment
from kill_job import Network, NoNetwork
from stand_in import Pipeline

PERF = Path(__file__).parents[2] / "perf"
# Of the whole campaign, most of which is the start of Python and torch.
SECONDS = 240


def campaign(*options, script="elastic.py"):
    command = [sys.executable, str(PERF / script), "--limit", "60", *options]
    done = subprocess.run(
        command,
        env=clean_environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_and_servers_are_killed_and_replaced():
    figures = campaign("--ranks", "3", "--servers", "2", "--megabytes", "1", "--runs", "1")
    assert set(figures) == {"rank", "rank0", "server"}
    for kind, figure in figures.items():
        # On a busy machine; the campaign itself says how fast it is on an idle one.
        assert figure["step"]["median"] < 10, (kind, figure)


@pytest.mark.parametrize("mode", ["cross", "ddp"])
def test_other_ways_to_average_go_on_too(mode):
    options = ["--ranks", "2", "--servers", "1", "--megabytes", "1", "--runs", "1"]
    campaign(*options, "--kinds", "rank", "--mode", mode)


def test_a_host_falls_silent_and_is_replaced():
    try:
        Network(2).close()
    except NoNetwork as why:
        pytest.skip(f"no hosts that can be cut off: {why}")
    job = ["--ranks", "3", "--servers", "2", "--megabytes", "1", "--elastic", "shrink"]
    options = [*job, "--runs", "1", "--kinds", "rank", "--interval", "0.2", "--timeout", "0.8"]
    figures = campaign(*options, script="silence.py")
    assert set(figures) == {"rank"} and figures["rank"]["step"]["median"] < 10, figures


def test_a_rank_joins_on_a_line_and_leaves():
    try:
        Network(2).close()
    except NoNetwork as why:
        pytest.skip(f"no hosts with lines of their own: {why}")
    if shutil.which("tc") is None:
        pytest.skip("no lines of a rate: tc of iproute2 is not here")
    options = ["--ranks", "2", "--servers", "1", "--megabytes", "1", "--runs", "1"]
    figures = campaign(*options, "--rate", "200mbit", script="joining.py")
    # Three ranks get the megabyte from one server; how long the others pause, a busy machine says.
    assert figures["line"]["median"] == pytest.approx(3 * 2**20 * 8 / 200e6, abs=1e-4), figures
    assert figures["pause"]["median"] < 10, figures


# State


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()


def flat(model):
    return torch.cat([tensor.float().reshape(-1) for tensor in model.state_dict().values()]).clone()


def test_a_state_goes_back_to_what_was_committed():
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # It has no scale before it is used.
    state = TorchState(
        model, optimizer, schedule=schedule, scaler=scaler, random=RandomState(), step=0, notes=[]
    )
    step(model, optimizer)
    state.step, state.notes = 1, ["a"]
    state.save()
    committed = flat(model), optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    drawn = torch.rand(3)
    for _ in range(3):
        step(model, optimizer)
        schedule.step()
        state.notes.append("b")
    scaler.update(1.0)
    state.step = 4
    for _ in range(2):  # Again and again: what was saved is not what is trained on.
        state.restore()
        assert torch.equal(flat(model), committed[0])
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], committed[1])
        assert (state.step, state.notes, optimizer.param_groups[0]["lr"]) == (1, ["a"], 0.5)
        assert (scaler.get_scale(), schedule.last_epoch) == (8.0, 0)
        assert torch.equal(torch.rand(3), drawn)
        step(model, optimizer)
        state.notes.append("c")


def momentum_of_a_codec_goes_back():
    import torch

    import byteps.torch as bps
    from byteps.torch.elastic import TorchState

    torch.manual_seed(bps.rank())
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=bps.Compression.int8(momentum=0.9)
    )
    inputs = torch.randn(3, 4)

    def step():
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    state = TorchState(model, optimizer)
    step()
    state.save()
    first = step()
    for _ in range(2):
        step()
        state.restore()
        assert all(map(torch.equal, step(), first))


def test_the_momentum_of_a_codec_goes_back_too(pair):
    pair.run(momentum_of_a_codec_goes_back)


def test_a_state_needs_values_that_can_be_kept():
    state = TorchState(trained()[0], step=0)
    with pytest.raises(ConfigError, match=r"state\.model = int"):
        state.model = 3
    state.model = other = trained()[0]
    before = flat(other)
    with torch.no_grad():
        other[0].weight.zero_()
    state.restore()
    assert torch.equal(flat(other), before)


class Counted(State):
    """A state of one number, which does not always arrive."""

    def __init__(self, value):
        super().__init__(bcast_object=None)
        self.value = self.saved = value
        self.received = None

    def save(self):
        self.saved = self.value

    def restore(self):
        self.value = self.saved

    def send(self, root_rank):
        self.value = 7
        if self.received is None:
            raise PeerDiedError("rank 2 died")
        self.value = self.received


def test_a_state_that_did_not_arrive_is_not_taken_for_the_latest(monkeypatch):
    said = []

    def add(name, values):
        said.append(list(values))
        return [values[0], 6]  # Rank 1 has committed five times.

    monkeypatch.setattr(byteps.elastic, "_sum", add)
    monkeypatch.setattr(byteps.common, "size", lambda: 2)
    monkeypatch.setattr(byteps.common, "rank", lambda: 0)
    monkeypatch.setattr(byteps.elastic, "_synchronized", False)
    state = Counted(4)
    state._commits, state._has_state = 4, True
    with pytest.raises(PeerDiedError):
        state.sync()
    state.restore()
    state.received = 5
    state.sync()
    assert said == [[5, 0], [5, 0]], "it has committed four times, whatever it was to be given"
    assert state.value == state.saved == 5
    state.sync()
    assert said[2] == [6, 0]


def test_an_epoch_that_ends_before_it_has_begun_here_is_left_for_the_next(monkeypatch):
    calls = []

    def init():
        calls.append("init")
        if calls.count("init") < 3:
            raise PeerDiedError("rank 2 died")

    monkeypatch.setattr(byteps.common, "suspend", lambda: calls.append("suspend"))
    monkeypatch.setattr(byteps.common, "init", init)
    may_return = True
    monkeypatch.setattr(byteps.elastic._native, "may_return", lambda **_: may_return)
    byteps.elastic.come_back()
    assert calls == ["suspend", "init"] * 3
    calls.clear()
    may_return = False
    with pytest.raises(PeerDiedError):
        byteps.elastic.come_back()
    assert calls == ["suspend", "init"]


def test_a_name_of_a_state_has_one_root(monkeypatch):
    roots = {}

    def note(name, root_rank):
        assert roots.setdefault(name, root_rank) == root_rank, name

    def tensors(named, root_rank, process_set=None):
        for name, _ in named:
            note(name, root_rank)

    def value(value, root_rank, name, process_set=None):
        note(name, root_rank)
        return value

    monkeypatch.setattr(byteps.torch.functions.ops, "broadcast_all_", tensors)
    monkeypatch.setattr(byteps.torch.functions, "broadcast_object", value)
    monkeypatch.setattr(byteps.common, "size", lambda: 2)
    model, optimizer = trained()
    step(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = ElasticSampler(range(4))
    state = TorchState(model, optimizer, schedule=schedule, sampler=sampler, step=0)
    for root in (0, 1, 0):
        monkeypatch.setattr(byteps.common, "rank", lambda root=root: root)
        state.send(root)
    assert set(roots.values()) == {0, 1}


def samplers():
    sampler = ElasticSampler(range(22), seed=3)
    own = list(sampler)
    assert len(own) == -(-22 // bps.size())
    sampler.record_batch(0, 2)
    state = TorchState(trained()[0], sampler=sampler, step=bps.rank())
    state.sync()
    size = bps.size()
    assert state.step == 0, "all are new, so rank 0 counts"
    assert len(sampler.processed_indices) == 2 * size, sampler.processed_indices
    assert sampler.processed_indices >= set(own[:2])
    # Nothing that was processed comes again in this epoch.
    left = set(sampler)
    assert not left & sampler.processed_indices
    sampler.set_epoch(1)
    assert len(sampler) == -(-22 // size) and list(sampler) != own
    state.restore()
    assert sampler.epoch == 0 and len(sampler.processed_indices) == 2 * size
    return sorted(left)


def test_a_sampler_divides_what_is_left_among_the_ranks(pair):
    first, second = pair.run(samplers)
    assert len({*first, *second}) == 22 - 4


def calls_in_a_job_that_is_not_elastic():
    calls = []

    @bps.elastic.run
    def train(state):
        calls.append(state.step)
        for _ in range(3):
            state.step += 1
            state.commit()
        return state.step

    state = bps.elastic.TorchState(step=0)
    state.register_reset_callbacks([lambda: calls.append("reset")])
    assert train(state) == 3

    # Without a launcher that lets hosts come and go, nothing catches what says that they did.
    @bps.elastic.run
    def interrupted(state):
        calls.append("interrupted")
        raise bps.HostsUpdatedInterrupt

    with pytest.raises(bps.HostsUpdatedInterrupt):
        interrupted(state)
    assert calls == [0, "interrupted"]


def test_run_calls_once_where_nothing_changes(pair):
    pair.run(calls_in_a_job_that_is_not_elastic)


# The launcher

TRAINS = """
import os, signal, sys, time
import torch, byteps.torch as bps
torch.set_num_threads(1)
bps.init()
launched = int(os.environ["RANK"])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())

@bps.elastic.run
def train(state):
    while state.step < 30:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        if launched == 0 and state.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.commit()

train(bps.elastic.TorchState(model, optimizer, step=0))
print(f"rank {bps.rank()} of {bps.size()} is done: {model.weight.sum().item():.6f}", flush=True)
bps.shutdown()
"""


def launched(tmp_path, *flags):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-m", "byteps.launch", "--local", "3", "--elastic", "redo", *flags]
    command += [sys.executable, str(script)]
    begun = time.monotonic()
    done = subprocess.run(
        command,
        env=clean_environment() | {"BPS_LOCAL_REDUCE": "0"},
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun


def test_a_launched_job_goes_on_without_rank_0(tmp_path):
    code, output, _ = launched(tmp_path, "--min-workers", "2")
    assert code == 0, output
    ends = sorted(line for line in output.splitlines() if "is done" in line)
    assert len(ends) == 2 and ends[0].split(":")[-1] == ends[1].split(":")[-1], output
    assert "rank 0 of 2 is done" in output and "rank 1 of 2 is done" in output
    assert "rank 0 was killed by SIGKILL (9); the job goes on with 2 workers here" in output
    assert output.count("epoch 2: 2 ranks and 1 server go on after") >= 4, output


def test_a_launched_job_with_too_few_left_ends_and_says_why(tmp_path):
    code, output, _ = launched(tmp_path, "--min-workers", "3")
    assert code == 137, output
    assert "2 workers of at least 3 (BPS_MIN_WORKERS) left" in output, output
    assert "is done" not in output


def test_an_error_behind_a_result_that_does_not_come_is_its_jobs(monkeypatch):
    """A script that looks at its loss finds NaN where results were awaited in a stream."""
    calls, restored = [], []

    class Counted(State):
        def sync(self):
            pass

        def restore(self):
            restored.append(len(calls))

    def train(state, has_come):
        calls.append(state)
        if len(calls) == 1:
            raise FloatingPointError("the loss is NaN")
        if len(calls) == 2 and not has_come:
            # Nor does the last step's, and the function has not looked.
            lost.append(1)
        return len(calls)

    def settle():
        if lost and lost.pop():
            raise PeerDiedError("rank 1 died")

    monkeypatch.setattr(byteps.elastic, "settle", settle)
    monkeypatch.setattr(byteps.elastic, "come_back", lambda: None)
    monkeypatch.setattr(_native, "may_return", lambda **_: True)
    monkeypatch.setattr(Counted, "on_reset", lambda self: None)
    lost: list[int] = []
    with pytest.raises(FloatingPointError):
        bps.elastic.run(train)(Counted(None), True)
    assert len(calls) == 1 and not restored
    calls.clear()
    lost.append(1)
    assert bps.elastic.run(train)(Counted(None), False) == 3
    assert restored == [1, 2]


LATE_S = 1.0


def saved_while_a_stream_waits():
    """Seconds until a stream waited for a result, and until a state was saved behind that."""
    bps.init()
    state = TorchState(None, None, step=0)
    with Pipeline().plugged_in():
        tensor = torch.ones(1000)
        # The host waits for the first round of each tensor.
        bps.push_pull_inplace(tensor, False, "ahead")
        bps.barrier()
        if bps.rank() == 1:
            time.sleep(LATE_S)
        begun = time.monotonic()
        handle = bps.push_pull_async_inplace(tensor, False, "ahead")
        _native.enqueue_results(_registry._find(handle).on_gpu)
        assert bps.wait(handle, timeout=30)
        waited = time.monotonic() - begun
        state.save()
        saved = time.monotonic() - begun
        bps.synchronize(handle)
        assert tensor[0] == 4.0
    return waited, saved


def test_a_state_is_saved_behind_what_streams_wait_for(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    with Cluster(2, environment=environment | {"BPS_ELASTIC": "redo"}) as job:
        waited, saved = job.run(saved_while_a_stream_waits)[0]
    assert waited < LATE_S / 2 <= saved, (waited, saved)


def trained_over_a_death(device, victim, steps):
    """The parameters after so many steps that are the same on all ranks, of which one dies midway;
    and what they are without others."""
    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.randn(steps, 16, 64, device=device)
    layers = (torch.nn.Linear(64, 64) for _ in range(4))
    model = torch.nn.Sequential(*layers).to(device)
    alone = copy.deepcopy(model)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )

    @bps.elastic.run
    def train(state):
        while state.step < steps:
            if state.step == steps // 2 and bps.size() == 3 and bps.rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = model(data[state.step]).square().mean()
            if not loss.isfinite():
                raise FloatingPointError("as many scripts do")
            loss.backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(TorchState(model, optimizer, step=0))
    own = torch.optim.SGD(alone.parameters(), lr=0.01)
    for one in data:
        own.zero_grad()
        alone(one).square().mean().backward()
        own.step()
    flat = [torch.cat([one.detach().flatten() for one in each.parameters()]).cpu()
            for each in (model, alone)]  # fmt: skip
    return bps.size(), *flat


def trained_on_gpus_that_are_none(*arguments):
    bps.init()
    with Pipeline().plugged_in() as gpu:
        result = trained_over_a_death("cpu", *arguments)
        assert gpu.handed_over > 0
        return result


def check_a_death(function, *arguments, environment):
    with Cluster(3, servers=2, environment=environment | {"BPS_ELASTIC": "redo"}) as job:
        job.start(function, *arguments)
        (size, first, alone), (_, second, _) = job.results(ranks=(0, 2))
        assert size == 2 and torch.equal(first, second)
        assert torch.allclose(first, alone, rtol=1e-4, atol=1e-6)
        assert "epoch 2: 2 ranks and 2 servers go on after" in job.log(), job.log()
        job.kill()


def test_ranks_go_back_to_a_commit_while_streams_wait(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    check_a_death(trained_on_gpus_that_are_none, 1, 40, environment=environment)
