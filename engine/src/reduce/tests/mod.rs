//! The specification against an oracle of its own (safe, and with the `half` crate), and every
//! vector kernel against the specification.

use super::{Isa, Kernels};
use crate::base::{DType, Reduction};
use std::cmp::Ordering;
use std::fmt;

mod gather;
mod kernels;
mod merges;
mod narrowing;

/// Bytes around every buffer that nobody may write.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa5;

/// Memory at a chosen distance from an aligned address, with guards on both sides.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    fn new(content: &[u8], misalignment: usize) -> Buffer {
        let mut bytes = vec![GUARD_BYTE; content.len() + 3 * GUARD + misalignment];
        let start = bytes.as_ptr().align_offset(GUARD) + GUARD + misalignment;
        bytes[start..start + content.len()].copy_from_slice(content);
        Buffer { bytes, start, length: content.len() }
    }

    fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn content_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }

    /// What it holds, after a look at the guards.
    fn content(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.start);
        let (content, after) = rest.split_at(self.length);
        assert!(before.iter().all(|byte| *byte == GUARD_BYTE), "written before the start");
        assert!(after.iter().all(|byte| *byte == GUARD_BYTE), "written past the end");
        content
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Call {
    Store,
    Add,
    AddFinish,
    Finish,
}

const CALLS: [Call; 4] = [Call::Store, Call::Add, Call::AddFinish, Call::Finish];

/// One call's arguments. `pieces` cuts the elements into that many calls; `in_place` makes `out` be
/// `acc`.
#[derive(Clone, Copy)]
struct Case<'a> {
    reduction: Reduction,
    dtype: DType,
    call: Call,
    acc: &'a [u8],
    src: &'a [u8],
    divisor: u32,
    acc_offset: usize,
    src_offset: usize,
    pieces: usize,
    in_place: bool,
}

impl<'a> Case<'a> {
    /// Aligned, in one piece, to memory of its own.
    fn new(dtype: DType, call: Call, acc: &'a [u8], src: &'a [u8], divisor: u32) -> Case<'a> {
        let (acc_offset, src_offset, pieces, in_place) = (0, 0, 1, false);
        let reduction = Reduction::Sum;
        Case { reduction, dtype, call, acc, src, divisor, acc_offset, src_offset, pieces, in_place }
    }

    /// Asks the specification and every vector kernel for what the oracle says.
    fn check_all(&self) {
        let expected = oracle(self);
        every_kernels().iter().for_each(|kernels| self.check(kernels, &expected));
    }

    /// Runs it and returns the bytes of the result.
    fn run(&self, kernels: &Kernels) -> Vec<u8> {
        let Case { reduction, dtype, divisor, .. } = *self;
        let (element, sum) = (dtype.size(), dtype.accumulator().size());
        let count = self.src.len() / element;
        let mut acc = Buffer::new(self.acc, self.acc_offset);
        let mut src = Buffer::new(self.src, self.src_offset);
        let mut other = Buffer::new(&vec![0; self.src.len()], self.acc_offset);
        let finishes = matches!(self.call, Call::AddFinish | Call::Finish);
        let size = count.div_ceil(self.pieces).max(1);
        for done in (0..count.max(1)).step_by(size) {
            let piece = size.min(count - done);
            let out = if self.in_place { acc.pointer() } else { other.pointer() };
            // SAFETY: The buffers hold `count` elements each, `done + piece` is at most that, and
            // `out` is either the start of `acc` or another buffer.
            unsafe {
                let acc = acc.pointer().add(done * sum);
                let src = src.pointer().add(done * element);
                let out = out.add(done * element);
                match self.call {
                    Call::Store => kernels.store(dtype, acc, src, piece),
                    Call::Add => kernels.reduce(reduction, dtype, acc, src, piece),
                    Call::AddFinish => {
                        kernels.reduce_finish(reduction, dtype, out, acc, src, piece, divisor)
                    }
                    Call::Finish => kernels.finish(dtype, out, acc, piece, divisor),
                }
            }
        }
        assert_eq!(src.content(), self.src, "the source was written");
        match (finishes, self.in_place) {
            (true, true) => acc.content()[..count * element].to_vec(),
            (true, false) => {
                assert_eq!(acc.content(), self.acc, "the accumulator was written");
                other.content().to_vec()
            }
            (false, _) => acc.content().to_vec(),
        }
    }

    /// Data type of the result.
    fn result_dtype(&self) -> DType {
        match self.call {
            Call::Store | Call::Add => self.dtype.accumulator(),
            Call::AddFinish | Call::Finish => self.dtype,
        }
    }

    fn check(&self, kernels: &Kernels, expected: &[u8]) {
        let actual = self.run(kernels);
        assert_same(self.result_dtype(), &actual, expected, &(kernels.isa(), self));
    }
}

