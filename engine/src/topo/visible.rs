//! Which GPUs the processes of a job see, and in which order CUDA counts them, from the variables
//! that users, schedulers and container runtimes set.
//!
//! `CUDA_VISIBLE_DEVICES` is CUDA's own and has the last word. `NVIDIA_VISIBLE_DEVICES` is for
//! container runtimes, which show a container the GPUs that it names and no others; BytePS users
//! set it on bare machines too, where CUDA does not know it.

#![forbid(unsafe_code)]

use super::{Gpu, Topology, sysfs};
use std::fmt;
use std::path::Path;

/// The variable that CUDA reads.
pub const CUDA_VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The variable of container runtimes, and of BytePS.
pub const NVIDIA_VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The variables, as they are set.
#[derive(Clone, Copy, Default, Debug)]
pub struct Wishes<'a> {
    /// `CUDA_VISIBLE_DEVICES`; empty is not the same as unset.
    pub cuda: Option<&'a str>,
    /// `NVIDIA_VISIBLE_DEVICES`.
    pub nvidia: Option<&'a str>,
    /// `CUDA_DEVICE_ORDER`.
    pub order: Option<&'a str>,
}

/// What CUDA calls a device: a GPU, or a slice of one (MIG).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// The GPU, unless it cannot be known which one.
    pub gpu: Option<Gpu>,
    /// The slice's name; `None` is the whole GPU.
    pub slice: Option<String>,
    /// The NUMA node, known also if the GPU is not but all are on one.
    pub node: Option<u32>,
}

/// The devices of a job on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Visible {
    /// By the number that CUDA gives them.
    pub devices: Vec<Device>,
    /// What `CUDA_VISIBLE_DEVICES` must be so that CUDA sees these, where it would see more.
    pub cuda: Option<String>,
    /// What the user should know of it.
    pub note: Option<String>,
}

/// A variable cannot be followed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VisibleError {
    /// There is no such GPU.
    #[error(
        "{variable}={value} names GPU '{entry}', but this machine has {}; name one of those, or \
         unset {variable}", Listed(.present)
    )]
    Unknown {
        /// The variable's name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The part of it that is meant.
        entry: String,
        /// The GPUs that there are.
        present: Vec<Device>,
    },
    /// Several GPUs' identifiers begin so.
    #[error(
        "{variable}={value}: the identifiers of {count} GPUs begin with '{entry}'; write more of it"
    )]
    Ambiguous {
        /// The variable's name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The part of it that is meant.
        entry: String,
        /// How many GPUs are meant.
        count: usize,
    },
    /// CUDA takes such a list for an empty one.
    #[error("{variable}={value} names '{entry}' twice, and CUDA would see no GPU; name it once")]
    Twice {
        /// The variable's name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The part of it that is meant.
        entry: String,
    },
    /// The entry is neither a number nor an identifier.
    #[error(
        "{variable}={value}: '{entry}' is neither a GPU's number nor its identifier (GPU-… or \
         MIG-…), and CUDA would see no GPU from there on; to see all, unset {variable}"
    )]
    Malformed {
        /// The variable's name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The part of it that is meant.
        entry: String,
    },
    /// More GPUs are named than there are.
    #[error(
        "{variable}={value} asks for {count} GPUs, one for each worker process, but there are \
         {found}; name those that are there, or set BYTEPS_LOCAL_SIZE to the number of processes \
         that is wanted"
    )]
    Fewer {
        /// The variable's name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The entries in it.
        count: usize,
        /// The GPUs that can be used.
        found: usize,
    },
}

struct Listed<'a>(&'a [Device]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "{count} GPU{}: ", if count == 1 { "" } else { "s" })?;
        for (number, device) in self.0.iter().enumerate() {
            let uuid = device.uuid().map(|uuid| format!(", {uuid}")).unwrap_or_default();
            let comma = if number == 0 { "" } else { "; " };
            write!(f, "{comma}{number} ({device}{uuid})")?;
        }
        Ok(())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(slice) = &self.slice {
            write!(f, "{slice}{}", if self.gpu.is_some() { " of " } else { "" })?;
        }
        let Some(gpu) = &self.gpu else {
            return f.write_str(if self.slice.is_some() { "" } else { "place unknown" });
        };
        let model = gpu.driver.as_ref().and_then(|driver| driver.model.as_deref());
        write!(f, "{} at {}", model.unwrap_or("NVIDIA GPU"), gpu.address)
    }
}

impl Device {
    fn uuid(&self) -> Option<&str> {
        self.gpu.as_ref()?.driver.as_ref()?.uuid.as_deref()
    }

    fn model(&self) -> Option<&str> {
        self.gpu.as_ref()?.driver.as_ref()?.model.as_deref()
    }
}

