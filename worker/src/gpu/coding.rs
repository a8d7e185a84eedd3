//! Which tensors the GPU encodes: those whose codec has kernels. These are loaded when the first
//! such tensor is declared, so jobs that encode nothing do not wait for the driver's translation.
//! What the GPU does not encode, the NIC loop does.

#![forbid(unsafe_code)]

use crate::cuda::{Coder, Device, GpuError, Kernels};
use bps_engine::base::DType;
use bps_engine::proto::encoding::Encoding;
use bps_engine::trace::log;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Coding {
    kernels: Loaded,
    /// It was said that processors encode some tensors.
    is_told: bool,
}

#[derive(Default)]
enum Loaded {
    #[default]
    NotYet,
    There(Kernels),
    Refused,
}

impl Coding {
    /// What encodes a tensor of these elements so, if the GPU does; a line says so once where it
    /// does not.
    pub(crate) fn coder(
        &mut self,
        device: &Device,
        encoding: Encoding,
        dtype: DType,
    ) -> Option<Coder> {
        let ordinal = device.ordinal();
        if let Loaded::NotYet = self.kernels {
            self.kernels = Kernels::load(device).map_or_else(
                |error| {
                    self.tell(&format!("GPU {ordinal} can't encode: {error}"));
                    Loaded::Refused
                },
                Loaded::There,
            );
        }
        let Loaded::There(kernels) = &self.kernels else { return None };
        let coder = kernels.coder(encoding, dtype);
        if let Ok(None) = coder {
            self.tell(&format!("no kernel encodes {dtype} as {encoding} on GPU {ordinal}"));
        }
        coder.unwrap_or_else(|error: GpuError| {
            self.tell(&format!("GPU {ordinal} can't encode as {encoding}: {error}"));
            None
        })
    }

    fn tell(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_told, true) {
            log::info!("codecs: the processors encode what is on the GPU: {why}");
        }
    }
}
