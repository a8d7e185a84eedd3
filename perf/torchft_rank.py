"""A rank of `beside_torchft.py` under torchft: trains until it is told to stop, and writes down each step.

torchft is imported by whoever calls this, in a process that has nothing of this package: the work and the lines are
those of `elastic_rank.py`.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft

import elastic_rank

#: A call that fails, fails because its peer is gone, which gloo sees at once.
TIMEOUT = timedelta(seconds=30)


def train(log: Path, megabytes: float, stop: Path, lighthouse: str, place: int) -> None:
    """Appends one JSON object for each committed step to `log`; returns at a step after the file `stop` is there.

    Each rank is a replica group of its own, as torchft has it for data parallelism over hosts of one rank.
    """
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # The state is to come from elsewhere.
    model = elastic_rank.model_of(megabytes)
    width = model[0].in_features
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{place}",
        hostname="127.0.0.1",
    )
    # torchft's DistributedDataParallel (0.2.0) fails by an assertion of its own on torch 2.15 when a call fails, and its
    # PureDistributedDataParallel does not wait for sums in host memory: so its calls are made and awaited here.
    works: list[dist.Work] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: works.append(manager.allreduce(parameter.grad))
        )
    optimizer = torchft.Optimizer(manager, sgd)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not stop.exists():
        before = manager.current_step()
        inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(place))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        if manager.current_step() == before:
            continue  # Not committed.
        line = {
            "at": time.time(),
            "pid": os.getpid(),
            "event": "step",
            "step": manager.current_step(),
            "size": manager.num_participants(),
            "digest": elastic_rank.digest(model),
            "loss": loss.item(),
        }
        os.write(out, (json.dumps(line) + "\n").encode())
    manager.shutdown(wait=False)
