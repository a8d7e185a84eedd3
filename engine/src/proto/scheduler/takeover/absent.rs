//! Members of a roster that have not come, or whom it had not reached: as those that have come know
//! them.

use super::super::waits::Reminder;
use super::{
    Duration, Epoch, Node, NodeId, Output, OverReason, Phase, Register, Resume, Roster, Scheduler,
    Seat, Standing, Takeover, word,
};

/// A number for the connection of a member that has none.
fn nobody(seat: Seat) -> NodeId {
    NodeId(match seat {
        Seat::Rank(rank) => u64::MAX - 2 * u64::from(rank),
        Seat::Server(server) => u64::MAX - 2 * u64::from(server) - 1,
    })
}

/// Host and process of a rank of the last roster, as whoever has come knows them.
fn place_of(takeover: &Takeover, rank: u32) -> Option<(&str, u32)> {
    let rosters = || takeover.members.values().map(|member| &member.resume.roster);
    let known = rosters().find_map(|roster| roster.workers.get(rank as usize));
    let neighbour = rosters().flat_map(|roster| &roster.neighbours).find(|one| one.rank.0 == rank);
    let known = known.map(|known| (known.host.as_str(), known.pid));
    known.or(neighbour.map(|one| (one.host.as_str(), one.pid)))
}

/// A rank of the last roster: one that has not come is as the others know it.
pub(super) fn rank_of(takeover: &Takeover, rank: u32) -> (NodeId, Register) {
    let seat = Seat::Rank(rank);
    if let Some(member) = takeover.members.get(&seat) {
        return (member.node, member.resume.register.clone());
    }
    let rosters = || takeover.members.values().map(|member| &member.resume.roster);
    let known = rosters().find_map(|roster| roster.workers.get(rank as usize));
    let place = place_of(takeover, rank);
    let (host, pid) =
        place.map_or_else(|| ("unknown".to_owned(), 0), |(host, pid)| (host.to_owned(), pid));
    let ranks = || {
        takeover.members.iter().filter_map(|(seat, member)| match seat {
            Seat::Rank(other) => Some((*other, &member.resume)),
            Seat::Server(_) => None,
        })
    };
    // Whoever reduces with it shares its host.
    let shares = |(other, resume): &(u32, &Resume)| {
        let groups = rosters().find(|roster| !roster.workers.is_empty());
        let group = |rank: u32| {
            groups.and_then(|roster| roster.workers.get(rank as usize)).map(|peer| peer.group)
        };
        let is_neighbour = resume.roster.neighbours.iter().any(|one| one.rank.0 == rank);
        is_neighbour || group(*other).is_some() && group(*other) == group(rank)
    };
    let host_id = ranks().find(shares).map(|(_, resume)| resume.register.host_id.clone());
    // Two of one host that have both not come are in one group as well.
    let apart = || match known {
        Some(known) => format!("the host of group {}", known.group),
        None => format!("the host of rank {rank}"),
    };
    let host_id = host_id.unwrap_or_else(apart);
    let (_, like) = ranks().next().expect("a job without any rank has no list of them");
    let mut register = like.register.clone();
    // The other's framework is its own.
    if let Node::Worker { speaks, .. } = &mut register.node {
        *speaks = None;
    }
    (
        nobody(seat),
        Register { host, host_id, pid, instance: 0, session: 0, former: None, ..register },
    )
}

/// A server of the last roster, likewise.
pub(super) fn server_of(takeover: &Takeover, server: u32) -> (NodeId, Register) {
    let seat = Seat::Server(server);
    if let Some(member) = takeover.members.get(&seat) {
        return (member.node, member.resume.register.clone());
    }
    let any = takeover.members.values().next().expect("somebody has brought the roster");
    let known = any.resume.roster.servers[server as usize].clone();
    let (cores, shm, rdma) = (known.cores, known.shm, known.rdma);
    let node = Node::Server { cores, shm, rdma, colocated: false, preferred: None };
    let (host, pid, host_id) = (known.host, known.pid, known.host_id);
    let register = any.resume.register.clone();
    (
        nobody(seat),
        Register { node, host, host_id, pid, instance: 0, session: 0, former: None, ..register },
    )
}

