//! Collectives of a simulated machine: the calls of a communicator's ranks must be the same, and a
//! collective begins once all of them have come to it in their streams.

use super::communicator::{Call, Clique, Comm, Meeting, Share};
use super::machine::{Machine, Planned};
use super::memory::{Access, POISON};
use super::stream::Work;

/// `ncclRemoteError`.
const REMOTE: u32 = 6;
/// One group in so many is enqueued only when all ranks have submitted it.
const LATE_ONE_IN: u64 = 8;

impl Machine {
    /// A rank joins a communicator.
    pub(super) fn join(
        &mut self,
        id: [u8; 128],
        ranks: usize,
        rank: usize,
        device: usize,
    ) -> usize {
        let known = self.cliques.iter().position(|clique| clique.id == id);
        let clique = known.unwrap_or_else(|| {
            self.cliques.push(Clique { id, comms: vec![None; ranks], meetings: Vec::new() });
            self.cliques.len() - 1
        });
        let number = self.comms.len();
        let place = &mut self.cliques[clique].comms[rank];
        if place.replace(number).is_some() {
            self.blame(Err(format!("rank {rank} joins a communicator twice")));
        }
        self.comms.push(Comm {
            clique,
            rank,
            ranks,
            device,
            issued: 0,
            finished: 0,
            groups: 0,
            pending: None,
            failure: None,
            is_finalizing: false,
            is_over: false,
        });
        number
    }

    /// The other ranks of a communicator that have come.
    pub(super) fn others(&self, comm: usize) -> Vec<usize> {
        let all = &self.cliques[self.comms[comm].clique].comms;
        all.iter().flatten().copied().filter(|other| *other != comm).collect()
    }

    /// A group of calls is submitted; says whether it is enqueued.
    pub(super) fn submit(&mut self, comm: usize, calls: Vec<(Call, Share)>) -> bool {
        let of = &mut self.comms[comm];
        let (clique, group) = (of.clique, of.groups);
        of.groups += 1;
        // All ranks must think alike of it.
        let whim = (clique as u64 * 7919 + group).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let is_late = group == 0 || whim.is_multiple_of(LATE_ONE_IN);
        if !is_late && self.random.once_in(2) {
            self.enqueue_all(comm, calls);
            return true;
        }
        self.comms[comm].pending = Some(calls);
        let all = &self.cliques[clique].comms;
        let have_all = all.iter().all(|one| one.is_some_and(|one| self.comms[one].groups > group));
        let released = match (is_late, have_all) {
            (false, _) => vec![comm],
            (true, false) => Vec::new(),
            (true, true) => all.iter().flatten().copied().collect(),
        };
        for comm in released {
            let delay = self.delay();
            self.plan(delay, Planned::Enqueue(comm));
        }
        false
    }

    /// NCCL's thread has done its work.
    pub(super) fn enqueue_pending(&mut self, comm: usize) {
        if let Some(calls) = self.comms[comm].pending.take()
            && !self.comms[comm].is_over
        {
            self.enqueue_all(comm, calls);
        }
    }

    fn enqueue_all(&mut self, comm: usize, calls: Vec<(Call, Share)>) {
        for (call, share) in calls {
            let Comm { clique, rank, ranks, issued, .. } = self.comms[comm];
            self.comms[comm].issued += 1;
            let meetings = &mut self.cliques[clique].meetings;
            if issued == meetings.len() {
                let (shares, has_arrived) = (vec![None; ranks], vec![false; ranks]);
                let (is_void, results) = (false, Vec::new());
                meetings.push(Meeting { call, shares, has_arrived, is_void, results });
            }
            let meeting = &mut meetings[issued];
            meeting.shares[rank] = Some(share);
            if meeting.call != call {
                let text = format!(
                    "call {issued} on a communicator: rank {rank} makes {call:?}, another {:?}",
                    meeting.call
                );
                self.blame(Err(text));
            }
            let accesses = [
                Access::read(share.send, call.given(rank, ranks)),
                Access::write(share.receive, call.gotten(rank, ranks)),
            ];
            let work = Work::Collective { comm, call: issued };
            self.enqueue(share.stream, "a collective", work, &accesses);
        }
    }

    /// A stream has come to a collective; says whether it has passed it at once.
    pub(super) fn arrive(&mut self, stream: usize, comm: usize, call: usize) -> bool {
        let Comm { clique, rank, is_over, .. } = self.comms[comm];
        let stands = |one: &Option<usize>| {
            one.is_some_and(|one| self.devices[self.comms[one].device].stands())
        };
        let is_void = self.cliques[clique].comms.iter().any(stands);
        let meeting = &mut self.cliques[clique].meetings[call];
        meeting.has_arrived[rank] = true;
        meeting.is_void |= is_over || is_void;
        if is_over {
            self.finish(stream);
            return true;
        }
        let have_all = meeting.has_arrived.iter().all(|has| *has);
        if have_all && !meeting.is_void && meeting.results.is_empty() {
            self.begin(clique, call);
        }
        false
    }