/// The GPUs of the topology of `root` that a process may open, by PCI address.
///
/// The driver lists a machine's GPUs to every container; what a container may use is what it has
/// device files of.
#[must_use]
pub fn present(topology: &Topology, root: &Path) -> Vec<Device> {
    let files = sysfs::numbered(&root.join("dev"), "nvidia");
    let device = |gpu: &Gpu| Device { node: gpu.node, gpu: Some(gpu.clone()), slice: None };
    let by_driver = |gpu: &&Gpu| {
        gpu.driver.as_ref().is_some_and(|driver| files.contains(&(driver.minor as usize)))
    };
    if topology.gpus.iter().any(|gpu| gpu.driver.is_some()) {
        return topology.gpus.iter().filter(by_driver).map(device).collect();
    }
    // Without the driver's word, files and devices belong together if there are as many.
    if files.len() == topology.gpus.len() {
        return topology.gpus.iter().map(device).collect();
    }
    vec![Device { gpu: None, slice: None, node: None }; files.len()]
}

/// The devices that CUDA will show to the processes of a job, of those that are `present`.
///
/// On a machine without GPUs nothing is visible, whatever the variables say.
///
/// # Errors
/// [`VisibleError`]
pub fn visible(present: &[Device], wishes: &Wishes<'_>) -> Result<Visible, VisibleError> {
    if present.is_empty() || wishes.nvidia.map(str::trim) == Some("none") {
        return Ok(Visible::default());
    }
    let mut visible = match wishes.cuda {
        Some(value) => Visible { devices: by_cuda(present, value)?, ..Visible::default() },
        None => by_runtime(present, wishes.nvidia)?,
    };
    if let (Some(_), Some(count)) = (wishes.cuda, wishes.nvidia.and_then(entries)) {
        visible.devices.truncate(count.len());
    }
    visible.note = note(present, &visible, wishes);
    Ok(visible)
}

fn by_cuda(present: &[Device], value: &str) -> Result<Vec<Device>, VisibleError> {
    const VARIABLE: &str = CUDA_VISIBLE;
    let mut devices: Vec<Device> = Vec::new();
    let none = ["", "none", "void", "nodevfiles"];
    if none.contains(&value.trim().to_ascii_lowercase().as_str()) {
        return Ok(devices);
    }
    for entry in value.split(',').map(str::trim) {
        // CUDA stops at a negative number, which is how GPUs are hidden.
        if entry.parse::<i64>().is_ok_and(|number| number < 0) {
            break;
        }
        // CUDA does not know the runtimes' way to name slices, as in 0:1.
        let device =
            if entry.contains(':') { None } else { resolve(present, VARIABLE, value, entry)? };
        let Some(device) = device else {
            let (value, entry) = (value.to_owned(), entry.to_owned());
            return Err(VisibleError::Malformed { variable: VARIABLE, value, entry });
        };
        add(&mut devices, device, VARIABLE, value, entry)?;
    }
    Ok(devices)
}

fn add(
    devices: &mut Vec<Device>,
    device: Device,
    variable: &'static str,
    value: &str,
    entry: &str,
) -> Result<(), VisibleError> {
    let is_known = device.gpu.is_some() || device.slice.is_some();
    if is_known && devices.contains(&device) {
        let (value, entry) = (value.to_owned(), entry.to_owned());
        return Err(VisibleError::Twice { variable, value, entry });
    }
    devices.push(device);
    Ok(())
}

/// The entries of `NVIDIA_VISIBLE_DEVICES`, if it is a list of GPUs.
fn entries(value: &str) -> Option<Vec<&str>> {
    let entries: Vec<&str> =
        value.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    let is_id = |entry: &&str| {
        entry.starts_with("GPU-")
            || entry.starts_with("MIG-")
            || entry.split(':').all(|part| part.parse::<u32>().is_ok())
    };
    // "all", "void", names of mounted lists: the runtime has done what they say.
    (!entries.is_empty() && entries.iter().all(is_id)).then_some(entries)
}

/// How many worker processes `NVIDIA_VISIBLE_DEVICES` asks for by BytePS's rule: one for each
/// entry, whatever it says; `None` without a list.
#[must_use]
pub fn entries_of(value: Option<&str>) -> Option<usize> {
    let value = value.map(str::trim).filter(|value| !matches!(*value, "all" | "none" | "void"))?;
    Some(value.split(',').filter(|entry| !entry.trim().is_empty()).count()).filter(|&n| n > 0)
}

