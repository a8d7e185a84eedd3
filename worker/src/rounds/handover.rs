//! What passes between a NIC loop and the pipeline of its rank's GPU, in two queues; into one of
//! them callers push as well.

#![forbid(unsafe_code)]

use super::memory::{Slot, SlotMemory, Staging};
use super::{Lacks, PartOf, Plan};
use crate::base::error::{Error, Misfit, Source};
use crate::base::task::Task;
use crate::base::types::Kept;
use crate::cuda::PooledEvent;
pub use crate::cuda::Progress;
use bps_engine::base::Rank;
use bps_engine::harness;
use bps_engine::proto::messages::StalledKey;
use bps_engine::ring::Mpsc;
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::{Cause, Full, Waker};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;

/// A tensor on the GPU that is pushed.
#[derive(Debug)]
pub struct GpuPush {
    /// Its address on the GPU.
    pub source: u64,
    /// Where the result goes; may be the source.
    pub target: u64,
    /// Larger goes sooner.
    pub priority: i64,
    /// Told when it is over.
    pub task: Arc<Task>,
    /// The source is complete once this is passed.
    pub ready: Arc<PooledEvent>,
}

/// To the pipeline, from the NIC loop and from callers.
#[derive(Debug)]
pub enum ToGpu {
    /// A tensor was declared.
    Plan {
        /// Its id.
        tensor: u32,
        /// Where its parts live.
        plan: Arc<Plan>,
        /// What was to be kept of it before there was a pipeline.
        kept: Box<Kept>,
    },
    /// Multiply what error feedback adds to the next rounds of these tensors. From callers, as
    /// pushes are, so that those come behind it; this may come before a tensor's plan.
    ScaleResidues {
        /// Their ids.
        tensors: Vec<u32>,
        /// By this.
        factor: f32,
    },
    /// Tell what an encoded tensor keeps.
    TellKept {
        /// Its id.
        tensor: u32,
        /// Whom.
        to: SyncSender<Kept>,
    },
    /// An encoded tensor keeps this from now on.
    Keep {
        /// Its id.
        tensor: u32,
        /// Whose lengths are those of the tensor, or 0.
        kept: Box<Kept>,
        /// Told when what is pushed from then on comes behind it.
        done: SyncSender<()>,
    },
    /// A caller pushes a tensor. This may come before the tensor's plan.
    Push {
        /// Its id.
        tensor: u32,
        /// All else.
        push: Box<GpuPush>,
    },
    /// Some tasks [are wanted](Task::is_wanted) that were not before.
    Wanted,
    /// The transport is done with a slot that was sent from.
    Sent(Slot),
    /// A result has landed, in a slot if it has bytes.
    Landed {
        /// Whose it is.
        of: PartOf,
        /// Where.
        slot: Option<Slot>,
        /// Whether the lanes are done with this round of the part.
        over: bool,
        /// What it does not hold.
        lacks: Lacks,
    },
    /// The lanes are done with a round of a part whose result had landed before.
    Over(PartOf),
    /// Ranks disagree about a tensor: what is pending of it fails, and so does what comes.
    Poisoned {
        /// The tensor.
        tensor: u32,
        /// Why.
        error: Error,
    },
    /// Record a timeline with this from now on; a recorder that is off ends it.
    Trace(Recorder),
}

/// Where the bytes of a part are that is to be sent.
#[derive(Clone, Copy, Debug)]
pub enum From {
    /// It carries none.
    Nowhere,
    /// In a slot, which is given back.
    Slot(Slot),
    /// In memory of its own, once the track that [fills](GpuThread::staged) such has passed this
    /// mark.
    Staging(Staging, u32),
}

/// From the pipeline to the NIC loop.
#[derive(Debug)]
pub enum FromGpu {
    /// The next round of a part begins: it may be sent.
    Part {
        /// Whose it is.
        of: PartOf,
        /// The tensor's round.
        round: u64,
        /// Larger goes sooner.
        priority: i64,
        /// Where its bytes are.
        from: From,
        /// How many they are, if the GPU has encoded them; then it decodes what comes back.
        encoded: Option<usize>,
    },
    /// It is done with this slot, and a result may land here.
    Land(Slot),
    /// What the NIC loop keeps of a tensor is multiplied: as [`ToGpu::ScaleResidues`] says, once
    /// the rounds of all that was pushed before are over.
    ScaleResidues {
        /// Its id.
        tensor: u32,
        /// By this.
        factor: f32,
    },
    /// What the pipeline keeps of a tensor is to be told, with what the NIC loop keeps of it. This
    /// comes behind all [`ScaleResidues`](Self::ScaleResidues) that were asked for before.
    Kept {
        /// Its id.
        tensor: u32,
        /// By the GPU; zeros where it keeps nothing.
        kept: Box<Kept>,
        /// Whom.
        to: SyncSender<Kept>,
    },
    /// The NIC loop keeps this of a tensor from now on, as the pipeline does.
    Keep {
        /// Its id.
        tensor: u32,
        /// Whose lengths are those of the tensor, or 0.
        kept: Box<Kept>,
        /// Told when what is pushed from then on comes behind it.
        done: SyncSender<()>,
    },
    /// Rounds that wait for ranks of this host; goes into the next report of stalls.
    Stalled {
        /// The oldest first.
        keys: Vec<StalledKey>,
    },
    /// The lane to the pipeline of a rank of this host has closed.
    Lost {
        /// Whose.
        rank: Rank,
        /// What was seen.
        cause: Cause,
    },
    /// What the pipeline of a rank of this host has said is not of the protocol.
    Corrupt {
        /// Who.
        rank: Rank,
        /// What does not fit.
        misfit: Misfit,
    },
    /// The GPU can't go on.
    Failed {
        /// Why.
        source: Source,
    },
}