    /// All ranks have come: what they give is read, and what they get is on its way.
    fn begin(&mut self, clique: usize, number: usize) {
        let meeting = &self.cliques[clique].meetings[number];
        let call = meeting.call;
        let shares: Vec<Share> = meeting.shares.iter().flatten().copied().collect();
        let ranks = shares.len();
        let mut is_there = true;
        let mut given = Vec::with_capacity(ranks);
        for (rank, share) in shares.iter().enumerate() {
            let bytes = self.memory.bytes(share.send, call.given(rank, ranks));
            is_there &= bytes.is_some();
            given.push(
                bytes.map_or_else(|| vec![0; call.given(rank, ranks)], |bytes| bytes.to_vec()),
            );
        }
        for (rank, share) in shares.iter().enumerate() {
            match self.memory.bytes(share.receive, call.gotten(rank, ranks)) {
                Some(target) => target.fill(POISON),
                None => is_there = false,
            }
        }
        if !is_there {
            self.blame(Err("a collective uses memory that was given back".into()));
        }
        self.cliques[clique].meetings[number].results = call.results(&given);
        let common = self.delay();
        for share in shares {
            let delay = common + self.delay();
            self.streams[share.stream].is_running = true;
            self.plan(delay, Planned::Finish(share.stream));
        }
    }

    /// A collective is over for a rank: it was done, or the communicator was aborted.
    pub(super) fn finish_call(&mut self, comm: usize, number: usize) {
        let Comm { clique, rank, ranks, is_over, .. } = self.comms[comm];
        self.comms[comm].finished += 1;
        let meeting = &mut self.cliques[clique].meetings[number];
        let share = meeting.shares[rank].expect("it was enqueued");
        if is_over {
            if meeting.call.gotten(rank, ranks) > 0 {
                self.memory.spoil(share.receive);
            }
            return;
        }
        let result = std::mem::take(&mut meeting.results[rank]);
        if !result.is_empty() {
            match self.memory.bytes(share.receive, result.len()) {
                Some(target) => target.copy_from_slice(&result),
                None => self.blame(Err("a collective writes to memory that was given back".into())),
            }
        }
    }

    /// Ends a communicator on this rank with all that is in flight.
    pub(super) fn abort(&mut self, comm: usize) {
        let Comm { device, .. } = self.comms[comm];
        self.comms[comm].is_over = true;
        self.comms[comm].pending = None;
        if self.devices[device].stands() {
            return;
        }
        for stream in self.devices[device].streams.clone() {
            let of = &mut self.streams[stream];
            if let Some(Work::Collective { comm: own, call }) =
                of.queue.front().map(|first| &first.work)
                && *own == comm
                && of.is_running
            {
                let call = *call;
                of.is_stuck = false;
                self.leave_others_stuck(comm, call);
                self.finish(stream);
            }
        }
        self.pump(device);
    }

    /// A rank has left a collective that is under way: others may never get out of it.
    pub(super) fn leave_others_stuck(&mut self, comm: usize, call: usize) {
        for other in self.others(comm) {
            let Comm { clique, rank, is_over, .. } = self.comms[other];
            let share = self.cliques[clique].meetings[call].shares[rank];
            if let Some(share) = share.filter(|_| !is_over) {
                let of = &self.streams[share.stream];
                let is_at_it = of.is_running
                    && matches!(of.queue.front().map(|first| &first.work),
                        Some(Work::Collective { comm, call: at }) if *comm == other && *at == call);
                if is_at_it && self.random.once_in(2) {
                    self.streams[share.stream].is_stuck = true;
                }
            }
        }
    }

    pub(super) fn break_comm(&mut self, comm: usize) {
        self.comms[comm].failure.get_or_insert(REMOTE);
    }

    /// Whether something of a communicator is going on behind the calls.
    pub(super) fn is_in_progress(&self, comm: usize) -> bool {
        let of = &self.comms[comm];
        let is_closed = |comm: &Comm| {
            comm.is_finalizing && comm.finished == comm.issued && comm.pending.is_none()
        };
        let all = &self.cliques[of.clique].comms;
        let is_parted = || all.iter().all(|one| one.is_some_and(|one| is_closed(&self.comms[one])));
        of.pending.is_some() || of.is_finalizing && !is_parted()
    }
}
