//! Tensors on a GPU, as the NIC loop sees them: their parts come one by one, each in a slot, and
//! each result goes to the next slot that is free. What happens on the GPU is the pipeline's
//! business; the two threads meet in two queues.
//!
//! Slots are in the host's memory, or in the GPU's where RDMA devices reach that: then every server
//! is reached so, and no processor needs to see what is in them.
//!
//! Slots to send from and slots to land in are apart, and neither waits for the other: a slot to
//! send from is free once the transport is done with it, one to land in once the GPU has copied it.
//! So ranks may push in any order, however few slots there are.
//!
//! Where a host has several PCIe switches, the ranks of a column add their switches' sums in the
//! slot of the part's owner, and the result goes from the slot in which it landed there, or was
//! added, to slots of the others. So a slot may have several users, of which the last gives it
//! back. What a rank sends then waits for others, so all ranks of a host copy down in one order,
//! and the earliest part that is not summed has a slot at each of them. What the others publish
//! lands in slots of its own, which wait for the GPU alone: results of servers wait for those
//! slots, and never the other way round.

use super::granted::Granted;
use super::{LaneId, Nic, Peer, Receiving, RunPart, Stage};
use crate::error::Error;
use crate::gpu::Push;
use crate::nic::Plan;
use bps_engine::base::{DType, Key, Operation, Rank, Round};
use bps_engine::proto::messages::StalledKey;
use bps_engine::ring::Mpsc;
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::rdma::GpuMemory;
use bps_engine::transport::{Frame, Full, Landing, Waker};
use bps_engine::wire::{Header, Kind};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a slot is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pool {
    /// To be sent from.
    Sends,
    /// For results of servers.
    Results,
    /// For results that other ranks of the host publish.
    Publications,
    /// In the GPU's memory, for results that devices of servers write there.
    Answers,
}

/// A piece of memory that a GPU copies from and to; as large as a part may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Its number among all slots of the process.
    pub number: u32,
    /// To which it goes back.
    pub pool: Pool,
    /// Its first byte.
    pub at: *mut u8,
    /// Whether it is in the GPU's memory, where no processor can follow the address.
    pub on_gpu: bool,
}

// SAFETY: who holds the value may use the memory, and it is handed from one thread to the other
// through queues; the pipeline keeps it mapped until the loop has ended.
unsafe impl Send for Slot {}

/// Where the slots are that RDMA devices are to reach.
#[derive(Default)]
pub struct SlotMemory {
    /// First byte and bytes of those to send from, in the host's memory.
    pub to_send: Option<(NonNull<u8>, usize)>,
    /// The same of those to land in what servers send.
    pub to_land: Option<(NonNull<u8>, usize)>,
    /// To send from, in the GPU's memory.
    pub gpu_to_send: Option<GpuMemory>,
    /// To land in, in the GPU's memory.
    pub gpu_to_land: Option<GpuMemory>,
}

// SAFETY: addresses, of which what holds for slots holds, and registrations, which any thread may
// have.
unsafe impl Send for SlotMemory {}

/// What ranks of a host say to each other about tensors on GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word {
    /// One of the kinds for GPUs.
    pub kind: Kind,
    /// The first key of the tensor or row.
    pub key: Key,
    /// Its round.
    pub round: u64,
    /// Words of the batch, from this one on.
    pub left: u32,
}

/// From the NIC loop to the pipeline.
#[derive(Debug)]
pub enum Staged {
    /// A tensor was declared.
    Plan {
        /// Its id.
        tensor: u32,
        /// Where its parts live.
        plan: Arc<Plan>,
    },
    /// A tensor is pushed.
    Push {
        /// Its id.
        tensor: u32,
        /// All else.
        push: Box<Push>,
    },
    /// The transport is done with a slot that was sent from.
    Sent(Slot),
    /// A result has landed, in a slot if it has bytes.
    Landed {
        /// The tensor.
        tensor: u32,
        /// The part's place in its plan.
        part: u32,
        /// Where.
        slot: Option<Slot>,
    },
    /// All parts of a tensor's round that this rank owns have landed and are sent.
    Closed {
        /// The tensor.
        tensor: u32,
    },
    /// A rank of the group says this.
    Heard {
        /// Who.
        from: Rank,
        /// What.
        word: Word,
    },
    /// Ranks disagree about a tensor: what is pending of it fails, and so does what comes.
    Poisoned {
        /// The tensor.
        tensor: u32,
        /// Why.
        error: crate::Error,
    },
    /// A rank of the group has left in good order: it says nothing any more.
    Gone(Rank),
    /// Record a timeline with this from now on; a recorder that is off ends it.
    Trace(Recorder),
}

