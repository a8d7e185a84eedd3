//! The ways in which a broken or ill-willed peer changes bytes.

use bps_engine::transport::sim::Random;

/// Any byte.
pub fn byte(random: &mut Random) -> u8 {
    random.bits().to_le_bytes()[3]
}

/// Changes `bytes`: flips, overwrites, cuts, inserts, repeats.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        let at = random.index(bytes.len());
        match random.below(6) {
            _ if bytes.is_empty() => bytes.push(byte(random)),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = byte(random),
            2 => bytes[at] = [0, 0xff, 0x7f, 0x80][random.index(4)],
            3 => bytes.truncate(at),
            4 => bytes.insert(at, byte(random)),
            _ => bytes.extend_from_within(at..),
        }
    }
}
