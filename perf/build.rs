//! Notes the commit that this is built from: results carry it wherever the program is taken.

#![forbid(unsafe_code)]

use std::process::Command;

/// What the program is made of, seen from this package's folder.
const SOURCES: &[&str] = &["../Cargo.lock", "../engine", "../server", "../tests/src", "../worker"];

fn main() {
    let said = git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    println!("cargo:rustc-env=BPS_COMMIT={}", said.as_deref().unwrap_or("unknown"));
    // A commit changes nothing but git's own files.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]);
    for path in SOURCES.iter().copied().chain(["."]).chain(log.as_deref()) {
        println!("cargo:rerun-if-changed={path}");
    }
}

/// What git says, or nothing where this is no repository.
fn git(arguments: &[&str]) -> Option<String> {
    // Without the lock: somebody may be committing just now.
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_string();
    (output.status.success() && !said.is_empty()).then_some(said)
}
