//! Bytes from a stranger: whatever they are, decoding them ends in a value or an error, never in a
//! panic, and what is accepted means what it says.

use bps_engine::base::{CoreId, DType, Epoch, Key, Operation, Placement, Rank, Round};
use bps_engine::proto::messages::{
    Declaration, Node, NodeMessage, Part, Planning, Register, SchedulerMessage,
};
use bps_engine::wire::{Header, Kind, RawHeader, header::FLAG_PAYLOAD_CHECKSUM};

/// Byte strings that each decoder is given.
const ROUNDS: u32 = 100_000;

/// A small generator: the same seed gives the same bytes on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end.max(1)).expect("a length fits 64 bits");
        usize::try_from(self.next() % end).expect("it is below a usize")
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }

    /// Changes `bytes` as a broken or ill-willed peer would: flips, overwrites, cuts, repeats.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                _ if bytes.is_empty() => bytes.push(self.byte()),
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.byte(),
                2 => bytes[at] = [0, 0xff, 0x7f, 0x80][self.below(4)],
                3 => bytes.truncate(at),
                4 => bytes.insert(at, self.byte()),
                _ => bytes.extend_from_within(at..),
            }
        }
    }
}

fn header(random: &mut Random) -> Header {
    let kinds = [Kind::Contribution, Kind::Publication, Kind::Goodbye, Kind::Refused];
    let small = |random: &mut Random| u32::try_from(random.below(1 << 20)).expect("20 bits");
    Header {
        kind: kinds[random.below(kinds.len())],
        flags: if random.below(2) == 0 { 0 } else { FLAG_PAYLOAD_CHECKSUM },
        dtype: DType::ALL[random.below(DType::ALL.len())],
        rank: Rank(small(random)),
        epoch: Epoch(small(random)),
        key: Key(random.next()),
        round: Round(random.next()),
        offset: random.next(),
        length: small(random),
        contributors: small(random),
        payload_checksum: small(random),
    }
}

#[test]
fn a_header_is_refused_or_is_exactly_what_it_says() {
    let mut random = Random(0x5eed_0001);
    let mut accepted = 0;
    for round in 0..ROUNDS {
        let mut bytes = header(&mut random).encode().to_vec();
        match round % 4 {
            0 => bytes.iter_mut().for_each(|byte| *byte = random.byte()),
            1 => {} // As it was sent.
            2 => {
                // An attacker can compute checksums too: every field is on its own then.
                random.mutate(&mut bytes);
                bytes.resize(64, 0);
                let checksum = crc32c(&bytes[..60]);
                bytes[60..].copy_from_slice(&checksum.to_le_bytes());
            }
            _ => random.mutate(&mut bytes),
        }
        bytes.resize(64, 0);
        let raw: RawHeader = bytes.try_into().expect("resized to 64 bytes");
        match Header::decode(&raw) {
            Ok(header) => {
                accepted += 1;
                assert_eq!(header.encode(), raw, "round {round}: {header:?} hides something");
            }
            Err(invalid) => assert!(!invalid.to_string().is_empty()),
        }
    }
    assert!(accepted >= ROUNDS / 4, "only {accepted} whole headers were accepted");
}

/// CRC-32C bit by bit: another implementation than the one under test.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

fn node_messages() -> Vec<String> {
    let planning = Planning {
        partition_bytes: 1 << 20,
        placement: Placement::Balanced,
        mixed_bound: 101,
        built_in_coefficient: 1,
    };
    let register = Register {
        node: Node::Worker {
            worker_id: 0,
            local_rank: 1,
            local_size: 2,
            global_rank: None,
            planning,
        },
        host: "host".into(),
        host_id: "boot".into(),
        pid: 4711,
        release: "0.1.0".into(),
        num_workers: 1,
        num_servers: 1,
    };
    let declaration = Declaration {
        name: "layer4.weight".into(),
        dtype: DType::BF16,
        count: 1 << 20,
        operation: Operation::Broadcast(Rank(3)),
    };
    [
        NodeMessage::Register(register),
        NodeMessage::Heartbeat { rounds: 812 },
        NodeMessage::Declare { request: 7, tensors: vec![declaration] },
        NodeMessage::Barrier { request: 8 },
        NodeMessage::Stalled { keys: Vec::new() },
        NodeMessage::Failed { message: "a message".into() },
        NodeMessage::Leave { suspend: true },
    ]
    .iter()
    .map(|message| serde_json::to_string(message).expect("messages are plain data"))
    .collect()
}

#[test]
fn a_control_message_is_refused_or_can_be_said_again() {
    let mut random = Random(0x5eed_0002);
    let messages = node_messages();
    let mut accepted = 0;
    for _ in 0..ROUNDS {
        let mut bytes = messages[random.below(messages.len())].clone().into_bytes();
        random.mutate(&mut bytes);
        if let Ok(message) = serde_json::from_slice::<NodeMessage>(&bytes) {
            accepted += 1;
            let said = serde_json::to_vec(&message).expect("messages are plain data");
            let again: NodeMessage = serde_json::from_slice(&said).expect("it was just said");
            assert_eq!(message, again);
        }
        drop(serde_json::from_slice::<SchedulerMessage>(&bytes));
    }
    assert!(accepted > 0, "no mutation survived: the mutations are too coarse to test anything");
}

#[test]
fn deep_nesting_ends_in_an_error_and_not_in_a_full_stack() {
    let deep = "[".repeat(1 << 20);
    assert!(serde_json::from_str::<NodeMessage>(&deep).is_err());
    let part = Part { key: Key(1), offset: 0, bytes: 4, core: CoreId { server: 0, core: 0 } };
    let said =
        serde_json::to_string(&part).expect("plain data").replace("\"bytes\":4", "\"bytes\":-4");
    assert!(serde_json::from_str::<Part>(&said).is_err(), "a negative size was accepted");
}
