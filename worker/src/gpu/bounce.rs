//! Tensors of the host that are pushed from a GPU: through memory of the host.
//!
//! NCCL reduces among all ranks of a host, waits for all of them, and does not divide whole numbers
//! as everybody else does. So a tensor that some ranks exchange, one whose rounds do not wait for
//! slow ranks, or an average of whole numbers, is one of the host to the job, wherever each rank
//! has it. A thread of its own copies such a tensor down into a
//! pinned buffer, pushes that as any caller would, and copies the result up. It waits for the other
//! ranks, never for the GPU, and nor does its caller: a round ends when its copy up is enqueued.
//!
//! Invariant: a buffer is lent to one round, until its last copy is done and the engine has told
//! that round's end.

use super::buffers::{Buffer, Buffers};
use super::pipeline::{BYTES_OF_MARK, COPIES_OF_MARK};
use crate::base::error::{Error, Overdue};
use crate::base::task::{Bell, Handle, Mark, Series, Task};
use crate::cuda::{Device, EventPool, GpuError, Pinned, PooledEvent, Track, WORD_BYTES};
use crate::rounds::Memory;
use crate::rounds::handover::GpuPush;
use bps_engine::harness;
use bps_engine::ring::Mpsc;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pushes that may wait for the thread before their callers do.
const ROOM: usize = 4096;
/// How long it sleeps between two looks at a copy down that is under way.
const NAP: Duration = Duration::from_micros(30);
/// How often it looks around when nothing happens.
const TICK: Duration = Duration::from_millis(500);
/// How often the driver is asked whether something went wrong behind the calls.
const WATCH: Duration = Duration::from_millis(100);
/// How long the GPU may take for what is under way when the job is over.
const LAST: Duration = Duration::from_secs(2);

/// What carries tensors of the host.
pub trait Carrier: Send {
    /// Pushes the next round of a tensor, in this memory. To be woken for it, once for several.
    fn push(&self, tensor: u32, memory: Memory, priority: i64) -> Handle;

    /// It may be asleep, and pushes are there.
    fn wake(&self);

    /// The GPU can't go on, which ends the job.
    fn fail(&self, error: &GpuError);

    /// Why it takes no pushes any more, if so.
    fn ended(&self) -> Option<Error>;
}

/// A round of a tensor of the host, in the memory of the GPU.
pub struct BouncePush {
    /// The tensor.
    pub tensor: u32,
    /// Its bytes.
    pub bytes: usize,
    /// This rank has something to send.
    pub gives: bool,
    /// It wants the result.
    pub takes: bool,
    /// Where it is, and who is to be told.
    pub push: Box<GpuPush>,
}

/// Where callers push such tensors.
#[derive(Clone)]
pub struct BounceInbox {
    queue: Mpsc<BouncePush>,
    /// Rung for pushes, and for rounds that end.
    pub bell: Arc<Bell>,
    /// Rounds that were not copied down.
    bouncing: Arc<AtomicUsize>,
    /// The thread looks into the queue no more.
    ended: Arc<AtomicBool>,
}

impl BounceInbox {
    /// For a thread that is yet to begin; `bouncing` will count the rounds that are not copied down
    /// yet.
    #[must_use]
    pub fn new(bouncing: Arc<AtomicUsize>) -> BounceInbox {
        let (queue, bell, ended) = (Mpsc::new(ROOM), Arc::default(), Arc::default());
        BounceInbox { queue, bell, bouncing, ended }
    }

    /// Hands a push over. The thread is to be woken for it by the bell, once for several. If it has
    /// ended, whoever waits is told `why`.
    pub fn push(&self, push: BouncePush, why: impl Fn() -> Error) {
        // Released with the push, or what its caller asks for next: who sees that sees the count.
        self.bouncing.fetch_add(1, Ordering::Relaxed);
        let has_ended = || self.ended.load(Ordering::SeqCst);
        let offer = |push| self.queue.push(push).inspect_err(|_| self.bell.ring());
        if let Err(BouncePush { push, .. }) = harness::offer(push, has_ended, offer) {
            let error = if has_ended() { why() } else { Overdue::GPU.into() };
            push.task.finish_now(Err(error));
        }
        // It may have ended meanwhile: then nobody else empties the queue.
        if has_ended() {
            self.refuse(&why());
        }
    }

    fn refuse(&self, error: &Error) {
        while let Some(BouncePush { push, .. }) = self.queue.pop() {
            push.task.finish_now(Err(error.clone()));
        }
    }
}

/// A round that is being copied down.
struct Falling {
    /// It is there once the track has passed this.
    mark: u32,
    one: BouncePush,
    buffer: Buffer,
}

/// A round that is with the carrier.
struct Away {
    handle: Handle,
    one: BouncePush,
    buffer: Buffer,
}

