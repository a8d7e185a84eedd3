"""The wheel by itself: installed with plain pip where there is nothing else, and run there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import clean_environment

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("wheel_rank.py")
OLDEST, NEWEST = "3.10", "3.14"
PROGRAMS = ["bpslaunch", "bps-server", "bps-scheduler", "bps-top"]
JOB = ["bpslaunch", "--local", "2", "--servers", "1", "--server-cores", "1", "--gpus", "none"]


def output(command, **options):
    """What the command prints; fails, with that, unless its status is 0."""
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel():
    """The wheel that python/environment has built and installed here."""
    built = list((ROOT / f"target/wheels-{platform.machine()}").glob("byteps-*.whl"))
    if not built:
        pytest.skip("python/environment has built no wheel for other machines: it found no zig")
    assert len(built) == 1, built
    return built[0]


def test_its_name_says_where_it_runs(wheel):
    """As python/wheel has it checked: against what its symbols ask for."""
    assert wheel.name.endswith(f"-cp310-abi3-manylinux_2_28_{platform.machine()}.whl")
    auditwheel = Path(sys.executable).with_name("auditwheel")
    if not auditwheel.exists():
        pytest.skip("auditwheel is not installed: python/environment installs it")
    shown = output([auditwheel, "show", wheel])
    oldest = shown.partition('platform tag: "manylinux_2_')[2].partition("_")[0]
    assert oldest and int(oldest) <= 28, shown


def check(run, python, release, rank):
    """The programs start, and two ranks and a server sum arrays."""
    for program in PROGRAMS:
        assert run(program, "--version").startswith(program)
    said = run(*JOB, python, rank)
    for number in (0, 1):
        assert f"rank {number} of 2 on Python {release} with byteps" in said, said


def oldest_python():
    """A Python of the oldest release that the wheel is for: one of this machine's, or of uv's."""
    name = f"python{OLDEST}"
    known = Path.home().glob(f".pyenv/versions/{OLDEST}.*/bin/{name}")
    for candidate in (*known, shutil.which(name)):
        # What is on the path may be a stand-in of a version manager's, which knows no such Python.
        command = [candidate, "-c", "import ensurepip, venv"]
        if candidate and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return candidate
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    folder = ["--install-dir", str(ROOT / "target/pythons"), OLDEST]
    try:
        output([uv, "python", "install", "--quiet", "--no-bin", *folder])
    except (OSError, AssertionError) as error:
        pytest.skip(f"there is no Python {OLDEST} here, and uv cannot install one: {error!s:.300}")
    return next((ROOT / "target/pythons").glob(f"cpython-{OLDEST}.*/bin/{name}"))


def test_on_the_oldest_python(wheel, tmp_path):
    programs = tmp_path / "venv/bin"
    output([oldest_python(), "-m", "venv", tmp_path / "venv"])
    output([programs / "pip", "install", "--no-index", wheel])
    environment = clean_environment() | {"BPS_LOCAL_REDUCE": "0"}
    del environment["PYTHONPATH"]

    def run(program, *arguments):
        return output([programs / program, *arguments], env=environment)

    check(run, programs / "python", OLDEST, RANK)


@pytest.fixture(scope="module")
def root():
    """A root with the newest Python and its libraries, and nothing else."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and util-linux, to run below a root of its own")
    command = [ROOT / "tests/wheel/root"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode != 0:
        pytest.skip(f"no root with Python {NEWEST}: {made.stderr.strip()[-300:]}")
    return Path(made.stdout.strip())


def test_in_a_bare_root_on_the_newest_python(wheel, root):
    """No shell, no compiler, and no library but those that Python itself depends on."""
    mounts = 'for it in proc sys dev; do mount --rbind "/$it" "$0/$it"; done'
    enter = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec chroot "$0" "$@"', root]
    path = "/job/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def run(*command):
        return output([*enter, *command], env={"PATH": path, "BPS_LOCAL_REDUCE": "0"})

    shutil.rmtree(root / "job", ignore_errors=True)
    (root / "job").mkdir()
    for file in (wheel, RANK):
        shutil.copy(file, root / "job")
    run(f"python{NEWEST}", "-m", "venv", "/job/venv")
    run("pip", "install", "--no-index", f"/job/{wheel.name}")
    check(run, "/job/venv/bin/python", NEWEST, f"/job/{RANK.name}")
