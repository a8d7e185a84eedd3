"""What ``tests/kill-campaign`` does in a run, all of it drawn from the run's seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

#: The settings of every job of the campaign.
HEARTBEAT_TIMEOUT = 2.5
HEARTBEAT_INTERVAL = 0.5
START_TIMEOUT = 10.0
STALL_TIMEOUT = 12.0
#: How long a server waits to be let go: the last one does in vain.
LEAVE_NOTICE = 3.0
#: Interruptions of any kind that are shorter harm nobody, longer ones count as a death.
SHORT, LONG = (0.2, 0.35 * HEARTBEAT_TIMEOUT), (2 * HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_TIMEOUT)

MOMENTS = ("forming", "stepping", "re-forming", "joining", "leaving")
#: Larger packets do not pass a black hole.
HOLE_BYTES = 600
#: Seeds from here on are of jobs that are to outlive their scheduler. In all others its death is
#: the job's, and seeds mean what they meant before these were there.
LOST = 1_000_000
#: BPS_SCHEDULER_WAIT of jobs to which another scheduler comes, and of those that wait in vain.
SCHEDULER_WAIT, VAIN_WAIT = 15.0, 3.0
#: One for each so many of the others, where they follow each other.
LOST_EVERY = 4
#: ``BPS_ELASTIC``, of which an elastic job has one.
ELASTIC = ("redo", "shrink")


@dataclass(frozen=True)
class Member:
    """A process of the job: ``rank 2``, where 2 is its place, ``server 0`` or ``scheduler 0``.

    Ranks that are started later have further places.
    """

    role: str
    index: int

    def __str__(self) -> str:
        if self.role == "scheduler":
            return "the next scheduler" if self.index else "the scheduler"
        return f"{self.role} {self.index}"


SCHEDULER, SUCCESSOR = Member("scheduler", 0), Member("scheduler", 1)


@dataclass(frozen=True)
class Fault:
    """What happens to whom: ``kill``, ``stop`` (and continue), or a fault of the network."""

    #: ``kill``, ``term`` (SIGTERM), ``stop``, ``cut`` (from everybody), ``pair``, ``one-way`` or
    #: ``hole``.
    kind: str
    victim: Member
    #: The other end of a path, unless it is everybody.
    other: Member | None = None
    #: Seconds until it is over, or None if it lasts.
    seconds: float | None = None

    @property
    def is_short(self) -> bool:
        """Whether nobody may mind."""
        return self.seconds is not None and self.seconds <= SHORT[1]

    @property
    def is_network(self) -> bool:
        """Whether processes are left alone."""
        return self.kind not in ("kill", "term", "stop")

    @property
    def is_fatal(self) -> bool:
        """Whether the victim alone counts as dead."""
        return not self.is_short and self.kind in ("kill", "term", "stop", "cut")

    @property
    def is_slow(self) -> bool:
        """Whether it takes seconds until it is noticed or over."""
        return not self.is_short and self.kind not in ("kill", "term")

    def __str__(self) -> str:
        to = f" and {self.other}" if self.other else ""
        lasts = "" if self.seconds is None else f" for {self.seconds:.2f} s"
        return f"{self.kind} {self.victim}{to}{lasts}"


@dataclass(frozen=True)
class Loss:
    """What comes behind a fault of the scheduler, in a job that outlives it."""

    #: Seconds until another one is started on the same address, or None if none is.
    successor: float | None
    #: Who dies while there is none, and so many seconds after the fault.
    meanwhile: Fault | None
    delay: float

    def __str__(self) -> str:
        after = "" if self.successor is None else f", the next {self.successor:.3f} s later"
        if self.meanwhile is None:
            return after
        return f"{after}, {self.meanwhile} meanwhile, {self.delay:.3f} s later"


@dataclass
class Plan:
    """A run."""

    seed: int
    #: ``BPS_ELASTIC``, or None where the job is not elastic.
    elastic: str | None
    ranks: int
    servers: int
    mode: str
    settings: dict[str, str]
    min_workers: int
    moment: str
    #: Seconds from the beginning of that moment until the fault.
    delay: float
    fault: Fault
    #: Who is killed before, where the moment is ``re-forming`` or ``joining``.
    openings: tuple[Member, ...] = ()
    #: A rank is started in the place of a dead one, and let in.
    replaces: bool = False
    #: The host of each, where there are several.
    hosts: dict[Member, int] = field(default_factory=dict)
    #: Of a job that is to outlive its scheduler.
    loss: Loss | None = None

    @property
    def members(self) -> list[Member]:
        """All at the start, the scheduler first."""
        servers = [Member("server", index) for index in range(self.servers)]
        ranks = [Member("rank", place) for place in range(self.ranks)]
        return [SCHEDULER, *servers, *ranks]

    @property
    def newcomer(self) -> Member:
        """The rank that is started later."""
        return Member("rank", self.ranks)

    def needs_server(self, ranks: set[Member]) -> bool:
        """Whether there is more than one host to sum for, or none that sums by itself."""
        hosts = {self.hosts.get(rank, 0) for rank in ranks}
        return self.settings["BPS_LOCAL_REDUCE"] == "0" or len(hosts) > 1 or len(ranks) == 1

    @property
    def scheduler_wait(self) -> float:
        """``BPS_SCHEDULER_WAIT``."""
        if self.loss is None:
            return 0.0
        return SCHEDULER_WAIT if self.has_scheduler_again else VAIN_WAIT

    @property
    def has_scheduler_again(self) -> bool:
        """Whether the job is led again after its scheduler was lost."""
        if self.loss is None:
            return False
        return self.loss.successor is not None or self.fault.seconds is not None

    def goes_on(self, dead: set[Member]) -> bool:
        """Whether the documents promise that the job goes on without these."""
        left = set(self.members) - dead
        ranks = {member for member in left if member.role == "rank"}
        has_server = any(member.role == "server" for member in left)
        is_lost = SCHEDULER in dead and not self.has_scheduler_again
        ends = is_lost or len(ranks) < self.min_workers
        has_sums = has_server or not self.needs_server(ranks)
        return self.elastic is not None and not ends and has_sums

    def sums_with_others(self, rank: Member) -> bool:
        """Whether ranks of its host sum among themselves, this one and another."""
        host = self.hosts.get(rank)
        ranks = [one for one in self.members if one.role == "rank"]
        together = [one for one in ranks if self.hosts.get(one) == host]
        return self.settings["BPS_LOCAL_REDUCE"] != "0" and len(together) > 1

    @property
    def forms_again(self) -> bool | None:
        """Whether the job forms again if it goes on; None if that hangs on what comes first.

        False is what ``BPS_ELASTIC=shrink`` promises (docs/elastic.md, "Without redoing anything").
        """
        if self.elastic != "shrink":
            return True
        fault, victim = self.fault, self.fault.victim
        if self.loss is not None or self.moment not in ("stepping", "re-forming"):
            # A newcomer, or whoever leaves, has it form again, and the next scheduler may have to.
            return None
        if not (fault.is_fatal or fault.is_short):
            return None  # A path that is broken has two ends.
        if fault.kind == "term" and victim.role == "rank":
            return True  # It leaves, at a step of all.
        deaths = [*self.openings, *([victim] if fault.is_fatal else [])]
        servers = [one for one in deaths if one.role == "server"]
        shared = [one for one in deaths if one.role == "rank" and self.sums_with_others(one)]
        if len(deaths) > 1 and (servers or shared):
            # A rank may have had results of the server alone, and a host may be lost as a whole.
            return None
        return bool(shared) or len(servers) == self.servers

    def __str__(self) -> str:
        kind = f"elastic by {self.elastic} from {self.min_workers}"
        kind = kind if self.elastic else "not elastic"
        place = f"{len(set(self.hosts.values()))} hosts" if self.hosts else "one host"
        how = "".join(
            f", {word}"
            for word, name in (("local sums", "BPS_LOCAL_REDUCE"), ("encrypted", "BPS_ENCRYPT"))
            if self.settings[name] == "1"
        )
        after = " and ".join(map(str, self.openings))
        after = f" after the death of {after}" if after else ""
        return (
            f"{kind}, {self.ranks} ranks, {self.servers} servers, {place}{how}, {self.mode}: "
            f"{self.fault} {self.delay:.3f} s into {self.moment}{after}{self.loss or ''}"
        )


def make(seed: int, has_network: bool, how: str | None = None) -> Plan:
    """The plan of a seed, where there can be several hosts and where there cannot.

    `how` is the ``BPS_ELASTIC`` of a job that is elastic, in the place of what the seed says.
    """
    # Drawn apart: all else of a seed is what it was when `redo` was the only way.
    how = how or random.Random(f"elastic {seed}").choice(ELASTIC)
    if seed >= LOST:
        return _make_lost(seed, has_network, how)
    rng = random.Random(seed)
    elastic = rng.random() < 0.7
    moment = rng.choice(MOMENTS if elastic else ("forming", "stepping", "stepping", "leaving"))
    # Drawn in any case, so that as much as possible of a run is the same on both kinds of machine.
    network = rng.choice(("faults", "pairs", "one", "one")) if moment != "joining" else "one"
    settings = _settings(rng)
    plan = Plan(
        seed=seed,
        elastic=how if elastic else None,
        ranks=rng.choice((3, 3, 4)),
        servers=rng.choice((1, 2, 2)),
        mode=rng.choice(("optimizer", "optimizer", "cross", "ddp")),
        settings=settings,
        min_workers=rng.choice((1, 1, 2)) if elastic else 1,
        moment=moment,
        delay=_delay(rng, moment),
        fault=Fault("kill", Member("rank", 0)),
        replaces=elastic and rng.random() < 0.3,
    )
    if has_network and network == "faults":
        plan.hosts = {member: host for host, member in enumerate(plan.members)}
        plan.replaces = False  # It would be on the host that is cut off.
    elif has_network and network == "pairs":
        _pair(plan)
    mortal = [one for one in plan.members if one.role != "scheduler"]
    if moment == "re-forming":
        plan.openings = tuple(rng.sample(mortal, rng.choice((1, 1, 2))))
    left = [one for one in plan.members if one not in plan.openings]
    victim = rng.choice(left)
    if victim.role == "scheduler":  # There is one, and little to see when it dies.
        victim = rng.choice(left)
    if moment == "joining":  # A rank is killed, and its successor is the victim, or another.
        plan.openings = (Member("rank", rng.randrange(plan.ranks)),)
        left = [one for one in left if one not in plan.openings]
        victim = rng.choice([plan.newcomer, plan.newcomer, *left])
        plan.replaces = True
    plan.fault = _fault(rng, plan, victim, network == "faults")
    return plan


def _settings(rng: random.Random) -> dict[str, str]:
    return {
        "BPS_LOCAL_REDUCE": rng.choice("001"),
        "BPS_TCP_DRIVER": rng.choice(("auto", "poll")),
        "BPS_TRANSPORT": rng.choice(("auto", "auto", "tcp")),
        "BPS_SERVER_CORES": rng.choice("12"),
        "BPS_ENCRYPT": rng.choice("0001"),
        "BYTEPS_PARTITION_BYTES": "4096",
    }


def _pair(plan: Plan) -> None:
    """Two ranks a host, and all others on one of their own."""
    plan.hosts = {
        member: member.index // 2 if member.role == "rank" else 2 for member in plan.members
    }
    plan.settings["BPS_LOCAL_REDUCE"] = "1"


def _make_lost(seed: int, has_network: bool, how: str) -> Plan:
    """A job that outlives its scheduler, or waits in vain for another one."""
    rng = random.Random(f"lost scheduler {seed}")
    moment = rng.choice(("forming", "stepping", "stepping", "re-forming", "joining", "leaving"))
    kind = rng.choice(("kill", "kill", "kill", "kill", "stop", "term"))
    ending = rng.choice(("soon", "soon", "later", "later", "never"))
    # One that is stopped is noticed by its silence. It goes on, or is killed and replaced.
    continued = rng.uniform(*LONG) if kind == "stop" and rng.random() < 0.4 else None
    successor = rng.uniform(0, 0.1) if ending == "soon" else rng.uniform(0.1, 3.0)
    if kind == "stop":
        successor += HEARTBEAT_TIMEOUT + 2 * HEARTBEAT_INTERVAL
    is_replaced = kind != "term" and ending != "never" and continued is None
    plan = Plan(
        seed=seed,
        elastic=how,
        ranks=rng.choice((3, 3, 4)),
        servers=rng.choice((1, 2, 2)),
        mode=rng.choice(("optimizer", "optimizer", "cross", "ddp")),
        settings=_settings(rng),
        min_workers=rng.choice((1, 1, 2)),
        moment=moment,
        delay=_delay(rng, moment),
        fault=Fault(kind, SCHEDULER, seconds=continued),
        replaces=rng.random() < 0.3,
    )
    if rng.random() < 0.25 and has_network:
        _pair(plan)
    mortal = [one for one in plan.members if one.role != "scheduler"]
    if moment == "re-forming":
        plan.openings = tuple(rng.sample(mortal, rng.choice((1, 1, 2))))
    if moment == "joining":
        plan.openings = (Member("rank", rng.randrange(plan.ranks)),)
        plan.replaces = True
    victim = rng.choice([one for one in mortal if one not in plan.openings])
    meanwhile = Fault(rng.choice(("kill", "kill", "term")), victim) if kind != "term" else None
    away = successor if is_replaced else continued or VAIN_WAIT
    plan.loss = Loss(
        successor=successor if is_replaced else None,
        meanwhile=meanwhile if rng.random() < 0.4 else None,
        delay=rng.random() * away,
    )
    return plan


def _delay(rng: random.Random, moment: str) -> float:
    """Most of what happens in a moment happens soon."""
    if moment == "re-forming" and rng.random() < 0.6:
        return rng.random() * 0.03
    longest = {
        "forming": 0.4,
        "stepping": 0.2,
        "re-forming": 0.15,
        "joining": 0.5,
        "leaving": 0.06,
    }[moment]
    return rng.random() ** (1 if moment == "forming" else 1.5) * longest


def _fault(rng: random.Random, plan: Plan, victim: Member, of_network: bool) -> Fault:
    lasts = rng.choice((None, None, SHORT, LONG))
    seconds = None if lasts is None else rng.uniform(*lasts)
    if not (of_network and plan.hosts):
        kind = rng.choice(("kill", "kill", "kill", "term", "stop", "stop"))
        return Fault(kind, victim, seconds=seconds if kind == "stop" else None)
    kind = rng.choice(("cut", "pair", "one-way", "hole"))
    others = [one for one in plan.members if one not in (victim, *plan.openings)]
    other = None if kind == "cut" else rng.choice(others)
    return Fault(kind, victim, other, seconds)
