//! Records of an encrypted lane, and what the fuzzer makes of them on the way: what comes out is
//! the beginning of what went in.
//!
//! The input is: the length of the pieces; how long each record is; and edits of the stream, each a
//! place, how many bytes go there, and which come instead.

#![no_main]

use bps_engine::transport::tcp::sealed::{
    Opener, PLAIN_BYTES_MAX, PREFIX_BYTES, Sealer, TAG_BYTES,
};
use libfuzzer_sys::fuzz_target;

/// Opens what these bytes hold, until one is not what was due.
fn open(bytes: &[u8], piece: usize) -> Vec<u8> {
    let mut opener = Opener::new(&[7; 32]);
    let (mut here, mut plain) = (Vec::new(), Vec::new());
    for part in bytes.chunks(piece) {
        here.extend_from_slice(part);
        loop {
            match opener.measure(&here) {
                Ok(Some(length)) if length <= here.len() => {
                    let mut record: Vec<u8> = here.drain(..length).collect();
                    match opener.open(&mut record) {
                        Ok(opened) => plain.extend_from_slice(opened),
                        Err(error) => {
                            drop(error.to_string());
                            return plain;
                        }
                    }
                }
                Ok(_) => break,
                Err(error) => {
                    drop(error.to_string());
                    return plain;
                }
            }
        }
    }
    plain
}

fuzz_target!(|input: (u16, Vec<u16>, Vec<(u16, u8, Vec<u8>)>)| {
    let (piece, lengths, edits) = input;
    let (mut sealer, mut bytes, mut sent) = (Sealer::new(&[7; 32]), Vec::new(), Vec::new());
    for (index, length) in lengths.into_iter().take(16).enumerate() {
        let length = usize::from(length) % PLAIN_BYTES_MAX + 1;
        let mut space = vec![index as u8; PREFIX_BYTES + length + TAG_BYTES];
        sent.extend_from_slice(&space[PREFIX_BYTES..][..length]);
        sealer.seal(&mut space, length).expect("numbers are left");
        bytes.extend(space);
    }
    let whole = open(&bytes, usize::from(piece) + 1);
    assert!(whole == sent, "an honest stream did not come out");
    for (at, count, with) in edits {
        let at = usize::from(at).min(bytes.len());
        let end = (at + usize::from(count)).min(bytes.len());
        bytes.splice(at..end, with);
    }
    let opened = open(&bytes, usize::from(piece) + 1);
    assert!(sent.starts_with(&opened), "what came out was not sent");
});
