//! How payloads come into the sum of a key: where each lands, and when it is added.

use super::encoded::Turn;
use super::scaled::add_scaled;
use super::{Entry, Take, optimized};
use bps_engine::base::{DType, Operation};
use bps_engine::encode::Malformed;
use bps_engine::mem::Readable;
use bps_engine::reduce::Kernels;
use bps_engine::transport::LaneId;
use bps_engine::wire::header::Form;
use bps_engine::wire::{crc32c, crc32c_append};

impl Entry {
    /// A payload of this form begins to arrive on this lane. The entry must be
    /// [`free`](Self::free). If publications carry a checksum, that of the result is taken along
    /// with the last payload.
    pub fn begin(&mut self, lane: LaneId, form: Form, checks: bool) -> Take {
        assert!(self.free(), "{}: a payload was begun while another one was arriving", self.key);
        if self.is_restoring() {
            return self.begin_restored(lane, form);
        }
        (self.active, self.finishes) = (Some(lane), None);
        let gives_result = self.stored.is_some() || self.landed + 1 == self.payloads;
        self.checksum = (checks && gives_result).then_some(0);
        if self.optimized.as_ref().is_some_and(|key| key.takes_coded()) {
            return Take::Land;
        }
        let first = self.landed == 0;
        if let Some(encoded) = &mut self.encoded {
            encoded.begin(form, first);
            if encoded.lands() {
                return Take::Land;
            }
        }
        if self.is_apart() {
            return self.begin_apart();
        }
        if self.shrinks_sums() {
            return self.begin_some(checks);
        }
        // What is encoded is divided then.
        let is_plain = self.encoded.as_ref().is_none_or(|one| one.result() == Form::Plain);
        let is_last = self.landed + 1 == self.payloads;
        self.finishes = (is_plain && is_last).then(|| self.divisor());
        let alone = self.payloads == 1;
        let is_result = alone && self.divisor() == 1;
        let is_sum = !alone && self.dtype.accumulator() == self.dtype;
        if first && (is_result || is_sum) { Take::Land } else { Take::Pieces }
    }

    /// Whether a group may divide its sum before it sends it: see
    /// [`FLAG_SCALED`](bps_engine::wire::header::FLAG_SCALED).
    #[must_use]
    pub fn may_be_scaled(&self, form: Form) -> bool {
        let is_plain = self.encoded.is_none() || form == Form::Plain;
        self.dtype == DType::F16 && self.operation == Operation::Average && is_plain
    }

    /// A payload is there, and as it was sent: adds it, if it was encoded. The last one of a key
    /// with an optimizer lets it step.
    ///
    /// # Errors
    /// It is no encoding of the key's elements; then the round can't be published.
    pub fn decode(&mut self, kernels: &Kernels) -> Result<(), Malformed> {
        let is_last = self.landed + 1 == self.payloads;
        if let Some(optimized) = &mut self.optimized {
            let (memory, round) = (&mut self.accumulator, self.round + 1);
            optimized.add(memory, round, self.landed == 0)?;
            if is_last {
                let divisor = optimized::divisor(self.operation, self.groups.ranks());
                optimized.act(kernels, memory, divisor, round);
                // SAFETY: the entry's own claim, of which nothing is lent.
                let result = || unsafe { optimized.result(memory).bytes() };
                self.checksum = self.checksum.map(|_| crc32c(result()));
            }
            return Ok(());
        }
        let turn = Turn {
            round: self.round + 1,
            is_first: self.landed == 0,
            divisor: is_last.then(|| self.divisor()),
        };
        let Some(encoded) = &mut self.encoded else { return Ok(()) };
        encoded.add(kernels, &mut self.accumulator, turn)?;
        if encoded.result() == Form::Plain {
            return Ok(());
        }
        // SAFETY: the entry's own claim, of which nothing was lent since the payload has landed.
        let result = || unsafe { encoded.payload(&self.accumulator).bytes() };
        self.checksum = self.checksum.map(|_| crc32c(result()));
        Ok(())
    }

    /// A piece of the active payload, `done` bytes of which came before it. The payload was divided
    /// by `scale`, which is 1 unless it [may be scaled](Self::may_be_scaled).
    ///
    /// # Panics
    /// The payload has not so many bytes.
    pub fn add_piece(&mut self, kernels: &Kernels, done: usize, piece: Readable, scale: u32) {
        if self.is_restoring() {
            return;
        }
        let (data, length) = (piece.as_ptr(), piece.len());
        let fits = done.checked_add(length).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{}: a piece is beyond the payload", self.key);
        let size = self.dtype.size();
        let count = length / size;
        let wide = done / size * self.dtype.accumulator().size();
        let (reduction, dtype) = (self.operation.reduction(), self.dtype);
        let (last, divisor) = (self.finishes.is_some(), self.finishes.unwrap_or(1));
        // SAFETY: `done + length <= bytes`, so both offsets stay inside the accumulator (kept by
        // `new`), which is lent to nobody while a payload comes in pieces; the piece was lent to
        // us. The narrow result at `done` never passes the wide input at `wide >= done`.
        unsafe {
            let accumulator = self.accumulator.as_ptr().add(wide);
            let out = self.accumulator.as_ptr().add(done);
            if scale > 1 {
                add_scaled(kernels, accumulator, data, count, scale, self.landed == 0);
                if last {
                    kernels.finish(dtype, out, accumulator, count, divisor);
                }
            } else if last && self.landed > 0 {
                kernels.reduce_finish(reduction, dtype, out, accumulator, data, count, divisor);
            } else if self.landed == 0 {
                kernels.store(dtype, accumulator, data, count);
                if last {
                    kernels.finish(dtype, out, accumulator, count, divisor);
                }
            } else {
                kernels.reduce(reduction, dtype, accumulator, data, count);
            }
        }
        if let Some(checksum) = self.checksum.as_mut().filter(|_| self.optimized.is_none()) {
            let out = self.accumulator.as_ptr().cast_const();
            // SAFETY: the accumulator is this entry's own claim, and this was the last payload or a
            // delta, so the result stands there, initialised.
            let result = unsafe { std::slice::from_raw_parts(out.add(done), length) };
            *checksum = crc32c_append(*checksum, result);
        }
    }
}
