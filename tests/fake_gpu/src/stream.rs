//! Streams, each a queue with a thread of its own, and events.

use crate::device::{self, INVALID_HANDLE};
use crate::settings::{Random, settings};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

/// A piece of work in a stream.
pub type Work = Box<dyn FnOnce() + Send>;

/// Handles of the legacy default stream and of the thread's default stream.
const DEFAULT_STREAMS: [usize; 3] = [0, 1, 2];
/// Handles of streams and events begin here; they are apart, so that one is never taken for the
/// other.
const STREAM: usize = 0x5000_0000;
const EVENT: usize = 0xe000_0000;

type Table<T> = LazyLock<Mutex<HashMap<usize, Arc<T>>>>;
static STREAMS: Table<Stream> = LazyLock::new(Mutex::default);
static EVENTS: Table<Event> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

pub struct Stream {
    pub device: u32,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    issued: u64,
    done: u64,
    closed: bool,
}

#[derive(Default)]
pub struct Event {
    state: Mutex<Marks>,
    changed: Condvar,
}

#[derive(Default)]
struct Marks {
    recorded: u64,
    passed: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    fn start(device: u32) -> Arc<Stream> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let stream = Arc::new(Stream { device, queue, changed });
        let (worker, number) = (Arc::clone(&stream), NEXT.fetch_add(1, Ordering::Relaxed));
        std::thread::spawn(move || worker.run(&mut Random::new(number)));
        stream
    }

    fn run(&self, random: &mut Random) {
        loop {
            let mut queue = locked(&self.queue);
            let work = loop {
                match queue.work.pop_front() {
                    Some(work) => break work,
                    None if queue.closed => return,
                    None => {
                        queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queue);
            random.dawdle();
            work();
            locked(&self.queue).done += 1;
            self.changed.notify_all();
        }
    }

    /// Enqueues it. As in CUDA, the call waits while the queue has no room.
    pub fn push(&self, work: Work) {
        let mut queue = locked(&self.queue);
        while queue.work.len() >= settings().depth {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.issued += 1;
        queue.work.push_back(work);
        self.changed.notify_all();
    }

    pub fn is_idle(&self) -> bool {
        let queue = locked(&self.queue);
        queue.done == queue.issued
    }

    /// Waits until all that is enqueued now is done.
    pub fn drain(&self) {
        let mut queue = locked(&self.queue);
        let target = queue.issued;
        while queue.done < target {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Event {
    /// Marks the end of what the stream has now.
    pub fn record(self: &Arc<Event>, stream: &Stream) {
        let mut state = locked(&self.state);
        state.recorded += 1;
        let (event, mark) = (Arc::clone(self), state.recorded);
        stream.push(Box::new(move || {
            let mut state = locked(&event.state);
            state.passed = state.passed.max(mark);
            event.changed.notify_all();
        }));
    }

    pub fn is_done(&self) -> bool {
        let state = locked(&self.state);
        state.passed >= state.recorded
    }

    /// Lets the stream wait for the mark that is the last one now.
    pub fn hold(self: &Arc<Event>, stream: &Stream) {
        let (event, mark) = (Arc::clone(self), locked(&self.state).recorded);
        stream.push(Box::new(move || {
            let mut state = locked(&event.state);
            while state.passed < mark {
                state = event.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }));
    }
}

pub fn create_stream() -> Result<usize, u32> {
    let stream = Stream::start(device::current()?);
    let handle = STREAM + NEXT.fetch_add(1, Ordering::Relaxed) as usize * 16;
    locked(&STREAMS).insert(handle, stream);
    Ok(handle)
}

/// What is enqueued is still done.
pub fn destroy_stream(handle: usize) -> Result<(), u32> {
    let stream = locked(&STREAMS).remove(&handle).ok_or(INVALID_HANDLE)?;
    locked(&stream.queue).closed = true;
    stream.changed.notify_all();
    Ok(())
}

/// The stream of a handle. The default streams are those of the thread's context.
pub fn stream(handle: usize) -> Result<Arc<Stream>, u32> {
    if !DEFAULT_STREAMS.contains(&handle) {
        return locked(&STREAMS).get(&handle).cloned().ok_or(INVALID_HANDLE);
    }
    let device = device::current()?;
    let mut streams = locked(&STREAMS);
    let own = streams.entry(device as usize + 16).or_insert_with(|| Stream::start(device));
    Ok(Arc::clone(own))
}

/// Waits until all that is enqueued on a device now is done.
pub fn drain_all(device: u32) {
    let streams: Vec<_> = locked(&STREAMS).values().cloned().collect();
    streams.iter().filter(|stream| stream.device == device).for_each(|stream| stream.drain());
}

pub fn create_event() -> Result<usize, u32> {
    device::current()?;
    let handle = EVENT + NEXT.fetch_add(1, Ordering::Relaxed) as usize * 16;
    locked(&EVENTS).insert(handle, Arc::default());
    Ok(handle)
}

/// What waits for the event still does.
pub fn destroy_event(handle: usize) -> Result<(), u32> {
    locked(&EVENTS).remove(&handle).map(|_| ()).ok_or(INVALID_HANDLE)
}

pub fn event(handle: usize) -> Result<Arc<Event>, u32> {
    locked(&EVENTS).get(&handle).cloned().ok_or(INVALID_HANDLE)
}
