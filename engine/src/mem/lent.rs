//! Memory that its owner lends to another part of the engine: the payload of a frame, the place
//! where one lands.
//!
//! A value of these types is the proof that the memory may be used. Whoever makes one knows the
//! owner and gives the argument, once; whoever holds one relies on it and takes no raw address from
//! anybody. They are an address and a length, and are passed by value.
//!
//! How long a loan lasts is the same for all: from the making of the value until its holder says
//! that it is done with the memory. A transport says so by an event
//! ([`crate::transport`]).

use crate::team::Team;
use std::ptr::NonNull;

/// Bytes that their holder may read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readable {
    at: *const u8,
    length: usize,
}

/// Bytes that their holder may read and write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writable {
    at: *mut u8,
    length: usize,
}

// SAFETY: what `Readable::new` asks of its caller does not depend on the thread that reads.
unsafe impl Send for Readable {}
// SAFETY: a shared reference gives what a copy gives, and a copy may go to any thread.
unsafe impl Sync for Readable {}
// SAFETY: what `Writable::new` asks of its caller does not depend on the thread that writes.
unsafe impl Send for Writable {}
// SAFETY: a shared reference gives what a copy gives, and a copy may go to any thread.
unsafe impl Sync for Writable {}

impl Readable {
    /// No bytes.
    pub const EMPTY: Readable = Readable { at: std::ptr::null(), length: 0 };

    /// Lends `length` bytes from `at` on to a reader. The address needs no alignment.
    ///
    /// # Safety
    /// Until every holder of the value or of a copy is done with it:
    /// - the bytes are initialised and valid for reads;
    /// - nobody writes them, except a holder that was lent the same bytes as [`Writable`] too.
    ///
    /// If `length` is 0, the address is never followed and may be any. Bytes of a GPU's memory,
    /// which no processor can read, are only lent to a transport that was told of that memory
    /// ([`Driver::register_memory`](crate::transport::Driver::register_memory)).
    #[must_use]
    pub unsafe fn new(at: *const u8, length: usize) -> Readable {
        Readable { at, length }
    }

    /// Copies all of it, on this thread and perhaps on helpers of its team.
    ///
    /// # Safety
    /// Both are lent to the caller in the host's memory until this returns, have one length and do
    /// not overlap.
    pub unsafe fn copy_to(self, target: Writable, team: &Team) {
        team.share(self.length, |range| {
            let length = range.len();
            let (from, to) = (self.part(range.start, length), target.part(range.start, length));
            // SAFETY: the caller's promise, of a part that no other thread has.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), length) };
        });
    }

    /// Lends a slice, for longer than it is borrowed.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[must_use]
    pub unsafe fn of(bytes: &[u8]) -> Readable {
        // SAFETY: the caller keeps the contract of `new`.
        unsafe { Readable::new(bytes.as_ptr(), bytes.len()) }
    }

    /// The first byte.
    #[must_use]
    pub fn as_ptr(self) -> *const u8 {
        self.at
    }

    /// How many bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.length
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// `length` of the bytes, from this one on.
    ///
    /// # Panics
    /// There are not so many.
    #[must_use]
    pub fn part(self, offset: usize, length: usize) -> Readable {
        check(self.length, offset, length);
        Readable { at: self.at.wrapping_add(offset), length }
    }

    /// The bytes behind the first `count`.
    ///
    /// # Panics
    /// There are not so many.
    #[must_use]
    pub fn behind(self, count: usize) -> Readable {
        self.part(count, self.length.saturating_sub(count))
    }

    /// The bytes as a slice.
    ///
    /// # Safety
    /// They are in the host's memory. As long as the slice lives, the loan lasts and nobody writes
    /// the bytes.
    #[must_use]
    pub unsafe fn bytes<'loan>(self) -> &'loan [u8] {
        let at = NonNull::new(self.at.cast_mut()).filter(|_| self.length > 0);
        let at = at.unwrap_or(NonNull::dangling());
        // SAFETY: `new` was promised that the bytes are valid and initialised, and the caller that
        // they stay so and unchanged; without bytes, any aligned address will do.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.length) }
    }
}

