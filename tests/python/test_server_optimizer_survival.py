"""Optimizers that step on the servers, in jobs that outlive a rank and a server."""

from __future__ import annotations

import os
import signal

import cloudpickle

from cluster import Cluster, servers_of

SURVIVED_STEPS = 20


def survives(launcher):
    """Steps while a rank and then a server are killed. Gradients are alike on all ranks, so their
    average does not say how many there are."""
    import torch

    import byteps.torch as bps

    bps.init()
    is_doomed = bps.rank() == 2
    model = torch.nn.Linear(300, 7)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    servers = bps.ServerOptimizer(sgd, model.named_parameters())
    state = bps.elastic.TorchState(model, servers, step=0)
    epochs, begun = [], []

    @bps.elastic.run
    def train(state):
        begun.append(state.step)
        while state.step < SURVIVED_STEPS:
            for param in model.parameters():
                param.grad = torch.full_like(param, 1 / (1 + state.step))
            if is_doomed and state.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            if bps.rank() == 0 and state.step == 13 and len(epochs) == 1:
                os.kill(servers_of(launcher)[0], signal.SIGKILL)
            servers.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    state.register_reset_callbacks([lambda: epochs.append(bps.size())])
    train(state)
    alone = torch.nn.Linear(300, 7)
    torch.nn.init.ones_(alone.weight)
    torch.nn.init.zeros_(alone.bias)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    for step in range(SURVIVED_STEPS):
        for param in alone.parameters():
            param.grad = torch.full_like(param, 1 / (1 + step))
        sgd.step()
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    kept = bps.server_state_dict(servers)["weight"]
    assert kept["step"] == SURVIVED_STEPS
    wanted = sgd.state[alone.weight]["momentum_buffer"]
    torch.testing.assert_close(kept["momentum_buffer"], wanted, rtol=1e-6, atol=1e-6)
    return begun, epochs


def test_servers_state_outlives_a_rank_and_a_server():
    environment = {"BPS_ELASTIC": "redo", "BPS_MIN_WORKERS": "2"}
    with Cluster(3, servers=2, environment=environment) as job:
        job.start(survives, job.process.pid)
        for begun, sizes in job.results(ranks=(0, 1)):
            # From the last commit on, each time.
            assert begun == [0, 5, 10] and sizes == [2, 2]
        for rank in (0, 1):
            job._ranks[rank].send_bytes(cloudpickle.dumps(None))
        assert job.wait(30) == 0, job.log()
        job.kill()
