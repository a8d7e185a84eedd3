//! Copies between the GPU and the slots: down of what is to be sent, up of what has landed.

use super::{BYTES_OF_MARK, COPIES_OF_MARK, Copying, DeviceTensor, Of, Pipeline};
use crate::cuda::{Coder, GpuError, KeptAt, Track};
use crate::rounds::handover::{From, FromGpu};
use crate::rounds::{Lacks, PartOf, Pool, Slot};
use bps_engine::base::Operation;
use bps_engine::encode::Draw;
use bps_engine::proto::encoding::draw;
use bps_engine::trace::timeline::Mark;

/// How a part is encoded in the round that is open.
#[derive(Clone, Copy)]
pub(super) struct PartCoder {
    coder: Coder,
    /// Bytes of it in its slot.
    pub(super) encoded: usize,
    /// The random numbers of its round.
    draw: Draw,
    /// Where it keeps what it keeps between rounds.
    kept: Option<KeptAt>,
}

impl Pipeline {
    /// Copies parts into the slots that are free.
    pub(super) fn copy_down(&mut self) -> Result<bool, GpuError> {
        let (mut copies, mut bytes) = (0, 0);
        let mut progress = false;
        while !self.free.is_empty()
            && let Some(of) = self.to_copy.pop()
        {
            let is_alone = self.host.is_none();
            let Some(DeviceTensor { run: Some(run), plan, round, .. }) = self.tensor(of.tensor)
            else {
                continue;
            };
            let round = *round;
            let part = plan.parts[of.index as usize];
            let is_broadcast = matches!(plan.operation, Operation::Broadcast(_));
            let from = if is_alone && !is_broadcast { run.push.source } else { run.push.target };
            let Some(slot) = self.free.pop() else { break };
            let coder = self.coder_of(of);
            // SAFETY: the part lies inside the tensor, which its caller keeps until the task is
            // finished; the slot is of this part alone until it is given back.
            unsafe { fill(&mut self.down, slot, from + part.offset as u64, part.bytes, coder) }?;
            let copy = Copying { mark: self.down.next_mark(), of, round, slot };
            (copies, bytes) = (copies + 1, bytes + part.bytes);
            if copies >= COPIES_OF_MARK || bytes >= BYTES_OF_MARK {
                self.down.mark()?;
                (copies, bytes) = (0, 0);
            }
            if self.falling.is_empty() {
                self.trace.copy(Mark::Falling, &copy, &self.tensors);
            }
            self.falling.push_back(copy);
            progress = true;
        }
        if copies > 0 {
            self.down.mark()?;
        }
        Ok(progress)
    }

    /// Marks the copies up that have no mark yet.
    pub(super) fn mark_up(&mut self) -> Result<(), GpuError> {
        if self.unmarked.0 > 0 {
            self.unmarked = (0, 0);
            self.up.mark()?;
        }
        Ok(())
    }

    /// A part is in its slot.
    pub(super) fn has_fallen(&mut self, copy: &Copying) {
        self.trace.copy(Mark::Fallen, copy, &self.tensors);
        if let Some(next) = self.falling.front() {
            self.trace.copy(Mark::Falling, next, &self.tensors);
        }
        let Copying { of, round, slot, .. } = *copy;
        let Some(DeviceTensor { run: Some(run), .. }) = self.tensor(of.tensor) else {
            return self.free.push(slot);
        };
        let priority = run.push.priority;
        let encoded = self.coder_of(of).map(|coder| coder.encoded);
        let of = PartOf { tensor: of.tensor, index: of.index };
        self.tell(FromGpu::Part { of, round, priority, from: From::Slot(slot), encoded });
    }

    /// A result has left its slot.
    pub(super) fn has_risen(&mut self, copy: &Copying) {
        self.trace.copy(Mark::Risen, copy, &self.tensors);
        if let Some(next) = self.rising.front() {
            self.trace.copy(Mark::Rising, next, &self.tensors);
        }
        self.tell(FromGpu::Land(copy.slot));
    }

