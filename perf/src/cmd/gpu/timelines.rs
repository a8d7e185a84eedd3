//! Timelines of what was measured: the same work once more, while ranks and servers record it.
//!
//! Invariant: nothing is recorded while something is timed.

use super::Run;
use super::hosts::Hosts;
use std::path::PathBuf;
use std::process::Command;

/// See the [module](self).
pub struct Timelines {
    folder: Option<PathBuf>,
    python: PathBuf,
    recorded: Vec<PathBuf>,
}

impl Timelines {
    /// Makes the folder of a run that is to have timelines.
    pub fn new(run: &Run) -> Result<Timelines, String> {
        let (folder, python) = (run.timelines.clone(), run.python.clone());
        if let Some(folder) = &folder {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("--trace {}: {error}", folder.display()))?;
        }
        Ok(Timelines { folder, python, recorded: Vec::new() })
    }

    /// Has all ranks do it, and records that in a folder of its own, if anything is to be recorded.
    pub fn record(
        &mut self,
        hosts: &mut Hosts,
        rate_bits: u64,
        name: &str,
        order: &str,
    ) -> Result<(), String> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let name = format!("{name}-{}mbit", rate_bits / 1_000_000);
        hosts.work(&format!("record {name}"))?;
        hosts.work(order)?;
        hosts.work("stop")?;
        self.recorded.push(folder.join(name));
        Ok(())
    }

    /// Makes one file of each timeline and says where it is. To be called when the servers have
    /// ended: they hear later than the ranks that a timeline is over.
    pub fn merge(&self) -> Result<(), String> {
        for folder in &self.recorded {
            let mut command = Command::new(&self.python);
            command.args(["-m", "byteps.timeline", "merge"]).arg(folder);
            let output = command.output().map_err(|error| error.to_string())?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).trim().to_string());
            }
            // Beside the results, which programs read.
            eprint!("timeline: {}", String::from_utf8_lossy(&output.stdout));
        }
        Ok(())
    }
}
