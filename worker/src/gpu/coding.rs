//! Which tensors the GPU encodes: those whose codec has kernels. These are loaded when the first
//! tensor is declared that needs them, so nobody waits for the driver's translation of others.
//! What the GPU does not encode, the NIC loop does.

#![forbid(unsafe_code)]

use crate::cuda::{Coder, Device, Family, Kernels};
use bps_engine::base::DType;
use bps_engine::proto::encoding::Encoding;
use bps_engine::trace::log;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Coding {
    blocks: Loaded,
    whole: Loaded,
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
        let Some(family) = Family::of(encoding) else {
            return self.without(&format!("no kernel encodes as {encoding} on GPU {ordinal}"));
        };
        let loaded = match family {
            Family::Blocks => &mut self.blocks,
            Family::Whole => &mut self.whole,
        };
        if let Loaded::NotYet = loaded {
            match Kernels::load(device, family) {
                Ok(kernels) => *loaded = Loaded::There(kernels),
                Err(error) => {
                    *loaded = Loaded::Refused;
                    return self.without(&format!("GPU {ordinal} can't encode: {error}"));
                }
            }
        }
        let Loaded::There(kernels) = loaded else { return None };
        match kernels.coder(encoding, dtype) {
            Ok(Some(coder)) => Some(coder),
            Ok(None) => {
                self.without(&format!("no kernel encodes {dtype} as {encoding} on GPU {ordinal}"))
            }
            Err(error) => {
                self.without(&format!("GPU {ordinal} can't encode as {encoding}: {error}"))
            }
        }
    }

    /// Processors encode, and a line says why unless one has.
    pub(crate) fn without(&mut self, why: &str) -> Option<Coder> {
        if !std::mem::replace(&mut self.is_told, true) {
            log::info!("codecs: the processors encode what is on the GPU: {why}");
        }
        None
    }
}
