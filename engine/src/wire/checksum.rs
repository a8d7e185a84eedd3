//! CRC-32C, by the widest instructions of the processor: of headers, and of payloads where a
//! transport cannot promise that they arrive as they were sent.

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of these bytes.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The checksum of the bytes that `checksum` is of, followed by these. That of none is 0.
#[must_use]
#[allow(clippy::cast_possible_truncation, reason = "the library keeps 32 bits in 64")]
pub fn crc32c_append(checksum: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, (!checksum).into());
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns")]
mod tests {
    use super::*;

    /// Bit by bit, as RFC 3720 defines it.
    fn specification(bytes: &[u8]) -> u32 {
        let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
    }

    #[test]
    fn it_is_the_specified_checksum_however_the_bytes_come() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let bytes: Vec<u8> = (0..5000_usize).map(|at| (at * 7 + at / 251) as u8).collect();
        for length in (0..300).chain([1023, 1024, 4095, 4096, 4097, 5000]) {
            let (bytes, expected) = (&bytes[..length], specification(&bytes[..length]));
            assert_eq!(crc32c(bytes), expected, "{length} bytes");
            for cut in [0, 1, length / 3, length / 2, length] {
                let (first, rest) = bytes.split_at(cut.min(length));
                let both = crc32c_append(crc32c_append(0, first), rest);
                assert_eq!(both, expected, "{length} bytes, cut at {cut}");
            }
        }
    }
}
