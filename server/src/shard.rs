//! One core of a server: its lanes, its keys, its loop. Nothing here is shared with another thread
//! but the two rings to and from the control thread. The data path allocates nothing: room is made
//! when keys are installed and lanes attached, and a turnout for each round that is open at once
//! when it is the first time. What a core takes grows with its keys and with its lanes, and with
//! their product only by three bits for each rank in a round that is under way.

mod keys;
mod late;
mod membership;
mod messages;
mod sending;
mod waiting;
mod watch;

pub use messages::{Command, Refusal, Report};

use membership::Next;
use sending::{Outgoing, Results};

use crate::entry::{Entry, Groups, NumberSet, Take, Turnouts, Unfit};
use bps_engine::base::{DType, Epoch, Key, KeyMap, Rank};
use bps_engine::lane::Endpoint;
use bps_engine::limits::{EVENTS_MAX, RANKS_MAX};
use bps_engine::mem::Arena;
use bps_engine::optimize::Act;
use bps_engine::proto::members::Members;
use bps_engine::reduce::{Kernels, kernels};
use bps_engine::ring::Mpsc;
use bps_engine::trace::counters::Counters;
use bps_engine::trace::timeline::{Mark, Recorder};
use bps_engine::transport::{Cause, Event, Frame, Grant, Landing, LaneId, Link, Piece, Waker};
use bps_engine::wire::header::{
    COMES_BACK, FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT, FLAG_SCALED, scale,
};
use bps_engine::wire::{Header, Kind, RawHeader, crc32c_append};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// What a lane is doing.
enum Receiving {
    /// Between two frames.
    Header,
    /// A contribution whose key is not free yet.
    Parked { entry: usize, header: Header },
    /// A contribution's payload; `done` bytes have been added, or dropped if its round is closed.
    Payload { entry: usize, header: Header, done: usize, checksum: u32, is_late: bool },
    /// Nothing more is taken from this lane.
    Closing,
}

struct Session {
    rank: Rank,
    epoch: Epoch,
    receiving: Receiving,
    /// While it is parked: the lane that waits behind it for the same key.
    behind: Option<LaneId>,
    outgoing: Outgoing,
    goodbye: bool,
    /// It has said so itself, and does not mean to come back.
    left: bool,
    /// The key of which a contribution has begun that is not whole.
    begun: Option<usize>,
    /// Publications to this rank carry a checksum: its lane wants them, or its contributions have
    /// one.
    checks: bool,
}

/// See the [module](self).
pub struct Shard {
    /// Its index in the server.
    core: u32,
    endpoint: Endpoint,
    arena: Arena,
    kernels: &'static Kernels,
    epoch: Epoch,
    groups: Arc<Groups>,
    /// The membership to come, until the lanes of this one have closed.
    next: Option<Next>,
    /// Those of the sets of ranks that tensors are for.
    sets: HashMap<Members, Arc<Groups>>,
    /// The same ranks, or all, each by itself, for stored tensors.
    apart: HashMap<Members, Arc<Groups>>,
    index: KeyMap<usize>,
    entries: Vec<Entry>,
    /// Places in `entries` whose keys were forgotten.
    vacant: Vec<usize>,
    /// Those of `entries` whose result is being sent.
    results: Results,
    /// When to close rounds without ranks that are slow, and of which of `entries`.
    due: BinaryHeap<Reverse<(Duration, usize)>>,
    /// For rounds that open.
    turnouts: Turnouts,
    sessions: Vec<Option<Session>>,
    /// Lane of each rank.
    lanes: Vec<Option<LaneId>>,
    /// Ranks of this membership that have said goodbye: they will contribute no more.
    left: NumberSet,
    events: Vec<Event>,
    commands: Mpsc<Command>,
    reports: Mpsc<(u32, Report)>,
    report_waker: Waker,
    /// Reports that found the ring full.
    backlog: VecDeque<Report>,
    /// Adopted keys whose results it has got back since the last report of such.
    restored: Vec<Key>,
    counters: Arc<Counters>,
    stall_report: Duration,
    /// The time of this turn.
    now: Duration,
    next_tick: Duration,
    stalls_told: bool,
    /// Some lane of this membership carries checksums.
    checksums: bool,
    stopped: bool,
    /// Lanes of a membership that this shard has not been told of yet.
    early: Vec<(Link, Rank, Epoch)>,
    trace: Recorder,
}

