//! What threads meet by: the processor's own atomics, or loom's in a model of memory orders.
//!
//! Loom's types exist in tests under `--cfg loom` only, where models (`mod orders` of whoever uses
//! this) go through every order that the memory model allows:
//! `RUSTFLAGS="--cfg loom" cargo test -p bps-engine --lib --target-dir target/loom orders::`
//!
//! Loom lets a swap come behind a store that follows what the swap has read, which the language
//! does not. A word that is both swapped and stored to can therefore show a model a value that is
//! gone: there, the store is a swap as well.

#![forbid(unsafe_code)]

#[cfg(all(test, loom))]
mod modelled {
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::thread::yield_now;

    /// A word on which threads sleep: loom has no futex, so this is one of its locks.
    pub struct Futex {
        pub word: AtomicU32,
        bucket: loom::sync::Mutex<()>,
        changed: loom::sync::Condvar,
    }

    impl Futex {
        pub fn new(value: u32) -> Futex {
            let (bucket, changed) = Default::default();
            Futex { word: AtomicU32::new(value), bucket, changed }
        }

        /// As the kernel does: it compares under the lock that a wake takes.
        pub fn wait(&self, expected: u32) {
            let bucket = self.bucket.lock().unwrap();
            if self.word.load(Ordering::Relaxed) == expected {
                drop(self.changed.wait(bucket).unwrap());
            }
        }

        pub fn wake(&self) {
            let bucket = self.bucket.lock().unwrap();
            self.changed.notify_one();
            drop(bucket);
        }
    }

    /// Memory of which a model sees who reads and writes it.
    pub use loom::cell::UnsafeCell;
}

#[cfg(not(all(test, loom)))]
mod real {
    use rustix::thread::futex;
    pub use std::hint::spin_loop;
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub use std::thread::yield_now;

    /// A word on which a thread of this process sleeps.
    pub struct Futex {
        /// Its value.
        pub word: AtomicU32,
    }

    impl Futex {
        /// A word with this value.
        pub fn new(value: u32) -> Futex {
            Futex { word: AtomicU32::new(value) }
        }

        /// Sleeps if it has this value: until woken, or until a signal comes.
        pub fn wait(&self, expected: u32) {
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, expected, None);
        }

        /// Wakes one thread that sleeps on it.
        pub fn wake(&self) {
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// Memory that threads share by a contract of their own.
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Memory that holds this.
        pub const fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        /// Shows it to a reader.
        #[inline]
        pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get().cast_const())
        }

        /// Shows it to a writer.
        #[inline]
        pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(all(test, loom))]
pub use modelled::*;
#[cfg(not(all(test, loom)))]
pub use real::*;
