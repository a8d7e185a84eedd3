//! Answers that are written straight to where they were granted, or as other frames where that
//! can't be, and what a peer that breaks the rules comes to.

use super::*;

const OTHER: LaneId = LaneId(1);
const BYTES: usize = 20_000;
const GUARD: u8 = 0xee;

/// A worker and a server with two lanes between them. The worker's memory has an end that is not
/// registered; the server's is registered if it is said so.
struct Ends {
    worker: Rdma,
    server: Rdma,
    landing: Vec<u8>,
    result: Vec<u8>,
    /// The grant that came with the last header.
    grant: Option<Grant>,
    answered: Vec<u64>,
    /// Those that came as other frames, and how many of them have landed.
    declined: Vec<u64>,
    received: usize,
    landed: usize,
    closed: Vec<(&'static str, LaneId, Cause)>,
}

impl Ends {
    fn new(name: &str, is_registered: bool, message_bytes: u32) -> Ends {
        let (here, there) = (Fake::new(name), Fake::new(&format!("server of {name}")));
        there.message_bytes.store(message_bytes, SeqCst);
        let rails = [here.rails(false), there.rails(false)];
        let [mut worker, mut server] = pair(&rails[0], &rails[1]);
        let (dialed, accepted) = links(&rails[0], &rails[1]);
        worker.attach(OTHER, Link::Rdma(Box::new(dialed.unwrap()))).unwrap();
        server.attach(OTHER, Link::Rdma(Box::new(accepted.unwrap()))).unwrap();
        let result = (0..BYTES).map(|at| (at % 253).to_le_bytes()[0]).collect();
        let mut ends = Ends {
            worker,
            server,
            landing: vec![GUARD; BYTES + 100],
            result,
            grant: None,
            answered: Vec::new(),
            declined: Vec::new(),
            received: 0,
            landed: 0,
            closed: Vec::new(),
        };
        let landing = NonNull::new(ends.landing.as_mut_ptr()).unwrap();
        let result = NonNull::from(&ends.result[0]);
        // SAFETY: the memory outlives the drivers, which come before it.
        unsafe {
            ends.worker.register_landing(landing, BYTES).unwrap();
            if is_registered {
                ends.server.register(result, BYTES).unwrap();
            }
        }
        ends
    }

    /// Sends a frame whose answer is to land at the front of the memory.
    fn ask(&mut self, lane: LaneId, token: u64) {
        let into = self.landing();
        assert!(self.worker.grants(lane, into));
        let answer = Answer::Wanted { into, token };
        let frame = Frame { answer, ..Frame::bare([5; 64], 0) };
        self.worker.post(lane, &frame).unwrap();
        self.turn();
    }

    fn answer(&mut self, lane: LaneId, grant: Grant) {
        self.post_answer(lane, grant);
        self.turn();
    }

    fn post_answer(&mut self, lane: LaneId, grant: Grant) {
        // SAFETY: nothing changes the result, which lives as long as the server.
        let payload = unsafe { Readable::of(&self.result[..grant.length()]) };
        let frame = Frame::new([6; 64], payload, 0);
        self.server.post(lane, &Frame { answer: Answer::To(grant), ..frame }).unwrap();
    }

    /// Where answers land.
    fn landing(&mut self) -> Writable {
        // SAFETY: the tests look at it and change it only while nothing is granted or landing.
        unsafe { Writable::of(&mut self.landing[..BYTES]) }
    }

