"""What a model tells right after as many seconds: codecs of this package beside DDP over gloo, on slow links.

    .venv/bin/python perf/compression_beside_ddp.py [--ranks 4] [--rate 500mbit] [--seconds 120] [--ways ddp,none,auto]
        [--results perf/results/MACHINE.jsonl]

Each rank is a host of its own: a network namespace, whose link to a bridge a token bucket shapes in both directions.
A server with one core stands in each of them (colocated), and the scheduler in the first. The ways take turns, each for
the same seconds of training from the same parameters and with the same characters: the transformer of
python/examples/compression_text.py, wider. Rank 0 tells the share of held-out characters told right at each mark;
looking takes none of the time. The last lines say when each way had reached what DDP had at the end.

DDP's ways are `ddp`, `ddp-fp16` and `ddp-powersgd1`, `ddp-powersgd2` (rank 1 and 2); all others are encodings of this
package, and `none`. A way that does not end in time is killed, and its row says so. It needs root, `ip` and `tc`.
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python" / "examples"))

WAYS = (
    "ddp", "ddp-fp16", "ddp-powersgd1", "ddp-powersgd2", "none", "auto", "int8", "fp8_e4m3",
    "dithering(levels=15)", "onebit(scaling)+feedback+momentum(0.9)",
    "topk(k=0.01)+feedback+momentum(0.9)",
)  # fmt: skip
MARKS = 6
STEPS_BETWEEN_LOOKS = 5
WARM_UP_STEPS = 50
#: What a way may take beyond its seconds: to start, to look, and to end.
PATIENCE_SECONDS = 120
#: What all others may take to end behind the first rank.
ENDING_SECONDS = 5
PORT, GLOO_PORT = 9200, 9201


def with_parent() -> None:
    """Lets a process end with this one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def address(host: int) -> str:
    return f"10.98.0.{host + 1}"


