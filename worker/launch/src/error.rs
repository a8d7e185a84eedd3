//! Why the launcher starts nothing, or ends at once: texts with their remedies, and exit codes.

#![forbid(unsafe_code)]

use bps_engine::base::word;
use bps_engine::config::ConfigError;
use bps_engine::topo::visible::VisibleError;
use std::ffi::OsString;

/// Why nothing was started, or why it ended at once.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}", .0.join("\nbpslaunch: error: "))]
    Missing(Vec<String>),
    #[error("{problem}; {remedy}")]
    Conflict { problem: String, remedy: String },
    #[error(transparent)]
    Gpus(#[from] VisibleError),
    #[error(
        "--gpus demand: {processes} worker processes want a GPU each, but {} visible{}; start \
         fewer, or look whether nvidia-smi shows them all", are(.visible),
        .hidden.as_ref().map(|by| format!(" ({by})")).unwrap_or_default()
    )]
    TooFewGpus { processes: usize, visible: usize, hidden: Option<String> },
    #[error("no command was given; for example: bpslaunch --local 2 python train.py")]
    NoCommand,
    #[error("cannot start {label}: '{}': {source}; {}", .program.display(), start_remedy(.source))]
    Start { label: String, program: OsString, source: std::io::Error },
    #[error("{}", .whys.join("\nbpslaunch: error: "))]
    Hosts { whys: Vec<String>, code: i32 },
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}

fn are(visible: &usize) -> String {
    format!("{} {}", gpus(*visible), if *visible == 1 { "is" } else { "are" })
}

fn start_remedy(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::NotFound => "check the name, and that it is installed",
        std::io::ErrorKind::PermissionDenied => "it must be executable (chmod +x)",
        _ => "the launcher has ended what it had started",
    }
}

impl LaunchError {
    /// What shells return for the same: 127 not found, 126 not executable, 2 wrong usage.
    pub(super) fn code(&self) -> i32 {
        match self {
            LaunchError::Config(_)
            | LaunchError::Missing(_)
            | LaunchError::Conflict { .. }
            | LaunchError::Gpus(_)
            | LaunchError::TooFewGpus { .. }
            | LaunchError::NoCommand => 2,
            LaunchError::Start { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => 127,
                std::io::ErrorKind::PermissionDenied => 126,
                _ => 1,
            },
            LaunchError::Hosts { code, .. } => *code,
            LaunchError::System { .. } => 1,
        }
    }
}

/// `1 server`, `2 servers`.
pub(super) fn counted(count: u32, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// `1 GPU`, `2 GPUs`.
pub(super) fn gpus(count: usize) -> String {
    counted(word(count), "GPU")
}
