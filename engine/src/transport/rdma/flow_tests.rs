//! Two ends of a lane without a device: a simulated wire that delivers in order, completes late,
//! and counts what a real queue would hold.

use super::super::layout::{RECEIVES, RdmaOptions};
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
                    let prefix = Prefix { first: None, length, released, said: Said::Nothing };
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
            let Arrived::Extent { prefix, .. } = arrived else { panic!("no answer was sent") };
            self.receiving.release(PREFIX_BYTES + prefix.length);
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
    let prefix = Prefix { first: None, length: 64, released: 0, said: Said::Nothing };
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
        let prefix = Prefix { first: None, length, released: 0, said: Said::Nothing };
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
        let grant = Grant {
            number: u8::try_from(random.index(GRANTS)).unwrap(),
            key: low_word(random.bits()),
            address: random.bits(),
            length: 1 + low(random.index(PART_BYTES_MAX)),
        };
        let said = match random.index(3) {
            1 if first.is_some() => Said::Grants(grant),
            2 if first.is_some() => Said::Answers(grant.number),
            _ => Said::Nothing,
        };
        let prefix = Prefix { first, length, released, said };
        assert_eq!(Prefix::decode(&prefix.encode()), Ok(prefix));
        let offset = random.index(1 << 20) * ALIGNMENT;
        let answer = Notice::Answer { number: grant.number, released: released & ANSWER_MASK };
        let credit = Notice::Credit { released };
        for notice in [Notice::Extent { offset }, credit, answer, Notice::Farewell] {
            assert_eq!(Notice::decode(notice.encode()), Some(notice));
        }
    }
    assert_eq!(Notice::decode((2 << COUNT_BITS) + 1), None);
}

#[test]
fn grants_of_a_peer_are_bounded() {
    let good = Grant { number: 63, key: 1, address: u64::MAX, length: 64 << 20 };
    let prefix = |first: bool, said| {
        let first = first.then_some(([0; HEADER_BYTES], 0));
        Prefix { first, length: 0, released: 0, said }
    };
    assert!(Prefix::decode(&prefix(true, Said::Grants(good)).encode()).is_ok());
    for (first, said) in [
        (false, Said::Grants(good)),
        (false, Said::Answers(0)),
        (true, Said::Grants(Grant { number: 64, ..good })),
        (true, Said::Grants(Grant { length: 0, ..good })),
        (true, Said::Grants(Grant { length: (64 << 20) + 1, ..good })),
    ] {
        assert_eq!(Prefix::decode(&prefix(first, said).encode()), Err(BROKEN), "{said:?}");
    }
    let mut both = prefix(true, Said::Grants(good)).encode();
    for flags in [6, 7, 8, 255] {
        both[HEADER_BYTES] = flags;
        assert_eq!(Prefix::decode(&both), Err(BROKEN), "flags {flags}");
    }
}

#[test]
fn answers_count_releases_in_fewer_bits() {
    let mut sending = Sending::new(layout(4096, 4));
    (sending.published, sending.released) = (ANSWER_MASK.into(), u64::from(ANSWER_MASK) - 5);
    (sending.freed, sending.completed) = (sending.released, sending.published);
    sending.published += 3;
    assert_eq!(sending.handle_released_low(2), Ok(()), "it goes round");
    assert_eq!(sending.released, u64::from(ANSWER_MASK) + 3);
    assert_eq!(sending.handle_released_low(3), Err(BROKEN), "more than was sent");
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