/// How often a shard looks for stalls.
const TICK: Duration = Duration::from_millis(500);

impl Shard {
    /// A shard without keys or lanes.
    #[must_use]
    #[allow(clippy::too_many_arguments, reason = "each is owned by the shard from here on")]
    pub fn new(
        core: u32,
        endpoint: Endpoint,
        arena: Arena,
        commands: Mpsc<Command>,
        reports: Mpsc<(u32, Report)>,
        report_waker: Waker,
        counters: Arc<Counters>,
        stall_report: Duration,
    ) -> Shard {
        Shard {
            core,
            endpoint,
            arena,
            kernels: kernels(),
            epoch: Epoch(0),
            groups: Arc::default(),
            next: None,
            sets: HashMap::new(),
            apart: HashMap::new(),
            index: KeyMap::default(),
            entries: Vec::new(),
            vacant: Vec::new(),
            results: Results::default(),
            due: BinaryHeap::new(),
            turnouts: Turnouts::default(),
            sessions: Vec::new(),
            lanes: Vec::new(),
            left: NumberSet::default(),
            events: Vec::with_capacity(4 * EVENTS_MAX),
            commands,
            reports,
            report_waker,
            backlog: VecDeque::new(),
            restored: Vec::new(),
            counters,
            stall_report,
            now: Duration::ZERO,
            next_tick: Duration::ZERO,
            stalls_told: false,
            checksums: false,
            stopped: false,
            early: Vec::new(),
            trace: Recorder::default(),
        }
    }

    /// Whether [`Command::Stop`] has come.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Sleeps until there is something to do, at most until the next look for stalls.
    pub fn sleep(&mut self) {
        let takes = self.next.is_none();
        let commands = &self.commands;
        let due = self.due.peek().map(|Reverse((at, _))| at.saturating_sub(self.now));
        self.endpoint
            .sleep(due.map_or(TICK, |due| due.min(TICK)), || takes && !commands.is_empty());
    }

