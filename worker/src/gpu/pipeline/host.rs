//! The collectives among the ranks of a host: rows are reduced before they go to servers, and
//! gathered when their results have come.

use super::super::rows::Row;
use super::{Batch, DeviceTensor, Host, Of, Ordered, Pipeline, Run};
use crate::cuda::{Awaited, GpuError, ReduceOp};
use crate::rounds::PlanPart;
use bps_engine::base::{Operation, Rank};
use std::sync::Arc;

impl Host {
    /// NCCL's number of a rank of this rank's switch.
    fn number(&self, rank: Rank) -> u32 {
        u32::try_from(self.switches.column(rank)).expect("ranks are counted in u32")
    }
}

impl DeviceTensor {
    fn parts_of(&self, row: &Row) -> &[PlanPart] {
        &self.plan.parts[row.parts()]
    }
}

impl Pipeline {
    /// Submits what was ordered, a batch after the other, as far as NCCL has enqueued the one
    /// before.
    pub(super) fn carry_out(&mut self) -> Result<bool, GpuError> {
        let mut progress = false;
        loop {
            let Some(host) = &self.host else { return self.let_go().map(|()| progress) };
            if let Some((batch, since)) = self.submitted.take() {
                if !host.comm.is_enqueued()? {
                    if self.now.saturating_sub(since) > host.patience {
                        let (awaited, after) = (Awaited::Enqueueing, host.patience);
                        return Err(GpuError::Timeout { awaited, after });
                    }
                    self.submitted = Some((batch, since));
                    return Ok(progress);
                }
                self.enqueued(batch)?;
                self.let_go()?;
            } else if let Some(batch) = self.orders.pop_front().or_else(|| self.give_order()) {
                self.trace.submitted(&batch, &self.tensors);
                match self.submit(&batch)? {
                    true => self.enqueued(batch)?,
                    false => self.submitted = Some((batch, self.now)),
                }
            } else {
                return self.let_go().map(|()| progress);
            }
            progress = true;
        }
    }

    /// Makes the calls of a batch, as every rank of the host does now. Says whether they are
    /// enqueued.
    fn submit(&mut self, batch: &Batch) -> Result<bool, GpuError> {
        let Some(host) = &mut self.host else { unreachable!("a rank alone orders no batch") };
        let tensors = &self.tensors;
        let rows = || batch.rows.iter().map(|of| row_of(tensors, *of));
        match batch.order {
            // What has risen of the results is gathered.
            Ordered::Gather => {
                self.up.record(&self.risen)?;
                host.track.wait(&self.risen)?;
            }
            _ => {
                // Tensors that were pushed together have one event.
                let mut last = None;
                for (_, run, _) in rows() {
                    let event = Arc::as_ptr(&run.push.ready);
                    if last != Some(event) {
                        host.track.wait(&run.push.ready)?;
                    }
                    last = Some(event);
                }
            }
        }
        let host = &*host;
        host.comm.submit(|| {
            rows().try_for_each(|(tensor, run, row)| match batch.order {
                Ordered::Gather => gather_row(host, tensor, run, row),
                _ => reduce_row(host, tensor, run, row),
            })
        })
    }

    /// NCCL has enqueued a batch.
    fn enqueued(&mut self, mut batch: Batch) -> Result<(), GpuError> {
        if let Some(host) = &mut self.host {
            self.trace.enqueued(&batch, &self.tensors, &mut host.track)?;
        }
        if batch.order == Ordered::Reduce
            && let Some(host) = &self.host
        {
            // The stream down comes to what it copies next only behind these.
            self.reduced.record(host.track.stream())?;
            self.down.wait(&self.reduced)?;
        }
        for of in &batch.rows {
            let (tensor, _, row) = row_of(&self.tensors, *of);
            if batch.order == Ordered::Gather || tensor.is_local {
                self.one_less(of.tensor)?;
                continue;
            }
            for index in row.first..row.first + row.count {
                self.is_reduced(Of { tensor: of.tensor, index });
            }
        }
        batch.rows.clear();
        self.spare.push(batch.rows);
        // Before NCCL enqueues the next batch in the same stream.
        self.mark_results()
    }
}

