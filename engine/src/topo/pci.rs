//! Network cards and GPUs: where on the PCI tree they hang, and how near to each other that is.

#![forbid(unsafe_code)]

use super::sysfs;
use crate::base::word;
use std::path::{Path, PathBuf};

/// The way from a root complex to a device: `pci0000:15`, then the address of each bridge, then the
/// device's own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PciPath(Vec<String>);

/// How two PCI devices are joined, nearest first; the words are those of `nvidia-smi topo`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Nearness {
    /// Below one PCIe switch, over so many bridges (PIX, PXB).
    Switch(u32),
    /// Below one host bridge (PHB).
    HostBridge,
    /// On one NUMA node (NODE).
    Node,
    /// Through the link between sockets (SYS).
    System,
}

/// A network card with a PCI device behind it; its virtual functions are cards of their own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nic {
    /// The interface's name.
    pub name: String,
    /// Its NUMA node; unknown in most virtual machines.
    pub node: Option<u32>,
    /// The CPUs that are near it; empty if unknown.
    pub cpus: Vec<usize>,
    /// Megabits per second; unknown while the link is down, and for virtual cards.
    pub speed_mbps: Option<u32>,
    /// Its place.
    pub path: PciPath,
}

/// An NVIDIA GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// Its PCI address in lower case, such as `0000:1b:00.0`.
    pub address: String,
    /// Its NUMA node.
    pub node: Option<u32>,
    /// The CPUs that are near it; empty if unknown.
    pub cpus: Vec<usize>,
    /// Its place; empty where /sys does not show the device.
    pub path: PciPath,
    /// What the NVIDIA driver says of it; `None` if it is not the driver's.
    pub driver: Option<Driver>,
}

/// What the NVIDIA driver says of a GPU, in /proc/driver/nvidia/gpus.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Driver {
    /// The number of its device file, /dev/nvidia0 and so on.
    pub minor: u32,
    /// `GPU-` and its identifier; the driver does not know it before somebody has used the GPU.
    pub uuid: Option<String>,
    /// Its name, such as `NVIDIA H200`.
    pub model: Option<String>,
}

impl PciPath {
    /// Takes the path from the device's real place in /sys/devices.
    fn of(place: &Path) -> PciPath {
        let parts = place.iter().filter_map(|part| part.to_str());
        PciPath(parts.filter(|part| is_root(part) || is_address(part)).map(str::to_owned).collect())
    }

    /// The device's own address.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.0.last().map(String::as_str).filter(|last| is_address(last))
    }

    /// The address of the bridge nearest to the root complex, which a PCIe switch has for itself:
    /// devices below one switch have the same. `None` where no bridge is shown.
    #[must_use]
    pub fn bridge(&self) -> Option<&str> {
        self.0.get(1).filter(|_| self.0.len() > 2).map(String::as_str)
    }

    /// How this device is joined with another.
    #[must_use]
    pub fn nearness(&self, other: &PciPath, same_node: bool) -> Nearness {
        let shared = self.0.iter().zip(&other.0).take_while(|(a, b)| a == b).count();
        match shared {
            0 if same_node => Nearness::Node,
            0 => Nearness::System,
            // The root complex alone is common: the way leads through the host bridge.
            1 => Nearness::HostBridge,
            _ => {
                let bridges = self.0.len() + other.0.len() - 2 * shared;
                Nearness::Switch(word(bridges))
            }
        }
    }
}

/// Whether this is a root complex, `pci0000:15`.
fn is_root(part: &str) -> bool {
    part.strip_prefix("pci").is_some_and(|rest| fields_are_hex(rest, &[':'], &[4, 2]))
}

/// Whether this is a device's address, `0000:1b:00.0`.
fn is_address(part: &str) -> bool {
    fields_are_hex(part, &[':', '.'], &[4, 2, 2, 1])
}