/// What a server says that had forgotten an earlier epoch for that of this roster, and that the
/// roster had not reached when the scheduler was lost: it keeps nothing, and is of that epoch. The
/// `reset` that it still has makes the job form again, since it does not know its ranks.
pub(super) fn caught_up(resume: &Resume, roster: &Roster) -> Option<Resume> {
    let Node::Server { cores, .. } = &resume.register.node else { return None };
    let is_before = resume.roster.job == roster.job && resume.roster.epoch < roster.epoch;
    if !is_before || resume.reset != Some(roster.epoch) {
        return None;
    }
    let (host, pid) = (&resume.register.host, resume.register.pid);
    let mut servers = roster.servers.iter();
    let index = servers.position(|one| one.host == *host && one.pid == pid && one.cores == *cores);
    let roster = Roster { index: word(index?), ..roster.clone() };
    Some(Resume { roster, ..resume.clone() })
}

impl Scheduler {
    /// A member that had come is gone again: its seat is empty.
    pub(in crate::proto::scheduler) fn leave_seat(&mut self, node: NodeId, how: &str) {
        let who = self.described(node);
        self.peers.remove(&node);
        self.put(Output::Log(format!("{who} is gone while the job is taken over: {how}")));
        self.put(Output::Close(node));
        let now = self.clock;
        if let Phase::Taking(takeover) = &mut self.phase {
            takeover.remove(node);
            if takeover.members.is_empty() && takeover.left.is_empty() {
                // All have lost patience with a process that was stopped, and come again.
                takeover.since = now;
                self.reminder = Reminder::soon(now);
            }
        }
    }

    /// How long members may take to come. A heartbeat that goes out up to an interval I after the
    /// last answer, and has none for 9/8 of the timeout T, makes a node look for another scheduler:
    /// 9/8 T + I after the lost one stopped. 5/4 of the T + I after which a scheduler gives nodes
    /// up leave T/8 + I/4 to come in.
    pub(super) fn takeover_wait(&self) -> Duration {
        self.config.heartbeat_timeout * 5 / 4
    }

    /// Whether a member that resumes by this connection is here by another one. Its epoch may just
    /// have ended, and it has not read so yet.
    pub(super) fn is_here(&self, node: NodeId, session: u64) -> bool {
        let is_member = |standing: &Standing| {
            matches!(standing, Standing::Worker(_) | Standing::Server | Standing::Former(_))
        };
        let mut others = self.peers.iter().filter(|(other, _)| **other != node);
        others.any(|(_, one)| one.session == Some(session) && is_member(&one.standing))
    }

    /// Ranks of the last roster that have come as new ones: the lost scheduler knew that they were
    /// between two connections, and nobody else does.
    pub(super) fn returning(&self, takeover: &Takeover) -> Vec<Seat> {
        let has_come = |host: &str, pid: u32| {
            self.peers.values().any(|peer| match &peer.standing {
                Standing::Early(register) => {
                    let is_worker = matches!(register.node, Node::Worker { .. });
                    is_worker && register.pid == pid && register.host == host
                }
                _ => false,
            })
        };
        let is_returning = |seat: &Seat| {
            let Seat::Rank(rank) = *seat else { return false };
            place_of(takeover, rank).is_some_and(|(host, pid)| has_come(host, pid))
        };
        takeover.missing().into_iter().filter(is_returning).collect()
    }

    /// Whether a rank is of an epoch that the lost scheduler had formed, and that was unknown to
    /// those from whom the job was taken over: nobody has given that rank up.
    pub(super) fn is_of_unknown_epoch(&self, resume: &Resume) -> bool {
        let is_worker = matches!(resume.register.node, Node::Worker { .. });
        let is_later = self.history.taken.is_some_and(|taken| resume.roster.epoch > taken);
        is_worker && is_later && resume.term < self.term
    }

    /// Tells a rank that its epoch is over: it comes back, as a new one.
    pub(super) fn send_back(&mut self, node: NodeId, epoch: Epoch) {
        let reason = Box::new(OverReason::UnknownEpoch { epoch });
        let who = self.described(node);
        self.put(Output::Log(format!("{who} may come as a new worker: {reason}")));
        self.dismiss(node, OverReason::Reforming { reason, epoch: self.epoch });
    }
}