/// The pipeline of a GPU, to the NIC loop. It looks by itself whether the loop has ended.
pub struct ToPipeline {
    /// Its queue.
    pub staged: Mpsc<Staged>,
    /// Wakes it.
    pub waker: Waker,
    /// Pushes that it has been told of and that are not over.
    pub under_way: Arc<AtomicUsize>,
    /// Where its slots are, for devices that reach them by themselves.
    pub slots: SlotMemory,
}

/// The loop's side of the pipeline.
#[derive(Default)]
pub(super) struct Pipeline {
    to: Option<ToPipeline>,
    /// What did not fit into the queue.
    behind: VecDeque<Staged>,
    /// To land in: what servers send, what ranks publish, and what servers' devices write to the
    /// GPU.
    landings: [Landings; 3],
    /// Those that a server's device may write to.
    pub(super) granted: Granted,
    /// By the number of a slot: who uses it, if several do.
    users: Vec<u32>,
    /// Somebody may have to be woken.
    told: bool,
    /// What it said last of rounds that wait for ranks of the host.
    pub(super) stalled: Vec<StalledKey>,
    /// Of the timeline that is on, for a pipeline that is not there yet.
    recorder: Recorder,
}

/// Slots to land in.
#[derive(Default)]
struct Landings {
    free: Vec<Slot>,
    /// Lanes whose next result waits for a slot, in the order in which they came.
    held: VecDeque<LaneId>,
}

impl Pipeline {
    fn landings(&mut self, pool: Pool) -> &mut Landings {
        let index = match pool {
            Pool::Sends | Pool::Results => 0,
            Pool::Publications => 1,
            Pool::Answers => 2,
        };
        &mut self.landings[index]
    }

    /// Free slots of this pool.
    pub(super) fn free(&mut self, pool: Pool) -> &mut Vec<Slot> {
        &mut self.landings(pool).free
    }

    pub(super) fn is_open(&self) -> bool {
        self.to.is_some()
    }

    /// Who begins a timeline, or ends it, does so with this.
    pub(super) fn record_with(&mut self, recorder: Recorder) {
        if self.is_open() {
            self.tell(Staged::Trace(recorder));
        } else {
            self.recorder = recorder;
        }
    }

    pub(super) fn tell(&mut self, message: Staged) {
        let Some(to) = &self.to else { return };
        self.told = true;
        if self.behind.is_empty() {
            if let Err(back) = to.staged.push(message) {
                self.behind.push_back(back);
            }
        } else {
            self.behind.push_back(message);
        }
    }

    /// Hands over what waits and wakes the pipeline, once in a turn of the loop.
    pub(super) fn flush(&mut self) {
        let Some(to) = &self.to else { return };
        while let Some(message) = self.behind.pop_front() {
            if let Err(back) = to.staged.push(message) {
                self.behind.push_front(back);
                break;
            }
        }
        if std::mem::take(&mut self.told) {
            to.waker.wake();
        }
    }

    /// Whether a tensor on the GPU is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.to.as_ref().is_some_and(|to| to.under_way.load(Ordering::Acquire) > 0)
    }
}

impl Nic {
    /// The next round of a tensor on the GPU begins.
    pub(super) fn open_staged(&mut self, tensor: u32, priority: i64) {
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        if self.over.is_some() || state.poisoned.is_some() {
            return;
        }
        let rank = self.config.rank;
        let own = state.plan.parts.iter().filter(|part| part.holder == rank).count();
        let index = self.open_run(tensor, priority, u32::try_from(own).unwrap_or(u32::MAX));
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        state.run = Some(index);
        // What others hold is theirs to wait for, and theirs to leave behind.
        for (stage, part) in state.stages.iter_mut().zip(&state.plan.parts) {
            if part.holder != rank {
                *stage = Stage::Idle;
            }
        }
    }

    /// A part of it may be sent, or summed down the column first.
    pub(super) fn push_staged(&mut self, tensor: u32, part: u32, slot: Option<Slot>) {
        let give_back = |nic: &mut Nic| {
            if let Some(slot) = slot {
                nic.release(slot);
            }
        };
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        let (Some(run), None) = (state.run, &state.poisoned) else { return give_back(self) };
        if self.over.is_some() {
            return give_back(self);
        }
        if let Some(place) = state.slots.get_mut(part as usize) {
            *place = slot;
        }
        self.push_part(RunPart { run, part });
    }