fn by_runtime(present: &[Device], value: Option<&str>) -> Result<Visible, VisibleError> {
    let all = Visible { devices: present.to_vec(), ..Visible::default() };
    let Some((value, entries)) = value.and_then(|value| Some((value, entries(value)?))) else {
        return Ok(all);
    };
    let is_slice = |entry: &&str| entry.starts_with("MIG-") || entry.contains(':');
    if entries.iter().any(is_slice) {
        // The runtime counts GPUs as the machine does, of which a container sees a part.
        let slice = |entry: &&str| {
            let found = resolve(present, NVIDIA_VISIBLE, value, entry).ok().flatten();
            let unknown = || Device {
                gpu: None,
                slice: is_slice(entry).then(|| (*entry).to_owned()),
                node: common_node(present),
            };
            found.unwrap_or_else(unknown)
        };
        return Ok(Visible { devices: entries.iter().map(slice).collect(), ..all });
    }
    if entries.len() > present.len() {
        return Err(VisibleError::Fewer {
            variable: NVIDIA_VISIBLE,
            value: value.to_owned(),
            count: entries.len(),
            found: present.len(),
        });
    }
    if entries.len() == present.len() {
        return Ok(all);
    }
    // Fewer than there are: no runtime has acted on it, and CUDA does not know the variable.
    let mut devices = Vec::new();
    for entry in entries {
        if let Some(device) = resolve(present, NVIDIA_VISIBLE, value, entry)? {
            add(&mut devices, device, NVIDIA_VISIBLE, value, entry)?;
        }
    }
    let number = |device: &Device| {
        let place = present.iter().position(|other| other == device);
        place.expect("a device without an identifier is one of those present").to_string()
    };
    let names: Vec<String> = devices
        .iter()
        .map(|device| device.uuid().map_or_else(|| number(device), str::to_owned))
        .collect();
    Ok(Visible { devices, cuda: Some(names.join(",")), note: None })
}

/// The device that an entry means; `None` if it is no identifier.
fn resolve(
    present: &[Device],
    variable: &'static str,
    value: &str,
    entry: &str,
) -> Result<Option<Device>, VisibleError> {
    let unknown = || VisibleError::Unknown {
        variable,
        value: value.to_owned(),
        entry: entry.to_owned(),
        present: present.to_vec(),
    };
    if let Ok(number) = entry.parse::<usize>() {
        return present.get(number).cloned().map(Some).ok_or_else(unknown);
    }
    if let Some(parent) = entry.split_once(':').and_then(|(gpu, _)| gpu.parse::<usize>().ok()) {
        let gpu = present.get(parent).ok_or_else(unknown)?;
        return Ok(Some(Device { slice: Some(entry.to_owned()), ..gpu.clone() }));
    }
    let slice = entry.starts_with("MIG-").then(|| entry.to_owned());
    // Slices used to be called after their GPU; now they have identifiers of their own.
    let gpu = entry.strip_prefix("MIG-").unwrap_or(entry);
    let gpu = gpu.split('/').next().unwrap_or(gpu);
    if !gpu.starts_with("GPU-") {
        let only = if let [only] = present { only.gpu.clone() } else { None };
        let device = Device { gpu: only, node: common_node(present), slice: slice.clone() };
        return Ok(slice.map(|_| device));
    }
    let begins = |device: &&Device| {
        device.uuid().is_some_and(|uuid| {
            uuid.get(..gpu.len()).is_some_and(|head| head.eq_ignore_ascii_case(gpu))
        })
    };
    let found: Vec<&Device> = present.iter().filter(begins).collect();
    match found.as_slice() {
        [one] => Ok(Some(Device { slice, ..(*one).clone() })),
        // The driver tells a GPU's identifier only once somebody has used it.
        [] if present.iter().any(|device| device.uuid().is_none()) => {
            let only = if let [only] = present { only.gpu.clone() } else { None };
            Ok(Some(Device { gpu: only, slice, node: common_node(present) }))
        }
        [] => Err(unknown()),
        several => Err(VisibleError::Ambiguous {
            variable,
            value: value.to_owned(),
            entry: entry.to_owned(),
            count: several.len(),
        }),
    }
}

/// The node of all devices, if it is one.
fn common_node(present: &[Device]) -> Option<u32> {
    let first = present.first()?.node?;
    present.iter().all(|device| device.node == Some(first)).then_some(first)
}

fn note(present: &[Device], visible: &Visible, wishes: &Wishes<'_>) -> Option<String> {
    let slices = visible.devices.iter().filter(|device| device.slice.is_some()).count();
    if slices > 1 {
        return Some(
            "CUDA shows a process one MIG slice only, so each worker sees its own as GPU 0: \
             select GPU 0 in it, not the local rank"
                .to_owned(),
        );
    }
    let by_uuid = wishes.cuda.is_some_and(|value| value.contains("GPU-"));
    let differ = present.windows(2).any(|pair| pair[0].model() != pair[1].model());
    (differ && !by_uuid && visible.cuda.is_none() && wishes.order != Some("PCI_BUS_ID")).then(
        || {
            "the GPUs differ, so CUDA may count them in another order than by PCI address: set \
         CUDA_DEVICE_ORDER=PCI_BUS_ID"
                .to_owned()
        },
    )
}

#[cfg(test)]
#[path = "tests/visible.rs"]
mod tests;
