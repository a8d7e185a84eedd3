//! The loops of every vector kernel: four registers at a time, then one, then the specification for
//! the rest.
//!
//! An instruction set says by [`Lane`] what one register does; these loops are compiled into its
//! functions, which enable its instructions. The reads and writes of [`Lane`] may be unaligned.
//! Elements are read and written in rising order, and the results of a step are written after its
//! reads, which is what lets `out` be `acc`.

use super::scalar::{self, Element};

/// Registers a step.
const UNROLL: usize = 4;

/// One data type on one instruction set: what happens to one register full of sums.
pub(super) trait Lane {
    type Element: Element;
    /// A register of `COUNT` sums.
    type Vector: Copy;
    /// A divisor, prepared.
    type Divisor: Copy;
    const COUNT: usize;

    /// Reads `COUNT` sums.
    ///
    /// # Safety
    /// The CPU has the instructions, and `acc` is readable for `COUNT` sums.
    unsafe fn load(acc: *const u8) -> Self::Vector;
    /// Writes `COUNT` sums.
    ///
    /// # Safety
    /// The CPU has the instructions, and `acc` is writable for `COUNT` sums.
    unsafe fn save(acc: *mut u8, sums: Self::Vector);
    /// Reads `COUNT` elements and widens them.
    ///
    /// # Safety
    /// The CPU has the instructions, and `src` is readable for `COUNT` elements.
    unsafe fn widen(src: *const u8) -> Self::Vector;
    /// Rounds `COUNT` sums to elements and writes them.
    ///
    /// # Safety
    /// The CPU has the instructions, and `out` is writable for `COUNT` elements.
    unsafe fn narrow(out: *mut u8, sums: Self::Vector);
    /// Adds.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn plus(left: Self::Vector, right: Self::Vector) -> Self::Vector;
    /// Prepares a divisor, which is positive.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn divisor(divisor: u32) -> Self::Divisor;
    /// Divides.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn over(sums: Self::Vector, divisor: Self::Divisor) -> Self::Vector;
}

