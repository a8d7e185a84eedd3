//! The GPU of this process, once it has one.

#![forbid(unsafe_code)]

use crate::base::error::SettingError;
use crate::cuda::{Device, EventPool, GpuError};
use crate::gpu::bounce::BounceInbox;

/// Events of the GPU that are made when it is opened: two for each tensor of a model of some
/// hundreds that is under way as a whole. More are made when they are needed.
const EVENTS: usize = 1024;

/// The GPU of this process.
#[derive(Default)]
pub(super) struct OwnGpu {
    /// Once it is in use, with events of it.
    pub(super) device: Option<(Device, EventPool)>,
    /// All ranks have opened theirs with it.
    pub(super) is_open: bool,
    /// Where tensors of the host are pushed from it, once some were.
    pub(super) bounce: Option<BounceInbox>,
}

impl OwnGpu {
    /// The GPU of this number.
    pub(super) fn device(&self, ordinal: u32) -> Result<(Device, EventPool), GpuError> {
        if let Some(device) = &self.device {
            return Ok(device.clone());
        }
        let open = |device: Device| Ok((device.clone(), EventPool::new(&device, EVENTS)?));
        Device::open(ordinal).and_then(open)
    }

    pub(super) fn check(&self, asked: u32) -> Result<(), SettingError> {
        let open = self.device.as_ref().map(|(device, _)| device.ordinal());
        open.filter(|open| *open != asked)
            .map_or(Ok(()), |open| Err(SettingError::SecondGpu { open, asked }))
    }
}
