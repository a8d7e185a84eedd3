//! The NIC loop of a worker process: takes tasks, sends their parts by priority, lands the results
//! in the tensors. It owns the lanes to every server core and is driven by one thread. The data
//! path allocates nothing beyond what its queues have grown to.

mod messages;
mod watch;

pub use messages::{Command, Memory, NicConfig, NicStatistics, Plan, PlanPart, Report};

use crate::error::Error;
use crate::task::Task;
use bps_engine::base::{DType, KeyMap, Operation, Round};
use bps_engine::lane::Endpoint;
use bps_engine::limits::EVENTS_MAX;
use bps_engine::ring::Mpsc;
use bps_engine::sched::CreditQueue;
use bps_engine::trace::timeline::{Mark, Recorder};
use bps_engine::transport::{Cause, Event, Frame, Landing, LaneId, Link, Waker};
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind, RawHeader};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A ready part in the queue, or one that was posted.
#[derive(Clone, Copy)]
struct ReadyPart {
    run: u32,
    part: u32,
}

enum Receiving {
    Header,
    Landing { run: u32, bytes: usize, header: Header, target: *mut u8 },
    Closing,
}

struct Lane {
    server: u32,
    open: bool,
    receiving: Receiving,
    /// Posted and not sent, in order.
    sending: VecDeque<ReadyPart>,
}

/// A task under way.
struct Run {
    tensor: u32,
    memory: Memory,
    /// Parts not yet landed, plus parts posted and not yet sent.
    open: u32,
    posted: u32,
    task: Option<Arc<Task>>,
    failed: Option<Error>,
}

struct Waiting {
    memory: Memory,
    priority: i64,
    task: Arc<Task>,
}

struct Tensor {
    plan: Box<Plan>,
    round: u64,
    run: Option<u32>,
    /// Later pushes of the same tensor: a key never has two rounds in flight, so that no lane can
    /// wait for another.
    waiting: VecDeque<Waiting>,
    poisoned: Option<Error>,
}

/// See the [module](self).
pub struct Nic {
    endpoint: Endpoint,
    config: NicConfig,
    lanes: Vec<Lane>,
    /// Ready parts of all lanes. One queue and one credit: the lanes share the host's line, so what
    /// is posted on any of them is in the way of all. A lane that has more to carry, or is slower,
    /// comes to hold most of the credit and so gets most of the line, and the lanes end together.
    queue: CreditQueue<ReadyPart>,
    tensors: Vec<Option<Tensor>>,
    /// Where a publication belongs.
    keys: KeyMap<(u32, u32)>,
    runs: Vec<Run>,
    free_runs: Vec<u32>,
    commands: Mpsc<Command>,
    reports: Mpsc<Report>,
    report_waker: Waker,
    statistics: Arc<NicStatistics>,
    events: Vec<Event>,
    /// Finished tasks that somebody sleeps on.
    wakes: Vec<Arc<Task>>,
    /// When the first of them was seen to wait.
    first_wake: Option<Instant>,
    /// The tensor whose round was started last.
    latest: u32,
    over: Option<Error>,
    leaving: bool,
    trace: Recorder,
}

const GOODBYE: u64 = u64::MAX;
/// Commands that are taken before the lanes get their turn: the first tensors of a long list are on
/// their way while the last ones are still being handed over.
const COMMANDS_PER_TURN: usize = 64;
/// How long a finished task may wait for its caller to be woken while the loop has more to do: a
/// caller of many tensors then finds many of them done, instead of sleeping on each.
const WAKE_DELAY: Duration = Duration::from_micros(50);

