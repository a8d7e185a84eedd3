//! The lanes between the threads of the GPUs of a host, in shared memory: over them the ranks agree
//! on the order of collectives, without the threads that carry gradients. The first rank of the
//! host has one to each other rank. A peer is not trusted: what does not fit closes its lane.

#![forbid(unsafe_code)]

use crate::base::error::Misfit;
use bps_engine::base::{DType, Epoch, Key, Rank, Round};
use bps_engine::lane::Endpoint;
use bps_engine::transport::{Cause, Event, Frame, Landing, LaneId, Link};
use bps_engine::wire::{Header, Kind, RawHeader};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// What is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderKind {
    /// To the first rank: this one's part of a tensor's reduction can begin.
    Ready,
    /// From the first rank: reduce the row next.
    Reduce,
    /// To the first rank: this one's parts of a row's result have landed.
    Landed,
    /// From the first rank: gather the row next.
    Gather,
    /// To the first rank: order nothing more of a tensor. From it: nothing more will be.
    End,
}

impl OrderKind {
    fn of(kind: Kind) -> Option<OrderKind> {
        Some(match kind {
            Kind::GpuReady => OrderKind::Ready,
            Kind::GpuReduce => OrderKind::Reduce,
            Kind::GpuLanded => OrderKind::Landed,
            Kind::GpuGather => OrderKind::Gather,
            Kind::GpuEnd => OrderKind::End,
            _ => return None,
        })
    }
}

impl From<OrderKind> for Kind {
    fn from(kind: OrderKind) -> Kind {
        match kind {
            OrderKind::Ready => Kind::GpuReady,
            OrderKind::Reduce => Kind::GpuReduce,
            OrderKind::Landed => Kind::GpuLanded,
            OrderKind::Gather => Kind::GpuGather,
            OrderKind::End => Kind::GpuEnd,
        }
    }
}

/// A word about the order of collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OrderWord {
    /// What is said.
    pub kind: OrderKind,
    /// The first key of the tensor or row.
    pub key: Key,
    /// Its round.
    pub round: u64,
    /// Words of the batch, from this one on.
    pub left: u32,
    /// Where results have landed or are to be gathered, what is known of ranks that they lack: a
    /// bit for each, as in [`Header::missing`]. Of a broadcast, any says that there is no result.
    pub missing: u64,
}

/// What has come, or became of a lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// A rank says this.
    Word {
        /// Who.
        from: Rank,
        /// What.
        word: OrderWord,
    },
    /// A rank has left in good order: it says nothing any more.
    Left(Rank),
    /// The lane of a rank has closed before that.
    Lost {
        /// Whose.
        rank: Rank,
        /// What was seen.
        cause: Cause,
    },
    /// What a rank has said is none of this: its lane closes.
    Corrupt {
        /// Who.
        from: Rank,
        /// What does not fit.
        misfit: Misfit,
    },
}

struct Lane {
    rank: Rank,
    open: bool,
    /// Its rank has left, or has said what can't be: nothing more is taken from it.
    done: bool,
    /// What is to be said, in order.
    outbox: VecDeque<Header>,
}

/// See the [module](self).
pub struct OrderLanes {
    endpoint: Endpoint,
    own: Rank,
    epoch: Epoch,
    /// By lane id.
    lanes: Vec<Lane>,
    /// Empty but while [`poll`](Self::poll) takes what has come.
    events: Vec<Event>,
}

impl OrderLanes {
    /// Of this rank, with a lane for each link; none where the rank is alone on its host.
    ///
    /// # Errors
    /// A transport of the endpoint refuses a link, or there is none of its kind.
    pub fn new(
        mut endpoint: Endpoint,
        own: Rank,
        epoch: Epoch,
        links: Vec<(Rank, Link)>,
    ) -> io::Result<OrderLanes> {
        let mut lanes = Vec::new();
        for (at, (rank, link)) in (0..).zip(links) {
            let lane = endpoint.attach(link)?;
            assert_eq!(lane, LaneId(at), "lanes are attached once, at start");
            lanes.push(Lane { rank, open: true, done: false, outbox: VecDeque::new() });
        }
        Ok(OrderLanes { endpoint, own, epoch, lanes, events: Vec::new() })
    }