/// A result that is being copied up.
struct Rising {
    /// It is there once the track has passed this, as the event tells other streams.
    mark: u32,
    event: Arc<PooledEvent>,
    tensor: u32,
    buffer: Buffer,
}

/// See the [module](self).
pub struct Bounce<C> {
    carrier: C,
    down: Track,
    up: Track,
    events: EventPool,
    /// Of the tracks, which are above it so that they are gone before.
    words: Option<Pinned>,
    buffers: Buffers,
    inbox: BounceInbox,
    /// In the order of their marks.
    falling: VecDeque<Falling>,
    away: Vec<Away>,
    /// In the order of their marks.
    rising: VecDeque<Rising>,
    /// Copies down, and bytes of them, that are not marked.
    unmarked: (usize, usize),
    /// What the stream down has waited for last. Tensors that were pushed together have one event.
    last_ready: Option<Arc<PooledEvent>>,
    /// Rounds that end with the job: the GPU has failed.
    broken: Vec<Arc<Task>>,
    has_failed: bool,
}

impl<C: Carrier> Bounce<C> {
    /// Makes the streams.
    ///
    /// # Errors
    /// What the driver or the kernel refuses.
    pub fn new(
        device: &Device,
        events: EventPool,
        numa_node: Option<u32>,
        inbox: BounceInbox,
        carrier: C,
    ) -> Result<Bounce<C>, GpuError> {
        let words = Pinned::new(device, 2 * WORD_BYTES, numa_node)?;
        // SAFETY: the memory is kept beside the tracks and outlives them; each has its own word.
        let (down, up) =
            unsafe { (Track::new(device, &words, 0)?, Track::new(device, &words, 1)?) };
        Ok(Bounce {
            carrier,
            down,
            up,
            events,
            words: Some(words),
            buffers: Buffers::new(device, numa_node),
            inbox,
            falling: VecDeque::new(),
            away: Vec::new(),
            rising: VecDeque::new(),
            unmarked: (0, 0),
            last_ready: None,
            broken: Vec::new(),
            has_failed: false,
        })
    }

    /// Runs until the carrier has ended, and ends. The thread has the GPU's context.
    pub fn run(mut self) {
        let mut next_watch = Instant::now() + WATCH;
        while self.carrier.ended().is_none() || !self.away.is_empty() {
            let rings = self.inbox.bell.rings();
            let progress = self.step();
            if Instant::now() >= next_watch {
                next_watch = Instant::now() + WATCH;
                // A GPU that has failed moves no word, and says so only to who asks.
                let asked = self.down.stream().is_idle().and_then(|_| self.up.stream().is_idle());
                self.check(asked);
            }
            match (progress, self.falling.is_empty()) {
                (true, _) => {}
                (false, false) => std::thread::sleep(NAP),
                (false, true) => {
                    let is_busy = !self.away.is_empty() || !self.rising.is_empty();
                    self.inbox.bell.wait(rings, if is_busy { WATCH } else { TICK });
                }
            }
        }
        self.end();
    }

    /// One turn; says whether there was anything to do.
    fn step(&mut self) -> bool {
        let mut progress = false;
        while let Some(one) = self.inbox.queue.pop() {
            progress = true;
            let task = Arc::clone(&one.push.task);
            let begun = self.begin(one);
            self.check_for(begun, &[task]);
        }
        let marked = self.mark_down();
        self.check(marked);
        progress |= self.send_fallen();
        progress |= self.take_results();
        while self.rising.front().is_some_and(|first| self.up.passed().has(first.mark)) {
            let buffer = self.rising.pop_front().map(|risen| risen.buffer);
            buffer.into_iter().for_each(|buffer| self.buffers.give(buffer));
            progress = true;
        }
        progress
    }

    /// Ends the job if the GPU can't go on.
    fn check<T>(&mut self, result: Result<T, GpuError>) {
        self.check_for(result, &[]);
    }

    /// As [`check`](Self::check), for what these wait for.
    fn check_for<T>(&mut self, result: Result<T, GpuError>, tasks: &[Arc<Task>]) {
        let Err(error) = result else { return };
        self.broken.extend(tasks.iter().cloned());
        if !std::mem::replace(&mut self.has_failed, true) {
            self.carrier.fail(&error);
        }
    }

