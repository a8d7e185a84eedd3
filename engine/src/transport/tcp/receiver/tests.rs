//! The receiver against a naive reading of the same bytes: however the kernel splits them, the same
//! events and the same payloads come out.

use super::*;
use proptest::prelude::*;

const LANE: LaneId = LaneId(3);

/// A frame of the test: its payload's length is in its header, as bytes 0..8.
fn stream_of(sizes: &[usize]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (mut bytes, mut payloads) = (Vec::new(), Vec::new());
    for (index, &size) in sizes.iter().enumerate() {
        let mut header = [index as u8; HEADER_BYTES];
        header[..8].copy_from_slice(&(size as u64).to_le_bytes());
        let payload: Vec<u8> = (0..size).map(|at| (at * 31 + at / 251 + index * 7) as u8).collect();
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&payload);
        payloads.push(payload);
    }
    (bytes, payloads)
}

struct Bench {
    receiver: Receiver,
    pool: Pool,
    /// Payloads as they came out.
    whole: Vec<Vec<u8>>,
    landing: Vec<u8>,
    calls: usize,
    copied: usize,
}

impl Bench {
    fn new() -> Bench {
        let mut pool = Pool::new();
        pool.grow();
        let (whole, landing) = (Vec::new(), Vec::new());
        Bench { receiver: Receiver::new(), pool, whole, landing, calls: 0, copied: 0 }
    }

    /// Takes all events that are there, answering each at once; `pieces` says how the next payload
    /// lands.
    fn answer(&mut self, mut pieces: impl FnMut() -> bool) {
        while let Some(event) = self.receiver.next(LANE, &mut self.pool) {
            match event {
                Event::Header { header, .. } => {
                    let field = header[..8].try_into().expect("eight bytes");
                    let length = u64::from_le_bytes(field) as usize;
                    self.copied += self.receiver.staged().min(length);
                    let in_pieces = pieces();
                    self.landing = vec![0; if in_pieces { 0 } else { length }];
                    let landing = match in_pieces {
                        true => Landing::Pieces(length),
                        // SAFETY: the vector is not touched until the payload has landed.
                        false => Landing::Into(unsafe { Writable::of(&mut self.landing) }),
                    };
                    self.receiver.land(landing);
                    if length == 0 || in_pieces {
                        self.whole.push(Vec::with_capacity(length));
                    }
                }
                Event::Landed { .. } => self.whole.push(std::mem::take(&mut self.landing)),
                Event::Piece { piece, .. } => {
                    let length = piece.len();
                    assert_eq!(piece.as_ptr().addr() % ALIGNMENT, 0, "a piece is aligned");
                    assert!(length <= SCRATCH_BYTES && length > 0);
                    // SAFETY: it is consumed below, once its bytes have been copied.
                    let piece = unsafe { piece.lend().bytes() };
                    let whole = self.whole.last_mut().expect("a header came before");
                    whole.extend_from_slice(piece);
                    let last = whole.len() == whole.capacity();
                    assert!(last || length.is_multiple_of(ALIGNMENT), "only the last is ragged");
                    self.receiver.consume(&mut self.pool);
                }
                other => panic!("a receiver has no {other:?}"),
            }
        }
    }

    /// Plays the kernel: puts at most `most` bytes where the receiver wants them, and returns how
    /// many.
    fn feed(&mut self, bytes: &[u8], most: usize) -> usize {
        let wanted = self.receiver.wanted(&mut self.pool).expect("all events are answered");
        let mut given = 0;
        for part in wanted {
            let count = part.iov_len.min(bytes.len().min(most) - given);
            // SAFETY: the receiver wants `iov_len` bytes there.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes[given..].as_ptr(), part.iov_base.cast(), count);
            }
            given += count;
        }
        self.receiver.received(given);
        self.calls += 1;
        given
    }
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![
        Just(0usize),
        1..200usize,
        Just(4096usize),
        (SMALL_BYTES - 2)..(SMALL_BYTES + 3),
        (STAGING_BYTES - 70)..(STAGING_BYTES + 70),
        (SCRATCH_BYTES - 3)..(SCRATCH_BYTES + 3),
        500_000..1_500_000usize,
    ];
    prop::collection::vec(size, 1..25)
}

proptest! {
    #[test]
    fn any_split_gives_the_same_frames(
        sizes in sizes(),
        splits in prop::collection::vec(
            prop_oneof![1..130usize, 1..20_000usize, Just(usize::MAX)],
            1..20,
        ),
        landings in prop::collection::vec(any::<bool>(), 1..10),
    ) {
        let (bytes, payloads) = stream_of(&sizes);
        let mut bench = Bench::new();
        // Long streams in tiny steps would only cost time: a split is at least a thousandth of the
        // whole.
        let least = bytes.len() / 1000 + 1;
        let (mut splits, mut landings) = (splits.into_iter().cycle(), landings.into_iter().cycle());
        let mut at = 0;
        loop {
            bench.answer(|| landings.next().expect("cycles"));
            if at == bytes.len() {
                break;
            }
            let most = splits.next().expect("cycles").max(least);
            at += bench.feed(&bytes[at..], most);
        }
        prop_assert!(bench.whole == payloads, "the payloads differ");
        prop_assert_eq!(bench.receiver.cause_at_end(), Cause::Peer);
    }
}

#[test]
fn a_cut_anywhere_within_a_frame_is_truncated() {
    let (bytes, _) = stream_of(&[100]);
    for cut in 1..bytes.len() {
        let mut bench = Bench::new();
        let mut at = 0;
        while at < cut {
            at += bench.feed(&bytes[at..cut], usize::MAX);
            bench.answer(|| false);
        }
        assert_eq!(bench.receiver.cause_at_end(), Cause::Truncated, "cut at {cut}");
    }
}

#[test]
fn small_frames_share_a_receive() {
    let (bytes, payloads) = stream_of(&[4096; 1000]);
    for pieces in [false, true] {
        let mut bench = Bench::new();
        let mut at = 0;
        while at < bytes.len() {
            at += bench.feed(&bytes[at..], usize::MAX);
            bench.answer(|| pieces);
        }
        assert!(bench.whole == payloads);
        assert!(bench.calls < 80, "{} receives for 1,000 frames of 4 KiB", bench.calls);
    }
}

#[test]
fn large_payloads_are_not_copied() {
    let (bytes, payloads) = stream_of(&[1 << 20; 8]);
    for pieces in [false, true] {
        let mut bench = Bench::new();
        let mut at = 0;
        while at < bytes.len() {
            at += bench.feed(&bytes[at..], usize::MAX);
            bench.answer(|| pieces);
        }
        assert!(bench.whole == payloads);
        assert_eq!(bench.copied, 0, "bytes of large payloads passed staging");
    }
}