/// Implements [`Lane`] by naming a function for each thing that it does. They are the intrinsics,
/// and helpers that enable the same instructions.
macro_rules! lane {
    (
        $(#[$doc:meta])*
        $name:ident: $element:ty as $vector:ty, $count:literal;
        $load:path, $save:path; $widen:path, $narrow:path;
        $plus:path; $divisor:path => $prepared:ty, $over:path
    ) => {
        $(#[$doc])*
        struct $name;

        impl Lane for $name {
            type Element = $element;
            type Vector = $vector;
            type Divisor = $prepared;
            const COUNT: usize = $count;

            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn load(acc: *const u8) -> $vector {
                // SAFETY: The trait's caller vouches for the pointer and for the instructions.
                unsafe { $load(acc.cast()) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn save(acc: *mut u8, sums: $vector) {
                // SAFETY: The trait's caller vouches for the pointer and for the instructions.
                unsafe { $save(acc.cast(), sums) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn widen(src: *const u8) -> $vector {
                // SAFETY: The trait's caller vouches for the pointer and for the instructions.
                unsafe { $widen(src.cast()) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn narrow(out: *mut u8, sums: $vector) {
                // SAFETY: The trait's caller vouches for the pointer and for the instructions.
                unsafe { $narrow(out.cast(), sums) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn plus(left: $vector, right: $vector) -> $vector {
                // SAFETY: The trait's caller vouches for the instructions.
                unsafe { $plus(left, right) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn divisor(divisor: u32) -> $prepared {
                // SAFETY: The trait's caller vouches for the instructions.
                unsafe { $divisor(divisor) }
            }
            // SAFETY: What the caller keeps is written at the trait.
            #[inline(always)]
            unsafe fn over(sums: $vector, divisor: $prepared) -> $vector {
                // SAFETY: The trait's caller vouches for the instructions.
                unsafe { $over(sums, divisor) }
            }
        }
    };
}

/// Defines the four operations in a function each that enables `$features`, and `operations`, which
/// collects them.
macro_rules! operations {
    ($features:literal) => {
        /// # Safety
        /// That of [`Kernels::store`], and the CPU has the features.
        #[target_feature(enable = $features)]
        unsafe fn store<L: Lane>(acc: *mut u8, src: *const u8, count: usize) {
            // SAFETY: The contract is the caller's.
            unsafe { blocks::store::<L>(acc, src, count) }
        }

        /// # Safety
        /// That of [`Kernels::add`], and the CPU has the features.
        #[target_feature(enable = $features)]
        unsafe fn add<L: Lane>(acc: *mut u8, src: *const u8, count: usize) {
            // SAFETY: The contract is the caller's.
            unsafe { blocks::add::<L>(acc, src, count) }
        }

        /// # Safety
        /// That of [`Kernels::add_finish`], and the CPU has the features.
        #[target_feature(enable = $features)]
        unsafe fn add_finish<L: Lane>(
            out: *mut u8,
            acc: *const u8,
            src: *const u8,
            count: usize,
            divisor: u32,
        ) {
            // SAFETY: The contract is the caller's.
            unsafe { blocks::add_finish::<L>(out, acc, src, count, divisor) }
        }

        /// # Safety
        /// That of [`Kernels::finish`], and the CPU has the features.
        #[target_feature(enable = $features)]
        unsafe fn finish<L: Lane>(out: *mut u8, acc: *const u8, count: usize, divisor: u32) {
            // SAFETY: The contract is the caller's.
            unsafe { blocks::finish::<L>(out, acc, count, divisor) }
        }

        const fn operations<L: Lane>() -> Operations {
            Operations {
                store: store::<L>,
                add: add::<L>,
                add_finish: add_finish::<L>,
                finish: finish::<L>,
            }
        }
    };
}

pub(super) use {lane, operations};

const fn element<L: Lane>() -> usize {
    size_of::<L::Element>()
}

const fn sum<L: Lane>() -> usize {
    size_of::<<L::Element as Element>::Sum>()
}

/// Runs `$body` once for each whole step of `$step` elements, with `$done` elements behind it.
macro_rules! steps {
    ($done:ident, $count:expr, $step:expr, $body:block) => {
        while $count - $done >= $step {
            $body
            $done += $step;
        }
    };
}

/// `acc = widen(src)`.
///
/// # Safety
/// That of [`super::Kernels::store`], and the CPU has the lane's instructions.
#[inline(always)]
pub(super) unsafe fn store<L: Lane>(acc: *mut u8, src: *const u8, count: usize) {
    let mut done = 0;
    // SAFETY: Every step ends at or before `count`, up to which the caller vouches for both
    // pointers.
    unsafe {
        if sum::<L>() == element::<L>() {
            acc.copy_from_nonoverlapping(src, count * element::<L>());
            return;
        }
        steps!(done, count, UNROLL * L::COUNT, {
            let to = |register: usize| acc.add((done + register * L::COUNT) * sum::<L>());
            let from = |register: usize| src.add((done + register * L::COUNT) * element::<L>());
            L::save(to(0), L::widen(from(0)));
            L::save(to(1), L::widen(from(1)));
            L::save(to(2), L::widen(from(2)));
            L::save(to(3), L::widen(from(3)));
        });
        steps!(done, count, L::COUNT, {
            L::save(acc.add(done * sum::<L>()), L::widen(src.add(done * element::<L>())));
        });
        let (acc, src) = (acc.add(done * sum::<L>()), src.add(done * element::<L>()));
        scalar::store::<L::Element>(acc, src, count - done);
    }
}

/// `acc += src`.
///
/// # Safety
/// That of [`super::Kernels::add`], and the CPU has the lane's instructions.
#[inline(always)]
pub(super) unsafe fn add<L: Lane>(acc: *mut u8, src: *const u8, count: usize) {
    let mut done = 0;
    // SAFETY: Every step ends at or before `count`, up to which the caller vouches for both
    // pointers.
    unsafe {
        steps!(done, count, UNROLL * L::COUNT, {
            let to = |register: usize| acc.add((done + register * L::COUNT) * sum::<L>());
            let from = |register: usize| src.add((done + register * L::COUNT) * element::<L>());
            let sum0 = L::plus(L::load(to(0)), L::widen(from(0)));
            let sum1 = L::plus(L::load(to(1)), L::widen(from(1)));
            let sum2 = L::plus(L::load(to(2)), L::widen(from(2)));
            let sum3 = L::plus(L::load(to(3)), L::widen(from(3)));
            L::save(to(0), sum0);
            L::save(to(1), sum1);
            L::save(to(2), sum2);
            L::save(to(3), sum3);
        });
        steps!(done, count, L::COUNT, {
            let to = acc.add(done * sum::<L>());
            L::save(to, L::plus(L::load(to), L::widen(src.add(done * element::<L>()))));
        });
        let (acc, src) = (acc.add(done * sum::<L>()), src.add(done * element::<L>()));
        scalar::add::<L::Element>(acc, src, count - done);
    }
}

/// `out = narrow((acc + src) / divisor)`.
///
/// # Safety
/// That of [`super::Kernels::add_finish`], and the CPU has the lane's instructions.
#[inline(always)]
pub(super) unsafe fn add_finish<L: Lane>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: The caller keeps the steps' contract. They do at most `count` elements, and the rest
    // of each range is the specification's.
    unsafe {
        let done = if divisor == 1 {
            finish_steps::<L, true, false>(out, acc, src, count, divisor)
        } else {
            finish_steps::<L, true, true>(out, acc, src, count, divisor)
        };
        let (acc, src) = (acc.add(done * sum::<L>()), src.add(done * element::<L>()));
        let out = out.add(done * element::<L>());
        scalar::add_finish::<L::Element>(out, acc, src, count - done, divisor);
    }
}

/// `out = narrow(acc / divisor)`.
///
/// # Safety
/// That of [`super::Kernels::finish`], and the CPU has the lane's instructions.
#[inline(always)]
pub(super) unsafe fn finish<L: Lane>(out: *mut u8, acc: *const u8, count: usize, divisor: u32) {
    // SAFETY: The caller keeps the steps' contract; without `ADD`, `src` is not read. They do at
    // most `count` elements, and the rest of both ranges is the specification's. Where element and
    // sum are one type, both are good for `count` elements, and `copy_from` allows them to overlap.
    unsafe {
        let done = if divisor != 1 {
            finish_steps::<L, false, true>(out, acc, acc, count, divisor)
        } else if sum::<L>() != element::<L>() {
            finish_steps::<L, false, false>(out, acc, acc, count, divisor)
        } else {
            if !std::ptr::addr_eq(out, acc) {
                out.copy_from(acc, count * element::<L>());
            }
            return;
        };
        let (out, acc) = (out.add(done * element::<L>()), acc.add(done * sum::<L>()));
        scalar::finish::<L::Element>(out, acc, count - done, divisor);
    }
}

/// Reads sums, adds `src` if `ADD`, divides if `AVERAGE`, rounds and writes. Returns the elements
/// done: all but fewer than a register holds.
///
/// # Safety
/// That of [`super::Kernels::add_finish`] (`src` is only read if `ADD`), and the CPU has the lane's
/// instructions.
#[inline(always)]
unsafe fn finish_steps<L: Lane, const ADD: bool, const AVERAGE: bool>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
    divisor: u32,
) -> usize {
    let mut done = 0;
    // SAFETY: Every step ends at or before `count`, up to which the caller vouches for all three
    // pointers. A step writes what it has read already: an element is no wider than its sum, and
    // `out` starts no later than `acc`.
    unsafe {
        let divisor = L::divisor(divisor);
        steps!(done, count, UNROLL * L::COUNT, {
            let to = |register: usize| out.add((done + register * L::COUNT) * element::<L>());
            let sum0 = result::<L, ADD, AVERAGE>(acc, src, done, divisor);
            let sum1 = result::<L, ADD, AVERAGE>(acc, src, done + L::COUNT, divisor);
            let sum2 = result::<L, ADD, AVERAGE>(acc, src, done + 2 * L::COUNT, divisor);
            let sum3 = result::<L, ADD, AVERAGE>(acc, src, done + 3 * L::COUNT, divisor);
            L::narrow(to(0), sum0);
            L::narrow(to(1), sum1);
            L::narrow(to(2), sum2);
            L::narrow(to(3), sum3);
        });
        steps!(done, count, L::COUNT, {
            let sums = result::<L, ADD, AVERAGE>(acc, src, done, divisor);
            L::narrow(out.add(done * element::<L>()), sums);
        });
    }
    done
}

/// The register that begins with element `done`, before it is rounded.
///
/// # Safety
/// That of [`finish_steps`], for `done + COUNT` elements.
#[inline(always)]
unsafe fn result<L: Lane, const ADD: bool, const AVERAGE: bool>(
    acc: *const u8,
    src: *const u8,
    done: usize,
    divisor: L::Divisor,
) -> L::Vector {
    // SAFETY: The caller vouches for these elements and for the instructions.
    unsafe {
        let mut sums = L::load(acc.add(done * sum::<L>()));
        if ADD {
            sums = L::plus(sums, L::widen(src.add(done * element::<L>())));
        }
        if AVERAGE { L::over(sums, divisor) } else { sums }
    }
}
