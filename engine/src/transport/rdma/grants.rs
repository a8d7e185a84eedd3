//! Memory that this end lets its peer write answers to, without a device: which places are open,
//! and for whom.
//!
//! The peer says of each answer which place it fills. Invariant: what it says is believed only of a
//! place that is open, not filled yet, and of this length; so the worst that a peer does to the
//! caller is wrong bytes in an answer.

#![forbid(unsafe_code)]

use super::error::BROKEN;
use crate::limits::GRANTS_MAX;
use crate::transport::{Cause, Grant};

/// Places of a lane that may be open.
pub(super) const GRANTS: usize = GRANTS_MAX;

/// Memory of the caller that an answer may be written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Open {
    pub(super) length: usize,
    /// By which the caller knows it.
    pub(super) token: u64,
    /// The peer's device has written the answer.
    is_filled: bool,
}

/// See the [module](self).
pub(super) struct Grants {
    places: [Option<Open>; GRANTS],
    count: usize,
}

impl Grants {
    pub(super) fn new() -> Grants {
        Grants { places: [None; GRANTS], count: 0 }
    }

    /// Whether one more may be opened.
    pub(super) fn has_room(&self) -> bool {
        self.count < GRANTS
    }

    /// Opens a place for an answer of this length, of 1 byte to a part's; the key is that by which
    /// devices know the memory. There must be room.
    pub(super) fn open(&mut self, at: usize, length: usize, key: u32, token: u64) -> Grant {
        let free = self.places.iter().position(Option::is_none);
        let number = free.expect("whoever asks for an answer has seen that there is room");
        self.places[number] = Some(Open { length, token, is_filled: false });
        self.count += 1;
        Grant {
            number: u8::try_from(number).expect("there are few places"),
            key,
            address: at as u64,
            length: u32::try_from(length).expect("an answer is never larger than a part"),
        }
    }

    /// The peer's device has filled a place with so many bytes.
    pub(super) fn fill(&mut self, number: u8, bytes: usize) -> Result<(), Cause> {
        match self.places.get_mut(usize::from(number)) {
            Some(Some(open)) if open.length == bytes && !open.is_filled => {
                open.is_filled = true;
                Ok(())
            }
            _ => Err(BROKEN),
        }
    }

    /// Closes a place that the peer's device has filled.
    pub(super) fn close_filled(&mut self, number: u8) -> Result<Open, Cause> {
        self.close(number, |open| open.is_filled)
    }

    /// Closes a place for which an answer of this length comes by another way.
    pub(super) fn close_unfilled(&mut self, number: u8, length: usize) -> Result<Open, Cause> {
        self.close(number, |open| !open.is_filled && open.length == length)
    }

    fn close(&mut self, number: u8, fits: impl Fn(&Open) -> bool) -> Result<Open, Cause> {
        let place = self.places.get_mut(usize::from(number)).ok_or(BROKEN)?;
        let open = place.filter(fits).ok_or(BROKEN)?;
        *place = None;
        self.count -= 1;
        Ok(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_open_places_are_filled_once_and_with_the_length_that_was_granted() {
        let mut grants = Grants::new();
        assert_eq!(grants.fill(0, 10), Err(BROKEN), "nothing is open");
        let numbers: Vec<u8> =
            (0..GRANTS).map(|at| grants.open(1000 + at, 10, 7, at as u64).number).collect();
        assert!(!grants.has_room());
        for (at, number) in numbers.iter().enumerate() {
            assert_eq!(grants.close_filled(*number), Err(BROKEN), "it was not filled");
            assert_eq!(grants.fill(*number, 9), Err(BROKEN));
            assert_eq!(grants.close_unfilled(*number, 9), Err(BROKEN));
            assert_eq!(grants.fill(*number, 10), Ok(()));
            assert_eq!(grants.fill(*number, 10), Err(BROKEN), "twice");
            assert_eq!(grants.close_unfilled(*number, 10), Err(BROKEN), "it was filled");
            let open = grants.close_filled(*number).unwrap();
            assert_eq!(open.token, at as u64);
            assert_eq!(grants.close_filled(*number), Err(BROKEN), "twice");
        }
        let grant = grants.open(5, 64, 9, 3);
        assert_eq!((grant.key, grant.address, grant.length()), (9, 5, 64));
        assert_eq!(grants.close_unfilled(grant.number, 64).unwrap().token, 3);
        assert_eq!(grants.fill(u8::MAX, 64), Err(BROKEN));
    }
}