    /// What encodes a part and decodes it; none if it is in its slot as it is in the tensor.
    pub(super) fn coder_of(&self, of: Of) -> Option<PartCoder> {
        let tensor = self.tensors.get(of.tensor as usize)?.as_ref()?;
        let part = tensor.plan.parts[of.index as usize];
        let coder = tensor.coder?;
        let encoded = coder.wire_bytes(part.bytes)?;
        let draw = draw(part.key, tensor.round, self.rank.0);
        let kept = tensor.kept.as_ref().and_then(|kept| kept.at(of.index as usize));
        Some(PartCoder { coder, encoded, draw, kept })
    }

    /// The servers' result of a part has come, in a slot if it has bytes.
    pub(super) fn on_landed(
        &mut self,
        of: PartOf,
        slot: Option<Slot>,
        lacks: Lacks,
    ) -> Result<(), GpuError> {
        let Some(DeviceTensor { run: Some(run), plan, row_of, states, round, .. }) =
            self.tensor(of.tensor)
        else {
            // As in `one_less`: the NIC loop says nothing of a tensor whose round was let go.
            unreachable!("what lands was sent in a round that is open")
        };
        let (part, row) = (plan.parts[of.index as usize], row_of[of.index as usize]);
        let round = *round;
        let target = run.push.target + part.offset as u64;
        run.lacks = run.lacks.or(lacks);
        let state = &mut states[row as usize];
        state.missing = state.missing.checked_sub(1).expect("a part lands once in a round");
        let is_whole = state.missing == 0;
        if slot.is_some_and(|slot| slot.pool() == Pool::Own) {
            self.has_landed_staged(Of { tensor: of.tensor, index: of.index })?;
        } else if let Some(slot) = slot {
            if slot.is_on_gpu() {
                self.direct.flush(self.up.stream().device())?;
            }
            let of = Of { tensor: of.tensor, index: of.index };
            let coder = self.coder_of(of);
            // SAFETY: the part lies inside the tensor, which its caller keeps until the task is
            // finished; the slot goes back only when the stream has passed the copy.
            unsafe { empty(&mut self.up, slot, target, part.bytes, coder) }?;
            let copy = Copying { mark: self.up.next_mark(), of, round, slot };
            let (copies, bytes) = self.unmarked;
            self.unmarked = (copies + 1, bytes + part.bytes);
            if copies + 1 >= COPIES_OF_MARK || bytes + part.bytes >= BYTES_OF_MARK {
                self.mark_up()?;
            }
            if self.rising.is_empty() {
                self.trace.copy(Mark::Rising, &copy, &self.tensors);
            }
            self.rising.push_back(copy);
        }
        if !is_whole {
            return Ok(());
        }
        if self.host.is_none() {
            return self.one_less(of.tensor);
        }
        self.say_landed(Of { tensor: of.tensor, index: row });
        Ok(())
    }
}

/// Gathers a copy from the tensor into a slot, or enqueues what encodes it there.
///
/// # Safety
/// As [`Track::copy_to_host`].
pub(super) unsafe fn fill(
    track: &mut Track,
    slot: Slot,
    from: u64,
    bytes: usize,
    coder: Option<PartCoder>,
) -> Result<(), GpuError> {
    let at = slot.memory(bytes).as_ptr();
    // SAFETY: the caller's promise. What is encoded takes no more than the part, and slots begin at
    // lines of the cache.
    unsafe {
        match (coder, slot.is_on_gpu()) {
            (Some(of), _) => of.coder.encode(track.stream(), from, at, bytes, (of.draw, of.kept)),
            (None, true) => track.stream().copy_on_device(at.addr() as u64, from, bytes),
            (None, false) => track.copy_to_host(at, from, bytes),
        }
    }
}

/// Gathers a copy from a slot into the tensor, or enqueues what decodes it there.
///
/// # Safety
/// As [`Track::copy_to_host`].
pub(super) unsafe fn empty(
    track: &mut Track,
    slot: Slot,
    to: u64,
    bytes: usize,
    coder: Option<PartCoder>,
) -> Result<(), GpuError> {
    let at = slot.memory(bytes).as_ptr();
    // SAFETY: the caller's promise. What is decoded takes no more of the slot than the part, and
    // slots begin at lines of the cache.
    unsafe {
        match (coder, slot.is_on_gpu()) {
            (Some(of), _) => of.coder.decode(track.stream(), at, to, bytes, of.draw),
            (None, true) => track.stream().copy_on_device(to, at.addr() as u64, bytes),
            (None, false) => track.copy_to_device(to, at, bytes),
        }
    }
}
