//! A rank of a staged job that keeps a bulk of bytes ready to go, and times urgent tensors that it
//! pushes behind it at random moments.

use super::crew::serve;
use super::rank::{Tensor, join, wait};
use crate::{Outcome, sample};
use bps_worker::{Handle, Worker};
use clap::{Arg, ArgMatches, Command, value_parser};
use std::time::{Duration, Instant};

/// Tensors of the bulk, as a model has many.
const BULK_TENSORS: usize = 16;
/// Longest pause before an urgent push, milliseconds.
const PAUSE_MS_MAX: u64 = 150;
/// Priorities: larger goes sooner.
const BULK: i64 = 0;
const URGENT: i64 = 1000;

/// The arguments of [`run`].
pub fn command() -> Command {
    let size = |name: &'static str| Arg::new(name).required(true).value_parser(sample::parse_size);
    Command::new("stage-overtake")
        .about("A rank that pushes urgent tensors behind bulk (used by `priority`)")
        .hide(true)
        .arg(size("bulk"))
        .arg(size("urgent"))
        .arg(Arg::new("seed").required(true).value_parser(value_parser!(u64)))
}

/// A member that answers each line with the seconds of a bulk, followed by the seconds of each
/// urgent push while the bulk was under way.
pub fn run(matches: &ArgMatches) -> Outcome {
    let size = |name: &str| *matches.get_one::<usize>(name).expect("required");
    let worker = join()?;
    let declare =
        |index| Tensor::declare(&worker, &format!("bulk.{index}"), size("bulk") / BULK_TENSORS);
    let mut bulk = (0..BULK_TENSORS).map(declare).collect::<Result<Vec<_>, _>>()?;
    let mut urgent = Tensor::declare(&worker, "urgent", size("urgent"))?;
    // All ranks draw the same moments, so that none waits for another's.
    let mut random = *matches.get_one::<u64>("seed").expect("required");
    serve(|_| overtake(&worker, &mut bulk, &mut urgent, &mut random))?;
    worker.shutdown(false)?;
    Ok(())
}

fn overtake(
    worker: &Worker,
    bulk: &mut [Tensor],
    urgent: &mut Tensor,
    random: &mut u64,
) -> Result<Vec<f64>, String> {
    worker.barrier(Some(Duration::from_secs(60))).map_err(|error| error.to_string())?;
    let start = Instant::now();
    // SAFETY: all handles are waited for below, before a tensor is checked or pushed again.
    let push = |tensor: &mut Tensor| unsafe { tensor.push(worker, BULK) };
    let handles: Vec<Handle> = bulk.iter_mut().map(push).collect::<Result<_, _>>()?;
    let last = handles.last().expect("the bulk has tensors");
    let mut seconds = Vec::new();
    loop {
        std::thread::sleep(Duration::from_millis(next(random) % PAUSE_MS_MAX));
        if last.poll() {
            break;
        }
        let begin = Instant::now();
        // SAFETY: waited for before anything else happens to the tensor.
        let handle = unsafe { urgent.push(worker, URGENT) }?;
        wait(&handle)?;
        let took = begin.elapsed().as_secs_f64();
        urgent.check(worker.size())?;
        // If the bulk was through before it, it may have had the line to itself.
        if last.poll() {
            break;
        }
        seconds.push(took);
    }
    handles.iter().try_for_each(wait)?;
    seconds.insert(0, start.elapsed().as_secs_f64());
    bulk.iter_mut().try_for_each(|tensor| tensor.check(worker.size()))?;
    Ok(seconds)
}

/// A small generator of numbers: moments need no better one.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}
