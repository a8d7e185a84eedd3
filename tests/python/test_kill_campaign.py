"""Jobs in which somebody is killed, stopped or cut off: a few runs of ``tests/kill-campaign``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kill_rank
import kill_verdict
from cluster import clean_environment
from kill_plan import Fault, Member

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
    for how in ("redo", "shrink"):
        assert re.search(rf"\b{how}: [1-9]\d* runs, 0 failed", done.stdout), done.stdout


def test_an_average_is_told_from_one_that_is_divided_by_another_number():
    own = kill_rank.residues(5, kill_rank.MARKS).float() * kill_rank.SHARES

    def average(places, count):
        return own * sum(1 << kill_rank.MARK_BITS * place for place in places) / count

    assert kill_rank.averaged(average((0, 2, 4), 3), 5) == [[0, 2, 4]]
    whole, short = average((0, 1, 2), 3), average((0, 2), 2)
    short[kill_rank.MARKS // 2 :] = whole[kill_rank.MARKS // 2 :]
    assert sorted(kill_rank.averaged(short, 5)) == [[0, 1, 2], [0, 2]]
    for wrong in (average((0, 2), 3), whole * 2, whole * 3, whole.roll(1), whole * 0):
        with pytest.raises(ValueError, match="averages that are none"):
            kill_rank.averaged(wrong, 5)


def lines_of_a_job():
    """Rank 1 of three dies in step 2, of which some parts have its contribution."""
    job = {"epoch": 1, "size": 3}
    lines = []
    for rank in range(3):
        begun = {"event": "synchronized", "digest": "0", "step": 0}
        lines.append(job | begun | {"rank": rank, "place": rank, "pid": rank})
    for step, sums in ((1, [[0, 1, 2]] * 2), (2, [[0, 1, 2], [0, 2]]), (3, [[0, 2]] * 2)):
        for rank in sums[-1]:
            sets = {"sums": sums, "averages": [sums[0]]}
            sets |= {"members": sums[-1], "contributors": sums[-1]}
            known = {"event": "step", "digest": str(step), "step": step}
            lines.append(job | known | sets | {"rank": rank, "place": rank, "pid": rank})
    return lines


def judge(lines, how="shrink", dead=1):
    fault = Fault("kill", Member("rank", dead))
    plan = SimpleNamespace(elastic=how, fault=fault, openings=(), loss=None)
    run = SimpleNamespace(plan=plan, dead={fault.victim}, job=SimpleNamespace(lines=lines))
    kill_verdict.check_steps(run)
    kill_verdict.check_members(run)


def test_sums_may_lack_the_dead_and_nobody_else():
    judge(lines_of_a_job())
    with pytest.raises(kill_verdict.Failure, match="not of the members of the job"):
        judge(lines_of_a_job(), how="redo")
    with pytest.raises(kill_verdict.Failure, match="lacks somebody who is well"):
        judge(lines_of_a_job(), dead=2)


@pytest.mark.parametrize(
    ("count", "wrong", "failure"),
    [
        (1, {"contributors": [0, 1, 2]}, "ranks differ"),
        (1, {"digest": "4"}, "ranks differ"),
        (2, {"contributors": [0, 1, 2]}, "not of its contributors"),
        (2, {"averages": [[0, 2], [0, 1, 2]]}, "averages are not of those who were left"),
        (2, {"sums": [[0, 2], [0, 1, 2]]}, "sums are not of those who were left"),
        (2, {"sums": [[0, 2], [2]]}, "sums are not of those who were left"),
    ],
)
def test_what_ranks_say_of_a_short_sum_is_checked(count, wrong, failure):
    lines = lines_of_a_job()
    for line in lines[-count:]:
        line.update(wrong)
    with pytest.raises(kill_verdict.Failure, match=failure):
        judge(lines)