class Stage:
    """Namespaces on a bridge, each for as long as a process holds it."""

    def __init__(self, hosts: int, rate: str) -> None:
        self.holders: list[subprocess.Popen] = []
        try:
            self.hub = self._namespace()
            self._ip(self.hub, "link add name bridge type bridge")
            self._ip(self.hub, "link set bridge up")
            self.hosts = [self._namespace() for _ in range(hosts)]
            for number, host in enumerate(self.hosts):
                peer = f"peer name eth0 netns {host}"
                self._ip(self.hub, f"link add host{number} type veth {peer}")
                self._ip(self.hub, f"link set host{number} master bridge up")
                self._ip(host, "link set lo up")
                self._ip(host, f"address add {address(number)}/24 dev eth0")
                self._ip(host, "link set eth0 up")
                shaped = f"root tbf rate {rate} burst 128k latency 50ms"
                self.run(host, *f"tc qdisc add dev eth0 {shaped}".split())
                self.run(self.hub, *f"tc qdisc add dev host{number} {shaped}".split())
        except BaseException:
            self.close()
            raise

    def _namespace(self) -> int:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "86400"], preexec_fn=with_parent)  # noqa: PLW1509
        self.holders.append(holder)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            if holder.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("there is no network namespace: run it as root")
            time.sleep(0.01)
        return holder.pid

    def words(self, holder: int, *words: str) -> list[str]:
        return ["nsenter", "-t", str(holder), "--net", "--", *words]

    def run(self, holder: int, *words: str) -> None:
        subprocess.run(self.words(holder, *words), check=True, timeout=30)

    def _ip(self, holder: int, words: str) -> None:
        self.run(holder, "ip", *words.split())

    def close(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.wait()


def run_way(stage: Stage, way: str, arguments: argparse.Namespace) -> dict:
    """Trains in one way, and returns what it told at each mark, or why it did not."""
    ranks = len(stage.hosts)
    common = os.environ | {
        "DMLC_PS_ROOT_URI": address(0), "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(ranks), "DMLC_NUM_SERVER": str(ranks),
        "BYTEPS_LOCAL_SIZE": "1", "BYTEPS_FORCE_DISTRIBUTED": "1", "BYTEPS_MIN_COMPRESS_BYTES": "1024",
        "BYTEPS_PARTITION_BYTES": "1M", "BPS_SERVER_CORES": "1", "BPS_PIN": "0",
        "BPS_LOG_LEVEL": "warning", "BPS_JOB_KEY": secrets.token_hex(32), "MASTER_ADDR": address(0), "MASTER_PORT": str(GLOO_PORT),
        "GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        # torch's hook for PowerSGD synchronizes with the GPU of a CPU's tensors, where it sees one.
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    everything: list[subprocess.Popen] = []

    def start(
        host: int, words: list[str], pipe: bool = False, **variables: str
    ) -> subprocess.Popen:
        output = subprocess.PIPE if pipe else subprocess.DEVNULL
        words = stage.words(stage.hosts[host], sys.executable, *words)
        child = subprocess.Popen(
            words,
            env=common | variables,
            stdout=output,
            text=True,
            preexec_fn=with_parent,  # noqa: PLW1509
        )
        everything.append(child)
        return child

    try:
        if not way.startswith("ddp"):
            start(0, ["-m", "byteps._programs", "scheduler"], DMLC_ROLE="scheduler")
            for host in range(ranks):
                start(host, ["-m", "byteps._programs", "server"], DMLC_ROLE="server")
        said = [
            "--as-rank",
            way,
            "--seconds",
            str(arguments.seconds),
            "--width",
            str(arguments.width),
        ]
        said += ["--batch", str(arguments.batch), "--learning-rate", str(arguments.learning_rate)]
        script = str(Path(__file__).resolve())
        workers = [
            start(host, [script, *said], host == 0, DMLC_WORKER_ID=str(host), RANK=str(host))
            for host in range(ranks)
        ]
        try:
            output, _ = workers[0].communicate(timeout=arguments.seconds + PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return {
                "way": way,
                "failed": f"no end after {arguments.seconds + PATIENCE_SECONDS:.0f} s",
            }
        if workers[0].returncode != 0:
            return {"way": way, "failed": f"it ended with {workers[0].returncode}"}
        for child in everything:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=ENDING_SECONDS)
        return json.loads(output.splitlines()[-1])
    finally:
        for child in everything:
            child.kill()
            child.wait()


class Ddp:
    """DDP over gloo, with a hook."""

    def __init__(self, way: str, model: nn.Module) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        dist.init_process_group("gloo")
        self.model = nn.parallel.DistributedDataParallel(model)
        if way == "ddp-fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif way.startswith("ddp-powersgd"):
            rank = int(way.removeprefix("ddp-powersgd"))
            state = power.PowerSGDState(None, rank, start_powerSGD_iter=10)
            self.model.register_comm_hook(state, power.powerSGD_hook)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def largest(self, value: torch.Tensor) -> float:
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def close(self) -> None:
        dist.destroy_process_group()


class Ours:
    """This package's optimizer."""

    def __init__(self, way: str, model: nn.Module) -> None:
        import byteps.torch as bps

        bps.init()
        self.bps, self.model = bps, model
        self.compression = bps.Compression.none if way == "none" else bps.Codec(way)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        parameters = self.model.named_parameters()
        made = self.bps.DistributedOptimizer(optimizer, parameters, compression=self.compression)
        self.bps.broadcast_parameters(self.model.state_dict(), root_rank=0)
        return made

    def largest(self, value: torch.Tensor) -> float:
        return self.bps.push_pull(value, average=False, name="over").item()

    def close(self) -> None:
        self.bps.shutdown()


def train(way: str, arguments: argparse.Namespace) -> dict:
    """A rank. All stop after the same step: that before which rank 0 has had its seconds."""
    import compression_text as example

    example.WIDTH = arguments.width
    torch.set_num_threads(1)
    text, held_out, characters = example.load(list(example.DOCUMENTS.glob("*.md")))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    model = example.Transformer(characters)
    job = (Ddp if way.startswith("ddp") else Ours)(way, model)
    # What a codec adds in front of itself, the optimizer is not to add behind it.
    momentum = 0.0 if "+momentum" in way else 0.9
    plain = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=momentum)
    warm_up = torch.optim.lr_scheduler.LinearLR(plain, 0.01, total_iters=WARM_UP_STEPS)
    optimizer = job.optimizer(plain)
    order, share = torch.Generator().manual_seed(3), arguments.batch // ranks
    job.largest(torch.zeros(1))
    spent, steps, told = 0.0, 0, []
    marks = [arguments.seconds * (number + 1) / MARKS for number in range(MARKS)]
    begun = time.perf_counter()
    while True:
        starts = torch.randint(len(text) - example.CONTEXT, (arguments.batch,), generator=order)
        read, follows = example.windows(text, starts[rank * share :][:share])
        optimizer.zero_grad()
        nn.functional.cross_entropy(job.model(read).flatten(0, 1), follows.flatten()).backward()
        optimizer.step()
        warm_up.step()
        steps += 1
        if steps % STEPS_BETWEEN_LOOKS:
            continue
        seconds = spent + time.perf_counter() - begun
        if rank == 0 and seconds >= marks[len(told)]:
            now = {"seconds": seconds, "steps": steps, "accuracy": accuracy(model, held_out)}
            # A look may be late by more than one mark.
            told += [now for mark in marks[len(told) :] if mark <= seconds]
        is_over = job.largest(torch.tensor([float(rank == 0 and len(told) == MARKS)]))
        spent, begun = seconds, time.perf_counter()
        if is_over:
            break
    job.close()
    parameters = sum(one.numel() for one in model.parameters())
    return {"way": way, "parameters": parameters, "marks": told}


def accuracy(model: nn.Module, held_out: torch.Tensor) -> float:
    """The share of held-out characters that are told right."""
    import compression_text as example

    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - example.CONTEXT - 1, 64).long()
        read, told = example.windows(held_out, starts)
        return (model(read).argmax(-1) == told).float().mean().item()


