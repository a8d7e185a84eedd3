"""Jobs in which somebody is killed, stopped or cut off: a few runs of ``tests/kill-campaign``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cluster import clean_environment

CAMPAIGN = Path(__file__).parents[1] / "kill-campaign"
#: Begun within so many seconds, at most so many, and at least so many on the slowest machine.
SECONDS, RUNS, RUNS_MIN = 70, 60, 10


def test_jobs_go_on_or_end_by_name_whoever_dies():
    limits = ["--runs", str(RUNS), "--seconds", str(SECONDS), "--slow", "15"]
    done = subprocess.run(
        [str(CAMPAIGN), *limits],
        env=clean_environment() | {"PYTHON": sys.executable},
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS + 200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) runs as they should be, 0 failed$", done.stdout, re.MULTILINE)
    assert found and int(found[1]) >= RUNS_MIN, done.stdout