    /// As often as everything that is under way needs.
    fn turn(&mut self) {
        for _ in 0..20 {
            let mut events = [Vec::new(), Vec::new()];
            self.worker.poll(&mut events[0]);
            self.server.poll(&mut events[1]);
            let [from_worker, from_server] = &events;
            for event in from_worker {
                match *event {
                    Event::Answered { token, .. } => self.answered.push(token),
                    Event::Closed { lane, cause } => self.closed.push(("worker", lane, cause)),
                    Event::Header { lane, carried: Carried::Declined(token), .. } => {
                        self.declined.push(token);
                        let into = self.landing();
                        self.worker.land(lane, Landing::Into(into));
                    }
                    Event::Header { lane, .. } => self.worker.land(lane, Landing::NOTHING),
                    Event::Landed { .. } => self.received += 1,
                    _ => {}
                }
            }
            for event in from_server {
                match *event {
                    Event::Header { lane, carried, .. } => {
                        (self.grant, self.landed) = (carried.grant(), self.landed + 1);
                        self.server.land(lane, Landing::NOTHING);
                    }
                    Event::Closed { lane, cause } => self.closed.push(("server", lane, cause)),
                    _ => {}
                }
            }
            self.worker.arm();
            self.server.arm();
        }
    }

    #[track_caller]
    fn has_result(&self, rounds: u64, is_straight: bool) {
        assert!(self.landing[..BYTES] == self.result, "the result is wrong");
        assert!(self.landing[BYTES..].iter().all(|byte| *byte == GUARD), "more was written");
        let (tokens, none) = ((1..=rounds).collect::<Vec<u64>>(), Vec::new());
        let expected = if is_straight { (tokens, none, 0) } else { (none, tokens, rounds) };
        let found = (&self.answered, &self.declined, self.received as u64);
        assert_eq!(found, (&expected.0, &expected.1, expected.2));
        let copied = if is_straight { 0 } else { rounds * BYTES as u64 };
        let (worker, server) = (self.worker.rails.counters(), self.server.rails.counters());
        assert_eq!(worker.copied_bytes.load(SeqCst), copied);
        let answers = if is_straight { rounds } else { 0 };
        assert_eq!(server.answers.load(SeqCst), answers);
        assert_eq!((&self.closed[..], self.landed as u64), (&[][..], rounds));
    }
}

#[test]
fn an_answer_is_one_write_straight_to_where_it_was_granted() {
    let mut ends = Ends::new("straight", true, 1 << 30);
    let rounds = 200;
    for round in 1..=rounds {
        ends.landing[..BYTES].fill(0);
        ends.ask(LANE, round);
        let grant = ends.grant.take().expect("the server is told");
        ends.answer(LANE, grant);
    }
    ends.has_result(rounds, true);
    let server = ends.server.rails.counters();
    let sends = server.sends.load(SeqCst) - server.credits.load(SeqCst);
    assert_eq!((sends, server.staged_bytes.load(SeqCst)), (rounds, 0));
    assert_eq!(server.extents.load(SeqCst), 0, "nothing goes through the area");
}

#[test]
fn an_answer_that_cannot_go_straight_comes_as_a_frame_and_gives_the_memory_back() {
    for (name, is_registered, message_bytes) in
        [("unregistered result", false, 1 << 30), ("short messages", true, 10_000)]
    {
        let mut ends = Ends::new(name, is_registered, message_bytes);
        for round in 1..=70 {
            ends.landing[..BYTES].fill(0);
            ends.ask(LANE, round);
            let grant = ends.grant.take().unwrap();
            ends.answer(LANE, grant);
        }
        ends.has_result(70, false);
    }
}

#[test]
fn only_registered_memory_is_granted_and_no_more_than_there_are_places() {
    let mut ends = Ends::new("places", true, 1 << 30);
    let into = ends.landing();
    // SAFETY: what is refused is not used, and in the vectors or nobody's.
    let lent = |at, length| unsafe { Writable::new(at, length) };
    assert!(!ends.worker.grants(LANE, lent(into.as_ptr(), BYTES + 1)));
    assert!(!ends.worker.grants(LANE, lent(into.as_ptr().wrapping_sub(64), BYTES)));
    assert!(!ends.worker.grants(LANE, into.part(0, 1024)), "it would be copied anyway");
    assert!(!ends.worker.grants(LaneId(2), into), "no such lane");
    let result = lent(ends.result.as_mut_ptr(), BYTES);
    assert!(!ends.server.grants(LANE, result), "it is only sent from");
    let mut grants = Vec::new();
    for token in 0..64 {
        ends.ask(LANE, token);
        grants.extend(ends.grant.take());
    }
    assert!(!ends.worker.grants(LANE, into), "all places are taken");
    assert!(ends.worker.grants(OTHER, into), "those of this lane only");
    for grant in grants.into_iter().rev() {
        ends.answer(LANE, grant);
    }
    assert_eq!(ends.answered, (0..64).rev().collect::<Vec<u64>>());
    assert!(ends.worker.grants(LANE, into));
}

#[test]
fn a_grant_that_the_device_refuses_ends_this_lane_only() {
    for (name, spoil) in [
        ("bad key", (|grant| grant.key ^= 0x5a5a) as fn(&mut Grant)),
        ("bad address", |grant| grant.address += 200),
        ("wild address", |grant| grant.address = u64::MAX - 100),
    ] {
        let mut ends = Ends::new(name, true, 1 << 30);
        ends.ask(LANE, 1);
        let mut grant = ends.grant.take().unwrap();
        spoil(&mut grant);
        ends.answer(LANE, grant);
        assert!(ends.landing.iter().all(|byte| *byte == GUARD), "{name}: something was written");
        let of = |end| ends.closed.iter().find(|closed| closed.0 == end).unwrap();
        let (server, worker) = (of("server"), of("worker"));
        assert_eq!((server.1, server.2), (LANE, Cause::Rdma { status: 10 }), "{name}");
        assert!(server.2.to_string().contains("does not allow access"), "{}", server.2);
        let told = Cause::RdmaEvent { event: ffi::EVENT_QP_ACCESS_ERR };
        assert_eq!((worker.1, worker.2), (LANE, told), "{name}");
        assert_eq!(ends.closed.len(), 2, "{name}: {:?}", ends.closed);
        ends.ask(OTHER, 7);
        let grant = ends.grant.take().unwrap();
        ends.answer(OTHER, grant);
        assert_eq!(ends.answered, [7]);
        assert!(ends.landing[..BYTES] == ends.result);
    }
}

#[test]
fn an_answer_that_nobody_granted_ends_the_lane_of_who_sent_it() {
    let stranger = Grant { number: 3, key: 1, address: 1, length: 20_000 };
    let mut ends = Ends::new("stranger", false, 1 << 30);
    ends.answer(LANE, stranger);
    assert_eq!(ends.closed[0], ("worker", LANE, error::BROKEN));
    assert!(ends.landing.iter().all(|byte| *byte == GUARD));
    // The same by a write to memory that may be written to: it is not believed.
    let mut ends = Ends::new("stranger's write", true, 1 << 30);
    ends.ask(LANE, 1);
    let grant = ends.grant.take().unwrap();
    ends.answer(LANE, Grant { number: 4, ..grant });
    assert_eq!((&ends.answered[..], ends.closed[0]), (&[][..], ("worker", LANE, error::BROKEN)));
}

#[test]
fn memory_of_a_lane_that_has_ended_is_written_to_no_more() {
    let mut ends = Ends::new("ended", true, 1 << 30);
    ends.ask(LANE, 1);
    let grant = ends.grant.take().unwrap();
    // The result is posted, and not yet with the device, when the worker's end closes.
    ends.post_answer(LANE, grant);
    ends.worker.close(LANE);
    let mut events = Vec::new();
    for _ in 0..10 {
        ends.worker.poll(&mut events);
    }
    assert!(matches!(events[..], [Event::Closed { cause: Cause::Local, .. }]), "{events:?}");
    ends.landing.fill(GUARD);
    ends.turn();
    assert!(ends.landing.iter().all(|byte| *byte == GUARD), "its memory is the caller's again");
    assert_eq!(ends.closed.len(), 1, "{:?}", ends.closed);
    ends.worker.close(OTHER);
    ends.turn();
    ends.worker.unregister();
}
