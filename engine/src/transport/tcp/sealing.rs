//! What an encrypted lane has between its two halves and the driver: a buffer of records that are
//! to be sent, and one of records that came. The halves work as on any other lane; the kernel sees
//! only records.
//!
//! Both are copied through: a payload is the caller's and must not be encrypted where it lies, and
//! what came leaves its buffer only once its tag holds, so no unverified byte ever reaches memory
//! of a caller, a sum least of all. The buffers stay in the cache, and a copy there is a fraction
//! of what encryption takes.
//!
//! Invariant: an operation in flight reads `sending` of the outgoing buffer and writes behind `end`
//! of the incoming one; while there is one, this module touches neither part.

use super::memory::{Block, Pool};
use super::receiver::{Receiver, Wanted};
use super::sealed::{
    Keys, Opener, PLAIN_BYTES_MAX, PREFIX_BYTES, RECORD_BYTES_MAX, SealError, Sealer, TAG_BYTES,
};
use super::sender::Sender;
use crate::limits::{GATHER_MAX, SEALED_BYTES};
use libc::iovec;
use std::ops::Range;

const NOWHERE: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

const _: () = assert!(SEALED_BYTES >= 2 * RECORD_BYTES_MAX);

/// See the [module](self).
pub(super) struct Sealing {
    sealer: Sealer,
    outgoing: Block,
    /// What the kernel has not taken of the records here.
    sending: Range<usize>,
    /// Bytes of the sender's that are in these records.
    inside: usize,
    opener: Opener,
    incoming: Block,
    /// Opened bytes that the receiver has not taken.
    plain: Range<usize>,
    /// What came and is not opened.
    start: usize,
    end: usize,
}

impl Sealing {
    pub fn new(keys: &Keys) -> Sealing {
        Sealing {
            sealer: Sealer::new(&keys.seal),
            outgoing: Block::new(SEALED_BYTES),
            sending: 0..0,
            inside: 0,
            opener: Opener::new(&keys.open),
            incoming: Block::new(SEALED_BYTES),
            plain: 0..0,
            start: 0,
            end: 0,
        }
    }

    /// Names what goes next, as [`Sender::gather`] does; none if all is sent. To be called only
    /// while no send is under way.
    ///
    /// # Errors
    /// No more records can be made.
    pub fn gather(
        &mut self,
        sender: &Sender,
        iovecs: &mut [iovec; GATHER_MAX],
    ) -> Result<usize, SealError> {
        if self.sending.is_empty() {
            self.seal(sender)?;
        }
        let first = self.outgoing.at(self.sending.start);
        iovecs[0] = iovec { iov_base: first.cast(), iov_len: self.sending.len() };
        Ok(usize::from(!self.sending.is_empty()))
    }

    /// Makes records of what the sender has, as many as there is room for.
    fn seal(&mut self, sender: &Sender) -> Result<(), SealError> {
        let mut pieces = [NOWHERE; GATHER_MAX];
        let count = sender.gather(&mut pieces);
        let (mut pieces, mut piece) = (pieces[..count].iter(), NOWHERE);
        (self.sending, self.inside) = (0..0, 0);
        while SEALED_BYTES - self.sending.end >= RECORD_BYTES_MAX {
            let (first, mut plain) = (self.sending.end, 0);
            while plain < PLAIN_BYTES_MAX {
                if piece.iov_len == 0 {
                    let Some(next) = pieces.next() else { break };
                    piece = *next;
                }
                let here = piece.iov_len.min(PLAIN_BYTES_MAX - plain);
                let to = self.outgoing.at(first + PREFIX_BYTES + plain);
                // SAFETY: the sender names memory that whoever posted it keeps valid and unchanged
                // until it is sent, which it is not yet; the buffer has room for a whole record,
                // and is this lane's alone.
                unsafe { std::ptr::copy_nonoverlapping(piece.iov_base.cast(), to, here) };
                let rest = piece.iov_base.cast::<u8>().wrapping_add(here);
                piece = iovec { iov_base: rest.cast(), iov_len: piece.iov_len - here };
                plain += here;
            }
            if plain == 0 {
                break;
            }
            let bytes = PREFIX_BYTES + plain + TAG_BYTES;
            // SAFETY: the buffer has room for a whole record: for prefix, plain bytes and tag. No
            // send is under way, so nobody else reads or writes it.
            let space = unsafe {
                let first = self.outgoing.at(first);
                first.write_bytes(0, PREFIX_BYTES);
                first.wrapping_add(PREFIX_BYTES + plain).write_bytes(0, TAG_BYTES);
                std::slice::from_raw_parts_mut(first, bytes)
            };
            self.sending.end += self.sealer.seal(space, plain)?;
            self.inside += plain;
        }
        Ok(())
    }

