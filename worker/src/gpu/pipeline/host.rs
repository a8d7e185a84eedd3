//! The collectives among the ranks of a host: rows are reduced before they go to servers, and
//! gathered when their results have come.

use super::super::nccl::ReduceOp;
use super::super::rows::Row;
use super::{Host, Of, Pipeline, Run, Tensor};
use crate::gpu::GpuError;
use crate::nic::PlanPart;
use bps_engine::base::{Operation, Rank};

impl Host {
    fn place(&self, rank: Rank) -> u32 {
        let place = self.ranks.iter().position(|one| *one == rank).unwrap_or(0);
        u32::try_from(place).unwrap_or(0)
    }
}

impl Tensor {
    fn parts_of(&self, row: &Row) -> &[PlanPart] {
        &self.plan.parts[row.first as usize..][..row.count as usize]
    }

    /// Whether no server takes part: the host is the whole job.
    pub(super) fn is_local(&self) -> bool {
        self.plan.parts.first().is_some_and(|part| part.core.is_none())
    }
}

impl Pipeline {
    /// Reduces these rows, in one group of calls, as every rank of the host does now.
    pub(super) fn reduce(&mut self, batch: &[Of]) -> Result<(), GpuError> {
        let Some(host) = &self.host else { return Ok(()) };
        for of in batch {
            if let Some(Some(Tensor { run: Some(run), .. })) = self.tensors.get(of.tensor as usize)
            {
                host.stream.wait(&run.push.ready)?;
            }
        }
        let tensors = &self.tensors;
        host.comm.group(|| {
            for of in batch {
                if let Some(Some(tensor)) = tensors.get(of.tensor as usize)
                    && let Some(run) = &tensor.run
                {
                    reduce_row(host, tensor, run, &tensor.rows[of.index as usize])?;
                }
            }
            Ok(())
        })?;
        // The stream down comes to what it copies next only behind these.
        self.reduced.record(&host.stream)?;
        self.down.wait(&self.reduced)?;
        for of in batch {
            let Some(tensor) = self.tensor(of.tensor) else { continue };
            if tensor.is_local() {
                self.one_less(of.tensor)?;
                continue;
            }
            let row = tensor.rows[of.index as usize];
            let own: Vec<u32> = (row.first..row.first + row.count)
                .filter(|part| tensor.plan.parts[*part as usize].owner.is_none())
                .collect();
            for index in own {
                self.is_reduced(Of { tensor: of.tensor, index });
            }
        }
        Ok(())
    }

    /// Gathers these rows, in one group of calls, as every rank of the host does now.
    pub(super) fn gather(&mut self, batch: &[Of]) -> Result<(), GpuError> {
        let Some(host) = &self.host else { return Ok(()) };
        self.risen.record(self.up.stream())?;
        host.stream.wait(&self.risen)?;
        let tensors = &self.tensors;
        host.comm.group(|| {
            for of in batch {
                if let Some(Some(tensor)) = tensors.get(of.tensor as usize)
                    && let Some(run) = &tensor.run
                {
                    gather_row(host, tensor, run, &tensor.rows[of.index as usize])?;
                }
            }
            Ok(())
        })?;
        for of in batch {
            self.one_less(of.tensor)?;
        }
        Ok(())
    }
}

fn reduce_row(host: &Host, tensor: &Tensor, run: &Run, row: &Row) -> Result<(), GpuError> {
    let (comm, stream, dtype) = (&host.comm, &host.stream, tensor.plan.dtype);
    let parts = tensor.parts_of(row);
    let offset = parts[0].offset as u64;
    let (send, recv) = (run.push.source + offset, run.push.target + offset);
    let size = dtype.size();
    let op = match tensor.plan.operation {
        Operation::Broadcast(root) if tensor.is_local() => {
            let count = parts.iter().map(|part| part.bytes).sum::<usize>() / size;
            // SAFETY: the tensor is its caller's promise until the task is finished, and all ranks
            // declared it alike.
            return unsafe { comm.broadcast(recv, recv, count, dtype, host.place(root), stream) };
        }
        Operation::Broadcast(_) => return Ok(()),
        Operation::Average if tensor.is_local() => ReduceOp::Average,
        // The servers divide.
        Operation::Average | Operation::Sum => ReduceOp::Sum,
    };
    if tensor.is_local() {
        let count = parts.iter().map(|part| part.bytes).sum::<usize>() / size;
        // SAFETY: as above.
        return unsafe { comm.all_reduce(send, recv, count, dtype, op, stream) };
    }
    if row.whole {
        let own = recv + u64::from(comm.rank()) * parts[0].bytes as u64;
        // SAFETY: as above; the row's parts are one behind the other, one for each rank.
        return unsafe { comm.reduce_scatter(send, own, parts[0].bytes / size, dtype, op, stream) };
    }
    for part in parts {
        let at = part.offset as u64 - offset;
        let root = host.place(part.owner_rank);
        // SAFETY: as above.
        unsafe {
            comm.reduce(send + at, recv + at, part.bytes / size, dtype, op, root, stream)?;
        }
    }
    Ok(())
}

fn gather_row(host: &Host, tensor: &Tensor, run: &Run, row: &Row) -> Result<(), GpuError> {
    let (comm, stream, dtype) = (&host.comm, &host.stream, tensor.plan.dtype);
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
        let (count, root) = (part.bytes / dtype.size(), host.place(part.owner_rank));
        // SAFETY: as above.
        unsafe { comm.broadcast(at, at, count, dtype, root, stream) }?;
    }
    Ok(())
}