    /// One of a slot's users needs it no more: the last one gives it back.
    pub(super) fn release(&mut self, slot: Slot) {
        if let Some(users) = self.pipeline.users.get_mut(slot.number as usize) {
            *users = users.saturating_sub(1);
            if *users > 0 {
                return;
            }
        }
        match slot.pool {
            Pool::Sends => self.pipeline.tell(Staged::Sent(slot)),
            Pool::Results | Pool::Publications | Pool::Answers => self.land_in(slot),
        }
    }

    /// A part's result is in this slot, and goes from there to the rest of the column; `others` use
    /// the slot beside.
    fn share(&mut self, of: RunPart, slot: Slot, others: u32) {
        let column = u32::try_from(self.column.lanes.len()).unwrap_or(u32::MAX);
        let (users, number) = (&mut self.pipeline.users, slot.number as usize);
        if users.len() <= number {
            users.resize(number + 1, 0);
        }
        users[number] = others + column;
        let tensor = self.runs[of.run as usize].tensor as usize;
        if let Some(Some(tensor)) = self.tensors.get_mut(tensor)
            && let Some(place) = tensor.results.get_mut(of.part as usize)
        {
            *place = Some(slot);
        }
        self.publish(of);
    }

    /// A part has left the slot that it was to be sent from, if it had one.
    pub(super) fn slot_sent(&mut self, of: RunPart) {
        if let Some(slot) = self.take_slot(of) {
            self.release(slot);
        }
    }

    /// A rank of the column has taken a part's result, or is not to have it.
    pub(super) fn result_sent(&mut self, of: RunPart) {
        let Some((tensor, _)) = self.planned(of) else { return };
        if let Some(slot) = tensor.results.get(of.part as usize).copied().flatten() {
            self.release(slot);
        }
    }

    /// If this rank broadcasts the part, the column need not wait for what servers say of it.
    pub(super) fn publish_own(&mut self, of: RunPart) {
        let Some((tensor, part)) = self.planned(of) else { return };
        let is_root = tensor.plan.operation == Operation::Broadcast(self.config.rank);
        let slot = tensor.slots.get(of.part as usize).copied().flatten();
        if is_root
            && part.core.is_some()
            && let Some(slot) = slot
        {
            // The other user is the frame to the server.
            self.share(of, slot, 1);
        }
    }

    /// A round is given up: what was not said of it, and is not with a transport, needs no slot.
    pub(super) fn give_slots_back(&mut self, run: u32, unsaid: &[super::Word]) {
        for word in unsaid {
            match word.kind {
                Kind::Contribution => self.slot_sent(word.of),
                Kind::Publication => self.result_sent(word.of),
                _ => {}
            }
        }
        let tensor = self.tensors.get(self.runs[run as usize].tensor as usize);
        let parts = tensor.and_then(Option::as_ref).map_or(0, |tensor| tensor.slots.len());
        for part in 0..u32::try_from(parts).unwrap_or(0) {
            let of = RunPart { run, part };
            let Some((tensor, _)) = self.planned(of) else { return };
            if tensor.stages[part as usize] == Stage::Pushed {
                self.slot_sent(of);
            }
        }
    }

    /// A slot to land in is free: the lane that has waited longest takes it.
    pub(super) fn land_in(&mut self, slot: Slot) {
        self.pipeline.landings(slot.pool).free.push(slot);
        while let Some(lane) = self.pipeline.landings(slot.pool).held.pop_front() {
            let state = &mut self.lanes[lane.0 as usize];
            if let Receiving::Held { part, header } = state.receiving {
                return self.land_staged(lane, part, header);
            }
        }
    }

    /// A result that is to land in a slot: in the next one that is free, at once or later.
    pub(super) fn land_staged(&mut self, lane: LaneId, part: RunPart, header: Header) {
        let state = &mut self.lanes[lane.0 as usize];
        let pool = match state.peer {
            Peer::Server(_) => Pool::Results,
            Peer::Rank(_) => Pool::Publications,
        };
        let landings = self.pipeline.landings(pool);
        let Some(slot) = landings.free.pop() else {
            state.receiving = Receiving::Held { part, header };
            return landings.held.push_back(lane);
        };
        state.receiving = Receiving::Landing { part, header, target: slot.at, slot: Some(slot) };
        self.endpoint.land(lane, Landing::Into(slot.at), header.length as usize);
    }

