//! Records against everything that can happen to them on the way.

use super::*;
use proptest::prelude::*;

const SECRET: [u8; SECRET_BYTES] = [7; SECRET_BYTES];

fn pair() -> (Sealer, Opener) {
    (Sealer::new(&SECRET), Opener::new(&SECRET))
}

fn seal(sealer: &mut Sealer, plain: &[u8]) -> Vec<u8> {
    let mut space = vec![0; PREFIX_BYTES];
    space.extend_from_slice(plain);
    space.resize(PREFIX_BYTES + plain.len() + TAG_BYTES, 0);
    assert_eq!(sealer.seal(&mut space, plain.len()), Ok(space.len()));
    space
}

/// Opens all records that `bytes`, which come in pieces of these sizes, hold; returns what came
/// out, and what was left or why it ended.
fn open(opener: &mut Opener, bytes: &[u8], sizes: &[usize]) -> (Vec<u8>, Result<usize, SealError>) {
    let (mut here, mut plain, mut at) = (Vec::new(), Vec::new(), 0);
    let mut sizes = sizes.iter().cycle();
    while at < bytes.len() {
        let size = *sizes.next().expect("cycles");
        let piece = &bytes[at..bytes.len().min(at + size)];
        at += piece.len();
        here.extend_from_slice(piece);
        loop {
            match opener.measure(&here) {
                Err(error) => return (plain, Err(error)),
                Ok(Some(length)) if length <= here.len() => {
                    let mut record: Vec<u8> = here.drain(..length).collect();
                    match opener.open(&mut record) {
                        Err(error) => return (plain, Err(error)),
                        Ok(opened) => plain.extend_from_slice(opened),
                    }
                }
                Ok(_) => break,
            }
        }
    }
    (plain, Ok(here.len()))
}

/// Three records and what is in each.
fn three() -> (Opener, Vec<Vec<u8>>) {
    let (mut sealer, opener) = pair();
    let records = [&b"one"[..], b"two", b"six"].map(|plain| seal(&mut sealer, plain));
    (opener, records.into())
}

#[test]
fn a_record_has_the_bytes_that_the_documents_say() {
    let (mut sealer, _) = pair();
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    // Computed by an independent implementation of HKDF and AES-256-GCM.
    assert_eq!(hex(&seal(&mut sealer, b"words")), KNOWN[0]);
    assert_eq!(hex(&seal(&mut sealer, b"words")), KNOWN[1]);
}

const KNOWN: [&str; 2] = [
    "050000000000000000000000a6492641bfea169740826992187b2ec12c5dcb6fdb",
    "050000000100000000000000390ff517e0a84497d80f54b000e3eb5297ed68e555",
];

#[test]
fn a_flipped_bit_is_seen_wherever_it_is() {
    let (_, records) = three();
    for bit in 0..records[0].len() * 8 {
        let (mut opener, mut records) = three();
        records[0][bit / 8] ^= 1 << (bit % 8);
        let (plain, end) = open(&mut opener, &records.concat(), &[7]);
        assert!(plain.is_empty(), "bit {bit}");
        // A length that has grown waits for bytes that do not come, and would not open with them.
        let waits = bit < 32 && end == Ok(records.concat().len());
        assert!(waits || end.is_err(), "bit {bit}: {end:?}");
    }
}

#[test]
fn what_is_repeated_left_out_or_moved_is_named() {
    let (repeated, ahead) = (
        |number, expected| SealError::Repeated { number, expected },
        |number, expected| SealError::Ahead { number, expected },
    );
    let cases: [(&[usize], &[u8], SealError); 7] = [
        (&[0, 0], b"one", repeated(0, 1)),
        (&[0, 1, 0], b"onetwo", repeated(0, 2)),
        (&[0, 1, 2, 2], b"onetwosix", repeated(2, 3)),
        (&[1], b"", ahead(1, 0)),
        (&[1, 0], b"", ahead(1, 0)),
        (&[0, 2], b"one", ahead(2, 1)),
        (&[0, 2, 1], b"one", ahead(2, 1)),
    ];
    for (order, expected, error) in cases {
        let (mut opener, records) = three();
        let bytes: Vec<u8> = order.iter().flat_map(|at| records[*at].clone()).collect();
        assert_eq!(open(&mut opener, &bytes, &[11]), (expected.to_vec(), Err(error)), "{order:?}");
    }
}

#[test]
fn a_number_that_was_changed_with_the_record_does_not_help() {
    let (mut opener, mut records) = three();
    let number = records[0][4..PREFIX_BYTES].to_vec();
    records[1][4..PREFIX_BYTES].copy_from_slice(&number);
    let (plain, end) = open(&mut opener, &records[1], &[64]);
    assert_eq!((plain.len(), end), (0, Err(SealError::Altered { number: 0 })));
}

#[test]
fn a_record_cut_short_is_not_opened() {
    for cut in 1..three().1[0].len() {
        let (mut opener, records) = three();
        assert_eq!(open(&mut opener, &records[0][..cut], &[3]), (Vec::new(), Ok(cut)));
    }
}

