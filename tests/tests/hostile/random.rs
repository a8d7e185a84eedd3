//! Chance that can be repeated, and the ways in which it spoils bytes.

/// A small generator: the same seed gives the same bytes on every machine.
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end.max(1)).expect("a length fits 64 bits");
        usize::try_from(self.next() % end).expect("it is below a usize")
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }

    /// Changes `bytes` as a broken or ill-willed peer would: flips, overwrites, cuts, repeats.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
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
