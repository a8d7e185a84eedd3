//! Memory of simulated GPUs, what of the host's is registered, and who uses what: work on the same
//! bytes must be in an order.

use std::collections::BTreeMap;
use std::ops::Range;

/// Streams of a device, at most.
pub(super) const STREAMS_MAX: usize = 8;
/// The stream of the framework, the first of each device.
const FRAMEWORK: usize = 0;
/// By stream of a device: up to which of its work something comes behind.
pub(super) type Clock = [u64; STREAMS_MAX];
/// Where memory of GPUs begins: no address of the host is so large.
const GPU: u64 = 1 << 48;
/// What is in memory that nobody has written, or that is being written.
pub(super) const POISON: u8 = 0xa5;

/// Comes behind what the other comes behind, too.
pub(super) fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// Bytes that a piece of work uses.
#[derive(Clone, Debug)]
pub(super) struct Access {
    pub(super) range: Range<u64>,
    pub(super) writes: bool,
    /// The work waits for the host, which has seen the end of what used the bytes before: whether
    /// it has is looked at when the work begins.
    pub(super) is_later: bool,
}

impl Access {
    pub(super) fn read(at: u64, bytes: usize) -> Access {
        Access { range: at..at + bytes as u64, writes: false, is_later: false }
    }

    pub(super) fn write(at: u64, bytes: usize) -> Access {
        Access { range: at..at + bytes as u64, writes: true, is_later: false }
    }

    fn collides(&self, other: &Access) -> bool {
        (self.writes || other.writes) && overlap(&self.range, &other.range)
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Work that uses memory, by its place in a stream of its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) device: usize,
    pub(super) stream: usize,
    pub(super) number: u64,
}

struct Use {
    place: Place,
    /// What it comes behind.
    clock: Clock,
    what: &'static str,
    access: Access,
}

struct Allocation {
    bytes: Vec<u8>,
    /// A collective that was aborted has left something here.
    is_spoilt: bool,
    /// The framework alone may use it.
    is_closed: bool,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct Memory {
    allocated: BTreeMap<u64, Allocation>,
    given: u64,
    /// Of the host.
    registered: Vec<Range<u64>>,
    uses: Vec<Use>,
}

impl Memory {
    /// Takes memory, which no other has had.
    pub(super) fn allocate(&mut self, bytes: usize) -> u64 {
        let at = GPU + self.given;
        self.given += (bytes as u64 + 1).next_multiple_of(512);
        let allocation =
            Allocation { bytes: vec![POISON; bytes], is_spoilt: false, is_closed: false };
        self.allocated.insert(at, allocation);
        at
    }

    /// The engine's work on memory must be done, and no more may come. `is_done` says whether work
    /// is.
    pub(super) fn close(&mut self, at: u64, is_done: impl Fn(Place) -> bool) -> Result<(), String> {
        let closed = self.allocated.get_mut(&at).ok_or("memory is closed that was given back")?;
        closed.is_closed = true;
        let range = at..at + closed.bytes.len() as u64;
        let is_pending = |one: &&Use| {
            let is_engine = one.place.stream != FRAMEWORK;
            is_engine && overlap(&one.access.range, &range) && !is_done(one.place)
        };
        let pending = self.uses.iter().find(is_pending);
        let text = |one: &Use| format!("a push is over while {} of it is under way", one.what);
        pending.map_or(Ok(()), |one| Err(text(one)))
    }

    /// Gives memory back. `is_done` says whether work is.
    pub(super) fn free(&mut self, at: u64, is_done: impl Fn(Place) -> bool) -> Result<(), String> {
        let taken = self.allocated.remove(&at).ok_or("memory is given back twice")?;
        let range = at..at + taken.bytes.len() as u64;
        let (over, left): (Vec<Use>, Vec<Use>) = std::mem::take(&mut self.uses)
            .into_iter()
            .partition(|one| overlap(&one.access.range, &range));
        self.uses = left;
        match over.iter().find(|one| !is_done(one.place)) {
            Some(one) => Err(format!("memory is given back while {} is under way", one.what)),
            None => Ok(()),
        }
    }

    /// The bytes of this range, if it lies in one allocation.
    pub(super) fn bytes(&mut self, at: u64, length: usize) -> Option<&mut [u8]> {
        let (start, one) = self.allocated.range_mut(..=at).next_back()?;
        let offset = usize::try_from(at - start).ok()?;
        one.bytes.get_mut(offset..offset.checked_add(length)?)
    }

