//! Which ports of which RDMA devices this machine has, and which of their addresses to use: read
//! from `/sys/class/infiniband`, below a root folder that tests replace.
//!
//! A port has a table of addresses (GIDs); the kind of each decides how packets travel. Two ends
//! need addresses of the same kind, so a port keeps one of each kind, and the ends choose the best
//! that both have.

#![forbid(unsafe_code)]

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

/// How packets of an address travel, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum AddressKind {
    /// A fabric of its own: by local identifier.
    InfiniBand,
    /// UDP over IPv4: routed, and what congestion control of switches knows.
    RoceV2Ipv4,
    /// UDP over IPv6 with an address of more than one link.
    RoceV2Ipv6,
    /// UDP over IPv6 within one link.
    RoceV2LinkLocal,
    /// Bare Ethernet frames, within one link.
    RoceV1,
}

impl AddressKind {
    pub(super) const ALL: [AddressKind; 5] = [
        AddressKind::InfiniBand,
        AddressKind::RoceV2Ipv4,
        AddressKind::RoceV2Ipv6,
        AddressKind::RoceV2LinkLocal,
        AddressKind::RoceV1,
    ];

    fn name(self) -> &'static str {
        match self {
            AddressKind::InfiniBand => "InfiniBand",
            AddressKind::RoceV2Ipv4 => "RoCE v2, IPv4",
            AddressKind::RoceV2Ipv6 => "RoCE v2, IPv6",
            AddressKind::RoceV2LinkLocal => "RoCE v2, link-local IPv6",
            AddressKind::RoceV1 => "RoCE v1",
        }
    }
}

/// One address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Address {
    pub(super) kind: AddressKind,
    /// Its place in the port's table.
    pub(super) index: u8,
    pub(super) gid: [u8; 16],
}

/// An active port of an RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    /// The device: `mlx5_0`.
    pub(super) device: String,
    /// The port's number in the device, from 1.
    pub(super) number: u8,
    /// Network interfaces that share the port; none on InfiniBand without IP.
    pub(super) interfaces: Vec<String>,
    /// The NUMA node of the device, if the machine says so.
    pub(super) numa_node: Option<u32>,
    /// At most one of each kind, the best first.
    pub(super) addresses: Vec<Address>,
}

impl std::fmt::Display for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} port {}", self.device, self.number)?;
        if let Some(interface) = self.interfaces.first() {
            write!(f, " ({interface})")?;
        }
        match self.addresses.first() {
            Some(best) => write!(f, ", {}", best.kind.name()),
            None => Ok(()),
        }
    }
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    // By length first, so that device 10 comes behind device 9.
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

/// The active ports with a usable address below `root`, those of this interface (by prefix) only if
/// one is named.
pub(super) fn find(root: &Path, interface: Option<&str>) -> Vec<Port> {
    let class = root.join("sys/class/infiniband");
    let mut ports = Vec::new();
    for device in names(&class) {
        let folder = class.join(&device);
        let numa_node = read(&folder.join("device/numa_node")).and_then(|text| text.parse().ok());
        for number in names(&folder.join("ports")) {
            let at = folder.join("ports").join(&number);
            let is_active = read(&at.join("state")).is_some_and(|state| state.contains("ACTIVE"));
            let Ok(number) = number.parse() else { continue };
            let (addresses, interfaces) = addresses(&at);
            let named = |wanted: &str| interfaces.iter().any(|name| name.starts_with(wanted));
            if is_active && !addresses.is_empty() && interface.is_none_or(named) {
                let device = device.clone();
                ports.push(Port { device, number, interfaces, numa_node, addresses });
            }
        }
    }
    ports
}

/// The addresses of a port, one of each kind, and the interfaces that they belong to.
fn addresses(port: &Path) -> (Vec<Address>, Vec<String>) {
    let link = read(&port.join("link_layer"));
    let is_ethernet = link.as_deref() != Some("InfiniBand");
    let (mut addresses, mut interfaces): (Vec<Address>, Vec<String>) = (Vec::new(), Vec::new());
    for name in names(&port.join("gids")) {
        let Ok(index) = name.parse::<u8>() else { continue };
        let Some(text) = read(&port.join("gids").join(&name)) else { continue };
        // Eight groups of four digits: the text of an IPv6 address.
        let Ok(gid) = text.parse::<Ipv6Addr>() else { continue };
        let version = read(&port.join("gid_attrs/types").join(&name));
        let is_v2 = version.is_some_and(|version| version.contains("v2"));
        if gid.is_unspecified() {
            continue;
        }
        let kind = match (is_ethernet, is_v2) {
            (false, _) => AddressKind::InfiniBand,
            (true, false) => AddressKind::RoceV1,
            (true, true) if gid.to_ipv4_mapped().is_some() => AddressKind::RoceV2Ipv4,
            (true, true) if gid.is_unicast_link_local() => AddressKind::RoceV2LinkLocal,
            (true, true) => AddressKind::RoceV2Ipv6,
        };
        if !addresses.iter().any(|address| address.kind == kind) {
            addresses.push(Address { kind, index, gid: gid.octets() });
        }
        if let Some(interface) = read(&port.join("gid_attrs/ndevs").join(&name))
            && !interfaces.contains(&interface)
        {
            interfaces.push(interface);
        }
    }
    addresses.sort_by_key(|address| address.kind);
    (addresses, interfaces)
}