/// Without the bytes.
impl fmt::Debug for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { reduction, dtype, call, divisor, acc_offset, src_offset, .. } = self;
        let Case { pieces, in_place, .. } = self;
        write!(
            f,
            "{call:?} of {dtype} ({reduction}), {} bytes, divisor {divisor}, {pieces} pieces, ",
            self.src.len()
        )?;
        write!(f, "acc at {acc_offset}, src at {src_offset}, in place: {in_place}")
    }
}

/// Element by element, a NaN being equal to any NaN.
fn assert_same(dtype: DType, actual: &[u8], expected: &[u8], what: &dyn fmt::Debug) {
    assert_eq!(actual.len(), expected.len());
    if actual == expected {
        return;
    }
    let pairs = actual.chunks(dtype.size()).zip(expected.chunks(dtype.size()));
    for (index, (left, right)) in pairs.enumerate() {
        let same = left == right || (is_nan(dtype, left) && is_nan(dtype, right));
        assert!(same, "element {index}: {left:02x?}, expected {right:02x?}; {what:?}");
    }
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::BF16 => half::bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

/// The specification, and the vector kernels that this CPU has.
fn every_kernels() -> Vec<&'static Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::with_isa).collect()
}

/// A small, seeded source of bits.
struct Bits(u64);

impl Bits {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(bound).unwrap()).unwrap()
    }

    /// `count` elements: a third random bits, a third ordinary, a third the edges of the type.
    fn elements(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| self.element(dtype)).collect()
    }

    fn element(&mut self, dtype: DType) -> Vec<u8> {
        let bits = self.next();
        let edge = self.below(12);
        #[allow(clippy::cast_precision_loss, reason = "any ordinary number will do")]
        let ordinary = (self.below(20_001) as f64 - 10_000.0) / 64.0;
        let choice = self.below(3);
        let number = match (choice, edge) {
            (0, _) => return bits.to_le_bytes()[..dtype.size()].to_vec(),
            (1, _) => ordinary,
            (_, 0) => 0.0,
            (_, 1) => -0.0,
            (_, 2) => f64::INFINITY,
            (_, 3) => f64::NEG_INFINITY,
            (_, 4) => f64::NAN,
            (_, 5) => f64::from(half::f16::MAX),
            (_, 6) => f64::from(half::f16::MIN_POSITIVE) / 3.0,
            (_, 7) => f64::from(f32::MIN_POSITIVE) / 1024.0,
            (_, 8) => f64::from(f32::MAX),
            (_, 9) => f64::from(half::f16::MIN_POSITIVE_SUBNORMAL) / 2.0,
            (_, 10) => f64::MIN_POSITIVE / 1024.0,
            _ => 1.0 + 2_f64.powi(-11),
        };
        #[allow(
            clippy::cast_possible_truncation,
            reason = "saturates at the type's edges, as meant"
        )]
        match dtype {
            DType::F32 => (number as f32).to_le_bytes().to_vec(),
            DType::F64 => number.to_le_bytes().to_vec(),
            DType::F16 => half::f16::from_f64(number).to_le_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f64(number).to_le_bytes().to_vec(),
            DType::I64 => (number as i64).to_le_bytes().to_vec(),
            DType::I32 => (number as i32).to_le_bytes().to_vec(),
            DType::I8 | DType::U8 => vec![(number as i8).to_le_bytes()[0]],
        }
    }
}

