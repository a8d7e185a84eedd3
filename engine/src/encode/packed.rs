//! Codes of fewer than 8 bits, packed: eight codes of `W` bits are `W` bytes, the first code in the
//! lowest bits.
//!
//! Invariant: bits behind the last code are 0 where this module wrote them, and [`padding`] finds
//! them where it did not.

#![forbid(unsafe_code)]

/// Codes that are packed in one go.
pub(super) const BLOCK: usize = 128;
/// Codes of a group.
const GROUP: usize = 8;

/// Bytes of so many codes of this width.
pub(super) const fn wire_bytes(elements: usize, width: usize) -> usize {
    elements / GROUP * width + (elements % GROUP * width).div_ceil(8)
}

/// Packs codes below `2^W`. `out` is as long as [`wire_bytes`] says for at most a block of codes;
/// codes behind them are 0.
#[inline(always)]
pub(super) fn pack<const W: usize>(codes: &[u8; BLOCK], out: &mut [u8]) {
    if out.len() == BLOCK / GROUP * W {
        for (group, out) in codes.chunks_exact(GROUP).zip(out.chunks_exact_mut(W)) {
            out.copy_from_slice(&squeeze::<W>(eight(group)).to_le_bytes()[..W]);
        }
    } else {
        for (group, out) in codes.chunks_exact(GROUP).zip(out.chunks_mut(W)) {
            out.copy_from_slice(&squeeze::<W>(eight(group)).to_le_bytes()[..out.len()]);
        }
    }
}

/// The codes of a block, or of what there is of it; others are 0.
#[inline(always)]
pub(super) fn unpack<const W: usize>(wire: &[u8], codes: &mut [u8; BLOCK]) {
    if wire.len() == BLOCK / GROUP * W {
        for (group, wire) in codes.chunks_exact_mut(GROUP).zip(wire.chunks_exact(W)) {
            let mut bytes = [0; 8];
            bytes[..W].copy_from_slice(wire);
            group.copy_from_slice(&spread::<W>(u64::from_le_bytes(bytes)).to_le_bytes());
        }
    } else {
        codes.fill(0);
        for (group, wire) in codes.chunks_exact_mut(GROUP).zip(wire.chunks(W)) {
            let mut bytes = [0; 8];
            bytes[..wire.len()].copy_from_slice(wire);
            group.copy_from_slice(&spread::<W>(u64::from_le_bytes(bytes)).to_le_bytes());
        }
    }
}

/// The bits behind the last of so many codes: 0 if they are as this module writes them.
pub(super) fn padding(elements: usize, width: usize, wire: &[u8]) -> u8 {
    let used = elements % GROUP * width % 8;
    if used == 0 { 0 } else { wire.last().map_or(0, |byte| byte >> used) }
}

#[inline(always)]
fn eight(group: &[u8]) -> u64 {
    group.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

const BYTES: u64 = 0x00ff_00ff_00ff_00ff;
const PAIRS: u64 = 0x0000_ffff_0000_ffff;
const FOURS: u64 = 0x0000_0000_ffff_ffff;

/// Eight bytes that each hold `W` bits, next to each other: pairs, then fours, then all.
#[inline(always)]
const fn squeeze<const W: usize>(bytes: u64) -> u64 {
    let pairs = bytes & BYTES | (bytes >> 8 & BYTES) << W;
    let fours = pairs & PAIRS | (pairs >> 16 & PAIRS) << (2 * W);
    fours & FOURS | fours >> 32 << (4 * W)
}

/// The inverse of [`squeeze`].
#[inline(always)]
const fn spread<const W: usize>(bits: u64) -> u64 {
    let four = (1 << (4 * W)) - 1;
    let fours = bits & four | (bits >> (4 * W) & four) << 32;
    let two = ((1 << (2 * W)) - 1) * 0x0000_0001_0000_0001;
    let pairs = fours & two | (fours >> (2 * W) & two) << 16;
    let one = ((1 << W) - 1) * 0x0001_0001_0001_0001;
    pairs & one | (pairs >> W & one) << 8
}
