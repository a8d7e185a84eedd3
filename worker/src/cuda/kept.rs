//! Memory of the GPU for what encodings keep between rounds: an f32 for each element of the parts
//! that are encoded there, twice with momentum.
//!
//! It is taken and given back in the order of a stream (`cuMemAllocAsync`), because the driver's
//! other ways wait for all of the GPU's work, also for that of a framework which waits for a rank
//! that is gone.
//!
//! Invariant: all that uses it is enqueued in the stream that it was taken in.

use super::codecs::{Keeps, KeptAt};
use super::{Coder, GpuError, Pinned, Stream};
use std::ops::Range;

const F32: usize = size_of::<f32>();
/// The memory of a part begins at a multiple of so many elements: at lines of the GPU's cache.
const LINE: usize = 32;

/// See the [module](self). Of one tensor. It stays unless it is [given back](Self::give_back).
pub(crate) struct KeptMemory {
    address: u64,
    keeps: Keeps,
    /// By part: the place of its elements, if it is encoded here.
    parts: Box<[Option<Range<usize>>]>,
    /// Places.
    places: usize,
}

impl KeptMemory {
    /// Zeros for the parts of a tensor, by their elements where they are to have some; none where
    /// no part is. The thread has the context.
    ///
    /// # Errors
    /// [`GpuError::Cuda`], also if the GPU's memory is full.
    pub(crate) fn take(
        stream: &Stream,
        keeps: Keeps,
        parts: impl Iterator<Item = Option<usize>>,
    ) -> Result<Option<KeptMemory>, GpuError> {
        let mut places = 0;
        let place = |elements: Option<usize>| {
            let first = places;
            places += elements?.next_multiple_of(LINE);
            elements.map(|elements| first..first + elements)
        };
        let parts: Box<[_]> = parts.map(place).collect();
        if places == 0 {
            return Ok(None);
        }
        let mut taken = KeptMemory { address: 0, keeps, parts, places };
        let (cuda, bytes) = (stream.device().cuda(), taken.bytes());
        let take = cuda.call.cuMemAllocAsync;
        // SAFETY: it writes one address; the stream's handle is held by its value.
        let code = unsafe { take(&raw mut taken.address, bytes, stream.handle()) };
        cuda.check("cuMemAllocAsync", code)?;
        let set = cuda.call.cuMemsetD8Async;
        // SAFETY: the memory that was just taken, of so many bytes.
        let code = unsafe { set(taken.address, 0, bytes, stream.handle()) };
        cuda.check("cuMemsetD8Async", code)?;
        Ok(Some(taken))
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self) -> usize {
        self.places * F32 * if self.keeps.velocity { 2 } else { 1 }
    }

    /// What it is for.
    pub(crate) fn keeps(&self) -> Keeps {
        self.keeps
    }

    /// The places of the parts that are encoded here, by the parts' numbers.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.parts.iter().enumerate().filter_map(|(part, place)| Some((part, place.clone()?)))
    }

    /// Where a part has its memory, if it has some.
    pub(crate) fn at(&self, part: usize) -> Option<KeptAt> {
        let first = self.parts.get(part)?.as_ref()?.start;
        let at = |place: usize| self.address + (place * F32) as u64;
        let velocity = if self.keeps.velocity { at(self.places + first) } else { 0 };
        Some(KeptAt { values: at(first), velocity })
    }

    /// Enqueues the product of what was left out, of all parts, and a factor. The thread has the
    /// context.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub(crate) fn scale(&self, stream: &Stream, coder: Coder, factor: f32) -> Result<(), GpuError> {
        self.parts().try_for_each(|(part, place)| {
            let at = self.at(part).expect("a part that is listed has memory");
            // SAFETY: this memory, which stays while the stream has work; all that uses it is in
            // this stream, by the invariant.
            unsafe { coder.scale(stream, at, place.len(), factor) }
        })
    }

    /// Enqueues a copy of all of it into pinned memory. The thread has the context.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// The pinned memory stays until the copy is done, and nobody uses it meanwhile.
    pub(crate) unsafe fn copy_to(&self, to: &Pinned, stream: &Stream) -> Result<(), GpuError> {
        assert!(to.len() >= self.bytes(), "the memory has room for what is kept");
        // SAFETY: this memory, which stays while the stream has work; the caller vouches for the
        // target.
        unsafe { stream.copy_to_host(to.as_ptr(), self.address, self.bytes()) }
    }

    /// Enqueues a copy of the values in pinned memory, or of the velocities there, into this. The
    /// thread has the context.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// As [`copy_to`](Self::copy_to).
    pub(crate) unsafe fn copy_from(
        &self,
        from: &Pinned,
        is_velocity: bool,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        assert!(from.len() >= self.bytes(), "the memory holds what is to be kept");
        let (first, bytes) = (self.first(is_velocity) * F32, self.places * F32);
        let (to, from) = (self.address + first as u64, from.as_ptr().wrapping_add(first));
        // SAFETY: this memory, which stays while the stream has work; the caller vouches for the
        // source.
        unsafe { stream.copy_to_device(to, from, bytes) }
    }

    /// The place of the first value, or of the first velocity.
    fn first(&self, is_velocity: bool) -> usize {
        assert!(self.keeps.velocity || !is_velocity, "there are velocities");
        if is_velocity { self.places } else { 0 }
    }

    /// What pinned memory has of this layout: of each part's values, or velocities, with the
    /// part's number.
    ///
    /// # Safety
    /// The memory is of [`bytes`](Self::bytes) bytes at least, and no copy uses it.
    pub(crate) unsafe fn slices<'a>(
        &'a self,
        memory: &'a mut Pinned,
        is_velocity: bool,
    ) -> impl Iterator<Item = (usize, &'a mut [f32])> + 'a {
        let first = self.first(is_velocity);
        let at = memory.as_ptr().cast::<f32>();
        self.parts().map(move |(part, place)| {
            // SAFETY: pinned memory begins at a page and was zeroed, and the places of parts are
            // apart; the caller vouches for the rest.
            let values =
                unsafe { std::slice::from_raw_parts_mut(at.add(first + place.start), place.len()) };
            (part, values)
        })
    }

    /// Gives it back, behind all that was enqueued in the stream. The thread has the context.
    pub(crate) fn give_back(self, stream: &Stream) {
        let cuda = stream.device().cuda();
        // SAFETY: it was taken in this stream, and nobody enqueues anything with it any more. The
        // end of a job is no place for another error.
        let code = unsafe { (cuda.call.cuMemFreeAsync)(self.address, stream.handle()) };
        let _ = cuda.check("cuMemFreeAsync", code);
    }
}
