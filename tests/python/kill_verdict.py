"""What ``tests/kill-campaign`` holds a run against."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kill_plan
from kill_plan import SCHEDULER, SUCCESSOR, Member

if TYPE_CHECKING:
    from kill_campaign import Run
    from kill_job import Job

#: Whoever is said to have died or failed, with its process.
BLAMES = re.compile(r"\(host [^,()]+, pid (\d+)\) (?:died|failed|ended the job|is gone)")
#: Of the scheduler, by whoever does not hear it.
BLAMES_SCHEDULER = re.compile(
    r"the scheduler died|the scheduler at \S+ has not answered"
    r"|the connection to the scheduler at \S+ was lost"
)
#: How an error of ours ends the traceback of a rank.
ERROR = re.compile(r"^byteps\.errors\.\w+: .", re.MULTILINE)
UNFORMED = re.compile(r"the job was not formed|waiting for|did not come|is gone before the job")
#: A new rank, whose scheduler was lost before that let it in.
NOT_LET_IN = re.compile(r"^byteps\.errors\.StartError: the scheduler at ", re.MULTILINE)
#: A scheduler leads a job.
LEADS = re.compile(r"are led by this scheduler|all there after")
#: What a rank says of the sums of a step.
SETS = ("members", "sums", "averages", "contributors")
#: Of a rank, without a step and without a line.
SILENT_SECONDS = 5.0
#: How often that is looked for.
WATCH_SECONDS = 0.2


class Failure(Exception):
    """A run did not do what it should."""


class Watch:
    """Finds ranks that wait in silence."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._seen: dict[Member, tuple[float, tuple[int, int]]] = {}
        self._looked = time.time()
        plan = job.plan
        self._limit = SILENT_SECONDS
        if plan.loss is not None and plan.fault.kind == "stop":
            # A rank that is between two epochs can't tell one that is stopped from a slow one, and
            # the next one tells it nothing before it leads.
            self._limit += kill_plan.HEARTBEAT_TIMEOUT

    def look(self, excepted: set[Member]) -> None:
        """Raises `Failure` if a rank that lives, and is not excepted, has been silent for long."""
        now = time.time()
        if now < self._looked + WATCH_SECONDS:
            return
        # Where this process did not run, others may not have either.
        lost = now - self._looked - 2 * WATCH_SECONDS
        self._looked = now
        counts = Counter(line["pid"] for line in self._job.lines)
        for member in self._job.ranks():
            process = self._job.processes[member]
            if member in excepted or process.ended():
                self._seen.pop(member, None)
                continue
            size = process.log.stat().st_size if process.log.exists() else 0
            sign = size, counts[process.pid]
            since, before = self._seen.get(member, (now, None))
            since = now if sign != before else since + max(lost, 0.0)
            self._seen[member] = since, sign
            if now - since > self._limit:
                self._job.show_stacks()
                raise Failure(f"{member} has said nothing and made no step for {now - since:.1f} s")


def check(run: Run, outcome: str) -> None:
    """Raises `Failure` unless a run that is over was right."""
    check_steps(run)
    check_members(run)
    check_outcome(run, outcome)
    check_words(run)


def guilty(run: Run) -> set[Member]:
    """Who may be said to be lost."""
    plan = run.plan
    found = run.dead | {plan.fault.victim, *plan.openings}
    if plan.fault.other is not None:
        found.add(plan.fault.other)
    if plan.loss is not None and plan.loss.meanwhile is not None:
        found.add(plan.loss.meanwhile.victim)
    return found


def lost_results(run: Run) -> set[int]:
    """Of the lines of the job, those of results that may have been made again without a trace.

    With shrink, if a rank alone has the last result of a server that dies, and dies as well before
    it has said so, the others make it again, of those who live (docs/elastic.md).
    """
    lost = guilty(run)
    if run.plan.elastic != "shrink" or not any(one.role == "server" for one in lost):
        return set()
    last: dict[tuple[int, int], int] = {}
    for at, line in enumerate(run.job.lines):
        if line["event"] == "step" and Member("rank", line["place"]) in lost:
            last[line["pid"], line["epoch"]] = at
    return set(last.values())


