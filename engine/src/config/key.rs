//! The job key as text: hexadecimal, checked before anything starts.

/// Bytes of a key at least: fewer could be guessed.
const KEY_BYTES_MIN: usize = 16;
/// Bytes of a key at most: a longer one is a wrong file.
const KEY_BYTES_MAX: usize = 64;

/// The bytes of a key given in hexadecimal, with blanks around it allowed. The error completes
/// "the job key ...", and never repeats any of the text.
pub fn decode_key(text: &str) -> Result<Vec<u8>, String> {
    let text = text.trim().as_bytes();
    if !text.iter().all(u8::is_ascii_hexdigit) {
        return Err("is not hexadecimal".to_owned());
    }
    if !text.len().is_multiple_of(2) {
        return Err(format!("has an odd number of digits, {}", text.len()));
    }
    let length = text.len() / 2;
    if !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&length) {
        return Err(format!("has {length} bytes; {KEY_BYTES_MIN} to {KEY_BYTES_MAX} are allowed"));
    }
    Ok(text.chunks_exact(2).map(|pair| nibble(pair[0]) << 4 | nibble(pair[1])).collect())
}

fn nibble(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let key = decode_key(" 00112233445566778899aAbBcCdDeEfF\n").unwrap();
        assert_eq!(key[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(key[10..], [0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff]);
        let long = "0".repeat(130);
        for wrong in ["", "00", "xy", "00112233445566778899aabbccddeef", &long, "0011 2233"] {
            let error = decode_key(wrong).unwrap_err();
            assert!(wrong.is_empty() || !error.contains(wrong) || wrong == "00", "{error}");
        }
    }
}
