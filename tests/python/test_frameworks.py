"""Programs of other frameworks, to which this package is the name of a backend."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import clean_environment

EXAMPLES = Path(__file__).parents[2] / "python" / "examples"
SECONDS = 240  # Importing torch and a framework takes long where tests run side by side.

#: Each example, how many ranks run it, and what it imports.
PROGRAMS = {
    "ddp_digits": (2, "sklearn"),
    "fsdp_hybrid": (4, "torch"),
    "hf_accelerate": (2, "accelerate"),
    "hf_trainer": (2, "transformers"),
    "lightning_ddp": (2, "lightning"),
}


def losses(launcher, program, ranks, backend):
    """The losses that rank 0 prints; all ranks end well."""
    launchers = {
        "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
        "bpslaunch": ["byteps.launch", "--local", str(ranks), sys.executable],
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", *launchers[launcher]),
            *(str(EXAMPLES / f"{program}.py"), "--backend", backend),
        ],
        env=clean_environment() | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    found = re.findall(r"(?:epoch|step) (\d+): loss ([0-9.]+)", run.stdout)
    assert len(found) >= 3, run.stdout
    if backend == "byteps":
        assert re.search(rf"all there after .*{ranks} ranks", run.stdout), run.stdout
    return [float(loss) for _, loss in found]


#: What runs always, by the launcher that is ours; each program starts three jobs otherwise.
ALWAYS = "hf_trainer"


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_over_gloo(program):
    ranks, package = PROGRAMS[program]
    runs_all = os.environ.get("TEST_FRAMEWORKS") == "all"
    if not runs_all and program != ALWAYS:
        pytest.skip("runs on demand: tests/run --frameworks all")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; python/environment installs it")
    wanted = losses("torchrun", program, ranks, "gloo")
    assert wanted[-1] < wanted[0], "it learns"
    for launcher in ("torchrun", "bpslaunch") if runs_all else ("bpslaunch",):
        found = losses(launcher, program, ranks, "byteps")
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-4), launcher