def check_steps(run: Run) -> None:
    """All ranks had the same parameters and sums at every step, and nothing was lost."""
    job, spared = run.job, lost_results(run)
    known: dict[Any, Any] = {}
    states: dict[int, set[str]] = {}
    last: dict[int, dict[str, Any]] = {}
    for at, line in enumerate(job.lines):
        event = line["event"]
        if event == "wrong":
            raise Failure(f"a sum is wrong: {line}")
        if event not in ("step", "synchronized"):
            continue
        key = line["epoch"], line["step"], event
        value = [line["digest"], line["size"], *(line.get(name) for name in SETS)]
        if at not in spared and known.setdefault(key, value) != value:
            raise Failure(f"ranks differ in epoch, step, event {key}: {value}, {known[key]}")
        before = last.get(line["pid"])
        if before is not None:
            step, epoch = before["step"], before["epoch"]
            if line["step"] < step - 1 or line["epoch"] < epoch:
                raise Failure(f"pid {line['pid']} went back from step {step}: {before}, {line}")
            if event == "step" and (line["step"] != step + 1 or line["epoch"] != epoch):
                raise Failure(f"pid {line['pid']} left out a step: {before}, {line}")
        if event == "step":
            states.setdefault(line["step"], set()).add(line["digest"])
        elif line["step"] > 0 and line["digest"] not in states.get(line["step"], ()):
            raise Failure(f"no rank has had this state after step {line['step']}: {line}")
        last[line["pid"]] = line


def check_members(run: Run) -> None:
    """Sums and averages are of whom they should be, and the ranks were told so."""
    lost = {one.index for one in guilty(run) if one.role == "rank"}
    # Who contributes to a sum of an epoch has written down before that it begins.
    places: dict[int, dict[int, int]] = {}
    for line in run.job.lines:
        if line["event"] == "synchronized":
            places.setdefault(line["epoch"], {})[line["rank"]] = line["place"]
    left: dict[tuple[int, int], set[int]] = {}
    for line in run.job.lines:
        if line["event"] != "step":
            continue
        members, ranks = set(line["members"]), places[line["epoch"]]
        if sorted(ranks.get(rank, -1) for rank in line["contributors"]) != line["members"]:
            raise Failure(f"a sum is not of its contributors: {line}, places by rank {ranks}")
        # In the order in which a rank waits for them.
        before = left.get((line["pid"], line["epoch"]), set(ranks.values()))
        for name in ("averages", "sums"):
            sets = [set(one) for one in line[name]]
            if not all(line["place"] in one <= before for one in sets):
                raise Failure(f"{name} are not of those who were left, {before}: {line}")
            before = set.intersection(*sets)
        left[line["pid"], line["epoch"]] = before
        lacking = set(ranks.values()) - before
        if run.plan.elastic == "shrink":
            if not lacking <= lost:
                raise Failure(f"a sum lacks somebody who is well: {line}, all are {ranks}")
        elif lacking or len(members) != line["size"]:
            raise Failure(f"a sum is not of the members of the job: {line}")


def check_outcome(run: Run, outcome: str) -> None:
    """The job has gone on, or has not, as it should; and codes tell so."""
    plan, job = run.plan, run.job
    survives = plan.goes_on(run.dead) or (plan.fault.is_short and not run.dead)
    promised = "goes on" if survives else "ends"
    check_loss(run, outcome)
    if plan.moment == "leaving":
        promised = "ends"
    if not run.is_open and outcome != promised:
        raise Failure(f"the job {outcome}, but should have been one that {promised}")
    if outcome == "goes on" and plan.forms_again is False and not run.is_open and run.settled != 1:
        raise Failure(f"nothing was to be redone, and the job formed epoch {run.settled}")
    if plan.fault.is_short and survives:
        latest = max((line.get("epoch", 0) for line in job.lines), default=0)
        # With another that died, whatever was under way may have been begun anew.
        if not plan.openings and plan.moment != "leaving" and latest != 1:
            raise Failure(f"{plan.fault} was short and ended an epoch: there are {latest}")
        for member, process in job.processes.items():
            if member not in run.dead and process.code != 0:
                raise Failure(f"{plan.fault} was short, and {member} ended with {process.code}")
    elif outcome == "ends" and plan.moment != "leaving" and not has_been_left(run):
        for member, process in job.processes.items():
            if member not in run.dead and process.code == 0:
                raise Failure(f"{member} ended as if all were well")


