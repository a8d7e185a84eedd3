//! A rank that sums and compares, for jobs in which something goes wrong.

use bps_engine::base::{DType, Operation};
use bps_worker::{Declaration, Error, Members, PushPull, Worker};
use std::time::Duration;

const PATIENCE: Option<Duration> = Some(Duration::from_secs(30));
/// Elements of the tensor: several parts.
const COUNT: usize = 300_000;
/// Rounds that a rank sums.
pub const ROUNDS: u64 = 6;

/// What a rank saw.
#[derive(Debug)]
pub struct Seen {
    /// Rounds whose sum was right.
    pub right: u64,
    /// A sum that was not.
    pub wrong: bool,
    /// How it ended, if badly.
    pub error: Option<Error>,
}

/// A rank that sums until something is wrong. Every value of its tensor is below 64, in a row that
/// repeats.
#[must_use]
pub fn sums(worker: &Worker) -> Seen {
    let mut seen = Seen { right: 0, wrong: false, error: None };
    let done = try_sums(worker, &mut seen).and_then(|()| worker.shutdown(false));
    seen.error = done.err();
    seen
}

fn try_sums(worker: &Worker, seen: &mut Seen) -> Result<(), Error> {
    let declaration = Declaration {
        name: "gradient".into(),
        dtype: DType::F32,
        shape: (COUNT as u64).into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let tensor = worker.declare(&[declaration])?[0];
    for round in 0..ROUNDS {
        let mut values: Vec<f32> = (0..64).cycle().take(COUNT).map(|at: u8| at.into()).collect();
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
        // SAFETY: the values stay until the handle is done: a wait that fails has ended as well.
        let handles = unsafe { worker.push_pull(&[item]) }?;
        assert!(handles[0].wait(PATIENCE)?, "round {round} hangs");
        let expected = (0..64).cycle().map(|at: u8| 2.0 * f32::from(at));
        if values.iter().copied().zip(expected).any(|(value, expected)| value != expected) {
            seen.wrong = true;
        } else {
            seen.right += 1;
        }
    }
    Ok(())
}
