//! The sum of what a process will take, addend by addend, before it takes it.

#![forbid(unsafe_code)]

use super::{Headroom, MemoryError};
use crate::trace::log;

/// One line of the sum.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Addend {
    name: String,
    count: u64,
    size_bytes: u64,
}

/// Collects what is needed, says it, and checks that it can be had.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Budget {
    addends: Vec<Addend>,
}

impl Budget {
    /// An empty sum.
    #[must_use]
    pub fn new() -> Budget {
        Budget::default()
    }

    /// Adds `count` things of `size_bytes` each, such as ("slots of core 0", 16, 1 MiB).
    pub fn add(&mut self, name: &str, count: u64, size_bytes: u64) {
        self.addends.push(Addend { name: name.to_owned(), count, size_bytes });
    }

    /// The sum in bytes. It saturates: what does not fit 64 bits does not fit any machine.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.addends
            .iter()
            .fold(0, |sum, a| sum.saturating_add(a.count.saturating_mul(a.size_bytes)))
    }

    /// A line for each addend and one for the sum.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let sum = format!("memory: {} in all", human(self.total_bytes()));
        self.addends
            .iter()
            .map(|a| {
                let bytes = a.count.saturating_mul(a.size_bytes);
                format!(
                    "memory: {}: {} x {} = {}",
                    a.name,
                    a.count,
                    human(a.size_bytes),
                    human(bytes)
                )
            })
            .chain(std::iter::once(sum))
    }

    /// Prints the lines.
    pub fn print(&self) {
        for line in self.lines() {
            log::info!("{line}");
        }
    }

    /// Whether the sum can be had.
    ///
    /// # Errors
    /// What [`Headroom::check`] says of it.
    pub fn check(&self, headroom: &Headroom) -> Result<(), MemoryError> {
        headroom.check("the memory budget", self.total_bytes())
    }
}

/// Bytes in the largest unit that leaves at least 1, with one decimal unless it is exact.
fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut power = 0;
    while power + 1 < UNITS.len() && bytes >> (10 * (power + 1)) > 0 {
        power += 1;
    }
    let unit = 1u64 << (10 * power);
    let whole = bytes / unit;
    let tenths = (bytes % unit).saturating_mul(10) / unit;
    if bytes.is_multiple_of(unit) {
        format!("{whole} {}", UNITS[power])
    } else {
        format!("{whole}.{tenths} {}", UNITS[power])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_and_says_so() {
        let mut budget = Budget::new();
        budget.add("scratch of core 0", 2, 256 << 10);
        budget.add("accumulators", 3, 1 << 20);
        assert_eq!(budget.total_bytes(), (512 << 10) + (3 << 20));
        assert_eq!(
            budget.lines().collect::<Vec<_>>(),
            [
                "memory: scratch of core 0: 2 x 256 KiB = 512 KiB",
                "memory: accumulators: 3 x 1 MiB = 3 MiB",
                "memory: 3.5 MiB in all",
            ]
        );
        let headroom = Headroom { ram: Some((4 << 20, 8 << 20)), control_group: None };
        assert!(budget.check(&headroom).is_ok());
        budget.add("staging", u64::MAX, 2);
        assert_eq!(budget.total_bytes(), u64::MAX);
        assert!(budget.check(&headroom).is_err());
    }

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 30) - 1, "1023.9 MiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
