//! What encodings keep between rounds, where the GPU encodes: its memory, and who asks for it or
//! gives something for it.
//!
//! Invariant: all that reads or writes it is in the stream in which the tensor's parts are copied
//! down, so what is begun first takes effect first. A push may wait for the round before to end;
//! factors that come behind it wait as long. Copies are asked for while no push is under way.

use super::{DeviceTensor, Early, Pipeline};
use crate::base::types::Kept;
use crate::cuda::{Coder, GpuError, KeptMemory, Pinned, Track};
use crate::rounds::Plan;
use crate::rounds::handover::FromGpu;
use std::sync::mpsc::SyncSender;

/// A copy under way between this memory and pinned memory.
pub(super) struct Moving {
    tensor: u32,
    pinned: Pinned,
    mark: u32,
    is_staged: bool,
    /// Whom to tell what has come.
    tell: Option<SyncSender<Kept>>,
}

/// What is asked of the [module](self), and is not of one tensor.
#[derive(Default)]
pub(super) struct Keeping {
    moving: Vec<Moving>,
    /// Pinned memory of a copy that is done, for the next.
    spare: Option<Pinned>,
}

impl Keeping {
    /// Whether a copy is under way.
    pub(super) fn is_busy(&self) -> bool {
        !self.moving.is_empty()
    }

    /// Something on the GPU may use the pinned memory yet: it stays for the life of the process.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.moving));
    }

    fn pinned(&mut self, track: &Track, bytes: usize) -> Result<Pinned, GpuError> {
        match self.spare.take().filter(|spare| spare.len() >= bytes) {
            Some(spare) => Ok(spare),
            None => Pinned::new(track.stream().device(), bytes, None),
        }
    }
}

impl Pipeline {
    /// Memory for what a tensor keeps, and what encodes it; neither where the GPU has no memory for
    /// it. A coder that keeps nothing needs none.
    pub(super) fn keeper(
        &mut self,
        plan: &Plan,
        coder: Option<Coder>,
        is_staged: bool,
    ) -> (Option<Coder>, Option<KeptMemory>) {
        let Some((coder, keeps)) = coder.and_then(|coder| Some((coder, coder.keeps()?))) else {
            return (coder, None);
        };
        let rank = self.rank;
        let elements = plan.parts.iter().map(|part| {
            let is_encoded = part.holder == rank && coder.wire_bytes(part.bytes).is_some();
            is_encoded.then_some(part.bytes / plan.dtype.size())
        });
        match KeptMemory::take(self.down_of(is_staged).stream(), keeps, elements) {
            Ok(memory) => (memory.is_some().then_some(coder), memory),
            Err(error) => {
                let why = format!("it has no memory for what `{}` keeps: {error}", plan.name);
                (self.coding.without(&why), None)
            }
        }
    }

    /// Where the parts of a tensor are copied down.
    pub(super) fn down_of(&mut self, is_staged: bool) -> &mut Track {
        match &mut self.staged {
            Some(staged) if is_staged => &mut staged.down,
            _ => &mut self.down,
        }
    }

    /// What was left out of these tensors is multiplied, behind the rounds of all that was pushed.
    pub(super) fn on_scale(&mut self, tensors: &[u32], factor: f32) -> Result<(), GpuError> {
        for &tensor in tensors {
            match self.tensor(tensor) {
                None => self.early.push((tensor, Early::Factor(factor))),
                Some(state) if state.run.is_some() || state.pushed > state.round => {
                    state.rescales.push_back((state.pushed, factor));
                }
                Some(_) => self.scale(tensor, factor)?,
            }
        }
        Ok(())
    }

    /// A round of a tensor has ended, or the next is about to begin: what was left out of it is
    /// multiplied by what has come behind its push.
    pub(super) fn rescale(&mut self, tensor: u32) -> Result<(), GpuError> {
        while let Some(state) = self.tensor(tensor)
            && let Some(&(at, factor)) = state.rescales.front()
            && at <= state.round
        {
            state.rescales.pop_front();
            self.scale(tensor, factor)?;
        }
        Ok(())
    }

    fn scale(&mut self, tensor: u32, factor: f32) -> Result<(), GpuError> {
        let state = self.tensors.get(tensor as usize).and_then(Option::as_ref);
        let Some(state) = state else { unreachable!("its caller has found it") };
        if let (Some(kept), Some(coder)) = (&state.kept, state.coder) {
            let down = match (&self.staged, &state.staging) {
                (Some(staged), Some(_)) => &staged.down,
                _ => &self.down,
            };
            kept.scale(down.stream(), coder, factor)?;
        }
        self.tell(FromGpu::ScaleResidues { tensor, factor });
        Ok(())
    }

