//! Hosts for real processes, and a network between them that fails on demand: a network namespace
//! for each host, and an Ethernet switch in user space that joins them. Each direction between two
//! hosts has rules of its own.
//!
//! The kernel of a container often has neither netem nor netfilter; TAP devices are nearly always
//! there. Invariant: nothing outlives a [`Network`]: its namespaces are held by open files, and its
//! devices by the switch's thread.

mod switch;

use crate::program::Program;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use switch::{Port, Shared};

/// What happens to packets on the way from one host to another.
#[derive(Clone, Copy, Default, Debug)]
pub struct Rule {
    /// None arrives.
    pub block: bool,
    /// Larger IP packets do not arrive and nobody is told: a path-MTU black hole.
    pub mtu: Option<usize>,
    /// The fraction that does not arrive.
    pub drop: f64,
    /// The fraction that arrives with a bit of its TCP payload flipped and a checksum that fits.
    pub corrupt: f64,
    /// How much later each arrives.
    pub delay: Duration,
    /// Bytes a second, if it is a slow one: what would wait too long is lost, as in a switch.
    pub rate: Option<u64>,
}

impl Rule {
    /// Nothing passes.
    pub const BLOCK: Rule =
        Rule { block: true, mtu: None, drop: 0.0, corrupt: 0.0, delay: Duration::ZERO, rate: None };

    /// Only packets of at most so many bytes pass.
    #[must_use]
    pub fn mtu(bytes: usize) -> Rule {
        Rule { mtu: Some(bytes), ..Rule::default() }
    }
}

/// Several hosts on one switch; see the [module](self).
pub struct Network {
    namespaces: Vec<File>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Network {
    /// So many hosts. `None`, with the reason printed, where this machine cannot have them.
    #[must_use]
    pub fn new(hosts: usize) -> Option<Network> {
        match Network::try_new(hosts) {
            Ok(network) => Some(network),
            Err(why) => {
                println!("skipped: no network of namespaces: {why}");
                None
            }
        }
    }

    fn try_new(hosts: usize) -> Result<Network, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root can make network namespaces".into());
        }
        let mut namespaces = Vec::new();
        let mut ports = Vec::new();
        for host in 0..hosts {
            let (namespace, device) = make_host()?;
            configure(&namespace, host, hosts)?;
            namespaces.push(namespace);
            ports.push(Port::new(device));
        }
        let shared = Arc::new(Shared::new(hosts).map_err(|error| format!("an eventfd: {error}"))?);
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || switch::run(&ports, &for_thread));
        Ok(Network { namespaces, shared, thread: Some(thread) })
    }

    /// The address of a host.
    #[must_use]
    pub fn address(&self, host: usize) -> String {
        address(host)
    }

    /// A path by which other processes can open a host's namespace, as long as this one lives.
    #[must_use]
    pub fn namespace(&self, host: usize) -> String {
        path(&self.namespaces[host])
    }

    /// Sets what happens from one host to another from now on.
    pub fn set(&self, from: usize, to: usize, rule: Rule) {
        self.shared.set(from, to, rule);
    }

    /// Sets what happens between two hosts, in both directions.
    pub fn set_both(&self, one: usize, other: usize, rule: Rule) {
        self.set(one, other, rule);
        self.set(other, one, rule);
    }

    /// Packets that rules kept from arriving on this way.
    #[must_use]
    pub fn lost(&self, from: usize, to: usize) -> u64 {
        self.shared.lost(from, to)
    }

    /// A connection from a host to a port of its own.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn connect(&self, host: usize, port: u16) -> std::io::Result<TcpStream> {
        let namespace = self.namespaces[host].try_clone()?;
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // A thread of its own, so that this one stays where it is; a socket stays where it is made.
        let connected = std::thread::spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            TcpStream::connect_timeout(&to, Duration::from_secs(5))
        });
        connected.join().expect("no panic in two system calls")
    }

    /// Starts a program of this workspace on a host, as [`Program::start`].
    #[must_use]
    pub fn start(
        &self,
        host: usize,
        name: &str,
        arguments: &[&str],
        variables: &[(&str, String)],
    ) -> Program {
        let script = format!("exec nsenter --net={} \"$@\"", self.namespace(host));
        Program::start_in(&script, name, arguments, variables)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the switch has been printed; a second one here would abort the tests.
            let _ = thread.join();
        }
    }
}

fn address(host: usize) -> String {
    format!("10.77.0.{}", host + 1)
}

/// A path to a namespace that other processes can open while this one holds it.
fn path(namespace: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd())
}

fn hardware_address(host: usize) -> String {
    format!("02:00:00:00:00:{host:02x}")
}

/// A new namespace, and the other end of its one device.
fn make_host() -> Result<(File, OwnedFd), String> {
    // A thread of its own, so that this one stays where it is.
    let made = std::thread::spawn(|| {
        // SAFETY: only `FILES` can make descriptors disappear, and it is not among the flags.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|error| format!("unshare: {error}"))?;
        let namespace = File::open("/proc/thread-self/ns/net")
            .map_err(|error| format!("/proc/thread-self/ns/net: {error}"))?;
        Ok((namespace, open_tap(c"eth0")?))
    });
    made.join().expect("no panic in a few system calls")
}

/// A TAP device of this thread's namespace.
fn open_tap(name: &CStr) -> Result<OwnedFd, String> {
    let path = "/dev/net/tun";
    let device = File::options().read(true).write(true).open(path);
    let device = device.map_err(|error| format!("{path}: {error}"))?;
    // SAFETY: all-zero bytes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes()) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("two small flags");
    // SAFETY: TUNSETIFF reads and writes the `ifreq`, which outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result != 0 {
        return Err(format!("a TAP device: {}", std::io::Error::last_os_error()));
    }
    rustix::io::ioctl_fionbio(&device, true).map_err(|error| error.to_string())?;
    Ok(device.into())
}

/// Gives a host its addresses, and those of all others, so that nobody has to ask for them.
fn configure(namespace: &File, host: usize, hosts: usize) -> Result<(), String> {
    let mut lines = format!(
        "link set lo up\n\
         link set eth0 address {}\n\
         address add {}/24 dev eth0\n\
         link set eth0 up\n",
        hardware_address(host),
        address(host)
    );
    for other in (0..hosts).filter(|&other| other != host) {
        let (address, hardware) = (address(other), hardware_address(other));
        lines += &format!("neighbour add {address} lladdr {hardware} dev eth0 nud permanent\n");
    }
    let mut command = Command::new("nsenter");
    command.args([&format!("--net={}", path(namespace)), "ip", "-batch", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("nsenter (util-linux): {error}"))?;
    let mut input = child.stdin.take().expect("it was asked for");
    // A command that ended early says why itself.
    let _ = input.write_all(lines.as_bytes());
    drop(input);
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip (iproute2): {}", String::from_utf8_lossy(&output.stderr).trim()))
}
