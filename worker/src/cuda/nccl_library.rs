//! Finding and opening NCCL, and its functions that the engine calls.
//!
//! The signatures are compared by the compiler with those that cudarc generated from the header of
//! NCCL 2.26; none has changed from 2.18 to 2.30. Codes are plain numbers here: a C enum is passed
//! like an `unsigned int`, and a newer library may know more codes than any list.

use super::GpuError;
use super::table::{Symbols, symbol, table, why};
use cudarc::nccl::sys;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclUniqueId};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use libloading::Library;
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::path::{Path, PathBuf};

/// The name in every package of NCCL 2.
const LIBRARY: &str = "libnccl.so.2";
/// The oldest NCCL: non-blocking communicators work from here on.
pub(crate) const VERSION_MIN: u32 = 21_800;

table! {
    /// Functions of NCCL, under their C names.
    struct Functions returns ncclResult_t;
    checked {
        ncclGetUniqueId(*mut ncclUniqueId);
        ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t);
        ncclCommFinalize(ncclComm_t);
        ncclCommDestroy(ncclComm_t);
        ncclCommAbort(ncclComm_t);
        ncclGroupStart();
        ncclGroupEnd();
        ncclAllReduce(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
        );
        ncclReduceScatter(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
        );
        ncclAllGather(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t
        );
        ncclReduce(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t,
            cudaStream_t
        );
        ncclBroadcast(
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t
        );
    }
    unchecked {
        ncclCommGetAsyncError: fn(ncclComm_t, *mut c_uint) -> c_uint;
        ncclGetErrorString: fn(c_uint) -> *const c_char;
        ncclGetLastError: fn(ncclComm_t) -> *const c_char;
    }
}

/// NCCL's settings of a communicator as NCCL 2.18 knows them, `ncclConfig_t`. Its size differs
/// between versions, because later ones append fields: 48 bytes in 2.18, 96 in 2.30. Every NCCL
/// copies the smaller of `size` and its own size over its defaults, and then takes its defaults
/// again for the fields that are younger than `version`. So this oldest form, which says that it is
/// of 2.18, serves every version, and none reads beyond it.
///
/// What looks like an exception is none: 2.18's struct ended with four bytes of padding, and a
/// later version put its next field there, `trafficClass`. It is here too, and says "undefined".
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

const _: () = {
    assert!(size_of::<Config>() == size_of::<ncclConfig_t>() && size_of::<Config>() == 48);
    assert!(offset_of!(Config, magic) == offset_of!(ncclConfig_t, magic));
    assert!(offset_of!(Config, version) == offset_of!(ncclConfig_t, version));
    assert!(offset_of!(Config, blocking) == offset_of!(ncclConfig_t, blocking));
    assert!(offset_of!(Config, cga_cluster_size) == offset_of!(ncclConfig_t, cgaClusterSize));
    assert!(offset_of!(Config, ctas_min) == offset_of!(ncclConfig_t, minCTAs));
    assert!(offset_of!(Config, ctas_max) == offset_of!(ncclConfig_t, maxCTAs));
    assert!(offset_of!(Config, net_name) == offset_of!(ncclConfig_t, netName));
    assert!(offset_of!(Config, split_share) == offset_of!(ncclConfig_t, splitShare));
    assert!(offset_of!(Config, traffic_class) == offset_of!(ncclConfig_t, trafficClass));
    assert!(size_of::<ncclUniqueId>() == 128 && size_of::<ncclDataType_t>() == 4);
};