/// Keeps the ports of this NUMA node only, if it has any.
pub(super) fn keep_near(ports: &mut Vec<Port>, numa_node: Option<u32>) {
    let is_near = |port: &Port| numa_node.is_some() && port.numa_node == numa_node;
    if ports.iter().any(is_near) {
        ports.retain(is_near);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a file and the folders above it.
    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join("sys/class/infiniband").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("bps-rdma-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A port with these addresses: text, type and interface.
    fn port(root: &Path, at: &str, state: &str, link: &str, gids: &[(&str, &str, &str)]) {
        put(root, &format!("{at}/state"), state);
        put(root, &format!("{at}/link_layer"), link);
        for (index, (gid, version, interface)) in gids.iter().enumerate() {
            put(root, &format!("{at}/gids/{index}"), gid);
            if !version.is_empty() {
                put(root, &format!("{at}/gid_attrs/types/{index}"), version);
                put(root, &format!("{at}/gid_attrs/ndevs/{index}"), interface);
            }
        }
    }

    const ACTIVE: &str = "4: ACTIVE";
    const LOCAL: &str = "fe80:0000:0000:0000:526b:4bff:fe00:0001";
    const GLOBAL: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";
    const MAPPED: &str = "0000:0000:0000:0000:0000:ffff:0a07:0001";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn addresses_are_sorted_and_ports_filtered() {
        let folder = Folder::new("ports");
        let root = &folder.0;
        let gids = [
            (LOCAL, "IB/RoCE v1", "eth4"),
            (LOCAL, "RoCE v2", "eth4"),
            (GLOBAL, "RoCE v2", "eth4"),
            (NONE, "", ""),
            (MAPPED, "IB/RoCE v1", "eth4"),
            (MAPPED, "RoCE v2", "eth4"),
        ];
        port(root, "mlx5_10/ports/1", ACTIVE, "Ethernet", &gids);
        put(root, "mlx5_10/device/numa_node", "1");
        port(root, "mlx5_2/ports/1", ACTIVE, "InfiniBand", &[(LOCAL, "", "")]);
        put(root, "mlx5_2/device/numa_node", "0");
        port(root, "mlx5_3/ports/1", "1: DOWN", "Ethernet", &gids);
        port(root, "mlx5_4/ports/1", ACTIVE, "Ethernet", &[(NONE, "", "")]);
        let mut ports = find(root, None);
        let devices = |ports: &[Port]| -> Vec<String> {
            ports.iter().map(|port| port.device.clone()).collect()
        };
        assert_eq!(devices(&ports), ["mlx5_2", "mlx5_10"]);
        let kinds: Vec<_> =
            ports[1].addresses.iter().map(|address| (address.kind, address.index)).collect();
        let expected = [
            (AddressKind::RoceV2Ipv4, 5),
            (AddressKind::RoceV2Ipv6, 2),
            (AddressKind::RoceV2LinkLocal, 1),
            (AddressKind::RoceV1, 0),
        ];
        assert_eq!(kinds, expected);
        assert_eq!(ports[0].addresses[0].kind, AddressKind::InfiniBand);
        assert_eq!(ports[1].to_string(), "mlx5_10 port 1 (eth4), RoCE v2, IPv4");
        for far in [None, Some(2)] {
            keep_near(&mut ports, far);
            assert_eq!(devices(&ports), ["mlx5_2", "mlx5_10"]);
        }
        keep_near(&mut ports, Some(1));
        assert_eq!(devices(&ports), ["mlx5_10"]);
        assert_eq!(devices(&find(root, Some("eth"))), ["mlx5_10"]);
        assert!(find(root, Some("eth5")).is_empty());
        assert!(find(Path::new("/nonexistent"), None).is_empty());
    }
}
