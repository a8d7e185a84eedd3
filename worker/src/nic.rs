//! The NIC loop of a worker process: takes tasks, sends their parts by priority, lands the results
//! in the tensors, and reduces with the other ranks of its group first. It owns the lanes to every
//! server core and to every rank of the group, and is driven by one thread. The data path allocates
//! nothing beyond what its queues have grown to.

mod arriving;
mod ending;
mod granted;
mod group;
mod messages;
mod sending;
pub mod staged;
mod watch;

pub(crate) use ending::drain;
pub use messages::{Command, Memory, NicConfig, NicStatistics, Peer, Plan, PlanPart, Report};

use self::group::Circle;
use self::staged::{Pipeline, Slot, Staged};
use crate::error::Error;
use crate::task::Task;
use bps_engine::base::{KeyMap, Operation};
use bps_engine::lane::Endpoint;
use bps_engine::limits::EVENTS_MAX;
use bps_engine::reduce::{Kernels, kernels};
use bps_engine::ring::Mpsc;
use bps_engine::sched::CreditQueue;
use bps_engine::trace::timeline::{Mark, Recorder};
use bps_engine::transport::{Event, LaneId, Link, Waker};
use bps_engine::wire::{Header, Kind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A part of a task under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RunPart {
    run: u32,
    part: u32,
}

/// How far a part of a task is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No round of it is open, or its result is there.
    Idle,
    /// It waits for the group, or in a queue, or its contributions are being added.
    Pushed,
    /// Its contribution was sent: a publication may come.
    Asked,
    /// As `Asked`, and the publication will be written to the slot that was granted for it.
    Granted,
}

enum Receiving {
    Header,
    /// A publication.
    Landing {
        part: RunPart,
        header: Header,
        target: *mut u8,
        /// That is this slot, and not a tensor.
        slot: Option<Slot>,
    },
    /// A publication that waits for a slot.
    Held {
        part: RunPart,
        header: Header,
    },
    /// A contribution of this peer, by its place in its circle; held, or in pieces.
    Contribution {
        peer: usize,
        /// Whether it is of a tensor on GPUs.
        device: bool,
        header: Header,
        /// Bytes of it that have come, and their CRC-32C if the header has one.
        done: usize,
        checksum: u32,
    },
    /// So many bytes that nobody wants any more.
    Unwanted {
        left: usize,
    },
    Closing,
}

struct Lane {
    peer: Peer,
    open: bool,
    /// The peer has left in good order: the lane closes once it needs no more of our memory.
    goodbye: bool,
    /// What is sent here carries a checksum.
    checks: bool,
    /// This rank has left in good order, and said so here.
    said_goodbye: bool,
    /// Frames with a task's memory that were posted and are not sent.
    posted: u32,
    receiving: Receiving,
    /// To a rank: what is to be sent, in order.
    outbox: VecDeque<Outgoing>,
}

/// What is to be said to a rank of the group.
#[derive(Clone, Copy)]
enum Outgoing {
    /// About a part of a task under way.
    Part(Word),
    /// About tensors on GPUs.
    Gpu(staged::Word),
}

/// A frame to a rank of the group.
#[derive(Clone, Copy)]
struct Word {
    kind: Kind,
    of: RunPart,
    round: u64,
    /// Of the payload, if it carries one.
    checksum: Option<u32>,
}

impl Word {
    /// One without a payload.
    fn short(kind: Kind, of: RunPart, round: u64) -> Word {
        Word { kind, of, round, checksum: None }
    }
}

/// A task under way.
struct Run {
    tensor: u32,
    memory: Memory,
    priority: i64,
    since: Duration,
    /// Parts whose result is not there, plus frames with the run's memory that are not sent.
    open: u32,
    /// Of these frames, those that were posted.
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
    plan: Arc<Plan>,
    round: u64,
    run: Option<u32>,
    /// By part.
    stages: Box<[Stage]>,
    /// By part: when its contribution was sent to a server.
    asked: Box<[Duration]>,
    /// By part, of a tensor on the GPU: where the bytes are that are to be sent.
    slots: Box<[Option<Slot>]>,
    /// By part, likewise: where the result is while it goes to the column.
    results: Box<[Option<Slot>]>,
    /// Later pushes of the same tensor: a key never has two rounds in flight, so that no lane can
    /// wait for another.
    waiting: VecDeque<Waiting>,
    /// Why it will be of no use, once it has had the rounds on which the ranks had agreed.
    doomed: Option<(u64, Error)>,
    poisoned: Option<Error>,
}

