//! Communicators of a simulated machine: the calls of their ranks must be the same, and a
//! collective begins once all of them have come to it in their streams.

use super::machine::{Machine, Planned};
use super::memory::{Access, POISON};
use super::stream::Work;
use bps_engine::base::{DType, Reduction};
use bps_engine::reduce::kernels;

/// `ncclRemoteError`.
const REMOTE: u32 = 6;
/// One group in so many is enqueued only when all ranks have submitted it.
const LATE_ONE_IN: u64 = 8;

/// What a rank calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Call {
    pub(super) kind: Kind,
    /// Elements, as the function counts them.
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) reduction: Reduction,
    pub(super) is_average: bool,
    pub(super) root: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Reduce,
    Broadcast,
}

/// A rank's share of a call.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub(super) send: u64,
    pub(super) receive: u64,
    pub(super) stream: usize,
}

/// A call, and who has come to it.
struct Meeting {
    call: Call,
    shares: Vec<Option<Share>>,
    has_arrived: Vec<bool>,
    /// A rank has passed it by, so it never begins.
    is_void: bool,
    /// By rank, once all have.
    results: Vec<Vec<u8>>,
}

/// The ranks of a communicator.
pub(super) struct Clique {
    id: [u8; 128],
    comms: Vec<Option<usize>>,
    meetings: Vec<Meeting>,
}

/// One rank's end of a communicator.
pub(super) struct Comm {
    clique: usize,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) device: usize,
    issued: usize,
    finished: usize,
    /// Groups that were submitted, and calls of the last that are not enqueued.
    groups: u64,
    pub(super) pending: Option<Vec<(Call, Share)>>,
    pub(super) failure: Option<u32>,
    pub(super) is_finalizing: bool,
    /// It was aborted or freed, or its process has died.
    pub(super) is_over: bool,
}

impl Call {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Bytes that a rank gives.
    fn given(&self, rank: usize, ranks: usize) -> usize {
        match self.kind {
            Kind::ReduceScatter => ranks * self.bytes(),
            Kind::Broadcast if rank != self.root => 0,
            _ => self.bytes(),
        }
    }

    /// Bytes that a rank gets.
    fn gotten(&self, rank: usize, ranks: usize) -> usize {
        match self.kind {
            Kind::AllGather => ranks * self.bytes(),
            Kind::Reduce if rank != self.root => 0,
            _ => self.bytes(),
        }
    }

    /// What each rank gets when these are the contributions, by rank.
    fn results(&self, given: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let ranks = given.len();
        let reduced = || self.reduce(given);
        match self.kind {
            Kind::AllReduce => vec![reduced(); ranks],
            Kind::ReduceScatter => {
                let all = reduced();
                let piece = |rank: usize| all[rank * self.bytes()..][..self.bytes()].to_vec();
                (0..ranks).map(piece).collect()
            }
            Kind::AllGather => vec![given.concat(); ranks],
            Kind::Broadcast => vec![given[self.root].clone(); ranks],
            Kind::Reduce => {
                let mut results = vec![Vec::new(); ranks];
                results[self.root] = reduced();
                results
            }
        }
    }

    fn reduce(&self, given: &[Vec<u8>]) -> Vec<u8> {
        let [first, others @ ..] = given else { return Vec::new() };
        let mut sum = first.clone();
        if !others.is_empty() && !sum.is_empty() {
            let sources: Vec<*const u8> = others.iter().map(|one| one.as_ptr()).collect();
            let count = sum.len() / self.dtype.size();
            let divisor = if self.is_average { given.len() } else { 1 };
            let divisor = u32::try_from(divisor).expect("few ranks");
            // SAFETY: all are of one length, which is `count` elements, and apart.
            unsafe {
                let (out, own) = (sum.as_mut_ptr(), first.as_ptr());
                kernels().reduce_all(
                    self.reduction,
                    self.dtype,
                    out,
                    own,
                    &sources,
                    count,
                    divisor,
                );
            }
        }
        sum
    }
}

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
