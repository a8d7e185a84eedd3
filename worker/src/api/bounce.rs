//! The thread by which tensors of the host are pushed from a GPU.

#![forbid(unsafe_code)]

use crate::base::error::{Error, Source, StartError};
use crate::base::task::{Handle, Task};
use crate::cuda::{Device, EventPool, GpuError};
use crate::gpu::bounce::{Bounce, BounceInbox, Carrier};
use crate::job::nic_loop::Command;
use crate::job::{Job, NicSide};
use crate::rounds::Memory;
use bps_engine::harness;
use bps_engine::optimize::Act;
use bps_engine::trace::log;
use std::sync::Arc;

/// The NIC loop.
struct Lanes(NicSide);

impl Carrier for Lanes {
    fn push(&self, tensor: u32, memory: Memory, priority: i64) -> Handle {
        // Nobody spins for it, and its caller's own task has the time of the timeline.
        self.0.push(tensor, memory, priority, Act::NONE, Arc::new(Task::default()))
    }

    fn wake(&self) {
        self.0.wake();
    }

    fn fail(&self, error: &GpuError) {
        // A loop that has ended, or hangs, has told the others why.
        let _ = self.0.command(Command::GpuFailed { source: Source::new(error.clone()) });
        self.0.wake();
    }

    fn ended(&self) -> Option<Error> {
        self.0.has_ended().then(|| self.0.why_ended())
    }
}

/// Starts the thread, for this process's GPU.
///
/// # Errors
/// What the driver or the kernel refuses.
pub(crate) fn begin(
    job: &Job,
    device: &Device,
    events: &EventPool,
) -> Result<BounceInbox, StartError> {
    let inbox = BounceInbox::new(Arc::clone(&job.gpu.bouncing));
    let (carrier, node) = (Lanes(job.nic.clone()), device.numa_node());
    let bounce = Bounce::new(device, events.clone(), node, inbox.clone(), carrier);
    let (bounce, device) = (bounce.map_err(StartError::Gpu)?, device.clone());
    let body = move || {
        if let Err(error) = device.make_current() {
            log::error!("{error}");
        }
        bounce.run();
    };
    let thread = harness::spawn("bps-bounce", None, body)
        .map_err(|error| StartError::resource("no thread", error))?;
    job.keep_by(thread, &inbox.bell);
    Ok(inbox)
}