    /// So many bytes of what `gather` named have been taken by the kernel. Returns how many of the
    /// sender's are gone with them: all that are in the records here, with the last byte of these.
    pub fn sent(&mut self, count: usize) -> usize {
        self.sending.start += count;
        debug_assert!(self.sending.start <= self.sending.end, "more was sent than sealed");
        if self.sending.is_empty() { std::mem::take(&mut self.inside) } else { 0 }
    }

    /// Where the next bytes go. To be called after [`open`](Sealing::open) found nothing to do, and
    /// only while no receive is under way.
    pub fn wanted(&mut self) -> Wanted {
        debug_assert!(
            self.plain.is_empty(),
            "the receiver takes what is open before it wants more"
        );
        let here = self.end - self.start;
        if self.start > 0 {
            let (from, to) = (self.incoming.at(self.start), self.incoming.at(0));
            // SAFETY: both ranges lie within the buffer; `copy` allows that they overlap.
            unsafe { std::ptr::copy(from, to, here) };
        }
        (self.start, self.end) = (0, here);
        let first = self.incoming.at(here).cast();
        [iovec { iov_base: first, iov_len: SEALED_BYTES - here }, NOWHERE]
    }

    /// So many bytes have come to where `wanted` said.
    pub fn received(&mut self, count: usize) {
        self.end += count;
        debug_assert!(self.end <= SEALED_BYTES);
    }

    /// Opens the next record, if a whole one is here, or goes on with the last one, and gives the
    /// receiver what it wants of it. Returns whether it got anything. To be called after the
    /// receiver said that there is no event. While the caller has something to answer no further
    /// record is opened: all that came before one that does not open is delivered first.
    ///
    /// # Errors
    /// What came is not what the other end sent.
    pub fn open(&mut self, receiver: &mut Receiver, pool: &mut Pool) -> Result<bool, SealError> {
        if receiver.standing() || self.plain.is_empty() && !self.open_next()? {
            return Ok(false);
        }
        let Some(wanted) = receiver.wanted(pool) else { return Ok(false) };
        let mut taken = 0;
        for part in wanted {
            let count = part.iov_len.min(self.plain.len());
            let from = self.incoming.at(self.plain.start);
            // SAFETY: `count` opened bytes lie there, and the receiver wants as many at the part,
            // which is memory of its own or of its caller's, and not this buffer.
            unsafe { std::ptr::copy_nonoverlapping(from, part.iov_base.cast(), count) };
            self.plain.start += count;
            taken += count;
        }
        receiver.received(taken);
        Ok(true)
    }

    fn open_next(&mut self) -> Result<bool, SealError> {
        let (first, here) = (self.incoming.at(self.start), self.end - self.start);
        // SAFETY: bytes `start..end` have been received, and a receive that is under way writes
        // behind `end`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(first, here) };
        let Some(length) = self.opener.measure(bytes)? else { return Ok(false) };
        let Some(record) = bytes.get_mut(..length) else { return Ok(false) };
        let first = self.start + PREFIX_BYTES;
        self.plain = first..first + self.opener.open(record)?.len();
        self.start += length;
        Ok(true)
    }

    /// Whether bytes are here that the receiver has not seen.
    pub fn has_more(&self) -> bool {
        !self.plain.is_empty() || self.start < self.end
    }

    /// Whether the bytes that came end within a record.
    pub fn is_partial(&self) -> bool {
        self.start < self.end
    }
}
