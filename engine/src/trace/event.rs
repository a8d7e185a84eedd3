//! What data threads record of each part, and when.

use crate::base::{Key, Rank};

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mark {
    /// Worker: push_pull was called.
    Queued,
    /// GPU: the gradient is complete.
    Ready,
    /// GPU: the part's copy into a slot is the next one of its stream.
    Falling,
    /// GPU: it is in its slot.
    Fallen,
    /// GPU: it has joined the other PCIe switches' sums of the part: at its owner all are added,
    /// elsewhere it is out of its slot.
    Crossed,
    /// GPU: the copy of the result out of its slot is the next one of its stream.
    Rising,
    /// GPU: it is in the tensor.
    Risen,
    /// Worker: the owner of the part asks its group for contributions, or this rank is asked; on
    /// a GPU, NCCL is called to reduce it.
    Granted,
    /// Worker that is asked: its contribution is out of its memory.
    Contributed,
    /// Worker that owns the part: all contributions of its group are added.
    Reduced,
    /// Worker: a result begins to go from the part's owner to its group; here the owner posts it,
    /// or its header has come; on a GPU, NCCL is called to gather it.
    Copying,
    /// Worker: that result is in the tensor; at the owner, out of it for one more rank.
    Copied,
    /// Either: a frame is handed to the transport, which takes it.
    Posted,
    /// Either: the frame is out of its memory.
    Sent,
    /// Worker: the header of a server's publication has come.
    Landing,
    /// Worker: its payload is in the tensor.
    Landed,
    /// Worker: the tensor's last part has landed; the key is that of one of its parts.
    Done,
    /// Server: the header of a contribution has come.
    Arrived,
    /// Server: it waits, because another contribution to its key is landing.
    Parked,
    /// Server: it is received into the accumulator.
    Taken,
    /// Server: it is received in pieces that are added.
    Adding,
    /// Server: the addition of a piece begins.
    PieceBegins,
    /// Server: that addition has ended.
    PieceEnds,
    /// Server: the contribution is complete.
    Ended,
    /// Server: it was the last one, so the round is summed.
    Summed,
}

/// One record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, by [`now_ns`](super::clock::now_ns).
    pub at_ns: u64,
    /// Of which part.
    pub key: Key,
    /// Of which round of it.
    pub round: u64,
    /// Bytes of the frame or piece.
    pub bytes: u32,
    /// The worker concerned.
    pub rank: Rank,
    /// What.
    pub mark: Mark,
}
