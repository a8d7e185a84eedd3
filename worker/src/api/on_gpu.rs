//! A rank's GPU: opening it, and tensors that are pushed from there.

use super::{Worker, bounce, open_gpu};
use crate::base::error::{Error, Refusal, StartError};
use crate::base::lock;
use crate::base::task::Handle;
use crate::base::types::GpuPushPull;
use crate::cuda::PooledEvent;
use crate::gpu::bounce::{BounceInbox, BouncePush};
use crate::job::Job;
use crate::job::declared::What;
use crate::rounds::handover::GpuPush;
use bps_engine::base::{Operation, Rank};
use std::sync::Arc;

impl Worker {
    /// Opens the GPU of this number, as the process sees them: from now on tensors of it can be
    /// declared and pushed. All ranks of the job call it, each with its own, before the first of
    /// them declares one. The same GPU again costs nothing.
    ///
    /// # Errors
    /// [`Error::Start`] with what is missing, here or on another rank; [`Error::Config`] for a
    /// second GPU.
    pub fn open_gpu(&self, ordinal: u32) -> Result<(), Error> {
        let mut gpu = lock(&self.0.gpu);
        gpu.check(ordinal)?;
        if gpu.is_open {
            return Ok(());
        }
        let opened = gpu.device(ordinal);
        if let Some(job) = &self.0.job {
            // The other ranks wait for this one, and are told what is wrong.
            open_gpu::open(self, job, &opened, &self.0.config)?;
        }
        (gpu.device, gpu.is_open) = (Some(opened.map_err(StartError::Gpu)?), true);
        Ok(())
    }

    /// Lets tensors of the host be pushed from this GPU. No other rank need do so.
    ///
    /// # Errors
    /// As [`open_gpu`](Self::open_gpu), of this rank alone.
    pub fn use_gpu(&self, ordinal: u32) -> Result<(), Error> {
        let mut gpu = lock(&self.0.gpu);
        gpu.check(ordinal)?;
        if gpu.device.is_none() {
            gpu.device = Some(gpu.device(ordinal).map_err(StartError::Gpu)?);
        }
        Ok(())
    }

    /// As [`push_pull`](Self::push_pull), for tensors in the memory of the GPU: starts once a
    /// framework's stream has passed what is enqueued in it now, and waits for nothing. After a
    /// wait, [`Handle::make_wait`] puts the framework's stream behind the result.
    ///
    /// A tensor that was declared as one of the host passes pinned memory of the host.
    ///
    /// # Safety
    /// As [`push_pull`](Self::push_pull), with memory of the GPU. `stream` is 0 (the legacy default
    /// stream) or a stream of that GPU.
    ///
    /// # Errors
    /// [`Error::Refused`] for a tensor that was not declared, or where no GPU is in use; then none
    /// is started.
    pub unsafe fn push_pull_gpu(
        &self,
        items: &[GpuPushPull],
        stream: usize,
    ) -> Result<Vec<Handle>, Error> {
        let refused = Refusal::Gpu;
        let Some((device, events)) = lock(&self.0.gpu).device.clone() else {
            return Err(Refusal::NoGpu.into());
        };
        let declared = lock(&self.0.declared);
        let known = |item: &GpuPushPull| Ok((*item, declared.what_on_gpu(item.tensor)?.clone()));
        let items: Vec<_> = items.iter().map(known).collect::<Result<_, Error>>()?;
        drop(declared);
        for (item, what) in &items {
            let is_root = what.operation == Operation::Broadcast(Rank(self.0.rank));
            let copies = self.0.job.is_none() || is_root;
            if copies && what.bytes > 0 && item.source != item.target {
                // SAFETY: both are valid for the declared bytes and do not overlap, and the stream
                // is one of this GPU, as the caller promises.
                unsafe { device.copy_in(stream, item.target, item.source, what.bytes) }
                    .map_err(refused)?;
            }
        }
        let ready = events.take().map_err(refused)?;
        // SAFETY: the caller vouches for the stream.
        unsafe { ready.record_raw(stream) }.map_err(refused)?;
        let ready = Arc::new(ready);
        let Some(job) = &self.0.job else {
            return Ok(items.iter().map(|_| Handle::finished_behind(&ready)).collect());
        };
        let has_host = items.iter().any(|(_, what)| !what.device);
        let bounce = has_host.then(|| self.bounce(job)).transpose()?;
        self.0.count(items.iter().map(|(item, _)| item.tensor));
        let Some(bounce) = bounce else {
            return Ok(job.push_gpu(items.into_iter().map(|(item, _)| item), &ready));
        };
        let mut handles = Vec::with_capacity(items.len());
        for (item, what) in items {
            match what.device {
                true => handles.extend(job.push_gpu(std::iter::once(item), &ready)),
                false => handles.push(self.push_by(&bounce, job, item, &what, &ready)),
            }
        }
        bounce.bell.ring();
        Ok(handles)
    }

    /// Where tensors of the host are pushed from this process's GPU, which is in use.
    fn bounce(&self, job: &Job) -> Result<BounceInbox, Error> {
        let mut gpu = lock(&self.0.gpu);
        if gpu.bounce.is_none()
            && let Some((device, events)) = &gpu.device
        {
            gpu.bounce = Some(bounce::begin(job, device, events)?);
        }
        gpu.bounce.clone().ok_or_else(|| Refusal::NoGpu.into())
    }

    fn push_by(
        &self,
        bounce: &BounceInbox,
        job: &Job,
        item: GpuPushPull,
        what: &What,
        ready: &Arc<PooledEvent>,
    ) -> Handle {
        let GpuPushPull { tensor, source, target, priority } = item;
        let (task, ready) = (job.task(), Arc::clone(ready));
        let handle = Handle::of(&task);
        let root = match what.operation {
            Operation::Broadcast(root) => Some(root == Rank(self.0.rank)),
            _ => None,
        };
        let push = Box::new(GpuPush { source, target, priority, task, ready });
        // The root of a broadcast has copied what it gives.
        let (gives, takes) = (root != Some(false), root != Some(true));
        let one = BouncePush { tensor: tensor.0, bytes: what.bytes, gives, takes, push };
        bounce.push(one, || job.nic.why_ended());
        handle
    }

    /// Enqueues a copy within the memory of the GPU in one of the framework's streams.
    ///
    /// # Safety
    /// Both addresses are valid for `bytes` bytes and do not overlap, and nobody else uses that
    /// memory, in the order of the stream; the stream is 0 or one of this GPU.
    ///
    /// # Errors
    /// [`Error::Refused`] without a GPU, or for what the driver says.
    pub unsafe fn copy_on_gpu(
        &self,
        target: u64,
        source: u64,
        bytes: usize,
        stream: usize,
    ) -> Result<(), Error> {
        let Some((device, _)) = lock(&self.0.gpu).device.clone() else {
            return Err(Refusal::NoGpu.into());
        };
        // SAFETY: as the caller promises.
        unsafe { device.copy_in(stream, target, source, bytes) }
            .map_err(|cause| Refusal::Gpu(cause).into())
    }

    /// The results of these are read in streams that [`Handle::make_wait`] puts behind them, and
    /// not by the host: so a wait for a handle may end once what brings its result is enqueued,
    /// although that has not come. Where the engine cannot do so, and for tensors of the host, this
    /// changes nothing.
    ///
    /// Should the job end before such a result has come, all bits of it are set, which makes every
    /// float a NaN; the next call of this worker says why.
    pub fn enqueue_results(&self, handles: &[Handle]) {
        if let Some(job) = &self.0.job {
            job.want(handles);
        }
    }
}