impl From<&'static [u8]> for Readable {
    fn from(bytes: &'static [u8]) -> Readable {
        Readable { at: bytes.as_ptr(), length: bytes.len() }
    }
}

impl Writable {
    /// Lends `length` bytes from `at` on to a writer. The address needs no alignment.
    ///
    /// # Safety
    /// Until every holder of the value or of a copy is done with it, the bytes are initialised and
    /// valid for reads and writes, and nobody else reads or writes them.
    ///
    /// If `length` is 0, the address is never followed and may be any. Bytes of a GPU's memory,
    /// which no processor can write, are only lent to a transport that was told of that memory, as
    /// the place of an [answer](crate::transport::Answer::Wanted).
    #[must_use]
    pub unsafe fn new(at: *mut u8, length: usize) -> Writable {
        Writable { at, length }
    }

    /// Lends a slice, for longer than it is borrowed.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[must_use]
    pub unsafe fn of(bytes: &mut [u8]) -> Writable {
        // SAFETY: the caller keeps the contract of `new`.
        unsafe { Writable::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// The first byte.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        self.at
    }

    /// How many bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.length
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// `length` of the bytes, from this one on.
    ///
    /// # Panics
    /// There are not so many.
    #[must_use]
    pub fn part(self, offset: usize, length: usize) -> Writable {
        check(self.length, offset, length);
        Writable { at: self.at.wrapping_add(offset), length }
    }

    /// The bytes behind the first `count`.
    ///
    /// # Panics
    /// There are not so many.
    #[must_use]
    pub fn behind(self, count: usize) -> Writable {
        self.part(count, self.length.saturating_sub(count))
    }

    /// The same bytes, for a reader.
    #[must_use]
    pub fn readable(self) -> Readable {
        Readable { at: self.at.cast_const(), length: self.length }
    }
}

/// Both types stand for a loan that ends at its last byte.
fn check(length: usize, offset: usize, part: usize) {
    let fits = offset.checked_add(part).is_some_and(|end| end <= length);
    assert!(fits, "{part} bytes from {offset} on, of {length} that were lent");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_where_it_lies_in_the_whole() {
        let mut bytes = [1u8, 2, 3, 4, 5];
        // SAFETY: the array is used through this value alone until the end of the test.
        let writable = unsafe { Writable::of(&mut bytes) };
        let part = writable.part(1, 3);
        assert_eq!((part.len(), part.as_ptr()), (3, writable.as_ptr().wrapping_add(1)));
        assert_eq!(part.behind(2), writable.part(3, 1));
        assert!(writable.behind(5).is_empty() && writable.part(5, 0).is_empty());
        // SAFETY: nobody writes the array while the slice lives.
        assert_eq!(unsafe { part.readable().bytes() }, [2, 3, 4]);
    }

    #[test]
    fn no_bytes_are_an_empty_slice_wherever_they_are() {
        // SAFETY: there is nothing to read.
        assert!(unsafe { Readable::EMPTY.bytes() }.is_empty());
        static BYTES: [u8; 3] = [7, 8, 9];
        let lent = Readable::from(&BYTES[..]);
        // SAFETY: a static that nobody can write.
        assert_eq!(unsafe { lent.behind(1).bytes() }, [8, 9]);
    }

    #[test]
    #[should_panic(expected = "4 bytes from 2 on, of 5 that were lent")]
    fn a_part_beyond_the_end_is_no_part() {
        let _ = Readable { at: std::ptr::null(), length: 5 }.part(2, 4);
    }

    #[test]
    #[should_panic(expected = "of 5 that were lent")]
    fn more_than_there_is_can_not_be_left_behind() {
        let _ = Writable { at: std::ptr::null_mut(), length: 5 }.behind(6);
    }

    #[test]
    #[should_panic(expected = "of 5 that were lent")]
    fn an_offset_does_not_wrap_around() {
        let _ = Readable { at: std::ptr::null(), length: 5 }.part(usize::MAX, 6);
    }
}
