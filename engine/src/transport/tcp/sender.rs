//! The sending half of a lane without a system call: a ring of posted frames, and how far the
//! kernel has taken them.
//!
//! A driver asks [`gather`](Sender::gather) for memory to send, reports the count to
//! [`sent`](Sender::sent), and takes events from [`next`](Sender::next).
//!
//! Invariant: three counters that only grow, `reported <= taken <= posted <= reported +
//! LANE_FRAMES_MAX`. A frame's header stays where it is in the ring until the frame is reported, so
//! an operation in flight may read it.

use crate::limits::{GATHER_MAX, HEADER_BYTES, LANE_FRAMES_MAX, OPERATION_BYTES_MAX};
use crate::transport::{Event, Frame, Full, LaneId};
use libc::iovec;

/// See the [module](self).
pub(super) struct Sender {
    frames: Box<[Frame]>,
    posted: usize,
    taken: usize,
    reported: usize,
    /// Bytes of frame `taken` that the kernel has: header first, then payload.
    offset: usize,
}

impl Sender {
    pub fn new() -> Sender {
        let free = Frame::bare([0; HEADER_BYTES], 0);
        let frames = vec![free; LANE_FRAMES_MAX].into_boxed_slice();
        Sender { frames, posted: 0, taken: 0, reported: 0, offset: 0 }
    }

    /// Takes a frame.
    pub fn post(&mut self, frame: &Frame) -> Result<(), Full> {
        if self.posted - self.reported == LANE_FRAMES_MAX {
            return Err(Full);
        }
        self.frames[self.posted % LANE_FRAMES_MAX] = *frame;
        self.posted += 1;
        Ok(())
    }

    /// Whether there is something that the kernel has not taken.
    pub fn unsent(&self) -> bool {
        self.taken != self.posted
    }

    /// Whether what the kernel has not taken fills a whole operation.
    pub fn is_batch(&self) -> bool {
        2 * (self.posted - self.taken) >= GATHER_MAX
    }

    /// Fills `iovecs` with what goes next, in order, and says with how many: none if all is sent.
    pub fn gather(&self, iovecs: &mut [iovec; GATHER_MAX]) -> usize {
        let (mut count, mut room) = (0, OPERATION_BYTES_MAX);
        let mut offset = self.offset;
        for index in self.taken..self.posted {
            let frame = &self.frames[index % LANE_FRAMES_MAX];
            let header = (frame.header.as_ptr(), HEADER_BYTES);
            for (first, length) in [header, (frame.payload.as_ptr(), frame.payload.len())] {
                let skip = offset.min(length);
                offset -= skip;
                let here = (length - skip).min(room);
                if here == 0 {
                    continue;
                }
                let first = first.wrapping_add(skip).cast_mut().cast();
                iovecs[count] = iovec { iov_base: first, iov_len: here };
                count += 1;
                room -= here;
                if room == 0 || count == GATHER_MAX {
                    return count;
                }
            }
        }
        count
    }

    /// So many bytes of what `gather` named have been taken by the kernel.
    pub fn sent(&mut self, count: usize) {
        self.offset += count;
        while self.taken != self.posted {
            let whole = HEADER_BYTES + self.frames[self.taken % LANE_FRAMES_MAX].payload.len();
            if self.offset < whole {
                return;
            }
            self.offset -= whole;
            self.taken += 1;
        }
        debug_assert!(self.offset == 0, "more was sent than posted");
    }

    /// The next frame whose memory is the caller's again.
    pub fn next(&mut self, lane: LaneId) -> Option<Event> {
        if self.reported == self.taken {
            return None;
        }
        let token = self.frames[self.reported % LANE_FRAMES_MAX].token;
        self.reported += 1;
        Some(Event::Sent { lane, token })
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns")]
mod tests {
    use super::*;
    use crate::mem::Readable;
    use proptest::prelude::*;

    const LANE: LaneId = LaneId(7);

    fn frame(token: u64, payload: &[u8]) -> Frame {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&token.to_le_bytes());
        // SAFETY: the tests keep payloads alive and unchanged until they are sent.
        Frame::new(header, unsafe { Readable::of(payload) }, token)
    }

    /// Plays the kernel: takes `count` bytes of what the sender names.
    fn take(sender: &Sender, count: usize) -> Vec<u8> {
        let mut iovecs = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; GATHER_MAX];
        let named = sender.gather(&mut iovecs);
        let mut bytes = Vec::new();
        for one in &iovecs[..named] {
            // SAFETY: the tests keep headers and payloads alive until they are sent.
            let part = unsafe { std::slice::from_raw_parts(one.iov_base.cast(), one.iov_len) };
            bytes.extend_from_slice(part);
        }
        assert!(bytes.len() <= OPERATION_BYTES_MAX);
        bytes.truncate(count);
        bytes
    }

    #[test]
    fn a_lane_is_full_until_a_frame_is_reported() {
        let mut sender = Sender::new();
        for token in 0..LANE_FRAMES_MAX as u64 {
            assert_eq!(sender.post(&frame(token, &[])), Ok(()));
        }
        assert_eq!(sender.post(&frame(999, &[])), Err(Full));
        let bytes = take(&sender, usize::MAX);
        assert_eq!(bytes.len(), GATHER_MAX * HEADER_BYTES);
        sender.sent(bytes.len());
        assert_eq!(sender.post(&frame(999, &[])), Err(Full), "sent, but not reported");
        assert!(matches!(sender.next(LANE), Some(Event::Sent { lane: LANE, token: 0 })));
        assert_eq!(sender.post(&frame(999, &[])), Ok(()));
    }

    proptest! {
        #[test]
        fn any_split_sends_the_same_bytes_and_reports_every_frame_once_in_order(
            sizes in prop::collection::vec(
                prop_oneof![Just(0), 1..300usize, 100_000..3_000_000usize],
                1..40,
            ),
            steps in prop::collection::vec((0..4usize, 1..2_000_000usize), 1..30),
        ) {
            let payloads: Vec<Vec<u8>> = sizes.iter().enumerate()
                .map(|(index, &size)| (0..size).map(|at| (at * 7 + index) as u8).collect())
                .collect();
            let mut expected = Vec::new();
            for (token, payload) in payloads.iter().enumerate() {
                expected.extend_from_slice(&frame(token as u64, payload).header);
                expected.extend_from_slice(payload);
            }
            let (mut sender, mut out, mut posted, mut reported) = (Sender::new(), Vec::new(), 0, 0);
            let mut steps = steps.into_iter().cycle();
            while reported < payloads.len() as u64 {
                let (posts, bytes) = steps.next().expect("cycles");
                for payload in payloads.iter().skip(posted).take(posts.max(1)) {
                    prop_assert_eq!(sender.post(&frame(posted as u64, payload)), Ok(()));
                    posted += 1;
                }
                let taken = take(&sender, bytes);
                out.extend_from_slice(&taken);
                sender.sent(taken.len());
                while let Some(event) = sender.next(LANE) {
                    let in_turn = matches!(event, Event::Sent { token, .. } if token == reported);
                    prop_assert!(in_turn, "{event:?} is not frame {reported}");
                    reported += 1;
                }
            }
            prop_assert!(out == expected, "the bytes differ");
            prop_assert!(!sender.unsent());
        }
    }
}
