"""A rank of torch on a host that `bps-perf gpu` staged.

    python gpu_rank.py PLAN

NCCL (or gloo, on CPUs) and this package's engine live in the one process and take turns, so that both meet the same
links, the same GPU and the same moment. PLAN is a JSON object; see `Plan`. The process says `ready`, and answers each
line that it is told with numbers:

    collective WAY BYTES           seconds of one sum of float32 over all ranks, until the GPU is done
    model NAME PRECISION WAY,...   makes a copy of the model for each way; answers its parameters
    steps WAY COUNT                seconds of a step, the mean of COUNT steps
    losses NAME PRECISION WAY COUNT   the loss of each of COUNT steps on real data, from the same seeds
    record NAME                    begins a timeline in the folder NAME of the plan's folder; answers nothing
    stop                           ends it; answers nothing

A collective's WAY is `peer`, `hierarchical`, `ours`, or `group`: the peer's call, on a process group of this package's.
One of training is `forward` (no more than that), `alone` (a step without any communication), `ddp`, `group` (the same
over a group of this package's), `hook` (the same over the peer's with this package's hook), `ours` or `cross`; `ddp`,
`ours` and `cross` also with `-bf16`, which halves what travels, and the last two with `-int8` or `-fp8`, which the
engine encodes.
A line that takes longer than the plan's patience ends the process, and says where each thread was.
"""

import contextlib
import copy
import datetime
import faulthandler
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

MARK = "bps-perf:"
PORT = 9100
CLASSES = 10
# In so many steps `CrossBarrier` finds out whether to overlap, and the streams come that far.
STEPS_OF_CROSS_TRIAL = 104


class Plan(NamedTuple):
    """What `bps-perf gpu` says about this process. Ranks count over hosts."""

    device: str
    rank: int
    hosts: int
    local_rank: int
    local_size: int
    master: str
    port: int
    has_engine: bool
    batch: int
    sequences: int
    patience_s: float
    timelines: str | None

    @property
    def size(self) -> int:
        return self.hosts * self.local_size


def say(text: str) -> None:
    print(MARK, text, flush=True)


class Clock:
    """Moments in the order of the device's work, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Between two moments, once all work is done."""
        return first.elapsed_time(last) / 1e3 if self.is_cuda else last - first

    def settle(self) -> None:
        """Waits until the device has nothing more to do."""
        if self.is_cuda:
            torch.cuda.synchronize()


# Models


