//! A rank of a staged job: joins as every worker does, by its variables, and does rounds of
//! push_pull when told to.

use super::crew::serve;
use crate::{Outcome, sample};
use bps_engine::base::{DType, Operation};
use bps_engine::config::from_environment;
use bps_engine::transport::sim::Random;
use bps_worker::Members;
use bps_worker::{Declaration, Encoding, Handle, PushPull, TensorId, Worker};
use clap::{Arg, ArgMatches, Command, value_parser};
use std::time::{Duration, Instant};

/// A round that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(240));

/// Values of f32 that are pushed and pulled in place. They live as long as the process, so that a
/// round which ends in an error leaves no memory to the engine that is somebody else's.
pub struct Tensor {
    id: TensorId,
    values: &'static mut [f32],
    /// It was declared with an encoding: its sums are not those of the values.
    is_encoded: bool,
}

impl Tensor {
    /// Declares a tensor of so many bytes.
    pub fn declare(worker: &Worker, name: &str, bytes: usize) -> Result<Tensor, String> {
        Tensor::declare_as(worker, name, bytes, None)
    }

    /// The same, encoded.
    fn declare_as(
        worker: &Worker,
        name: &str,
        bytes: usize,
        encoding: Option<Encoding>,
    ) -> Result<Tensor, String> {
        let count = (bytes / 4).max(1);
        let declaration = Declaration {
            name: name.to_string(),
            dtype: DType::F32,
            shape: (count as u64).into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding,
            store: None,
        };
        let ids = worker.declare(&[declaration]).map_err(|error| error.to_string())?;
        let (id, values, is_encoded) = (ids[0], vec![1.0; count].leak(), encoding.is_some());
        let mut tensor = Tensor { id, values, is_encoded };
        tensor.fill();
        Ok(tensor)
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

    /// Ones; if it is encoded, values as gradients have them, since codecs look at them.
    fn fill(&mut self) {
        self.values.fill(1.0);
        if self.is_encoded {
            let mut random = Random::new(1);
            for value in self.values.iter_mut() {
                // A sum of four is near enough to a normal distribution.
                let sum: u64 = (0..4).map(|_| random.below(1 << 20)).sum();
                *value = sum as f32 / (1u32 << 20) as f32 - 2.0;
            }
        }
    }

    /// Checks that all ranks' ones were added up, and starts over.
    pub fn check(&mut self, ranks: u32) -> Result<(), String> {
        if self.is_encoded {
            let is_sum = self.values.iter().all(|value| value.is_finite());
            self.fill();
            return if is_sum { Ok(()) } else { Err("a sum is not finite".to_string()) };
        }
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
        .arg(Arg::new("encodings").num_args(0..).help("How they are encoded, in turn; or none"))
}

/// A member that answers each line, which is the number of an encoding among those that it was
/// given, with the seconds of a round, from a barrier of all ranks until
/// its last tensor has landed.
pub fn run(matches: &ArgMatches) -> Outcome {
    let size = *matches.get_one::<usize>("size").expect("required");
    let count = *matches.get_one::<u32>("tensors").expect("required");
    let worker = join()?;
    let texts = matches.get_many::<String>("encodings").into_iter().flatten();
    let texts: Vec<&str> = texts.map(String::as_str).collect();
    let texts = if texts.is_empty() { vec!["none"] } else { texts };
    let mut variants = Vec::new();
    for (number, text) in texts.into_iter().enumerate() {
        let parsed = (text != "none").then(|| text.parse::<Encoding>()).transpose();
        let encoding = parsed.map_err(|error| error.to_string())?;
        let one = |index| {
            let name = format!("tensor.{number}.{index}");
            Tensor::declare_as(&worker, &name, size / count as usize, encoding)
        };
        variants.push((0..count).map(one).collect::<Result<Vec<_>, _>>()?);
    }
    serve(|line| {
        let number: usize = line.parse().map_err(|_| format!("`{line}` is no variant"))?;
        let tensors = variants.get_mut(number).ok_or("there are not so many variants")?;
        worker.barrier(PATIENCE).map_err(|error| error.to_string())?;
        let start = Instant::now();
        let mut handles = Vec::with_capacity(tensors.len());
        for (priority, tensor) in (0i64..).zip(&mut *tensors) {
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