#[test]
fn a_record_of_the_other_direction_or_another_lane_does_not_open() {
    let (_, records) = three();
    let mut opener = Opener::new(&[8; SECRET_BYTES]);
    let (plain, end) = open(&mut opener, &records.concat(), &[64]);
    assert_eq!((plain.len(), end), (0, Err(SealError::Altered { number: 0 })));
}

#[test]
fn no_record_is_longer_than_all_may_be() {
    let (_, opener) = pair();
    for (claimed, bytes) in [(0, None), (1, Some(29)), (PLAIN_BYTES_MAX, Some(RECORD_BYTES_MAX))] {
        let claimed = u32::try_from(claimed).unwrap();
        let expected =
            bytes.map_or(Err(SealError::Malformed { bytes: claimed }), |it| Ok(Some(it)));
        assert_eq!(opener.measure(&prefix_of(claimed, 0)), expected);
    }
    for bytes in [u32::try_from(PLAIN_BYTES_MAX).unwrap() + 1, u32::MAX] {
        let error = Err(SealError::Malformed { bytes });
        assert_eq!(opener.measure(&prefix_of(bytes, 0)), error);
    }
}

#[test]
fn the_same_words_never_look_the_same() {
    let (mut sealer, _) = pair();
    let first = seal(&mut sealer, &[5; 64]);
    let second = seal(&mut sealer, &[5; 64]);
    assert_ne!(first[PREFIX_BYTES..], second[PREFIX_BYTES..]);
    for record in [first, second] {
        assert!(!record.windows(8).any(|window| window == [5; 8]), "plain bytes in {record:02x?}");
    }
}

#[test]
fn both_ends_go_on_with_the_next_key_at_the_same_record() {
    let (mut sealer, mut opener) = pair();
    let (mut space, mut before) = ([0; PREFIX_BYTES + 1 + TAG_BYTES], SECRET);
    for number in 0..2 * RECORDS_PER_KEY + 2 {
        space[PREFIX_BYTES] = number.to_le_bytes()[0];
        sealer.seal(&mut space, 1).unwrap();
        assert_eq!(opener.open(&mut space).unwrap(), [number.to_le_bytes()[0]]);
        let is_last = (number + 1).is_multiple_of(RECORDS_PER_KEY);
        assert_eq!(sealer.0.secret != before, is_last, "behind record {number}");
        before = sealer.0.secret;
        assert_eq!(opener.0.secret, before);
    }
}

#[test]
fn the_last_number_is_never_used() {
    let last = u64::MAX - 1;
    let (mut sealer, mut opener) =
        (Sealer(Cipher::new(&SECRET, last)), Opener(Cipher::new(&SECRET, last)));
    let record = seal(&mut sealer, b"last");
    assert_eq!(open(&mut opener, &record, &[99]), (b"last".to_vec(), Ok(0)));
    assert_eq!(sealer.seal(&mut [0; 99], 1), Err(SealError::Exhausted));
    assert_eq!(opener.measure(&record), Err(SealError::Exhausted));
    assert_eq!(opener.open(&mut [0; 99]), Err(SealError::Exhausted));
}

proptest! {
    #[test]
    fn any_chunks_of_any_records_give_the_same_bytes(
        sizes in prop::collection::vec(
            prop_oneof![1..200usize, Just(PLAIN_BYTES_MAX), 1..=PLAIN_BYTES_MAX],
            1..12,
        ),
        chunks in prop::collection::vec(prop_oneof![1..40usize, 1..90_000usize], 1..10),
    ) {
        let (mut sealer, mut opener) = pair();
        let (mut bytes, mut plain) = (Vec::new(), Vec::new());
        for (index, size) in sizes.into_iter().enumerate() {
            let part: Vec<u8> = (0..size).map(|at| (at * 31 + index) as u8).collect();
            bytes.extend(seal(&mut sealer, &part));
            plain.extend(part);
        }
        let (opened, end) = open(&mut opener, &bytes, &chunks);
        prop_assert!(opened == plain, "the bytes differ");
        prop_assert_eq!(end, Ok(0));
    }

    #[test]
    fn whatever_is_changed_nothing_wrong_comes_out(
        sizes in prop::collection::vec(1..3000usize, 1..8),
        at in any::<prop::sample::Index>(),
        with in prop::collection::vec(any::<u8>(), 0..40),
        over in 0..60usize,
    ) {
        let (mut sealer, mut opener) = pair();
        let (mut bytes, mut plain) = (Vec::new(), Vec::new());
        for (index, size) in sizes.into_iter().enumerate() {
            let part = vec![index as u8 + 1; size];
            bytes.extend(seal(&mut sealer, &part));
            plain.extend(part);
        }
        let at = at.index(bytes.len());
        let end = bytes.len().min(at + over);
        bytes.splice(at..end, with);
        let (opened, _) = open(&mut opener, &bytes, &[701]);
        prop_assert!(plain.starts_with(&opened), "what came out was not sent");
    }
}
