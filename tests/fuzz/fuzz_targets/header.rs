//! Frame headers: what is accepted must encode to the very bytes that it was read from.

#![no_main]

use bps_engine::wire::{Header, RawHeader};
use libfuzzer_sys::fuzz_target;

/// CRC-32C, so that the fuzzer gets past the checksum and reaches the fields.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    })
}

fuzz_target!(|bytes: RawHeader| {
    let mut raw = bytes;
    for sealed in [false, true] {
        if sealed {
            let checksum = crc32c(&raw[..60]);
            raw[60..].copy_from_slice(&checksum.to_le_bytes());
        }
        match Header::decode(&raw) {
            Ok(header) => assert_eq!(header.encode(), raw),
            Err(invalid) => drop(invalid.to_string()),
        }
    }
});