    /// Enqueues a round's copy down.
    fn begin(&mut self, one: BouncePush) -> Result<(), GpuError> {
        if self.has_failed {
            self.broken.push(Arc::clone(&one.push.task));
            return Ok(());
        }
        let buffer = self.buffers.take(one.bytes)?;
        let (tensor, bytes) = (one.tensor, one.bytes);
        // Its caller may push what is just being written.
        let last = self.rising.iter().rev().find(|rising| rising.tensor == tensor);
        if let Some(Rising { event, mark, .. }) = last
            && !self.up.passed().has(*mark)
        {
            self.down.wait(event)?;
        }
        let ready = &one.push.ready;
        if self.last_ready.as_ref().is_none_or(|last| !Arc::ptr_eq(last, ready)) {
            self.down.wait(ready)?;
            self.last_ready = Some(Arc::clone(ready));
        }
        if one.gives && bytes > 0 {
            // SAFETY: the tensor is its caller's promise until the task is finished, and the buffer
            // is this round's.
            unsafe { self.down.stream().copy_to_host(buffer.at(), one.push.source, bytes) }?;
        }
        self.falling.push_back(Falling { mark: self.down.next_mark(), one, buffer });
        let (copies, so_far) = self.unmarked;
        self.unmarked = (copies + 1, so_far + bytes);
        if copies + 1 >= COPIES_OF_MARK || so_far + bytes >= BYTES_OF_MARK {
            return self.mark_down();
        }
        Ok(())
    }

    /// Marks the copies down that have no mark yet.
    fn mark_down(&mut self) -> Result<(), GpuError> {
        if self.unmarked.0 > 0 {
            self.unmarked = (0, 0);
            self.down.mark()?;
        }
        Ok(())
    }

    /// Pushes what has been copied down.
    fn send_fallen(&mut self) -> bool {
        let passed = self.down.passed();
        let mut progress = false;
        while self.falling.front().is_some_and(|first| passed.has(first.mark))
            && let Some(Falling { one, buffer, .. }) = self.falling.pop_front()
        {
            let at = buffer.at();
            // SAFETY: pinned memory, which was zeroed, of at least so many bytes; nobody else uses
            // it before the handle is over.
            let memory = unsafe { Memory::new(at.cast_const(), at, one.bytes) };
            let handle = self.carrier.push(one.tensor, memory, one.push.priority);
            // One that is over already is seen in this turn.
            let _ = handle.watch(&self.inbox.bell);
            self.away.push(Away { handle, one, buffer });
            self.inbox.bouncing.fetch_sub(1, Ordering::Release);
            progress = true;
        }
        if progress {
            self.carrier.wake();
        }
        progress
    }

    /// Enqueues the copies up of the results that are there, behind which is one event.
    fn take_results(&mut self) -> bool {
        let over: Vec<Away> = self.away.extract_if(.., |one| one.handle.is_told()).collect();
        if over.is_empty() {
            return false;
        }
        let mut up = Vec::new();
        for Away { handle, one, buffer } in over {
            let result = handle.wait(Some(Duration::ZERO));
            let task = &one.push.task;
            // A tensor of the host's memory is over once its result is there.
            task.lacks(handle.lacking().unwrap_or(0), handle.lacks_by_rank());
            match result {
                Ok(_) if one.takes && one.bytes > 0 => up.push((one, buffer)),
                result => {
                    task.finish_now(result.map(drop));
                    self.buffers.give(buffer);
                }
            }
        }
        let tasks: Vec<Arc<Task>> = up.iter().map(|(one, _)| Arc::clone(&one.push.task)).collect();
        let enqueued = self.copy_up(up);
        self.check_for(enqueued, &tasks);
        true
    }

    fn copy_up(&mut self, results: Vec<(BouncePush, Buffer)>) -> Result<(), GpuError> {
        if results.is_empty() {
            return Ok(());
        }
        let event = Arc::new(self.events.take()?);
        for (one, buffer) in &results {
            // SAFETY: the tensor is its caller's promise until the task is finished. What used it
            // before was waited for on the way down, and whatever does after that comes behind the
            // event. The buffer is this round's until the mark.
            unsafe {
                self.up.stream().copy_to_device(one.push.target, buffer.at(), one.bytes)?;
            }
        }
        event.record(self.up.stream())?;
        let mark = self.up.mark()?;
        for (one, buffer) in results {
            let (tensor, event) = (one.tensor, Arc::clone(&event));
            let behind = Mark { event: Arc::clone(&event), series: Series::None };
            self.rising.push_back(Rising { mark, event, tensor, buffer });
            one.push.task.finish_behind(behind);
        }
        Ok(())
    }

    /// The carrier has ended.
    fn end(mut self) {
        let error = self.carrier.ended().expect("it has ended");
        self.inbox.ended.store(true, Ordering::SeqCst);
        self.inbox.refuse(&error);
        let falling = std::mem::take(&mut self.falling).into_iter().map(|one| one.one.push.task);
        for task in falling.chain(std::mem::take(&mut self.broken)) {
            task.finish_now(Err(error.clone()));
        }
        let until = Instant::now() + LAST;
        let is_idle = || Ok(self.down.stream().is_idle()? && self.up.stream().is_idle()?);
        while matches!(is_idle(), Ok::<_, GpuError>(false)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !matches!(is_idle(), Ok(true)) {
            // Something on the GPU may write here yet.
            std::mem::forget(self.words.take());
            self.buffers.leak();
        }
    }
}
