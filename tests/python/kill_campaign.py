"""Whole jobs of real processes, in each of which somebody is killed, stopped or cut off.

    tests/kill-campaign [--runs 60] [--seed 1] [--seconds S] [--only WORDS] [--slow N]
                        [--elastic redo|shrink]

Each run is a small job (scheduler, one or two servers, three or four ranks that train) and a fault,
perhaps behind a first death or two, at a moment between start and shutdown: all drawn from the
run's number, which is the seed of the first run and larger for each further one. In runs from
1000000 on, of which there is one for every four others, the scheduler is lost and the job is to
outlive that: another one is started after a while, or the same one goes on, or none comes; and
perhaps somebody dies meanwhile. About half of the elastic jobs have BPS_ELASTIC=redo, the others
shrink. A run fails, and its logs stay in target/kill-campaign/, unless

- ranks have the same parameters after every step, and sums hold who is in the job, once each;
- with shrink they hold those whom bps.contributors names to all ranks alike, averages are divided
  by as many, whoever is missing is dead and stays away, and nothing is redone where nothing is to;
- the job goes on where docs/elastic.md says so, from the last step or the one before, and otherwise
  ends, within the limits that hold for it, and whoever ends says who died;
- nobody who is well is blamed, and short interruptions harm nobody;
- no rank is without a step and without a line for more than 5 s;
- nothing is left: no process, no shared memory, no file.

`--seed S --runs 1` repeats a run. With root it has namespaces of its own, and faults of the network
as well; without, that is said and the other faults are all.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import kill_job
import kill_plan
import kill_rank  # noqa: F401 -- Forks of this process have it then.
import kill_verdict
from kill_job import Job, Network, NoNetwork
from kill_plan import SUCCESSOR, Member, Plan
from kill_verdict import Failure, Watch

# An optimizer imports much of torch, which takes seconds: forks have that, too.
torch.optim.SGD([torch.zeros(1)])

LOOK_SECONDS = 0.005
#: A machine that is busy with other things; and from the start to a step, on such a one.
MARGIN, START = 8.0, 40.0
#: How long a scheduler stays when nodes may come that do not know of the end.
LATECOMERS = 10.0
#: Steps that show that a job goes on.
STEPS = 3
#: Seeds that are looked at for each run, where not every run is wanted.
SEEDS_PER_RUN = 1000


class Run:
    """A plan that is carried out."""

    def __init__(self, plan: Plan, job: Job) -> None:
        self.plan, self.job = plan, job
        self.struck = self.healed = 0.0
        #: The latest before the fault, and when it was clear what becomes of the job.
        self.epoch = self.settled = 0
        #: Who is dead, or should be taken for it.
        self.dead: set[Member] = set()
        self.newcomer: Member | None = None
        #: Since when the job is led again that has lost its scheduler.
        self.led = 0.0
        self.watch = Watch(job)

    def wait_for(self, what: str, found: Callable[[], bool], seconds: float) -> None:
        deadline = time.time() + seconds
        while True:
            self.job.read()
            self._heal()
            if self.plan.loss is not None and self.struck:
                self._follow_loss()
            self.watch.look(self.dead | {self.plan.fault.victim})
            if found():
                return
            if time.time() > deadline:
                self.job.show_stacks()
                raise Failure(f"after {seconds:.1f} s: still no {what}; {self._state()}")
            time.sleep(LOOK_SECONDS)

    def _state(self) -> str:
        """Who has ended how, and who is where."""
        words = []
        for member, process in self.job.processes.items():
            steps = self.job.of(member, "step")
            at = f" at step {steps[-1]['step']} of epoch {steps[-1]['epoch']}" if steps else ""
            ended = f" ended with {process.code}" if process.ended() else f" lives{at}"
            words.append(f"{member} (pid {process.pid}){ended}")
        return ", ".join(words)

    def _heal(self) -> None:
        fault = self.plan.fault
        is_due = fault.seconds is not None and time.time() > self.struck + fault.seconds
        if self.struck and is_due and not self.healed:
            self.job.heal(fault)
            self.healed = time.time()

    def _follow_loss(self) -> None:
        """What comes behind the loss of the scheduler, when it is due."""
        loss, job = self.plan.loss, self.job
        assert loss is not None
        since = time.time() - self.struck
        other = loss.meanwhile
        if other is not None and other.victim not in self.dead and since >= loss.delay:
            job.strike(other)
            self.dead.add(other.victim)
        if (
            loss.successor is not None
            and SUCCESSOR not in job.processes
            and since >= loss.successor
        ):
            if self.have_ended():
                return
            # One that was stopped still has the address.
            job.processes[self.plan.fault.victim].end()
            job.start(SUCCESSOR)

    def is_led_again(self) -> bool:
        """Whether all that was planned has happened, and there is a scheduler that leads."""
        loss, fault = self.plan.loss, self.plan.fault
        assert loss is not None
        if loss.meanwhile is not None and loss.meanwhile.victim not in self.dead:
            return False
        if fault.seconds is not None:
            return self.healed > 0
        process = self.job.processes.get(SUCCESSOR)
        return process is not None and kill_verdict.LEADS.search(process.said()) is not None

    def live(self) -> list[Member]:
        """Ranks that are to go on."""
        ranks = [rank for rank in self.job.ranks() if rank not in self.dead]
        return [rank for rank in ranks if not self.job.processes[rank].ended()]

    def goes_on(self, since: float, epoch: int = 0) -> bool:
        """Whether all ranks that live have made steps together since, in an epoch from this on."""
        live = self.live()
        if not live:
            return False
        seen = set()
        for rank in live:
            steps = [line for line in self.job.of(rank, "step") if line["at"] > since][-STEPS:]
            if len(steps) < STEPS:
                return False
            seen |= {(line["epoch"], tuple(line["members"])) for line in steps}
        expected = tuple(sorted(rank.index for rank in live))
        return len(seen) == 1 and all(one[0] >= epoch and one[1] == expected for one in seen)

    def have_ended(self) -> bool:
        processes = self.job.processes.items()
        return all(process.ended() for member, process in processes if member not in self.dead)

    def step(self) -> None:
        """Waits until every rank steps."""

        def found() -> bool:
            if any(process.ended() for process in self.job.processes.values()):
                raise Failure(f"it ends by itself: {self._state()}")
            return self.goes_on(0.0)

        self.wait_for("step of every rank", found, START)

    def kill(self, victim: Member) -> None:
        self.job.processes[victim].end()
        self.dead.add(victim)

    def strike(self) -> None:
        """Brings the job to the moment of the plan, and the fault upon it."""
        plan, job = self.plan, self.job
        if plan.moment != "forming":
            self.step()
        for victim in plan.openings:
            self.kill(victim)
        if plan.moment == "joining":
            killed = time.time()
            self.wait_for("step after the first death", lambda: self.goes_on(killed), MARGIN)
            self.replace(plan.openings[0])
        if plan.moment == "leaving":
            job.stop.touch()
        time.sleep(plan.delay)
        job.read()
        self.epoch = job.latest()
        self.struck = time.time()
        job.strike(plan.fault)
        # A scheduler that goes on in time leads the job as before.
        if plan.fault.is_fatal and not (plan.loss is not None and plan.fault.seconds is not None):
            self.dead.add(plan.fault.victim)

    def replace(self, dead: Member) -> None:
        """Starts a rank in the place of one that died."""
        self.newcomer = self.plan.newcomer
        self.job.start(self.newcomer, place=dead.index)

    @property
    def is_open(self) -> bool:
        """Whether more than one end would be right: who is given up depends on what came first."""
        plan, fault = self.plan, self.plan.fault
        if fault.is_short:
            return False
        if plan.moment == "joining" and self.newcomer not in self.dead:
            # It may have been there in time to take the place of the dead.
            if plan.goes_on(self.dead - {plan.openings[0]}) != plan.goes_on(self.dead):
                return True
        firsts = (set(plan.openings[:count]) for count in range(1, len(plan.openings) + 1))
        if any(not plan.goes_on(dead) for dead in firsts):
            # Without these alone the job ends, though it would go on with whoever died next.
            return True
        left = set(plan.members) - self.dead
        is_between = plan.moment in ("re-forming", "joining")
        if plan.loss is not None and is_between and all(one.role != "server" for one in left):
            # Between two epochs nobody but servers knows the job (docs/elastic.md).
            return True
        if plan.loss is not None:
            return plan.moment in ("forming", "leaving")
        by_time = plan.moment in ("re-forming", "joining") and fault.seconds is not None
        return plan.moment in ("forming", "leaving") or by_time or not fault.is_fatal

    def limit(self) -> float:
        """How long it may take after the fault until it is clear what becomes of the job."""
        plan, fault = self.plan, self.plan.fault
        seconds = MARGIN + (fault.seconds or 0.0)
        if plan.moment in ("forming", "joining"):
            seconds += kill_plan.START_TIMEOUT
        if plan.moment != "stepping":
            # The scheduler tells whoever comes late why there is no job.
            seconds += LATECOMERS
        if fault.kind in ("kill", "term"):
            return seconds
        seconds += kill_plan.HEARTBEAT_TIMEOUT * 2
        if plan.moment != "stepping":
            seconds += kill_plan.STALL_TIMEOUT
        if fault.is_network:
            # Three epochs may end by a path before the job does.
            seconds += 4 * (2 * kill_plan.HEARTBEAT_TIMEOUT + kill_plan.START_TIMEOUT)
        return seconds

    def settle(self) -> str:
        """Waits until it is clear what becomes of the job: `ends` or `goes on`."""
        plan, fault = self.plan, self.plan.fault
        if plan.loss is not None:
            return self._settle_loss()
        since, epoch = self.struck, self.epoch
        # A rank that has just come may die before anybody knows of it.
        is_known = fault.is_fatal and not self.is_open and fault.victim != self.newcomer
        if is_known and plan.forms_again:
            epoch += 1
        if fault.seconds is not None:
            since += fault.seconds
        if self.is_open and fault.is_slow and plan.moment != "leaving":
            # Nothing is to be seen of it at first.
            since += 2 * kill_plan.HEARTBEAT_TIMEOUT + 2 * kill_plan.HEARTBEAT_INTERVAL
        if self.is_open and fault.seconds is not None:
            self.dead.discard(fault.victim)

        def victim_knows() -> bool:
            """Whoever was given up and lives has ended; a lasting stop is ended by us."""
            victim = self.job.processes[fault.victim]
            waits = fault.seconds is not None or fault.kind in ("cut", "term")
            return not (waits and fault.is_fatal) or victim.ended() or fault.victim not in self.dead

        def found() -> bool:
            nonlocal since
            if self.have_ended():
                return victim_knows() and (self.healed > 0 or fault.seconds is None)
            if plan.moment == "leaving":
                return False
            if fault.kind == "term" and not self.job.processes[fault.victim].ended():
                since = time.time()  # It still does its work.
            return time.time() > since and self.goes_on(since, epoch) and victim_knows()

        self.wait_for(f"end of {fault}", found, self.limit())
        return "ends" if self.have_ended() else "goes on"

    def _settle_loss(self) -> str:
        """The same where the job is to outlive its scheduler."""
        plan, loss = self.plan, self.plan.loss
        assert loss is not None
        is_new = loss.meanwhile is not None and plan.moment not in ("forming", "leaving")
        epoch = self.epoch + 1 if is_new and plan.forms_again else 0

        def found() -> bool:
            if self.have_ended():
                return True
            if plan.moment == "leaving" or not self.is_led_again():
                return False
            asked = loss.meanwhile if loss.meanwhile and loss.meanwhile.kind == "term" else None
            if asked and asked.victim.role == "server":
                if not self.job.processes[asked.victim].ended():
                    # The last one waits for another in vain, and serves meanwhile.
                    self.led = time.time()
                    return False
            self.led = self.led or time.time()
            return self.goes_on(self.led, epoch)

        seconds = MARGIN + plan.scheduler_wait + 2 * kill_plan.HEARTBEAT_TIMEOUT
        if plan.moment != "stepping" or loss.meanwhile is not None:
            # A rank may wait for one that comes back no more, or for a scheduler once more.
            late = (plan.scheduler_wait, kill_plan.START_TIMEOUT, kill_plan.STALL_TIMEOUT)
            seconds += sum(late) + LATECOMERS
        self.wait_for(f"end of {plan.fault}", found, seconds)
        return "ends" if self.have_ended() else "goes on"

    def finish(self) -> None:
        """Lets a job that goes on take a new rank, if the plan wants it, and end in good order."""
        plan, job = self.plan, self.job
        dead = sorted((one for one in self.dead if one.role == "rank"), key=str)
        if plan.replaces and dead and self.newcomer is None:
            born = time.time()
            self.replace(dead[0])
            self.wait_for("step of a new rank", lambda: self.goes_on(born), START)
        live = [one for one in job.processes if not job.processes[one].ended()]
        job.stop.touch()
        self.wait_for("end in good order", self.have_ended, MARGIN)
        for member in live:
            code = job.processes[member].code
            if member not in self.dead and code != 0:
                raise Failure(f"{member} ended with {code} where all was well")


def carry_out(
    plan: Plan, folder: Path, network: Network | None, isolated: bool
) -> tuple[str, float]:
    """Runs a plan; returns what became of the job, and how long that took."""
    job = Job(plan, folder, network, isolated)
    run = Run(plan, job)
    try:
        run.strike()
        outcome = run.settle()
        seconds = time.time() - run.struck
        run.settled = job.latest()
        if outcome == "goes on":
            run.finish()
        job.read()
        kill_verdict.check(run, outcome)
    finally:
        job.close()
        if network is not None:
            network.close()
    kill_verdict.check_nothing_is_left(job)
    return outcome, seconds


def isolate() -> str | None:
    """Gives this process a network, shared memory and processes of its own; says why it cannot."""
    kill_job.call("prctl", kill_job.PR_SET_CHILD_SUBREAPER, 1)
    if os.geteuid() != 0:
        return "only root can make namespaces"
    flags = kill_job.CLONE_NEWNET | kill_job.CLONE_NEWNS | kill_job.CLONE_NEWIPC
    try:
        kill_job.call("unshare", flags)
        for words in (
            "mount --make-rprivate /",
            "mount -t tmpfs none /dev/shm",
            "ip link set lo up",
        ):
            subprocess.run(words.split(), check=True, capture_output=True, timeout=30)
        Network(2).close()
    except (OSError, subprocess.SubprocessError, NoNetwork) as error:
        return f"no namespaces: {error}"
    return None


def seeds(first: int, end: int) -> Iterator[int]:
    """The seeds from `first` on; below `LOST`, every so many are followed by one from there."""
    for count, seed in enumerate(range(first, end), 1):
        yield seed
        if seed < kill_plan.LOST and count % kill_plan.LOST_EVERY == 0:
            yield kill_plan.LOST + seed


def plans(options: argparse.Namespace, has_network: bool) -> Iterator[Plan]:
    """The runs that are asked for."""
    count = 0
    for seed in seeds(options.seed, options.seed + SEEDS_PER_RUN * options.runs):
        plan = kill_plan.make(seed, has_network, options.elastic)
        is_wanted = not options.only or re.search(options.only, str(plan))
        if is_wanted and (not plan.fault.is_slow or seed % options.slow == 0):
            yield plan
            count += 1
            if count == options.runs:
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--seconds", type=float, help="no run begins later than this")
    parser.add_argument("--only", help="runs whose description matches this expression")
    slow = "of the runs in which seconds pass until the fault is noticed, one in so many"
    parser.add_argument("--slow", type=int, default=1, help=slow)
    how = "BPS_ELASTIC of all elastic jobs, in the place of what their seeds say"
    parser.add_argument("--elastic", choices=kill_plan.ELASTIC, help=how)
    parser.add_argument("--keep", action="store_true", help="keep the logs of all runs")
    parser.add_argument("--show", action="store_true", help="say what would be done, and leave")
    options = parser.parse_args()
    lacks = isolate()
    if lacks:
        print(f"skipped: faults of the network, and what is left in shared memory: {lacks}")
    begun, counts = time.time(), Counter[str]()
    played, failures = Counter[str](), Counter[str]()
    failed: dict[int, str] = {}
    kept = kill_job.TARGET / "kill-campaign"
    for plan in plans(options, has_network=not lacks):
        seed = plan.seed
        if options.seconds and time.time() - begun > options.seconds:
            break
        if options.show:
            print(f"{seed}: {plan}")
            continue
        folder = Path(tempfile.mkdtemp(prefix="bps-kill-"))
        print(f"{seed}: {plan}", end="", flush=True)
        how = plan.elastic or "not elastic"
        played[how] += 1
        try:
            network = Network(len(set(plan.hosts.values()))) if plan.hosts else None
            outcome, seconds = carry_out(plan, folder, network, not lacks)
            print(f": {outcome} after {seconds:.2f} s", flush=True)
            kind = plan.fault.kind if plan.loss is None else f"{plan.fault.kind} scheduler"
            counts[f"{kind}, {outcome}"] += 1
            is_kept = options.keep
        except Failure as failure:
            is_kept = True
            failures[how] += 1
            told = f"\n    FAILED: {failure}\n    its logs: {kept / str(seed)}"
            failed[seed] = f"{seed}: {plan}{told}"
            print(told, flush=True)
        if is_kept:
            shutil.rmtree(kept / str(seed), ignore_errors=True)
            shutil.copytree(folder, kept / str(seed))
        shutil.rmtree(folder)
    total = sum(counts.values())
    print(f"{dict(sorted(counts.items()))} in {time.time() - begun:.0f} s")
    print(", ".join(f"{how}: {played[how]} runs, {failures[how]} failed" for how in sorted(played)))
    if failed:
        # Once more, last: whoever keeps only the end of this has them.
        print("\n".join(failed.values()))
        print(f"repeat each with: tests/kill-campaign --runs 1 --seed N, for N of {[*failed]}")
    print(f"{total} runs as they should be, {len(failed)} failed", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
