//! Two ends of a lane without a device: a simulated wire that delivers in order, completes late,
//! and counts what a real queue would hold.

use super::super::setup::RdmaOptions;
use super::*;
use crate::transport::sim::Random;

fn layout(slot_bytes: usize, slots: usize) -> Layout {
    Layout::new(RdmaOptions { slot_bytes, slots }).unwrap()
}

/// What is on the way to an end, or waits in its completion queue.
#[derive(Clone, Copy)]
enum Message {
    Extent { offset: usize, length: usize, released: u32 },
    Credit { released: u32 },
}

struct End {
    sending: Sending,
    receiving: Receiving,
    /// Sends that the device has not completed, and whether they ask for it.
    device: VecDeque<bool>,
    /// Messages that have arrived and were not looked at: each took a place to receive.
    arrived: VecDeque<Message>,
    /// Payloads still to be sent.
    plan: VecDeque<usize>,
    received: usize,
    /// Runs of our area that the peer wrote and we have not released.
    live: VecDeque<(usize, usize)>,
}

impl End {
    fn new(layout: Layout) -> End {
        End {
            sending: Sending::new(layout),
            receiving: Receiving::new(layout),
            device: VecDeque::new(),
            arrived: VecDeque::new(),
            plan: VecDeque::new(),
            received: 0,
            live: VecDeque::new(),
        }
    }

    /// Posts what fits, as a lane does.
    fn send(&mut self, peer: &mut End) {
        while let Some(&length) = self.plan.front() {
            let Some((at, taken)) = self.sending.find(length) else { break };
            let released = self.receiving.tell();
            let signal = self.sending.publish(at, length, taken, false);
            self.device.push_back(signal);
            for (other, bytes) in &peer.live {
                assert!(at + PREFIX_BYTES + length <= *other || other + bytes <= at, "overlap");
            }
            peer.live.push_back((at, PREFIX_BYTES + length));
            peer.arrived.push_back(Message::Extent { offset: at, length, released });
            self.plan.pop_front();
        }
        if self.receiving.is_due() && self.sending.has_room() {
            let released = self.receiving.tell();
            let signal = self.sending.post(false);
            self.device.push_back(signal);
            peer.arrived.push_back(Message::Credit { released });
        }
        assert!(self.device.len() < SENDS, "the farewell has no place");
    }

    /// The device completes so many sends.
    fn complete(&mut self, count: usize) {
        for signal in self.device.drain(..count.min(self.device.len())) {
            if signal {
                self.sending.handle_completion();
            }
        }
    }

    /// Looks at so many messages.
    fn look(&mut self, count: usize) {
        for message in self.arrived.drain(..count.min(self.arrived.len())) {
            let released = match message {
                Message::Credit { released } => released,
                Message::Extent { offset, length, released } => {
                    let bytes = PREFIX_BYTES + length;
                    self.receiving.check(offset, bytes).unwrap();
                    let prefix = Prefix { first: None, length, released };
                    self.receiving.arrive(offset, bytes, prefix).unwrap();
                    released
                }
            };
            self.sending.handle_released(released).unwrap();
        }
    }

    fn release(&mut self, count: usize) {
        for _ in 0..count {
            let Some(arrived) = self.receiving.next() else { return };
            self.receiving.release(PREFIX_BYTES + arrived.prefix.length);
            self.live.pop_front();
            self.received += 1;
        }
    }
}

#[test]
fn lanes_never_stall_overlap_or_overrun_a_queue() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let layout = layout(4096 << random.index(3), 4 + random.index(5));
        let mut ends = [End::new(layout), End::new(layout)];
        let frames = 400;
        // Every third seed sends in one direction only: then all credit is explicit.
        for end in &mut ends[..if seed % 3 == 0 { 1 } else { 2 }] {
            let sizes = |_| if random.once_in(3) { layout.slot_bytes } else { random.index(300) };
            end.plan = (0..frames).map(sizes).collect();
        }
        let plans = [ends[0].plan.len(), ends[1].plan.len()];
        let mut still = 0;
        while ends[0].received < plans[1] || ends[1].received < plans[0] {
            let before = ends[0].received + ends[1].received;
            for side in 0..2 {
                let (one, two) = ends.split_at_mut(1);
                let (end, peer) = match side {
                    0 => (&mut one[0], &mut two[0]),
                    _ => (&mut two[0], &mut one[0]),
                };
                end.send(peer);
                // An end that is late fills the places of the other.
                assert!(peer.arrived.len() <= 2 * EXTENTS, "no place to receive");
                end.complete(random.index(40));
                end.look(random.index(60));
                end.release(random.index(10));
            }
            let moved = ends[0].received + ends[1].received > before;
            still = if moved { 0 } else { still + 1 };
            assert!(still < 2000, "seed {seed} stalls");
        }
    }
}

