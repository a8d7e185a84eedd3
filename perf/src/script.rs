//! Python scripts that this program carries inside it, so that they are there wherever it is taken.
//!
//! Invariant: a script is a file in memory without a name; nothing of it outlives this process.

#![forbid(unsafe_code)]

use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

/// See the [module](self).
pub struct Script(File);

impl Script {
    /// Puts a script where other processes can open it while this value lives.
    pub fn new(name: &str, text: &str) -> Result<Script, String> {
        let made = memfd_create(name, MemfdFlags::CLOEXEC).map_err(std::io::Error::from);
        let written = made.map(File::from).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            Ok(file)
        });
        written.map(Script).map_err(|error| format!("no place for the script {name}: {error}"))
    }

    /// Its path.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_can_be_read_again_and_again() {
        let script = Script::new("one", "print('here')\n").expect("made");
        for _ in 0..2 {
            assert_eq!(std::fs::read_to_string(script.path()).expect("read"), "print('here')\n");
        }
    }
}
