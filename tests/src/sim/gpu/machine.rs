//! The machine: its devices, the agenda of what happens when, and what the functions of CUDA do to
//! streams and events.

use super::communicator::{Clique, Comm};
use super::memory::{Access, Clock, Memory, POISON, Place, STREAMS_MAX, join};
use super::stream::{Enqueued, Mark, Stream, Work, computed};
use bps_engine::transport::sim::Random;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_INVALID_CONTEXT`, `CUDA_ERROR_INVALID_HANDLE`.
pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const INVALID_CONTEXT: u32 = 201;
pub(super) const INVALID_HANDLE: u32 = 400;
/// `CUDA_ERROR_LAUNCH_FAILED`: the context is lost.
const LAUNCH_FAILED: u32 = 719;

/// Who of a rank calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Actor {
    Engine,
    Framework,
}

#[derive(Default)]
pub(super) struct Device {
    pub(super) streams: Vec<usize>,
    /// By stream, the last work that is done.
    pub(super) done: Clock,
    /// By actor, what it has seen to be done.
    knows: [Clock; 2],
    /// What the words in the host's memory say to be done.
    words: Clock,
    /// The process has died.
    pub(super) is_dead: bool,
    /// Every call fails, and nothing moves any more.
    pub(super) failure: Option<u32>,
}

impl Device {
    pub(super) fn stands(&self) -> bool {
        self.is_dead || self.failure.is_some()
    }
}

/// What happens when its time comes.
pub(super) enum Planned {
    /// The first of a stream is done.
    Finish(usize),
    /// NCCL enqueues what a communicator was given.
    Enqueue(usize),
    /// A communicator learns that another rank is gone.
    Broken(usize),
    /// A device fails.
    Fails(usize),
    /// Nothing; who was passed over is stepped.
    Nudge,
}

/// What a framework's kernel has read, and whether an aborted collective had left it there.
pub(crate) type Taken = (Vec<u8>, bool);

/// See the [module](super).
pub(crate) struct Machine {
    now: u64,
    pub(super) random: Random,
    agenda: BTreeMap<(u64, u64), Planned>,
    sequence: u64,
    pub(super) devices: Vec<Device>,
    pub(super) streams: Vec<Stream>,
    pub(super) marks: Vec<Mark>,
    /// The device of each event, and its last mark.
    events: Vec<(usize, Option<usize>)>,
    pub(super) memory: Memory,
    pub(super) cliques: Vec<Clique>,
    pub(super) comms: Vec<Comm>,
    /// The thread's contexts, and who it is.
    pub(super) contexts: Vec<usize>,
    actor: Actor,
    taken: Vec<Option<Taken>>,
    pub(super) mistake: Option<String>,
    /// Copies to GPUs that were enqueued by one call with others.
    pub(super) up_together: u64,
}

impl Machine {
    /// A machine of so many GPUs, whose every choice follows from the seed.
    pub(crate) fn new(seed: u64, devices: usize) -> Machine {
        Machine {
            now: 0,
            random: Random::new(seed ^ 0x6a09_e667_f3bc_c908),
            agenda: BTreeMap::new(),
            sequence: 0,
            devices: (0..devices).map(|_| Device::default()).collect(),
            streams: Vec::new(),
            marks: Vec::new(),
            events: Vec::new(),
            memory: Memory::default(),
            cliques: Vec::new(),
            comms: Vec::new(),
            contexts: Vec::new(),
            actor: Actor::Engine,
            taken: Vec::new(),
            mistake: None,
            up_together: 0,
        }
    }

    /// Keeps the first mistake.
    pub(super) fn blame(&mut self, result: Result<(), String>) {
        if let Err(text) = result {
            self.mistake.get_or_insert(text);
        }
    }

    /// Lets everything happen up to this time.
    pub(crate) fn advance(&mut self, now: Duration) -> bool {
        let until = u64::try_from(now.as_nanos()).expect("short runs");
        let mut progress = self.look_at_words();
        while let Some(entry) = self.agenda.first_entry().filter(|entry| entry.key().0 <= until) {
            self.now = self.now.max(entry.key().0);
            match entry.remove() {
                Planned::Finish(stream) => self.finish_running(stream),
                Planned::Enqueue(comm) => self.enqueue_pending(comm),
                Planned::Broken(comm) => self.break_comm(comm),
                Planned::Fails(device) => self.fail(device),
                Planned::Nudge => {}
            }
            progress = true;
        }
        self.now = until;
        progress
    }

    /// Lets streams go on that have waited for the host.
    fn look_at_words(&mut self) -> bool {
        let mut progress = false;
        for device in 0..self.devices.len() {
            let stands = self.devices[device].stands();
            let is_reached = |stream: &usize| {
                let first = self.streams[*stream].queue.front();
                let of = first.map(|first| &first.work);
                matches!(of, Some(&Work::Await { at, value }) if is_reached(at, value))
            };
            if !stands && self.devices[device].streams.iter().any(is_reached) {
                self.pump(device);
                progress = true;
            }
        }
        progress
    }

    /// When something will happen.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.agenda.keys().next().map(|&(at, _)| Duration::from_nanos(at))
    }

    pub(super) fn plan(&mut self, delay: u64, planned: Planned) {
        self.sequence += 1;
        self.agenda.insert((self.now + delay, self.sequence), planned);
    }

    /// The time does not pass this moment by.
    pub(crate) fn nudge(&mut self, at: Duration) {
        let at = u64::try_from(at.as_nanos()).expect("short runs");
        self.plan(at.saturating_sub(self.now), Planned::Nudge);
    }

    /// How long something takes: mostly little, now and then long.
    pub(super) fn delay(&mut self) -> u64 {
        let limit = match self.random.below(32) {
            0 => 3_000_000,
            1 | 2 => 400_000,
            3..=10 => 40_000,
            _ => 4000,
        };
        self.random.below(limit)
    }

    /// From now on this one's threads call.
    pub(crate) fn act(&mut self, device: usize, actor: Actor) {
        self.contexts.clear();
        self.actor = actor;
        let one = &mut self.devices[device];
        if actor == Actor::Engine {
            // It looks at the words first, and hears of what the framework has seen with a push.
            let (words, framework) = (one.words, one.knows[Actor::Framework as usize]);
            join(&mut one.knows[Actor::Engine as usize], &words);
            join(&mut one.knows[Actor::Engine as usize], &framework);
            let engine = one.knows[Actor::Engine as usize];
            self.memory.forget(device, &engine, &framework);
        }
    }

    /// The process of this device dies.
    pub(crate) fn kill(&mut self, device: usize) {
        self.devices[device].is_dead = true;
        self.stop(device);
        self.memory.forget_device(device);
        let own = |comm: &usize| self.comms[*comm].device == device;
        let dead: Vec<usize> = (0..self.comms.len()).filter(own).collect();
        for comm in dead {
            self.comms[comm].is_over = true;
            for other in self.others(comm) {
                // NCCL notices where it talks over sockets, and does not where it need not.
                if self.random.once_in(2) {
                    let delay = self.random.below(500_000_000);
                    self.plan(delay, Planned::Broken(other));
                }
            }
        }
    }

    /// The device fails some time from now.
    pub(crate) fn fail_soon(&mut self, device: usize) {
        let delay = self.delay();
        self.plan(delay, Planned::Fails(device));
    }

    fn fail(&mut self, device: usize) {
        if !self.devices[device].stands() {
            self.devices[device].failure = Some(LAUNCH_FAILED);
            self.stop(device);
        }
    }

    /// Whether nothing moves on this device any more.
    pub(crate) fn stands(&self, device: usize) -> bool {
        self.devices[device].stands()
    }

    /// Whether a copy between a device and the host is at work.
    pub(super) fn is_copying(&self, device: usize) -> bool {
        let streams = self.devices[device].streams.iter().map(|stream| &self.streams[*stream]);
        let mut running = streams.filter(|stream| stream.is_running);
        running.any(|stream| {
            let first = stream.queue.front().map(|first| &first.work);
            matches!(first, Some(Work::ToHost { .. } | Work::ToDevice { .. }))
        })
    }

    /// What is at work on a device never ends.
    pub(super) fn stop(&mut self, device: usize) {
        for stream in self.devices[device].streams.clone() {
            self.streams[stream].is_stuck = true;
            if let Some(Enqueued { work: Work::Collective { comm, call }, .. }) =
                self.streams[stream].queue.front()
            {
                self.leave_others_stuck(*comm, *call);
            }
        }
    }

    pub(super) fn create_stream(&mut self, device: usize) -> usize {
        let number = self.devices[device].streams.len();
        let pace = if self.random.once_in(8) { 1 + self.random.below(30) } else { 1 };
        self.streams.push(Stream::new(device, number, pace));
        self.devices[device].streams.push(self.streams.len() - 1);
        self.streams.len() - 1
    }

    pub(super) fn create_event(&mut self, device: usize) -> usize {
        self.events.push((device, None));
        self.events.len() - 1
    }

    /// Puts work behind what is in a stream.
    pub(super) fn enqueue(
        &mut self,
        stream: usize,
        what: &'static str,
        work: Work,
        accesses: &[Access],
    ) {
        let of = &mut self.streams[stream];
        let device = of.device;
        join(&mut of.knows, &self.devices[device].knows[self.actor as usize]);
        of.issued += 1;
        of.knows[of.number] = of.issued;
        let (number, clock) = (of.issued, of.knows);
        let place = Place { device, stream: of.number, number };
        of.queue.push_back(Enqueued { number, what, clock, work });
        let entered = self.memory.enter(place, &clock, what, accesses);
        self.blame(entered);
        self.pump(device);
    }

    pub(super) fn record(&mut self, event: usize, stream: usize) -> Result<(), u32> {
        let mark = self.marks.len();
        let known = self.events.get_mut(event).ok_or(INVALID_HANDLE)?;
        known.1 = Some(mark);
        self.marks.push(Mark { is_done: false, clock: [0; STREAMS_MAX] });
        let of = &self.streams[stream];
        let mut clock = of.knows;
        clock[of.number] = of.issued;
        self.marks[mark].clock = clock;
        self.enqueue(stream, "a record", Work::Record { mark }, &[]);
        Ok(())
    }

    pub(super) fn wait(&mut self, stream: usize, event: usize) -> Result<(), u32> {
        let (_, mark) = *self.events.get(event).ok_or(INVALID_HANDLE)?;
        let Some(mark) = mark else { return Ok(()) };
        let clock = self.marks[mark].clock;
        join(&mut self.streams[stream].knows, &clock);
        self.enqueue(stream, "a wait", Work::Wait { mark }, &[]);
        Ok(())
    }

    /// Whether the stream has passed the event's last mark; who asks knows from then on.
    pub(super) fn query_event(&mut self, event: usize) -> Result<bool, u32> {
        let (device, mark) = *self.events.get(event).ok_or(INVALID_HANDLE)?;
        self.devices[device].failure.map_or(Ok(()), Err)?;
        let Some(mark) = mark else { return Ok(true) };
        let Mark { is_done, clock } = self.marks[mark];
        if is_done {
            join(&mut self.devices[device].knows[self.actor as usize], &clock);
        }
        Ok(is_done)
    }

    pub(super) fn query_stream(&mut self, stream: usize) -> bool {
        let of = &self.streams[stream];
        let is_idle = of.queue.is_empty();
        if is_idle {
            join(&mut self.devices[of.device].knows[self.actor as usize], &of.knows);
        }
        is_idle
    }

    /// Lets the streams of a device go on as far as they do in no time.
    pub(super) fn pump(&mut self, device: usize) {
        while !self.devices[device].stands() {
            let streams = self.devices[device].streams.clone();
            if !streams.into_iter().any(|stream| self.go_on(stream)) {
                return;
            }
        }
    }

    /// Lets a stream go on; says whether it has come further.
    fn go_on(&mut self, stream: usize) -> bool {
        let of = &self.streams[stream];
        if of.is_running || of.is_stuck {
            return false;
        }
        match of.queue.front().map(|first| &first.work) {
            None => false,
            Some(&Work::Wait { mark }) if !self.marks[mark].is_done => false,
            Some(&Work::Await { at, value }) if !is_reached(at, value) => false,
            Some(Work::Wait { .. } | Work::Await { .. }) => {
                self.pop(stream);
                true
            }
            Some(&Work::Record { mark }) => {
                self.marks[mark].is_done = true;
                self.pop(stream);
                true
            }
            Some(&Work::Collective { comm, call }) => self.arrive(stream, comm, call),
            Some(_) => {
                self.start(stream);
                false
            }
        }
    }

    /// The first of a stream begins: it reads, and what it writes is not to be read until it ends.
    fn start(&mut self, stream: usize) {
        let delay = self.delay() * self.streams[stream].pace;
        self.streams[stream].is_running = true;
        let memory = &mut self.memory;
        let first = self.streams[stream].queue.front_mut().expect("there is one");
        let (mut is_there, mut later) = (true, None);
        let mut poison = |at: u64, length: usize| match memory.bytes(at, length) {
            Some(target) => target.fill(POISON),
            None => is_there = false,
        };
        match &mut first.work {
            Work::Fill { at, bytes } => poison(*at, bytes.len()),
            Work::ToDevice { to: (to, bytes), host: (host, length), seen, .. } => {
                poison(*to, *bytes);
                if seen.is_none() {
                    // SAFETY: the range is registered from when the copy was enqueued until it is
                    // done, and one thread is all there is.
                    *seen = Some(unsafe { host_bytes(*host, *length) }.to_vec());
                    later = Some([Access::read(*host as u64, *length), Access::write(*to, *bytes)]);
                }
            }
            Work::OnDevice { to, from, bytes } => {
                poison(*to, bytes.len());
                match memory.bytes(*from, bytes.len()) {
                    Some(source) => bytes.copy_from_slice(source),
                    None => is_there = false,
                }
            }
            Work::Kernel { launch, results } => match computed(*launch, memory) {
                Some(computed) => *results = computed,
                None => is_there = false,
            },
            Work::ToHost { host, from, bytes, kernel, rest } => {
                let length = kernel.map_or(bytes.len(), |kernel| kernel.wire_bytes());
                // SAFETY: the range is registered from when the copy was enqueued until it is done,
                // and one thread is all there is.
                unsafe { host_bytes(*host, length) }.fill(POISON);
                match memory.bytes(*from, bytes.len()) {
                    Some(source) => match kernel {
                        Some(kernel) => {
                            (*bytes, *rest) = kernel.encode(source);
                            match kernel.leaves_rest() {
                                true => source.fill(POISON),
                                false => rest.clear(),
                            }
                        }
                        None => *bytes = source.to_vec(),
                    },
                    None => is_there = false,
                }
            }
            _ => {}
        }
        let (what, number) = (first.what, first.number);
        if let Some(accesses) = later {
            let of = &self.streams[stream];
            let place = Place { device: of.device, stream: of.number, number };
            let begun = self.memory.begin(place, &accesses, is_done(&self.devices));
            self.blame(begun);
        }
        if !is_there {
            self.blame(Err(format!("stream {stream}: {what} uses memory that was given back")));
        }
        self.plan(delay, Planned::Finish(stream));
    }

    /// What is at work in a stream ends, if it does.
    fn finish_running(&mut self, stream: usize) {
        let of = &self.streams[stream];
        if of.is_running && !of.is_stuck {
            self.finish(stream);
            self.pump(self.streams[stream].device);
        }
    }

    /// What is at work in a stream has its effect.
    pub(super) fn finish(&mut self, stream: usize) {
        let device = self.streams[stream].device;
        let Enqueued { clock, work, .. } = self.pop(stream);
        let mut result = Ok(());
        match work {
            Work::Fill { at, bytes } => self.put(at, &bytes),
            Work::OnDevice { to, bytes, .. } => self.put(to, &bytes),
            Work::Take { at, bytes, number } => {
                let is_spoilt = self.memory.is_spoilt(at);
                match self.memory.bytes(at, bytes) {
                    Some(bytes) => self.taken[number] = Some((bytes.to_vec(), is_spoilt)),
                    None => result = Err("a kernel reads memory that was given back".into()),
                }
            }
            Work::Kernel { results, .. } => {
                results.iter().for_each(|(at, bytes)| self.put(*at, bytes));
            }
            Work::ToHost { host, bytes, from, rest, .. } => {
                if !rest.is_empty() {
                    self.put(from, &rest);
                }
                // SAFETY: the range was registered when the copy was enqueued, and is until it was
                // unregistered, which is a mistake before this. One thread is all there is.
                let target = unsafe { host_bytes(host, bytes.len()) };
                if target.iter().any(|byte| *byte != POISON) {
                    let text = "the host writes where a copy writes that is not done";
                    result = Err(format!("device {device}: {text}"));
                }
                target.copy_from_slice(&bytes);
            }
            Work::ToDevice { to: (to, _), host: (host, _), seen, kernel } => {
                let seen = seen.expect("it was read as it began");
                // SAFETY: the range is registered from when the copy was enqueued until it is done,
                // and one thread is all there is.
                if *unsafe { host_bytes(host, seen.len()) } != seen[..] {
                    let text = "the host changes what a copy reads that is not done";
                    result = Err(format!("device {device}: {text}"));
                }
                self.put(to, &kernel.map_or(seen.clone(), |kernel| kernel.decode(&seen)));
            }
            Work::Write { at, value } => {
                let word = std::ptr::with_exposed_provenance::<AtomicU32>(at);
                // SAFETY: the engine has an aligned atomic word there, in registered memory that it
                // keeps until its streams are drained.
                unsafe { &*word }.store(value, Ordering::Release);
                join(&mut self.devices[device].words, &clock);
            }
            Work::Collective { comm, call } => self.finish_call(comm, call),
            Work::Record { .. } | Work::Wait { .. } | Work::Await { .. } => {}
        }
        self.blame(result);
    }

    /// Whether a copy is to read this range of the host, before a copy of this stream writes there.
    pub(super) fn is_source(&self, stream: usize, host: usize, bytes: usize) -> bool {
        let device = &self.devices[self.streams[stream].device];
        let mut pending = device.streams.iter().flat_map(|stream| &self.streams[*stream].queue);
        pending.any(|one| match &one.work {
            Work::ToDevice { host: (source, length), .. } => {
                *source < host + bytes && host < source + length
            }
            _ => false,
        })
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        match self.memory.bytes(at, bytes.len()) {
            Some(target) => target.copy_from_slice(bytes),
            None => self.blame(Err("work writes to memory that was given back".into())),
        }
    }

    pub(super) fn pop(&mut self, stream: usize) -> Enqueued {
        let of = &mut self.streams[stream];
        of.is_running = false;
        let first = of.queue.pop_front().expect("there is one");
        self.devices[of.device].done[of.number] = first.number;
        first
    }

    /// Memory of a device is the framework's alone from now on.
    pub(crate) fn close(&mut self, at: u64) {
        let closed = self.memory.close(at, is_done(&self.devices));
        self.blame(closed);
    }

    /// The end of memory of a device.
    pub(crate) fn free(&mut self, at: u64) {
        let freed = self.memory.free(at, is_done(&self.devices));
        self.blame(freed);
    }

    pub(super) fn unregister(&mut self, at: u64) {
        let freed = self.memory.unregister(at, is_done(&self.devices));
        self.blame(freed);
    }

    /// Memory for a tensor.
    pub(crate) fn allocate(&mut self, bytes: usize) -> u64 {
        self.memory.allocate(bytes)
    }

    /// A kernel of the framework writes these bytes.
    pub(crate) fn fill(&mut self, stream: usize, at: u64, bytes: Vec<u8>) {
        let access = [Access::write(at, bytes.len())];
        self.enqueue(stream, "a framework's kernel", Work::Fill { at, bytes }, &access);
    }

    /// A kernel of the framework reads: the number by which to [ask](Self::take) for it.
    pub(crate) fn read(&mut self, stream: usize, at: u64, bytes: usize) -> usize {
        self.taken.push(None);
        let number = self.taken.len() - 1;
        let access = [Access::read(at, bytes)];
        self.enqueue(stream, "a framework's kernel", Work::Take { at, bytes, number }, &access);
        number
    }

    /// What a kernel has read, once it has.
    pub(crate) fn take(&mut self, number: usize) -> Option<Taken> {
        self.taken[number].take()
    }
}

/// Whether a word of the host is so large, or beyond.
fn is_reached(at: usize, value: u32) -> bool {
    let word = std::ptr::with_exposed_provenance::<AtomicU32>(at);
    // SAFETY: the engine has an aligned atomic word there, in registered memory that it keeps until
    // its streams are drained.
    let found = unsafe { &*word }.load(Ordering::Acquire);
    found.wrapping_sub(value).cast_signed() >= 0
}

fn is_done(devices: &[Device]) -> impl Fn(Place) -> bool + '_ {
    |place| {
        let device = &devices[place.device];
        device.stands() || device.done[place.stream] >= place.number
    }
}

/// Memory of the host.
///
/// # Safety
/// It is mapped, and nobody else uses it while the result lives.
pub(super) unsafe fn host_bytes<'a>(at: usize, bytes: usize) -> &'a mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(at), bytes) }
}
