//! Compiles a loop for each instruction set and runs the one that the CPU has.
//!
//! Invariant: every instruction set runs the same source, in which each operation rounds by itself
//! (the compiler neither fuses nor reorders floating-point operations), so results do not depend on
//! the CPU.

#[cfg(target_arch = "x86_64")]
use crate::reduce::Isa;
use crate::reduce::Kernels;

/// Evaluates an expression, compiled for the instruction set of these kernels. The functions that
/// it calls must be `#[inline(always)]`: one that is not inlined is correct, but uses narrow
/// registers.
macro_rules! wide {
    ($kernels:expr, $work:expr) => {
        $crate::encode::wide::run(
            $kernels,
            #[inline(always)]
            || $work,
        )
    };
}

pub(crate) use wide;

/// What [`wide!`] calls.
#[inline]
pub(crate) fn run<R>(kernels: &Kernels, work: impl FnOnce() -> R) -> R {
    match kernels.isa() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: Kernels of AVX2 exist only where `Kernels::with_isa` found its instructions.
        Isa::Avx2 => unsafe { run_avx2(work) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: Kernels of AVX-512 exist only where `Kernels::with_isa` found its instructions.
        Isa::Avx512 => unsafe { run_avx512(work) },
        _ => work(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn run_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn run_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}