    /// A range that an aborted collective was to write.
    pub(super) fn spoil(&mut self, at: u64) {
        if let Some((_, one)) = self.allocated.range_mut(..=at).next_back() {
            one.is_spoilt = true;
        }
    }

    pub(super) fn is_spoilt(&self, at: u64) -> bool {
        self.allocated.range(..=at).next_back().is_some_and(|(_, one)| one.is_spoilt)
    }

    pub(super) fn register(&mut self, at: u64, bytes: usize) {
        self.registered.push(at..at + bytes as u64);
    }

    /// As [`free`](Self::free), of memory of the host that was registered.
    pub(super) fn unregister(
        &mut self,
        at: u64,
        is_done: impl Fn(Place) -> bool,
    ) -> Result<(), String> {
        let found = self.registered.iter().position(|range| range.start == at);
        let range = self.registered.remove(found.ok_or("memory was not registered")?);
        let pending =
            self.uses.iter().find(|one| overlap(&one.access.range, &range) && !is_done(one.place));
        let pending =
            pending.map(|one| format!("memory is unregistered while {} is under way", one.what));
        self.uses.retain(|one| !overlap(&one.access.range, &range));
        pending.map_or(Ok(()), Err)
    }

    pub(super) fn is_registered(&self, at: u64, bytes: usize) -> bool {
        let end = at + bytes as u64;
        self.registered.iter().any(|range| range.start <= at && end <= range.end)
    }

    /// Work that comes behind `clock` uses memory: it must come behind all other work with which it
    /// collides.
    pub(super) fn enter(
        &mut self,
        place: Place,
        clock: &Clock,
        what: &'static str,
        accesses: &[Access],
    ) -> Result<(), String> {
        let unordered = self.uses.iter().find(|one| {
            let of_another = one.place.device == place.device && one.place.stream != place.stream;
            of_another
                && clock[one.place.stream] < one.place.number
                && accesses.iter().any(|access| !access.is_later && access.collides(&one.access))
        });
        let text = unordered.map(|one| {
            format!(
                "device {}: {what} (stream {}) uses memory of {} (stream {}), and nothing orders \
                 them",
                place.device, place.stream, one.what, one.place.stream
            )
        });
        let used = accesses.iter().filter(|access| !access.range.is_empty());
        self.uses.extend(used.map(|access| {
            let (clock, access) = (*clock, access.clone());
            Use { place, clock, what, access }
        }));
        let is_closed = |access: &Access| {
            let found = self.allocated.range(..=access.range.start).next_back();
            let found = found.filter(|(at, one)| access.range.end <= *at + one.bytes.len() as u64);
            let is_on_gpu = access.range.start >= GPU && !access.range.is_empty();
            is_on_gpu && found.is_none_or(|(_, one)| one.is_closed)
        };
        if place.stream != FRAMEWORK && accesses.iter().any(is_closed) {
            return Err(format!(
                "device {}: {what} uses memory of a push that is over",
                place.device
            ));
        }
        text.map_or(Ok(()), Err)
    }

    /// Work begins that has waited for the host: but for what comes behind it, nobody may use this
    /// memory so that they collide. `is_done` says whether work is.
    pub(super) fn begin(
        &self,
        place: Place,
        accesses: &[Access],
        is_done: impl Fn(Place) -> bool,
    ) -> Result<(), String> {
        let is_in_the_way = |one: &&Use| {
            let of_another = one.place.device == place.device && one.place.stream != place.stream;
            let is_behind = one.clock[place.stream] >= place.number;
            let collides = || accesses.iter().any(|access| access.collides(&one.access));
            of_another && !is_behind && !is_done(one.place) && collides()
        };
        let found = self.uses.iter().find(is_in_the_way);
        let text = |one: &Use| format!("a copy that waited begins while {} is under way", one.what);
        found.map_or(Ok(()), |one| Err(text(one)))
    }

    /// Forgets what everybody comes behind.
    pub(super) fn forget(&mut self, device: usize, engine: &Clock, framework: &Clock) {
        self.uses.retain(|one| {
            let Place { stream, number, .. } = one.place;
            let is_host = one.access.range.start < GPU;
            one.place.device != device
                || engine[stream] < number
                || !is_host && framework[stream] < number
        });
    }

    /// The process of a device has died, and all work of it.
    pub(super) fn forget_device(&mut self, device: usize) {
        self.uses.retain(|one| one.place.device != device);
    }
}
