"""The example of the README runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cluster import clean_environment

README = Path(__file__).parents[2] / "README.md"


def test_the_example_trains(tmp_path: Path) -> None:
    text = README.read_text()
    example = re.search(r"```python\n# train\.py\n(.*?)```", text, re.DOTALL)
    command = re.search(r"^bpslaunch (--local .*) python train\.py$", text, re.MULTILINE)
    assert example and command, "README.md has no example, or no command that runs it"
    program = tmp_path / "train.py"
    program.write_text(example[1])
    launcher = [sys.executable, "-m", "byteps.launch", *command[1].split()]
    done = subprocess.run(
        [*launcher, sys.executable, str(program)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=clean_environment(),
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"\[rank 0\] loss (\S+) on 2 ranks", done.stdout)
    assert said, done.stdout + done.stderr
    assert float(said[1]) < 1e-3, f"the example does not learn: loss {said[1]}"