    /// Says something to every rank that this one has a lane to, after what was said before: the
    /// first rank to all, and all others to it.
    pub fn say(&mut self, word: OrderWord) {
        let mut header = Header::new(word.kind.into(), DType::U8, self.own, self.epoch);
        (header.key, header.round) = (word.key, Round(word.round));
        (header.contributors, header.missing) = (word.left, word.missing);
        for lane in self.lanes.iter_mut().filter(|lane| lane.open) {
            lane.outbox.push_back(header);
        }
    }

    /// Says that this rank leaves in good order, and says nothing more.
    pub fn say_goodbye(&mut self) {
        let mut header = Header::new(Kind::Goodbye, DType::U8, self.own, self.epoch);
        header.key = Key(0);
        for lane in self.lanes.iter_mut().filter(|lane| lane.open) {
            lane.outbox.push_back(header);
        }
    }

    /// Whether all lanes are closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lanes.iter().all(|lane| !lane.open)
    }

    /// Closes all lanes.
    pub fn close(&mut self) {
        for lane in (0..).map(LaneId).take(self.lanes.len()) {
            self.endpoint.close(lane);
        }
    }

    /// Posts what was said, as far as there is room.
    pub fn flush(&mut self) {
        for (id, lane) in (0..).map(LaneId).zip(&mut self.lanes) {
            while let Some(header) = lane.outbox.front().filter(|_| lane.open) {
                let frame = Frame::bare(header.encode(), 0);
                if self.endpoint.post(id, &frame).is_err() {
                    break;
                }
                lane.outbox.pop_front();
            }
        }
    }

    /// Takes what has come, in order; says whether anything has.
    pub fn poll(&mut self, heard: &mut Vec<Heard>) -> bool {
        if self.lanes.is_empty() {
            return false;
        }
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        let progress = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Header { lane, header, .. } => self.on_header(lane, &header, heard),
                Event::Closed { lane, cause } => {
                    let state = &mut self.lanes[lane.0 as usize];
                    state.open = false;
                    if !state.done {
                        heard.push(Heard::Lost { rank: state.rank, cause });
                    }
                }
                // A payload was announced with what closed the lane, if one comes at all.
                Event::Piece { lane, .. } => self.endpoint.consume(lane),
                Event::Landed { .. } | Event::Sent { .. } | Event::Answered { .. } => {}
            }
        }
        self.events = events;
        progress
    }

    fn on_header(&mut self, lane: LaneId, raw: &RawHeader, heard: &mut Vec<Heard>) {
        let state = &mut self.lanes[lane.0 as usize];
        if state.done {
            return;
        }
        let from = state.rank;
        match understood(raw, from, self.epoch) {
            Ok(Some(word)) => {
                heard.push(Heard::Word { from, word });
                self.endpoint.land(lane, Landing::NOTHING);
                return;
            }
            Ok(None) => heard.push(Heard::Left(from)),
            Err(misfit) => heard.push(Heard::Corrupt { from, misfit }),
        }
        state.done = true;
        self.endpoint.close(lane);
    }

    /// Sleeps until something comes, `is_ready` says so, or the time is over.
    pub(crate) fn sleep(&mut self, timeout: Duration, is_ready: impl FnOnce() -> bool) {
        self.endpoint.sleep(timeout, is_ready);
    }
}

/// What the header of a frame of this rank says; nothing where that is its last one.
fn understood(raw: &RawHeader, from: Rank, epoch: Epoch) -> Result<Option<OrderWord>, Misfit> {
    let header = Header::decode(raw)?;
    let Header { kind, rank, epoch: said, length: bytes, .. } = header;
    if said != epoch || rank != from {
        return Err(Misfit::Speaker { lane: from, epoch, rank, said });
    }
    if bytes != 0 {
        return Err(Misfit::Payload { kind, bytes });
    }
    if header.kind == Kind::Goodbye {
        return Ok(None);
    }
    let kind = OrderKind::of(kind).ok_or(Misfit::NoOrder(kind))?;
    let (key, round, left) = (header.key, header.round.0, header.contributors);
    Ok(Some(OrderWord { kind, key, round, left, missing: header.missing }))
}