/// The oracle: the meaning of each call, over safe typed values, without a line of the code under
/// test.
fn oracle(case: &Case<'_>) -> Vec<u8> {
    macro_rules! integer {
        ($type:ty) => {
            integer!($type, |sum: $type| {
                let exact = i128::from(sum).div_euclid(i128::from(case.divisor));
                <$type>::try_from(exact).unwrap()
            })
        };
        ($type:ty, $divide:expr) => {
            elementwise(
                case,
                |bytes| <$type>::from_le_bytes(bytes.try_into().unwrap()),
                |bytes| <$type>::from_le_bytes(bytes.try_into().unwrap()),
                |left, right| match case.reduction {
                    Reduction::Sum => left.wrapping_add(right),
                    Reduction::Min => *[left, right].iter().min().unwrap(),
                    Reduction::Max => *[left, right].iter().max().unwrap(),
                    Reduction::Product => left.wrapping_mul(right),
                },
                $divide,
                |sum| sum.to_le_bytes().to_vec(),
                |sum| sum.to_le_bytes().to_vec(),
            )
        };
    }
    macro_rules! float {
        ($type:ty, $sum:ty, $narrow:expr) => {
            elementwise(
                case,
                |bytes| <$sum>::from_le_bytes(bytes.try_into().unwrap()),
                |bytes| <$sum>::from(<$type>::from_le_bytes(bytes.try_into().unwrap())),
                |left: $sum, right: $sum| match (case.reduction, left.partial_cmp(&right)) {
                    (Reduction::Sum, _) => left + right,
                    (Reduction::Product, _) => left * right,
                    (_, None) => <$sum>::NAN,
                    (Reduction::Min, Some(Ordering::Less)) => left,
                    (Reduction::Max, Some(Ordering::Greater)) => left,
                    _ => right,
                },
                #[allow(clippy::cast_precision_loss, clippy::cast_lossless, reason = "f32 too")]
                |sum| sum / case.divisor as $sum,
                |sum| sum.to_le_bytes().to_vec(),
                |sum| ($narrow)(sum).to_vec(),
            )
        };
    }
    match case.dtype {
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8),
        DType::I32 => integer!(i32),
        DType::I64 => integer!(i64),
        DType::F32 => float!(f32, f32, f32::to_le_bytes),
        DType::F64 => float!(f64, f64, f64::to_le_bytes),
        DType::F16 => float!(half::f16, f32, |sum| half::f16::from_f32(sum).to_le_bytes()),
        DType::BF16 => float!(half::bf16, f32, |sum| half::bf16::from_f32(sum).to_le_bytes()),
    }
}

fn elementwise<S: Copy>(
    case: &Case<'_>,
    load: impl Fn(&[u8]) -> S,
    widen: impl Fn(&[u8]) -> S,
    plus: impl Fn(S, S) -> S,
    over: impl Fn(S) -> S,
    save: impl Fn(S) -> Vec<u8>,
    narrow: impl Fn(S) -> Vec<u8>,
) -> Vec<u8> {
    let elements = case.src.chunks(case.dtype.size()).map(widen);
    let sums = case.acc.chunks(case.dtype.accumulator().size()).map(load);
    let pairs = elements.zip(sums);
    match case.call {
        Call::Store => pairs.flat_map(|(element, _)| save(element)).collect(),
        Call::Add => pairs.flat_map(|(element, sum)| save(plus(sum, element))).collect(),
        Call::AddFinish => {
            pairs.flat_map(|(element, sum)| narrow(over(plus(sum, element)))).collect()
        }
        Call::Finish => pairs.flat_map(|(_, sum)| narrow(over(sum))).collect(),
    }
}
