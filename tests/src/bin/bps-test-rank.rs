//! A rank for tests of what happens when something ends or hangs: joins the job of its environment
//! and pushes one tensor again and again. `bps-test-rank ROUNDS [STALL_ROUND [COUNT]]`: leaves
//! after so many rounds; stops pushing, but goes on living, at the other, unless that is 0; the
//! tensor has so many elements. Says on standard error when it has begun and how it ended.

use bps_engine::base::{DType, Operation};
use bps_worker::{Declaration, Error, PushPull, Worker};
use std::time::Duration;

fn main() {
    let numbers: Vec<u64> =
        std::env::args().skip(1).map(|text| text.parse().expect("a number of rounds")).collect();
    let rounds = numbers.first().copied().unwrap_or(1);
    let stall = numbers.get(1).copied().filter(|&round| round > 0);
    let count = numbers.get(2).copied().unwrap_or(100_000);
    match work(rounds, stall, count) {
        Ok(()) => eprintln!("rank ended: ok"),
        Err(error) => {
            eprintln!("rank ended: {error}");
            std::process::exit(7);
        }
    }
}

fn work(rounds: u64, stall: Option<u64>, count: u64) -> Result<(), Error> {
    let loaded =
        bps_engine::config::from_environment().map_err(|error| Error::Config(error.to_string()))?;
    let worker = Worker::start(&loaded.config)?;
    let ids = worker.declare(&[Declaration {
        name: "layer4.weight".into(),
        dtype: DType::F32,
        shape: count.into(),
        operation: Operation::Sum,
        device: false,
    }])?;
    let mut values = vec![1.0f32; usize::try_from(count).expect("it fits the memory")];
    for round in 1..=rounds {
        if stall == Some(round) {
            eprintln!("rank stalls in round {round}");
            // It waits for a barrier that the others do not come to.
            return worker.barrier(None);
        }
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor: ids[0], source: target.cast_const(), target, priority: 0 };
        // SAFETY: `values` lives until the handle is done, and nobody touches it meanwhile.
        let handles = unsafe { worker.push_pull(&[item]) }?;
        handles[0].wait(None)?;
        if round == 1 {
            eprintln!("rank has begun");
        }
        let expected = f64::from(worker.size());
        assert!(
            values.iter().all(|value| f64::from(*value) == expected),
            "round {round}: wrong sum"
        );
        values.fill(1.0);
        std::thread::sleep(Duration::from_millis(1));
    }
    worker.shutdown(false)
}
