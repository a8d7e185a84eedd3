//! Sends that are posted together: one call, and one ring of the device, for all of them.

use super::ffi;
use super::flow::Notice;
use super::layout::BATCH;

/// A send before it is a work request.
pub(super) struct Send {
    /// By which its completion is known.
    pub(super) id: u64,
    pub(super) notice: Notice,
    pub(super) is_signalled: bool,
    /// Whether the device is given the bytes themselves instead of their address.
    pub(super) is_inline: bool,
    /// Where in the peer's memory, and the key to that.
    pub(super) remote: (u64, u32),
    /// Address, length and key of what is sent; those without length are left out.
    pub(super) parts: [(usize, usize, u32); 2],
}

/// See the [module](self).
pub(super) struct Chain {
    sends: [ffi::SendWr; BATCH],
    gathers: [[ffi::Sge; 2]; BATCH],
    count: usize,
}

// SAFETY: the pointers in a chain lead into itself, are set when it is linked, and are used by
// whoever linked it, before it moves.
unsafe impl std::marker::Send for Chain {}

impl Chain {
    pub(super) fn new() -> Box<Chain> {
        // SAFETY: a chain is numbers and raw pointers, for which zeros are valid.
        Box::new(unsafe { std::mem::zeroed() })
    }

    pub(super) fn is_full(&self) -> bool {
        self.count == BATCH
    }

    /// Adds a send to a chain that is not full.
    pub(super) fn add(&mut self, new: &Send) {
        let send = &mut self.sends[self.count];
        let mut flags = if new.is_signalled { ffi::SEND_SIGNALED } else { 0 };
        if new.is_inline {
            flags |= ffi::SEND_INLINE;
        }
        let gather = &mut self.gathers[self.count];
        let used = new.parts.iter().filter(|(_, length, _)| *length > 0);
        send.num_sge = 0;
        for (sge, (address, length, lkey)) in gather.iter_mut().zip(used) {
            let length = u32::try_from(*length).expect("an extent is never larger than a part");
            *sge = ffi::Sge { addr: *address as u64, length, lkey: *lkey };
            send.num_sge += 1;
        }
        send.wr_id = new.id;
        send.opcode = ffi::WRITE_WITH_IMM;
        send.send_flags = flags;
        send.imm_data = new.notice.encode().to_be();
        (send.remote_addr, send.rkey) = new.remote;
        self.count += 1;
    }

    /// Lets what was added last wake the peer, if that sleeps.
    pub(super) fn solicit(&mut self) {
        if let Some(last) = self.count.checked_sub(1) {
            self.sends[last].send_flags |= ffi::SEND_SOLICITED;
        }
    }

    /// Links what was added and empties the chain: the first of a list that ends, valid until the
    /// chain is added to or moves. `None` if nothing was added.
    pub(super) fn link(&mut self) -> Option<*mut ffi::SendWr> {
        let count = std::mem::take(&mut self.count);
        let first = self.sends.as_mut_ptr();
        for index in 0..count {
            let next = if index + 1 < count { first.wrapping_add(index + 1) } else { NONE };
            let gather = self.gathers[index].as_mut_ptr();
            let send = &mut self.sends[index];
            (send.sg_list, send.next) = (gather, next);
        }
        (count > 0).then_some(first)
    }
}

const NONE: *mut ffi::SendWr = std::ptr::null_mut();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_linked_in_order_and_ends() {
        let mut chain = Chain::new();
        assert!(chain.link().is_none());
        for round in [BATCH, 1, 5] {
            chain.solicit();
            for id in 0..round as u64 {
                assert!(!chain.is_full());
                chain.add(&Send {
                    id,
                    notice: Notice::Extent { offset: 64 },
                    is_signalled: id % 2 == 0,
                    is_inline: false,
                    remote: (1000 + id, 7),
                    parts: [(5, 128, 1), (9, usize::from(id % 3 == 0) * 10, 2)],
                });
            }
            chain.solicit();
            let mut at = chain.link().unwrap();
            for id in 0..round as u64 {
                // SAFETY: the chain was just linked and has not moved.
                let (send, second) = unsafe { (&*at, &*(*at).sg_list.add(1)) };
                assert_eq!((send.wr_id, send.remote_addr, send.rkey), (id, 1000 + id, 7));
                assert_eq!(send.send_flags & ffi::SEND_SIGNALED != 0, id % 2 == 0);
                let is_last = id + 1 == round as u64;
                assert_eq!(send.send_flags & ffi::SEND_SOLICITED != 0, is_last);
                assert_eq!(u32::from_be(send.imm_data), 1);
                assert_eq!(send.num_sge, if id % 3 == 0 { 2 } else { 1 });
                assert!(send.num_sge == 1 || (second.length, second.lkey) == (10, 2));
                at = send.next;
            }
            assert!(at.is_null());
        }
    }
}