#[test]
fn one_extent_of_a_slot_at_a_time_always_fits() {
    let layout = layout(4096, 4);
    let (mut one, mut two) = (End::new(layout), End::new(layout));
    one.plan = std::iter::repeat_n(layout.slot_bytes, 1000).collect();
    for _ in 0..1000 {
        one.send(&mut two);
        one.complete(SENDS);
        two.look(RECEIVES);
        two.release(EXTENTS);
        two.send(&mut one);
        two.complete(SENDS);
        one.look(RECEIVES);
    }
    assert_eq!(two.received, 1000);
}

#[test]
fn every_part_of_what_a_peer_says_is_checked() {
    let layout = layout(4096, 4);
    let receiving = Receiving::new(layout);
    let end = layout.area_bytes();
    assert_eq!(receiving.check(end - PREFIX_BYTES, PREFIX_BYTES), Ok(()));
    for (offset, bytes) in [
        (0, PREFIX_BYTES - 1),
        (0, 0),
        (end - PREFIX_BYTES, PREFIX_BYTES + 1),
        (end, PREFIX_BYTES),
        (usize::MAX - 63, PREFIX_BYTES),
        (0, end + 1),
    ] {
        assert_eq!(receiving.check(offset, bytes), Err(BROKEN), "{offset} {bytes}");
    }
    let prefix = Prefix { first: None, length: 64, released: 0 };
    let mut receiving = Receiving::new(layout);
    assert_eq!(receiving.arrive(0, PREFIX_BYTES + 63, prefix), Err(BROKEN));
    for _ in 0..EXTENTS {
        receiving.check(0, PREFIX_BYTES + 64).unwrap();
        receiving.arrive(0, PREFIX_BYTES + 64, prefix).unwrap();
    }
    assert_eq!(receiving.check(0, PREFIX_BYTES + 64), Err(BROKEN), "more than was granted");
    let mut sending = Sending::new(layout);
    assert_eq!(sending.handle_released(1), Err(BROKEN), "nothing was sent");
    assert_eq!(sending.handle_released(COUNT_MASK), Err(BROKEN));
    for (length, left) in [(64, 63), (63, 64), (0, 64), (1, 0), (64, PART_BYTES_MAX + 1)] {
        let prefix = Prefix { first: None, length, released: 0 };
        assert_eq!(prefix.check(left), Err(BROKEN), "{length} of {left}");
    }
}

#[test]
fn prefixes_and_notices_survive_the_wire() {
    let mut random = Random::new(5);
    for _ in 0..1000 {
        let header = std::array::from_fn(|_| random.bits().to_le_bytes()[0]);
        let first = random.once_in(2).then_some((header, random.index(PART_BYTES_MAX)));
        let length = random.index(1 << 20);
        let released = low_count(random.bits());
        let prefix = Prefix { first, length, released };
        assert_eq!(Prefix::decode(&prefix.encode()), prefix);
        let offset = random.index(1 << 20) * ALIGNMENT;
        for notice in [Notice::Extent { offset }, Notice::Credit { released }, Notice::Farewell] {
            assert_eq!(Notice::decode(notice.encode()), Some(notice));
        }
    }
    assert_eq!(Notice::decode(u32::MAX), None);
    assert_eq!(Notice::decode((2 << COUNT_BITS) + 1), None);
}

#[test]
fn credit_counts_go_round() {
    let layout = layout(4096, 4);
    let (mut one, mut two) = (End::new(layout), End::new(layout));
    let start = (1u64 << COUNT_BITS) - 100;
    for counter in [&mut one.sending.published, &mut one.sending.released] {
        *counter = start;
    }
    (one.sending.completed, one.sending.freed) = (start, start);
    (two.receiving.arrived, two.receiving.released, two.receiving.told) = (start, start, start);
    one.plan = std::iter::repeat_n(10, 500).collect();
    for _ in 0..500 {
        one.send(&mut two);
        one.complete(SENDS);
        two.look(RECEIVES);
        two.release(EXTENTS);
        two.send(&mut one);
        two.complete(SENDS);
        one.look(RECEIVES);
    }
    assert_eq!(two.received, 500);
}
