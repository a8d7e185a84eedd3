//! Where the stand-in for libcuda and libnccl is, for child processes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The names under which the real libraries are opened.
const NAMES: [&str; 2] = ["libcuda.so.1", "libnccl.so.2"];

/// A folder that holds `libcuda.so.1` and `libnccl.so.2`, both the stand-in of `tests/fake_gpu`. A
/// child process that has it first in `LD_LIBRARY_PATH` sees the GPUs that `FAKE_GPU_COUNT` says.
///
/// # Panics
/// If the stand-in is not built. Cargo builds it with the tests of this crate; elsewhere it takes
/// `cargo build -p bps-fake-gpu`.
#[must_use]
pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().expect("a program knows its own path");
    let folders: Vec<&Path> = program.ancestors().skip(1).take(2).collect();
    let library = folders.iter().map(|folder| folder.join("libbps_fake_gpu.so"));
    let library = library.into_iter().find(|path| path.exists()).unwrap_or_else(|| {
        panic!("{folders:?} have no libbps_fake_gpu.so: cargo build -p bps-fake-gpu")
    });
    let folder = library.with_file_name("fake-gpu");
    std::fs::create_dir_all(&folder).expect("the folder of the build can be written");
    for name in NAMES {
        let link = folder.join(name);
        // Other tests make the same link at the same time.
        match std::os::unix::fs::symlink(&library, &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                panic!("{}: {error}", link.display())
            }
            _ => {}
        }
        assert!(link.exists(), "{} leads nowhere: remove it", link.display());
    }
    folder
}

/// Has RDMA devices take what fake GPUs export as dma-buf (`FAKE_GPU_DMA_BUF`), which no emulated
/// device does.
pub fn emulate_dma_buf() {
    if std::env::var_os("FAKE_GPU_DMA_BUF").is_some() {
        // SAFETY: the memory of fake GPUs is the host's, and stays as long as what it is of.
        unsafe { bps_engine::transport::rdma::emulate_gpu_memory() };
    }
}