    /// One turn of the loop: takes what has arrived, does it, and says whether there was anything.
    /// `now` is the time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> bool {
        self.now = now;
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        let mut progress = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Closed { lane, .. } if self.next.is_some() => {
                    self.sessions[lane.0 as usize] = None;
                }
                _ if self.next.is_some() => {}
                Event::Header { lane, header, carried } => {
                    self.on_header(lane, &header, carried.grant(), now);
                }
                Event::Landed { lane } => self.on_landed(lane),
                Event::Piece { lane, piece } => self.on_piece(lane, piece),
                Event::Sent { lane, token } => self.on_sent(lane, token),
                Event::Answered { .. } => unreachable!("a server grants no memory"),
                Event::Closed { lane, cause } => self.on_closed(lane, cause),
            }
        }
        self.events = events;
        self.begin_if_closed();
        // What comes behind the word to begin is for the membership that begins.
        while self.next.is_none()
            && let Some(command) = self.commands.pop()
        {
            self.on_command(command);
            progress = true;
        }
        progress |= self.close_due();
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.endpoint.look(now);
            if self.next.is_none() {
                self.look_for_stalls(now);
            }
        }
        self.tell_restored();
        self.send_backlog();
        progress
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Attach { link, rank, epoch } => self.attach(link, rank, epoch),
            Command::Install { request, keys } => match self.install(&keys) {
                Ok(()) => self.report(Report::Installed { request }),
                Err(error) => self.report(Report::Failed { message: error.to_string() }),
            },
            Command::Adopt { request, keys } => match self.adopt(&keys) {
                Ok(()) => self.report(Report::Installed { request }),
                Err(error) => self.report(Report::Failed { message: error.to_string() }),
            },
            Command::Retire { keys } => self.retire(&keys),
            Command::Begin { epoch, groups } => self.begin(epoch, groups),
            Command::Shrink { gone } => self.shrink(&gone),
            Command::Inquire { keys } => self.tell_states(&keys),
            Command::Trace(recorder) => self.trace = recorder,
            Command::Stop => self.stopped = true,
        }
    }

    fn attach(&mut self, link: Link, rank: Rank, epoch: Epoch) {
        // A worker may have its roster, and dial, before this server has its own; after a suspend
        // the number of the epoch to come is known before its ranks are.
        let is_early = epoch > self.epoch || epoch == self.epoch && self.lanes.is_empty();
        if is_early && self.early.len() < RANKS_MAX {
            return self.early.push((link, rank, epoch));
        }
        let is_member = (rank.0 as usize) < self.lanes.len() && !self.groups.is_gone(rank);
        let known = epoch == self.epoch && is_member;
        if !known || self.lanes[rank.0 as usize].is_some() {
            let message = format!(
                "a lane of {rank}, epoch {}, was turned away: it is not of this epoch ({}) or has \
                 one already",
                epoch.0, self.epoch.0
            );
            return self.report(Report::TurnedAway { message });
        }
        let lane = match self.endpoint.attach(link) {
            Ok(lane) => lane,
            Err(error) => {
                let message = format!("the lane of {rank} could not be set up: {error}");
                return self.report(Report::TurnedAway { message });
            }
        };
        let checks = self.endpoint.checks(lane);
        self.checksums |= checks;
        let session = Session {
            rank,
            epoch,
            receiving: Receiving::Header,
            behind: None,
            outgoing: Outgoing::new(),
            goodbye: false,
            left: false,
            begun: None,
            checks,
        };
        if self.sessions.len() <= lane.0 as usize {
            self.sessions.resize_with(lane.0 as usize + 1, || None);
        }
        self.sessions[lane.0 as usize] = Some(session);
        self.lanes[rank.0 as usize] = Some(lane);
    }

    fn on_header(&mut self, lane: LaneId, raw: &RawHeader, grant: Option<Grant>, now: Duration) {
        let receiving = &session(&mut self.sessions, lane).receiving;
        if matches!(receiving, Receiving::Closing) {
            return;
        }
        self.counters.frames_in.add(1);
        match self.check(lane, raw, grant) {
            Ok((header, _)) if header.kind == Kind::Goodbye => {
                let session = session(&mut self.sessions, lane);
                session.goodbye = true;
                session.left = header.act != COMES_BACK;
                session.receiving = Receiving::Closing;
                self.left.insert(header.rank.0);
                self.let_go(header.rank);
                // Whoever waits for this rank learns of it in this turn.
                self.next_tick = now;
                self.endpoint.close(lane);
            }
            Ok((header, index)) => {
                self.trace.frame(Mark::Arrived, &header);
                if let Some(grant) = grant {
                    session(&mut self.sessions, lane).outgoing.note(index, grant);
                }
                if self.entries[index].is_late(header.round.0) {
                    return self.take_late(lane, index, header);
                }
                let entry = &mut self.entries[index];
                entry.arrive(header.rank, Act::from_word(header.act), &mut self.turnouts);
                entry.opened_at.get_or_insert(now);
                if entry.is_restoring() {
                    entry.note_restored(&header);
                }
                if header.length > 0 {
                    session(&mut self.sessions, lane).begun = Some(index);
                }
                if header.length == 0 {
                    entry.count_empty(header.rank);
                    self.endpoint.land(lane, Landing::NOTHING);
                    self.publish_if_whole(index);
                } else if entry.free() {
                    self.take(lane, index, header);
                } else {
                    self.counters.parked.add(1);
                    self.trace.frame(Mark::Parked, &header);
                    self.park(lane, index, header);
                }
            }
            Err(why) => self.refuse(lane, why),
        }
    }

    /// Every field of a header against the registry, before a byte of payload is accepted.
    fn check(
        &self,
        lane: LaneId,
        raw: &RawHeader,
        grant: Option<Grant>,
    ) -> Result<(Header, usize), Refusal> {
        let header = Header::decode(raw)?;
        let session = self.sessions[lane.0 as usize].as_ref().expect(HAS_SESSION);
        if header.rank != session.rank || header.epoch != session.epoch {
            return Err(Refusal::Sender {
                lane_rank: session.rank,
                lane_epoch: session.epoch,
                rank: header.rank,
                epoch: header.epoch,
            });
        }
        match header.kind {
            Kind::Goodbye if header.length == 0 => return Ok((header, usize::MAX)),
            Kind::Contribution => {}
            other => return Err(Refusal::Kind(other)),
        }
        let key = header.key;
        let index = *self.index.get(&key).ok_or(Refusal::Key(key))?;
        let entry = &self.entries[index];
        if !entry.groups().has(header.rank) {
            return Err(Refusal::Outside { key, rank: header.rank });
        }
        let act = Act::from_word(header.act);
        entry.check_act(act).map_err(|unfit| match unfit {
            Unfit::Senseless => Refusal::Act { key, act },
            Unfit::Otherwise(said, by) => {
                Refusal::OtherAct { key, round: header.round, act, said, by }
            }
        })?;
        let fits = if entry.is_restoring() {
            entry.takes_restored(&header)
        } else {
            entry.takes(header.rank, (header.form(), header.length as usize), act)
                && header.flags & FLAG_RESULT == 0
                && header.contributors == entry.groups().size_with(header.rank)
        };
        let shaped = fits
            && header.dtype == entry.dtype
            && header.offset == 0
            && (header.flags & FLAG_SCALED == 0 || entry.may_be_scaled(header.form()))
            && grant.is_none_or(|grant| entry.answers(header.rank, grant.length()));
        if !shaped {
            return Err(Refusal::Shape { key });
        }
        if grant.is_some() && !session.outgoing.takes_grants() {
            return Err(Refusal::Grants);
        }
        let open = entry.open_round(header.rank);
        if header.round.0 != open || entry.has_arrived(header.rank) {
            return Err(Refusal::Round { key, round: header.round, open });
        }
        Ok((header, index))
    }

    /// Lets the payload of this lane come: its key is free.
    fn take(&mut self, lane: LaneId, index: usize, header: Header) {
        let checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        self.checksums |= checked;
        let entry = &mut self.entries[index];
        let (mark, landing) = match entry.begin(lane, header.form(), self.checksums) {
            Take::Land => {
                // SAFETY: just begun, and nothing else of the key is taken or published before the
                // payload is whole (`Entry::free`, `Entry::is_whole`). The claim is given back only
                // once the round is over, or all lanes of the membership have closed; and the
                // endpoint is dropped before the entries and their arena.
                (Mark::Taken, Landing::Into(unsafe { entry.landing(header.length as usize) }))
            }
            Take::Pieces => (Mark::Adding, Landing::Pieces(header.length as usize)),
        };
        self.trace.frame(mark, &header);
        let session = session(&mut self.sessions, lane);
        session.checks |= checked;
        session.receiving =
            Receiving::Payload { entry: index, header, done: 0, checksum: 0, is_late: false };
        self.endpoint.land(lane, landing);
    }

    fn on_piece(&mut self, lane: LaneId, piece: Piece) {
        let session = session(&mut self.sessions, lane);
        let Receiving::Payload { entry, header, done, checksum, is_late } = &mut session.receiving
        else {
            let is_closing = matches!(session.receiving, Receiving::Closing);
            assert!(is_closing, "a piece comes of a payload that was asked for");
            return self.endpoint.consume(lane);
        };
        let index = *entry;
        let length = piece.len();
        // SAFETY: it came with the last poll, its lane was not closed since (which ends what is
        // received), and it is consumed below, after the last use of the value.
        let piece = unsafe { piece.lend() };
        if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
            // SAFETY: as long as the piece is not consumed, nobody in this process writes it.
            *checksum = crc32c_append(*checksum, unsafe { piece.bytes() });
        }
        self.trace.piece(Mark::PieceBegins, header, length);
        let scale = if header.flags & FLAG_SCALED == 0 { 1 } else { scale(header.contributors) };
        if !*is_late {
            self.entries[index].add_piece(self.kernels, *done, piece, scale);
        }
        self.trace.piece(Mark::PieceEnds, header, length);
        *done += length;
        let whole = *done == header.length as usize;
        self.endpoint.consume(lane);
        if whole {
            self.end_payload(lane);
        }
    }

    fn on_landed(&mut self, lane: LaneId) {
        let session = session(&mut self.sessions, lane);
        let Receiving::Payload { entry, header, checksum, .. } = &mut session.receiving else {
            let is_closing = matches!(session.receiving, Receiving::Closing);
            assert!(is_closing, "what has landed was to land, unless its rank has died");
            return;
        };
        let is_checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        if let Some(landed) = self.entries[*entry].landed(is_checked) {
            *checksum = landed;
        }
        self.end_payload(lane);
    }

    fn end_payload(&mut self, lane: LaneId) {
        let session = session(&mut self.sessions, lane);
        let receiving = std::mem::replace(&mut session.receiving, Receiving::Header);
        let Receiving::Payload { entry, header, checksum, is_late, .. } = receiving else {
            unreachable!("a payload that is whole was coming");
        };
        self.counters.bytes_in.add(u64::from(header.length));
        let checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        if checked && header.payload_checksum != checksum {
            // The sum is spoilt, so the round can never be published: the job ends by the report of
            // this refusal.
            return self.refuse(lane, Refusal::Payload { key: header.key, round: header.round });
        }
        if is_late {
            return self.answer_late(lane, entry, &header);
        }
        let scale = if header.flags & FLAG_SCALED == 0 { 1 } else { scale(header.contributors) };
        if let Err(why) = self.entries[entry].add_landed(self.kernels, scale) {
            let Header { key, round, .. } = header;
            return self.refuse(lane, Refusal::Encoding { key, round, why });
        }
        self.trace.frame(Mark::Ended, &header);
        self::session(&mut self.sessions, lane).begun = None;
        self.entries[entry].end(header.rank);
        self.publish_if_whole(entry);
        self.next_in_line(entry);
    }

    fn on_sent(&mut self, lane: LaneId, token: u64) {
        if token == REFUSED {
            return self.endpoint.close(lane);
        }
        if token == ASKED {
            return self.flush(lane);
        }
        self.on_result_sent(lane, token);
    }

    fn refuse(&mut self, lane: LaneId, why: Refusal) {
        let session = session(&mut self.sessions, lane);
        session.receiving = Receiving::Closing;
        self.counters.refused.add(1);
        let rank = session.rank;
        let mut header = Header::new(Kind::Refused, DType::U8, session.rank, session.epoch);
        if let Refusal::Payload { key, round } = why {
            (header.key, header.round) = (key, round);
            header.flags = FLAG_PAYLOAD_CHECKSUM;
        }
        if let Refusal::OtherAct { key, round, said, by, .. } = why {
            (header.key, header.round, header.act) = (key, round, said.word());
            header.contributors = by.0;
        }
        let frame = Frame::bare(header.encode(), REFUSED);
        if self.endpoint.post(lane, &frame).is_err() {
            self.endpoint.close(lane);
        }
        self.report(Report::Refused { rank, why });
    }

    fn on_closed(&mut self, lane: LaneId, cause: Cause) {
        let Some(session) = self.sessions[lane.0 as usize].take() else { return };
        if self.lanes.get(session.rank.0 as usize) == Some(&Some(lane)) {
            self.lanes[session.rank.0 as usize] = None;
        }
        if let Receiving::Parked { entry, .. } = session.receiving {
            self.unpark(lane, entry, session.behind);
        }
        // Unless groups may die, a half-landed payload leaves its key active for ever: its round
        // can't be whole any more, and the report ends the job.
        if let Some(index) = session.begun {
            self.withdraw(index, lane, session.rank);
        }
        self.abandon(&session);
        if let Some(index) = session.begun.filter(|_| self.groups.shrinks()) {
            self.go_on(index);
        }
        let expected = session.goodbye || session.epoch != self.epoch;
        self.report(Report::Closed { rank: session.rank, cause, expected, left: session.left });
    }
}

/// Token of the frame that tells a worker of its refusal.
const REFUSED: u64 = u64::MAX;

/// Token of a frame that asks for a contribution again.
const ASKED: u64 = u64::MAX - 1;

/// Sessions end with `Closed`, the last event of their lane.
const HAS_SESSION: &str = "a lane has a session until it has closed";

fn session(sessions: &mut [Option<Session>], lane: LaneId) -> &mut Session {
    sessions[lane.0 as usize].as_mut().expect(HAS_SESSION)
}