def has_been_left(run: Run) -> bool:
    """Whether the last ranks were asked to leave: a job that all have left is over, and well."""
    loss = run.plan.loss
    is_asked = loss is not None and loss.meanwhile is not None and loss.meanwhile.kind == "term"
    return is_asked and all(rank in run.dead for rank in run.job.ranks())


def check_loss(run: Run, outcome: str) -> None:
    """What holds beside that for a job that was to outlive its scheduler."""
    plan, job = run.plan, run.job
    if plan.loss is None or plan.loss.meanwhile is not None:
        return
    latest = max((line.get("epoch", 0) for line in job.lines), default=0)
    if plan.moment == "stepping" and outcome == "goes on" and latest != 1 and not plan.replaces:
        raise Failure(f"nobody but the scheduler was lost, and an epoch ended: there are {latest}")
    if plan.moment == "leaving" and plan.fault.kind != "term":
        for rank in job.ranks():
            if (code := job.processes[rank].code) != 0:
                raise Failure(f"{rank} had done its work and ended with {code}")


def check_words(run: Run) -> None:
    """Whoever ended badly says who it was that died, and nobody else is blamed."""
    plan, job = run.plan, run.job
    lost = guilty(run)
    pids = {job.processes[member].pid for member in lost if member in job.processes}
    if plan.loss is not None and plan.moment == "forming":
        # Whoever had not been told yet that the job is elastic has ended by itself.
        pids |= {process.pid for process in job.processes.values() if process.code}
    if plan.loss is not None and plan.moment == "joining":
        # Whoever was not let in yet ends, too, and is started again.
        ended = [process for process in job.processes.values() if process.code]
        pids |= {process.pid for process in ended if NOT_LET_IN.search(process.said())}
    for member, process in job.processes.items():
        said = process.said()
        if "panicked" in said:
            raise Failure(f"{member} panicked")
        if member in lost:
            continue
        for found in BLAMES.finditer(said):
            if int(found[1]) not in pids:
                raise Failure(f"{member} blames pid {found[1]}, which is well: {found[0]}")
        if SCHEDULER not in lost and (found := BLAMES_SCHEDULER.search(said)):
            raise Failure(f"{member} blames the scheduler: {found[0]}")
        if process.code == 0:
            continue
        if process.code is not None and process.code < 0:
            raise Failure(f"{member} was ended by signal {-process.code}")
        names = any(f"pid {pid})" in said for pid in pids)
        names |= SCHEDULER in lost and "the scheduler" in said
        # Nobody may have been left when it came.
        names |= member == SUCCESSOR and bool(UNFORMED.search(said))
        names |= plan.moment == "forming" and bool(UNFORMED.search(said))
        names |= plan.fault.is_network and "the path" in said
        if not names:
            raise Failure(f"{member} ended with {process.code} and does not say who died")
        if member.role == "rank" and not ERROR.search(said):
            raise Failure(f"{member} ended with an error that is not ours")


def check_nothing_is_left(job: Job) -> None:
    """No process, shared memory or file of the job is there any more."""
    deadline = time.time() + 2.0
    while left := _children():
        if time.time() > deadline:
            raise Failure(f"processes are left: {left}")
        time.sleep(0.01)
    if files := [str(path) for path in job.temporary.rglob("*")]:
        raise Failure(f"files are left: {files}")
    if not job.has_own_memory:
        return
    for file in Path("/dev/shm").iterdir():
        # Who uses which CPUs: docs/running.md says that it stays where all were killed at once.
        if file.name != "bps-cpus" or file.stat().st_size:
            raise Failure(f"shared memory is left: {file}")
        file.unlink()


def _children() -> list[str]:
    """Processes below this one, which takes in orphans; the dead are buried."""
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) != os.getpid():
                continue
            if state[0] == "Z":
                os.waitpid(int(entry.name), os.WNOHANG)
            else:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                left.append(f"{entry.name}: {words.decode(errors='replace')}")
        except (OSError, ChildProcessError):
            continue
    return left
