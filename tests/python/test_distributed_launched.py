"""``init_process_group("byteps")`` in programs that import nothing of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster import clean_environment

SECONDS = 240  # Importing torch takes long where tests run side by side.


ROOT = Path(__file__).parents[2]


def launch(folder: Path, ranks: int, program: str) -> str:
    """Runs a program under torchrun; what its ranks print."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    return torchrun(ranks, script)


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", str(script), *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_one_word(tmp_path):
    printed = launch(
        tmp_path,
        2,
        """
        import sys
        import torch
        import torch.distributed as dist

        assert "byteps._native" not in sys.modules
        # A group may be made again.
        for backend in ("byteps", "byteps", "cpu:byteps,cuda:gloo"):
            dist.init_process_group(backend)
            tensor = torch.full((1000,), dist.get_rank() + 1.0)
            dist.all_reduce(tensor)
            assert (tensor == 3).all()
            dist.destroy_process_group()
        print("rank done")
        """,
    )
    assert printed.count("rank done") == 2
    assert printed.count("all there") == 3, "the ranks have formed a job each time"


def test_groups_that_are_not_the_world(tmp_path):
    printed = launch(
        tmp_path,
        3,
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        served = []
        # Ranks 0 and 1 become a job. Rank 1 cannot be in that of ranks 1 and 2 as well.
        for ranks in ([0, 1], [1, 2], [0, 1]):
            group = dist.new_group(ranks, backend="byteps")
            if rank in ranks:
                tensor = torch.full((5,), rank + 1.0)
                dist.all_reduce(tensor, group=group)
                assert (tensor == sum(ranks) + 2).all()
                dist.broadcast(tensor, ranks[1], group=group)
                served.append(group._get_backend(torch.device("cpu"))._keys is not None)
        assert served == {0: [True, True], 1: [True, False, True], 2: [False]}[rank], served
        dist.barrier()
        dist.destroy_process_group()
        print("rank done")
        """,
    )
    assert printed.count("rank done") == 3


def test_example():
    printed = torchrun(2, ROOT / "python/examples/ddp_digits.py", "--epochs", "2")
    assert "accuracy 0." in printed and "over byteps" in printed


def test_torch_without_the_backend(tmp_path):
    """Importing torch loads nothing of the engine, and never fails because of this package."""
    program = """
        import sys
        import torch

        loaded = [name for name in sys.modules if name.startswith("byteps")]
        assert set(loaded) <= {"byteps", "byteps._autoload"}, loaded
        import torch.distributed as dist
        from byteps import _autoload

        _autoload.add()
        _autoload.add()
        assert dist.is_backend_available("byteps")
        assert "byteps._native" not in sys.modules
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stderr.strip()


def test_the_comparison_of_starts_runs():
    if os.environ.get("TEST_FRAMEWORKS") != "all":
        pytest.skip("a minute of starting jobs, on demand: tests/run --frameworks all")
    script = ROOT / "perf" / "start_up.py"
    options = ["--rounds", "1", "--json", "--ways", "bpslaunch-optimizer"]
    run = subprocess.run(
        [sys.executable, str(script), *options],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ours, peer = map(json.loads, run.stdout.splitlines())
    assert (ours["way"], peer["way"]) == ("bpslaunch-optimizer", "torchrun-gloo")
    assert min(ours["start_s"], peer["start_s"], ours["cpu_s"], peer["cpu_s"]) > 0
    assert peer["above_s"] == 0


def test_the_comparison_with_gloo_runs():
    script = ROOT / "perf" / "beside_ddp.py"
    sizes = ["--rounds", "1", "--layers", "2", "--width", "32", "--json", "16", "100000"]
    lines = [line for line in torchrun(2, script, *sizes).splitlines() if line.startswith("{")]
    small, large, training = map(json.loads, lines)
    assert (small["size_bytes"], large["size_bytes"]) == (16, 100_000)
    assert training["ddp_gradient_bytes"] == 4 * 2 * (32 * 32 + 32)
    assert all(found["ratio"] > 0 for found in (small, large, training))