    /// The result of a part is there, in this slot if it has bytes.
    pub(super) fn staged_result(&mut self, of: RunPart, slot: Option<Slot>) {
        self.statistics.counters.rounds.add(1);
        self.set_stage(of, Stage::Idle);
        let is_own = self.planned(of).is_some_and(|(_, part)| part.owner.is_none());
        let run = &self.runs[of.run as usize];
        match (run.failed.is_some(), slot) {
            // Nobody wants it any more.
            (true, Some(slot)) => self.release(slot),
            (true, None) => {}
            (false, slot) => {
                let (tensor, part) = (run.tensor, of.part);
                self.pipeline.tell(Staged::Landed { tensor, part, slot });
                if let Some(slot) = slot.filter(|_| is_own && !self.column.lanes.is_empty()) {
                    // The other user is the GPU.
                    self.share(of, slot, 1);
                }
            }
        }
        self.close_one(of.run);
    }

    /// A rank of the group says something about tensors on GPUs.
    pub(super) fn on_gpu_word(
        &mut self,
        lane: LaneId,
        from: Rank,
        header: &Header,
    ) -> Result<(), String> {
        if !self.pipeline.is_open() {
            return Err(format!("{:?}, and this rank uses no GPU", header.kind));
        }
        let (kind, key) = (header.kind, header.key);
        let word = Word { kind, key, round: header.round.0, left: header.contributors };
        self.pipeline.tell(Staged::Heard { from, word });
        self.endpoint.land(lane, Landing::Pieces, 0);
        Ok(())
    }

    /// Says something about tensors on GPUs to one rank of the group, or to all.
    pub(super) fn say_word(&mut self, to: Option<Rank>, word: Word) {
        for at in 0..self.group.lanes.len() {
            let lane = self.group.lanes[at];
            if to.is_none() || self.rank_of(lane) == to {
                self.lanes[lane.0 as usize].outbox.push_back(super::Outgoing::Gpu(word));
            }
        }
    }

    /// Posts a word.
    pub(super) fn post_word(&mut self, lane: LaneId, word: Word) -> Result<(), Full> {
        let mut header = self.header(word.kind, DType::U8);
        header.key = word.key;
        header.round = Round(word.round);
        header.contributors = word.left;
        let token = super::sending::QUIET;
        let frame = Frame::new(header.encode(), std::ptr::null(), 0, token);
        self.endpoint.post(lane, &frame)?;
        self.statistics.posted(0);
        Ok(())
    }

    /// Lanes that hold a result of this run let it pass by, and do not count any more.
    pub(super) fn drop_held(&mut self, run: u32) {
        for position in 0..self.lanes.len() {
            if let Receiving::Held { part, header } = self.lanes[position].receiving
                && part.run == run
            {
                let lane = LaneId(u32::try_from(position).unwrap_or(u32::MAX));
                self.unwanted(lane, header.length as usize);
            }
        }
    }

    /// The pipeline of this process's GPU is there.
    pub(super) fn open_pipeline(&mut self, mut to: ToPipeline) {
        self.register_slots(std::mem::take(&mut to.slots));
        self.pipeline.to = Some(to);
        let recorder = std::mem::take(&mut self.pipeline.recorder);
        if recorder.is_on() {
            self.pipeline.tell(Staged::Trace(recorder));
        }
        for (tensor, state) in (0..).zip(&self.tensors) {
            if let Some(state) = state.as_ref().filter(|state| state.plan.device) {
                self.pipeline.tell(Staged::Plan { tensor, plan: Arc::clone(&state.plan) });
            }
        }
    }

    /// The loop has ended, for this reason, and the pipeline can see that it has: it ends as well.
    pub(super) fn close_pipeline(&mut self, error: &Error) {
        let Some(to) = &self.pipeline.to else { return };
        for message in self.pipeline.behind.drain(..) {
            if let Staged::Push { push, .. } = message {
                push.task.finish_now(Err(error.clone()));
            }
        }
        to.waker.wake();
    }

    /// A tensor on the GPU is pushed.
    pub(super) fn on_push_gpu(&mut self, tensor: u32, push: Box<Push>) {
        let state = self.tensors.get(tensor as usize).and_then(Option::as_ref);
        let error = match state {
            _ if self.over.is_some() => self.over.clone(),
            _ if self.leaving => Some(Error::Closed("this worker has shut down".into())),
            _ if !self.pipeline.is_open() => Some(Error::Refused("no GPU was opened".into())),
            None => Some(Error::Refused(format!("tensor id {tensor} was not declared"))),
            Some(state) if !state.plan.device => Some(Error::Refused(format!(
                "`{}` was declared as a tensor of the host, and is pushed as one of the GPU",
                state.plan.name
            ))),
            Some(state) => state.poisoned.clone(),
        };
        match error {
            Some(error) => push.task.finish_now(Err(error)),
            None => {
                if let Some(to) = &self.pipeline.to {
                    to.under_way.fetch_add(1, Ordering::Relaxed);
                }
                self.pipeline.tell(Staged::Push { tensor, push });
            }
        }
    }
}
