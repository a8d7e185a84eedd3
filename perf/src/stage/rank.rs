//! A rank of a staged job: joins as every worker does, by its variables, and does rounds of
//! push_pull when told to.

use super::crew::serve;
use crate::{Outcome, sample};
use bps_engine::base::{DType, Operation};
use bps_engine::config::from_environment;
use bps_worker::Members;
use bps_worker::{Declaration, Handle, PushPull, TensorId, Worker};
use clap::{Arg, ArgMatches, Command, value_parser};
use std::time::{Duration, Instant};

/// A round that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(240));

/// Values of f32 that are pushed and pulled in place. They live as long as the process, so that a
/// round which ends in an error leaves no memory to the engine that is somebody else's.
pub struct Tensor {
    id: TensorId,
    values: &'static mut [f32],
}

impl Tensor {
    /// Declares a tensor of so many bytes.
    pub fn declare(worker: &Worker, name: &str, bytes: usize) -> Result<Tensor, String> {
        let count = (bytes / 4).max(1);
        let declaration = Declaration {
            name: name.to_string(),
            dtype: DType::F32,
            shape: (count as u64).into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
        };
        let ids = worker.declare(&[declaration]).map_err(|error| error.to_string())?;
        Ok(Tensor { id: ids[0], values: vec![1.0; count].leak() })
    }

    /// Starts a round. Larger priorities go sooner.
    ///
    /// # Safety
    /// Nobody checks or pushes the tensor until the handle is done.
    pub unsafe fn push(&mut self, worker: &Worker, priority: i64) -> Result<Handle, String> {
        let target = self.values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor: self.id, source: target.cast_const(), target, priority };
        // SAFETY: the memory is never freed, is as long as was declared, and the caller leaves it
        // alone.
        let handles = unsafe { worker.push_pull(&[item]) }.map_err(|error| error.to_string())?;
        Ok(handles.into_iter().next().expect("a handle for each item"))
    }

    /// Checks that all ranks' ones were added up, and starts over.
    pub fn check(&mut self, ranks: u32) -> Result<(), String> {
        #[allow(clippy::cast_precision_loss, reason = "few ranks")]
        let expected = ranks as f32;
        if let Some(wrong) = self.values.iter().find(|value| **value != expected) {
            return Err(format!("a wrong sum: {wrong} instead of {expected}"));
        }
        self.values.fill(1.0);
        Ok(())
    }
}

/// Joins the job that the environment names.
pub fn join() -> Result<Worker, String> {
    let loaded = from_environment().map_err(|error| error.to_string())?;
    Worker::start(&loaded.config).map_err(|error| error.to_string())
}

/// Waits for a round.
pub fn wait(handle: &Handle) -> Result<(), String> {
    match handle.wait(PATIENCE) {
        Ok(true) => Ok(()),
        Ok(false) => Err("a round took too long".to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The arguments of [`run`].
pub fn command() -> Command {
    Command::new("stage-rank")
        .about("A rank that does rounds of push_pull (used by `cluster`)")
        .hide(true)
        .arg(Arg::new("size").required(true).value_parser(sample::parse_size))
        .arg(Arg::new("tensors").required(true).value_parser(value_parser!(u32).range(1..)))
}

/// A member that answers each line with the seconds of a round, from a barrier of all ranks until
/// its last tensor has landed.
pub fn run(matches: &ArgMatches) -> Outcome {
    let size = *matches.get_one::<usize>("size").expect("required");
    let count = *matches.get_one::<u32>("tensors").expect("required");
    let worker = join()?;
    let declare =
        |index| Tensor::declare(&worker, &format!("tensor.{index}"), size / count as usize);
    let mut tensors = (0..count).map(declare).collect::<Result<Vec<_>, _>>()?;
    serve(|_| {
        worker.barrier(PATIENCE).map_err(|error| error.to_string())?;
        let start = Instant::now();
        let mut handles = Vec::with_capacity(tensors.len());
        for (priority, tensor) in (0i64..).zip(&mut tensors) {
            // SAFETY: all handles are waited for before a tensor is checked or pushed again.
            handles.push(unsafe { tensor.push(&worker, -priority) }?);
        }
        handles.iter().try_for_each(wait)?;
        let seconds = start.elapsed().as_secs_f64();
        tensors.iter_mut().try_for_each(|tensor| tensor.check(worker.size()))?;
        Ok(vec![seconds])
    })?;
    worker.shutdown(false)?;
    Ok(())
}