impl Nic {
    /// A loop without lanes.
    pub fn new(
        endpoint: Endpoint,
        config: NicConfig,
        commands: Mpsc<Command>,
        reports: Mpsc<Report>,
        report_waker: Waker,
        statistics: Arc<NicStatistics>,
    ) -> Nic {
        Nic {
            endpoint,
            queue: CreditQueue::new(config.credit_bytes),
            config,
            lanes: Vec::new(),
            tensors: Vec::new(),
            keys: KeyMap::default(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            commands,
            reports,
            report_waker,
            statistics,
            events: Vec::with_capacity(4 * EVENTS_MAX),
            wakes: Vec::with_capacity(EVENTS_MAX),
            first_wake: None,
            latest: 0,
            over: None,
            leaving: false,
            trace: Recorder::default(),
        }
    }

    /// Adds the lane to a server's core. The first lane has id 0, and so on.
    ///
    /// # Errors
    /// The transport refuses the link.
    pub fn attach(&mut self, server: u32, link: Link) -> std::io::Result<LaneId> {
        let lane = self.endpoint.attach(link)?;
        assert_eq!(lane.0 as usize, self.lanes.len(), "lanes are attached once, at start");
        self.lanes.push(Lane {
            server,
            open: true,
            receiving: Receiving::Header,
            sending: VecDeque::with_capacity(bps_engine::limits::LANE_FRAMES_MAX),
        });
        Ok(lane)
    }

    /// Why the job is over for this worker, if it is.
    #[must_use]
    pub fn over(&self) -> Option<&Error> {
        self.over.as_ref()
    }

    /// Whether all lanes are closed and nothing will happen any more.
    pub fn ended(&self) -> bool {
        (self.leaving || self.over.is_some()) && self.lanes.iter().all(|lane| !lane.open)
    }

    /// Sleeps until there is something to do, or the time is over.
    pub fn sleep(&mut self, timeout: Duration) {
        let commands = &self.commands;
        self.endpoint.sleep(timeout, || !commands.is_empty());
    }

    /// One turn of the loop; says whether there was anything to do.
    pub fn step(&mut self) -> bool {
        let mut progress = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.commands.pop() else { break };
            self.on_command(command);
            progress = true;
        }
        self.pump();
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        progress |= !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Header { lane, header } => self.on_header(lane, &header),
                Event::Landed { lane } => self.on_landed(lane),
                // Publications are never taken in pieces.
                Event::Piece { lane, .. } => self.endpoint.consume(lane),
                Event::Sent { lane, token } => self.on_sent(lane, token),
                Event::Closed { lane, cause } => self.on_closed(lane, cause),
            }
        }
        self.events = events;
        self.pump();
        self.wake_callers(progress);
        progress
    }

    /// Wakes whoever sleeps on what is finished, once there is nothing else to do or the first has
    /// waited for [`WAKE_DELAY`].
    fn wake_callers(&mut self, progress: bool) {
        if self.wakes.is_empty() {
            return self.first_wake = None;
        }
        let busy = progress && self.free_runs.len() < self.runs.len();
        if busy && self.first_wake.get_or_insert_with(Instant::now).elapsed() < WAKE_DELAY {
            return;
        }
        self.first_wake = None;
        for task in self.wakes.drain(..) {
            task.wake();
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Plan { tensor, plan } => self.on_plan(tensor, plan),
            Command::Push { tensor, memory, priority, task } => {
                self.on_push(tensor, Waiting { memory, priority, task });
            }
            Command::Trace(recorder) => self.trace = recorder,
            Command::Poison { name, error } => self.poison(&name, &error),
            Command::Fail { error } => self.fail(error),
            Command::Leave => self.leave(),
        }
    }

    fn on_plan(&mut self, tensor: u32, plan: Box<Plan>) {
        let index = tensor as usize;
        if self.tensors.len() <= index {
            self.tensors.resize_with(index + 1, || None);
        }
        if self.tensors[index].is_some() {
            return;
        }
        for (position, part) in plan.parts.iter().enumerate() {
            let position = u32::try_from(position).unwrap_or(u32::MAX);
            self.keys.insert(part.key, (tensor, position));
        }
        self.tensors[index] =
            Some(Tensor { plan, round: 0, run: None, waiting: VecDeque::new(), poisoned: None });
    }

    fn on_push(&mut self, tensor: u32, waiting: Waiting) {
        if let Some(error) = &self.over {
            return waiting.task.finish_now(Err(error.clone()));
        }
        if self.leaving {
            return waiting.task.finish_now(Err(Error::Closed("this worker has shut down".into())));
        }
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else {
            let error = Error::Refused(format!("tensor id {tensor} was not declared"));
            return waiting.task.finish_now(Err(error));
        };
        if let Some(error) = &state.poisoned {
            return waiting.task.finish_now(Err(error.clone()));
        }
        if state.run.is_some() {
            return state.waiting.push_back(waiting);
        }
        self.start(tensor, waiting);
    }

    /// Opens the next round of a tensor.
    fn start(&mut self, tensor: u32, waiting: Waiting) {
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        let parts = u32::try_from(state.plan.parts.len()).unwrap_or(u32::MAX);
        if parts == 0 {
            return waiting.task.finish_now(Ok(()));
        }
        state.round += 1;
        self.latest = tensor;
        let (asked_ns, round, rank) = (waiting.task.asked_ns(), state.round, self.config.rank);
        let run = Run {
            tensor,
            memory: waiting.memory,
            open: parts,
            posted: 0,
            task: Some(waiting.task),
            failed: None,
        };
        let index = match self.free_runs.pop() {
            Some(index) => {
                self.runs[index as usize] = run;
                index
            }
            None => {
                self.runs.push(run);
                u32::try_from(self.runs.len() - 1).unwrap_or(u32::MAX)
            }
        };
        state.run = Some(index);
        for (position, part) in state.plan.parts.iter().enumerate() {
            self.trace.record_at(asked_ns, Mark::Queued, part.key, round, rank, part.bytes);
            let ready = ReadyPart { run: index, part: u32::try_from(position).unwrap_or(u32::MAX) };
            self.queue.push(waiting.priority, part.bytes, ready);
        }
    }

    /// Posts what waits, as far as credit and transport allow.
    fn pump(&mut self) {
        if self.leaving || self.over.is_some() {
            return;
        }
        while let Some(&ready) = self.queue.peek() {
            let run = &mut self.runs[ready.run as usize];
            let Some(Some(tensor)) = self.tensors.get(run.tensor as usize) else { return };
            let part = tensor.plan.parts[ready.part as usize];
            let rank = self.config.rank;
            let silent =
                matches!(tensor.plan.operation, Operation::Broadcast(root) if root != rank);
            let length = if silent { 0 } else { part.bytes };
            let mut header = Header::new(
                Kind::Contribution,
                tensor.plan.dtype,
                self.config.rank,
                self.config.epoch,
            );
            header.key = part.key;
            header.round = Round(tensor.round);
            header.length = u32::try_from(length).unwrap_or(u32::MAX);
            header.contributors = 1;
            let payload = run.memory.source.wrapping_add(part.offset);
            if self.config.payload_checksum && length > 0 {
                // SAFETY: the part lies inside the source (the plan's offsets were checked against
                // the declared size), which the caller keeps valid until the task is finished.
                let bytes = unsafe { std::slice::from_raw_parts(payload, length) };
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = crc32c::crc32c(bytes);
            }
            let frame = Frame { header: header.encode(), payload, length, token: 0 };
            let lane = &mut self.lanes[part.lane.0 as usize];
            let at = self.trace.now();
            if !lane.open || self.endpoint.post(part.lane, &frame).is_err() {
                return;
            }
            self.trace.frame_at(at, Mark::Posted, &header);
            self.statistics.posted(length);
            self.queue.take();
            lane.sending.push_back(ready);
            run.open += 1;
            run.posted += 1;
        }
    }

    fn on_sent(&mut self, lane: LaneId, token: u64) {
        let state = &mut self.lanes[lane.0 as usize];
        if token == GOODBYE {
            return;
        }
        let Some(ready) = state.sending.pop_front() else { return };
        let run = &self.runs[ready.run as usize];
        if let Some(Some(tensor)) = self.tensors.get(run.tensor as usize) {
            let (part, rank) = (&tensor.plan.parts[ready.part as usize], self.config.rank);
            self.trace.record(Mark::Sent, part.key, tensor.round, rank, part.bytes);
            self.queue.returned(part.bytes);
        }
        self.runs[ready.run as usize].posted -= 1;
        self.close_one(ready.run);
    }

    /// One of a run's open ends is closed; the last one finishes its task.
    fn close_one(&mut self, index: u32) {
        let run = &mut self.runs[index as usize];
        run.open -= 1;
        if run.open == 0 {
            self.finish(index);
        }
    }

    fn finish(&mut self, index: u32) {
        let run = &mut self.runs[index as usize];
        let tensor = run.tensor;
        let result = run.failed.take().map_or(Ok(()), Err);
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        if result.is_ok() {
            let (key, rank) = (state.plan.parts[0].key, self.config.rank);
            self.trace.record(Mark::Done, key, state.round, rank, 0);
            let bytes: usize = state.plan.parts.iter().map(|part| part.bytes).sum();
            self.statistics.bytes.add(bytes as u64);
        }
        if let Some(task) = run.task.take()
            && task.finish(result)
        {
            self.wakes.push(task);
        }
        state.run = None;
        self.free_runs.push(index);
        if let Some(next) = state.waiting.pop_front() {
            self.on_push(tensor, next);
        }
    }

    fn on_header(&mut self, lane: LaneId, raw: &RawHeader) {
        if matches!(self.lanes[lane.0 as usize].receiving, Receiving::Closing) {
            return;
        }
        self.statistics.counters.frames_in.add(1);
        match self.check(lane, raw) {
            Ok((header, run, target)) => {
                let length = header.length as usize;
                self.trace.frame(Mark::Landing, &header);
                if length == 0 {
                    self.trace.frame(Mark::Landed, &header);
                    self.endpoint.land(lane, Landing::Pieces, 0);
                    return self.landed(run);
                }
                let state = &mut self.lanes[lane.0 as usize];
                state.receiving = Receiving::Landing { run, bytes: length, header, target };
                self.endpoint.land(lane, Landing::Into(target), length);
            }
            Err(message) => {
                let state = &mut self.lanes[lane.0 as usize];
                state.receiving = Receiving::Closing;
                let server = state.server;
                self.endpoint.close(lane);
                self.report(Report::Corrupt { server, message });
            }
        }
    }

    /// A publication against what was pushed: returns its run and where it lands.
    fn check(&self, lane: LaneId, raw: &RawHeader) -> Result<(Header, u32, *mut u8), String> {
        let header = Header::decode(raw).map_err(|invalid| invalid.to_string())?;
        if header.kind == Kind::Refused {
            return Err("it refused a frame of this rank; its log says why".into());
        }
        let key = header.key;
        let known = self.keys.get(&key).filter(|_| header.kind == Kind::Publication);
        let &(tensor, position) =
            known.ok_or_else(|| format!("{:?} of unknown {key}", header.kind))?;
        let Some(Some(state)) = self.tensors.get(tensor as usize) else {
            return Err(format!("{key} has no tensor"));
        };
        let part = state.plan.parts[position as usize];
        let root =
            matches!(state.plan.operation, Operation::Broadcast(root) if root == self.config.rank);
        let fits = header.rank == self.config.rank
            && header.epoch == self.config.epoch
            && header.dtype == state.plan.dtype
            && header.offset == 0
            && header.length as usize == if root { 0 } else { part.bytes }
            && header.round.0 == state.round
            && part.lane == lane;
        let whole = |run: &u32| self.runs[*run as usize].failed.is_none();
        let run = state.run.filter(|_| fits).filter(whole).ok_or_else(|| {
            format!("a publication of `{}` ({key}) does not fit what was pushed", state.plan.name)
        })?;
        let target = self.runs[run as usize].memory.target.wrapping_add(part.offset);
        Ok((header, run, target))
    }

    fn on_landed(&mut self, lane: LaneId) {
        let state = &mut self.lanes[lane.0 as usize];
        let receiving = std::mem::replace(&mut state.receiving, Receiving::Header);
        let Receiving::Landing { run, bytes, header, target } = receiving else { return };
        self.statistics.counters.bytes_in.add(bytes as u64);
        if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
            // SAFETY: these bytes have just landed in the caller's memory, which is valid until the
            // task is finished.
            let landed = unsafe { std::slice::from_raw_parts(target.cast_const(), bytes) };
            if crc32c::crc32c(landed) != header.payload_checksum {
                let server = state.server;
                state.receiving = Receiving::Closing;
                self.endpoint.close(lane);
                let message = format!("payload checksum of {} differs", header.key);
                return self.report(Report::Corrupt { server, message });
            }
        }
        self.trace.frame(Mark::Landed, &header);
        self.landed(run);
    }

    fn landed(&mut self, run: u32) {
        self.statistics.counters.rounds.add(1);
        self.close_one(run);
    }

    /// A tensor on which the ranks disagree: what is pending of it fails, and so does what comes.
    fn poison(&mut self, name: &str, error: &Error) {
        let found = self
            .tensors
            .iter()
            .position(|tensor| tensor.as_ref().is_some_and(|tensor| tensor.plan.name == name));
        let Some(index) = found else { return };
        let Some(state) = &mut self.tensors[index] else { return };
        state.poisoned = Some(error.clone());
        for waiting in state.waiting.drain(..) {
            waiting.task.finish_now(Err(error.clone()));
        }
        let Some(run) = state.run else { return };
        self.queue.remove(|ready| ready.run == run);
        let state = &mut self.runs[run as usize];
        state.failed = Some(error.clone());
        // No result will come for it: only what the kernel still reads is open.
        state.open = state.posted + 1;
        self.close_one(run);
    }

    /// The job is over: the kernel must let go of all memory before any task is finished.
    fn fail(&mut self, error: Error) {
        if self.over.is_some() {
            return;
        }
        let error = match (error, self.where_it_stands()) {
            (Error::PeerDied(text), Some(round)) => Error::PeerDied(format!("{text}; {round}")),
            (error, _) => error,
        };
        (self.config.say)(&error);
        self.over = Some(error);
        for position in 0..self.lanes.len() {
            self.endpoint.close(LaneId(u32::try_from(position).unwrap_or(u32::MAX)));
        }
        self.fail_pending();
    }

    /// Once every lane is closed, nobody but us holds the callers' memory.
    fn fail_pending(&mut self) {
        let Some(error) = self.over.clone() else { return };
        if self.lanes.iter().any(|lane| lane.open) {
            return;
        }
        for run in &mut self.runs {
            if let Some(task) = run.task.take() {
                task.finish_now(Err(error.clone()));
            }
        }
        for tensor in self.tensors.iter_mut().flatten() {
            tensor.run = None;
            for waiting in tensor.waiting.drain(..) {
                waiting.task.finish_now(Err(error.clone()));
            }
        }
    }

    fn leave(&mut self) {
        if self.over.is_some() {
            return;
        }
        if self.tensors.iter().flatten().any(|tensor| tensor.run.is_some()) {
            let text = "shutdown was called while a push_pull was under way: synchronize it first";
            return self.fail(Error::Closed(text.into()));
        }
        self.leaving = true;
        for position in 0..self.lanes.len() {
            let id = LaneId(u32::try_from(position).unwrap_or(u32::MAX));
            let header = Header::new(Kind::Goodbye, DType::U8, self.config.rank, self.config.epoch);
            let payload = std::ptr::null();
            let frame = Frame { header: header.encode(), payload, length: 0, token: GOODBYE };
            if self.endpoint.post(id, &frame).is_err() {
                self.endpoint.close(id);
            }
        }
    }

    fn on_closed(&mut self, lane: LaneId, cause: Cause) {
        let round = self.where_it_stands();
        let state = &mut self.lanes[lane.0 as usize];
        state.open = false;
        state.receiving = Receiving::Closing;
        let server = state.server;
        if self.over.is_some() {
            self.fail_pending();
        } else if !self.leaving {
            self.report(Report::Lost { server, cause, round });
        }
    }

    /// "round 812 of `layer4.weight` was open", or which was the last one.
    fn where_it_stands(&self) -> Option<String> {
        let open = self.tensors.iter().flatten().find(|tensor| tensor.run.is_some());
        let last = self.tensors.get(self.latest as usize).and_then(Option::as_ref);
        let (tensor, how) = match (open, last) {
            (Some(tensor), _) => (tensor, "was open"),
            (None, Some(tensor)) if tensor.round > 0 => (tensor, "was the last one"),
            _ => return None,
        };
        Some(format!("round {} of `{}` {how}", tensor.round, tensor.plan.name))
    }

    fn report(&self, report: Report) {
        // The ring holds more reports than there are lanes; each lane reports once.
        let _ = self.reports.push(report);
        self.report_waker.wake();
    }
}