    /// Has what a tensor keeps told, once it has been copied.
    pub(super) fn on_tell_kept(
        &mut self,
        tensor: u32,
        to: SyncSender<Kept>,
    ) -> Result<(), GpuError> {
        let state = self.tensors.get(tensor as usize).and_then(Option::as_ref);
        let Some(DeviceTensor { kept: Some(memory), staging, .. }) = state else {
            self.tell(FromGpu::Kept { tensor, kept: Box::default(), to });
            return Ok(());
        };
        let down = match (&mut self.staged, staging) {
            (Some(staged), Some(_)) => &mut staged.down,
            _ => &mut self.down,
        };
        let pinned = self.keeping.pinned(down, memory.bytes())?;
        // SAFETY: the pinned memory is held until the track has passed the mark.
        unsafe { memory.copy_to(&pinned, down.stream()) }?;
        let (mark, is_staged) = (down.mark()?, staging.is_some());
        self.keeping.moving.push(Moving { tensor, pinned, mark, is_staged, tell: Some(to) });
        Ok(())
    }

    /// What a tensor keeps becomes this, where it is not empty.
    pub(super) fn on_keep(&mut self, tensor: u32, kept: &Kept) -> Result<(), GpuError> {
        let state = self.tensors.get(tensor as usize).and_then(Option::as_ref);
        let Some(DeviceTensor { kept: Some(memory), staging, plan, .. }) = state else {
            return Ok(());
        };
        let keeps = memory.keeps();
        let given = [(false, &kept.residue, keeps.residue), (true, &kept.velocity, keeps.velocity)];
        let given = given.into_iter().filter(|(_, given, is_kept)| *is_kept && !given.is_empty());
        let given: Vec<_> = given.collect();
        if given.is_empty() {
            return Ok(());
        }
        let down = match (&mut self.staged, staging) {
            (Some(staged), Some(_)) => &mut staged.down,
            _ => &mut self.down,
        };
        let mut pinned = self.keeping.pinned(down, memory.bytes())?;
        for (is_velocity, given, _) in given {
            // SAFETY: of so many bytes, and no copy uses these.
            for (part, values) in unsafe { memory.slices(&mut pinned, is_velocity) } {
                let first = plan.parts[part].offset / plan.dtype.size();
                values.copy_from_slice(&given[first..first + values.len()]);
            }
            // SAFETY: the pinned memory is held until the track has passed the mark.
            unsafe { memory.copy_from(&pinned, is_velocity, down.stream()) }?;
        }
        let (mark, is_staged) = (down.mark()?, staging.is_some());
        self.keeping.moving.push(Moving { tensor, pinned, mark, is_staged, tell: None });
        Ok(())
    }

    /// Copies that are done are told to who asked; says whether there was one.
    pub(super) fn end_moves(&mut self) -> bool {
        let down = self.down.passed();
        let staged = self.staged.as_ref().map(|staged| staged.down.passed());
        let is_done = |one: &mut Moving| {
            let passed = if one.is_staged { staged } else { Some(down) };
            passed.is_some_and(|passed| passed.has(one.mark))
        };
        let done = self.keeping.moving.extract_if(.., is_done).collect::<Vec<_>>();
        let progress = !done.is_empty();
        for Moving { tensor, mut pinned, tell, .. } in done {
            let state = self.tensors.get(tensor as usize).and_then(Option::as_ref);
            let state = state.and_then(|state| Some((state, state.kept.as_ref()?)));
            if let (Some(to), Some((DeviceTensor { plan, .. }, memory))) = (tell, state) {
                let kept = Box::new(kept_of(plan, memory, &mut pinned));
                self.tell(FromGpu::Kept { tensor, kept, to });
            }
            let spare = self.keeping.spare.take();
            let larger = spare.filter(|spare| spare.len() > pinned.len());
            self.keeping.spare = Some(larger.unwrap_or(pinned));
        }
        progress
    }
}

/// What a GPU keeps of a tensor, which has come from there.
fn kept_of(plan: &Plan, memory: &KeptMemory, pinned: &mut Pinned) -> Kept {
    let mut kept = Kept::default();
    let elements = plan.bytes() / plan.dtype.size();
    let keeps = memory.keeps();
    let all =
        [(false, keeps.residue, &mut kept.residue), (true, keeps.velocity, &mut kept.velocity)];
    for (is_velocity, _, whole) in all.into_iter().filter(|(_, is_kept, _)| *is_kept) {
        whole.resize(elements, 0.0);
        // SAFETY: of so many bytes, and the copy into it is done.
        for (part, values) in unsafe { memory.slices(pinned, is_velocity) } {
            let first = plan.parts[part].offset / plan.dtype.size();
            whole[first..first + values.len()].copy_from_slice(values);
        }
    }
    kept
}
