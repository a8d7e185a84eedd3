//! Communicators of a simulated machine: who is in them, what their ranks call, and what comes out.

use bps_engine::base::{DType, Reduction};
use bps_engine::reduce::kernels;

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
pub(super) struct Meeting {
    pub(super) call: Call,
    pub(super) shares: Vec<Option<Share>>,
    pub(super) has_arrived: Vec<bool>,
    /// A rank has passed it by, so it never begins.
    pub(super) is_void: bool,
    /// By rank, once all have.
    pub(super) results: Vec<Vec<u8>>,
}

/// The ranks of a communicator.
pub(super) struct Clique {
    pub(super) id: [u8; 128],
    pub(super) comms: Vec<Option<usize>>,
    pub(super) meetings: Vec<Meeting>,
}

/// One rank's end of a communicator.
pub(super) struct Comm {
    pub(super) clique: usize,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) device: usize,
    pub(super) issued: usize,
    pub(super) finished: usize,
    /// Groups that were submitted, and calls of the last that are not enqueued.
    pub(super) groups: u64,
    pub(super) pending: Option<Vec<(Call, Share)>>,
    pub(super) failure: Option<u32>,
    pub(super) is_finalizing: bool,
    /// It was aborted or freed, or its process has died.
    pub(super) is_over: bool,
}

impl Call {
    pub(super) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Bytes that a rank gives.
    pub(super) fn given(&self, rank: usize, ranks: usize) -> usize {
        match self.kind {
            Kind::ReduceScatter => ranks * self.bytes(),
            Kind::Broadcast if rank != self.root => 0,
            _ => self.bytes(),
        }
    }

    /// Bytes that a rank gets.
    pub(super) fn gotten(&self, rank: usize, ranks: usize) -> usize {
        match self.kind {
            Kind::AllGather => ranks * self.bytes(),
            Kind::Reduce if rank != self.root => 0,
            _ => self.bytes(),
        }
    }

    /// What each rank gets when these are the contributions, by rank.
    pub(super) fn results(&self, given: &[Vec<u8>]) -> Vec<Vec<u8>> {
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