/// A row of a batch. Its round is open until NCCL has enqueued the batch: each row is one of the
/// open ends of its run (`Run::left`), and `let_go` keeps the rounds of what is ordered. If a row
/// were skipped, NCCL's calls would differ between the ranks of the host, and all would hang.
fn row_of(tensors: &[Option<DeviceTensor>], of: Of) -> (&DeviceTensor, &Run, &Row) {
    let tensor = tensors.get(of.tensor as usize).and_then(Option::as_ref);
    let Some(tensor @ DeviceTensor { run: Some(run), .. }) = tensor else {
        unreachable!("the round of an ordered row is open")
    };
    (tensor, run, &tensor.rows[of.index as usize])
}

fn reduce_row(host: &Host, tensor: &DeviceTensor, run: &Run, row: &Row) -> Result<(), GpuError> {
    let (comm, stream, dtype) = (&host.comm, host.track.stream(), tensor.plan.dtype);
    let parts = tensor.parts_of(row);
    let offset = parts[0].offset as u64;
    let (send, recv) = (run.push.source + offset, run.push.target + offset);
    let size = dtype.size();
    let op = match tensor.plan.operation {
        Operation::Broadcast(root) if tensor.is_local => {
            let count = parts.iter().map(|part| part.bytes).sum::<usize>() / size;
            // SAFETY: the tensor is its caller's promise until the task is finished, and all ranks
            // declared it alike.
            return unsafe { comm.broadcast(recv, recv, count, dtype, host.number(root), stream) };
        }
        Operation::Broadcast(_) => return Ok(()),
        Operation::Average if tensor.is_local => ReduceOp::Average,
        // The servers divide.
        Operation::Average | Operation::Sum => ReduceOp::Sum,
        Operation::Min => ReduceOp::Min,
        Operation::Max => ReduceOp::Max,
        Operation::Product => ReduceOp::Product,
    };
    if tensor.is_local {
        let count = parts.iter().map(|part| part.bytes).sum::<usize>() / size;
        // SAFETY: both ranges are the caller's until the task is finished, `count` elements from
        // the row's offset on lie within the tensor, and all ranks declared it alike.
        return unsafe { comm.all_reduce(send, recv, count, dtype, op, stream) };
    }
    if row.whole {
        let own = recv + u64::from(comm.rank()) * parts[0].bytes as u64;
        // SAFETY: both ranges are the caller's until the task is finished. The row's parts are of
        // equal size, one behind the other, one for each rank, so `own` lies within the tensor.
        return unsafe { comm.reduce_scatter(send, own, parts[0].bytes / size, dtype, op, stream) };
    }
    for part in parts {
        let at = part.offset as u64 - offset;
        let root = host.number(part.holder);
        // SAFETY: both ranges are the caller's until the task is finished, and the part lies within
        // the tensor, at the same place on all ranks.
        unsafe {
            comm.reduce(send + at, recv + at, part.bytes / size, dtype, op, root, stream)?;
        }
    }
    Ok(())
}

fn gather_row(host: &Host, tensor: &DeviceTensor, run: &Run, row: &Row) -> Result<(), GpuError> {
    let (comm, stream, dtype) = (&host.comm, host.track.stream(), tensor.plan.dtype);
    let parts = tensor.parts_of(row);
    if row.whole {
        let recv = run.push.target + parts[0].offset as u64;
        let own = recv + u64::from(comm.rank()) * parts[0].bytes as u64;
        // SAFETY: the tensor is its caller's promise until the task is finished, and all ranks
        // declared it alike; the row's parts are one behind the other, one for each rank.
        return unsafe { comm.all_gather(own, recv, parts[0].bytes / dtype.size(), dtype, stream) };
    }
    for part in parts {
        let at = run.push.target + part.offset as u64;
        let (count, root) = (part.bytes / dtype.size(), host.number(part.holder));
        // SAFETY: the target is its caller's promise until the task is finished, and the part lies
        // within it, at the same place on all ranks.
        unsafe { comm.broadcast(at, at, count, dtype, root, stream) }?;
    }
    Ok(())
}