def reached(row: dict, wanted: float) -> float | None:
    """The seconds of the first mark that was as good."""
    return next((one["seconds"] for one in row["marks"] if one["accuracy"] >= wanted), None)


def show(rows: list[dict]) -> None:
    first = next((row for row in rows if row["way"] == "ddp" and "marks" in row), None)
    wanted = first["marks"][-1]["accuracy"] if first else None
    for row in rows:
        if "failed" in row:
            print(f"{row['way']:26} {row['failed']}")
            continue
        told = "  ".join(f"{one['seconds']:5.0f} s {one['accuracy']:.3f}" for one in row["marks"])
        when = reached(row, wanted) if wanted is not None else None
        row["seconds_to_ddp"] = when
        end = f"{row['marks'][-1]['steps']} steps"
        as_good = "not as good as DDP" if when is None else f"as good as DDP after {when:.0f} s"
        print(
            f"{row['way']:26} {told}  {end}, {as_good if wanted is not None else 'no DDP beside'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--rate", default="500mbit", help="of each link in each direction, as tc says it"
    )
    parser.add_argument("--seconds", type=float, default=120, help="of training, for each way")
    parser.add_argument("--ways", default=",".join(WAYS), help="in turn, with commas between")
    parser.add_argument("--width", type=int, default=256, help="of the transformer")
    parser.add_argument("--batch", type=int, default=32, help="windows of a global batch")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--results", type=Path, help="file to which the rows are added")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        print(json.dumps(train(arguments.as_rank, arguments)), flush=True)
        return 0
    if os.geteuid() != 0:
        raise SystemExit("only root can make network namespaces")
    stage, rows = Stage(arguments.ranks, arguments.rate), []
    shape = {name: getattr(arguments, name) for name in ("ranks", "rate", "width", "batch")}
    try:
        for way in arguments.ways.split(","):
            load = os.getloadavg()[0]
            rows.append(run_way(stage, way, arguments) | shape | {"load_before": load})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        stage.close()
    show(rows)
    if arguments.results:
        about = {
            "command": "compression_beside_ddp",
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
        }
        with arguments.results.open("a") as file:
            file.writelines(json.dumps(about | row, sort_keys=True) + "\n" for row in rows)
    ours = [row for row in rows if not row["way"].startswith("ddp")]
    return 0 if all("marks" in row for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