/// Where callers push tensors on the GPU.
#[derive(Clone)]
pub struct GpuInbox {
    inbox: Mpsc<ToGpu>,
    waker: Waker,
    /// Pushes that are not over.
    under_way: Arc<AtomicUsize>,
    /// Those of them whose callers were told.
    ahead: Arc<AtomicUsize>,
    /// The pipeline looks into its queue no more.
    ended: Arc<AtomicBool>,
}

impl GpuInbox {
    /// A queue for so many messages, to a pipeline that this wakes.
    #[must_use]
    pub fn new(room: usize, waker: Waker) -> GpuInbox {
        assert!(room > 0, "a caller that finds no room waits for some");
        let (under_way, ahead, ended) = (Arc::default(), Arc::default(), Arc::default());
        GpuInbox { inbox: Mpsc::new(room), waker, under_way, ahead, ended }
    }

    /// Hands a push over. To be woken for it, once for several.
    ///
    /// # Errors
    /// There is no room, and here it is again. The pipeline is awake then.
    pub fn push(&self, tensor: u32, push: Box<GpuPush>) -> Result<(), Box<GpuPush>> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        let Err(ToGpu::Push { push, .. }) = self.inbox.push(ToGpu::Push { tensor, push }) else {
            return Ok(());
        };
        let before = self.under_way.fetch_sub(1, Ordering::Relaxed);
        assert!(before > 0, "it was counted before it was handed over");
        self.waker.wake();
        Err(push)
    }

    /// Has the pipeline look for handles that [are wanted](crate::Handle::want). It is to be woken
    /// for that.
    ///
    /// # Errors
    /// There is no room. The pipeline is awake then.
    pub fn want(&self) -> Result<(), Full> {
        self.inbox.push(ToGpu::Wanted).map_err(|_| {
            self.waker.wake();
            Full
        })
    }

    /// Records a timeline with this from now on; a recorder that is off ends it.
    pub(crate) fn record_with(&self, recorder: Recorder) {
        let push = |message| {
            let pushed = self.inbox.push(message);
            self.waker.wake();
            pushed
        };
        // A pipeline that has ended has dropped its recorder; one that hangs records nothing.
        let _ = harness::offer(ToGpu::Trace(recorder), || self.has_ended(), push);
    }

    /// Multiplies what error feedback adds to rounds of these tensors that are pushed after this.
    pub(crate) fn scale_residues(&self, tensors: &[u32], factor: f32) {
        let push = |message| {
            let pushed = self.inbox.push(message);
            self.waker.wake();
            pushed
        };
        // A pipeline that has ended keeps nothing; one that hangs is found by the next push.
        let message = ToGpu::ScaleResidues { tensors: tensors.into(), factor };
        let _ = harness::offer(message, || self.has_ended(), push);
    }

    /// Wakes the pipeline.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Whether the pipeline has ended. Who finds that after a push must [`refuse`](Self::refuse).
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Fails what is in the queue of a pipeline that has ended.
    pub fn refuse(&self, error: &Error) {
        assert!(self.has_ended(), "a pipeline takes what it was told itself");
        while let Some(message) = self.inbox.pop() {
            if let ToGpu::Push { push, .. } = message {
                self.push_over();
                push.task.finish_now(Err(error.clone()));
            }
        }
    }

    /// The next message, for the pipeline.
    #[must_use]
    pub fn pop(&self) -> Option<ToGpu> {
        self.inbox.pop()
    }

    /// Whether there is no message.
    pub(crate) fn is_empty(&self) -> bool {
        self.inbox.is_empty()
    }

    /// Whether a push is not over.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way() > 0
    }

    /// How many pushes are not over.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Acquire)
    }

    /// Whether somebody was told that a push is over, and its result may not have come.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead.load(Ordering::Acquire)
    }

    /// A caller is about to be told before the result has come.
    pub(crate) fn begin_ahead(&self) {
        self.ahead.fetch_add(1, Ordering::Relaxed);
    }

    /// Its result has come, or never will.
    pub(crate) fn end_ahead(&self) {
        let before = self.ahead.fetch_sub(1, Ordering::Release);
        assert!(before > 0, "a result ends what its caller was told before");
    }

    /// A push is over.
    pub(crate) fn push_over(&self) {
        let before = self.under_way.fetch_sub(1, Ordering::Release);
        assert!(before > 0, "a push is over once");
    }

    /// The pipeline looks into the queue no more, but for what is there now.
    pub(crate) fn end(&self, error: &Error) {
        let before = self.ended.swap(true, Ordering::SeqCst);
        assert!(!before, "a pipeline ends once");
        self.refuse(error);
    }

    /// A message of the NIC loop.
    ///
    /// # Errors
    /// There is no room, and here it is again.
    pub fn tell(&self, message: ToGpu) -> Result<(), ToGpu> {
        self.inbox.push(message)
    }
}

/// The pipeline of a GPU, to the NIC loop. It looks by itself whether the loop has ended.
pub struct GpuThread {
    /// What it reads.
    pub inbox: GpuInbox,
    /// What it says.
    pub outbox: Mpsc<FromGpu>,
    /// Slots for what comes.
    pub to_land: Vec<Slot>,
    /// Where its slots are, for devices that reach them by themselves.
    pub slots: SlotMemory,
    /// How far the copies into [`Staging`]s are, if there are such.
    pub staged: Option<Progress>,
}