/// Whether the text is hexadecimal numbers of at least these lengths between these separators.
/// Domains of virtual root complexes are longer than four digits.
fn fields_are_hex(text: &str, separators: &[char], lengths: &[usize]) -> bool {
    let fields: Vec<&str> = text.split(separators).collect();
    fields.len() == lengths.len()
        && fields.iter().zip(lengths).all(|(field, &length)| {
            (length..=8).contains(&field.len())
                && field.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
}

/// Node and near CPUs of the PCI device in this folder.
fn locality(device: &Path) -> (Option<u32>, Vec<usize>) {
    // The kernel says -1 for unknown, which is no u32.
    let node = sysfs::number(&device.join("numa_node"));
    (node, sysfs::list(&device.join("local_cpulist")).unwrap_or_default())
}

pub(super) fn read_nics(root: &Path) -> Vec<Nic> {
    let folder = root.join("sys/class/net");
    let read = |name: String| {
        let place = folder.join(&name).canonicalize().ok()?;
        // The card of a virtual machine hangs below a virtio device; the PCI device is the nearest
        // one above.
        let device: PathBuf = place
            .ancestors()
            .find(|above| above.file_name().and_then(|name| name.to_str()).is_some_and(is_address))?
            .to_path_buf();
        let (node, cpus) = locality(&device);
        // A link that is down says -1 or fails.
        let speed_mbps = sysfs::number(&place.join("speed")).filter(|&speed| speed > 0);
        Some(Nic { name, node, cpus, speed_mbps, path: PciPath::of(&device) })
    };
    sysfs::entries(&folder).into_iter().filter_map(read).collect()
}

pub(super) fn read_gpus(root: &Path) -> Vec<Gpu> {
    let folder = root.join("sys/bus/pci/devices");
    let driver_folder = root.join("proc/driver/nvidia/gpus");
    let of_driver = |address: &str| driver(&driver_folder.join(address).join("information"));
    let read = |address: String| {
        let device = folder.join(&address).canonicalize().ok()?;
        let class = sysfs::text(&device.join("class"))?;
        // Display controllers: 0x0300 with a monitor's connector, 0x0302 without.
        let is_gpu = class.starts_with("0x0300") || class.starts_with("0x0302");
        let is_ours = is_gpu && sysfs::text(&device.join("vendor"))? == "0x10de";
        let (node, cpus) = locality(&device);
        is_ours.then(|| Gpu {
            address: address.to_ascii_lowercase(),
            node,
            cpus,
            path: PciPath::of(&device),
            driver: of_driver(&address),
        })
    };
    let mut gpus: Vec<Gpu> = sysfs::entries(&folder).into_iter().filter_map(read).collect();
    // Sandboxes that show no PCI devices may still show what the driver has.
    for address in sysfs::entries(&driver_folder) {
        let lower = address.to_ascii_lowercase();
        if !gpus.iter().any(|gpu| gpu.address == lower)
            && let Some(driver) = of_driver(&address)
        {
            gpus.push(Gpu {
                address: lower,
                node: None,
                cpus: Vec::new(),
                path: PciPath::default(),
                driver: Some(driver),
            });
        }
    }
    gpus.sort_by(|left, right| left.address.cmp(&right.address));
    gpus
}

fn driver(information: &Path) -> Option<Driver> {
    let text = sysfs::text(information)?;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(value.trim().to_owned())
    };
    Some(Driver {
        minor: field("Device Minor")?.parse().ok()?,
        // Question marks stand for what the driver has not read yet.
        uuid: field("GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?')),
        model: field("Model").filter(|model| !model.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> PciPath {
        PciPath::of(Path::new(text))
    }

    #[test]
    fn paths_hold_bridges_and_nothing_else() {
        let nic = path("/sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0/net/ens6np0");
        assert_eq!(nic.0, ["pci0000:15", "0000:15:01.0", "0000:18:00.0"]);
        assert_eq!(nic.address(), Some("0000:18:00.0"));
        assert_eq!(path("/sys/devices/virtual/net/lo").address(), None);
        // Domains behind a volume management device have five digits and more.
        assert!(is_address("10000:e1:00.0") && is_root("pci10000:e0"));
        for no in ["net", "virtio2", "0000:18:00", "0000:18:00.0.1", "00g0:18:00.0", "pci", ""] {
            assert!(!is_address(no) && !is_root(no), "{no}");
        }
    }

    #[test]
    fn nearness_is_the_way_between() {
        let gpu = path("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0");
        let pix = path("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0");
        let phb = path("pci0000:15/0000:15:03.0/0000:20:00.0");
        let far = path("pci0000:97/0000:97:01.0/0000:98:00.0");
        let order = [
            gpu.nearness(&gpu, true),
            gpu.nearness(&pix, true),
            gpu.nearness(&phb, true),
            gpu.nearness(&far, true),
            gpu.nearness(&far, false),
        ];
        assert_eq!(
            order,
            [
                Nearness::Switch(0),
                Nearness::Switch(4),
                Nearness::HostBridge,
                Nearness::Node,
                Nearness::System
            ]
        );
        assert!(order.is_sorted());
    }
}