/// See the [module](self).
pub struct Nic {
    endpoint: Endpoint,
    config: NicConfig,
    lanes: Vec<Lane>,
    /// Parts that are ready for a server. One queue and one credit: the lanes share the host's
    /// line, so what is posted on any of them is in the way of all. A lane that has more to carry,
    /// or is slower, comes to hold most of the credit and so gets most of the line, and the lanes
    /// end together.
    queue: CreditQueue<RunPart>,
    /// The other ranks of the group, which sum tensors of the host.
    group: Circle,
    /// Those of them that hold the same shares of tensors on GPUs, and sum these.
    column: Circle,
    /// Parts that all of their circle have pushed, of those that this rank owns.
    gathered: CreditQueue<RunPart>,
    kernels: &'static Kernels,
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
    pipeline: Pipeline,
    /// The time of this turn.
    now: Duration,
    next_tick: Duration,
    stalls_told: bool,
    awaits_told: bool,
    over: Option<Error>,
    /// It leaves once all is said.
    wants_to_leave: bool,
    leaving: bool,
    trace: Recorder,
}

/// How often the loop looks for stalls.
const TICK: Duration = Duration::from_millis(500);
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
            lanes: Vec::new(),
            group: Circle::new(Vec::new()),
            column: Circle::new(Vec::new()),
            gathered: CreditQueue::new(config.credit_bytes),
            kernels: kernels(),
            tensors: Vec::new(),
            keys: KeyMap::default(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            config,
            commands,
            reports,
            report_waker,
            statistics,
            events: Vec::with_capacity(4 * EVENTS_MAX),
            wakes: Vec::with_capacity(EVENTS_MAX),
            first_wake: None,
            latest: 0,
            pipeline: Pipeline::default(),
            now: Duration::ZERO,
            next_tick: Duration::ZERO,
            stalls_told: false,
            awaits_told: false,
            over: None,
            wants_to_leave: false,
            leaving: false,
            trace: Recorder::default(),
        }
    }

    /// Adds the lane to a server's core, or to a rank of the group. The first lane has id 0, and so
    /// on. All are attached before the first step.
    ///
    /// # Errors
    /// The transport refuses the link.
    pub fn attach(&mut self, peer: Peer, link: Link) -> std::io::Result<LaneId> {
        let lane = self.endpoint.attach(link)?;
        assert_eq!(lane.0 as usize, self.lanes.len(), "lanes are attached once, at start");
        self.lanes.push(Lane {
            peer,
            open: true,
            goodbye: false,
            checks: self.endpoint.checks(lane),
            said_goodbye: false,
            posted: 0,
            receiving: Receiving::Header,
            outbox: VecDeque::new(),
        });
        if let Peer::Rank(rank) = peer {
            self.group = self.group.with(lane);
            if self.config.column.contains(&rank) {
                self.column = self.column.with(lane);
            }
        }
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

    /// Whether a round is open.
    #[must_use]
    pub fn is_awaiting(&self) -> bool {
        self.free_runs.len() < self.runs.len()
    }

    /// Sleeps until there is something to do, or the time is over.
    pub fn sleep(&mut self, timeout: Duration) {
        let commands = &self.commands;
        self.endpoint.sleep(timeout, || !commands.is_empty());
    }

    /// One turn of the loop; says whether there was anything to do. `now` is the time since any
    /// fixed moment.
    pub fn step(&mut self, now: Duration) -> bool {
        self.now = now;
        let mut progress = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.commands.pop() else { break };
            self.on_command(command);
            progress = true;
        }
        self.pump_all();
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        progress |= !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Header { lane, header, carried } => self.on_header(lane, &header, carried),
                Event::Landed { lane } => self.on_landed(lane),
                Event::Piece { lane, data, length } => self.on_piece(lane, data, length),
                Event::Answered { lane, token } => self.on_answered(lane, token),
                Event::Sent { lane, token } => self.on_sent(lane, token),
                Event::Closed { lane, cause } => self.on_closed(lane, cause),
            }
        }
        self.events = events;
        self.pump_all();
        // Who has left before hears nothing more.
        let is_said = |lane: &Lane| lane.outbox.is_empty() || !lane.open;
        if self.wants_to_leave && self.lanes.iter().all(is_said) {
            self.wants_to_leave = false;
            self.leave();
        } else if self.leaving && self.over.is_none() {
            self.say_goodbyes();
        }
        self.pipeline.flush();
        self.wake_callers(progress);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.endpoint.look(now);
            self.look_for_stalls();
            self.look_for_results();
        }
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
            Command::OpenPipeline(to) => self.open_pipeline(to),
            Command::PushGpu { tensor, push } => self.on_push_gpu(tensor, push),
            Command::Open { tensor, priority } => self.open_staged(tensor, priority),
            Command::Part { tensor, part, slot } => self.push_staged(tensor, part, slot),
            Command::Land(slot) => self.release(slot),
            Command::Say { to, word } => self.say_word(to, word),
            Command::Stalled { keys } => {
                self.pipeline.stalled = keys;
                self.next_tick = self.now;
            }
            Command::GpuFailed { message } => self.report(Report::Failed { message }),
            Command::Trace { nic, gpu } => {
                self.trace = nic;
                self.pipeline.record_with(gpu);
            }
            Command::Poison { name, agreed, error } => self.poison(&name, &agreed, &error),
            Command::Fail { error } => self.fail(error),
            Command::Leave => self.wants_to_leave = true,
        }
    }

    fn on_plan(&mut self, tensor: u32, plan: Arc<Plan>) {
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
            let circle = if plan.device { &mut self.column } else { &mut self.group };
            if part.owner.is_none() && !circle.lanes.is_empty() {
                circle.gathers.plan(part.key);
            }
        }
        let stages = vec![Stage::Idle; plan.parts.len()].into();
        let asked = vec![Duration::ZERO; plan.parts.len()].into();
        let staged = if plan.device { plan.parts.len() } else { 0 };
        let (slots, results) = (vec![None; staged].into(), vec![None; staged].into());
        if plan.device {
            self.pipeline.tell(Staged::Plan { tensor, plan: Arc::clone(&plan) });
        }
        self.tensors[index] = Some(Tensor {
            plan,
            round: 0,
            run: None,
            stages,
            asked,
            slots,
            results,
            waiting: VecDeque::new(),
            doomed: None,
            poisoned: None,
        });
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
        if state.plan.device {
            let name = &state.plan.name;
            let text = format!("`{name}` was declared as a tensor of the GPU: push it as one");
            return waiting.task.finish_now(Err(Error::Refused(text)));
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
        let asked_ns = waiting.task.asked_ns();
        let index = self.open_run(tensor, waiting.priority, parts);
        let run = &mut self.runs[index as usize];
        (run.memory, run.task) = (waiting.memory, Some(waiting.task));
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        state.run = Some(index);
        let (round, rank) = (state.round, self.config.rank);
        for part in &state.plan.parts {
            self.trace.record_at(asked_ns, Mark::Queued, part.key, round, rank, part.bytes);
        }
        for part in 0..parts {
            self.push_part(RunPart { run: index, part });
        }
    }

    /// Opens the next round of a tensor with so many parts to come.
    fn open_run(&mut self, tensor: u32, priority: i64, parts: u32) -> u32 {
        if let Some(Some(state)) = self.tensors.get_mut(tensor as usize) {
            state.round += 1;
            state.stages.fill(Stage::Pushed);
        }
        self.latest = tensor;
        let memory = Memory { source: std::ptr::null(), target: std::ptr::null_mut() };
        let run = Run {
            tensor,
            memory,
            priority,
            since: self.now,
            open: parts,
            posted: 0,
            task: None,
            failed: None,
        };
        if let Some(index) = self.free_runs.pop() {
            self.runs[index as usize] = run;
            return index;
        }
        self.runs.push(run);
        u32::try_from(self.runs.len() - 1).unwrap_or(u32::MAX)
    }

    /// A part is pushed: its circle sums it first, if there are others in it.
    fn push_part(&mut self, of: RunPart) {
        let Some((tensor, part)) = self.planned(of) else { return };
        let device = tensor.plan.device;
        match part.owner {
            None if self.circle(device).lanes.is_empty() => self.send_to_server(of),
            None => {
                let now = self.now;
                if self.circle_mut(device).gathers.own(part.key, now) {
                    self.gathered(of);
                }
            }
            Some(owner) => {
                let round = tensor.round;
                // A broadcast asks for no contribution: the publication is the answer.
                if matches!(tensor.plan.operation, Operation::Broadcast(_)) {
                    self.set_stage(of, Stage::Asked);
                }
                self.say_to(owner, Word::short(Kind::Ready, of, round));
            }
        }
    }

    /// The tensor and the plan of a part under way.
    fn planned(&self, of: RunPart) -> Option<(&Tensor, PlanPart)> {
        let tensor = self.tensors.get(self.runs[of.run as usize].tensor as usize)?.as_ref()?;
        Some((tensor, tensor.plan.parts[of.part as usize]))
    }

    fn set_stage(&mut self, of: RunPart, stage: Stage) {
        let tensor = self.runs[of.run as usize].tensor as usize;
        if let Some(Some(tensor)) = self.tensors.get_mut(tensor) {
            tensor.stages[of.part as usize] = stage;
        }
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
            if !state.plan.device {
                let (key, rank) = (state.plan.parts[0].key, self.config.rank);
                self.trace.record(Mark::Done, key, state.round, rank, 0);
            }
            let bytes: usize = state.plan.parts.iter().map(|part| part.bytes).sum();
            self.statistics.bytes.add(bytes as u64);
        }
        if let Some(task) = run.task.take()
            && task.finish(result)
        {
            self.wakes.push(task);
        }
        if state.plan.device {
            self.pipeline.tell(Staged::Closed { tensor });
        }
        state.run = None;
        self.free_runs.push(index);
        if state.doomed.is_some() {
            self.poison_if_doomed(tensor);
        }
        let state = self.tensors[tensor as usize].as_mut();
        if let Some(next) = state.and_then(|state| state.waiting.pop_front()) {
            self.on_push(tensor, next);
        }
    }

    fn report(&self, report: Report) {
        // The ring holds more reports than there are lanes; each lane reports once, and a stall
        // that finds no room is told again.
        let _ = self.reports.push(report);
        self.report_waker.wake();
    }
}