impl Config {
    /// A communicator whose calls return at once, with this many channels if a number is given.
    pub(crate) fn non_blocking(channels: Option<u32>) -> Config {
        /// `NCCL_CONFIG_UNDEF_INT`: NCCL takes its default.
        const UNDEFINED: c_int = c_int::MIN;
        let channels = channels.and_then(|channels| c_int::try_from(channels).ok());
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            ctas_min: channels.unwrap_or(UNDEFINED),
            ctas_max: channels.unwrap_or(UNDEFINED),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// An NCCL that was opened; it is never closed, because it keeps threads of its own.
pub(crate) struct Found {
    pub(crate) call: Functions,
    pub(crate) version: u32,
    pub(crate) path: String,
    /// Its calls that free a communicator wait for the GPU. A simulated one's do not, and are good
    /// on the calling thread alone.
    pub(crate) frees_at_once: bool,
}

impl Found {
    /// The NCCL whose functions these are; they stay for the life of the process.
    pub(crate) fn of(library: &dyn Symbols, name: &str) -> Result<Found, GpuError> {
        // The version comes first: an old NCCL lacks some functions of the table.
        // SAFETY: the type is that of the header; the caller keeps the library.
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_uint =
            unsafe { symbol(library, name, "ncclGetVersion") }?;
        let path = path_of(get_version as *const c_void).unwrap_or_else(|| name.to_owned());
        let mut version = 0;
        // SAFETY: it writes one number.
        let code = unsafe { get_version(&raw mut version) };
        let version = if code == 0 { u32::try_from(version).unwrap_or(0) } else { 0 };
        if version < VERSION_MIN {
            return Err(GpuError::NcclTooOld { path, found: version, needed: VERSION_MIN });
        }
        let call = Functions::fill(library, &path)?;
        Ok(Found { call, version, path, frees_at_once: false })
    }
}

/// Opens NCCL: the one at `path`, or else the first that is found: one that the process has
/// already, which is the framework's, or one where the dynamic linker looks, or one beside the
/// Python packages of this process.
pub(crate) fn open(path: Option<&Path>) -> Result<Found, GpuError> {
    let candidates = path.map_or_else(candidates, |path| vec![path.to_owned()]);
    let mut tried = Vec::new();
    for candidate in candidates {
        // SAFETY: the library's constructors are NVIDIA's own, and run as in any program with NCCL.
        match unsafe { Opened::open(Some(&candidate), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return fill(library.into(), &candidate),
            Err(error) => {
                let why = why(&error);
                // The linker's text names the file in most cases.
                let name = candidate.display().to_string();
                tried.push(if why.contains(&name) { why } else { format!("{name}: {why}") });
            }
        }
    }
    Err(GpuError::NcclMissing { tried: tried.join("; ") })
}

fn fill(library: Library, candidate: &Path) -> Result<Found, GpuError> {
    let found = Found::of(&library, &candidate.display().to_string())?;
    std::mem::forget(library);
    Ok(found)
}

/// What is tried, in order. The dynamic linker takes a library that the process has already by its
/// bare name, whatever folder it came from.
fn candidates() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let beside = package_folders(&maps).into_iter().map(|folder| folder.join(LIBRARY));
    std::iter::once(LIBRARY.into()).chain(beside.filter(|path| path.exists())).collect()
}

/// Folders in which NVIDIA's Python package keeps NCCL, if it is there: below each folder of
/// packages from which this process has some library, this one perhaps.
fn package_folders(maps: &str) -> BTreeSet<PathBuf> {
    let mut folders = BTreeSet::new();
    for path in maps.lines().filter_map(|line| Some(&line[line.find('/')?..])) {
        for packages in ["/site-packages/", "/dist-packages/"] {
            if let Some(at) = path.find(packages) {
                let root = &path[..at + packages.len()];
                folders.insert(Path::new(root).join("nvidia/nccl/lib"));
            }
        }
    }
    folders
}

/// The file that a function was loaded from.
fn path_of(function: *const c_void) -> Option<String> {
    // SAFETY: all its fields are pointers, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it writes the struct, and takes any address.
    if unsafe { libc::dladdr(function, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: not null, so the name of a library that stays loaded; copied at once.
    Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_by_what_is_mapped() {
        let maps = "\
7f00-7f01 r-xp 00000000 08:01 1 /opt/v/lib/python3.11/site-packages/byteps/_native.abi3.so
7f01-7f02 r-xp 00000000 08:01 2 /opt/v/lib/python3.11/site-packages/numpy/core/x.so
7f02-7f03 r-xp 00000000 08:01 3 /usr/lib/python3/dist-packages/a.so
7f03-7f04 rw-p 00000000 00:00 0 [heap]
7f04-7f05 r-xp 00000000 08:01 4 /usr/lib/libc.so.6
7f05-7f06 rw-p 00000000 00:00 0
";
        let folders: Vec<String> =
            package_folders(maps).into_iter().map(|path| path.display().to_string()).collect();
        assert_eq!(
            folders,
            [
                "/opt/v/lib/python3.11/site-packages/nvidia/nccl/lib",
                "/usr/lib/python3/dist-packages/nvidia/nccl/lib",
            ]
        );
    }

    #[test]
    fn a_path_that_is_not_there_is_named() {
        let error = open(Some(Path::new("/no/such/libnccl.so.2"))).err().expect("there is none");
        let text = error.to_string();
        assert!(matches!(error, GpuError::NcclMissing { .. }), "{text}");
        assert!(
            text.contains("/no/such/libnccl.so.2") && text.contains("BPS_NCCL_LIBRARY"),
            "{text}"
        );
    }
}