class Bert(nn.Module):
    """A masked language model of the shape of BERT, from torch's own layers, with random weights."""

    def __init__(self, layers: int, hidden: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.places = nn.Embedding(length, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        # Without dropout: losses of two ways can be compared.
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.bias = nn.Parameter(torch.zeros(words))
        for table in (self.words, self.places, self.segments):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        first = torch.zeros_like(tokens)
        hidden = self.norm(self.words(tokens) + self.places(places) + self.segments(first))
        hidden = self.encoder(hidden).flatten(0, 1)[masked]
        return functional.linear(self.head(hidden), self.words.weight, self.bias)


class Small(nn.Module):
    """A convolutional network for machines without a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(256, CLASSES),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Mlp(nn.Module):
    """Layers that are quick on CPUs too, for the gradients that they have: 34 MB."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        hidden = (nn.Linear(width, width) for _ in range(layers))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, width), *hidden)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images))


class Work(NamedTuple):
    """What is trained: a model, the same on all ranks; this rank's own input and aim; how an optimizer is made."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    aim: torch.Tensor
    optimizer: Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def images(name: str, side: int, plan: Plan, device: torch.device) -> Work:
    """A network for images of the side, and one synthetic batch that stays on the device."""
    torch.manual_seed(1)
    with device:
        if name == "small":
            model = Small()
        elif name == "mlp":
            model = Mlp(layers=8, width=1024)
        else:
            import torchvision

            model = getattr(torchvision.models, name)(weights=None)
        torch.manual_seed(1000 + plan.rank)
        inputs = torch.randn(plan.batch, 3, side, side)
        return Work(model, (inputs,), torch.randint(CLASSES, (plan.batch,)), sgd)


def sentences(shape: dict[str, int], plan: Plan, device: torch.device) -> Work:
    """A language model, and one synthetic batch of which 15 of 100 words are to be guessed."""
    torch.manual_seed(1)
    with device:
        model, count = Bert(**shape), plan.sequences * shape["length"]
        torch.manual_seed(1000 + plan.rank)
        tokens = torch.randint(shape["words"], (plan.sequences, shape["length"]))
        masked = torch.randperm(count)[: max(1, count * 15 // 100)].sort().values
        return Work(model, (tokens, masked), tokens.flatten()[masked], adamw)


BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "words": 30522, "length": 512}
BERT_SMALL = {"layers": 2, "hidden": 32, "heads": 2, "words": 200, "length": 16}
WORKS: dict[str, Callable[[Plan, torch.device], Work]] = {
    "vgg16": lambda *where: images("vgg16", 224, *where),
    "resnet50": lambda *where: images("resnet50", 224, *where),
    "resnet152": lambda *where: images("resnet152", 224, *where),
    "densenet121": lambda *where: images("densenet121", 224, *where),
    "efficientnet_b0": lambda *where: images("efficientnet_b0", 224, *where),
    "vit_b_16": lambda *where: images("vit_b_16", 224, *where),
    "resnet18": lambda *where: images("resnet18", 32, *where),
    "small": lambda *where: images("small", 32, *where),
    "mlp": lambda *where: images("mlp", 8, *where),
    "bert-large": lambda *where: sentences(BERT_LARGE, *where),
    "bert-small": lambda *where: sentences(BERT_SMALL, *where),
}


# Ways to train


class Training:
    """A copy of a model that is trained in one way."""

    def __init__(
        self, way: str, work: Work, precision: str, device: torch.device, group: Any = None
    ) -> None:
        self.work, self.device, self.precision = work, device, precision
        self.kind, _, wire = way.partition("-")
        self.raw = self.model = copy.deepcopy(work.model)
        self.optimizer = work.optimizer(self.raw.parameters())
        if self.kind in ("ddp", "group", "hook"):
            # All ranks start alike, and this package leaves buffers alone too: what is compared
            # are gradients.
            self.model = nn.parallel.DistributedDataParallel(
                self.raw,
                device_ids=[device.index] if device.type == "cuda" else None,
                init_sync=False,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                process_group=group if self.kind == "group" else None,
            )
            if self.kind == "hook":
                import byteps.torch as bps

                self.model.register_comm_hook(None, bps.comm_hook)
            elif wire:
                self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.kind in ("ours", "cross"):
            import byteps.torch as bps

            named = list(self.raw.named_parameters())
            codecs = bps.Compression
            compression = {
                "": codecs.none,
                "bf16": codecs.bf16,
                "int8": codecs.int8(),
                "fp8": codecs.fp8_e4m3(),
            }[wire]
            if self.kind == "ours":
                self.optimizer = bps.DistributedOptimizer(
                    self.optimizer, named, compression=compression
                )
            else:
                from byteps.torch.cross_barrier import CrossBarrier

                self.optimizer = CrossBarrier(
                    self.raw, self.optimizer, named, compression=compression
                )

    def loss(self, inputs: tuple[torch.Tensor, ...], aim: torch.Tensor) -> torch.Tensor:
        amp = torch.autocast(self.device.type, torch.bfloat16)
        with amp if self.precision == "amp" else contextlib.nullcontext():
            return functional.cross_entropy(self.model(*inputs).float(), aim)

    def step(self, clock: Clock) -> Any:
        """Does one step of training; returns the moment when its forward pass was over."""
        if self.kind == "forward":
            self.loss(self.work.inputs, self.work.aim)
            return clock.now()
        self.optimizer.zero_grad()
        loss = self.loss(self.work.inputs, self.work.aim)
        moment = clock.now()
        loss.backward()
        self.optimizer.step()
        return moment

    def finish(self, clock: Clock) -> None:
        """Waits until nothing of a step is under way."""
        if self.kind == "cross":
            self.optimizer.flush()
        clock.settle()


# The rank


class Rank:
    """This process: its groups, its tensors and its models."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        is_cuda = plan.device == "cuda"
        # Every GPU is visible, and each host takes those that follow its neighbour's.
        self.device = (
            torch.device("cuda", plan.rank % torch.cuda.device_count())
            if is_cuda
            else torch.device("cpu")
        )
        self.clock = Clock(self.device)
        if is_cuda:
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True
        torch.set_num_threads(1)
        self.tensors: dict[int, torch.Tensor] = {}
        self.trainings: dict[str, Training] = {}
        self._join_groups("nccl" if is_cuda else "gloo")
        if plan.has_engine:
            import byteps.torch as bps

            bps.init()
            self.bps = bps
            self.group = dist.new_group(backend="byteps")

    def _join_groups(self, backend: str) -> None:
        plan = self.plan
        dist.init_process_group(
            backend,
            init_method=f"tcp://{plan.master}:{plan.port}",
            rank=plan.rank,
            world_size=plan.size,
            timeout=datetime.timedelta(seconds=plan.patience_s),
        )
        # Barriers go by the CPUs, and are the same before every way.
        self.control = dist.new_group(backend="gloo")
        self.inside = self.across = self.group = None
        if plan.hosts > 1 and plan.local_size > 1:
            for host in range(plan.hosts):
                group = dist.new_group(
                    [host * plan.local_size + local for local in range(plan.local_size)]
                )
                self.inside = group if host == plan.rank // plan.local_size else self.inside
            for local in range(plan.local_size):
                group = dist.new_group(
                    [host * plan.local_size + local for host in range(plan.hosts)]
                )
                self.across = group if local == plan.local_rank else self.across

    def barrier(self) -> None:
        self.clock.settle()
        dist.barrier(self.control)

    # Collectives

    def _hierarchical(self, tensor: torch.Tensor) -> None:
        shard = tensor.chunk(self.plan.local_size)[self.plan.local_rank]
        dist.reduce_scatter_tensor(shard, tensor, group=self.inside)
        dist.all_reduce(shard, group=self.across)
        dist.all_gather_into_tensor(tensor, shard, group=self.inside)

    def collective(self, way: str, count: str) -> list[float]:
        size = int(count)
        if size not in self.tensors:
            self.tensors[size] = torch.empty(size // 4, device=self.device)
        tensor = self.tensors[size]
        tensor.fill_(1.0)
        self.barrier()
        begin = time.perf_counter()
        if way == "ours":
            self.bps.push_pull_inplace(tensor, average=False, name=f"collective.{size}")
        elif way == "group":
            dist.all_reduce(tensor, group=self.group)
        elif way == "hierarchical":
            self._hierarchical(tensor)
        else:
            dist.all_reduce(tensor)
        self.clock.settle()
        seconds = time.perf_counter() - begin
        if not bool((tensor == self.plan.size).all()):
            raise AssertionError(f"a wrong sum of {size} bytes by {way}")
        return [seconds]

    # Training

    def forget(self) -> None:
        for training in self.trainings.values():
            training.finish(self.clock)
        self.trainings.clear()
        # Hooks and their models refer to each other.
        gc.collect()
        if self.clock.is_cuda:
            torch.cuda.empty_cache()

    def model(self, name: str, precision: str, ways: str) -> list[float]:
        self.forget()
        work = WORKS[name](self.plan, self.device)
        for way in ways.split(","):
            training = self.trainings[way] = Training(way, work, precision, self.device, self.group)
            if training.kind == "cross":
                # It tries first whether steps that overlap are the faster ones.
                for _ in range(STEPS_OF_CROSS_TRIAL):
                    training.step(self.clock)
                training.finish(self.clock)
                overlap = training.optimizer._pace.overlaps
                kind = "overlap the next forward pass" if overlap else "are whole"
                print(f"rank {self.plan.rank}: steps of {name} {kind}", file=sys.stderr)
        return [float(sum(one.numel() for one in work.model.parameters()))]

    def steps(self, way: str, count: str) -> list[float]:
        """From the end of a forward pass to that of the one COUNT steps later.

        So a step counts whole wherever a way waits for what it sent: at the step's end, or at the
        next one's layers.
        """
        training, steps = self.trainings[way], int(count)
        self.barrier()
        moments = [training.step(self.clock) for _ in range(steps + 1)]
        training.finish(self.clock)
        return [self.clock.seconds(moments[0], moments[-1]) / steps]

    def losses(self, name: str, precision: str, way: str, count: str) -> list[float]:
        from sklearn.datasets import load_digits

        self.forget()
        work = WORKS[name](self.plan, self.device)
        training = Training(way, work, precision, self.device, self.group)
        digits = load_digits()
        pictures = torch.tensor(digits.images, dtype=torch.float32).div_(16).sub_(0.3)
        pictures = functional.interpolate(pictures.unsqueeze(1), size=32, mode="bilinear").expand(
            -1, 3, -1, -1
        )
        pictures, labels = (
            pictures.contiguous().to(self.device),
            torch.tensor(digits.target, device=self.device),
        )
        order = torch.Generator().manual_seed(7)
        batch, losses = 32, []
        for _ in range(int(count)):
            # The same draw on all ranks, of which each takes its part.
            drawn = torch.randint(len(labels), (self.plan.size, batch), generator=order)[
                self.plan.rank
            ]
            training.optimizer.zero_grad()
            loss = training.loss((pictures[drawn],), labels[drawn])
            loss.backward()
            training.optimizer.step()
            losses.append(loss.detach())
        training.finish(self.clock)
        self._check_equal(training.raw, way)
        return torch.stack(losses).double().tolist()

    # Timelines

    def record(self, name: str) -> list[float]:
        self.bps.start_timeline(f"{self.plan.timelines}/{name}")
        # A server records before it takes keys that are declared later: when a tensor of a new name is summed, whose
        # keys each rank waits for, nothing that comes behind it is missed.
        self.bps.push_pull(torch.zeros(1, device=self.device), name=f"timeline.{name}")
        return []

    def stop(self) -> list[float]:
        self.bps.stop_timeline()
        return []

    def _check_equal(self, model: nn.Module, way: str) -> None:
        """All ranks have come to the same parameters, to the bit."""
        sums = torch.stack([one.detach().double().sum() for one in model.parameters()]).cpu()
        all_sums = [torch.empty_like(sums) for _ in range(self.plan.size)]
        dist.all_gather(all_sums, sums, group=self.control)
        for rank, others in enumerate(all_sums):
            if not torch.equal(others, sums):
                raise AssertionError(
                    f"the parameters of rank {rank} differ from those of rank {self.plan.rank} by {way}"
                )

    def end(self) -> None:
        self.forget()
        if self.plan.has_engine:
            self.bps.shutdown()
        dist.destroy_process_group()


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Shows every thread's stack and ends the process where what is within takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    # Newer releases of torch rename arguments that older ones need.
    warnings.simplefilter("ignore", FutureWarning)
    # Earlier than whoever waits for this process, so that it says why.
    patience = max(plan.patience_s - 5, 1)
    with deadline(patience):
        rank = Rank(plan)
        rank.barrier()
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
