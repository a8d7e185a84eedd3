//! A rank for tests of what happens when something ends or hangs: joins the job of its environment
//! and pushes the same tensors again and again.
//! `bps-test-rank ROUNDS [STALL_ROUND [COUNT [TENSORS [SECONDS [ENCODING]]]]]`: leaves after so
//! many rounds; stops pushing, but goes on living, at the other, unless that is 0: for so long, or
//! for good; the tensors, one unless said otherwise, have so many elements each, and may be
//! encoded. Says on standard error when it has begun and how it ended.

use bps_engine::base::{DType, Operation};
use bps_worker::error::{SettingError, Source};
use bps_worker::{Declaration, Error, PushPull, Worker};
use bps_worker::{Encoding, Members};
use std::time::Duration;

fn main() {
    let texts: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<u64> =
        texts.iter().take(5).map(|text| text.parse().expect("a number")).collect();
    let number = |at: usize, default| numbers.get(at).copied().unwrap_or(default);
    let plan = Plan {
        rounds: number(0, 1),
        stall: numbers.get(1).copied().filter(|&round| round > 0),
        count: number(2, 100_000),
        tensors: number(3, 1),
        seconds: numbers.get(4).copied(),
        encoding: texts.get(5).map(|text| text.parse().expect("an encoding")),
    };
    match work(&plan) {
        Ok(()) => eprintln!("rank ended: ok"),
        Err(error) => {
            eprintln!("rank ended: {error}");
            std::process::exit(7);
        }
    }
}

struct Plan {
    rounds: u64,
    stall: Option<u64>,
    count: u64,
    tensors: u64,
    seconds: Option<u64>,
    encoding: Option<Encoding>,
}

fn work(plan: &Plan) -> Result<(), Error> {
    let loaded = bps_engine::config::from_environment()
        .map_err(|error| SettingError::Invalid(Source::new(error)))?;
    let worker = Worker::start(&loaded.config)?;
    let declaration = |index: u64| Declaration {
        name: if index == 0 { "layer4.weight".into() } else { format!("layer4.{index}") },
        dtype: DType::F32,
        shape: plan.count.into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: plan.encoding,
        store: None,
    };
    let ids = worker.declare(&(0..plan.tensors).map(declaration).collect::<Vec<_>>())?;
    let count = usize::try_from(plan.count).expect("it fits the memory");
    // Who only declares has no tensor.
    let held = if plan.rounds > 0 { count * ids.len() } else { 0 };
    let mut values = vec![1.0f32; held];
    for round in 1..=plan.rounds {
        if plan.stall == Some(round) {
            eprintln!("rank stalls in round {round}");
            match plan.seconds {
                Some(seconds) => std::thread::sleep(Duration::from_secs(seconds)),
                // It waits for a barrier that the others do not come to.
                None => return worker.barrier(None),
            }
        }
        let item = |(tensor, values): (_, &mut [f32])| {
            let target = values.as_mut_ptr().cast::<u8>();
            PushPull { tensor, source: target.cast_const(), target, priority: 0 }
        };
        let items: Vec<PushPull> =
            ids.iter().copied().zip(values.chunks_mut(count)).map(item).collect();
        // SAFETY: `values` lives until the handles are done, and nobody touches it meanwhile.
        let handles = unsafe { worker.push_pull(&items) }?;
        for handle in &handles {
            handle.wait(None)?;
        }
        if round == 1 {
            eprintln!("rank has begun");
        }
        let expected = f64::from(worker.size());
        let far = if plan.encoding.is_some() { 0.05 } else { 0.0 };
        assert!(
            values.iter().all(|value| (f64::from(*value) - expected).abs() <= far),
            "round {round}: wrong sum"
        );
        values.fill(1.0);
        std::thread::sleep(Duration::from_millis(1));
    }
    worker.shutdown(false)
}
